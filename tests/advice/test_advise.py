"""What is advised follows the figures, what serves, what may be trained, and what the model is."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    ViTConfig,
)

import hf_posswap
from hf_posswap import errors
from hf_posswap.inspection.advice import figures, weighing
from hf_posswap.inspection.advice.candidates import CANDIDATES
from hf_posswap.inspection.advice.figures import LITERATURE, Base, Figure

GPT2 = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=300, n_positions=64)
LLAMA = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48, vocab_size=300,
    max_position_embeddings=64,
)  # fmt: skip
ENOUGH = 1e7


def invented(subject: str, *differences: float, tokens: int = 0, windows: int = 4) -> list[Figure]:
    """Return figures of one subject against the sliding window, a base each."""
    return [
        Figure(
            "recipes/x.json", subject, "sliding window", Base(f"base {number}", "rope", 1000, 64), windows, value,
            value - 0.01, value + 0.01, tokens, 9, whose="base's",
        )
        for number, value in enumerate(differences)
    ]  # fmt: skip


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that has nothing but its figures be known."""
    return lambda *made: monkeypatch.setattr(figures, "load_figures", lambda: tuple(one for row in made for one in row))


def test_a_learned_table_without_a_budget_keeps_its_sliding_window() -> None:
    advice = hf_posswap.advise(GPT2, 512)
    assert advice.use.title == "no swap: a sliding window of 64 tokens"
    assert (advice.use.scheme, advice.use.recipe) == (None, None)
    assert advice.use.reasons, "figures speak for it"
    for subject in {figure.subject for figure in advice.use.reasons}:  # it may beat the window on one base
        held = [figure for figure in advice.use.reasons if figure.subject == subject]
        assert any(figure.high is None or figure.high >= 0 for figure in held), subject
    trained = next(option for option in advice.others if option.recipe == "learned-to-rope")
    assert "it needs training: with a budget of" in trained.against[0]


def test_a_learned_table_with_a_budget_is_swapped_and_trained() -> None:
    advice = hf_posswap.advise(GPT2, 512, budget=ENOUGH)
    assert (advice.use.recipe, advice.use.scheme, advice.use.route) == ("learned-to-rope", "rope:partial=0.5", "plugin")
    assert {reason.source for reason in advice.use.reasons} >= {"recipes/studies/results/adaptation.json"}
    decisive = [reason for reason in advice.use.reasons if reason.against == "sliding window"]
    assert decisive
    assert all(reason.high is not None and reason.high < 0 for reason in decisive)


def test_a_budget_below_what_was_measured_is_not_enough() -> None:
    parameters = hf_posswap.advise(GPT2, 512).parameters
    needed = 0.11 * parameters  # of 417,792 tokens on 3.7 M parameters
    few = hf_posswap.advise(GPT2, 512, budget=0.5 * needed)
    assert few.use.scheme is None
    said = next(option for option in few.others if option.recipe == "learned-to-rope").against
    assert "for each parameter; measured were 0.11" in said[0]
    assert hf_posswap.advise(GPT2, 512, budget=1.1 * needed).use.recipe == "learned-to-rope"


def test_what_the_program_cannot_run_is_not_advised(only: Any) -> None:
    only(invented("rerope", -0.5), invented("yarn", -0.1))
    assert hf_posswap.advise(LLAMA, 256).use.scheme == "rerope"
    served = hf_posswap.advise(LLAMA, 256, serve="sglang")
    assert served.use.scheme == "yarn:factor=4"
    assert served.use.serving is not None
    assert (served.use.serving.target, served.use.serving.verdict) == ("sglang", "exact")
    (rerope,) = (option for option in served.others if option.scheme == "rerope")
    assert rerope.against[0].startswith("sglang: impossible")
    assert hf_posswap.advise(LLAMA, 256, serve="vllm").use.scheme == "rerope"


def test_what_to_native_makes_is_served_by_its_stock_class() -> None:
    advice = hf_posswap.advise(GPT2, 512, budget=ENOUGH, serve="llamacpp")
    assert advice.use.serving is not None
    assert (advice.use.serving.converted, advice.use.serving.verdict) == ("GPTNeoXForCausalLM", "exact")
    stock, exported = advice.use.commands[-2:]
    assert stock == "posswap to-native learned-to-rope/model -o learned-to-rope-stock"
    assert exported.startswith("posswap export learned-to-rope-stock --target llamacpp")


