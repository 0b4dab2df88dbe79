"""`posswap schemes`, `families`, `support`, `selfcheck` and `--version`: what there is, and whether it works here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap import __version__
from hf_posswap.cli.arguments import Json, family_names, scheme_names
from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import quiet_library, show_indented, show_json, show_pairs, show_table, show_text
from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.utils.scheme_text import attribute_docs, describe_type, description, field_kinds, is_layers, is_scheme
from hf_posswap.utils.threads import ignored_warnings, quiet_logger
from hf_posswap.versions import is_tested, tested, tested_range

if TYPE_CHECKING:
    from hf_posswap.families import Family
    from hf_posswap.patching.inspect.census import ClassEntry
    from hf_posswap.schemes.base import Scheme

_MOST = 40
"""Most classes to plan: each takes about a second."""


def schemes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show this scheme whole: formula and fields.",
            show_default=False,
            autocompletion=scheme_names,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the position schemes, or show one of them whole.

    The list shows the traits of each scheme with its defaults. With a name it shows that scheme's formula, its source,
    and each field with its default and meaning. Set fields as NAME:FIELD=VALUE,FIELD=VALUE.

    Example: posswap schemes yarn
    """
    from hf_posswap.schemes import scheme_class
    from hf_posswap.schemes.base import known_schemes

    if name is not None:
        scheme = _scheme(name, scheme_class(name))
        return show_json(scheme) if json else _show_scheme(scheme)
    listed = [_scheme(known, cls) for known, cls in known_schemes().items()]
    return show_json(listed) if json else _show_schemes(listed)


def _scheme(name: str, cls: type[Scheme]) -> dict[str, object]:
    """Return the full description of a scheme as JSON data."""
    fields = describe_fields(cls)
    open_fields = any(field["required"] for field in fields)  # the traits may depend on them
    return {
        "name": name,
        "kind": cls.kind,
        "summary": cls.summary,
        "source": cls.source,
        "description": description(cls),
        "traits": None if open_fields else dataclasses.asdict(cls().traits),
        "letters": "?" if open_fields else cls().traits.letters(),
        "fields": fields,
    }


def _show_schemes(listed: list[dict[str, Any]]) -> None:
    traits = _trait_docs()
    rows = [[scheme[key] for key in ("name", "kind", "letters", "summary")] for scheme in listed]
    show_table(["name", "kind", "traits", "what it is"], rows)
    show_text("")
    show_pairs((f"{trait[0].upper()} {_shown(trait)}", meaning) for trait, meaning in traits.items())
    show_text("", "posswap schemes NAME shows one of them whole.")


def _shown(trait: str) -> str:
    return trait.replace("_", "-")


def _show_scheme(scheme: dict[str, Any]) -> None:
    traits = _trait_docs()
    trait_names = [_shown(trait) for trait in traits if scheme["traits"] and scheme["traits"][trait]]
    show_pairs(
        [
            (scheme["name"], scheme["summary"]),
            ("kind", scheme["kind"]),
            ("traits", ", ".join(trait_names) if scheme["traits"] else "depend on its fields"),
            ("source", scheme["source"]),
        ]
    )
    show_text("", *(" ".join(paragraph.split()) for paragraph in scheme["description"].split("\n\n")), "")
    if not scheme["fields"]:
        return show_text("It has no fields.")
    rows = [
        (
            field["name"],
            field["type"],
            "(required)" if field["required"] else format_value(field["default"]),
            field["meaning"],
        )
        for field in scheme["fields"]
    ]
    return show_table(["field", "type", "default", "meaning"], rows)


def _trait_docs() -> dict[str, str]:
    from hf_posswap.schemes import Traits

    documented = attribute_docs(Traits)
    return {field.name: documented[field.name] for field in dataclasses.fields(Traits)}


