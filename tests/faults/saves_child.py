"""Runs in a process of its own: saves over a checkpoint, again and again, in children that it kills.

    python saves_child.py FOLDER TRIALS exchange|aside

Prints, as JSON, what each killed save left: "old", "new" or what else.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402

import hf_posswap  # noqa: E402
from hf_posswap.utils import atomic_io as files  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
ROOT, TRIALS = Path(sys.argv[1]), int(sys.argv[2])
TARGET = ROOT / "checkpoint"
if sys.argv[3] == "aside":  # as where no system call exchanges folders
    files._exchange = lambda one, other: False
CALLS = [(os, "rename"), (os, "replace"), (files.shutil, "rmtree"), (files, "_exchange")]


def made(scheme: str) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=1000, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    hf_posswap.patch_model(model, scheme, max_length=64)
    return model


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def die_at(call: int, before: bool) -> None:
    """Let this process kill itself before or after its `call`-th renaming or removing."""
    seen = 0

    def deadly(real: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for module, name in CALLS:
        setattr(module, name, deadly(getattr(module, name)))


def killed(model: Any, delay: float | None, call: int = 0, before: bool = True) -> bool:
    """Save `model` in a child that is killed after `delay` seconds, or at a call; return whether it was in time."""
    child = os.fork()
    if child == 0:
        if delay is None:
            die_at(call, before)
        hf_posswap.save(model, TARGET, overwrite=True)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def state(old: dict[str, bytes], new: dict[str, bytes]) -> str:
    if TARGET.exists():
        plain = content(TARGET)
        if plain not in (old, new):
            return f"a mix of {sorted(plain)}"
    loaded: Any = hf_posswap.load(TARGET)  # where folders cannot be exchanged, it puts the old one back
    found = content(TARGET)
    scheme = json.loads(found["config.json"])["posswap"]["scheme"]["name"]
    assert loaded.config.posswap["scheme"]["name"] == scheme
    return "old" if found == old else "new" if found == new else f"a mix of {sorted(found)}"


def main() -> None:
    models = [made("rope"), made("alibi")]
    references = [content(hf_posswap.save(model, ROOT / f"reference-{i}")) for i, model in enumerate(models)]
    began = time.perf_counter()
    hf_posswap.save(models[0], TARGET)
    hf_posswap.save(models[0], TARGET, overwrite=True)
    lasts = (time.perf_counter() - began) / 2
    chance, found = random.Random(0), []
    plans: list[dict[str, Any]] = [{"delay": chance.uniform(0.1, 1.3) * lasts} for _ in range(TRIALS)]
    plans += [{"delay": None, "call": call, "before": before} for call in range(1, 6) for before in (True, False)]
    for number, plan in enumerate(plans):
        hf_posswap.save(models[0], TARGET, overwrite=True)
        in_time = killed(models[1], **plan)
        found.append({"random": number < TRIALS, "killed": in_time, "left": state(*references)})
    hf_posswap.save(models[0], TARGET, overwrite=True)
    sys.stdout.write("\n" + json.dumps({"found": found, "beside": sorted(path.name for path in ROOT.iterdir())}))


main()
