"""`posswap --help`, `--version`, `schemes` and `families`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from typer.testing import CliRunner

import hf_posswap
import hf_posswap.versions
from hf_posswap.cli import app, listing
from hf_posswap.cli.output import column_widths
from hf_posswap.families import FAMILIES
from hf_posswap.harness import run_tasks
from hf_posswap.patching.inspect import census
from hf_posswap.patching.inspect.census import ClassEntry
from hf_posswap.plotting import draw_positions
from hf_posswap.schemes import SCHEMES
from hf_posswap.schemes.base import TERMS
from tests.cli.conftest import ROOT, Posswap

COMMANDS = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]  # type: ignore[union-attr]
TREE: Any = typer.main.get_command(app)
HEAVY = {"torch", "transformers", "numpy", "peft", "datasets", "accelerate", "matplotlib"}

WIDE = {"COLUMNS": "200"}
"""Environment of a terminal in which tables break no names."""


def loaded_by(*arguments: str) -> set[str]:
    """Return which heavy packages a command has imported when it ends."""
    code = (
        "import sys, atexit; from hf_posswap.cli import main; sys.argv[0] = 'posswap'\n"
        f"atexit.register(lambda: print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr))\nmain()"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    assert loaded_by(*arguments) == set()


@pytest.mark.slow
def test_listing_schemes_and_families_loads_torch_but_not_transformers() -> None:
    assert "torch" in loaded_by("schemes")
    assert "transformers" not in loaded_by("schemes")
    assert "transformers" not in loaded_by("families")


def test_the_version_is_printed_with_the_tested_range_and_what_is_installed(posswap: Posswap) -> None:
    first, second = posswap("--version").stdout.splitlines()
    ranges = [
        f"{package} {hf_posswap.versions.tested_range(package)}"
        for package in ("transformers", "torch", "peft", "accelerate")
    ]
    assert first == f"hf_posswap {hf_posswap.__version__} (tested with {', '.join(ranges)})"
    assert second.startswith(f"installed: Python {platform.python_version()}, transformers {transformers.__version__}")
    assert f"torch {importlib.metadata.version('torch')}" in second  # PyPI's leaves out the build: 2.15.0, not +cu132


def test_an_untested_version_and_a_missing_package_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"transformers": ["4.0.0"], "torch": [torch.__version__.partition("+")[0]], "no-such-package": ["1"]}
    monkeypatch.setattr(listing, "tested", lambda: listed)
    monkeypatch.setattr(hf_posswap.versions, "tested", lambda: listed)
    assert listing.version_lines()[1].split(", ", 1)[1] == (
        f"transformers {transformers.__version__} (not tested), torch {importlib.metadata.version('torch')}, "
        "no no-such-package"
    )


def test_help_names_every_command_and_exit_code() -> None:
    out = CliRunner().invoke(app, ["--help"]).output
    assert [name for name in COMMANDS if name not in out] == []
    assert all(f"{code} " in out for code in (0, 1, 2, 3, 4, 130, 143))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example(name: str) -> None:
    assert f"Example: posswap {name}" in CliRunner().invoke(app, [name, "--help"]).output


OLDER = {
    "advise": {"--length": "--max-length", "--serve": "--target"},
    "show": {"--beside": "--also", "--length": "--window"},
    "eval": {"--base": "--baseline"},
    "compare": {"--against": "--baseline"},
    "lm-eval": {"--base": "--baseline"},
    "overrides": {"--for": "--target"},
}
"""Older names of options, by command: accepted, and shown nowhere."""
ONE_LENGTH = ("key-spans", "--length")
"""Tokens of each document: one number, where the commands that measure take several `--lengths`."""


def shown_options() -> Iterator[tuple[str, Any]]:
    """Yield each option that the help of a command shows, with the command's name."""
    for name, command in TREE.commands.items():
        yield from ((name, option) for option in command.params if option.opts[0][0] == "-" and not option.hidden)


