"""Records, schemes, recipes, key spans and states of a search, as anyone may have written them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap import patch_model, swap_plan
from hf_posswap.cli.arguments import make_scheme
from hf_posswap.errors import ConfigError
from hf_posswap.evaluation.longppl import KeySpans
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.training.config import load_recipe, make_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.reading import read_yaml
from hf_posswap.training.search.evolution import load_progress
from tests.fuzz.hostile import BUDGETS, damaged, fuzz, mutated, plant, survives, values

RECIPE = {
    "model": {"name": "any", "dtype": "float32"},
    "swap": {"scheme": {"name": "yarn", "factor": 4.0}, "max_length": 64},
    "data": {"sources": [{"path": "python", "weight": 1.0}], "length": 32, "packing": "pose"},
    "peft": {"r": 2},
    "training": {"max_steps": 3, "learning_rate": 0.01},
    "stages": [{"max_steps": 2, "length": 16}, {"max_steps": 3}],
    "out": "run",
}
SPANS = {
    "version": 1,
    "evaluator": "tiny",
    "short": 4,
    "stride": 2,
    "gain": 2.0,
    "limit": 2.0,
    "documents": ["0" * 16],
    "spans": [[[1, 2]]],
}


def record(scheme: str, **options: Any) -> dict[str, Any]:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    return swap_plan(patch_model(model, scheme, max_length=64, **options)).record.to_dict()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder to read from, with a trap in it and one beside it."""
    (tmp_path / "read").mkdir()
    plant(tmp_path / "read")
    return tmp_path / "read"


@pytest.mark.parametrize("examples", BUDGETS)
@pytest.mark.parametrize("scheme", ["rope", "learned", "fire"])
def test_records(examples: int, scheme: str, folder: Path) -> None:
    def check(held: Any) -> None:
        def read() -> None:
            found = SwapRecord.from_dict(held)
            found.choice()
            assert SwapRecord.from_dict(found.to_dict()) == found

        survives(read, folder)

    fuzz(examples, mutated(record(scheme)) | values, check)


@pytest.mark.parametrize("examples", BUDGETS)
def test_schemes_in_files(examples: int, folder: Path) -> None:
    path = folder / "scheme.json"

    def check(held: Any) -> None:
        path.write_text(json.dumps(held))
        survives(lambda: make_scheme(str(path)), folder)

    yarn = {"name": "yarn", "factor": 4.0, "beta_fast": 32.0}
    fuzz(
        examples, mutated(yarn) | mutated({"name": "per_layer", "layers": {"0": "nope"}, "rest": yarn}) | values, check
    )


@pytest.mark.parametrize("examples", BUDGETS)
def test_schemes_on_the_command_line(examples: int, folder: Path) -> None:
    settings = st.text(alphabet="factor=4,.:{}\"'-einfax0[]", max_size=24)
    asked = st.tuples(
        st.sampled_from(("yarn:", "rope:", "longrope:", "per_layer:", "blend:", "a:b", "yarn", "{yarn")), settings
    )
    fuzz(examples, asked, lambda given: survives(lambda: make_scheme("".join(given)), folder))


@pytest.mark.parametrize("examples", BUDGETS)
def test_recipes(examples: int, folder: Path) -> None:
    def check(held: Any) -> None:
        if isinstance(held, dict):
            survives(lambda: to_dict(make_recipe(held)), folder)

    fuzz(examples, mutated(RECIPE), check)


@pytest.mark.parametrize("examples", BUDGETS)
def test_recipes_in_files(examples: int, folder: Path) -> None:
    path = folder / "recipe.yaml"
    code = b"swap: !!python/object/apply:os.system ['true']\n"
    texts = (
        yaml.safe_dump(RECIPE).encode(),
        code,
        b"include: recipe.yaml\n",
        b"a: &a [*a]\n",
        b"x: &x {y: *x}\n",
        b"- 1\n",
    )

    def check(text: bytes) -> None:
        path.write_bytes(text)
        survives(lambda: load_recipe(path), folder)

    for text in texts:
        check(text)
    fuzz(examples, st.sampled_from(texts).flatmap(damaged), check)


def _repeated(item: str, levels: int) -> str:
    """Return lists of nine, each of nine of the one before: 9 to the power of `levels` values."""
    lines = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels))
    return "\n".join([f"a0: &a0 {item}", *lines, f"training: {{deepspeed: *a{levels - 1}}}"])


