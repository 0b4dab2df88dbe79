"""Facts about a model for the page: its positions, a swap plan, the cost of lengths, serving programs, commands."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.exports.rules import TARGETS
from hf_posswap.errors import PosswapError, UnsupportedModelError
from hf_posswap.evaluation.cost import forward_need, forward_operations
from hf_posswap.inspection.advice.case import Case, Serving, named_source, serving_of
from hf_posswap.inspection.advice.commands import line
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.patching.inspect.describe import Explanation, explain, on_meta
from hf_posswap.schemes import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL = 512
_DOUBLINGS = 6


@dataclass(frozen=True)
class LengthCost:
    """The cost of one text.

    Attributes:
        length: number of tokens.
        cache: bytes of keys and values, in the precision of the config.
        forward: upper bound of the bytes of a forward beyond weights and cache, by the scheme's formula.
        operations: floating-point operations of a forward.
    """

    length: int
    cache: int
    forward: int
    operations: float


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model.

    Attributes:
        name: the name in commands.
        explanation: its positions, and the plan or the refusal.
        scheme: the requested scheme, or None.
        costs: costs by length, ascending.
        serving: how each program handles the swapped model.
        commands: the next commands.
    """

    name: str
    explanation: Explanation
    scheme: Scheme | None
    costs: tuple[LengthCost, ...]
    serving: tuple[Serving, ...]
    commands: tuple[str, ...]

    @property
    def length(self) -> int | None:
        """Maximum length after the swap, or None without a plan."""
        return None if self.explanation.plan is None else self.explanation.plan.max_length


def model_facts(
    model: Any,
    scheme: Scheme | None = None,
    *,
    written: str | None = None,
    trust_remote_code: bool = False,
    **how: Any,
) -> ModelFacts:
    """Return the facts about a model. No weights are read.

    Args:
        model: as in `hf_posswap.explain`.
        scheme: the scheme to plan, or None.
        written: the scheme as typed in a command; None: its name.
        trust_remote_code: run code that comes with a folder or Hub id if its config needs it.
        how: as in `hf_posswap.plan_swap`: max_length, site, relative.

    Raises:
        UnsupportedModelError: the model reads images.
        As `hf_posswap.explain`.
    """
    name, _ = named_source(model)
    explanation = explain(model, scheme, trust_remote_code=trust_remote_code, **(how if scheme is not None else {}))
    if explanation.report.geometry.image_size is not None:
        raise UnsupportedModelError(
            f"{name} reads images, and the page draws positions by the length of a text. posswap explain {name} "
            "without --html tells which positions it has and which swaps it takes."
        )
    skeleton = on_meta(model, trust_remote_code=trust_remote_code)
    is_planned = explanation.plan is not None and explanation.report.swapped is None
    swapped = skeleton if scheme is None or not is_planned else _swapped(skeleton, scheme, how)
    length = explanation.report.limit if explanation.plan is None else explanation.plan.max_length
    scheme_text = written or (scheme.name if scheme is not None else None)
    case = Case(name, skeleton, explanation.report, "other", int(skeleton.num_parameters()), length, 0, None)
    window = explanation.report.geometry.original_length
    lengths = [window * 2**k for k in range(_DOUBLINGS) if window * 2**k < length]
    targets = TARGETS if explanation.report.swapped is None and explanation.refusal is None else ()
    verdicts = (serving_of(case, scheme, target=target, how=how) for target in targets)
    serving = tuple(verdict for verdict in verdicts if verdict is not None)
    return ModelFacts(
        name,
        explanation,
        scheme,
        tuple(_cost(swapped, tokens) for tokens in [*lengths, length]),
        serving,
        _commands(case, scheme_text if is_planned else None, how, serving),
    )


def _swapped(skeleton: PreTrainedModel, scheme: Scheme, how: dict[str, Any]) -> PreTrainedModel:
    """Return the swapped model without weights, or the unswapped one if the swap needs the weights' values."""
    try:
        return patch_model(on_meta(copy.deepcopy(skeleton.config)), scheme, **how)
    except PosswapError:
        return skeleton


def _cost(model: PreTrainedModel, length: int) -> LengthCost:
    whole = forward_need(model, length)
    cache = forward_need(model, length, prefill=min(_PREFILL, length - 1)).cache if length > 1 else 0
    return LengthCost(length, cache, whole.total, forward_operations(model, length))


def _commands(case: Case, typed: str | None, how: dict[str, object], serving: tuple[Serving, ...]) -> tuple[str, ...]:
    longer = str(max(case.length, 4 * case.window if typed is None else case.length))
    ask = line("advise", case.name, "--length", longer)
    if typed is None:
        return (ask, line("explain", case.name, "SCHEME", "--html"))
    options = [
        word
        for name, value in how.items()
        if value not in (None, "auto")
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    folder = f"{case.model.config.model_type}-{typed.partition(':')[0]}"
    lengths = f"{case.window},{longer}"
    return (
        line("patch", case.name, typed, *options, "-o", folder),
        line("compare", case.name, f"+{typed}", "--lengths", lengths, "--text", "books/", "-o", "results"),
        *_exports(folder, serving),
        ask,
    )


def _exports(folder: str, serving: tuple[Serving, ...]) -> list[str]:
    """Return the commands to export the model in `folder` for each program that runs it exactly."""
    exact = [program for program in serving if program.verdict == "exact" and program.target != "transformers"]
    if not any(program.converted for program in exact):
        return [line("export", folder, "--target", program.target) for program in exact]
    stock = f"{folder}-stock"
    return [
        line("to-native", folder, "-o", stock),
        *(line("export", stock if program.converted else folder, "--target", program.target) for program in exact),
    ]
