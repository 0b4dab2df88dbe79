"""`posswap selfcheck`: it passes here, and names what a release of transformers would have broken."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner, Result

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.testing.selfcheck import Report, run, selfcheck, trial
from hf_posswap.testing.selfcheck.run import Check
from hf_posswap.testing.selfcheck.trial import WrongAnswerError, touch_of, words_of

STEPS = ["plan", "patch", "verify_swap", "cached steps", "save and load", "unpatch"]


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["selfcheck", *arguments])


@pytest.fixture
def one_kind(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that leaves one kind of family, by its words, and the checks of transformers."""

    def leave(words: str) -> None:
        monkeypatch.setattr(run, "KINDS", tuple(kind for kind in trial.KINDS if str(kind) == words))
        assert len(run.KINDS) == 1

    return leave


def test_this_installation_works() -> None:
    result = invoked("--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"]) == (0, True), found
    assert found["versions"]["transformers"] == transformers.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert len(found["checks"]) == len(run.UPSTREAM) + len(STEPS) * len(trial.KINDS)
    assert all(check["ok"] and check["touch"] is None for check in found["checks"])
    kinds = {check["subject"] for check in found["checks"]} - {"transformers"}
    assert kinds == {str(kind) for kind in trial.KINDS}
    for name in ("learned table", "rotary", "encoder", "encoder-decoder", "T5 bias", "ALiBi", "images"):
        assert any(kind.startswith(f"{name}, ") for kind in kinds)
    routes = {check["said"] for check in found["checks"] if check["step"] == "plan"}
    assert routes == {"native route", "plugin route"}
    cached = {check["subject"]: check["said"] for check in found["checks"] if check["step"] == "cached steps"}
    assert {kind for kind, said in cached.items() if said == "no cache in this class"} == {
        "encoder, to rope",
        "images, to rope_2d",
    }


def test_a_function_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, one_kind: Callable[[str], None]) -> None:
    one_kind("learned table, to rope")
    monkeypatch.delattr(transformers.Cache, "get_query_offset")
    result = invoked("--json")
    found = json.loads(result.stdout)
    wrong = [check for check in found["checks"] if check["ok"] is False]
    assert (result.exit_code, found["ok"]) == (1, False)
    assert wrong[0]["step"] == wrong[0]["touch"] == "Cache.get_query_offset, Cache.get_mask_sizes"
    for check in wrong:
        assert "'DynamicCache' object has no attribute 'get_query_offset'" in check["said"]
    assert wrong[-1]["step"] == "plan"  # GPT-2 itself goes by it
    assert [check["ok"] for check in found["checks"] if check["step"] in STEPS] == [False] + [None] * 5


def test_a_function_that_answers_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.Cache, "get_query_offset", lambda self, layer: 0)
    assert run.cache_offsets() == "DynamicCache.get_query_offset says 0 after 3 tokens"


def test_a_cache_that_gives_back_other_keys_is_named(
    monkeypatch: pytest.MonkeyPatch, one_kind: Callable[[str], None]
) -> None:
    one_kind("learned table, to rope")
    stock = transformers.DynamicCache.update

    def update(self: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        held, others = stock(self, keys, values, *more, **named)
        return held, others if others.shape == values.shape else others.roll(1, dims=-2)

    monkeypatch.setattr(transformers.DynamicCache, "update", update)
    (wrong,) = selfcheck().failed
    assert wrong.step == "cached steps"
    assert wrong.said.startswith("steps with a cache and a full forward are ")
    assert wrong.touch is not None
    assert wrong.touch.startswith("Cache.get_query_offset, Cache.get_mask_sizes, and what the model class passes")


def test_where_hf_posswap_met_it_is_told(monkeypatch: pytest.MonkeyPatch, one_kind: Callable[[str], None]) -> None:
    one_kind("rotary, to alibi")
    monkeypatch.delattr(transformers.AttentionInterface, "get_interface")
    wrong = selfcheck().failed[-1]
    assert wrong.touch is not None
    assert "get_interface" in wrong.said


def test_angles_that_changed_are_named(monkeypatch: pytest.MonkeyPatch, one_kind: Callable[[str], None]) -> None:
    one_kind("rotary, to yarn")
    stock = ROPE_INIT_FUNCTIONS["yarn"]

    def other(*arguments: Any, **named: Any) -> Any:
        inv_freq, factor = stock(*arguments, **named)
        return inv_freq * 1.01, factor

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "yarn", other)
    result = invoked()
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert "rope type 'yarn' gives other angles than its definition" in said
    assert "look at modeling_rope_utils.ROPE_INIT_FUNCTIONS" in said
    assert "FAILED" in said


def test_an_interface_without_masks_is_named(monkeypatch: pytest.MonkeyPatch, one_kind: Callable[[str], None]) -> None:
    one_kind("learned table, to rope")
    monkeypatch.setattr(run, "NAME", "posswap_selfcheck_unseen")
    monkeypatch.setattr(transformers.AttentionMaskInterface, "register", lambda name, function: None)
    wrong = selfcheck().failed[0]
    assert wrong.step == "AttentionInterface, AttentionMaskInterface"
    assert wrong.said.startswith("q, k, v and mask have shapes ")


def test_settings_that_get_lost_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaConfig, "to_dict", lambda self: {"rope_parameters": {}})
    assert "come back as {}" in str(run.rope_settings())


def test_the_table_says_what_held_in_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (Check("transformers", "caches", True, "as known"), Check("images", "patch", False, "no [mark]", "there"))
    monkeypatch.setattr("hf_posswap.testing.selfcheck.selfcheck", lambda: Report({"python": "3"}, checks, 1.6))
    for width in ("40", "200"):
        monkeypatch.setenv("COLUMNS", width)
        result = invoked()
        said = " ".join(result.stdout.split())
        assert result.exit_code == 1
        assert "1 checks hold" in said
        assert "patch: no [mark]" in said
        assert "images, patch: look at there" in said
        assert "2 checks in 2 s: 1 failed." in said


def known_touch(module: Any) -> None:
    """Do something.

    Touches `module.gone`, since 5.14. Without it nothing works.
    """
    module.gone()


def test_what_a_function_says_that_it_touches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "__name__", "hf_posswap.compat.made_up")
    try:
        known_touch(None)
    except AttributeError as error:
        said = touch_of(error, "")
    assert said.startswith("hf_posswap.compat.made_up.known_touch, line ")
    assert said.endswith(": module.gone(); touches `module.gone`, since 5.14")


def test_the_place_in_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trial._model("GPT2LMHeadModel")
    monkeypatch.setattr(transformers.GPT2Model, "forward", lambda self, *given, **named: transformers.AutoConfig())
    hf_posswap.patch_model(model, "rope")
    with pytest.raises(OSError, match="AutoConfig") as caught:
        hf_posswap.verify_swap(model)
    said = touch_of(caught.value, "nothing")
    assert said.startswith("hf_posswap.patching.verify.")
    assert "; raised in transformers.models.auto.configuration_auto.AutoConfig.__init__, line " in said


def test_results_that_differ_are_no_place_of_ours() -> None:
    with pytest.raises(WrongAnswerError) as caught:
        trial.same(1.0, "one and the other", allowed=0.5)
    assert words_of(caught.value) == "one and the other are 1 apart, and no more than 0.5 would be rounding"
    assert touch_of(caught.value, "the cache") == "the cache"
    with pytest.raises(WrongAnswerError, match=r"logits of shape \(1,\) where \(2,\) should be"):
        trial.gap(torch.zeros(1), torch.zeros(2))
    assert trial.gap(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")
