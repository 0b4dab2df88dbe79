"""Swaps on versions of transformers and torch that no test has run: proved on a tiny twin of the model's class first.

The twin has the model's config with its sizes cut. Where the swapped twin fails a check that the stock one passes, the
swap is refused, before the model is touched. What passed is remembered in the cache folder, by class, config, scheme
and versions. On tested versions nothing of this happens.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posswap.compat.transformers_attention import IMPLEMENTATION
from hf_posswap.compat.transformers_calls import forward_parameters
from hf_posswap.compat.transformers_models import lasting_values
from hf_posswap.errors import OptionError, PosswapError, UnsupportedSwapError, UntestedVersionWarning
from hf_posswap.families.locating import locate
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary_compatibility import MOVED_BY_SHIFT
from hf_posswap.geometry import Geometry
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.building import build_class
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.patching.sites.attention.position_ids import PassPositionIds
from hf_posswap.schemes.base import Scheme, make_scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.testing.twin import build_twin, every_nth, fill_zeros, isolated, twin_config
from hf_posswap.testing.twin_checks import Expectations, TwinChecks, compare
from hf_posswap.utils.atomic_io import cache_folder, read_object, write_json
from hf_posswap.versions import is_tested, tested_range

SETTING = "POSSWAP_UNTESTED"
"""The environment variable that says what happens on an untested version."""
CHOICES = ("prove", "allow", "refuse")
"""Its values: prove each swap on a twin first, the default; swap unproved; swap nothing."""

_SEEDS = (0, 1)
"""Of the twins' weights: a swap is refused where it fails with each, so that no near tie of two experts decides."""
_LONGEST = 4096
"""Rows of a twin's position table, at most, where the model itself was not made for more."""
_BY_LAYER = ("per_layer", "rnope")
"""Schemes that name layers by their number, so that the twin has as many."""
_BY_HEAD = ("slopes", "start")
"""Fields of schemes that list something for each head."""

Apply = Callable[[Any, SwapPlan], None]

_proving: contextvars.ContextVar[bool] = contextvars.ContextVar("posswap_proving", default=False)
_verdicts: dict[str, Verdict] = {}
_warned: set[str] = set()
_lock = threading.RLock()


@dataclass(frozen=True)
class Verdict:
    """What the proof of one swap came to.

    Attributes:
        problem: why the swap is refused, as the rest of a sentence; None: it is not.
        undecided: checks that the stock twin fails as well.
    """

    problem: str | None
    undecided: tuple[str, ...] = ()


def untested_versions() -> dict[str, str]:
    """Return the packages that are installed in a version that no test has run, with that version."""
    import transformers

    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {package: version for package, version in installed.items() if not is_tested(package, version)}


def guard_version(model: Any, plan: SwapPlan, apply: Apply, config: Any = None) -> None:
    """Do nothing on tested versions; on others prove the swap of `plan` on a twin of `model`, which is not touched.

    Args:
        model: that is about to be swapped.
        plan: of the swap.
        apply: applies a plan to a model.
        config: of the model from before the swap, where `model.config` is not that.

    Raises:
        UnsupportedSwapError: the swapped twin fails where the stock one does not, or the proof could not be carried
            out, or POSSWAP_UNTESTED=refuse.
        OptionError: POSSWAP_UNTESTED is none of its values.

    Warns:
        UntestedVersionWarning: once a process; and once for each swap of which some checks were not decided.
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
        what = "; ".join(verdict.undecided)
        why = f"the unswapped {name} fails the same, or no tiny model of it can show it"
        _warn(f"{name} {what}", f"not decided for {plan.named} in {name}: {what} ({why}).")


_CONSEQUENCE = {
    "prove": f"Each swap is proved first, on a tiny model of the class. {SETTING}=allow leaves the proof out, "
    f"{SETTING}=refuse swaps nothing.",
    "allow": f"Swaps are not proved, since {SETTING}=allow: outputs may be wrong without an error.",
}


def _advice() -> str:
    """Return how to find out more, where this package is installed, or to get it, where this is a checkpoint's code."""
    if __name__.startswith("hf_posswap."):
        return "`posswap selfcheck` tests the installation."
    return "A newer hf_posswap may have been tested with it: pip install -U hf-posswap, and import hf_posswap first."


def _versions(untested: dict[str, str]) -> str:
    said = [f"{package} {version} (tested: {tested_range(package)})" for package, version in untested.items()]
    return f"hf_posswap has not been tested with {' and '.join(said)}"


