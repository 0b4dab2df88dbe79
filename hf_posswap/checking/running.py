"""Padding and packing on the live model: a row alone, padded, and in one row with another."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_posswap.checkpoints.doctor_checks.findings import Finding
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.testing.tiny import TINY_LENGTH, tiny_model
from hf_posswap.utils.format import said_by

TOKENS = 8
"""Length of the rows."""
_PADS = 3


class Unable(Exception):
    """The model cannot be run on a row of tokens; the message says why."""


class _Runner:
    """Runs a model on rows of tokens."""

    def __init__(self, model: Any, rows: int | None) -> None:
        self.model = model
        self.takes = set(inspect.signature(model.forward).parameters)
        if getattr(model, "main_input_name", "input_ids") != "input_ids" or "input_ids" not in self.takes:
            raise Unable("it reads no tokens")
        self.paired = bool(model.config.is_encoder_decoder)
        if self.paired and "decoder_input_ids" not in self.takes:
            raise Unable("it is an encoder-decoder whose decoder takes no tokens")
        self.length = TOKENS if rows is None else min(TOKENS, (rows - _PADS) // 2)
        if self.length < 3:
            raise Unable("its window is too short")
        self.ids = self._tokens(2 * self.length + 2 * _PADS)

    def _tokens(self, number: int) -> Tensor:
        """Return tokens that no field of the config calls special, [number]."""
        config = self.model.config
        values = [config.to_dict(), config.get_text_config().to_dict()]
        kinds = ("id", "index", "token")
        special = {value for each in values for key, value in each.items() if key.rpartition("_")[2] in kinds
                   and isinstance(value, int)}  # fmt: skip
        size = self.model.get_input_embeddings().weight.shape[0]
        plain = [token for token in range(size) if token not in special]
        if len(plain) < 8:
            raise Unable("its vocabulary is too small")
        chosen = torch.randint(len(plain), (number,), generator=torch.Generator().manual_seed(0))
        return torch.tensor(plain)[chosen]

    def run(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Return the outputs at each token of one row, [tokens, width], in float32 on the CPU."""
        device = self.model.get_input_embeddings().weight.device
        inputs = {name: value.to(device) for name, value in ({"input_ids": ids[None]} | inputs).items()}
        if self.paired:
            inputs["decoder_input_ids"] = self.ids[None, :3].to(device)
        outputs = self.model(**inputs, **({"use_cache": False} if "use_cache" in self.takes else {}))
        found = getattr(outputs, "logits", None)
        if found is None or found.dim() != 3:
            found = getattr(outputs, "last_hidden_state", None)
        if found is None or found.shape[:2] != (1, 3 if self.paired else ids.shape[0]):
            raise Unable("it has no output at each token")
        return found[0].float().cpu()


