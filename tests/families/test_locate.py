"""Where the families say that positions live, held against the models themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import SpeechEncoderDecoderConfig, VisionEncoderDecoderConfig, VisionTextDualEncoderConfig

from hf_posswap import patch_model, unpatch_model
from hf_posswap.errors import DuplicateNameError, UnsupportedModelError
from hf_posswap.families import FAMILIES, Family, TableSpec, locate, register
from hf_posswap.families.locating import family_of, rotary_layout
from tests.contract.models import LENGTH, TINY, build
from tests.docs.pages import text_of
from tests.toys.registration import TOY_MODEL, registered

TABLES = {
    "gpt2": ("transformer.wpe", 0, 0),
    "opt": ("model.decoder.embed_positions", 2, 0),
    "bert": ("bert.embeddings.position_embeddings", 0, 0),
    "roberta": ("roberta.embeddings.position_embeddings", 2, 2),
}
ROTARY = [name for name in TINY if name not in TABLES and name not in ("bert (is_decoder)", TOY_MODEL)]


def calls_of(module: nn.Module, run: Any) -> int:
    """Return how often `module` is called in `run()`."""
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    run()
    handle.remove()
    return len(calls)


@pytest.mark.parametrize("name", [name for name in TINY if name != TOY_MODEL])
def test_every_path_leads_to_a_module_that_a_forward_calls_once(name: str) -> None:
    model = build(name)
    sites = locate(model)
    ids = torch.randint(5, 90, (1, 6))
    paths = [*sites.attention, *sites.rotary, *([sites.table_path] if sites.table_path else []), sites.entry]
    assert len(sites.attention) == 2
    for path in paths:
        assert calls_of(model.get_submodule(path), lambda: model(input_ids=ids)) == 1, path


@pytest.mark.parametrize("name", list(TABLES))
def test_the_first_token_reads_the_row_that_the_offset_says(name: str) -> None:
    model = build(name)
    sites = locate(model)
    path, offset, first = TABLES[name]
    assert (sites.table_path, sites.table_offset, sites.first_position) == (path, offset, first)
    ids = torch.randint(5, 90, (1, 1))
    model(input_ids=ids).logits.sum().backward()
    used = model.get_submodule(path).weight.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert used == [offset]


@pytest.mark.parametrize("name", [name for name in TINY if name != TOY_MODEL])
def test_the_geometry_is_that_of_the_model(name: str) -> None:
    model = build(name)
    geometry = locate(model).geometry
    assert (geometry.hidden_size, geometry.num_heads, geometry.head_dim) == (64, 4, 16)
    assert (geometry.num_layers, geometry.original_length) == (2, LENGTH)
    ids = torch.randint(5, 90, (1, 8))
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 90 + 5
    with torch.no_grad():
        change = (model(input_ids=ids).logits - model(input_ids=other).logits)[:, :-1].abs().max()
    assert geometry.causal == bool(change == 0)


@pytest.mark.parametrize("name", ROTARY)
def test_the_rotary_width_and_layout_are_what_the_model_does(name: str) -> None:
    """Rotating a lone 1 shows the dimension that it is paired with."""
    model = build(name)
    sites = locate(model)
    geometry = sites.geometry
    attention = model.get_submodule(sites.attention[0])
    code = __import__(type(attention).__module__, fromlist=["apply_rotary_pos_emb"])
    one = torch.zeros(1, 1, 1, geometry.head_dim)
    one[..., 0] = 1.0
    cos, sin = model.get_submodule(sites.rotary[0])(one, torch.tensor([[1]]))
    turned, _ = code.apply_rotary_pos_emb(one, one, cos, sin)
    partner = [i for i in turned.flatten().nonzero().flatten().tolist() if i != 0]
    width = {"gpt_neox": 8, "glm": 8}.get(name, 16)
    assert geometry.rotary_dim == width
    assert partner == [width // 2 if geometry.layout == "half" else 1]
    assert rotary_layout(attention) == geometry.layout
    assert geometry.base == model.config.rope_parameters["rope_theta"]


def test_meta_models_are_located_alike() -> None:
    for name in ("gpt2", "roberta", "llama"):
        real = build(name)
        with torch.device("meta"):
            meta = type(real)(real.config)
        assert locate(meta) == locate(real)


def test_a_bare_base_model_is_located_without_a_prefix() -> None:
    sites = locate(build("gpt2").transformer)
    assert (sites.base, sites.entry, sites.table_path) == ("", "", "wpe")


def test_a_path_that_is_not_there_is_an_error_that_names_it() -> None:
    attention = "encoder.layer.*.attention.self"
    with registered():
        wrong = Family("wrong", "a path too many", "layers.*.nothing", model_types=(TOY_MODEL,))
        FAMILIES.remove(TOY_MODEL)
        register(wrong)
        try:
            with pytest.raises(UnsupportedModelError, match="no self-attention modules at 'layers.\\*.nothing'"):
                locate(build(TOY_MODEL))
            FAMILIES.remove("wrong")
            register(Family("wrong", "no table there", attention, (TOY_MODEL,), table=TableSpec("wpe")))
            with pytest.raises(UnsupportedModelError, match="expects a table at 'wpe', none there"):
                locate(build(TOY_MODEL))
            FAMILIES.remove("wrong")
            register(Family("wrong", "table left out", attention, (TOY_MODEL,)))
            with pytest.raises(
                UnsupportedModelError, match="'bert.embeddings.position_embeddings'.*does not mention it"
            ):
                locate(build(TOY_MODEL))
        finally:
            FAMILIES.remove("wrong")


def test_a_rotary_module_that_learns_its_angles_is_refused() -> None:
    """As MistralLarge4's, which learns a factor for each frequency."""
    model = build("llama")
    rotary = model.model.rotary_emb
    rotary.alpha = nn.Parameter(torch.zeros_like(rotary.inv_freq))
    with pytest.raises(UnsupportedModelError, match=r"weights change the angles .*\(model\.rotary_emb\.alpha\)"):
        patch_model(model, "yarn", factor=2.0)
    assert rotary.alpha is model.model.rotary_emb.alpha


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(DuplicateNameError, match="family 'gpt2' is already registered"):
        register(Family("gpt2", "another", "h.*.attn"))


