"""Trainings of tiny models on a few pages of text, through the engine itself."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

import hf_posswap
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.config import Recipe, make_recipe
from hf_posswap.training.config.reading import merge, override
from hf_posswap.training.engine import Finished, Services, run_recipe
from tests.training.tiny_models import tiny

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_texts(folder: Path, count: int = 8, words: int = 150) -> Path:
    """Write `count` texts of some regularity, so that a tiny model learns from them, and return their folder."""
    folder.mkdir(parents=True)
    for number in range(count):
        text = " ".join(WORDS[(number + position * (1 + number % 3)) % len(WORDS)] for position in range(words))
        (folder / f"{number}.txt").write_text(text)
    return folder


def write_model(folder: Path, kind: str = "gpt2", **options: Any) -> Path:
    """Save a tiny model of `kind` and a byte-level tokenizer in `folder`, and return it."""
    tokenizer = byte_tokenizer()
    if kind == "bert":
        tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    return hf_posswap.save(tiny(kind, **options), folder, tokenizer=tokenizer)


def cached_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Put two revisions of org/model, v1 and main, into a cache of the Hub in `folder`, and return their tokenizers."""
    first, newest = byte_tokenizer(), byte_tokenizer()
    newest.add_tokens([*WORDS])
    for name, tokenizer in (("v1", first), ("main", newest)):
        commit = hashlib.sha1(name.encode()).hexdigest()
        snapshot = folder / "models--org--model" / "snapshots" / commit
        tokenizer.save_pretrained(snapshot)
        (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
        reference = folder / "models--org--model" / "refs" / name
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return first, newest


def recipe(place: Path, *settings: str, kind: str = "gpt2", **values: Any) -> Recipe:
    """Return a recipe for a tiny model and texts below `place`, with `values` and then `settings` put in.

    Args:
        place: where model, texts and tokens are made, once, and the run goes to.
        settings: as on the command line.
        kind: of the model.
        values: as in a YAML file.
    """
    if not (place / kind).exists():
        write_model(place / kind, kind)
    if not (place / "texts").exists():
        write_texts(place / "texts")
    base = {
        "model": {"name": str(place / kind)},
        "swap": {"scheme": {"name": "rope"}, "max_length": 256},
        "data": {
            "sources": [{"path": str(place / "texts")}],
            "length": 32,
            "cache": str(place / "cache"),
            "held_out": 0.3,
        },
        "training": {
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "warmup_steps": 2,
            "adam_beta2": 0.95,
            "save_steps": 3,
            "logging_steps": 1,
            "report_to": "none",
            "seed": 0,
        },
        "out": str(place / "run"),
    }
    return make_recipe(override(merge(base, values), settings))


def trained(place: Path, *settings: str, services: Services | None = None, **values: Any) -> Finished:
    """Run `recipe(...)` and return what it gave."""
    return run_recipe(recipe(place, *settings, **values), services)


def weights_of(finished: Finished) -> dict[str, torch.Tensor]:
    """Return the tensors of the finished model, or of its adapter."""
    (file,) = finished.model.glob("*model.safetensors")
    return load_file(file)


def assert_same_weights(one: Finished, other: Finished) -> None:
    """Check that two trainings ended with the same weights, bit for bit."""
    left, right = weights_of(one), weights_of(other)
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert differing == []
