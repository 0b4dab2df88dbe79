"""Runs in a process of its own: one act on a folder, and what came of it as one line of JSON.

    python faults_child.py save|compare|store|text|use FOLDER SEED [ready]

With "ready" it says so and waits for a line, so that another can stop it or begin at the same moment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import hf_posswap  # noqa: E402
from hf_posswap.comparison import EvalSettings, compare  # noqa: E402
from hf_posswap.errors import PosswapError  # noqa: E402
from hf_posswap.evaluation.store import RunStore  # noqa: E402
from hf_posswap.training import byte_tokenizer  # noqa: E402
from hf_posswap.training.fresh import FreshSettings, fresh_tokenizer  # noqa: E402
from hf_posswap.utils.atomic_io import write_text  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
TEXTS = [f"{number}: " + " ".join(str((number * 7 + i) ** 2) for i in range(60)) for number in range(9)]


def model(seed: int, width: int = 16, vocabulary: int = 257) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=width, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def save(folder: Path, seed: int) -> Any:
    swapped = model(seed, 128)
    hf_posswap.patch_model(swapped, "alibi" if seed % 2 else "rope", max_length=128)
    hf_posswap.save(swapped, folder / "model", overwrite=True)


def compare_two(folder: Path, seed: int) -> Any:
    settings = EvalSettings(lengths=(32, 64), metrics=("ppl_prefix", "nll_pos", "passkey"), trials=2, depths=(0.0, 1.0))
    models = [hf_posswap.comparison.Candidate(model(0), name="base"), hf_posswap.comparison.Candidate(model(0), "rope")]
    done = compare(
        models, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, out=folder / "out", pictures=False
    )
    return {"computed": done.computed}


def store(folder: Path, seed: int) -> Any:
    with RunStore(folder / "store") as kept:
        for number in range(60):
            kept.value({"unit": number}, lambda n=number: np.random.default_rng(n).normal(size=4000))
        return {"computed": kept.computed}


def text(folder: Path, seed: int) -> Any:
    for _ in range(50):
        write_text(folder / "a.txt", str(seed) * 20_000)


def use(folder: Path, seed: int) -> Any:
    """What a user does from a model to its export and its measurements."""
    swapped = hf_posswap.patch_model(model(seed, vocabulary=300), "sinusoidal", max_length=128)
    hf_posswap.verify_swap(swapped)
    swapped.save_pretrained(folder / "shards", max_shard_size="1KB")
    hf_posswap.load(folder / "shards")
    tokenizer = fresh_tokenizer(FreshSettings("gpt2", vocabulary=300), TEXTS)  # llama.cpp takes none without merges
    hf_posswap.save(swapped, folder / "model", tokenizer=tokenizer)
    hf_posswap.export(folder / "model", "llamacpp", folder / "model.gguf")
    hf_posswap.export(folder / "model", "torch", folder / "model.pt2")
    if not hf_posswap.check(folder / "model").ok:
        raise AssertionError("the model that was saved is none")
    hf_posswap.fit_bias(model(seed), "alibi", torch.randint(0, 250, (2, 64)))
    compare_two(folder, seed)
    hf_posswap.load(folder / "model.gguf")  # the only one that needs a cache


ACTS: dict[str, Callable[[Path, int], Any]] = {
    "save": save,
    "compare": compare_two,
    "store": store,
    "text": text,
    "use": use,
}


def main() -> None:
    act, folder, seed = ACTS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
    if "ready" in sys.argv:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
    try:
        answer = {"value": act(folder, seed)}
    except PosswapError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


main()
