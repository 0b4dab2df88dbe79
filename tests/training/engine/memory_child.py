"""Trains tiny models for two steps each and prints what they held at most, and what was estimated, in bytes."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posswap
from hf_posswap.training.chunked_loss import causal_loss
from hf_posswap.training.config import make_recipe
from hf_posswap.training.distill import Teacher, distillation_loss, make_teacher
from hf_posswap.training.engine.memory import training_need
from hf_posswap.training.engine.objectives import whole_loss
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.training.trainable import prepare_trainable

WIDTH, WORDS = 256, 6000


def model_of(kind: str, length: int) -> Any:
    shape = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        model: Any = GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=4, n_head=4, n_positions=256, **shape, **none))
    else:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=256, **sizes, **shape))
    hf_posswap.patch_model(model, "rope", max_length=max(512, length))
    return model.train()


def measure(kind: str, what: str, checkpointing: bool, chunk: int, rows: int, length: int) -> dict[str, int]:
    """Return the peak of two steps over what the process held before, and the estimate.

    Args:
        kind: of model.
        what: "full", "lora", or the teacher of a distillation with the states of each layer, "window" or "sliding".
        checkpointing: of activations.
        chunk: tokens whose logits are held at once; 0: all.
        rows: of a batch.
        length: of a row, in tokens.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier training freed would be used again, and not be seen
    taught = what in get_args(Teacher)
    before = status("VmRSS")
    recipe = make_recipe(
        {
            "model": {"name": "tiny"},
            "swap": {"scheme": "rope"},
            "data": {"length": length},
            "peft": {"peft_type": "LORA"} if what == "lora" else None,
            "objective": {"kind": "distill", "distill": {"states": 1.0, "teacher": what}} if taught else {},
            "training": {"per_device_train_batch_size": rows, "gradient_checkpointing": checkpointing},
        }
    )
    model = prepare_trainable(model_of(kind, length), recipe.trainable, recipe.peft)
    teacher = make_teacher(model) if taught else None
    need = training_need(model, recipe, Launch(), biased=(), chunk=chunk, teacher=teacher)
    ctypes.CDLL(None).malloc_trim(0)  # what the estimate freed
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, WORDS, (rows, length))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    for _ in range(2):
        if taught:
            settings, window = recipe.objective.distill, 256 if what == "sliding" else length
            distillation_loss(model, teacher, inputs, settings, window=window, chunk=chunk).backward()
        elif chunk:
            causal_loss(model, inputs, chunk=chunk).backward()
        else:
            whole_loss(model, inputs, None, causal=True).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"measured": status("VmHWM") - before, "estimated": need.total}


def status(name: str) -> int:
    """Return a number of bytes from what Linux says of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    measure(*asked[0])  # what is loaded and kept once has no part in it
    sys.stdout.write(json.dumps([measure(*case) for case in asked]))
