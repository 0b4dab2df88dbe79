"""The gradual swap, from the old model to the new one, on whole models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_posswap
from hf_posswap import Blend, finish_blend, patch_model, set_blend, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import NotPatchedError, PositionRangeError, SchemeError, UnsupportedSwapError
from hf_posswap.patching.record.training import swap_digest, training_of
from hf_posswap.schemes import Alibi, Kerple, Learned, Linear, NoPE, Rope, Scheme, Sinusoidal, T5Bias
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import LENGTH, TINY, build
from tests.contract.pairs import CHANGE, gap, logits, words

IDS = words(2, LENGTH - 2)
NEW: list[Scheme] = [
    Rope(base=500.0),
    Linear(factor=2),
    Alibi(),
    Kerple(),
    NoPE(),
    Sinusoidal(),
    Learned(extend="reinit"),
]
CASES = [
    (model, new)
    for model in ("gpt2", "opt", "bert", "roberta", "llama", "gpt_neox", "glm")
    for new in NEW
    if not (model in ("bert", "roberta") and new.name == "nope")
    and not (model in ("llama", "gpt_neox", "glm") and new.kind == "table")
]


@pytest.mark.parametrize(("name", "new"), CASES, ids=str)
def test_it_begins_as_the_old_model_and_ends_as_the_new_one(name: str, new: Scheme) -> None:
    model, other = build(name), build(name)
    old = logits(model, IDS)
    patch_model(other, new)
    expected = logits(other, IDS)
    plan = swap_plan(patch_model(model, Blend(new=new)))
    assert plan.route == "plugin"
    assert gap(logits(model, IDS), old) == 0
    verify_swap(model)
    set_blend(model, 0.5)
    between = logits(model, IDS)
    assert gap(between, old) > CHANGE
    assert gap(between, expected) > CHANGE
    verify_swap(model)
    set_blend(model, 1.0)
    assert gap(logits(model, IDS), expected) == 0
    verify_swap(model)
    assert finish_blend(model) is model
    assert swap_plan(model).scheme == other._posswap.plan.scheme  # type: ignore[attr-defined]
    assert model.config.to_dict() == other.config.to_dict()
    assert gap(logits(model, IDS), expected) == 0
    unpatch_model(model)
    assert gap(logits(model, IDS), old) == 0


def trained(model: Any) -> None:
    """Move every parameter that is trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


@pytest.mark.parametrize("new", [Kerple(), T5Bias(init_std=0.5), Learned(extend="reinit")], ids=str)
def test_what_the_new_mechanism_learned_stays(new: Scheme, tmp_path: Path) -> None:
    model = build("gpt2")
    patch_model(model, Blend(new=new, weight=0.5))
    trained(model)
    model.save_pretrained(tmp_path / "half")
    model = hf_posswap.load(tmp_path / "half")  # a training that goes on from a checkpoint
    set_blend(model, 1.0)
    expected = logits(model, IDS)
    finish_blend(model, max_length=None if new.kind == "table" else 2 * LENGTH)
    assert gap(logits(model, IDS), expected) == 0
    model.save_pretrained(tmp_path / "whole")
    assert gap(logits(hf_posswap.load(tmp_path / "whole"), IDS), expected) == 0


def test_the_weight_is_saved_and_loaded(tmp_path: Path) -> None:
    for name in ("gpt2", "llama"):
        model = build(name)
        patch_model(model, Blend(new=Rope(base=77.0)))
        set_blend(model, 0.375)
        model.save_pretrained(tmp_path / name)
        loaded = hf_posswap.load(tmp_path / name)
        assert loaded.config.posswap["scheme"]["weight"] == 0.375
        assert gap(logits(loaded, IDS), logits(model, IDS)) == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_lora_trained_on_the_way_goes_through() -> None:
    model = get_peft_model(build("gpt2"), LoraConfig(target_modules=list(TINY["gpt2"].projections), modules_to_save=[]))
    patch_model(model, Blend(new=Rope()))
    trained(model)
    set_blend(model, 1.0)
    expected = logits(model, IDS)
    finish_blend(model)
    assert gap(logits(model, IDS), expected) == 0


def test_past_the_old_table_it_says_so_until_the_end() -> None:
    model = build("gpt2")
    patch_model(model, Blend(new=Rope(), weight=1.0))
    with pytest.raises(PositionRangeError, match=f"ends at {LENGTH}"):
        logits(model, words(1, LENGTH + 1))
    finish_blend(model, max_length=2 * LENGTH)
    assert torch.isfinite(logits(model, words(1, 2 * LENGTH))).all()


