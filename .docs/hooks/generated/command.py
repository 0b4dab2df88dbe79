"""The reference of the command `posswap`, from Typer."""

from __future__ import annotations

import inspect
from typing import Any

import typer.main

from generated.markup import fenced, literal, table
from hf_posswap.cli.app import app


def render() -> str:
    """Return a section for each command: how it is typed, what it does, its arguments and its options."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="posswap")
    commands = _commands(group)
    listed = [[f"[`posswap {name}`](#posswap-{name})", command.get_short_help_str(200)] for name, command in commands]
    sections = [table(["command", "what it does"], listed), literal(_joined(group.epilog or ""))]
    for name, command in commands:
        sections.append(_section(name, command, context))
    return "\n\n".join(sections)


def _commands(group: Any) -> list[tuple[str, Any]]:
    return [(name, command) for name, command in group.commands.items() if not command.hidden]


def _section(name: str, command: Any, above: Any) -> str:
    context = command.context_class(command, info_name=name, parent=above)
    usage = command.get_usage(context).partition(":")[2].strip()
    blocks = [f"## posswap {name}", fenced(" ".join(usage.split())), _prose(command.help or "")]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    if arguments:
        rows = [[f"`{_value(p)}`", literal(p.help or "")] for p in arguments]
        blocks.append(table(["argument", "meaning"], rows))
    rows = [[_option(p), literal(p.help or ""), _default(p)] for p in options]
    blocks.append(table(["option", "meaning", "default"], rows))
    return "\n\n".join(blocks)


def _prose(text: str) -> str:
    """Return a command's help as Markdown, its example as a block."""
    help_text, _, example = inspect.cleandoc(text).partition("\nExample:")
    out = literal(help_text.strip())
    return f"{out}\n\n{fenced(example.strip(), 'bash')}" if example else out


def _option(option: Any) -> str:
    names = [f"`{name}`" for name in (*option.opts, *option.secondary_opts)]
    value = "" if option.is_flag else f" `{_value(option)}`"
    return ", ".join(names) + value


def _value(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _default(option: Any) -> str:
    value = option.default
    if option.is_flag:
        return "yes" if value is True else ""
    if value is None or callable(value) or "UNSET" in repr(value) or value in ((), []):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _joined(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
