"""Threads that patch, load and build models at the same time, in a process of their own; prints what came out wrong.

It takes no tied weights: stock `from_pretrained` in threads leaves those untied, in the whole process.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_posswap

THREADS, ROUNDS = 8, 1
GPT2 = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16, tie_word_embeddings=False)
LLAMA = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=8, vocab_size=11,
    max_position_embeddings=16, tie_word_embeddings=False,
)  # fmt: skip


def differences(model: Any, expected: Any) -> list[str]:
    """Return the names of the weights of `model` that are not those of `expected`."""
    found, wanted = model.state_dict(), expected.state_dict()
    if type(model) is not type(expected):
        return [f"type {type(model)} is not {type(expected)}"]
    return [name for name in {*found, *wanted} if not torch.equal(found[name], wanted[name])]


def unfilled(model: Any) -> list[str]:
    """Return the names of the weights of a new `model` that nobody filled."""
    return [name for name, weight in model.named_parameters() if not weight.isfinite().all()]


def main(folder: Path) -> list[str]:
    torch.use_deterministic_algorithms(True)  # memory that nobody has filled is not a number
    sys.setswitchinterval(1e-5)
    stock, base = LlamaForCausalLM(LLAMA), GPT2LMHeadModel(GPT2)
    longer = hf_posswap.patch_model(copy.deepcopy(base), "alibi", max_length=32)
    yarn = hf_posswap.patch_model(copy.deepcopy(stock), "yarn", factor=4.0)
    for name, model in (("stock", stock), ("alibi", longer), ("yarn", yarn)):
        model.save_pretrained(folder / name)
    work = {
        "patch": lambda: differences(hf_posswap.patch_model(copy.deepcopy(base), "alibi", max_length=32), longer),
        "load alibi": lambda: differences(hf_posswap.load(folder / "alibi"), longer),
        "load yarn": lambda: differences(hf_posswap.load(folder / "yarn"), yarn),
        "load stock": lambda: differences(LlamaForCausalLM.from_pretrained(folder / "stock"), stock),
        "build stock": lambda: unfilled(LlamaForCausalLM(LLAMA)),
    }

    def told(name: str) -> list[str]:
        try:
            return [f"{name}: {wrong}" for wrong in work[name]()]
        except Exception as error:
            return [f"{name}: {type(error).__name__}: {error}"]

    with ThreadPoolExecutor(THREADS) as threads:
        wrong = sum(threads.map(told, [*work] * THREADS * ROUNDS), [])
    wrong += [f"afterwards: {name}" for name in unfilled(LlamaForCausalLM(LLAMA))]
    for function in ("normal_", "kaiming_uniform_"):
        if getattr(torch.nn.init, function).__qualname__ != function:
            wrong.append(f"torch.nn.init.{function} is another function")
    if PreTrainedModel.init_weights.__qualname__ != "PreTrainedModel.init_weights":
        wrong.append("PreTrainedModel.init_weights is another function")
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(json.dumps(main(Path(name))))
