"""`swap.relative`: what becomes of DeBERTa's relative positions in a training is what `patch_model` does of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_posswap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.training import byte_tokenizer
from tests.training.engine_runs import trained


def write_deberta(folder: Path) -> Path:
    """Write a tiny DeBERTa with relative positions, and a byte-level tokenizer, and return its folder."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    size: dict[str, Any] = {"vocab_size": 300, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    model = tiny_model("deberta", meta=False, pad_token_id=tokenizer.pad_token_id, **size)
    return hf_posswap.save(model, folder, tokenizer=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("relative", ["keep", "drop"])
def test_the_trained_model_has_what_was_chosen(tmp_path: Path, relative: str) -> None:
    write_deberta(tmp_path / "deberta")
    settings = ("objective.kind=masked", "swap.scheme=rope", f"swap.relative={relative}", "training.max_steps=1")
    done = trained(tmp_path, *settings, "training.warmup_steps=0", kind="deberta")
    model = hf_posswap.load(done.model)
    assert model.config.posswap["relative"] == relative
    assert model.config.relative_attention == (relative == "keep")


def test_other_models_take_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSwapError, match="relative='drop' is for models with relative positions"):
        trained(tmp_path, "swap.relative=drop")
