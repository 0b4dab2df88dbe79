"""Records, schemes, recipes, key spans and states of a search, as anyone may have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap import patch_model, swap_plan
from hf_posswap.cli.arguments import make_scheme
from hf_posswap.evaluation.longppl import KeySpans
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.search.state import load_progress
from hf_posswap.training.config import load_recipe, make_recipe
from hf_posswap.training.config.load import to_dict
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
