"""What the page says of a model: its positions, the plan of a swap, what lengths cost, who serves it, what to type."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from hf_posswap.advice.case import Case, named_source
from hf_posswap.advice.commands import line
from hf_posswap.advice.serving import Serving, serving_of
from hf_posswap.checkpoints.exports.rules import TARGETS
from hf_posswap.errors import PosswapError
from hf_posswap.evaluation.cost import forward_operations
from hf_posswap.evaluation.memory import forward_need
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.patching.inspect.describe import Explanation, explain, on_meta
from hf_posswap.schemes import Scheme

_PREFILL = 512
_DOUBLINGS = 6


@dataclass(frozen=True)
class LengthCost:
    """What one text of a length costs.

    Attributes:
        length: tokens.
        cache: bytes of keys and values, in the precision of the config.
        forward: bytes of a forward beyond weights and cache, by the formula of the scheme: at most.
        operations: floating point operations of a forward.
    """

    length: int
    cache: int
    forward: int
    operations: float


@dataclass(frozen=True)
class ModelFacts:
    """What is said of a model.

    Attributes:
        name: as typed in commands.
        explanation: its positions, and the plan or why not.
        scheme: that was asked about, or None.
        costs: of lengths, rising.
        serving: of each program, of the model after the swap.
        commands: to go on with.
    """

    name: str
    explanation: Explanation
    scheme: Scheme | None
    costs: tuple[LengthCost, ...]
    serving: tuple[Serving, ...]
    commands: tuple[str, ...]

    @property
    def length(self) -> int | None:
        """Tokens after the swap; None where none was planned."""
        return None if self.explanation.plan is None else self.explanation.plan.max_length


def model_facts(
    model: Any, scheme: Scheme | None = None, *, written: str | None = None, trust_remote_code: bool = False, **how: Any
) -> ModelFacts:
    """Return what the page says of a model. No weights are read.

    Args:
        model: as in `hf_posswap.explain`.
        scheme: the swap to plan; None: none.
        written: the scheme as it is typed in a command; None: its name alone.
        trust_remote_code: run code that a folder or Hub id brings, where its config needs that.
        how: as in `hf_posswap.plan_swap`: max_length, site, relative.

    Raises:
        As `hf_posswap.explain`.
    """
    name, _ = named_source(model)
    found = explain(model, scheme, trust_remote_code=trust_remote_code, **(how if scheme is not None else {}))
    skeleton = on_meta(model, trust_remote_code=trust_remote_code)
    able = found.plan is not None and found.report.swapped is None
    swapped = _swapped(skeleton, scheme, how) if able else skeleton
    length = found.report.limit if found.plan is None else found.plan.max_length
    typed = written or (scheme.name if scheme is not None else None)
    case = Case(name, skeleton, found.report, "other", int(skeleton.num_parameters()), length, 0, None)
    serving = _serving(case, scheme, how) if found.report.swapped is None and found.refusal is None else ()
    return ModelFacts(
        name,
        found,
        scheme,
        _costs(swapped, found.report.geometry.original_length, length),
        serving,
        _commands(case, typed if able else None, how, serving),
    )


def _swapped(skeleton: Any, scheme: Any, how: dict[str, Any]) -> Any:
    """Return the model with the swap, without weights; without it where the swap needs their values."""
    try:
        return patch_model(on_meta(copy.deepcopy(skeleton.config)), scheme, **how)
    except PosswapError:
        return skeleton


def _costs(model: Any, window: int, length: int) -> tuple[LengthCost, ...]:
    lengths = [window * 2**k for k in range(_DOUBLINGS) if window * 2**k < length]
    return tuple(_cost(model, one) for one in [*lengths, length])


def _cost(model: Any, length: int) -> LengthCost:
    whole = forward_need(model, length)
    cache = forward_need(model, length, prefill=min(_PREFILL, length - 1)).cache if length > 1 else 0
    return LengthCost(length, cache, whole.total, forward_operations(model, length))


def _serving(case: Case, scheme: Scheme | None, how: dict[str, Any]) -> tuple[Serving, ...]:
    found = (serving_of(case, scheme, target=target, how=how) for target in TARGETS)
    return tuple(one for one in found if one is not None)


def _commands(case: Case, typed: str | None, how: dict[str, Any], serving: tuple[Serving, ...]) -> tuple[str, ...]:
    longer = str(max(case.length, 4 * case.window if typed is None else case.length))
    ask = line("advise", case.name, "--length", longer)
    if typed is None:
        return (ask, line("explain", case.name, "SCHEME", "--html"))
    options = [part for name, value in how.items() if value not in (None, "auto") for part in _option(name, value)]
    folder = f"{case.model.config.model_type}-{typed.partition(':')[0]}"
    lengths = f"{case.window},{longer}"
    return (
        line("patch", case.name, typed, *options, "-o", folder),
        line("compare", case.name, f"+{typed}", "--lengths", lengths, "--text", "books/", "-o", "results"),
        *_exports(folder, serving),
        ask,
    )


def _exports(folder: str, serving: tuple[Serving, ...]) -> list[str]:
    """Return how to hand the model in `folder` to each program that computes the same."""
    exact = [one for one in serving if one.verdict == "exact" and one.target != "transformers"]
    if not any(one.converted for one in exact):
        return [line("export", folder, "--target", one.target) for one in exact]
    stock = f"{folder}-stock"
    return [
        line("to-native", folder, "-o", stock),
        *(line("export", stock if one.converted else folder, "--target", one.target) for one in exact),
    ]


def _option(name: str, value: Any) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", str(value)