def test_an_option_is_shown_by_one_name_and_its_older_ones_are_accepted() -> None:
    accepted = {
        name: {older: alias.name for alias in command.older for older in alias.opts}
        for name, command in TREE.commands.items()
        if command.older
    }
    assert accepted == {
        name: {older: now[2:].replace("-", "_") for older, now in names.items()} for name, names in OLDER.items()
    }
    values = {"--target": "vllm", "--length": "128", "--window": "128", "--max-length": "128"}
    required = {"advise": ["m"], "overrides": ["m", "rope"], "lm-eval": ["m", "--tasks", "t"]}
    for name, names in OLDER.items():
        help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        for older, now in names.items():
            assert re.search(rf"{older}(?![\w-])", help_text) is None
            words = required.get(name, ["m"])
            words = [*words, "--max-length", "64"] if (name, older) == ("advise", "--serve") else words
            new, old = (
                TREE.commands[name].make_context(name, [*words, option, values.get(now, "x")])
                for option in (now, older)
            )
            assert new.params == old.params
            assert new.params[now[2:].replace("-", "_")] not in (None, [])


def test_one_thing_has_one_name_in_all_commands() -> None:
    retired = {older for names in OLDER.values() for older in names}
    metavars: dict[str, set[str | None]] = {}
    for name, option in shown_options():
        long = [text for text in option.opts if text.startswith("--")]
        assert len(long) == 1, (name, option.opts)
        assert (name, long[0]) == ONE_LENGTH or long[0] not in retired, (name, long)
        assert ("-o" in option.opts) == (long == ["--out"]), (name, option.opts)
        metavars.setdefault(long[0], set()).add(option.metavar)
    several = {long: found for long, found in metavars.items() if len(found) > 1}
    assert several == {
        "--out": {"DIR", "FILE", "FILE.json"},
        "--baseline": {"MODEL", "NAME"},  # of posswap compare a label, which it gives to each model
        "--target": {None, "NAME"},  # of posswap to-native a model type
        "--limit": {"N", "NATS"},  # of posswap key-spans; of lm-eval the name that the harness gives it
        "--dtype": {None, "NAME"},  # of posswap export what the matrices become
        "--tokenizer": {None, "PATH_OR_ID"},  # whether to save it, where a command saves a model
        "--text": {"PATH", "PATH_OR_ID"},  # posswap search takes no data set on the Hub, which has no end
    }


def test_arguments_in_python_are_called_as_the_options() -> None:
    functions: dict[str, Any] = {
        "advise": hf_posswap.advise, "explain": hf_posswap.explain, "patch": hf_posswap.patch_model,
        "show": draw_positions, "search": hf_posswap.search_longrope, "eval": hf_posswap.evaluate,
        "compare": hf_posswap.compare, "lm-eval": run_tasks, "check": hf_posswap.check,
        "doctor": hf_posswap.doctor, "to-native": hf_posswap.to_native, "export": hf_posswap.export,
        "overrides": hf_posswap.overrides, "push": hf_posswap.push,
    }  # fmt: skip
    elsewhere = {
        "advise": {"json", "gguf_file"},
        "explain": {"html", "out", "json", "heads", "dim", "window", "rope_theta"},  # write_page takes a geometry
        "patch": {"out", "centre", "overwrite", "tokenizer", "json", "trust_remote_code"},  # load, centre_table, save
        "show": {"picture", "also", "layers", "lengths", "text", "documents", "device", "json", "trust_remote_code"},
        "search": {"text", "column", "out", "overwrite", "device", "json", "trust_remote_code"},
        "eval": {"json"},
        "compare": {"json"},
        "lm-eval": {"out", "json"},
        "check": {"imported", "strict", "json"},
        "doctor": {"json"},
        "to-native": {"out", "overwrite", "tokenizer", "json", "trust_remote_code"},
        "export": {"gguf_file", "json"},
        "overrides": {"json"},
        "push": {"json"},
    }
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters
        options = {option.name for command, option in shown_options() if command == name}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            options -= {"site", "relative", "gguf_file"}
        assert options - set(parameters) == elsewhere[name], name


def test_no_page_and_no_recipe_uses_an_older_name() -> None:
    pages = [ROOT / "README.md", *(ROOT / ".docs").rglob("*.md"), *(ROOT / "recipes").glob("*.yaml")]
    used = []
    for path in pages:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for command, words in re.findall(r"posswap ([a-z-]+)( [^`\n]*)", text):
            typed = {word.partition("=")[0] for word in words.split()}
            used += [f"{path.name}: posswap {command}{words}" for older in OLDER.get(command, ()) if older in typed]
    assert used == []


