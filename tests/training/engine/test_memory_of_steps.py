"""The memory announced before a training against a dry run of it, both on tensors without values."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_posswap.training.config import make_recipe
from hf_posswap.training.dryrun import dry_run
from hf_posswap.training.dryrun.modelling import fake_model
from hf_posswap.training.dryrun.unreal import FakeStep, as_on_gpu
from hf_posswap.training.engine import memory
from hf_posswap.training.engine.memory import saved_bytes, training_need
from hf_posswap.training.engine.parallel import launch_of
from tests.training.tiny_models import tiny

SIZES = {"tiny": (64, 176, 3, 4, 2, 1000), "middle": (256, 704, 6, 8, 2, 16000)}
BF16 = {"bf16": True}
CHECKPOINTING = {"gradient_checkpointing": True}
LORA = {"peft": {"peft_type": "LORA", "r": 8}}
STATES = {"objective": {"kind": "distill", "distill": {"states": 1.0}}}
Case = tuple[str, int, int, dict[str, Any], dict[str, Any]]
"""Size, rows, length, settings of training, other settings."""
FAST: list[Case] = [
    ("tiny", 8, 256, BF16, {}),
    ("tiny", 1, 128, {}, STATES),
    ("tiny", 4, 1024, BF16 | CHECKPOINTING, LORA),
]
SLOW: list[Case] = [
    ("middle", 4, 512, {}, {}),
    ("middle", 4, 512, BF16, {}),
    ("middle", 8, 512, BF16, {"objective": {"chunk": 128}}),
    ("middle", 2, 512, BF16, {"objective": {"chunk": 0}}),
    ("middle", 4, 512, BF16 | CHECKPOINTING, {}),
    ("middle", 2, 4096, CHECKPOINTING, {"objective": {"chunk": 256}}),
    ("middle", 2, 4096, BF16 | CHECKPOINTING, LORA | {"objective": {"chunk": 256}}),
    ("middle", 4, 512, {}, LORA),
    ("middle", 4, 512, BF16, LORA),
    ("middle", 4, 512, BF16, {"objective": {"kind": "distill"}}),
    ("middle", 4, 512, BF16, STATES),
    ("middle", 4, 512, BF16 | CHECKPOINTING, STATES),
    ("middle", 1, 64, BF16, {}),
    ("middle", 1, 64, BF16 | {"gradient_accumulation_steps": 4}, {}),
    ("tiny", 4, 2048, CHECKPOINTING, {}),
    ("tiny", 4, 2048, BF16, STATES),
]


def _config(folder: Path, kind: str, size: str) -> Path:
    hidden, inner, layers, heads, groups, words = SIZES[size]
    shape = {"vocab_size": words, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config: Any = GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, n_positions=4096, **shape)
        config.architectures = ["GPT2LMHeadModel"]
    else:
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        config = LlamaConfig(
            num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=4096,
            tie_word_embeddings=kind == "tied", **sizes, **shape,
        )  # fmt: skip
        config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / kind)
    return folder / kind


def _ratio(folder: Path, kind: str, case: Case) -> float:
    """Return the announced memory over the dry run's, both as on a GPU."""
    size, rows, length, training, more = case
    recipe = make_recipe(
        {
            "model": {"name": str(_config(folder, kind, size))},
            "swap": {"scheme": "rope"},
            "data": {"length": length},
            "training": {"per_device_train_batch_size": rows} | training,
        }
        | more
    )
    fake = fake_model(recipe, launch_of(recipe))
    with ExitStack() as stack:
        stack.enter_context(as_on_gpu())
        stack.enter_context(FakeStep(fake.mode))
        need = training_need(
            fake.model, recipe, launch_of(recipe), biased=(), chunk=recipe.objective.chunk, teacher=fake.teacher
        )
    return need.total / dry_run(recipe).predictions[0].peak


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "on_cpu", lambda recipe: False)


@pytest.mark.parametrize("kind", ["gpt2", "tied"])
def test_tiny_trainings_are_announced_as_a_dry_run_predicts_them(tmp_path: Path, kind: str) -> None:
    ratios = {str(case): round(_ratio(tmp_path, kind, case), 3) for case in FAST}
    assert {case: ratio for case, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == {}, ratios


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["gpt2", "tied", "untied"])
def test_a_grid_of_trainings_is_announced_as_a_dry_run_predicts_it(tmp_path: Path, kind: str) -> None:
    ratios = {str(case): round(_ratio(tmp_path, kind, case), 3) for case in SLOW}
    assert {case: ratio for case, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == {}, ratios


def test_the_bytes_of_a_known_function_are_counted() -> None:
    """Each matrix keeps its input, 8 and 24 numbers a token; the states are 8. Of weights only copies are counted."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)

        def forward(self, input_ids: Tensor, **kwargs: object) -> BaseModelOutputWithPast:
            return BaseModelOutputWithPast(self.down(self.up(self.table(input_ids))))

    model = tiny("llama")
    model.model, model.lm_head = Body(), nn.Linear(8, 11)
    ids = 8  # bytes of a token, which the table keeps
    plain = saved_bytes(model, 64, autocast=None, on_gpu=False)
    assert (plain.token, plain.pair, plain.widest, plain.fixed) == (4 * (8 + 24 + 8) + ids, 0, 4 * 24, 0)
    half = saved_bytes(model, 64, autocast=torch.bfloat16, on_gpu=False)
    assert (half.token, half.fixed) == (2 * (8 + 24 + 8) + ids, 2 * (2 * 8 * 24))


def test_scores_are_counted_per_pair_and_training_draws_the_same_numbers() -> None:
    model = tiny("gpt2", "eager")
    torch.manual_seed(5)
    before, wanted = torch.get_rng_state(), {name: p.clone() for name, p in model.named_parameters()}
    saved = saved_bytes(model, 64, autocast=None, on_gpu=False)
    # chances, what dropout leaves of them, and its mask, which a CPU keeps in float32: 2 layers of 4 heads
    assert saved.pair == 2 * 4 * (4 + 4 + 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(torch.equal(p, wanted[name]) and p.grad is None for name, p in model.named_parameters())


def test_a_table_of_few_positions_is_not_exceeded() -> None:
    short, long = tiny("gpt2", n_positions=8), tiny("gpt2", n_positions=64)
    few, many = (saved_bytes(model, n, autocast=None, on_gpu=False) for model, n in ((short, 8), (long, 64)))
    assert few.token == pytest.approx(many.token, rel=0.02)