def families(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show this family, or that of a model type such as llama, whole: where positions live in its models.",
            show_default=False,
            autocompletion=family_names,
        ),
    ] = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="List every language model class of transformers instead (half a minute).")
    ] = False,
    json: Json = False,
) -> None:
    """List the model families, the kinds of model whose positions can be swapped, or show one of them whole.

    A family describes where positions live in its models. A model without a family is refused; posswap explain MODEL
    shows which family a model belongs to. With --classes, a tiny model is built of each class in transformers' Auto
    maps for causal, masked and seq2seq language models, and swaps are planned for it: which work, and why others do
    not.

    Example: posswap families --classes
    """
    if classes and name is not None:
        raise OptionError(f"--classes lists all classes, and {name!r} asks for one family: give one of the two.")
    if classes:
        return _classes(json)
    from hf_posswap.families import FAMILIES

    if name is not None:
        if name not in FAMILIES:
            from transformers import CONFIG_MAPPING

            from hf_posswap.families.locating import family_of

            try:
                with quiet_library(), warnings_off():
                    config = CONFIG_MAPPING[name]()
            except Exception:  # no model type, or one whose config has no defaults: the registry says what it knows
                config = None
            name = name if config is None else family_of(config).name
        family = FAMILIES.get(name)
        details = _family(name, family)
        details["parts"] = [  # where the positions of each stack live, as module paths from the base model
            {"stack": part.name, "attention": part.attention, "table": None if part.table is None else part.table.path}
            for part in family.parts
        ]
        return show_json(details) if json else _show_family(details)
    listed = [_family(name, family) for name, family in FAMILIES.items()]
    if json:
        return show_json(listed)
    rows = [
        [
            family["name"],
            family["mechanism"],
            ", ".join([*family["model_types"], *(["by rule"] if family["by_rule"] else [])]),
            family["summary"],
        ]
        for family in listed
    ]
    show_table(["name", "mechanism", "model types", "what it is"], rows)
    return show_text("", "by rule: every model whose config the family's rule accepts, whatever its type.")


def _family(name: str, family: Family) -> dict[str, Any]:
    """Return the list entry of a family as JSON data."""
    return {
        "name": name,
        "summary": family.summary,
        "mechanism": _mechanism(family),
        "model_types": list(family.model_types),
        "by_rule": family.matches is not None,
    }


def _show_family(family: dict[str, Any]) -> None:
    types = ", ".join(family["model_types"]) or "every model whose config the family's rule accepts"
    rows = [(family["name"], family["summary"]), ("mechanism", family["mechanism"]), ("model types", types)]
    for stack in family["parts"]:
        rows += [(f"{stack['stack']} {site}".strip(), stack[site]) for site in ("table", "attention") if stack[site]]
    show_pairs(rows)


def _mechanism(family: Family) -> str:
    """Return the stock position mechanism of a family's models, in two or three words."""
    traits = [stack.traits for stack in family.parts if stack.traits is not None]
    tables = [f"{stack.table.kind} table" for stack in family.parts if stack.table is not None]
    tables += ["learned table" for stack in family.parts if stack.image is not None]
    in_attention = [f"{inside.scheme} inside attention" for inside in traits if inside.scheme is not None]
    relative = ["relative part" for inside in traits if inside.relative is not None]
    if family.rotary:
        return " or ".join(dict.fromkeys(["rotary", *in_attention]))  # by config
    return ", ".join(dict.fromkeys([*tables, *in_attention, *relative]))


@contextmanager
def warnings_off() -> Iterator[None]:
    """Silence warnings inside the block: transformers and torch warn about the sizes of tiny models."""
    with quiet_logger("transformers", logging.ERROR), ignored_warnings():
        yield


def _classes(json: bool) -> None:
    """Show the census of transformers' language model classes."""
    from hf_posswap.patching.inspect.census import ASKED, census

    with quiet_library(), warnings_off():
        entries = census()
    if json:
        return show_json([entry.to_dict() for entry in entries])
    good = [entry for entry in entries if entry.supported]
    rows = [[entry.name, entry.family or "", *entry.routes.values()] for entry in good]
    show_table(["class", "family", *ASKED], rows)
    show_text("", "native: stock transformers runs the result; plugin: hf_posswap does; no: refused.", "")
    show_pairs((entry.name, entry.reason or "") for entry in entries if not entry.supported)
    return show_text("", f"{len(good)} of {len(entries)} classes can be swapped.")


def format_value(value: object) -> str:
    """Format `value` as it is written on the command line.

    Example:
        >>> format_value((1.0, 2.5)), format_value(None), format_value(True)
        ('1,2.5', 'none', 'true')
    """
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return ",".join(map(format_value, value))
    if isinstance(value, float):
        return f"{value:.17g}" if float(f"{value:g}") != value else f"{value:g}"
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def describe_fields(cls: type) -> list[dict[str, Any]]:
    """Return for each field of the dataclass `cls`: name, type, default, whether it is required, and meaning."""
    documented = attribute_docs(cls)
    out = []
    for field, annotation in zip(dataclasses.fields(cls), field_kinds(cls).values(), strict=True):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        out.append(
            {
                "name": field.name,
                "type": describe_type(annotation),
                "default": _plain(default, annotation),
                "required": required,
                "meaning": documented.get(field.name, ""),
            }
        )
    return out