def test_schemes_as_json_are_all_there_with_their_traits(posswap: Posswap) -> None:
    run = posswap("schemes", "--json")
    listed = {scheme["name"]: scheme for scheme in json.loads(run.stdout)}
    assert (run.returncode, run.stderr) == (0, "")
    assert set(listed) == {*SCHEMES, *TERMS}
    assert listed["nope"]["traits"]["causal_only"] is True
    assert listed["dynamic"]["traits"]["prefix_consistent"] is False
    assert listed["sinusoidal"]["traits"]["unbounded"] is False
    assert {"base", "partial", "layout"} <= {field["name"] for field in listed["rope"]["fields"]}


def test_schemes_for_people_fits_80_columns_and_has_no_colours(posswap: Posswap) -> None:
    run = posswap("schemes")
    assert run.returncode == 0
    assert [name for name in {*SCHEMES} if f"\n{name} " not in run.stdout] == []
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert "\x1b" not in run.stdout


def test_one_scheme_is_shown_with_every_field_and_its_source() -> None:
    shown = json.loads(CliRunner().invoke(app, ["schemes", "yarn", "--json"]).stdout)
    fields = {field["name"]: field for field in shown["fields"]}
    assert shown["source"] == "https://arxiv.org/abs/2309.00071"
    assert fields["beta_fast"]["default"] == 32.0
    assert "theta" in fields["base"]["meaning"]  # documented in a base class
    text = CliRunner().invoke(app, ["schemes", "yarn"], env=WIDE).stdout
    assert [name for name in fields if name not in text] == []
    assert "ramp theta/s" in text


def test_an_unknown_scheme_suggests_a_near_one(posswap: Posswap) -> None:
    run = posswap("schemes", "yrn")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("error: unknown scheme 'yrn'. Did you mean 'yarn'?")
    assert run.stderr.count("\n") == 1


