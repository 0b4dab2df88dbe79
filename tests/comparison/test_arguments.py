"""The arguments of `evaluate` and `compare`: those of the commands by the same names, and none is dropped silently."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from hf_posswap import patch_model
from hf_posswap.cli import comparing, evaluating
from hf_posswap.comparison import Candidate, EvalSettings, compare, compare_attention, evaluate
from hf_posswap.comparison.documents import text_and_count
from hf_posswap.errors import CheckpointError, DataError, DataWarning, OptionError, SchemeError, UnknownNameError
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.devices import resolve_device, resolve_dtype
from tests.comparison.test_names import TEXTS, gpt2

HOW: dict[str, Any] = {"tokenizer": byte_tokenizer(), "text": TEXTS}


@pytest.mark.parametrize(("command", "function"), [(evaluating.evaluate, evaluate), (comparing.compare, compare)])
def test_each_option_of_a_command_is_an_argument_of_the_function(
    command: Callable[..., None], function: Callable[..., Any]
) -> None:
    options = {
        name for name, option in inspect.signature(command).parameters.items() if option.default is not option.empty
    }
    assert options - set(inspect.signature(function).parameters) <= {
        "json",
        "gguf_file",
    }  # what is printed; where the model lies


def test_settings_by_name_are_those_of_settings() -> None:
    settings = EvalSettings(
        lengths=(16, 32), metrics=("ppl_prefix", "passkey"), documents=2, trials=1, margin=0.5, seed=3
    )
    expected = evaluate(gpt2(), "rope", settings=settings, **HOW).results
    names = {"lengths": [32, 16], "metrics": "ppl_prefix, passkey", "documents": 2, "trials": 1, "margin": 0.5}
    found = evaluate(gpt2(), "rope", **names, seed=3, **HOW).results
    assert found["settings"] | {"lengths": None} == expected["settings"] | {"lengths": None}
    for name in ("models", "comparisons", "lengths", "metrics", "data"):
        assert found[name] == expected[name]
    both = evaluate(gpt2(), "rope", settings=settings, lengths=np.array([16]), **HOW).results
    assert both["lengths"] == [16]
    assert both["settings"] | {"lengths": None} == expected["settings"] | {"lengths": None}


@pytest.mark.parametrize("function", [evaluate, compare])
def test_without_text_a_warning_at_the_callers_line_says_what_is_read(function: Callable[..., Any]) -> None:
    how = {"tokenizer": byte_tokenizer(), "lengths": 16, "metrics": "ppl_prefix", "documents": 2}
    with pytest.warns(DataWarning, match="No text was given: this measures on the held-out part") as seen:
        found = function(gpt2(), **how).results["data"]
    assert [Path(warning.filename).name for warning in seen] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        assert function(gpt2(), text="python", **how).results["data"] == found


def test_documents_are_a_number_or_the_text() -> None:
    how = {"tokenizer": byte_tokenizer(), "lengths": 16, "metrics": ["ppl_prefix"]}
    one, other = (evaluate(gpt2(), **how, **given).results for given in ({"text": TEXTS}, {"documents": TEXTS}))
    assert one["data"] == other["data"]
    assert evaluate(gpt2(), text=TEXTS, documents=2, **how).results["data"]["documents"] == 2
    with pytest.raises(OptionError, match="documents is the maximum number of documents if text is given, got list"):
        evaluate(gpt2(), text=TEXTS, documents=TEXTS, **how)


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_numbers_of_numpy_and_torch_are_numbers(number: Any) -> None:
    given = {"lengths": number(64), "documents": number(3), "seed": number(7), "trials": number(4), "tail": number(9)}
    plain = {name: int(value) for name, value in given.items()}
    assert EvalSettings(**given).to_dict() == EvalSettings(**plain).to_dict()
    assert all(type(value) is int for value in text_and_count("books/", given["documents"])[1:])
    with pytest.raises(OptionError, match="documents is a whole number"):
        EvalSettings(documents=np.array([3, 4]))  # type: ignore[arg-type]


def test_python_names_this_pythons_own_text_as_on_the_command_line() -> None:
    how: dict[str, Any] = {"tokenizer": byte_tokenizer(), "lengths": [16], "metrics": "ppl_prefix"}
    expected = evaluate(gpt2(), "rope", documents=3, **how).results["data"]
    assert evaluate(gpt2(), "rope", text="python", documents=3, **how).results["data"] == expected
    assert evaluate(gpt2(), "rope", text=Path("python"), documents=3, **how).results["data"] == expected
    assert expected["source"].startswith("sources of this Python")
    with pytest.raises(DataError, match="pythons does not exist"):
        evaluate(gpt2(), "rope", text="pythons", **how)


def test_a_model_object_is_read_with_the_tokenizer_of_the_folder_that_it_came_from(tmp_path: Path) -> None:
    how: dict[str, Any] = {"text": TEXTS, "lengths": [16], "metrics": "ppl_prefix"}
    gpt2().save_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    with pytest.raises(DataError, match="give one by --tokenizer, or by tokenizer in Python"):
        evaluate(model, "rope", **how)
    byte_tokenizer().save_pretrained(tmp_path)
    found = evaluate(model, "rope", **how).results
    assert found["data"] == evaluate(gpt2(), "rope", tokenizer=byte_tokenizer(), **how).results["data"]


def test_one_model_is_a_comparison_and_a_length_is_that_of_every_scheme() -> None:
    how = {"lengths": [16], "metrics": "ppl_prefix", **HOW}
    assert list(compare(gpt2(), **how).results["models"]) == ["GPT2LMHeadModel"]
    models = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope"), Candidate(gpt2(), "alibi", max_length=99)]
    results = compare(models, max_length=64, **how).results["models"].values()
    assert [model["plan"] and model["plan"]["max_length"] for model in results] == [None, 64, 99]


@pytest.mark.parametrize(
    "scheme", [{"name": "alibi"}, {"name": "rope", "base": 500.0}, {"rope_type": "default", "rope_theta": 500.0}]
)
def test_a_scheme_may_be_a_dict(scheme: dict[str, Any]) -> None:
    results = evaluate(gpt2(), scheme, lengths=[16], metrics="ppl_prefix", **HOW).results
    assert list(results["models"]) == ["GPT2LMHeadModel", f"GPT2LMHeadModel+{scheme.get('name', 'rope')}"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lenghts": [16]}, OptionError, "lenghts: these say how .* none is given. Did you mean 'lengths'"),
        ({"max_length": 64}, OptionError, "max_length: these say how to put in a scheme, and none is given"),
        ({"lengths": ["16"]}, OptionError, r"lengths are whole numbers of at least 2 tokens, got \['16'\]"),
        ({"lengths": "16,32"}, OptionError, r"lengths are whole numbers .* got \['16,32'\]"),
        ({"lengths": [16.5]}, OptionError, "lengths are whole numbers of at least 2"),
        ({"lengths": []}, OptionError, r"lengths are whole numbers of at least 2 tokens, got \[\]"),
        ({"lengths": True}, OptionError, r"lengths are whole numbers of at least 2 tokens, got \[True\]"),
        ({"metrics": "ppl"}, UnknownNameError, "unknown metric 'ppl'"),
        ({"documents": 1}, OptionError, "documents is a whole number of at least 2, got 1"),
        ({"trials": "3"}, OptionError, "trials is a whole number of at least 1, got '3'"),
        ({"margin": "a"}, OptionError, "margin is a number of nats per token, at least 0, got 'a'"),
        ({"seed": 1.5}, OptionError, "seed is a whole number of at least 0, got 1.5"),
        ({"device": "gpu"}, OptionError, "device 'gpu' cannot be used here"),
        ({"device": 1.5}, OptionError, "device 1.5 cannot be used here"),
        ({"dtype": "float31"}, OptionError, "dtype is a floating-point precision of torch, .* got 'float31'"),
        ({"dtype": torch.int8}, OptionError, "got torch.int8"),
        ({"settings": {"lengths": [16]}}, OptionError, "settings are EvalSettings, got {'lengths'"),
        ({"progress": "no"}, OptionError, "progress is True, False or None, got 'no'"),
        ({"baseline": 1}, OptionError, "a transformers model, a folder or a Hub id, got 1. .*'kerple:seed=1'"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_loaded(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        evaluate("no/such-model", **given)


def test_fields_of_a_scheme_are_arguments_as_in_patch_model() -> None:
    found = evaluate(gpt2(), "rope", base=500.0, lengths=[16], metrics="ppl_prefix", documents=2, **HOW)
    swapped = patch_model(gpt2(), "rope", base=500.0, max_length=16)
    expected = evaluate(swapped, lengths=[16], metrics="ppl_prefix", documents=2, **HOW)
    plans = [list(one.results["models"].values())[-1] for one in (found, expected)]
    assert plans[0]["plan"]["scheme"]["base"] == plans[1]["plan"]["scheme"]["base"] == 500.0
    assert plans[0]["ppl_prefix"] == plans[1]["ppl_prefix"]


def test_candidates_that_are_no_models_are_refused() -> None:
    with pytest.raises(OptionError, match="a model of a comparison is a transformers model, .* got None"):
        compare([None], **HOW)  # type: ignore[list-item]
    with pytest.raises(SchemeError, match="max_length must be a whole number"):
        compare([gpt2()], max_length=0, **HOW)


def test_devices_and_dtypes_are_torch_s_or_their_names(tmp_path: Path) -> None:
    assert resolve_device("auto") == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("torch.float16") is resolve_dtype(torch.float16) is torch.float16
    gpt2().save_pretrained(tmp_path / "small")
    how = {"lengths": [16], "metrics": "ppl_prefix", **HOW}
    found = evaluate(tmp_path / "small", device="cpu", dtype="bfloat16", **how).results["models"]["small"]
    assert found["identity"]["dtype"] == "bfloat16"
    assert evaluate(str(tmp_path / "small"), **how).results["models"]["small"]["identity"]["dtype"] == "float32"
    with pytest.raises(CheckpointError, match="no/such-model"):
        evaluate("no/such-model", **how)


def test_attention_takes_texts_and_their_number_by_the_same_names(tmp_path: Path) -> None:
    models = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "alibi", name="alibi")]
    how: dict[str, Any] = {"tokenizer": byte_tokenizer(), "lengths": [16]}
    one = compare_attention(models, str(tmp_path / "a"), text=TEXTS, documents=2, device="cpu", **how)
    other = compare_attention(models, tmp_path / "b", documents=TEXTS, limit=2, **how)
    assert one.said == other.said
    assert one.paid["base"][16].texts == 2
    with pytest.raises(OptionError, match="documents and limit are both the maximum number"):
        compare_attention(models, tmp_path, text=TEXTS, documents=2, limit=2, **how)
