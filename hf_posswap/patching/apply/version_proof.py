"""The verification of one swap on a tiny twin of the model's class, compared with the stock twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_posswap.compat.transformers_calls import forward_parameters
from hf_posswap.errors import PosswapError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary_compatibility import MOVED_BY_SHIFT
from hf_posswap.geometry import Geometry
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import build_class
from hf_posswap.patching.sites.attention.positions import PassPositionIds
from hf_posswap.schemes.base import Scheme, make_scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.common.trial import already_tried
from hf_posswap.testing.twin import build_twin, every_nth, fill_zeros
from hf_posswap.testing.twin_checks import Expectations, TwinChecks, compare

Apply = Callable[[Any, SwapPlan], None]
"""Applies a plan to a model."""
SEEDS = (0, 1)
"""Seeds of the twins' weights. A swap is refused only if it fails with each, so near ties of experts do not matter."""
_LONGEST = 4096
"""Most rows of a twin's position table, unless the model's original length is longer."""
_BY_HEAD = ("slopes", "start")
"""Scheme fields with one entry per head."""
REMAINING = "positions that remain beneath the swap"
SHIFTED = "shifted position ids"
MECHANISM = (SHIFTED, "skipped position ids", "order of tokens")
"""Checks of the scheme's guarantees, which a stock model need not satisfy."""


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one swap.

    Attributes:
        problem: why the swap is refused, as the end of a sentence; None: it is not.
        undecided: checks that the stock twin fails as well.
    """

    problem: str | None
    undecided: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proof:
    """A swap to verify, with the class and config of its twin.

    Attributes:
        cls: the stock class.
        config: of the twin.
        plan: of the swap.
        apply: applies a plan.
    """

    cls: Any
    config: Any
    plan: SwapPlan
    apply: Apply

    def verdict(self) -> Verdict:
        """Return the result of the checks on the swapped and the stock twin; errors of the twin are raised."""
        failed: dict[str, str] = {}
        for seed in SEEDS:
            failed, undecided = self.failures(seed)
            if not failed:
                return Verdict(None, tuple(undecided))
        failures = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        return Verdict(f"a tiny model of its class fails with the swap, and not without it ({failures})")

    def failures(self, seed: int) -> tuple[dict[str, str], dict[str, str]]:
        """Return the checks that the swapped twin fails and the stock one passes, and those that both fail."""
        twin = self.twin(seed)
        spare = self._spare(twin)
        plan = self.plan_of(twin)
        self.apply(twin, plan)
        expected = _expectations(twin, plan)
        fill_zeros(twin, plan.added)  # parameters that start at zero would have no effect
        swapped_checks = TwinChecks(twin, expected)
        failed = _failed(swapped_checks, None)
        if not failed:
            return self.remaining(seed, swapped_checks, spare)
        stock_checks = TwinChecks(self.twin(seed), expected)
        stock = _failed(stock_checks, failed)
        if "a forward" in stock:
            raise UnsupportedSwapError(f"without the swap, a forward of the tiny model fails: {stock['a forward']}")
        rotary = all(stack.rotary and stack.table is None for stack in plan.sites.stacks)
        promised = [name for name in MECHANISM if not (rotary and name == SHIFTED)]
        undecided = {name: failed.pop(name) for name in list(failed) if name in stock and name not in promised}
        if "padding" in undecided and (problem := _problem(swapped_checks.padding_unattended)):
            if _problem(stock_checks.padding_unattended) is None:  # something other than attention sees the padding
                failed["attention to padding"] = problem
        if not failed:
            failed, more = self.remaining(seed, swapped_checks, spare)
            undecided |= more
        return failed, undecided

    def remaining(self, seed: int, swapped: TwinChecks, spare: Any) -> tuple[dict[str, str], dict[str, str]]:
        """Return problems that show native positions still in force under the swap, and undecided checks.

        A natively swapped twin must equal a new model of its config. For other swaps, the same sites get no positions
        at all; then position ids must not matter.

        Args:
            seed: of the twins.
            swapped: the checks of the twin, which it passed.
            spare: a stock twin, for the same sites without positions; None: one is built.
        """
        if self.plan.route == "native":
            stock_config = copy.deepcopy(swapped.model.config)
            vars(stock_config).pop("posswap", None)  # so that stock transformers builds the model
            fresh = build_twin(lambda: build_class(self.cls, stock_config), seed)
            fresh.load_state_dict(swapped.model.state_dict())
            of_fresh = TwinChecks(fresh, swapped.expected).full
            problem = compare(swapped.full, of_fresh, "the swapped model and a stock one of its config")
            return ({} if problem is None else {"a model of the new config": problem}), {}
        if not self._is_one_text_stack:
            return {}, {}
        try:
            bare = self.twin(seed, _of_replaced_layers(self.config, self.plan)) if spare is None else spare
        except Exception as error:  # layers that differ in more than their type
            return {}, {REMAINING: f"no twin can be built whose layers are all swapped ({error_text(error)})"}
        try:
            plan = plan_swap(bare, "nope", site="attention")
        except PosswapError:  # no sites that could be left without positions
            return {}, {}
        self.apply(bare, plan)
        expected = _expectations(bare, plan)
        if not expected.takes_ids:
            return {}, {}
        moved = TwinChecks(bare, expected).skipped() is None
        return ({REMAINING: "position ids matter where the swap leaves no positions"} if moved else {}), {}

    def twin(self, seed: int, config: Any = None) -> Any:
        return build_twin(lambda: build_class(self.cls, copy.deepcopy(self.config if config is None else config)), seed)

    def _spare(self, twin: Any) -> Any:
        """Return a copy of the stock `twin`, which is cheaper than another; None: `remaining` needs none, or others."""
        if self.plan.route == "native" or not self._is_one_text_stack:
            return None
        if _of_replaced_layers(self.config, self.plan) is not self.config:
            return None
        try:
            return copy.deepcopy(twin)
        except Exception:  # classes that cannot be copied can be built
            return None

    def plan_of(self, twin: Any) -> SwapPlan:
        """Return the plan of the same swap for `twin`."""
        live, sites, record = self.plan.sites, locate(twin), self.plan.record.to_dict()
        schemes: dict[str, Scheme] = {}
        for name, scheme in self.plan.schemes.items():
            shapes = live.stack(name).geometry, sites.stack(name).geometry
            schemes[name] = make_scheme(_cut_scheme(scheme.to_dict(), *shapes))
        longest = record["max_length"]
        if any(stack.table is not None or stack.buffers for stack in sites.stacks) or self._has_table:
            longest = min(longest, max(_LONGEST, sites.geometry.original_length + 64))
        arguments = self.plan.record.arguments | {"max_length": longest}
        with already_tried():
            plan = plan_swap(twin, schemes.get("", schemes), **arguments)
        for aspect, of in (("route", lambda plan: plan.route), ("edits", _edit_types)):
            if of(plan) != of(self.plan):
                raise UnsupportedSwapError(
                    f"the tiny model would be swapped by other {aspect}: {of(plan)}, not {of(self.plan)}"
                )
        return plan

    @property
    def _is_one_text_stack(self) -> bool:
        return len(self.plan.sites.stacks) == 1 and self.plan.sites.main.inputs == "text"

    @property
    def _has_table(self) -> bool:
        return any(scheme.table_part is not None for scheme in self.plan.schemes.values())


def _of_replaced_layers(config: Any, plan: SwapPlan) -> Any:
    """Return `config` with only layers whose positions `plan` replaces, if others keep theirs."""
    types = getattr(config, "layer_types", None)
    kept = {name for stack in plan.sites.stacks for name in stack.rope_layer_types} - {
        name for stack in plan.sites.stacks for name in stack.full_attention_types
    }
    replaced = [name for name in types or () if name not in kept]
    if not kept or not replaced:
        return config
    changed = copy.deepcopy(config)
    changed.layer_types = [replaced[0]] * len(types or ())
    return changed


def _edit_types(plan: SwapPlan) -> list[str]:
    plain = ("EditConfig", "SetAttribute")
    return sorted({f"{type(edit).__name__} {edit.stack}".strip() for edit in plan.edits} - set(plain))


def _cut_scheme(value: Any, live: Geometry, twin: Geometry, name: str = "") -> Any:
    """Return a scheme's JSON for a model of other sizes: lists per pair or per head are shortened, the rest stays."""
    if isinstance(value, dict):
        return {key: _cut_scheme(item, live, twin, key) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    pairs, tiny = ((shape.rotary_dim or shape.head_dim) // 2 for shape in (live, twin))
    if not (value and all(isinstance(item, int | float) for item in value)):
        return [_cut_scheme(item, live, twin, name) for item in value]
    if name == "select":  # pairs by their numbers
        return sorted({item * tiny // pairs for item in value})
    if name in _BY_HEAD:
        return every_nth(value, twin.num_heads)
    sizes = {live.head_dim // 2: twin.head_dim // 2, pairs: tiny}
    return every_nth(value, sizes[len(value)]) if len(value) in sizes and name != "layers" else value


def _expectations(twin: Any, plan: SwapPlan) -> Expectations:
    cls: Any = type(twin)
    sites, schemes = plan.sites, plan.schemes.values()
    passing = [edit for edit in plan.edits if isinstance(edit, PassPositionIds)]
    types = {config_at(twin.config, stack.config).model_type for stack in sites.stacks}
    takes_ids = "position_ids" in forward_parameters(cls) or any(edit.entry is not None for edit in passing)
    refused = any(edit.refusal_text for edit in passing)
    return Expectations(
        causal=sites.geometry.causal,
        attention=[path for stack in sites.stacks for path in stack.attention],
        unused=frozenset(plan.unused),
        cached_equals_full=plan.cached_equals_full,
        takes_ids=takes_ids and not refused,
        first_position=sites.first_position,
        relative=all(s.traits.relative for s in schemes)
        and len(schemes) == len(sites.stacks)
        and types.isdisjoint(MOVED_BY_SHIFT),
        sees_positions=not all(map(_is_blind, schemes)),
    )


def _is_blind(scheme: Scheme) -> bool:
    """Return whether `scheme` in its current state uses no positions."""
    return (scheme.new if isinstance(scheme, Blend) and scheme.weight == 1 else scheme).kind == "none"


def _failed(twin_checks: TwinChecks, only: Any) -> dict[str, str]:
    """Return the problems by name of the check; of all checks, or of those in `only`."""
    problems = {}
    for name, check in twin_checks.checks().items():
        if only is None or name in only or name == "a forward":
            problem = _problem(check)
            if problem is not None:
                problems[name] = problem
    return problems


def _problem(check: Callable[[], str | None]) -> str | None:
    """Return the problem that `check` finds, or the error that it raises; None: there is none."""
    try:
        return check()
    except Exception as error:
        return error_text(error)


def error_text(error: Exception) -> str:
    """Return the type and message of an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300] or '-'}"
