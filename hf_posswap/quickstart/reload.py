"""Check of a saved checkpoint: equal logits in a fresh process, and a text past the window."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import hf_posswap
from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import scratch_folder
from hf_posswap.utils.auto_classes import TRUST, auto_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-4
_PROBED = 8


def probe_logits(model: PreTrainedModel, prompt: np.ndarray) -> np.ndarray:
    """Return the logits of `model` at the last tokens of `prompt` [L], float32 [up to 8, V]."""
    ids = torch.from_numpy(prompt[None].astype(np.int64)).to(model.device)
    with torch.inference_mode():
        return model(ids).logits[0, -_PROBED:].float().cpu().numpy()


def check_reload(
    folder: Path,
    prompt: np.ndarray,
    *,
    new_tokens: int,
    seed: int,
    device: torch.device,
    trust_remote_code: bool = False,
    expected: np.ndarray | None = None,
) -> dict[str, object]:
    """Load `folder` in a fresh process, compare its logits with those of this process, and continue `prompt` there.

    Args:
        folder: the checkpoint.
        prompt: token ids [L].
        new_tokens: number of tokens to generate.
        seed: random seed of the sampling.
        device: the device to load it on.
        trust_remote_code: run code in the checkpoint, which was saved from the base.
        expected: the model's `probe_logits`; None: load it in this process, too.

    Returns:
        The largest difference of the logits, the prompt's length, the new tokens and their text.

    Raises:
        CheckpointError: the fresh process fails, or its logits differ.
    """
    if expected is None:
        expected = probe_logits(_loaded(folder, device, trust_remote_code), prompt)
    task = {"folder": str(folder), "prompt": prompt.tolist(), "new_tokens": new_tokens, "seed": seed}
    task[TRUST] = trust_remote_code
    with scratch_folder() as scratch:
        task |= {"logits": str(scratch / "logits.npy"), "answer": str(scratch / "answer.json")}
        _run_fresh(task | {"device": str(device)})
        actual = np.load(task["logits"])
        answer = json.loads(Path(task["answer"]).read_text(encoding="utf-8"))
    difference = float(np.abs(expected - actual).max())
    if not difference <= _TOLERANCE:  # NaN fails too
        raise CheckpointError(
            f"{folder} loaded in a fresh process gives other logits than the model that was measured (difference "
            f"{difference:.3g}): the checkpoint is not the model. Please report this with the folder's config.json."
        )
    return {"max_logit_difference": difference, "prompt_tokens": len(prompt), **answer}


def run_task(text: str) -> None:
    """Run the task in the JSON `text`, in the process that `check_reload` starts."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task = json.loads(text)
    model = _loaded(Path(task["folder"]), torch.device(task["device"]), task[TRUST])
    tokenizer = auto_tokenizer(task["folder"], trust_remote_code=task[TRUST])
    prompt = torch.tensor([task["prompt"]], device=model.device)  # [1, L]
    torch.manual_seed(task["seed"])
    np.save(task["logits"], probe_logits(model, np.array(task["prompt"])))
    with torch.inference_mode():
        generated = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=task["new_tokens"],
            min_new_tokens=task["new_tokens"],
            do_sample=True,
            temperature=0.7,
            top_k=20,
            pad_token_id=tokenizer.eos_token_id,
        )
    new = generated[0, prompt.shape[1] :].tolist()
    answer = {
        "new_tokens": len(new),
        "prompt_end": tokenizer.decode(task["prompt"][-80:]),
        "text": tokenizer.decode(new),
    }
    Path(task["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def _loaded(folder: Path, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    model = hf_posswap.load(folder, trust_remote_code=trust_remote_code)
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper loses the signature
    return model.eval()


def _run_fresh(task: dict[str, object]) -> None:
    package = str(Path(hf_posswap.__file__).resolve().parents[1])  # so that it is found without installation
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    code = "import sys; from hf_posswap.quickstart.reload import run_task; run_task(sys.stdin.read())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(task),
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CheckpointError(f"{task['folder']} cannot be used in a fresh process: {last}")