def test_blending_without_a_blend_is_refused() -> None:
    model = build("gpt2")
    for call in (lambda: set_blend(model, 0.5), lambda: finish_blend(model)):
        with pytest.raises(NotPatchedError, match=r"carries no swap: patch_model\(model, Blend\(\.\.\.\)\) first"):
            call()
    patch_model(model, "alibi")
    with pytest.raises(NotPatchedError, match="carries alibi"):
        set_blend(model, 0.5)
    unpatch_model(model)
    patch_model(model, Blend(new=Alibi(), weight=0.5))
    before = logits(model, IDS)
    with pytest.raises(SchemeError, match="blend is at weight 0.5: ending it now"):
        finish_blend(model)
    for weight in (-0.1, 1.5, float("nan"), "half"):
        with pytest.raises(SchemeError, match="weight must be a finite number >= 0 and <= 1"):
            set_blend(model, weight)  # type: ignore[arg-type]
    assert gap(logits(model, IDS), before) == 0


def test_a_table_cannot_fade_into_a_model_without_one() -> None:
    with pytest.raises(UnsupportedSwapError, match="sinusoidal needs a position table"):
        patch_model(build("llama"), Blend(new=Sinusoidal()))
    with pytest.raises(UnsupportedSwapError, match="site='attention' was requested"):
        patch_model(build("gpt2"), Blend(new=Sinusoidal()), site="attention")


def test_an_end_that_fails_leaves_the_blend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt2")
    patch_model(model, Blend(new=Kerple(), weight=1.0))
    trained(model)
    before = logits(model, IDS)
    for length, message in ((2**40, "the maximum is"), (0, "whole number of tokens >= 1, got 0"), (-1, "got -1")):
        with pytest.raises(SchemeError, match=message):
            finish_blend(model, max_length=length)
        assert gap(logits(model, IDS), before) == 0
    verify_swap(model)


@pytest.mark.parametrize("term", ["ssmax", "native"])
def test_a_term_of_a_sum_is_no_end_of_a_blend(term: str) -> None:
    with pytest.raises(SchemeError, match=f"new must be a scheme by itself, .* and {term} is only a term of a sum"):
        Blend(new=term)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "ModernBertForMaskedLM", "Olmo3ForCausalLM"])
def test_of_several_sets_of_angles_only_those_that_the_new_mechanism_replaces_fade(name: str) -> None:
    for new in (Rope(base=500.0), Linear(factor=2)):
        model, other = (tiny_model(name, meta=False) for _ in range(2))
        old, expected = logits(model, IDS), logits(patch_model(other, new), IDS)
        patch_model(model, Blend(new=new))
        assert gap(logits(model, IDS), old) == 0
        set_blend(model, 1.0)
        assert gap(logits(model, IDS), expected) == 0
    model = tiny_model(name, meta=False)
    state = model.config.to_dict()
    for new in (Alibi(), Kerple()):
        patched_alone = swap_plan(patch_model(tiny_model(name, meta=False), new))
        assert all("identity rotation" in e.after for e in patched_alone.edits if e.site == "rotary")
        message = f"only those of type .*full_attention would fade, and {new.name} replaces .* of all"
        with pytest.raises(UnsupportedSwapError, match=message):
            patch_model(model, Blend(new=new))
    assert model.config.to_dict() == state


