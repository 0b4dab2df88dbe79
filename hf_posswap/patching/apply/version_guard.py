"""Swaps on untested versions of transformers and torch are first verified on a tiny twin of the model's class.

The twin has the model's config with reduced sizes. If the swapped twin fails a check that the stock one passes, the
swap is refused before the model is touched. Passes are cached in the cache folder, by class, config, scheme and
versions. On tested versions none of this runs.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import hashlib
import inspect
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.compat.transformers_attention import IMPLEMENTATION
from hf_posswap.compat.transformers_calls import forward_parameters
from hf_posswap.compat.transformers_models import lasting_values
from hf_posswap.errors import OptionError, PosswapError, UnsupportedSwapError, UntestedVersionWarning
from hf_posswap.families.locating import locate
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary import MOVED_BY_SHIFT
from hf_posswap.geometry import Geometry
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import build_class, native_class
from hf_posswap.patching.sites.attention.positions import PassPositionIds
from hf_posswap.schemes.base import Scheme, make_scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.common.trial import already_tried
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.testing.twin import build_twin, every_nth, fill_zeros, isolated, twin_config
from hf_posswap.testing.twin_checks import SHIFT, TOKENS, Expectations, TwinChecks, compare
from hf_posswap.utils.atomic_io import cache_folder, read_object, write_json
from hf_posswap.utils.digests import code_digests
from hf_posswap.versions import is_tested, tested

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

SETTING = "POSSWAP_UNTESTED"
"""The environment variable that selects the behaviour on an untested version."""
CHOICES = ("prove", "allow", "refuse")
"""Its values: verify each swap on a twin first (the default); swap without verification; refuse every swap."""

_BY_LAYER = ("per_layer", "rnope")
"""Schemes that refer to layers by number, so the twin needs as many."""

_proving: contextvars.ContextVar[bool] = contextvars.ContextVar("posswap_proving", default=False)
_verdicts: dict[str, Verdict] = {}
_warned: set[str] = set()
_lock = threading.RLock()
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


def untested_versions() -> dict[str, str]:
    """Return the packages that are installed in an untested version, with that version."""
    import transformers

    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {package: version for package, version in installed.items() if not is_tested(package, version)}


def guard_version(model: PreTrainedModel, plan: SwapPlan, apply: Apply, config: PreTrainedConfig | None = None) -> None:
    """On untested versions, verify the swap of `plan` on a twin of `model`, which is not touched.

    Args:
        model: to be swapped.
        plan: of the swap.
        apply: applies a plan to a model.
        config: of the model before the swap, if `model.config` is another one.

    Raises:
        UnsupportedSwapError: the swapped twin fails where the stock one passes, the verification could not run, or
            POSSWAP_UNTESTED=refuse.
        OptionError: POSSWAP_UNTESTED has an unknown value.

    Warns:
        UntestedVersionWarning: once per process; and once for each swap with undecided checks.
    """
    if _proving.get():
        return
    untested = untested_versions()
    if not untested:
        return
    choice = os.environ.get(SETTING) or CHOICES[0]
    if choice not in CHOICES:
        raise OptionError(f"{SETTING} must be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, got {choice!r}.")
    if choice == "refuse":
        raise UnsupportedSwapError(
            f"{type(model).__name__} is not swapped to {plan.named}: {_versions(untested)}, and {SETTING}=refuse. "
            f"Install a tested version, or set {SETTING}=prove to have each swap proved on a tiny model first."
        )
    _warn("", f"{_versions(untested)}. {_CONSEQUENCE[choice]} {_advice()}")
    if choice == "allow":
        return
    verdict = _verdict(model, plan, apply, model.config if config is None else config)
    name = type(model).__name__
    if verdict.problem is not None:
        raise UnsupportedSwapError(
            f"{name} is not swapped to {plan.named}: {_versions(untested)}, and {verdict.problem}. Install a tested "
            f"version. {SETTING}=allow swaps it unproved: its outputs may be wrong without an error. {_advice()}"
        )
    if verdict.undecided:
        checks = "; ".join(verdict.undecided)
        why = f"the unswapped {name} fails the same, or no tiny model of it can show it"
        _warn(f"{name} {checks}", f"not decided for {plan.named} in {name}: {checks} ({why}).")


_CONSEQUENCE = {
    "prove": f"Each swap is proved first, on a tiny model of the class. {SETTING}=allow leaves the proof out, "
    f"{SETTING}=refuse swaps nothing.",
    "allow": f"Swaps are not proved, since {SETTING}=allow: outputs may be wrong without an error.",
}


def _advice() -> str:
    """Return how to learn more with the installed package, or how to install it if this is a checkpoint's code."""
    if __name__.startswith("hf_posswap."):
        return "`posswap selfcheck` tests the installation."
    return "A newer hf_posswap may have been tested with it: pip install -U hf-posswap, and import hf_posswap first."


