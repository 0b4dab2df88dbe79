"""`posswap schemes` and `posswap families`: what there is."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from hf_posswap.cli.arguments import Json
from hf_posswap.cli.completing import family_names, scheme_names
from hf_posswap.cli.fields import describe_fields, format_value
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_table, show_text
from hf_posswap.errors import OptionError
from hf_posswap.utils.scheme_text import attribute_docs, description
from hf_posswap.utils.threads import ignored_warnings, quiet_logger


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


def _scheme(name: str, cls: Any) -> dict[str, Any]:
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
            help="Show this family whole: where positions live in its models.",
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
        details = _family(name, FAMILIES.get(name)) | {"parts": _stacks(FAMILIES.get(name))}
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


def _family(name: str, family: Any) -> dict[str, Any]:
    """Return the list entry of a family as JSON data."""
    return {
        "name": name,
        "summary": family.summary,
        "mechanism": _mechanism(family),
        "model_types": list(family.model_types),
        "by_rule": family.matches is not None,
    }


def _stacks(family: Any) -> list[dict[str, Any]]:
    """Return where the positions of each stack live, as module paths from the base model."""
    return [
        {"stack": stack.name, "attention": stack.attention, "table": None if stack.table is None else stack.table.path}
        for stack in family.parts
    ]


def _show_family(family: dict[str, Any]) -> None:
    types = ", ".join(family["model_types"]) or "every model whose config the family's rule accepts"
    rows = [(family["name"], family["summary"]), ("mechanism", family["mechanism"]), ("model types", types)]
    for stack in family["parts"]:
        rows += [(f"{stack['stack']} {site}".strip(), stack[site]) for site in ("table", "attention") if stack[site]]
    show_pairs(rows)


def _mechanism(family: Any) -> str:
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
