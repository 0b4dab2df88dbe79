"""What compat knows of DeepSpeed, against transformers, and against DeepSpeed itself where it is installed."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config

from hf_posswap.compat.transformers_deepspeed import is_deepspeed_engine, load_whole


class Sharding:
    """What a Trainer leaves behind under ZeRO-3."""

    def is_zero3(self) -> bool:
        return True


def test_load_whole() -> None:
    left = Sharding()
    set_hf_deepspeed_config(left)
    assert is_deepspeed_zero3_enabled()
    load_whole()
    assert not is_deepspeed_zero3_enabled()


def test_is_deepspeed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_deepspeed_engine(nn.Linear(2, 2))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    assert not is_deepspeed_engine(nn.Linear(2, 2))
    assert is_deepspeed_engine(deepspeed.DeepSpeedEngine.__new__(deepspeed.DeepSpeedEngine))