def running_findings(model: Any, rows: int | None, checked: list[str], skipped: list[str]) -> Iterator[Finding]:
    """Yield how padding and packing go wrong on a live model.

    Args:
        model: a model with weights.
        rows: of its position table; None: it has none.
        checked: gets what was run.
        skipped: gets what was not, and why.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            runner = _Runner(model, rows)
            yield from _padding(runner, checked, skipped)
            yield from _packing(runner, checked, skipped)
    except Unable as unable:
        skipped.append(f"padding and packing: {type(model).__name__} was not run, because {unable}")
    except Exception as error:  # a class may ask for inputs that only its processor makes
        skipped.append(
            f"padding and packing: {type(model).__name__} cannot be run on tokens alone: {said_by(error, 200)}"
        )
    finally:
        model.train(was_training)


def _padding(runner: _Runner, checked: list[str], skipped: list[str]) -> Iterator[Finding]:
    """Yield what a padded row does otherwise than the row alone."""
    if "attention_mask" not in runner.takes:
        skipped.append("padding: its forward takes no attention_mask")
        return
    row = runner.ids[: runner.length]
    alone = runner.run(row)
    causal = not runner.paired and _is_causal(runner, alone)
    mask = torch.ones(1, runner.length + _PADS, dtype=torch.long)
    mask[:, slice(_PADS) if causal else slice(-_PADS, None)] = 0
    real = torch.ones(len(alone), dtype=torch.bool) if runner.paired else mask[0].bool()
    pad = getattr(runner.model.config, "pad_token_id", None)
    filled, other = runner.ids[-2 * _PADS :].split(_PADS)
    fill = filled if not isinstance(pad, int) else torch.full_like(filled, pad)
    padded = runner.run(_around(row, fill, causal), attention_mask=mask)[real]
    side = "left" if causal else "right"
    checked.append(f"a row padded on the {side} against the row alone")
    if not _differ(runner, padded, alone, alone):
        return
    refilled = runner.run(_around(row, other, causal), attention_mask=mask)[real]
    if _differ(runner, padded, refilled, alone):
        yield _ran(
            runner, "mask-ignored", "attention_mask", "other tokens under the mask give other outputs at the rest "
            f"({_gap(padded, refilled, alone)}): the mask does not hide them.",
            "Run rows of one length, or one row at a time.",
        )  # fmt: skip
    else:
        helped = False
        if "position_ids" in runner.takes:
            ids = (mask.cumsum(-1) - 1).clamp(min=0)
            placed = runner.run(_around(row, fill, causal), attention_mask=mask, position_ids=ids)[real]
            helped = not _differ(runner, placed, alone, alone)
        do = "Pass position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), as generate does" if helped else (
            "Pad on the right, or run one row at a time"
        )  # fmt: skip
        yield _ran(
            runner, "padding", "attention_mask", f"a row padded on the {side} is not computed as the row alone "
            f"({_gap(padded, alone, alone)}): positions are counted from the first column, whatever the mask says.",
            f"{do}.",
        )  # fmt: skip


def _packing(runner: _Runner, checked: list[str], skipped: list[str]) -> Iterator[Finding]:
    """Yield whether two documents in one row, with position ids that start again, are computed as alone."""
    if runner.paired:
        skipped.append("packing: documents share no row in an encoder-decoder")
        return
    if "position_ids" not in runner.takes:
        skipped.append("packing: its forward takes no position_ids, so documents cannot share a row")
        return
    first, second = runner.ids[: runner.length], runner.ids[runner.length : 2 * runner.length]
    alone = runner.run(second)
    if not _is_causal(runner, runner.run(first)):
        skipped.append("packing: an encoder takes the borders of documents from a mask of its own")
        return
    places = torch.arange(runner.length).repeat(2)[None]
    packed = runner.run(torch.cat((first, second)), position_ids=places)[runner.length :]
    checked.append("a row of two documents against each alone")
    if _differ(runner, packed, alone, alone):
        yield _ran(
            runner, "packing", "position_ids", "the second document of a row, with position ids that start again and "
            f"no attention mask, is not computed as alone ({_gap(packed, alone, alone)}): it sees the first, or "
            "other positions.",
            "Pass a block mask (attention_mask of shape [1, 1, tokens, tokens]), or do not pack with this class.",
        )  # fmt: skip


def _around(row: Tensor, fill: Tensor, causal: bool) -> Tensor:
    return torch.cat((fill, row) if causal else (row, fill))


def _is_causal(runner: _Runner, alone: Tensor) -> bool:
    """Return whether the first token's output does not depend on the last token."""
    row = runner.ids[: runner.length].clone()
    row[-1] = runner.ids[runner.length] if runner.ids[runner.length] != row[-1] else row[0]
    return not _differ(runner, runner.run(row)[:1], alone[:1], alone)


def _differ(runner: _Runner, first: Tensor, second: Tensor, scale: Tensor) -> bool:
    """Return whether outputs differ by more than rounding does."""
    least = 0.02 if runner.model.dtype in (torch.float32, torch.float64) else 0.2  # standard deviations
    return bool((first - second).abs().max() > least * max(float(scale.std()), 1e-6))


def _gap(first: Tensor, second: Tensor, scale: Tensor) -> str:
    return f"up to {float((first - second).abs().max() / scale.std()):.2g} standard deviations of the outputs"


def _ran(runner: _Runner, code: str, where: str, what: str, do: str) -> Finding:
    """Return a finding: a note where a class of transformers is made so, an error where a swap made it so."""
    name, swap = type(runner.model).__name__, getattr(runner.model, "_posswap", None)
    if swap is None or swap.plan.route == "native":
        return Finding("note", where, f"{name}, by its design: {what}", do, code)
    if code == "padding":  # a swapped model counts positions as its class does; distances do not depend on that
        by_design = not swap.plan.scheme.traits.relative
    else:
        by_design = code in codes_of_class(native_class(type(runner.model)))
    if by_design:
        return Finding("note", where, f"{name} with {swap.plan.named}, by the design of the class: {what}", do, code)
    return Finding("error", where, f"{name} with {swap.plan.named}: {what}", do, code)


@lru_cache(maxsize=64)
def codes_of_class(cls: Any) -> frozenset[str]:
    """Return the codes of what padding and packing do to a tiny model of a class of transformers, unswapped."""
    try:
        model = tiny_model(cls, meta=False)
    except Exception:  # a class of somebody's own, of whose config no tiny one is known
        return frozenset()
    return frozenset(finding.code for finding in running_findings(model, TINY_LENGTH, [], []))