def test_one_base_on_which_it_is_worse_is_enough_against_it(only: Any) -> None:
    only(invented("yarn", -0.1, 0.1), invented("ntk", 0.3))
    advice = hf_posswap.advise(LLAMA, 256)
    assert advice.use.scheme is None
    standing = {option.scheme: option.standing for option in advice.others if option.recipe is None}
    assert standing["yarn:factor=4"] == "mixed"
    assert [figure.subject for figure in advice.use.reasons] == ["yarn", "yarn"]


def test_the_best_of_those_that_are_better_comes_first(only: Any) -> None:
    only(invented("yarn", -0.1, -0.2), invented("ntk", -0.15), invented("linear", 0.005))
    advice = hf_posswap.advise(LLAMA, 256)
    assert [option.scheme for option in (advice.use, *advice.others)][:2] == ["ntk:factor=4", "yarn:factor=4"]
    standing = {option.scheme: option.standing for option in advice.others if option.recipe is None}
    assert (standing["linear:factor=4"], standing["dynamic:factor=4"]) == ("level", "not measured")


def test_the_figure_of_the_nearest_length_decides(only: Any) -> None:
    only(invented("yarn", -0.1, windows=2), invented("yarn", 0.1, windows=8))
    assert hf_posswap.advise(LLAMA, 128).use.scheme == "yarn:factor=2"
    assert hf_posswap.advise(LLAMA, 64 * 8).use.scheme is None


def test_without_an_interval_a_small_difference_is_none(only: Any) -> None:
    (row,) = invented("yarn", -0.01)
    only([dataclasses.replace(row, low=None, high=None)])
    assert hf_posswap.advise(LLAMA, 256).use.scheme is None
    only([dataclasses.replace(row, difference=-0.03, low=None, high=None)])
    assert hf_posswap.advise(LLAMA, 256).use.scheme == "yarn:factor=4"


def test_what_was_not_measured_is_said(only: Any) -> None:
    only(invented("yarn", -0.1))
    wide = dataclasses.replace(invented("yarn", 0.0)[0].base, parameters=10**9, window=10**6)
    said = hf_posswap.advise(LLAMA, 64 * 9).use.unknown
    assert said[0].startswith("not measured at this size: on models of up to 0.0 M parameters and windows of up to 64")
    assert said[1] == "not measured beyond 4 windows: 576 tokens are 9"
    only([dataclasses.replace(one, base=wide) for one in invented("yarn", -0.1)])
    assert hf_posswap.advise(LLAMA, 256).use.unknown == ()


@pytest.mark.parametrize(
    ("config", "length", "title"),
    [
        (GPT2, 64, "no swap: it reads this length as it is"),
        (LLAMA, 10, "no swap: it reads this length as it is"),
        (BloomConfig(n_layer=1, hidden_size=8, n_head=2, vocab_size=9), 4096, "no swap: its alibi runs at any length"),
        (T5Config(num_layers=1, d_model=8, vocab_size=9), 4096, "no swap: its t5 runs at any length"),
        (BertConfig(num_hidden_layers=1), 2048, "no swap: window by window of 512 tokens"),
        (BartConfig(), 4096, "no swap: window by window of 1,024 tokens"),
    ],
    ids=["learned within", "rope within", "alibi", "t5", "encoder", "encoder-decoder"],
)
def test_other_models_are_left_as_they_are(config: Any, length: int, title: str) -> None:
    assert hf_posswap.advise(config, length).use.title == title


def test_a_gain_by_training_is_no_reason_against_it(only: Any) -> None:
    """Within the window a reason for no swap is what the best trained one loses there; a gain is named as open."""
    lost = [dataclasses.replace(one, against="control in the window") for one in invented("yarn", 0.1, tokens=1000)]
    only(lost)
    use = hf_posswap.advise(LLAMA, 10).use
    assert [one.difference for one in use.reasons] == [0.1]
    assert use.unknown == ()
    only([*lost, *(dataclasses.replace(one, subject="abf", difference=-0.2) for one in lost)])
    use = hf_posswap.advise(LLAMA, 10).use
    assert use.reasons == ()
    (said,) = use.unknown
    assert said.startswith("whether training with a swap would improve it, as measured: abf, after")


@pytest.mark.parametrize("model", ["LlamaForCausalLM", LlamaForCausalLM, LlamaConfig, LlamaConfig()])
def test_a_class_its_name_its_config_and_its_defaults_are_alike(model: Any) -> None:
    advice = hf_posswap.advise(model, 8192)
    assert (advice.model.partition(" ")[0], advice.windows) == ("LlamaForCausalLM", 4.0)


