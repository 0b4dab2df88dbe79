"""Swaps on untested versions of transformers and torch are first verified on a tiny twin of the model's class.

The twin has the model's config with reduced sizes. If the swapped twin fails a check that the stock one passes, the
swap is refused before the model is touched. Passes are cached in the cache folder, by class, config, scheme and
versions. On tested versions none of this runs.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import inspect
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_posswap.compat.transformers_attention import IMPLEMENTATION
from hf_posswap.compat.transformers_models import lasting_values
from hf_posswap.errors import OptionError, PosswapError, UnsupportedSwapError, UntestedVersionWarning
from hf_posswap.patching.apply.version_proof import Apply, Proof, Verdict, error_text
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.testing.twin import isolated, twin_config
from hf_posswap.utils.atomic_io import cache_folder, read_object, write_json
from hf_posswap.versions import is_tested, tested

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


def untested_versions() -> dict[str, str]:
    """Return the packages that are installed in an untested version, with that version."""
    import transformers

    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {package: version for package, version in installed.items() if not is_tested(package, version)}


def guard_version(model: Any, plan: SwapPlan, apply: Apply, config: Any = None) -> None:
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


def _verdict(model: Any, plan: SwapPlan, apply: Apply, config: Any) -> Verdict:
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


def _is_by_layer(value: Any) -> bool:
    """Return whether the schemes in a record refer to layers by number."""
    if isinstance(value, dict):
        return value.get("name") in _BY_LAYER or any(map(_is_by_layer, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_by_layer, value))


def _identity(cls: type, tiny: Any, plan: SwapPlan) -> dict[str, Any]:
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
        "hf_posswap": _code_digest(),
    }


@functools.cache
def _code_digest() -> str:
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
