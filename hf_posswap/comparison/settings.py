"""Settings of an evaluation: everything that its numbers depend on except the model and the text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.utils.format import public_name
from hf_posswap.utils.printable import brief_repr

METRICS = (
    "ppl_prefix",
    "nll_pos",
    "ctx_gain",
    "short_reg",
    "passkey",
    "offset_probe",
    "ppl_compat",
    "ruler_lite",
    "longppl",
    "cost",
    "mlm_pos",
    "pseudo_ppl",
    "retrieval",
    "vectors",
)
DEFAULT_METRICS = METRICS[:6]
ENCODER_METRICS = ("mlm_pos", "retrieval", "vectors")


@dataclass(frozen=True)
class EvalSettings:
    """What to measure, and how.

    Attributes:
        lengths: in tokens, a list or one number; None: 1, 2, 4 and 8 times the original window, as far as a model can
            run them.
        metrics: names of `METRICS`, a list or one text with commas; None: the first six for a causal model; mlm_pos,
            retrieval and vectors for an encoder.
        documents: maximum number of documents, at least 2.
        seed: random seed of needles, bootstraps and permutations.
        depths: relative positions of needles, between 0 and 1.
        trials: passkeys for each length and depth, and prompts for each task of ruler_lite and length.
        tail: tokens that ctx_gain scores; None: 1024, or half the window if that is less.
        margin: nats per token that the short-context verdict tolerates.
        stride: tokens between the sliding windows of ppl_compat; None: 256, or half the window if that is less.
        key_spans: a file of key tokens for longppl, from `hf_posswap.evaluation.longppl.find_key_spans`.

    Raises:
        OptionError, UnknownNameError: a value is invalid.

    Example:
        >>> EvalSettings(lengths=[2048, 8192], metrics="ppl_prefix,passkey")
        EvalSettings(lengths=(2048, 8192), metrics=('ppl_prefix', 'passkey'))
    """

    lengths: tuple[int, ...] | None = None
    metrics: tuple[str, ...] | None = None
    documents: int = 48
    seed: int = 0
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 10
    tail: int | None = None
    margin: float = 0.02
    stride: int | None = None
    key_spans: Path | None = None

    def __post_init__(self) -> None:
        given = vars(self).items()
        for name, value in {
            **{name: value.item() for name, value in given if getattr(value, "ndim", 1) == 0},  # of numpy or torch
            "lengths": None if self.lengths is None else _items(self.lengths),
            "metrics": _names(self.metrics),
            "depths": _items(self.depths),
            "key_spans": Path(self.key_spans) if isinstance(self.key_spans, str) else self.key_spans,
        }.items():
            object.__setattr__(self, name, value)
        for name in self.metrics or ():
            if name not in METRICS:
                raise UnknownNameError("metric", name, METRICS)
        if self.metrics == ():
            raise OptionError(f"metrics names what to measure, got none. Known: {', '.join(METRICS)}.")
        if self.lengths is not None and not (self.lengths and all(_is_whole(n, 2) for n in self.lengths)):
            raise OptionError(f"lengths are whole numbers of at least 2 tokens, got {brief_repr(list(self.lengths))}.")
        for name, least in (("documents", 2), ("trials", 1), ("tail", 1), ("stride", 1)):
            value = getattr(self, name)
            if not _is_whole(value, least) and not (value is None and name in ("tail", "stride")):
                raise OptionError(f"{name} is a whole number of at least {least}, got {brief_repr(value)}.")
        if not (_is_number(self.margin) and math.isfinite(self.margin) and self.margin >= 0):
            raise OptionError(f"margin is a number of nats per token, at least 0, got {brief_repr(self.margin)}.")
        if not _is_whole(self.seed, 0):
            raise OptionError(f"seed is a whole number of at least 0, got {brief_repr(self.seed)}.")
        if not self.depths or not all(_is_number(depth) and 0 <= depth <= 1 for depth in self.depths):
            raise OptionError(f"depths lie between 0 and 1, got {brief_repr(list(self.depths))}.")
        if "longppl" in (self.metrics or ()) and self.key_spans is None:
            raise OptionError(
                "longppl needs key_spans, a file that posswap key-spans wrote, or find_key_spans(...).save(path) in "
                "Python: give it by --key-spans, or by key_spans in Python."
            )

    def metrics_for(self, causal: bool) -> tuple[str, ...]:
        """Return the metrics to measure; the default depends on whether the model is causal."""
        return self.metrics or (DEFAULT_METRICS if causal else ENCODER_METRICS)

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON data; files are reduced to their names."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=public_name))

    def __repr__(self) -> str:
        fields = (field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default)
        return f"EvalSettings({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in fields)})"


def merge_settings(settings: EvalSettings | None, given: dict[str, Any]) -> EvalSettings:
    """Return `settings`, or the defaults, with those of the values `given` by name that are not None.

    Raises:
        OptionError, UnknownNameError: a value is invalid, or `settings` are not `EvalSettings`.

    Example:
        >>> merge_settings(EvalSettings(trials=3), {"lengths": [64, 128], "trials": None})
        EvalSettings(lengths=(64, 128), trials=3)
    """
    if settings is not None and not isinstance(settings, EvalSettings):
        raise OptionError(
            f"settings are EvalSettings, got {brief_repr(settings)}: give EvalSettings(lengths=[1024]), or "
            "lengths=[1024] without settings."
        )
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(settings or EvalSettings(), **changes)


def _names(metrics: object) -> object:
    if isinstance(metrics, str):
        return tuple(name.strip() for name in metrics.split(","))
    return None if metrics is None else _items(metrics)


def _items(values: object) -> tuple[object, ...]:
    """Return the items of a list as a tuple, those of numpy and torch as Python's; anything else is the only item."""
    is_one = isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0
    items = cast("Iterable[Any]", (values,) if is_one else values)
    return tuple(value.item() if getattr(value, "ndim", 1) == 0 else value for value in items)


def _is_whole(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