def _versions(untested: dict[str, str]) -> str:
    releases = {package: ", ".join(tested().get(package, ())) or "none" for package in untested}
    descriptions = [f"{package} {version} (tested: {releases[package]})" for package, version in untested.items()]
    return f"hf_posswap has not been tested with {' and '.join(descriptions)}"


def _warn(key: str, text: str) -> None:
    """Warn with `text`, once per `key`, at the first caller outside this package and transformers."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    level, frame = 1, inspect.currentframe()
    ours = (__name__.partition(".")[0], "transformers", "contextlib", "functools")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UntestedVersionWarning, stacklevel=level)


def _verdict(model: nn.Module, plan: SwapPlan, apply: Apply, config: PreTrainedConfig) -> Verdict:
    """Return the verdict on the swap, from this process, the cache folder, or a new verification."""
    cls = native_class(type(model))
    tiny = twin_config(config, all_layers=_is_by_layer(plan.record.to_dict()))
    known = _identity(cls, tiny, plan)
    key = hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode()).hexdigest()
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        lasting = _is_lasting(cls)
        verdict = _remembered(key) if lasting else None
        if verdict is None:
            whole = twin_config(config, all_layers=True)  # some classes do not run with only a few layers
            verdict = _proved([Proof(cls, twin, plan, apply) for twin in (tiny, whole)])
            if verdict.problem is None and lasting:
                _remember(key, known, verdict)
        _verdicts[key] = verdict
        return verdict


def _is_by_layer(value: object) -> bool:
    """Return whether the schemes in a record refer to layers by number."""
    if isinstance(value, dict):
        return value.get("name") in _BY_LAYER or any(map(_is_by_layer, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_by_layer, value))


def _identity(cls: type, tiny: PreTrainedConfig, plan: SwapPlan) -> dict[str, object]:
    """Return everything that a verdict depends on, as JSON."""
    import transformers

    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": lasting_values(tiny),
        "attention": str(getattr(tiny, IMPLEMENTATION, None)),
        "swap": plan.record.to_dict() | {"route": plan.route},
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": sys.version.partition(" ")[0],
        "hf_posswap": package_digest(),
        "own schemes": code_digests(sorted({*(plan.record.imports or {}).values()})),
    }


@functools.cache
def package_digest() -> str:
    """Return a digest of this package's code, or of the code that came with a checkpoint."""
    here = Path(__file__).resolve()
    installed = __name__.startswith("hf_posswap.")
    paths = here.parents[2].rglob("*.py") if installed else here.parent.glob("*.py")
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _is_lasting(cls: type) -> bool:
    """Return whether the versions identify the code: released versions, and a class of transformers."""
    import transformers

    released = "dev" not in transformers.__version__ and "git" not in torch.__version__
    return released and cls.__module__.partition(".")[0] == "transformers"


def _remembered(key: str) -> Verdict | None:
    """Return the cached verdict; None: there is none, or it is unreadable."""
    try:
        entry = read_object(_file(key), key=str, undecided=list)
    except (PosswapError, OSError, RuntimeError):
        return None
    return Verdict(None, tuple(map(str, entry["undecided"]))) if entry["key"] == key else None


def _remember(key: str, known: dict[str, Any], verdict: Verdict) -> None:
    shown = {name: known[name] for name in ("class", "transformers", "torch")} | {"scheme": known["swap"]["scheme"]}
    try:
        write_json(_file(key), {"key": key, **shown, "undecided": list(verdict.undecided)})
    except (PosswapError, OSError, RuntimeError, ValueError):  # no home, a full disk, another user's folder
        return


def _file(key: str) -> Path:
    return cache_folder(None) / "proved_swaps" / f"{key}.json"


@contextmanager
def _proof_context() -> Iterator[None]:
    token = _proving.set(True)
    try:
        with isolated():
            yield
    finally:
        _proving.reset(token)