def _warn(key: str, text: str) -> None:
    """Warn of `text`, once for each `key`, at the first caller outside of this package and transformers."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    level, frame = 1, inspect.currentframe()
    ours = (__name__.partition(".")[0], "transformers", "contextlib", "functools")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UntestedVersionWarning, stacklevel=level)


def _verdict(model: Any, plan: SwapPlan, apply: Apply, config: Any) -> Verdict:
    """Return what is known of the swap, from this process, the cache folder, or a proof now."""
    cls = native_class(type(model))
    tiny = twin_config(config, all_layers=_is_by_layer(plan.record.to_dict()))
    known = _identity(cls, tiny, plan)
    key = hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode()).hexdigest()
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        lasting = _is_lasting(cls)
        found = _remembered(key) if lasting else None
        if found is None:
            whole = twin_config(config, all_layers=True)  # of some classes a few layers alone do not run
            found = _proved([Proof(cls, one, plan, apply) for one in (tiny, whole)])
            if found.problem is None and lasting:
                _remember(key, known, found)
        _verdicts[key] = found
        return found


def _is_by_layer(value: Any) -> bool:
    """Return whether the schemes in a record name layers by their number."""
    if isinstance(value, dict):
        return value.get("name") in _BY_LAYER or any(map(_is_by_layer, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_by_layer, value))


def _identity(cls: type, tiny: Any, plan: SwapPlan) -> dict[str, Any]:
    """Return all that a proof is of, as JSON."""
    import transformers

    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": lasting_values(tiny),
        "attention": str(getattr(tiny, IMPLEMENTATION, None)),
        "swap": plan.record.to_dict() | {"route": plan.route},
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": sys.version.partition(" ")[0],
        "hf_posswap": _code_digest(),
    }


@functools.cache
def _code_digest() -> str:
    """Return a digest of this package's own code, or of that which came with a checkpoint."""
    here = Path(__file__).resolve()
    installed = __name__.startswith("hf_posswap.")
    paths = here.parents[2].rglob("*.py") if installed else here.parent.glob("*.py")
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _is_lasting(cls: type) -> bool:
    """Return whether versions say which code runs: that of releases, and a class of transformers."""
    import transformers

    released = "dev" not in transformers.__version__ and "git" not in torch.__version__
    return released and cls.__module__.partition(".")[0] == "transformers"


def _remembered(key: str) -> Verdict | None:
    """Return what the cache folder has; None: nothing, or nothing that can be read."""
    try:
        held = read_object(_file(key), key=str, undecided=list)
    except (PosswapError, OSError, RuntimeError):
        return None
    return Verdict(None, tuple(map(str, held["undecided"]))) if held["key"] == key else None


def _remember(key: str, known: dict[str, Any], verdict: Verdict) -> None:
    shown = {name: known[name] for name in ("class", "transformers", "torch")} | {"scheme": known["swap"]["scheme"]}
    try:
        write_json(_file(key), {"key": key, **shown, "undecided": list(verdict.undecided)})
    except (PosswapError, OSError, RuntimeError, ValueError):  # no home, a full disk, a folder of somebody else
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
    """Return the result of the first of `proofs` that can be carried out; where none can, it is never a pass."""
    verdict = Verdict(None)
    for proof in proofs:
        try:
            with _proof_context():
                return proof.verdict()
        except Exception as error:  # a release that moved something raises whatever it likes
            problem = f"the swap could not be proved on a tiny model of its class ({_words(error)})"
            verdict = Verdict(verdict.problem or problem)
    return verdict


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300] or '-'}"