def test_what_was_frozen_stays_frozen_at_the_end() -> None:
    for new in (Kerple(), Learned(extend="reinit")):
        model = build("gpt2")
        patch_model(model, Blend(new=new, weight=1.0))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        finish_blend(model)
        assert not [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        model = finish_blend(patch_model(build("gpt2"), Blend(new=new, weight=1.0)))
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("new", [Alibi(), Sinusoidal(), Learned(extend="reinit")], ids=str)
def test_a_copy_of_the_table_that_peft_trains_fades_too(new: Scheme) -> None:
    config = LoraConfig(target_modules=["c_attn"], modules_to_save=["wpe"], fan_in_fan_out=True)
    model = get_peft_model(patch_model(build("gpt2"), Blend(new=new, weight=0.5)), config).eval()
    trained(model)
    base = patch_model(build("gpt2"), Blend(new=new, weight=0.5))
    merged = copy.deepcopy(model).merge_and_unload()
    for weight in (0.25, 1.0):
        set_blend(model, weight)
        set_blend(merged, weight)
        set_blend(base, weight)
        assert gap(logits(model, IDS), logits(merged, IDS)) < 1e-4
        with model.disable_adapter():
            assert gap(logits(model, IDS), logits(base, IDS)) == 0
        verify_swap(model)
    with pytest.raises(UnsupportedSwapError, match=r"PEFT trains a copy of 'transformer.wpe' .*merge_and_unload"):
        finish_blend(model)
    expected = logits(merged, IDS)
    assert gap(logits(finish_blend(merged), IDS), expected) < 1e-5
    with model.disable_adapter():
        assert gap(logits(unpatch_model(model), IDS), logits(build("gpt2"), IDS)) == 0
    assert not [key for key in model.state_dict() if key.endswith((".old", ".new"))]


STACKS: list[dict[str, Any]] = [
    {"encoder": Blend(new=Kerple()), "decoder": "fire"},
    {"encoder": "learned:extend=reinit + kerple", "decoder": Blend(new=T5Bias(init_std=0.5))},
    {"encoder": "learned:extend=reinit", "decoder": Blend(new=Learned(extend="reinit"))},
    {"decoder": Blend(new=Rope())},
]


@pytest.mark.parametrize("schemes", STACKS, ids=str)
def test_a_blend_in_one_stack_of_two_ends_with_all_that_both_have_learned(schemes: dict[str, Any]) -> None:
    model, other = (
        tiny_model("BartForConditionalGeneration", meta=False),
        tiny_model("BartForConditionalGeneration", meta=False),
    )
    patch_model(model, schemes)
    ends = {name: scheme.new if isinstance(scheme, Blend) else scheme for name, scheme in schemes.items()}
    patch_model(other, ends)
    trained(model)
    start = both(model)
    set_blend(model, 0.5)
    assert gap(both(model), start) > CHANGE / 10
    verify_swap(model)
    set_blend(model, 1.0)
    expected = both(model)
    assert gap(both(finish_blend(model)), expected) == 0
    assert [type(module) for module in model.modules()] == [type(module) for module in other.modules()]


def both(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, decoder_input_ids=IDS[:, :12]).logits


def test_a_blend_ends_only_once_each_stack_is_there() -> None:
    for weights in ((0.0, 1.0), (1.0, 0.25)):
        model = tiny_model("BartForConditionalGeneration", meta=False)
        blends = {name: Blend(new=Alibi(), weight=w) for name, w in zip(("encoder", "decoder"), weights, strict=True)}
        before = both(patch_model(model, blends))
        with pytest.raises(SchemeError, match=f"at weight {min(weights):g}: ending it now would change the outputs"):
            finish_blend(model)
        assert gap(both(model), before) == 0
        set_blend(model, 1.0)
        expected = both(model)
        assert gap(both(finish_blend(model)), expected) == 0


@pytest.mark.parametrize("new", [Learned(extend="reinit"), Kerple(), Alibi()], ids=str)
def test_what_was_learned_is_kept_of_a_model_that_is_offloaded(new: Scheme) -> None:
    model = patch_model(build("gpt2"), Blend(new=new, weight=1.0))
    trained(model)
    expected = logits(finish_blend(copy.deepcopy(model)), IDS)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in model.parameters())
    assert gap(logits(finish_blend(model), IDS), expected) == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_blend_ends_beside_a_mechanism_that_an_adapter_trains() -> None:
    model = tiny_model("BartForConditionalGeneration", meta=False)
    patch_model(model, {"encoder": "kerple", "decoder": Blend(new=T5Bias(init_std=0.5), weight=1.0)})
    wrapped = hf_posswap.add_adapter(model, LoraConfig(target_modules=["q_proj"])).eval()
    assert len([name for name, p in wrapped.named_parameters() if p.requires_grad and "posswap" in name]) == 3
    trained(wrapped)
    expected = both(wrapped)
    assert gap(both(finish_blend(wrapped)), expected) == 0


def test_its_end_keeps_the_record_of_its_training() -> None:
    """The weights were trained under the blend's new mechanism alone; at another length, nobody knows."""
    for length, adaptation in ((LENGTH, "adapted: 9 tokens"), (2 * LENGTH, "required")):
        model = build("gpt2")
        patch_model(model, Blend(new=Rope(), weight=1.0))
        told = {"version": 1, "base": "me/gpt2", "objective": "next-token", "what": "full", "held_out": {}}
        told |= {"steps": 1, "tokens": 9, "base_weights": None, "recipe": None, "data": None}
        model.config.posswap_training = told | {"swap": swap_digest(swap_plan(model).record)}
        finish_blend(model, max_length=length)
        assert swap_plan(model).adaptation.startswith(adaptation)
        training = training_of(model.config)
        assert (training is not None and training.is_of(swap_plan(model).record)) == (length == LENGTH)


@pytest.mark.parametrize("new", [Kerple(), Alibi(learned=True), Learned(extend="reinit")], ids=str)
def test_an_optimizer_trains_the_new_mechanism_after_the_end(new: Scheme) -> None:
    model = patch_model(build("gpt2"), Blend(new=new, weight=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    finish_blend(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


def test_settings_made_during_a_blend_stay_after_the_end(tmp_path: Path) -> None:
    model = patch_model(build("gpt2"), Blend(new=Rope()))
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.config.pad_token_id = 1
    set_blend(model, 1.0)
    finish_blend(model, max_length=2 * LENGTH)
    assert model.config.pad_token_id == 1
    hf_posswap.save(model, tmp_path / "model")
    assert gap(logits(hf_posswap.load(tmp_path / "model"), IDS), logits(model, IDS)) == 0