NINES = "9" * 5000
BAD_VALUES = {
    "an alias bomb": (_repeated("[1, 1]", 9), "aliases come to more than 100000 values"),
    "merged mappings": (_repeated("{b: 1}", 9).replace("[*", "{<<: [*").replace("]\n", "]}\n"), "aliases come to more"),
    "an alias in itself": ("training: &a {deepspeed: [*a]}", "an alias is inside the node that it repeats, in line 1"),
    "nesting": (f"swap: {{scheme: {'[' * 200}{']' * 200}}}", "more than 64 levels"),
    "deep nesting": (f"swap: {{scheme: {'[' * 5000}{']' * 5000}}}", "more than 64 levels"),
    "an integer": (f"training: {{max_steps: {NINES}}}", "line 1 has an integer of more than 308 digits"),
    "a hexadecimal integer": (f"training: {{max_steps: 0x{'f' * 300}}}", "an integer of more than 308 digits"),
    "an integer to base 60": (f"training: {{max_steps: {':'.join(['59'] * 9000)}}}", "of more than 308 digits"),
    "a number to base 60": (f"training: {{max_steps: {':'.join(['59'] * 9000)}.5}}", "of more than 308 digits"),
    "a date as a number": ("training: {max_steps: 2001-13-45}", "expected a whole number, got '2001-13-45'"),
    "a truth that is none": ("model: !!bool perhaps", "a value does not fit its tag"),
    "an integer without digits": ("model: !!int ''", "a value does not fit its tag"),
    "a date that is none": ("model: !!timestamp never", "a value does not fit its tag"),
    "a date of month 13": ("model: !!timestamp 2001-13-45", "month must be in 1..12"),
    "a name with a null": ('include: "a\\0b.yaml"', r"a\\x00b.yaml, which .* cannot be read"),
    "a name of half a letter": ('include: "\\ud800.yaml"', r"\\ud800.yaml, which .* cannot be read"),
    "a name too long": (f"include: {'a' * 5000}.yaml", "File name too long"),
    "a device": ("include: /dev/zero", "/dev/zero, which .* it is not a regular file"),
    "a folder": ("include: .", "Is a directory"),
    "a pipe": ("include: pipe", "pipe, which .* is a pipe, which can be read only once"),
    "itself through another": ("include: other.yaml", "recipe.yaml includes itself"),
    "too many files": (f"include: [{', '.join(['more.yaml'] * 12)}]", "a recipe reads 100 files at most"),
    "a scheme's file without an end": ("swap: {scheme: zero.json}", "zero.json: it is not a regular file"),
    "a scheme's file with nesting": ("swap: {scheme: deep.json}", "more than 64 levels"),
    "a scheme's file with an integer": ("swap: {scheme: digits.json}", "an integer of 5000 digits"),
}


@pytest.fixture
def beside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with files in it that no reader may read to their end."""
    os.mkfifo(folder / "pipe")
    os.symlink("/dev/zero", folder / "zero.json")
    (folder / "other.yaml").write_text("include: recipe.yaml")
    (folder / "more.yaml").write_text(f"include: [{', '.join(['last.yaml'] * 12)}]")
    (folder / "last.yaml").write_text("out: a")
    inner = '{"name": "per_layer", "layers": {"0": '
    (folder / "deep.json").write_text(inner * 300 + '"nope"' + "}}" * 300)
    (folder / "digits.json").write_text(f'{{"name": "rope", "base": {NINES}}}')
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", BAD_VALUES)
def test_recipes_without_an_end(name: str, beside: Path) -> None:
    text, said = BAD_VALUES[name]
    (beside / "recipe.yaml").write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=said) as refused:
        load_recipe(beside / "recipe.yaml")
    assert time.monotonic() - began < 10
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (f"training.max_steps={NINES}", "an integer of more than 308 digits"),
        (f"a={'[' * 3000}{']' * 3000}", "more than 64 levels"),
        (f"{'.'.join('a' * 3000)}=1", "expected KEY=VALUE"),
        (f"stages.{NINES}.length=4", "expected the number of an item, 0 to 1"),
        ("stages.².length=4", "expected the number of an item, 0 to 1"),
        (f"swap.scheme=t5:num_buckets={NINES}", "num_buckets of 't5' must be a whole number"),
        (f'swap.scheme=per_layer:layers={{"0":{NINES}}}', "layers of 'per_layer' must be"),
        ("out=\x1b[31m", r"'out=\\x1b\[31m': the value cannot be read as YAML"),
    ],
)
def test_settings_without_an_end(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_recipe(RECIPE, [setting])
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("name", ["zero.json", "deep.json", "digits.json"])
def test_files_of_schemes_without_an_end(name: str, beside: Path) -> None:
    assert not survives(lambda: make_scheme(name), beside)


def test_dates_are_text_aliases_repeat_and_mappings_merge(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name: 2001-13-45}\nswap: &s {scheme: rope}\nout: run\n")
    assert load_recipe(path).model.name == "2001-13-45"
    path.write_text("stages: [&a {max_steps: 2, length: 16}, {<<: *a, max_steps: 5}, *a]")
    first, second, third = read_yaml(path)["stages"]
    assert first == third == {"max_steps": 2, "length": 16}
    assert second == {"max_steps": 5, "length": 16}


@pytest.mark.parametrize("examples", BUDGETS)
def test_key_spans(examples: int, folder: Path) -> None:
    path = folder / "spans.json"

    def check(held: Any) -> None:
        path.write_text(json.dumps(held))
        survives(lambda: KeySpans.load(path), folder)

    fuzz(examples, mutated(SPANS) | values, check)


@pytest.mark.parametrize("examples", BUDGETS)
def test_states_of_a_search(examples: int, folder: Path) -> None:
    path = folder / "state.json"
    member = [[1.0, 2.0], 0, 1.0]
    progress = {
        "iteration": 1,
        "population": [[*member, 2.5]],
        "seen": [member],
        "seeds": {"yarn": 2.0},
        "best": [2.5],
        "evaluations": [1],
    }
    state = {"format": 1, "search": {"model": "a", "seed": 0}, "progress": progress}
    path.write_text(json.dumps(state))
    assert load_progress(path, {"model": "a", "seed": 0}).best == [2.5]

    def check(held: Any) -> None:
        path.write_text(json.dumps(held))
        survives(lambda: load_progress(path, {"model": "a", "seed": 0}), folder)

    fuzz(examples, mutated(state) | values, check)
