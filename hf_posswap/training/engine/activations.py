"""Measures on a few tokens what the forward of a model keeps for its backward."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_dispatch import gpu_autocast, storage_key
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.training.head import inner_model, split, without_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTH = 32
"""Most tokens of the shorter rows."""


@dataclass(frozen=True)
class SavedBytes:
    """What a forward keeps for its backward, with its last states, without the weights, the logits and the loss.

    Attributes:
        token: bytes per token.
        pair: bytes per pair of tokens of a row: attention scores, where attention materializes them.
        widest: bytes per token of the largest tensor of them.
        fixed: bytes that no token adds: weights in the precision of autocast.
    """

    token: float
    pair: float
    widest: float
    fixed: int


def saved_bytes(model: PreTrainedModel, length: int, *, autocast: torch.dtype | None, on_gpu: bool) -> SavedBytes:
    """Return what the forward of `model` keeps for its backward, from four forwards of at most 128 tokens.

    Args:
        model: as it is trained, on any device, before any of its layers checkpoint activations.
        length: tokens of a window in training, which the model can read.
        autocast: dtype of mixed precision; None: none.
        on_gpu: whether the training runs on a GPU, also if `model` is on the CPU.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=64))
        >>> saved = saved_bytes(model, 64, autocast=None, on_gpu=False)
        >>> saved.token > 4 * 10 * 8, saved.pair, saved.fixed
        (True, 0.0, 0)
    """
    device, short = model.device, max(1, min(_LENGTH, length // 2))
    devices = [device] if device.type == "cuda" else []
    training = model.training
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))  # dropout must not change what training draws
        if autocast is not None:
            if on_gpu and device.type == "cpu":
                stack.enter_context(gpu_autocast())
            stack.enter_context(torch.autocast(device.type, dtype=autocast))
        stack.callback(model.train, training)
        model.train()
        one, two = (_saved(model, rows, short) for rows in (1, 2))
        long_one, long_two = (_saved(model, rows, 2 * short) for rows in (1, 2))
    # a row of L tokens keeps token L + pair L^2
    row, long_row = sum(two) - sum(one), sum(long_two) - sum(long_one)
    pair = max(0.0, (long_row - 2 * row) / (2 * short**2))
    widest = max(Counter(two) - Counter(one), default=0)  # what both have are weights
    return SavedBytes(row / short - pair * short, pair, widest / (2 * short), max(0, sum(one) - row))


def _saved(model: PreTrainedModel, rows: int, length: int) -> list[int]:
    """Return the sizes of the tensors that a forward of `rows` rows of `length` tokens keeps for its backward."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage_key(storage)] = storage.nbytes()
        return tensor

    inputs: dict[str, object] = {"input_ids": torch.full((rows, length), _token(model), device=model.device)}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        try:
            kept: object = split(model, inputs).states
        except UnsupportedModelError:  # its logits are then counted too
            sizes.clear()
            kept = model(**inputs | without_cache(inner_model(model)))
    # the graph in `kept` keeps the storages until here, so that no key is used twice
    weights = {storage_key(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
    del kept
    return [size for key, size in sizes.items() if key not in weights]


def _token(model: nn.Module) -> int:
    """Return a token that is not padding."""
    padding = getattr(inner_model(model).config.get_text_config(), "pad_token_id", None)
    return 2 if padding == 1 else 1
