"""What a module registers, and the cases of the contract for it: each is a point on one pair."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Conv1D

from hf_posswap.compat.transformers_loading import language_classes
from hf_posswap.errors import OptionError
from hf_posswap.families import FAMILIES
from hf_posswap.families.base import Family
from hf_posswap.families.locating import locate
from hf_posswap.registry import Registry
from hf_posswap.schemes import SCHEMES
from hf_posswap.schemes.base import TERMS, known_schemes
from hf_posswap.testing.contract import outside, points
from hf_posswap.testing.contract.checks import BrokenPromiseError, SkippedPointError
from hf_posswap.testing.contract.models import MODELS, SMALL, START, Limits, Tiny
from hf_posswap.testing.contract.pairs import Pair, by_stack, is_one, refusal
from hf_posswap.testing.contract.point import Point, checks_of, point_of
from hf_posswap.utils.user_paths import import_module

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_posswap.patching.plan.swap_plan import SwapPlan


@dataclass(frozen=True)
class Registered:
    """The names that a module registers.

    Attributes:
        module: the module, as it was asked for.
        schemes: its schemes, sorted.
        terms: its terms of sums, sorted.
        families: its families, sorted.
    """

    module: str
    schemes: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    families: tuple[str, ...] = ()


def registered_by(module: str) -> Registered:
    """Import a module, and return what it registers, also if it was imported before.

    Args:
        module: the name of a module, or a file that ends in .py.

    Raises:
        OptionError: it cannot be imported, or registers nothing.
    """
    before = [registry.names_so_far() for registry in (SCHEMES, TERMS, FAMILIES)]  # entry points come after the module
    imported = import_module(module).__name__
    now = [registry.names_so_far() for registry in (SCHEMES, TERMS, FAMILIES)]
    new = [there - was for there, was in zip(now, before, strict=True)]
    families = {each.name for each in _values_in(imported) if isinstance(each, Family)} & now[2]
    registered = Registered(
        module,
        schemes=tuple(sorted(new[0] | _defined_in(imported, SCHEMES))),
        terms=tuple(sorted(new[1] | _defined_in(imported, TERMS))),
        families=tuple(sorted(new[2] | families)),
    )
    if not (registered.schemes or registered.terms or registered.families):
        raise OptionError(
            f"{module!r} registers no scheme and no family. Name the module that does so when it is imported, by "
            "SCHEMES.register, by a decorator of hf_posswap.schemes, or by hf_posswap.families.register."
        )
    return registered


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _defined_in(module: str, registry: Registry[Any]) -> set[str]:
    """Return the names of the classes in `registry` that a module or one inside it defines."""
    return {name for name, cls in registry.items() if _is_inside(cls.__module__, module)}


def _values_in(module: str) -> Iterator[object]:
    """Yield what a module, and those inside it that are imported, hold."""
    for name, loaded in list(sys.modules.items()):
        if _is_inside(name, module):
            yield from list(vars(loaded).values())


def tiny_models_of(family: str) -> dict[str, Tiny]:
    """Return a tiny model of each class for language modelling of a family, by the name of the class.

    Raises:
        BrokenPromiseError: its model types have no such class, or one of them cannot be built.
    """
    models = {}
    types = FAMILIES.get(family).model_types
    for model_type in types:
        for task, (config, model) in language_classes(model_type).items():
            models[model.__name__] = _tiny(task, config, model)
    if not models:
        raise BrokenPromiseError(
            "model types that AutoConfig and AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM know, "
            "from transformers or by their `register`",
            f"none of {', '.join(map(repr, types)) or 'no model types'} is known",
        )
    return models


def _tiny(task: str, config: type[PreTrainedConfig], model: type[PreTrainedModel]) -> Tiny:
    names = {field.name for field in dataclasses.fields(config)}
    causal, paired = task == "CAUSAL_LM", task == "SEQ_TO_SEQ_CAUSAL_LM"
    values: dict[str, object] = {"num_hidden_layers": 2} if "num_hidden_layers" in names else {}
    if causal and "is_decoder" in names:
        values["is_decoder"] = True
    if paired:
        values |= START
    unknown = Limits(known=False)
    tiny = Tiny(model, config, values, (), generates=task != "MASKED_LM", paired=paired, shrunk=True, limits=unknown)
    return dataclasses.replace(tiny, projections=_projections(tiny))


def _projections(tiny: Tiny) -> tuple[str, ...]:
    """Return the names of the linear layers inside the attention of a model, which LoRA adapts."""
    try:
        model = tiny.build()
    except Exception as error:  # arbitrary code of another package
        raise BrokenPromiseError(
            f"a {tiny.stock.__name__} of a tiny config, {tiny.values}, in which fields of the usual names are shrunk",
            f"{type(error).__name__}: {error}",
        ) from error
    paths = [path for stack in locate(model).stacks for path in stack.attention]
    inside = [each for path in paths for each in model.get_submodule(path).named_modules()]
    names = {name.rpartition(".")[2] for name, module in inside if name and isinstance(module, nn.Linear | Conv1D)}
    return tuple(sorted(names))


OF_EACH_SITE = ("sinusoidal", "yarn", "rope", "alibi", "self_extend")
"""Schemes that between them use every site and way of attending: a family meets them."""


@dataclass(frozen=True)
class Case:
    """One point on one pair.

    Attributes:
        subject: what makes the promise: "scheme window-toll", "family house".
        where: the class and the site, for messages.
        name: of the case, for ids.
        promise: the promise, a sentence.
        run: checks it, given an empty folder.
        ignored: warnings that it may meet, as Python's filters write them.
    """

    subject: str
    where: str
    name: str
    promise: str
    run: Callable[[Path], None]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnswappedPair(Pair):
    """A pair whose models stay as they are: what the stock class does by itself."""

    def patch(self, model: PreTrainedModel, **changes: object) -> SwapPlan:
        return self.plan

    def specimen(self, implementation: str | None = None) -> PreTrainedModel:
        return self.native() if implementation is None else self.native_with(implementation)


def cases_of(registered: Registered) -> Iterator[Case]:
    """Yield the cases of all that a module registers."""
    classes = known_schemes()
    for name in registered.schemes:
        if "text" in classes[name].inputs:
            yield from _scheme_cases(f"scheme {name}", name, name)
        else:
            yield _skipped(f"scheme {name}", name, "it is for images; the contract runs models of text")
    for name in registered.terms:
        yield from _scheme_cases(f"term {name}", name, f"rope + {name}")
    for name in registered.families:
        yield from _family_cases(name)


def _scheme_cases(subject: str, label: str, scheme: str) -> Iterator[Case]:
    pairs = [Pair(model, scheme) for model in SMALL]
    yield from _cases(subject, label, pairs)
    yield _some_class_takes_it(subject, label, pairs)


def _family_cases(name: str) -> Iterator[Case]:
    subject = f"family {name}"
    if not FAMILIES.get(name).model_types:
        yield _skipped(subject, name, "it matches models by rule, and names no model type to build")
        return
    try:
        models = tiny_models_of(name)
    except Exception as error:  # arbitrary code of another package
        promise = "its model types have classes for language modelling that locate finds"
        yield Case(subject, "its classes", f"{name}::classes", promise, partial(_raise, error))
        return
    MODELS.update(models)
    for model in models:
        yield from _cases(subject, name, [Pair(model, scheme) for scheme in OF_EACH_SITE])


def _cases(subject: str, label: str, outside_pairs: list[Pair]) -> Iterator[Case]:
    """Yield the cases of `outside_pairs`, and of those that can be inside attention too."""
    for pair in outside_pairs:
        planned = _case(subject, label, pair, outside.the_scheme_is_planned_or_refused_with_a_reason)
        yield planned
        try:
            refused = refusal(pair) is not None
            inside = replace(pair, site="attention")
            both = [pair, *([inside] if is_one(inside) else [])]
            pairs = by_stack(both)
        except Exception:  # what the first case says
            continue
        for each in pairs:
            for check in all_checks():
                point = point_of(check)
                if point.refused == refused and (each.first if refused else point.is_for(each)):
                    yield from _cases_of_point(subject, label, each, check, point)


def all_checks() -> list[Callable[..., None]]:
    """Return the checks of all points: those that this repository runs too, and those for other packages."""
    names = [each.name for each in pkgutil.iter_modules(points.__path__)]
    modules = [importlib.import_module(f"{points.__name__}.{name}") for name in names]
    checks = [check for module in [*modules, outside] for check in checks_of(module).values()]
    return [
        check for check in dict.fromkeys(checks) if check is not outside.the_scheme_is_planned_or_refused_with_a_reason
    ]


def _cases_of_point(subject: str, label: str, pair: Pair, check: Callable[..., None], point: Point) -> Iterator[Case]:
    if not point.parameter:
        yield _case(subject, label, pair, check)
    for value in point.values:
        yield _case(subject, label, pair, check, **{point.parameter: value})


def _case(subject: str, label: str, pair: Pair, check: Callable[..., None], **parameter: object) -> Case:
    point = point_of(check)
    where = pair.model + (f" ({pair.stack})" if pair.stack else "") + (" at attention" if pair.site != "auto" else "")
    if subject.startswith("family"):
        where += f" with {pair.scheme}"
    values = "".join(f"[{value}]" for value in parameter.values())
    takes = inspect.signature(check).parameters

    def run(folder: Path) -> None:
        torch.manual_seed(0)
        given = parameter | ({"tmp_path": folder} if "tmp_path" in takes else {})
        try:
            check(pair, **given)
        except SkippedPointError:
            raise
        except Exception:
            if point.of_stock and not pair.limits.known and _stock_fails(check, pair, given):
                raise SkippedPointError(f"the stock {pair.tiny.stock.__name__} does not do so itself") from None
            raise

    return Case(subject, where, f"{label}::{where}::{check.__name__}{values}", point.promise, run, point.ignored)


def _stock_fails(check: Callable[..., None], pair: Pair, given: dict[str, object]) -> bool:
    """Return whether the check fails on the stock class too."""
    try:
        check(UnswappedPair(pair.model, pair.scheme, pair.site, pair.stack), **given)
    except Exception:  # arbitrary code of another package
        return True
    return False


def _some_class_takes_it(subject: str, label: str, pairs: list[Pair]) -> Case:
    def run(folder: Path) -> None:
        refusals = {pair.model: refusal(pair) for pair in pairs}
        if all(refusals.values()):
            reasons = "; ".join(f"{model}: {reason}" for model, reason in refusals.items())
            raise BrokenPromiseError(f"that one of {', '.join(refusals)} takes it", reasons)

    promise = "One of the small classes takes the scheme."
    return Case(subject, "all classes", f"{label}::some_class_takes_it", promise, run)


def _skipped(subject: str, label: str, reason: str) -> Case:
    return Case(subject, "", f"{label}::contract", "", partial(_raise, SkippedPointError(reason)))


def _raise(error: Exception, folder: Path) -> None:
    raise error
