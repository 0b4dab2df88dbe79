"""What `PosswapCallback` finds out about a model and the sequences that it reads, in somebody else's Trainer."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG
from hf_posswap.compat.peft_wrappers import weights_without_adapters
from hf_posswap.compat.torch_modules import kind_of_wrapper
from hf_posswap.errors import CheckpointError, PositionRangeError, SwapVerificationError
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.plan.plan_swap import unwrap, with_native
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.remote_code import package_version
from hf_posswap.patching.verify.verify_swap import copy_sharing_weights
from hf_posswap.schemes import Scheme
from hf_posswap.utils.atomic_io import read_json
from hf_posswap.utils.digests import state_digest
from hf_posswap.utils.sentence_models import ANY_KIND, inner_model, is_sentence_model

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

ABOVE_GUESSING = 1.5
"""Nats above a uniform guess that a first loss may have: what recipes allow a swap that needs training."""
_PACKAGES = ("transformers", "torch", "peft", "accelerate", "trl", "sentence-transformers", "axolotl", "deepspeed")
_ROWS = 1000
_INPUTS = ("input_ids", "inputs_embeds")
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")


def model_inside(model: nn.Module | None) -> PreTrainedModel:
    """Return the transformers model inside `model`: DDP, torch.compile, DeepSpeed, PEFT, or of sentence-transformers.

    Raises:
        UnsupportedSwapError: there is none.
    """
    from accelerate.utils import extract_model_from_parallel

    whole = extract_model_from_parallel(model, keep_torch_compile=False)
    return unwrap(inner_model(whole) if is_sentence_model(whole, ANY_KIND) else whole)


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether this process holds parts of the weights of `model` (FSDP, ZeRO-3, tensor parallel, meta)."""
    if any(kind_of_wrapper(module) == "FSDP's wrapper" for module in model.modules()):
        return True
    return any(
        hasattr(parameter, "placements") or hasattr(parameter, "ds_id") or parameter.is_meta
        for parameter in model.parameters()
    )


def check_scheme(model: PreTrainedModel, expected: Scheme) -> None:
    """Check that the scheme in force in a swapped `model` is `expected`, in every field that `expected` sets.

    Raises:
        SwapVerificationError: it is another one; names the fields.
        SchemeError: `expected` is only a part of a scheme.
    """
    plan: SwapPlan = applied_swap(model).plan
    for stack, scheme in plan.schemes.items():
        wanted = with_native(model, plan.sites.stack(stack), expected)
        differing = {} if type(scheme) is not type(wanted) else _differing(scheme, wanted)
        if differing and not any(map(_holds_schemes, differing.values())):
            problem = ", ".join(f"its {name} is {value!r}" for name, value in differing.items())
        elif differing or type(scheme) is not type(wanted):
            problem = f"it carries {scheme}"
        else:
            continue
        where = f" in its {stack}" if stack else ""
        raise SwapVerificationError(
            f"PosswapCallback was to prove {expected}, and {plan.model} has another mechanism{where}: {problem}. "
            "Patch the model with that scheme before the trainer is made, or give the callback the scheme in force."
        )


def _differing(scheme: Scheme, expected: Scheme) -> dict[str, object]:
    """Return the fields of `scheme`, of the class of `expected`, that are other than `expected` sets them."""
    return {
        field.name: getattr(scheme, field.name)
        for field in dataclasses.fields(expected)
        if not _is_as_set(getattr(scheme, field.name), getattr(expected, field.name), field.default)
    }


def _is_as_set(value: Any, expected: object, default: object = dataclasses.MISSING) -> bool:
    if isinstance(expected, Scheme):
        return type(value) is type(expected) and not _differing(value, expected)
    if isinstance(expected, tuple) and _holds_schemes(expected):
        alike = isinstance(value, tuple) and len(value) == len(expected)
        return alike and all(map(_is_as_set, value, expected))
    return bool(expected == default or value == expected)


def _holds_schemes(value: object) -> bool:
    return isinstance(value, Scheme) or (isinstance(value, tuple) and any(map(_holds_schemes, value)))


def first_loss_limit(model: PreTrainedModel, outer: nn.Module) -> float | None:
    """Return the highest first loss to expect: that of a uniform guess and 1.5 nats; None: its loss is no guess of one.

    Args:
        model: the transformers model.
        outer: what the Trainer trains. A SparseEncoder has a vocabulary head, and its loss is of other things.
    """
    if model.get_output_embeddings() is None or is_sentence_model(outer, ANY_KIND):
        return None
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    return math.log(vocabulary) + ABOVE_GUESSING if isinstance(vocabulary, int) and vocabulary > 0 else None


