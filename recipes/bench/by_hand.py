"""The baseline of `recipes.bench.waiting`: plain transformers, as in its documentation.

python -m recipes.bench.by_hand evaluate MODEL FOLDER LENGTH
python -m recipes.bench.by_hand train MODEL FOLDER LENGTH OUT
python -m recipes.bench.by_hand first_token MODEL [SCHEME]
python -m recipes.bench.by_hand losses MODEL FOLDER LENGTH [CHUNK]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    DynamicCache,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


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


def losses(model_path: str, texts: str, length: str, chunk: str = "") -> None:
    """Print the perplexity of two texts at a quarter, half and all of `length` tokens, each read once.

    They are read in chunks with a cache if `chunk` is given, a number of tokens. The output head runs on 512 states at
    a time, as the logits of a whole text may not fit into memory.
    """
    (architecture,) = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))["architectures"]
    cls = {cls.__name__: cls for cls in (GPT2LMHeadModel, LlamaForCausalLM)}[architecture]
    model = cls.from_pretrained(model_path, trust_remote_code=False, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path, trust_remote_code=False)
    rows = []
    for path in sorted(Path(texts).iterdir())[:2]:
        text = path.read_text(encoding="utf-8")
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        rows.append(_losses(model, torch.tensor(ids[: int(length)]), int(chunk or length)))
    for part in (int(length) // 4, int(length) // 2, int(length)):
        sys.stdout.write(f"{torch.stack(rows)[:, : part - 1].double().mean().exp():.6f}\n")


@torch.inference_mode()
def _losses(model: PreTrainedModel, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the loss of each token but the first, [L - 1]."""
    read, losses = ids[None, :-1], list[torch.Tensor]()
    cache = DynamicCache() if chunk < read.shape[1] else None
    for start in range(0, read.shape[1], chunk):
        output = model.base_model(read[:, start : start + chunk], past_key_values=cache, use_cache=cache is not None)
        states = output.last_hidden_state[0]
        for first in range(0, len(states), 512):
            logits = model.get_output_embeddings()(states[first : first + 512])
            targets = ids[start + first + 1 : start + first + 1 + len(logits)]
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(losses)


def _windows(model_path: str, texts: str, length: int) -> list[torch.Tensor]:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(texts).iterdir()))
    ids = PreTrainedTokenizerFast.from_pretrained(model_path, trust_remote_code=False)(
        text, return_tensors="pt"
    ).input_ids[0]
    return list(ids[: len(ids) // length * length].split(length))


if __name__ == "__main__":
    ways: dict[str, Callable[..., None]] = {
        "evaluate": evaluate,
        "train": train,
        "first_token": first_token,
        "losses": losses,
    }
    ways[sys.argv[1]](*sys.argv[2:])
