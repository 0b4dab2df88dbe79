"""Swapped models that see images, run in every way that models are run and trained."""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap.schemes import schemes_for
from tests.families.vision_models import CLASSES, FIRST, build, images, prefix_of, states, tower_of

ALL = list(schemes_for("images"))
OTHER = (24, 40)
SIZES = ((32, 32), OTHER, (40, 24))


def swapped(name: str, scheme: str, **options: Any) -> Any:
    model = build(name)
    hf_posswap.patch_model(model, scheme, **options)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients after one step on images of several sizes, those of equal length among them."""
    model.zero_grad()
    tower = tower_of(model).train()
    outs = [tower(pixel_values=images(*size)).last_hidden_state for size in SIZES]
    torch.stack([out.square().mean() for out in outs]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("scheme", ALL)
def test_every_attention_implementation_gives_the_same(name: str, scheme: str) -> None:
    model = swapped(name, scheme)
    for size in SIZES:
        model.set_attn_implementation("sdpa")
        expected = states(model, images(*size))
        model.set_attn_implementation("eager")
        torch.testing.assert_close(states(model, images(*size)), expected, rtol=0, atol=2e-5)
        with torch.no_grad():
            weights = tower_of(model)(pixel_values=images(*size), output_attentions=True).attentions
        assert len(weights) == 2
        torch.testing.assert_close(weights[0].sum(dim=-1), torch.ones_like(weights[0][..., 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("scheme", ALL)
def test_gradients_and_gradient_checkpointing(name: str, scheme: str) -> None:
    model = swapped(name, scheme)
    expected = gradients(model)
    rows = next(key for key in (*expected, "none") if "position_embedding" in key or key == "none")
    tabled = scheme == "learned_2d" or (prefix_of(name) > 0 and scheme != "sinusoidal_2d")
    assert (rows != "none") == tabled
    if scheme == "nope" and tabled:  # rows of patches are out of use
        assert not expected[rows].flatten(0, -2)[prefix_of(name) :].any()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    found = gradients(model)
    assert set(found) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CLASSES if name.endswith("ForImageClassification")])
def test_training_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = swapped(name, "rope_2d").train()
    pixels, labels = images(*OTHER, batch=4), torch.tensor([0, 1, 1, 0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("scheme", ALL)
def test_bfloat16_stays_near_float32_and_unpatches_exactly(scheme: str) -> None:
    for name in FIRST:
        model = swapped(name, scheme)
        expected = states(model, images(*OTHER))
        found = states(model.to(torch.bfloat16), images(*OTHER).to(torch.bfloat16))
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
        hf_posswap.verify_swap(model)
        hf_posswap.unpatch_model(model)
        native = build(name).to(torch.bfloat16).state_dict()
        assert all(torch.equal(value, native[key]) for key, value in model.state_dict().items())


def test_angles_and_slopes_stay_in_float32() -> None:
    for scheme, attribute in (("rope_2d", "frequencies.inv_freq"), ("alibi_2d", "steepness")):
        model = swapped("ViTModel", scheme).to(torch.bfloat16)
        assert attrgetter(attribute)(model.posswap).dtype == torch.float32


@pytest.mark.parametrize("scheme", ALL)
def test_pickled_and_read_again(scheme: str) -> None:
    model = swapped("SiglipVisionModel", scheme)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(states(again, images(*OTHER)), states(model, images(*OTHER)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("name", ["ViTModel", "SiglipVisionModel"])
def test_lora_before_and_after(name: str, scheme: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        after = peft.get_peft_model(swapped(name, scheme), config).eval()
        torch.manual_seed(0)
        before = peft.get_peft_model(build(name), config).eval()
    hf_posswap.patch_model(before, scheme)
    expected, found = ({"out": states(one.get_base_model(), images(*OTHER))} for one in (after, before))
    assert torch.equal(found["out"], expected["out"])
    assert not torch.equal(expected["out"], states(swapped(name, scheme), images(*OTHER)))
    hf_posswap.unpatch_model(before)
    assert not any(part._forward_pre_hooks for part in tower_of(before.get_base_model()).embeddings.modules())


def test_two_models_of_one_class_do_not_meet() -> None:
    one, other, native = build("ViTModel"), build("ViTModel"), build("ViTModel")
    expected = states(native, images())
    hf_posswap.patch_model(one, "rope_2d")
    hf_posswap.patch_model(other, "nope")
    alone = states(swapped("ViTModel", "rope_2d"), images())
    assert torch.equal(states(one, images()), alone)
    assert torch.equal(states(native, images()), expected)
    with pytest.raises(ValueError, match=r"Input image size \(24\*40\) doesn't match"):
        native(pixel_values=images(*OTHER))


def test_a_batch_is_its_images_one_by_one() -> None:
    for scheme in ("rope_2d", "alibi_2d"):
        model = swapped("DeiTModel", scheme)
        pixels = images(*OTHER, batch=3)
        single = torch.cat([states(model, pixels[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(states(model, pixels), single, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViTModel", "SiglipVisionModel"])
@pytest.mark.parametrize("scheme", ALL)
def test_compiled_without_a_break(name: str, scheme: str) -> None:
    torch._dynamo.reset()  # code compiled for other models counts against a limit
    model = swapped(name, scheme)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in SIZES:
        with torch.no_grad():
            found = compiled(pixel_values=images(*size)).last_hidden_state
        torch.testing.assert_close(found, states(model, images(*size)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", ["rope_2d", "alibi_2d", "learned_2d"])
def test_images_of_many_patches(scheme: str) -> None:
    """From 512 tokens on a bias is made for a few queries at a time."""
    model, pixels = swapped("CLIPVisionModel", scheme), images(192, 200, batch=1)
    expected = states(model, pixels)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(states(model, pixels), expected, rtol=0, atol=2e-5)