def _plain(default: Any, annotation: object) -> object:
    """Return a field's default as JSON data."""
    if is_layers(annotation):
        return {str(layer): scheme.to_dict() for layer, scheme in default}
    if is_scheme(annotation):
        return _scheme_data(default)
    if isinstance(default, tuple):
        return [_scheme_data(item) if hasattr(item, "to_dict") else item for item in default]
    return default


def _scheme_data(default: Any) -> object:
    """Return a scheme as JSON data: its name, where all its fields are as they begin."""
    return default.name if default == type(default)() else default.to_dict()


def support(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Part of the name of a class, a model type or a family: qwen3, BertForMaskedLM, rotary.",
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """Find the schemes that work in a model class of the installed transformers: natively, by plugin, or not at all.

    A tiny model of each class whose name, model type or family contains NAME is built, and a swap to every scheme is
    planned for it. Nothing is downloaded. For a checkpoint, posswap explain MODEL says the same from its config.

    Example: posswap support qwen3
    """
    with quiet_library(), warnings_off():
        from hf_posswap.patching.inspect.census import census, classes_named, known_names

        matching = classes_named(name)
        if not matching:
            raise UnknownNameError("model class, model type or family", name, known_names())
        if len(matching) > _MOST:
            raise OptionError(
                f"{name!r} is part of {len(matching)} classes, such as {', '.join(matching[:3])}: give a longer name. "
                "posswap families --classes lists all."
            )
        entries = census(matching, every_scheme=True)
    if json:
        return show_json([entry.to_dict() for entry in entries])
    groups: dict[tuple[tuple[str, str], ...], list[ClassEntry]] = {}
    for entry in entries:
        groups.setdefault(tuple(entry.routes.items()), []).append(entry)
    for group in groups.values():
        _show_support(group)
    return show_text(
        "native: stock transformers loads the saved checkpoint. plugin: loading it needs hf_posswap. no: refused; "
        "posswap explain MODEL SCHEME says why."
    )


def _show_support(entries: Sequence[ClassEntry]) -> None:
    """Print classes that support the same schemes, and the schemes by their route; or why each class is refused."""
    for entry in entries:
        refused = "" if entry.supported else f": {entry.reason}"
        show_indented(f"{entry.name} ({', '.join(entry.model_types)}){refused}", 0)
    by_route = {
        route: [scheme for scheme, scheme_route in entries[0].routes.items() if scheme_route == route]
        for route in ("native", "plugin", "no")
    }
    show_pairs((f"  {route}", ", ".join(schemes)) for route, schemes in by_route.items() if schemes)
    show_text("")


def selfcheck(json: Json = False) -> None:
    """Prove in less than a minute that this installation works, or name the step that fails.

    Swaps one tiny model of each kind of family: plan, patch, verify, steps with a cache, save and load, unpatch.
    Nothing is downloaded, and nothing stays on the disk. The exit code is 1 if a check failed.

    Example: posswap selfcheck
    """
    with quiet_library():
        from hf_posswap.testing.selfcheck import selfcheck as check_all

        report = check_all()
    if json:
        show_json(report.to_dict())
    else:
        show_pairs(report.versions.items())
        show_text("")
        rows = []
        for subject, group in groupby(report.checks, key=lambda check: check.subject):
            checks = list(group)
            wrong = next((check for check in checks if check.ok is False), None)
            outcome = f"{len(checks)} checks hold" if wrong is None else f"{wrong.step}: {wrong.said}"
            rows.append(("ok" if wrong is None else "FAILED", subject, outcome))
        show_table(["", "what", "found"], rows)
        for check in report.failed:
            show_text("", f"{check.subject}, {check.step}: look at {check.touch}")
        summary = "all hold" if report.ok else f"{len(report.failed)} failed"
        show_text("", f"{len(report.checks)} checks in {report.seconds:.0f} s: {summary}.")
    if not report.ok:
        raise typer.Exit(Code.OTHER)


def version_lines() -> list[str]:
    """Return the version of hf_posswap with the tested range of each package, and what is installed here.

    Example:
        >>> version_lines()[0].startswith("hf_posswap ")
        True
    """
    ranges = ", ".join(f"{package} {tested_range(package)}" for package in tested())
    here = [f"Python {platform.python_version()}", *(_installed_version(package) for package in tested())]
    return [f"hf_posswap {__version__} (tested with {ranges})", f"installed: {', '.join(here)}"]


def _installed_version(package: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"
    return f"{package} {version}" + ("" if is_tested(package, version) else " (not tested)")