def test_a_named_model_type_goes_before_a_rule() -> None:
    assert family_of(TINY["gpt_neox"].config()).name == "gpt_neox"
    assert family_of(TINY["llama"].config()).name == "rotary"


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (VisionEncoderDecoderConfig, r"model\.encoder and model\.decoder"),
        (SpeechEncoderDecoderConfig, r"model\.encoder and model\.decoder"),
        (VisionTextDualEncoderConfig, r"model\.vision_model and model\.text_model"),
    ],
)
def test_a_container_of_two_models_names_its_parts(config: Any, parts: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"two models of your choice: swap those, {parts}"):
        family_of(config.__new__(config))


@pytest.mark.parametrize(
    ("model_type", "near"),
    [
        ("gpt2-next", "'gpt2'"),
        ("roberta2", "'roberta'"),
        ("lama", "names: 'llama', "),
        ("mistal", "names: 'mistral', "),
        (TOY_MODEL, None),
        (None, None),
    ],
)
def test_an_unknown_model_type_is_answered_in_three_lines(model_type: str | None, near: str | None) -> None:
    config: Any = TINY["bert"].config()
    config.__dict__["model_type"] = model_type
    with pytest.raises(UnsupportedModelError, match=f"^no family describes model type '{model_type}'") as caught:
        family_of(config)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) < 180
    assert "no rope parameters" in lines[0]
    assert (lines[1].startswith("Near names: ") and near in lines[1]) if near else lines[1].startswith("`posswap")
    assert f"`posswap families` lists all {len(list(FAMILIES))}." in lines[1]
    assert "page Extending, 'How to add a family'" in lines[2]
    assert "## How to add a family" in text_of(".docs/pages/extending.md")


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal"])
@pytest.mark.parametrize("name", [*TABLES, "bert (is_decoder)"])
def test_a_swapped_model_says_where_its_positions_lived(name: str, scheme: str) -> None:
    model = build(name)
    before = locate(model)
    patch_model(model, scheme)
    assert locate(model) == before
    unpatch_model(model)
    assert locate(model) == before


@pytest.mark.parametrize("name", ["gpt2", "roberta"])
def test_a_part_of_a_swapped_model_refers_to_the_whole(name: str) -> None:
    model = build(name)
    patch_model(model, "rope")
    with pytest.raises(UnsupportedModelError, match="was removed by a swap of the model that contains this one. "):
        locate(model.base_model)