def test_a_model_in_memory_and_its_folder_are_alike(place: Path) -> None:
    folder = hf_posswap.advise(place / "gpt2", 512, budget=ENOUGH)
    memory = hf_posswap.advise(hf_posswap.load(place / "gpt2"), 512, budget=ENOUGH)
    assert memory.to_dict() == folder.to_dict()
    assert f"model.name={place / 'gpt2'}" in folder.use.commands[1]


def test_no_weights_are_read_and_nothing_is_written(place: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((place / "gpt2" / "config.json").read_text())
    assert hf_posswap.advise(tmp_path, 512).use.scheme is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_code_that_a_checkpoint_brings_is_not_run(place: Path, tmp_path: Path) -> None:
    values = json.loads((place / "gpt2" / "config.json").read_text())
    values |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(errors.RemoteCodeError):
        hf_posswap.advise(tmp_path, 512)


def test_the_model_that_is_asked_about_is_not_changed() -> None:
    model = GPT2LMHeadModel(GPT2)
    before = model.config.to_dict()
    hf_posswap.advise(model, 512, budget=ENOUGH, serve="vllm")
    assert model.config.to_dict() == before
    assert hf_posswap.describe_positions(model).swapped is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"length": 1}, errors.OptionError, "max_length is a whole number of tokens of at least 2, got 1"),
        ({"length": 64.5}, errors.OptionError, "got 64.5"),
        ({"budget": -1}, errors.OptionError, "budget is a number of tokens of at least 0, such as 1e6, got -1"),
        ({"budget": float("nan")}, errors.OptionError, "got nan"),
        ({"budget": "lots"}, errors.OptionError, "budget is a number of tokens .*, such as 1e6, got 'lots'"),
        ({"budget": True}, errors.OptionError, "got True"),
        ({"budget": 10**400}, errors.OptionError, "got 1000"),
        ({"serve": "vlm"}, errors.UnknownNameError, "Did you mean 'vllm'"),
        ({"model": ViTConfig()}, errors.UnsupportedModelError, "reads images"),
        ({"model": dict}, errors.OptionError, "dict is a class of neither a model nor a config"),
        ({"model": "./nowhere"}, errors.CheckpointError, "nowhere"),
    ],
)
def test_what_is_wrong_is_said(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"model": GPT2, "length": 512} | arguments
    with pytest.raises(error, match=words):
        hf_posswap.advise(given.pop("model"), given.pop("length"), **given)


def test_older_names_of_arguments_are_taken_and_never_both() -> None:
    expected = hf_posswap.advise(LLAMA, max_length=256, target="vllm")
    assert hf_posswap.advise(LLAMA, length=256, serve="vllm") == expected
    with pytest.raises(
        errors.OptionError, match="max_length and length are two names of one argument: give max_length"
    ):
        hf_posswap.advise(LLAMA, 256, length=256)
    with pytest.raises(errors.OptionError, match="target and serve are two names"):
        hf_posswap.advise(LLAMA, 256, target="vllm", serve="vllm")
    with pytest.raises(errors.OptionError, match="max_length is a whole number of tokens of at least 2, got None"):
        hf_posswap.advise(LLAMA)


def test_a_swapped_model_is_refused() -> None:
    model = hf_posswap.patch_model(GPT2LMHeadModel(GPT2), "rope", max_length=128)
    with pytest.raises(errors.AlreadyPatchedError, match="ask about the model without that swap"):
        hf_posswap.advise(model, 512)


LLAMA_3_8B = LlamaConfig(
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, intermediate_size=14336,
    vocab_size=128256, max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)  # fmt: skip


def test_a_large_model_with_a_budget_is_advised_by_the_literature_of_its_size() -> None:
    advice = hf_posswap.advise(LLAMA_3_8B, 32_768, budget=1e9)
    assert (advice.use.recipe, advice.use.scheme, advice.use.route) == ("yarn", "yarn:factor=4", "native")
    assert advice.use.standing == "literature"
    assert "arXiv:2309.00071" in advice.use.literature[0].source
    larger_base = next(option for option in advice.others if option.recipe == "abf")
    assert larger_base.advised
    assert (larger_base.route, advice.others[0].recipe) == ("native", "abf")
    assert larger_base.scheme == "rope:base=2000000"  # its own base of 500,000 times 4^(128 / 126), two digits
    assert "swap.scheme.base=2000000" in " ".join(larger_base.commands)
    for page, option in ((advice._repr_html_(), advice.use), (larger_base._repr_html_(), larger_base)):
        assert option.literature
        assert all(row.source in page for row in option.literature)
    assert advice.baseline in advice._repr_html_()
    lines = str(advice).splitlines()
    assert lines[1].startswith("caution: own measurements are on models of up to ")
    assert "published results come first" in lines[1]
    assert lines.index(f"use: {advice.use.title}") > 1  # said before anything is recommended
    assert next(line for line in lines if "because" in line).startswith("  because literature: YaRN, on Llama 2")


