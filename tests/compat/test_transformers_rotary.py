"""The rotary functions of the transformers that is installed, against what they should compute."""

from __future__ import annotations

import importlib
import sys
import threading

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig

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


def test_runs_longrope_by_layer_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a model of two layer types that reads two texts beyond its original length."""
    lists = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
             "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # fmt: skip
    config = Gemma3TextConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=30,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], max_position_embeddings=32,
        rope_parameters={"full_attention": lists, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    )  # fmt: skip
    model, runs = Gemma3ForCausalLM(config).eval(), True
    try:
        for _ in range(2):
            model(torch.arange(20)[None])
    except UnboundLocalError:
        runs = False
    assert transformers_rotary.runs_longrope_by_layer_type() == runs
    for version, expected in (("5.20.2", False), ("5.21.0", True), ("5.21.0.dev0", True), ("6.0.0", True)):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # which replaces itself
        assert transformers_rotary.runs_longrope_by_layer_type() == expected


def test_of_any_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in its block, and only in the thread that opened it."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.20.2")
    found: list[bool] = []
    with transformers_rotary.of_any_release():
        thread = threading.Thread(target=lambda: found.append(transformers_rotary.runs_longrope_by_layer_type()))
        thread.start()
        thread.join()
        found.append(transformers_rotary.runs_longrope_by_layer_type())
    found.append(transformers_rotary.runs_longrope_by_layer_type())
    assert found == [False, True, False]


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