def _proved(proofs: list[Proof]) -> Verdict:
    """Return the verdict of the first of `proofs` that can run; if none can, the verdict is a failure."""
    verdict = Verdict(None)
    for proof in proofs:
        try:
            with _proof_context():
                return proof.verdict()
        except Exception as error:  # a changed release may raise anything
            problem = f"the swap could not be proved on a tiny model of its class ({error_text(error)})"
            verdict = Verdict(verdict.problem or problem)
    return verdict


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

    cls: type[PreTrainedModel]
    config: PreTrainedConfig
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

    def remaining(
        self, seed: int, swapped: TwinChecks, spare: PreTrainedModel | None
    ) -> tuple[dict[str, str], dict[str, str]]:
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

    def twin(self, seed: int, config: PreTrainedConfig | None = None) -> PreTrainedModel:
        return build_twin(lambda: build_class(self.cls, copy.deepcopy(self.config if config is None else config)), seed)

    def _spare(self, twin: PreTrainedModel) -> PreTrainedModel | None:
        """Return a copy of the stock `twin`, which is cheaper than another; None: `remaining` needs none, or others."""
        if self.plan.route == "native" or not self._is_one_text_stack:
            return None
        if _of_replaced_layers(self.config, self.plan) is not self.config:
            return None
        try:
            return copy.deepcopy(twin)
        except Exception:  # classes that cannot be copied can be built
            return None

    def plan_of(self, twin: PreTrainedModel) -> SwapPlan:
        """Return the plan of the same swap for `twin`."""
        live, sites, record = self.plan.sites, locate(twin), self.plan.record.to_dict()
        schemes: dict[str, Scheme] = {}
        for name, scheme in self.plan.schemes.items():
            shapes = live.stack(name).geometry, sites.stack(name).geometry
            schemes[name] = make_scheme(_cut_scheme(scheme.to_dict(), *shapes))
        longest = record["max_length"]
        has_table = any(scheme.table_part is not None for scheme in self.plan.schemes.values())
        if has_table or any(stack.table is not None or stack.buffers for stack in sites.stacks):
            longest = min(longest, max(_LONGEST, sites.geometry.original_length + 64))
        arguments = self.plan.record.arguments | {"max_length": longest}
        with already_tried():
            plan = plan_swap(twin, schemes.get("", schemes), **arguments)
        edits, expected_edits = (
            sorted({f"{type(edit).__name__} {edit.stack}".strip() for edit in each.edits} - {*_PLAIN_EDITS})
            for each in (plan, self.plan)
        )
        for aspect, actual, expected in (
            ("route", plan.route, self.plan.route),
            ("edits", edits, expected_edits),
        ):
            if actual != expected:
                raise UnsupportedSwapError(
                    f"the tiny model would be swapped by other {aspect}: {actual}, not {expected}"
                )
        return plan

    @property
    def _is_one_text_stack(self) -> bool:
        return len(self.plan.sites.stacks) == 1 and self.plan.sites.main.inputs == "text"


def _of_replaced_layers(config: PreTrainedConfig, plan: SwapPlan) -> PreTrainedConfig:
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


_PLAIN_EDITS = ("EditConfig", "SetAttribute")
"""Edits that a tiny model may have others of."""


def _cut_scheme(value: object, live: Geometry, twin: Geometry, name: str = "") -> Any:
    """Return a scheme's JSON for a model of other sizes: lists per pair or per head are shortened, the rest stays.

    Where the twin's layers see a window, which is small, the window of a scheme is smaller.
    """
    if isinstance(value, dict):
        return {key: _cut_scheme(item, live, twin, key) for key, item in value.items()}
    if name == "window" and isinstance(value, int) and twin.sliding_window is not None:
        return min(value, max(1, twin.sliding_window // 2))
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


def _expectations(twin: PreTrainedModel, plan: SwapPlan) -> Expectations:
    cls = type(twin)
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
        relative=all(s.traits.relative and not _moved_beyond(s, sites.geometry) for s in schemes)
        and len(schemes) == len(sites.stacks)
        and types.isdisjoint(MOVED_BY_SHIFT),
        # a blend at weight 1 is its new scheme
        sees_positions=any(
            (scheme.new if isinstance(scheme, Blend) and scheme.weight == 1 else scheme).kind != "none"
            for scheme in schemes
        ),
    )


def _moved_beyond(scheme: Scheme, geometry: Geometry) -> bool:
    """Return whether the shift of a proof brings a scheme whose angles follow the length beyond the original one."""
    follows = isinstance(scheme, RotaryScheme) and scheme.length_dependent
    return follows and TOKENS + SHIFT > (getattr(scheme, "original_length", None) or geometry.original_length)


def _failed(twin_checks: TwinChecks, only: Collection[str] | None) -> dict[str, str]:
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
