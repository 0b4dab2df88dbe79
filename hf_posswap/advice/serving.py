"""How a serving program would handle the model after a swap, by the table of claims of `posswap export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.advice.case import Case
from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import judge
from hf_posswap.checkpoints.native import RUN_PLUGINS, stock_config
from hf_posswap.errors import SchemeError, UnsupportedModelError
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.schemes import Scheme
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class Serving(ResultView):
    """How a program would handle the model.

    Attributes:
        target: the program.
        verdict: "exact", "approximate", "impossible", or "unknown" if the table has no entry.
        why: the reason.
        known: the program's version, and whether it was run or its code was read.
        converted: the stock class to which `posswap to-native` converts first, or "".
    """

    target: str
    verdict: str
    why: str
    known: str
    converted: str = ""

    def __str__(self) -> str:
        first = f"as a {self.converted} by posswap to-native: " if self.converted else ""
        known = f" ({self.known})" if self.known else ""
        return f"{self.target}: {first}{self.verdict}, {self.why}{known}"


def serving_of(
    case: Case, scheme: Scheme | str | None, *, target: str | None = None, how: dict[str, Any] | None = None
) -> Serving | None:
    """Return how a program handles the model with `scheme`, or None without a program.

    Args:
        case: the request.
        scheme: "yarn:factor=4", or an object; None: the unswapped model.
        target: the program; None: that of `case`.
        how: as in `plan_swap`; None: the length of the case, unless the scheme has a factor.
    """
    target = target or case.serve
    if target is None:
        return None
    if how is None:
        how = {} if "factor=" in str(scheme) else {"max_length": case.length}
    try:
        model = case.fresh()
        if scheme is not None:
            patch_model(model, scheme, **how)
        position_config = position_config_of(model.config)
    except (SchemeError, UnsupportedModelError) as error:  # it needs the weights' values, or is unknown here
        return Serving(target, "unknown", str(error), "")
    converted = stock_config(model) if position_config.kind == "plugin" and target not in RUN_PLUGINS else None
    return _judged(target, position_config, "") if converted is None else _judged(target, *converted)


def _judged(target: str, position_config: PositionConfig, converted: str) -> Serving:
    try:
        judgement = judge(target, position_config)
    except UnsupportedModelError as error:
        return Serving(target, "unknown", str(error), "", converted)
    return Serving(target, judgement.verdict, judgement.why, judgement.claim.source, converted)