def base_digest(model: PreTrainedModel) -> str | None:
    """Return the digest of the weights before the swap, without adapters; None: this process does not hold them.

    A swap that cannot be undone, because it was loaded or fitted, counts with its own weights.

    Args:
        model: the transformers model.
    """
    if is_sharded(model):
        return None
    swap = getattr(model, "_posswap", None)
    if swap is not None and swap.can_undo and not swap.fitted:
        model = unpatch_model(copy_sharing_weights(model))
    return state_digest(weights_without_adapters(model))


def versions() -> dict[str, str]:
    """Return the versions of what trains, as far as it is installed."""
    installed = {"hf_posswap": package_version()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed | {"torch": torch.__version__}  # which names its build, as the metadata of PyPI's does not


def trained_part(model: nn.Module) -> str:
    """Return which weights of `model`, as the Trainer has it, are trained: "full", the adapter's type, or "a part"."""
    adapters = getattr(model, "peft_config", None)
    types = set()
    if isinstance(adapters, dict):
        types = {str(getattr(config.peft_type, "value", config.peft_type)).lower() for config in adapters.values()}
    if types:
        return "+".join(sorted(types))
    return "full" if all(parameter.requires_grad for parameter in model.parameters()) else "a part"


def check_written(folder: Path, record: SwapRecord) -> bool:
    """Check that the checkpoint in `folder` names the swap, and return whether it names any.

    Args:
        folder: that a Trainer wrote.
        record: of the model's swap.

    Raises:
        CheckpointError: it holds a model or an adapter that would load without the swap, or with another one.
    """
    adapters = sorted(path.parent for path in folder.glob(f"**/{ADAPTER_CONFIG}"))
    holders = [(path / SIDECAR, "record") for path in adapters] or [
        (path, "posswap")
        for path in sorted(folder.glob("**/config.json"))
        if path.parent == folder or (isinstance(values := read_json(path), dict) and "model_type" in values)
    ]
    for path, key in holders:
        values = read_json(path) if path.is_file() else {}
        if not isinstance(values, dict) or values.get(key) is None:
            raise CheckpointError(
                f"the trainer wrote {folder} without its swap to {record.scheme['name']}: {path.name} does not name "
                "it, so it would load as the unswapped model. Save with hf_posswap.save(trainer.model, folder)."
            )
        if not SwapRecord.from_dict(values[key]).is_same_mechanism(record):
            raise CheckpointError(
                f"the trainer wrote {folder} with another swap ({values[key]['scheme']}) than the model has "
                f"({record.scheme}). Save with hf_posswap.save(trainer.model, folder)."
            )
    return bool(holders)


def dataset_digest(dataset: object) -> str | None:
    """Return a digest of every row of `dataset`; None: they cannot be read twice alike, or hold other than plain data.

    Rows of a `datasets.Dataset` and of a list or tuple are read; any other class may transform rows at random or stream
    them. Equal rows in equal order have an equal digest, while fingerprints of `datasets` depend on its cache.

    Args:
        dataset: as a Trainer has it, with the columns that the model reads.

    Example:
        >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
        >>> dataset_digest(rows) == dataset_digest(tuple(rows)), dataset_digest(rows) == dataset_digest(rows[:1])
        (True, False)
        >>> dataset_digest(iter(rows)) is None
        True
    """
    rows = _rows_of(dataset)
    if rows is None:
        return None
    whole = hashlib.sha256()
    try:
        for row in rows:
            whole.update(f"{json.dumps(row, sort_keys=True, default=_plain)}\n".encode())
    except TypeError:
        return None
    return whole.hexdigest()[:16]


def _rows_of(dataset: object) -> Iterator[object] | None:
    """Return the rows of `dataset`; None: its class may not give the same rows twice."""
    if isinstance(dataset, list | tuple):
        return iter(dataset)
    if importlib.util.find_spec("datasets") is None:
        return None
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":  # a transform of the user's
        return None
    plain = dataset.with_format(None)
    batches = plain.iter(_ROWS)
    return (dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True))


def _plain(value: object) -> object:
    """Return what JSON does not know as text or numbers.

    Raises:
        TypeError: `value` is neither.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu()
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not plain data")


_ATTACHED: WeakKeyDictionary[object, list[SequenceWatch]] = WeakKeyDictionary()
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
        self._model: ref[object] | None = None
        self._training: object = None

    def attach(self, model: PreTrainedModel, outer: nn.Module, training: object) -> None:
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
        watched = next(holders) if is_sentence_model(outer, ANY_KIND) else model
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

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceWatch:
        return SequenceWatch(None, None)  # a copy of the model is watched by nobody

    def __reduce__(self) -> tuple[object, ...]:
        return SequenceWatch, (None, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
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

    def _reach(self, ids: Tensor, position_ids: Tensor | None) -> int:
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


def _tensor(given: dict[str, object], names: tuple[str, ...]) -> Tensor | None:
    """Return the first of the arguments `names` that is a batch of sequences."""
    values = (given.get(name) for name in names)
    return next((value for value in values if isinstance(value, Tensor) and value.dim() >= 2), None)
