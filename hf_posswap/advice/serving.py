"""What a serving program would make of the model after a swap, by the table of claims that `posswap export` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.advice.case import Case
from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import judge
from hf_posswap.checkpoints.native.convert import CONVERSIONS
from hf_posswap.errors import PosswapError, SchemeError, UnsupportedModelError
from hf_posswap.patching.apply.patch_model import patch_model, swap_plan
from hf_posswap.schemes import Scheme

_AS_IT_IS = ("transformers", "onnx", "torch", "sentence-transformers")
"""The programs that compute what needs hf_posswap as well as anything else."""


@dataclass(frozen=True)
class Serving:
    """What a program would make of it.

    Attributes:
        target: the program.
        verdict: "exact", "approximate", "impossible", or "unknown" where the table cannot tell.
        why: in words.
        known: the version that this is about, and whether it was run or read.
        converted: the stock class that `posswap to-native` makes first; "": it goes as it is.
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
    """Return what a program makes of the model with `scheme`; None: no program is asked about.

    Args:
        case: the question.
        scheme: "yarn:factor=4", or an object; None: the model as it is.
        target: the program; None: the one that `case` asks about.
        how: as in `plan_swap`; None: for the length of the case, where the scheme has no factor that says it.
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
        found = position_config_of(model.config)
    except (SchemeError, UnsupportedModelError) as error:  # it needs the weights' values, or says nothing known here
        return Serving(target, "unknown", str(error), "")
    converted = _converted(model) if found.kind == "plugin" and target not in _AS_IT_IS else None
    return _judged(target, found, "") if converted is None else _judged(target, *converted)


def _judged(target: str, found: PositionConfig, converted: str) -> Serving:
    try:
        judgement = judge(target, found)
    except UnsupportedModelError as error:
        return Serving(target, "unknown", str(error), "", converted)
    return Serving(target, judgement.verdict, judgement.why, judgement.claim.source, converted)


def _converted(model: Any) -> tuple[PositionConfig, str] | None:
    """Return what the first stock class that may compute the same states, and its name; None: there is none.

    Nothing is proved here: `posswap to-native` compares outputs before it writes.
    """
    for sources, build in CONVERSIONS.values():
        if sources is not None and model.config.model_type not in sources:
            continue
        try:
            blueprint = build(model, swap_plan(model))
        except (PosswapError, NotImplementedError, RuntimeError):  # not exact, or it needs the weights' values
            continue
        return position_config_of(blueprint.config), str(blueprint.model_class.__name__)
    return None
