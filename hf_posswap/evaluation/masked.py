"""Encoders: the loss of masked tokens, by position, and pseudo-perplexity.

Every token of a text is masked once, in groups; a group is one forward. Groups of 15 % match the training of masked
language models (Devlin et al. 2019, https://arxiv.org/abs/1810.04805); groups of one token give the
pseudo-log-likelihood of Salazar et al. 2020, https://arxiv.org/abs/1910.14659, equation 1: PPPL = exp of its negative
mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from hf_posswap.errors import DataError, NumericError
from hf_posswap.evaluation.scoring import MOST_NATS, advice_if_not_finite
from hf_posswap.utils.devices import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def special_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that `tokenizer` adds before and after a text.

    Raises:
        DataError: the text's own tokens change when special tokens are added.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> special_frame(byte_tokenizer())
        ([], [])
    """
    plain = tokenizer("one two", add_special_tokens=False)["input_ids"]
    framed = tokenizer("one two")["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return list(framed[:start]), list(framed[start + len(plain) :])
    raise DataError(f"{type(tokenizer).__name__} changes a text's tokens when it adds special ones: {plain}, {framed}.")


def mask_groups(count: int, *, share: float = 0.15, seed: int = 0) -> list[np.ndarray]:
    """Partition the indices 0 to `count` - 1 into random groups of about `share` of them.

    Args:
        count: number of tokens.
        share: share of a group; 0: groups of one token each, in order.
        seed: random seed of the shuffle.

    Raises:
        DataError: there are no tokens, or the share is invalid.

    Example:
        >>> [len(group) for group in mask_groups(20, share=0.25)], len(mask_groups(20, share=0.0))
        ([5, 5, 5, 5], 20)
    """
    if count < 1 or not 0 <= share < 1:
        raise DataError(f"masking needs at least 1 token and a share from 0 to below 1, got {count} and {share}.")
    if share == 0:
        return list(np.arange(count)[:, None])
    order = np.random.default_rng((seed, count)).permutation(count)
    return [np.sort(group) for group in np.array_split(order, math.ceil(1 / share)) if len(group)]


def masked_losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: np.ndarray,
    groups: Sequence[np.ndarray],
    *,
    batch_tokens: int = 2048,
) -> np.ndarray:
    """Return the loss of each token of a text when its group is masked, float32 [L], NaN for tokens in no group.

    Args:
        model: a masked language model.
        tokenizer: the model's tokenizer, whose special tokens, such as [CLS] and [SEP], are put around the text.
        tokens: token ids of the text [L], without special tokens.
        groups: indices into the text that are masked together.
        batch_tokens: maximum tokens of one forward.

    Raises:
        DataError: the tokenizer has no mask token, or the model has a decoder or returns no logits for each token.
        NumericError: a loss is not finite, or too large for a perplexity.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM, BertTokenizer
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
        >>> tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
        >>> shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
        >>> model = BertForMaskedLM(BertConfig(vocab_size=7, **shape)).eval()
        >>> masked_losses(model, tokenizer, np.array([5, 6, 5]), mask_groups(3, share=0.0)).shape
        (3,)
    """
    if model.config.is_encoder_decoder:
        raise DataError(f"{type(model).__name__} predicts tokens with a decoder: it is not a masked language model.")
    if tokenizer.mask_token_id is None:
        raise DataError(
            f"{type(tokenizer).__name__} has no mask token: it is not the tokenizer of a masked language model."
        )
    before, after = special_frame(tokenizer)
    framed, offset = np.array([*before, *tokens, *after], dtype=np.int64), len(before)
    losses = np.full(len(tokens), np.nan, dtype=np.float32)
    step = max(1, batch_tokens // len(framed))
    for i in range(0, len(groups), step):
        batch = groups[i : i + step]
        ids = torch.from_numpy(np.tile(framed, (len(batch), 1)))
        for row, group in zip(ids, batch, strict=True):
            row[torch.from_numpy(group) + offset] = tokenizer.mask_token_id
        for group, group_losses in zip(batch, _losses(model, ids, framed, batch, offset), strict=True):
            losses[group] = group_losses
    return losses


def pseudo_perplexity(losses: Sequence[np.ndarray]) -> float:
    """Return exp of the mean loss over all masked tokens of all texts.

    Args:
        losses: from `masked_losses`, one array per text; NaN is ignored.

    Raises:
        DataError: no token was masked.

    Example:
        >>> round(pseudo_perplexity([np.log([2.0, 8.0]), np.array([np.nan])]), 6)
        4.0
    """
    values = (
        np.concatenate([np.asarray(text_losses, dtype=np.float64) for text_losses in losses]) if losses else np.empty(0)
    )
    values = values[~np.isnan(values)]
    if len(values) == 0:
        raise DataError("pseudo-perplexity needs the loss of at least one masked token.")
    return math.exp(values.mean())


@torch.inference_mode()
def _losses(
    model: PreTrainedModel, ids: torch.Tensor, framed: np.ndarray, groups: Sequence[np.ndarray], offset: int
) -> list[np.ndarray]:
    """Return the losses of each group's tokens from the masked rows `ids` [B, L]."""
    ids = ids.to(model.device)
    with evaluating(model):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    logits = getattr(output, "logits", None)
    if logits is None or logits.dim() != 3 or logits.shape[1] != ids.shape[1]:
        raise DataError(f"{type(model).__name__} returns no logits for each token: load it as a masked LM.")
    group_losses = []
    for row, group in zip(logits, groups, strict=True):
        positions = torch.from_numpy(group).to(ids.device) + offset
        targets = torch.from_numpy(framed).to(ids.device)[positions]
        losses = functional.cross_entropy(row[positions].float(), targets, reduction="none").cpu()
        if not bool(losses.isfinite().all()):
            advice = advice_if_not_finite(model)
            raise NumericError(f"{type(model).__name__}: the loss of a masked token is not finite; {advice}.")
        if (mean := float(losses.mean())) > MOST_NATS:
            raise NumericError(
                f"{type(model).__name__}: the mean loss of {len(losses)} masked tokens is {mean:.4g} nats, too large "
                "for a perplexity; look for weights that are too large."
            )
        group_losses.append(losses.numpy())
    return group_losses
