"""A SentenceTransformer is patched as the transformers model inside it, and reads what the swap reads."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posswap
from hf_posswap import (
    describe_positions,
    evaluate,
    explain,
    patch_model,
    patched,
    plan_swap,
    set_blend,
    swap_plan,
    unpatch_model,
    verify_swap,
)
from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.errors import AlreadyPatchedError, CheckpointError, NotPatchedError, OptionError, UnsupportedSwapError
from hf_posswap.patching.sites.attention.edits import PositionHook
from hf_posswap.schemes import Blend, Fire, Kerple, Rope, Scheme, T5Bias
from hf_posswap.testing.tiny import tiny_model
from tests.contract.pairs import CHANGE, gap, words
from tests.patching.apply.test_wrapped import sentences

LINES = ["A ship at sea.", "the river runs down to the sea " * 100]
NOISE = 1e-5


def inner_of(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, transformers.BertModel))


def vectors(model: Any, lines: list[str] = LINES) -> torch.Tensor:
    return torch.tensor(model.encode(lines))


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("alibi", "learned")]


@pytest.mark.parametrize("scheme", ["rope", *OTHERS])
def test_it_is_the_model_inside_that_is_swapped_and_the_length_follows(scheme: str) -> None:
    model, alone = sentences(), sentences()
    length, native = model.max_seq_length, vectors(model)
    expected_plan = plan_swap(alone, scheme, max_length=2048)
    assert expected_plan == plan_swap(inner_of(alone), scheme, max_length=2048)
    assert patch_model(model, scheme, max_length=2048) is model
    assert swap_plan(model) == swap_plan(inner_of(model)) == expected_plan
    assert model.max_seq_length == 2048
    assert list(verify_swap(model).checks) == list(verify_swap(inner_of(model)).checks)
    assert describe_positions(model).swapped == expected_plan.named
    patch_model(inner_of(alone), scheme, max_length=2048)
    alone.max_seq_length = 2048
    assert gap(vectors(model), vectors(alone)) == 0
    assert gap(vectors(model)[1:], native[1:]) > 1e-3  # more of the long text is read
    with pytest.raises(AlreadyPatchedError, match="already carries"):
        patch_model(model, "rope")
    assert unpatch_model(model) is model
    assert model.max_seq_length == length
    assert gap(vectors(model), native) == 0
    with pytest.raises(NotPatchedError, match="carries no swap"):
        swap_plan(model)


def test_the_length_stays_where_the_swap_or_the_user_leaves_it() -> None:
    model = sentences()
    length = model.max_seq_length
    with patched(model, "rope"):
        assert model.max_seq_length == length
    with patched(model, "rope", max_length=1024):
        assert model.max_seq_length == 1024
    assert model.max_seq_length == length
    patch_model(model, "rope", max_length=1024)
    model.max_seq_length = 300
    assert unpatch_model(model).max_seq_length == 300
    with pytest.raises(UnsupportedSwapError, match="nope"):
        patch_model(model, "nope", max_length=1024)
    assert model.max_seq_length == 300
    with patched(model, "yarn", factor=4.0):  # a factor says the length
        assert model.max_seq_length == swap_plan(model).max_length == 4 * 512


@pytest.mark.parametrize("keys", [None, ["processor_kwargs", "mine"], ["max_seq_length"]])
def test_what_the_user_has_sentence_transformers_save_stays(keys: list[str] | None) -> None:
    model = sentences()
    if keys is not None:
        model[0].config_keys = keys
    before = dict(vars(model[0]))
    with patched(model, "rope", max_length=1024):
        assert model[0].config_keys.count("max_seq_length") == 1
    assert vars(model[0]) == before


def test_a_swap_that_cannot_set_the_length_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sentences()
    native = vectors(model, LINES[:1])

    def refuse(self: Any, value: Any) -> None:
        raise RuntimeError("no length here")

    cls = type(model)
    monkeypatch.setattr(cls, "max_seq_length", property(lambda self: 256, refuse))
    with pytest.raises(RuntimeError, match="no length here"):
        patch_model(model, "rope", max_length=1024)
    monkeypatch.undo()
    assert gap(vectors(model, LINES[:1]), native) == 0
    with pytest.raises(NotPatchedError):
        swap_plan(model)


@pytest.mark.parametrize(
    ("scheme", "route"), [pytest.param("learned", "native", marks=pytest.mark.slow), ("rope", "plugin")]
)
def test_it_is_saved_whole_and_loads_with_its_swap(scheme: str, route: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = patch_model(sentences(), scheme, max_length=1024)
    assert swap_plan(model).route == route
    expected = vectors(model)
    folder = hf_posswap.save(model, tmp_path / "saved")
    loaded = SentenceTransformer(str(folder), device="cpu")
    assert loaded.max_seq_length == 1024
    assert gap(vectors(loaded), expected) < NOISE
    if route == "plugin":  # of a native one stock transformers knows nothing, and needs to know nothing
        assert swap_plan(loaded).named == swap_plan(model).named
    assert swap_plan(hf_posswap.load(folder)).named == swap_plan(model).named
    told = (folder / "README.md").read_text()  # the first code is of the whole, pooling and all
    scope: dict[str, Any] = {}
    exec(told.partition("```python\n")[2].partition("```")[0].replace("path/to/this/folder", str(folder)), scope)
    assert gap(vectors(scope["model"]), expected) < NOISE
    with pytest.raises(CheckpointError, match="is not empty"):
        hf_posswap.save(model, folder)
    hf_posswap.save(unpatch_model(model), folder, overwrite=True)
    assert getattr(SentenceTransformer(str(folder), device="cpu")[0].auto_model.config, "posswap", None) is None
    assert "README.md" in hf_posswap.push(loaded, "me/encoder", dry_run=True).files


def test_a_length_beyond_that_of_the_config_is_saved(tmp_path: Path) -> None:
    """Of dynamic scaling a config keeps the original length, at which sentence-transformers would cut texts."""
    from sentence_transformers import SentenceTransformer

    size = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    config = transformers.Qwen2Config(**size, num_hidden_layers=1, vocab_size=30522, max_position_embeddings=512)
    transformers.Qwen2Model(config).save_pretrained(tmp_path / "base")
    sentences().tokenizer.save_pretrained(tmp_path / "base")
    model = patch_model(SentenceTransformer(str(tmp_path / "base"), device="cpu"), "dynamic", factor=4.0)
    hf_posswap.save(model, tmp_path / "saved")
    model.save_pretrained(str(tmp_path / "by its own"))
    for folder in ("saved", "by its own"):
        loaded = SentenceTransformer(str(tmp_path / folder), device="cpu")
        assert loaded.max_seq_length == model.max_seq_length > loaded[0].auto_model.config.max_position_embeddings
        assert gap(vectors(loaded), vectors(model)) < NOISE
    length = model.max_seq_length
    unpatch_model(model).save_pretrained(str(tmp_path / "native"))
    assert SentenceTransformer(str(tmp_path / "native"), device="cpu").max_seq_length == model.max_seq_length < length


def test_an_adapter_is_saved_with_it_where_it_can_be_opened_again(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    peft = pytest.importorskip("peft")
    model = patch_model(sentences(), "t5", max_length=1024)
    base = hf_posswap.save(model, tmp_path / "base")
    opened = SentenceTransformer(str(base), device="cpu")
    config = peft.LoraConfig(target_modules=["query"], init_lora_weights=False)
    for one in (model, opened):
        one[0].model = hf_posswap.add_adapter(one[0].model, config)
    with pytest.raises(UnsupportedSwapError, match=r"would not open an adapter of BertModel again.*save the swapped"):
        hf_posswap.save(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    again = SentenceTransformer(str(hf_posswap.save(opened, tmp_path / "adapter")), device="cpu")
    assert gap(vectors(again), vectors(opened)) < NOISE < gap(vectors(opened), vectors(model))
    model[0].model = model[0].model.merge_and_unload()
    whole = SentenceTransformer(str(hf_posswap.save(model, tmp_path / "whole")), device="cpu")
    assert gap(vectors(whole), vectors(model)) < NOISE


def test_its_own_tokenizer_is_saved_and_no_other(tmp_path: Path) -> None:
    model = patch_model(sentences(), "rope", max_length=1024)
    hf_posswap.save(model, tmp_path / "own", tokenizer=model.tokenizer)
    with pytest.raises(OptionError, match="saved with its own tokenizer: leave tokenizer out"):
        hf_posswap.save(model, tmp_path / "other", tokenizer=copy.copy(model.tokenizer))
    assert not (tmp_path / "other").exists()


def test_explanations_take_it_and_comparisons_say_what_to_give() -> None:
    model = sentences()
    assert explain(model).report.model == "BertModel"
    with pytest.raises(OptionError, match=r"pools vectors by the mean.*model.get_submodule\('0\.(auto_)?model'\)"):
        evaluate(model, "rope")


def test_one_without_or_with_several_transformers_models_is_refused() -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence_transformers is not installed: it is one of the development dependencies")
    from sentence_transformers import SentenceTransformer

    one, other = sentences(), sentences()
    several = SentenceTransformer(modules=[one[0], other[0], one[1]], device="cpu")
    message = r"has several transformers models, '0\.(auto_)?model' \(BertModel\), '1\.(auto_)?model' .*get_submodule"
    for ask in (lambda: patch_model(several, "rope"), lambda: verify_swap(several), lambda: plan_swap(several, "rope")):
        with pytest.raises(UnsupportedSwapError, match=message):
            ask()
    none = SentenceTransformer(modules=[one[1]], device="cpu")
    with pytest.raises(UnsupportedSwapError, match="has no transformers model in it"):
        patch_model(none, "rope")


def test_a_cross_encoder_is_told_of_the_length_at_which_it_cuts(tmp_path: Path) -> None:
    """Only a SentenceTransformer's length follows: another one, swapped as told, would go on to cut its texts."""
    inner = sentences()
    config = transformers.BertConfig(**inner_of(inner).config.to_dict() | {"num_labels": 1})
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    inner.tokenizer.save_pretrained(tmp_path)
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(tmp_path), device="cpu")
    cut = model.max_seq_length
    message = rf"got CrossEncoder; .*get_submodule.*Then set \.max_seq_length of the CrossEncoder: .* at {cut} tokens"
    with pytest.raises(UnsupportedSwapError, match=message):
        patch_model(model, "rope", max_length=2048)
    patch_model(next(module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)), "rope")
    one, other = [("a ship", LINES[1] * 2 + end) for end in ("ship", "sea")]
    assert gap(*map(torch.tensor, (model.predict([one]), model.predict([other])))) == 0
    model.max_seq_length = 2048
    assert gap(*map(torch.tensor, (model.predict([one]), model.predict([other])))) > 0


@pytest.mark.parametrize(
    "scheme", [Kerple(), T5Bias(init_std=0.5), Fire(), Blend(new=Rope(), weight=0.25)], ids=lambda scheme: scheme.name
)
def test_a_forward_past_all_hooks_keeps_nothing_of_the_one_before(scheme: Scheme) -> None:
    """sentence-transformers calls the forward of its model so: what was trained, or blended, in between counts."""
    model = patch_model(tiny_model("BertModel", meta=False), scheme)
    memos = next(
        hook for module in model.modules() for hook in pre_hooks(module) if isinstance(hook, PositionHook)
    ).memos
    ids = words(2, 20)
    with torch.no_grad():
        before = model.forward(ids)[0]
        for name, parameter in model.named_parameters():
            if name.startswith("posswap."):
                parameter.mul_(-3)
        if isinstance(scheme, Blend):
            set_blend(model, 0.75)
        after = model.forward(ids)[0]
        assert gap(after, copy.deepcopy(model)(ids)[0]) == 0
        assert gap(after, before) > CHANGE
        for length in range(5, 15):
            model.forward(words(1, length))
    assert len(memos.of_thread().entries) == 1