def test_a_large_model_without_a_budget_is_advised_a_scheme_without_training_and_its_baseline() -> None:
    advice = hf_posswap.advise(LLAMA_3_8B, 32_768)
    assert (advice.use.recipe, advice.use.scheme, advice.use.route) == (None, "yarn:factor=4", "native")
    assert {row.is_trained for option in (advice.use, *advice.others[:2]) for row in option.literature} == {False}
    assert [option.scheme for option in advice.others[:2]] == ["self_extend", "dual_chunk"] or [
        option.scheme for option in advice.others[:2]
    ] == ["dual_chunk", "self_extend"]
    assert "a sliding window of 8,192 tokens" in advice.baseline
    assert f"baseline to beat: {advice.baseline}" in str(advice)
    trained = next(option for option in advice.others if option.recipe == "yarn")
    assert "there is no budget; published trainings of it took 1,000,000,000 tokens or more" in trained.against[0]
    unpublished = next(option for option in advice.others if option.scheme == "rerope")
    assert "nothing was published or measured near this size" in unpublished.against[0]
    assert any("2502.20082" in row.source for row in advice.further)


def test_what_serves_a_large_model_still_decides() -> None:
    advice = hf_posswap.advise(LLAMA_3_8B, 32_768, serve="sglang")
    assert advice.use.scheme == "yarn:factor=4"
    refused = {option.scheme: option for option in advice.others if option.recipe is None}
    assert not refused["self_extend"].advised


def test_an_extrapolation_over_more_than_ten_times_is_said_first(only: Any) -> None:
    large = GPT2Config()  # 124 M parameters: 33 times the largest that was measured, and nothing is published
    advice = hf_posswap.advise(large, 8192, budget=1e9)
    assert (
        str(advice).splitlines()[1].startswith("caution: extrapolated: all measurements are on models of up to 3.7 M")
    )
    assert advice.use.literature == ()
    assert hf_posswap.advise(GPT2, 512).caution == ""
    (row,) = invented("yarn", -0.1)
    parameters = hf_posswap.advise(LLAMA, 256).parameters
    for share, is_said in ((0.11, False), (0.09, True)):
        only([dataclasses.replace(row, base=dataclasses.replace(row.base, parameters=int(share * parameters)))])
        assert bool(hf_posswap.advise(LLAMA, 256).caution) == is_said


def test_every_published_result_names_a_paper_and_a_candidate() -> None:
    subjects = {(candidate.subject, candidate.recipe is not None) for candidate in CANDIDATES["rope"]}
    for row in LITERATURE:
        assert re.match(r"arXiv:\d{4}\.\d{5}|model card of ", row.source)
        assert {(subject, row.is_trained) for subject in row.subjects} <= subjects
        assert row.smallest <= row.largest
        assert row.length is None or row.length > row.window
        assert (row.tokens == 0) <= (not row.is_trained)
        assert str(row).startswith("literature: ")
        assert not row.is_near(int(row.largest * 11))


def test_the_advice_says_what_it_holds_and_is_json() -> None:
    advice = hf_posswap.advise(GPT2, 512, budget=ENOUGH, serve="vllm")
    said, held = str(advice), json.loads(json.dumps(advice.to_dict()))
    for command in advice.use.commands:
        assert f"  $ {command}" in said
    for reason in held["use"]["reasons"]:
        assert f"because {reason['said']} [{reason['source']}]" in said
    assert len(held["others"]) == len(advice.others)
    assert weighing.MARGIN == 0.02


def test_a_larger_base_follows_from_the_dimensions_that_rotate() -> None:
    from hf_posswap.inspection.advice.candidates import _larger_base
    from hf_posswap.inspection.advice.case import read_case

    rope = {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.25}
    case = read_case(GPTNeoXConfig(hidden_size=512, num_attention_heads=8, rope_parameters=rope), 8192, 1e9, None)
    width, times = case.report.geometry.rotary_dim, case.windows
    assert (width, times) == (16, 4.0)
    assert _larger_base(case) == int(float(f"{500_000 * times ** (width / (width - 2)):.1e}"))
