"""Watches the sequences that a swapped model reads in a training that this package does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from hf_posswap.errors import PositionRangeError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.utils.sentence_models import is_sentence_model

_INPUTS = ("input_ids", "inputs_embeds")
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
_ATTACHED: WeakKeyDictionary[Any, list[SequenceWatch]] = WeakKeyDictionary()
"""By model: what watches it."""


class SequenceWatch:
    """A forward pre-hook that refuses positions beyond a length, and counts tokens.

    Packed rows that restart their `position_ids` count by these, so a row may be longer than its documents.

    Args:
        plan: of the model's swap; None: it has none, and only tokens are counted.
        limit: positions that a sequence may have; None: any number.
    """

    def __init__(self, plan: SwapPlan | None, limit: int | None) -> None:
        self.limit, self.tokens = limit, 0
        self._first = 0 if plan is None else plan.sites.first_position
        self._stacks = {""} if plan is None else set(plan.schemes)
        self._named = "" if plan is None else plan.named
        self._handle: Any = None
        self._model: ref[Any] | None = None
        self._training: Any = None

    def attach(self, model: Any, outer: Any, training: Any) -> None:
        """Watch a model, and end what an earlier training left: an exception in a step, or Ctrl-C, tells no callback.

        Args:
            model: the transformers model.
            outer: what the Trainer trains, which is or contains `model`. A module of sentence-transformers calls the
                forward of its model past all hooks, so that module is watched.
            training: the state of this training, the same object for all callbacks of a Trainer.
        """
        self.detach()
        for watch in list(_ATTACHED.get(model, ())):
            if watch._training is not training:
                watch.detach()
        holders = (module for module in outer.modules() if any(child is model for child in module.children()))
        watched = next(holders) if is_sentence_model(outer) else model
        self._handle = watched.register_forward_pre_hook(self, with_kwargs=True)
        self._model, self._training = ref(model), training
        _ATTACHED.setdefault(model, []).append(self)

    def detach(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            model = None if self._model is None else self._model()
            if model is not None:
                _ATTACHED[model].remove(self)
            self._handle = self._model = self._training = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceWatch:
        return SequenceWatch(None, None)  # a copy of the model is watched by nobody

    def __reduce__(self) -> Any:
        return SequenceWatch, (None, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(kwargs)
        if args:
            given |= args[0] if isinstance(args[0], Mapping) else {module.main_input_name: args[0]}
        ids = _tensor(given, _INPUTS)
        if ids is None or not module.training:  # an evaluation may read farther than training
            return
        self.tokens += ids.shape[0] * ids.shape[1]
        if self._stacks & {"", "encoder"}:
            self._check(self._reach(ids, given.get("position_ids")))
        if "decoder" in self._stacks:
            targets = _tensor(given, _DECODER_INPUTS)
            self._check(0 if targets is None else targets.shape[1])

    def _reach(self, ids: Tensor, position_ids: Any) -> int:
        """Return the positions that the longest sequence of a batch needs."""
        if isinstance(position_ids, Tensor) and position_ids.numel():
            return int(position_ids.max()) - self._first + 1
        return ids.shape[1]

    def _check(self, reach: int) -> None:
        if self.limit is not None and reach > self.limit:
            self.detach()
            raise PositionRangeError(
                f"a training sequence has {reach} positions, and the swap to {self._named} is for {self.limit}. Cut "
                "the texts (max_length of SFTConfig, sequence_len of axolotl, cutoff_len of LLaMA-Factory, "
                f"max_seq_length of a SentenceTransformer), or swap with max_length={reach}; to train beyond the "
                f"swap's length on purpose, pass PosswapCallback(max_length={reach})."
            )


def _tensor(given: dict[str, Any], names: tuple[str, ...]) -> Tensor | None:
    """Return the first of the arguments `names` that is a batch of sequences."""
    values = (given.get(name) for name in names)
    return next((value for value in values if isinstance(value, Tensor) and value.dim() >= 2), None)
