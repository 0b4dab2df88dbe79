"""Models that see images: what is found in them, swapped, refused, and taken back; against transformers' own code."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_posswap
from hf_posswap.errors import PositionRangeError, SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.families.sites import PatchTable
from hf_posswap.patching.inspect.census import census, image_classes
from hf_posswap.schemes import SCHEMES, Blend, NoPE, schemes_for
from tests.families.vision_models import (
    CLASSES,
    DINO,
    FIRST,
    PATCH,
    SIZE,
    SQUARE,
    TOLD,
    WHOLE,
    build,
    config_of,
    images,
    prefix_of,
    states,
    tower_of,
)

ALL = list(schemes_for("images"))
NATIVE = {"learned_2d", "sinusoidal_2d", "nope"}
OTHER = (24, 40)
"""Another size than the models were made for: 3 x 5 patches."""


def table_of(model: Any) -> nn.Parameter:
    """Return the parameter that holds the table."""
    embeddings = tower_of(model).embeddings
    if hasattr(embeddings, "position_embeddings"):
        return embeddings.position_embeddings
    return embeddings.position_embedding.weight


@pytest.mark.parametrize("name", CLASSES)
def test_locate_finds_table_grid_and_attention(name: str) -> None:
    model = build(name)
    sites = locate(model)
    geometry, table = sites.geometry, sites.main.table
    assert isinstance(table, PatchTable)
    assert model.get_parameter(table.path) is table_of(model)
    assert (geometry.grid(), geometry.prefix_tokens, geometry.causal) == ((4, 4), prefix_of(name), False)
    assert geometry.original_length == 16 + prefix_of(name) == states(model, images()).shape[1]
    assert [path.split(".")[-2] for path in sites.attention] == ["0", "1"]
    report = str(hf_posswap.describe_positions(model))
    assert f"learned table, 4 x 4 patches of 8 x 8 pixels after {prefix_of(name)} other tokens" in report


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("scheme", ALL)
def test_every_class_takes_every_scheme_and_gives_it_back(name: str, scheme: str) -> None:
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    order, config = [key for key, _ in model.named_parameters()], model.config.to_dict()
    native = states(model, images())
    plan = hf_posswap.swap_plan(hf_posswap.patch_model(model, scheme))
    assert plan.route == ("native" if scheme in NATIVE else "plugin")
    assert list(model.state_dict()) == list(before)
    hf_posswap.verify_swap(model)
    hf_posswap.unpatch_model(model)
    assert [key for key, _ in model.named_parameters()] == order
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    assert not any("interpolate_pos_encoding" in vars(part) for part in model.modules())
    assert torch.equal(states(model, images()), native)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("size", [(SIZE, SIZE), (48, 48), OTHER])
def test_a_kept_table_does_as_transformers_own_interpolation(name: str, size: tuple[int, int]) -> None:
    model, pixels = build(name), images(*size)
    expected = states(model, pixels, interpolate_pos_encoding=True)
    hf_posswap.patch_model(model, "learned_2d")
    assert torch.equal(states(model, pixels), expected)
    assert torch.equal(states(model, pixels, interpolate_pos_encoding=True), expected)


@pytest.mark.parametrize("name", FIRST)
def test_a_resized_table_is_transformers_own_interpolation(name: str) -> None:
    model, pixels = build(name), images(48, 48)
    expected = states(model, pixels, interpolate_pos_encoding=True)
    hf_posswap.patch_model(model, "learned_2d", image_size=48)
    assert torch.equal(states(model, pixels), expected)
    assert model.config.image_size == 48
    assert table_of(model).numel() == (36 + prefix_of(name)) * 32
    hf_posswap.verify_swap(model)
    before = build(name)
    hf_posswap.unpatch_model(model)
    assert torch.equal(states(model, images()), states(before, images()))
    assert {key: value.shape for key, value in model.named_buffers()} == {
        key: value.shape for key, value in before.named_buffers()
    }
    assert {k: v for k, v in vars(tower_of(model).embeddings).items() if isinstance(v, int | tuple)} == {
        k: v for k, v in vars(tower_of(before).embeddings).items() if isinstance(v, int | tuple)
    }


def by_hand(rows: int, columns: int, prefix: int, base: float = 100.0) -> Any:
    """Return an attention function that turns q and k of patches by complex numbers, then attends as sdpa does."""

    def turn(x: Tensor) -> Tensor:
        quarter = x.shape[-1] // 4
        theta = base ** (-torch.arange(quarter) / quarter)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = torch.cat((row.reshape(-1, 1) * theta, column.reshape(-1, 1) * theta), dim=-1)  # [R C, D/2]
        patches = x[:, :, prefix:]
        numbers = torch.complex(*patches.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((x[:, :, :prefix], torch.cat((numbers.real, numbers.imag), dim=-1)), dim=2)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, turn(query), turn(key), value, mask, **kwargs)

    return attend


def penalised(rows: int, columns: int, prefix: int) -> Any:
    """Return an attention function that adds the penalty on distance to the scores, written out."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        spots = [(r, c) for r in range(rows) for c in range(columns)]
        distance = torch.tensor([[math.dist(a, b) for b in spots] for a in spots])
        heads = query.shape[1]
        slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
        scores[:, :, prefix:, prefix:] -= slopes[:, None, None] * distance
        return (scores.softmax(dim=-1) @ value).transpose(1, 2), None

    return attend


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("size", [(SIZE, SIZE), OTHER])
@pytest.mark.parametrize(("scheme", "made"), [("rope_2d", by_hand), ("alibi_2d", penalised)])
def test_inside_attention_it_is_what_its_formula_says(name: str, size: tuple[int, int], scheme: str, made: Any) -> None:
    """A native model without rows for patches, whose attention function is written out here, gives the same."""
    model, twin, prefix = build(name), build(name), prefix_of(name)
    hf_posswap.patch_model(model, scheme)
    with torch.no_grad():
        table_of(twin).flatten(0, -2)[prefix:] = 0
    AttentionInterface.register("written_out", made(size[0] // PATCH, size[1] // PATCH, prefix))
    twin.set_attn_implementation("written_out")
    expected = states(twin, images(*size), interpolate_pos_encoding=True)
    torch.testing.assert_close(states(model, images(*size)), expected, rtol=0, atol=2e-5)
    assert (states(build(name), images(*size), interpolate_pos_encoding=True) - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("size", [(SIZE, SIZE), OTHER])
def test_sines_and_no_positions_at_any_size(name: str, size: tuple[int, int]) -> None:
    """A native model whose table was filled by hand for that size gives the same."""
    rows, columns = size[0] // PATCH, size[1] // PATCH
    for scheme in ("sinusoidal_2d", "nope"):
        model, twin, prefix = build(name), build(name), prefix_of(name)
        hf_posswap.patch_model(model, scheme, **({"scale": 0.5} if scheme == "sinusoidal_2d" else {}))
        patches = torch.zeros(rows * columns, 32)
        if scheme == "sinusoidal_2d":
            omega = 10000.0 ** (-torch.arange(8) / 8)
            for at in range(rows * columns):
                angles = [(at % columns) * omega, (at // columns) * omega]
                patches[at] = 0.5 * torch.cat([wave(a) for a in angles for wave in (torch.sin, torch.cos)])
        kept = table_of(twin).detach().flatten(0, -2)[:prefix]
        full = torch.cat((kept, patches))[None]
        tower_of(twin).embeddings.interpolate_pos_encoding = lambda *_, rows=full: rows
        expected = states(twin, images(*size), interpolate_pos_encoding=True)
        torch.testing.assert_close(states(model, images(*size)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in WHOLE])
@pytest.mark.parametrize("scheme", ALL)
def test_whole_models_run_at_other_sizes(name: str, scheme: str) -> None:
    model = build(name)
    hf_posswap.patch_model(model, scheme)
    size = (48, 48) if name in SQUARE else OTHER
    with torch.no_grad():
        out = model(pixel_values=images(*size))
    first = next(value for value in out.values() if isinstance(value, Tensor))
    assert torch.isfinite(first).all()


def test_image_sizes_that_do_not_fit() -> None:
    model = build("ViTModel")
    hf_posswap.patch_model(model, "rope_2d")
    for size in ((36, 32), (32, 44)):
        with pytest.raises(
            PositionRangeError, match=f"ViTModel was given images of {size[0]} x {size[1]} pixels, which"
        ):
            states(model, images(*size))
    with pytest.raises(PositionRangeError, match="not a whole number of patches of 8 x 8: resize or pad"):
        states(model, images(4, 32))
    masked = build("ViTForMaskedImageModeling")
    hf_posswap.patch_model(masked, "rope_2d")
    with pytest.raises(PositionRangeError, match="images of 2 x 8 patches, and its head needs as many rows as columns"):
        masked(images(16, 64))


@pytest.mark.parametrize("name", ["SiglipVisionModel", "ViTModel"])
@pytest.mark.parametrize("scheme", ALL)
def test_images_of_the_models_own_size_may_leave_a_rest(name: str, scheme: str) -> None:
    model = build(name, image_size=35)
    native = states(model, images(35, 35))
    hf_posswap.patch_model(model, scheme)
    assert states(model, images(35, 35)).shape == native.shape
    hf_posswap.verify_swap(model)


def test_a_model_made_for_images_that_are_not_square() -> None:
    for scheme in ALL:
        model = build("ViTModel", image_size=(24, 40))
        native = states(model, images(*OTHER))
        hf_posswap.patch_model(model, scheme)
        assert torch.equal(states(model, images(*OTHER)), native) == (scheme == "learned_2d")
        hf_posswap.verify_swap(model)
        assert states(model, images(40, 24)).shape == native.shape
    model = build("ViTModel")
    hf_posswap.patch_model(model, "learned_2d", image_size=OTHER)
    assert model.config.image_size == [24, 40]
    stock = type(model)(model.config)
    stock.load_state_dict(model.state_dict())
    assert torch.equal(states(stock.eval(), images(*OTHER)), states(model, images(*OTHER)))


@pytest.mark.parametrize("scheme", [name for name in schemes_for("text") if name not in schemes_for("images")])
def test_schemes_for_text_are_refused(scheme: str) -> None:
    options = SCHEMES.get(scheme).stand_ins(locate(build("ViTModel")).geometry)
    with pytest.raises(UnsupportedSwapError) as caught:
        hf_posswap.plan_swap(build("ViTModel"), scheme, **options)
    assert str(caught.value) == (
        f"{scheme} is for a model that reads text, and ViTModel sees images. What works: {', '.join(ALL)}."
    )


@pytest.mark.parametrize("scheme", [name for name in schemes_for("images") if name not in schemes_for("text")])
def test_schemes_for_images_are_refused_where_text_is_read(scheme: str) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    inner = SCHEMES.get(scheme)()
    inside = [NoPE().per_layer({0: inner}), Blend(new=inner, weight=0.5)] if inner.acts_inside else []
    for one in (scheme, inner, *inside):
        with pytest.raises(UnsupportedSwapError) as caught:
            hf_posswap.patch_model(model, one)
        assert f"{scheme} is for a model that sees images, and GPT2LMHeadModel reads text. What works:" in str(
            caught.value
        )


def test_other_refusals_say_what_works() -> None:
    clip, vit = build("CLIPVisionModel"), build("ViTModel")
    with pytest.raises(
        UnsupportedSwapError, match=r"24 x 40 cannot be expressed in the config of CLIPVisionModel, which"
    ):
        hf_posswap.plan_swap(clip, "learned_2d", image_size=OTHER)
    with pytest.raises(
        SchemeError, match="36 x 36 pixels is not a whole number of patches of 8 x 8; the nearest .* 32 x 32"
    ):
        hf_posswap.plan_swap(vit, "sinusoidal_2d", image_size=36)
    with pytest.raises(
        SchemeError, match="its length follows from their size, 17 tokens here, got max_length=64. Leave"
    ):
        hf_posswap.plan_swap(vit, "rope_2d", max_length=64)
    with pytest.raises(SchemeError, match="37 tokens here, got max_length=17. Leave it out, or give image_size"):
        hf_posswap.plan_swap(vit, "learned_2d", max_length=17, image_size=48)
    with pytest.raises(UnsupportedSwapError, match="nope with logit_scale follows the length of a text, and ViTModel"):
        hf_posswap.plan_swap(vit, "nope", logit_scale=0.1)
    for scheme in NATIVE:
        with pytest.raises(
            UnsupportedSwapError,
            match=f"{scheme} does not act inside attention, but site='attention' was requested",
        ):
            hf_posswap.plan_swap(vit, scheme, site="attention")
    assert torch.equal(states(vit, images()), states(build("ViTModel"), images()))


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize(
    ("where", "planted"),
    [
        ("embeddings.pos_embed_2", nn.Parameter(torch.zeros(1, 17, 32))),
        ("encoder_position_embedding", nn.Embedding(17, 32)),
        ("relative_position_bias_table", nn.Parameter(torch.zeros(49, 2))),
    ],
)
def test_planted_extras_are_refused_by_name(name: str, where: str, planted: Any) -> None:
    model = build(name)
    tower, (owner, _, leaf) = tower_of(model), where.rpartition(".")
    setattr(tower.get_submodule(owner), leaf, planted)
    with pytest.raises(UnsupportedModelError, match=rf"{where}.* looks like a part of the position mechanism"):
        hf_posswap.plan_swap(model, "rope_2d")


def test_a_table_that_does_not_fit_the_images_is_refused() -> None:
    model = build("ViTModel")
    model.config.image_size = 48
    with pytest.raises(UnsupportedModelError, match="has 17 rows where images of 48 pixels give 6 x 6 patches after 1"):
        locate(model)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("scheme", ALL)
def test_of_two_towers_the_one_that_reads_is_left_alone(name: str, scheme: str) -> None:
    model, ids = build(name), torch.tensor([[3, 4, 5, 2]])
    given = {"input_ids": ids, "pixel_values": images()}
    with torch.no_grad():
        before = model(**given)
        plan = hf_posswap.swap_plan(hf_posswap.patch_model(model, scheme))
        after = model(**given)
        model(input_ids=ids, pixel_values=images(*OTHER))
    assert f"{name} reads text too: text_model keeps its positions." in str(plan)
    assert all(edit.path.startswith(("vision_model", "config", "image_size")) for edit in plan.edits)
    assert torch.equal(after.text_embeds, before.text_embeds)
    assert torch.equal(after.image_embeds, before.image_embeds) == (scheme == "learned_2d")


def test_what_is_told_from_the_config_alone() -> None:
    for name in CLASSES:
        config = config_of(name)
        config.architectures = [name]
        found = hf_posswap.explain(config)
        assert found.report.model == name
        assert found.schemes == {one: "native" if one in NATIVE else "plugin" for one in ALL}
    config = config_of("ViTModel")
    assert "17 positions, runs beyond" in str(hf_posswap.explain(config, "rope_2d"))
    assert hf_posswap.explain(config, "learned_2d", image_size=64).plan.max_length == 65  # type: ignore[union-attr]
    assert "is for a model that reads text" in str(hf_posswap.explain(config, "alibi").refusal)
    assert hf_posswap.supports(config, "alibi_2d")
    assert not hf_posswap.supports(config, "alibi")


def test_a_deep_copy_is_swapped_by_itself() -> None:
    for scheme in ALL:
        model = build("CLIPVisionModel")
        hf_posswap.patch_model(model, scheme)
        expected = states(model, images(*OTHER))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(states(twin, images(*OTHER)), expected)
        hf_posswap.verify_swap(twin)
        hf_posswap.unpatch_model(twin)
        assert torch.equal(states(twin, images()), states(build("CLIPVisionModel"), images()))


def test_the_census_and_its_table_have_every_class_that_is_tested_here() -> None:
    from recipes.image_table import table

    dino = {*DINO, "Dinov2Backbone"}
    names = sorted({*CLASSES, *dino})
    inside = {name: "plugin" if TOLD or name not in dino else "no" for name in names}
    expected = {name: {one: "native" if one in NATIVE else inside[name] for one in ALL} for name in names}
    assert {entry.name: entry.routes for entry in census(image_classes())} == expected
    head, _, *rows = table().splitlines()
    assert head == "| classes | `alibi_2d` | `learned_2d` | `nope` | `rope_2d` | `sinusoidal_2d` |"
    alike = [[name for name in names if inside[name] == route] for route in ("plugin", "no")]
    expected = [(", ".join(f"`{name}`" for name in some), inside[some[0]]) for some in alike if some]
    assert sorted(rows) == sorted(
        f"| {shown} | {route} | native | native | {route} | native |" for shown, route in expected
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("name", ["ViTModel", "CLIPVisionModel"])
def test_tables_that_are_kept_elsewhere_are_refused(name: str) -> None:
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    wrapped = "embeddings" if name == "ViTModel" else "position_embedding"
    offloaded = accelerate.cpu_offload(build(name), execution_device="cpu")
    adapted = peft.get_peft_model(build(name), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[wrapped]))
    for scheme in ALL:
        with pytest.raises(
            UnsupportedSwapError, match="is offloaded by accelerate, and .* patch the model first, then"
        ):
            hf_posswap.patch_model(offloaded, scheme)
        with pytest.raises(UnsupportedSwapError, match="carries a PEFT adapter, and .* patch first, then add"):
            hf_posswap.patch_model(adapted, scheme)
    assert torch.equal(states(offloaded, images()), states(build(name), images()))
