"""Settings of an evaluation: everything that its numbers depend on except the model and the text."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.utils.naming import public_name

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
        lengths: in tokens; None: 1, 2, 4 and 8 times the original window, as far as a model can run them.
        metrics: names of `METRICS`; None: the first six for a causal model; mlm_pos, retrieval and vectors for
            an encoder.
        documents: maximum number of documents.
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
        >>> EvalSettings(lengths=(2048, 8192), metrics=("ppl_prefix", "passkey")).documents
        48
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
        for name in self.metrics or ():
            if name not in METRICS:
                raise UnknownNameError("metric", name, METRICS)
        if self.metrics == ():
            raise OptionError(f"metrics names what to measure, got none. Known: {', '.join(METRICS)}.")
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 2):
            raise OptionError(f"lengths are numbers of at least 2 tokens, got {list(self.lengths)}.")
        for name in ("documents", "trials", "tail", "stride"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise OptionError(f"{name} is a whole number of at least 1, got {getattr(self, name)!r}.")
        self._check_numbers()
        if "longppl" in (self.metrics or ()) and self.key_spans is None:
            raise OptionError("longppl needs key_spans, a file that find_key_spans(...).save(path) wrote.")

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise OptionError(f"margin is a number of nats per token, at least 0, got {self.margin!r}.")
        if self.seed < 0:
            raise OptionError(f"seed is a whole number of at least 0, got {self.seed!r}.")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise OptionError(f"depths lie between 0 and 1, got {list(self.depths)}.")

    def metrics_for(self, causal: bool) -> tuple[str, ...]:
        """Return the metrics to measure; the default depends on whether the model is causal."""
        return self.metrics or (DEFAULT_METRICS if causal else ENCODER_METRICS)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON data; files are reduced to their names."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=public_name))
