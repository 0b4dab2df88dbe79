"""The rotary functions of the transformers that is installed, against what they should compute."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import LlamaConfig

from hf_posswap.compat import transformers_rotary


def test_rope_function() -> None:
    parameters = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=parameters)
    found, factor = transformers_rotary.rope_function("linear")(config, "cpu")
    torch.testing.assert_close(found, 100.0 ** -(torch.arange(0, 8, 2) / 8) / 4)
    assert factor == 1.0
    for name in ("dynamic", "yarn", "longrope", "llama3", "proportional"):
        assert callable(transformers_rotary.rope_function(name))
    with pytest.raises(KeyError):
        transformers_rotary.rope_function("no such type")


@pytest.mark.parametrize(
    ("kind", "turned"),
    [
        ("llama", [-3, -4, 1, 2]),  # rotate_half, of halves
        ("glm", [-2, 1, -4, 3]),  # rotate_half, of neighbours
        ("llama4", [-2, 1, -4, 3]),  # apply_rotary_emb, complex
        ("gpt_oss", [-3, -4, 1, 2]),  # _apply_rotary_emb
    ],
)
def test_quarter_turn(kind: str, turned: list[int]) -> None:
    code = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    found = transformers_rotary.quarter_turn(code, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert found is not None
    assert found.flatten().tolist() == turned


def test_quarter_turn_of_code_without_rotation() -> None:
    from transformers.models.bert import modeling_bert

    assert transformers_rotary.quarter_turn(modeling_bert, torch.zeros(1, 4)) is None