def test_every_family_is_listed(posswap: Posswap) -> None:
    listed = {family["name"]: family for family in json.loads(posswap("families", "--json").stdout)}
    assert set(listed) == set(FAMILIES)
    assert "gpt2" in listed["gpt2"]["model_types"]
    assert (listed["opt"]["mechanism"], listed["rotary"]["mechanism"]) == ("learned table", "rotary")
    assert listed["rotary"]["by_rule"] is True
    text = CliRunner().invoke(app, ["families"], env=WIDE).stdout
    assert [name for name in FAMILIES if name not in text] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mechanism_of_a_family_is_that_of_its_models(name: str) -> None:
    """As `explain` tells it of a model that transformers itself builds from the default config of each type."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from hf_posswap.families.locating import family_of

    listed = {family["name"]: family for family in json.loads(CliRunner().invoke(app, ["families", "--json"]).stdout)}
    words = set(re.split(r", | or | inside ", listed[name]["mechanism"])) - {"attention"}
    assert words
    assert words <= {"learned table", "sinusoidal table", "rotary", "rope", "alibi", "t5", "relative part"}
    for model_type in FAMILIES.get(name).model_types:
        if model_type not in CONFIG_MAPPING:
            continue
        config = AutoConfig.for_model(model_type)
        assert family_of(config).name == name
        for part in FAMILIES.get(name).parts:
            held = None if part.traits is None else part.traits.inside(config)
            assert held is None or held["name"] in words
            assert part.traits is None or (part.traits.scheme is None) == (part.traits.positions is None)


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("bloom", "alibi inside attention"),
        ("gptj", "rope inside attention"),
        ("t5", "t5 inside attention"),
        ("falcon", "rotary or alibi inside attention"),
        ("mpnet", "learned table, t5 inside attention"),
        ("ctrl", "sinusoidal table"),
        ("deberta", "learned table, relative part"),
        ("vit", "learned table"),
    ],
)
def test_a_family_is_listed_with_what_its_models_have(name: str, mechanism: str) -> None:
    listed = {family["name"]: family for family in json.loads(CliRunner().invoke(app, ["families", "--json"]).stdout)}
    assert listed[name]["mechanism"] == mechanism


@pytest.mark.parametrize("available", [20, 40, 60, 80, 200])
def test_columns_fit_and_give_nothing_away(available: int) -> None:
    rows = [["site", "path", "before"], ["config", "max_position_embeddings", "a long text of many words " * 4]]
    widths = column_widths(rows, available)
    assert sum(widths) + 2 * (len(widths) - 1) <= available
    assert min(widths) >= 1
    if available >= 80:
        assert widths[0] == len("config")
        assert widths[1] == len("max_position_embeddings")
        assert widths[2] == min(available - 33, len(rows[1][2]))


@pytest.mark.slow
def test_a_terminal_without_unicode_is_no_reason_to_die(posswap: Posswap) -> None:
    run = posswap("schemes", PYTHONIOENCODING="ascii")
    assert run.returncode == 0
    assert "yarn" in run.stdout


@pytest.mark.slow
def test_every_class_is_listed_with_its_routes(posswap: Posswap, monkeypatch: pytest.MonkeyPatch) -> None:
    run = posswap("families", "--classes", "--json")
    listed = {entry["name"]: entry for entry in json.loads(run.stdout)}
    assert (run.returncode, run.stderr) == (0, "")
    assert listed["LlamaForCausalLM"]["routes"]["yarn"] == "native"
    assert listed["MambaForCausalLM"]["supported"] is False
    found = [ClassEntry(**{f.name: entry[f.name] for f in dataclasses.fields(ClassEntry)}) for entry in listed.values()]
    monkeypatch.setattr(census, "census", lambda: found)  # it takes long, and would find the same
    text = CliRunner().invoke(app, ["families", "--classes"], env={"COLUMNS": "80"}).stdout
    assert [name for name in listed if len(name) < 20 and name not in text] == []  # longer ones are folded
    supported = sum(entry["supported"] for entry in listed.values())
    assert f"{supported} of {len(listed)} classes can be swapped." in text


def test_one_family_is_shown_with_where_its_positions_live() -> None:
    shown = json.loads(CliRunner().invoke(app, ["families", "bart", "--json"]).stdout)
    assert {part["stack"]: part["table"] for part in shown["parts"]} == {
        part.name: part.table.path for part in FAMILIES.get("bart").parts if part.table is not None
    }
    text = CliRunner().invoke(app, ["families", "bart"], env=WIDE).stdout
    assert [part["attention"] for part in shown["parts"] if part["attention"] not in text] == []
    wrong = CliRunner().invoke(app, ["families", "brat"])
    assert (wrong.exit_code, "or 'bart'?" in wrong.stderr) == (2, True)
    assert "give one of the two" in CliRunner().invoke(app, ["families", "bart", "--classes"]).stderr


def test_a_model_type_shows_the_family_that_describes_it() -> None:
    for model_type, family in (("llama", "rotary"), ("gpt_bigcode", "gpt2"), ("ernie", "bert")):
        shown = CliRunner().invoke(app, ["families", model_type, "--json"])
        assert json.loads(shown.stdout)["name"] == family
    refused = CliRunner().invoke(app, ["families", "luke"])
    assert (refused.exit_code, "its entities have separate positions" in refused.stderr) == (3, True)
    without_defaults = CliRunner().invoke(app, ["families", "nougat"])
    assert (without_defaults.exit_code, "unknown family 'nougat'" in without_defaults.stderr) == (2, True)


@pytest.mark.parametrize("before", [True, False], ids=["before the command", "behind it"])
def test_the_command_imports_a_file_with_schemes(before: bool, tmp_path: Path, posswap: Posswap) -> None:
    path = tmp_path / "schemes_of_a_test.py"
    path.write_text((ROOT / "tests" / "toys" / "of_functions.py").read_text() + '\nprint("of the file")\n')
    given, command = ("--import", str(path)), ("schemes", "window-bias", "--json")
    run = posswap(*given, *command) if before else posswap(*command, *given)
    assert run.returncode == 0, run.stderr
    assert [field["name"] for field in json.loads(run.stdout)["fields"]] == ["window", "toll"]
    assert run.stderr == "of the file\n"
    refused = posswap(*command)
    assert (refused.returncode, refused.stderr.startswith("error: unknown scheme 'window-bias'")) == (2, True)
