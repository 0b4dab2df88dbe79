"""`posswap support`, against the plans of `explain`; and the groups of the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from hf_posswap.cli import app
from hf_posswap.cli.app import _COMMANDS
from hf_posswap.patching.inspect.census import census, known_names
from hf_posswap.patching.inspect.describe import explain
from hf_posswap.schemes import schemes_for
from hf_posswap.testing.tiny import tiny_config
from tests.cli.conftest import says

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, code: int = 0, columns: int = 80) -> str:
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": str(columns)})
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


@pytest.mark.parametrize(("name", "expected"), [("GPTNeoXForC", "gpt_neox"), ("qwen3-moe", "qwen3_moe")])
def test_the_routes_are_those_of_the_plans(name: str, expected: str) -> None:
    entries = {tuple(entry["model_types"]): entry for entry in json.loads(run("support", name, "--json"))}
    entry = entries[(expected,)]
    planned = explain(tiny_config(CONFIG_MAPPING[expected])).schemes
    assert entry["routes"].keys() == schemes_for("text").keys() == planned.keys()
    assert {scheme: route.partition(":")[0] for scheme, route in planned.items()} == entry["routes"]


OUTCOMES = {"native": "native", "plugin": "plugin", "–": "no"}


def test_the_routes_are_those_of_the_support_page() -> None:
    """The page holds what the light contract ran; its lines are groups of equal classes."""
    lines = (ROOT / ".docs" / "pages" / "support.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    begin = next(number for number, cells in enumerate(table) if cells[:2] == ["classes", "model types"])
    schemes, rows = table[begin][2:], [cells for cells in table[begin + 2 :] if cells[0].isdigit()]
    for entry in census(["BertForMaskedLM", "GPT2LMHeadModel", "Qwen3ForCausalLM", "T5ForConditionalGeneration"],
                        every_scheme=True):  # fmt: skip
        expected = [
            {
                scheme: OUTCOMES[cell]
                for column, cell in zip(schemes, cells[2:], strict=True)
                for scheme in column.split(", ")
            }
            for cells in rows
            if f"`{entry.model_types[0]}`" in cells[1]
        ]
        assert entry.routes in expected, entry.name


def test_a_class_a_type_and_a_family_are_found_and_what_cannot_be_swapped_says_why() -> None:
    shown = run("support", "gpt_neox_jap")
    assert says(shown, "GPTNeoXJapaneseForCausalLM")
    assert says(shown, "native")
    assert max(map(len, shown.splitlines())) <= 80
    assert "OPTForCausalLM" in run("support", "opt")


def test_a_name_of_nothing_or_of_too_much_is_refused() -> None:
    assert "unknown model class, model type or family 'qwenn3'" in run("support", "qwenn3", code=2)
    assert "Did you mean" in run("support", "qwenn3", code=2)
    assert says(run("support", "for", code=2), "classes, such as")
    assert "gpt2" in known_names()


def test_help_lists_the_commands_in_groups() -> None:
    shown = run("--help", columns=120)
    groups = list(dict.fromkeys(group for group, *_ in _COMMANDS))
    places = [shown.index(f"─ {group} ─") for group in groups]
    assert places == sorted(places)
    for group, name, *_ in _COMMANDS:
        begin = shown.index(f"─ {group} ─")
        end = min([place for place in places if place > begin], default=len(shown))
        assert f" {name} " in shown[begin:end], (group, name)
