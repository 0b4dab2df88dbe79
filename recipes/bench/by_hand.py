"""The baseline of `recipes.bench.waiting`: plain transformers, as in its documentation.

python -m recipes.bench.by_hand evaluate MODEL FOLDER LENGTH
python -m recipes.bench.by_hand train MODEL FOLDER LENGTH OUT
python -m recipes.bench.by_hand first_token MODEL [SCHEME]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments


def evaluate(model_path: str, texts: str, length: str) -> None:
    """Print the loss of two windows of the texts of `length` tokens."""
    model = GPT2LMHeadModel.from_pretrained(model_path, trust_remote_code=False).eval()
    windows = _windows(model_path, texts, int(length))[:2]
    with torch.no_grad():
        losses = [model(window[None], labels=window[None]).loss for window in windows]
    sys.stdout.write(f"{torch.stack(losses).mean():.4f}\n")


def train(model_path: str, texts: str, length: str, out: str) -> None:
    """Take one step on two windows of `length` tokens, and save the model."""
    model = GPT2LMHeadModel.from_pretrained(model_path, trust_remote_code=False)
    rows = [{"input_ids": window, "labels": window} for window in _windows(model_path, texts, int(length))[:2]]
    arguments = TrainingArguments(out, max_steps=1, per_device_train_batch_size=2, report_to=[], disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()


def first_token(model_path: str, scheme: str = "") -> None:
    """Load, swap if a scheme is given, and print the first token after a prompt of 16."""
    model = LlamaForCausalLM.from_pretrained(model_path, trust_remote_code=False, dtype=torch.bfloat16).eval()
    if scheme:
        from hf_posswap import patch_model

        patch_model(model, scheme, max_length=8192)
    with torch.no_grad():
        logits = model(torch.arange(3, 19)[None]).logits
    sys.stdout.write(f"{int(logits[0, -1].argmax())}\n")


def _windows(model_path: str, texts: str, length: int) -> list[torch.Tensor]:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(texts).iterdir()))
    ids = PreTrainedTokenizerFast.from_pretrained(model_path, trust_remote_code=False)(
        text, return_tensors="pt"
    ).input_ids[0]
    return list(ids[: len(ids) // length * length].split(length))


if __name__ == "__main__":
    ways: dict[str, Callable[..., None]] = {"evaluate": evaluate, "train": train, "first_token": first_token}
    ways[sys.argv[1]](*sys.argv[2:])