@dataclass(frozen=True)
class Proof:
    """A swap, and what its twin is made of.

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
        """Return what the checks of the swapped and the stock twin come to, whatever the twin raises."""
        failed: dict[str, str] = {}
        for seed in _SEEDS:
            failed, undecided = self.failures(seed)
            if not failed:
                return Verdict(None, tuple(undecided))
        what = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        return Verdict(f"a tiny model of its class fails with the swap, and not without it ({what})")

    def failures(self, seed: int) -> tuple[dict[str, str], dict[str, str]]:
        """Return the checks that the swapped twin fails and the stock one passes, and those that both fail."""
        twin = self.twin(seed)
        plan = self.plan_of(twin)
        self.apply(twin, plan)
        expected = _expectations(twin, plan)
        fill_zeros(twin, plan.added)  # what is learned from zero would show nothing
        swapped_checks = TwinChecks(twin, expected)
        failed = _failed(swapped_checks, None)
        if not failed:
            return self.remaining(seed, twin)
        stock_checks = TwinChecks(self.twin(seed), expected)
        stock = _failed(stock_checks, failed)
        if "a forward" in stock:
            raise UnsupportedSwapError(f"without the swap, a forward of the tiny model fails: {stock['a forward']}")
        rotary = all(stack.rotary and stack.table is None for stack in plan.sites.stacks)
        promised = [name for name in MECHANISM if not (rotary and name == SHIFTED)]
        undecided = {name: failed.pop(name) for name in list(failed) if name in stock and name not in promised}
        if "padding" in undecided and (problem := _problem(swapped_checks.padding_unattended)):
            if _problem(stock_checks.padding_unattended) is None:  # something else than attention sees the padding
                failed["attention to padding"] = problem
        if not failed:
            failed, more = self.remaining(seed, twin)
            undecided |= more
        return failed, undecided

    def remaining(self, seed: int, swapped: Any) -> tuple[dict[str, str], dict[str, str]]:
        """Return what shows that positions of the model's own are in force beneath the swap, and what is not decided.

        What a native swap makes must be what the class makes of the new config. Elsewhere the same places are given no
        positions at all: then position ids change nothing.

        Args:
            seed: of the twins.
            swapped: the twin that passed all checks.
        """
        if self.plan.route == "native":
            said = copy.deepcopy(swapped.config)
            vars(said).pop("posswap", None)  # what stock transformers makes of it
            fresh = build_twin(lambda: build_class(self.cls, said), seed)
            fresh.load_state_dict(swapped.state_dict())
            of_fresh, of_swapped = (TwinChecks(one, Expectations(causal=False)).full for one in (fresh, swapped))
            problem = compare(of_swapped, of_fresh, "the swapped model and a stock one of its config")
            return ({} if problem is None else {"a model of the new config": problem}), {}
        try:
            bare = self.twin(seed, _of_replaced_layers(self.config, self.plan))
        except Exception as error:  # layers that differ in more than their type
            return {}, {REMAINING: f"no twin can be built whose layers are all swapped ({_words(error)})"}
        try:
            plan = plan_swap(bare, "nope", site="attention")
        except PosswapError:  # no places that could be left without positions
            return {}, {}
        self.apply(bare, plan)
        expected = _expectations(bare, plan)
        if not expected.takes_ids or plan.sites.main.inputs != "text" or len(plan.sites.stacks) > 1:
            return {}, {}
        moved = TwinChecks(bare, expected).skipped() is None
        return ({REMAINING: "position ids matter where the swap leaves no positions"} if moved else {}), {}

    def twin(self, seed: int, config: Any = None) -> Any:
        return build_twin(lambda: build_class(self.cls, copy.deepcopy(self.config if config is None else config)), seed)

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
        asked = self.plan.record.arguments | {"max_length": longest}
        found = plan_swap(twin, schemes.get("", schemes), **asked)
        for what, of in (("route", lambda plan: plan.route), ("edits", _kinds_of_edits)):
            if of(found) != of(self.plan):
                raise UnsupportedSwapError(
                    f"the tiny model would be swapped by other {what}: {of(found)}, not {of(self.plan)}"
                )
        return found

    @property
    def _has_table(self) -> bool:
        return any(scheme.table_part is not None for scheme in self.plan.schemes.values())


def _of_replaced_layers(config: Any, plan: SwapPlan) -> Any:
    """Return `config` with layers alone whose positions `plan` replaces, where others keep theirs."""
    types = getattr(config, "layer_types", None)
    kept = {kind for stack in plan.sites.stacks for kind in stack.rope_layer_types} - {
        kind for stack in plan.sites.stacks for kind in stack.full_attention_types
    }
    replaced = [kind for kind in types or () if kind not in kept]
    if not kept or not replaced:
        return config
    changed = copy.deepcopy(config)
    changed.layer_types = [replaced[0]] * len(types or ())
    return changed


REMAINING = "positions that remain beneath the swap"
SHIFTED = "shifted position ids"
MECHANISM = (SHIFTED, "skipped position ids", "order of tokens")
"""Checks of the scheme's own promises, which a stock model need not keep."""


def _kinds_of_edits(plan: SwapPlan) -> list[str]:
    plain = ("EditConfig", "SetAttribute")
    return sorted({f"{type(edit).__name__} {edit.stack}".strip() for edit in plan.edits} - set(plain))


def _cut_scheme(value: Any, live: Geometry, twin: Geometry, name: str = "") -> Any:
    """Return a scheme's JSON for a model of other sizes: what it lists by pair or by head is cut, all else stays."""
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
    """Return whether `scheme`, as it is in force, knows no positions."""
    return (scheme.new if isinstance(scheme, Blend) and scheme.weight == 1 else scheme).kind == "none"


def _failed(tried: TwinChecks, only: Any) -> dict[str, str]:
    """Return what is wrong, by the name of the check; of all checks, or of those in `only`."""
    found = {}
    for name, check in tried.checks().items():
        if only is None or name in only or name == "a forward":
            problem = _problem(check)
            if problem is not None:
                found[name] = problem
    return found


def _problem(check: Callable[[], str | None]) -> str | None:
    """Return what `check` finds wrong, or what it raises; None: nothing."""
    try:
        return check()
    except Exception as error:
        return _words(error)
