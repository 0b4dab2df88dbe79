"""Stock transformers refuses what only hf_posswap can run, on every road: each trick against stock code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posswap
from hf_posswap.errors import CheckpointError, UnsupportedSwapError
from hf_posswap.patching.record.record import native_config
from hf_posswap.patching.record.refusals import KEPT_DTYPE, REFUSED_ATTENTION, REFUSED_DTYPE, weight_to_mark
from tests.checkpoints import fresh
from tests.checkpoints.test_model_class import in_a_fresh_process
from tests.contract.pairs import Pair, supported_pairs, words
from tests.toys.registration import TOY_MODEL, TOY_SCHEME

CHILD = Path(__file__).with_name("roads_child.py")
NAMED = "pip install hf-posswap"
A_FEW = (
    Pair("llama", "alibi"),  # no weight of its own gives it away
    Pair("gpt2", "kerple"),
    Pair("bert", "rope"),
    Pair("bloom", "rope"),  # nor any value of its config
    Pair("gptj", "alibi"),
    Pair("xglm", "rope"),
    Pair("bart", "alibi"),
)


def store(pairs: list[Pair], root: Path) -> None:
    for number, pair in enumerate(pairs):
        model, folder = pair.swapped(), root / f"{number:03d} {pair}"
        model.save_pretrained(folder)
        native_config(model.config).save_pretrained(folder / "native")


def check_roads(root: Path) -> int:
    found = fresh.load_all(root, "plain", timeout=3000, child=CHILD)
    unswapped = {(name, road) for name, roads in found.items() for road, said in roads.items() if said == 0}
    assert unswapped == set()
    for roads in found.values():
        for road in ("the stock class", "the stock class, mismatches ignored", "the stock config class"):
            assert NAMED in str(roads[road]), roads[road]
    return len(found)


@pytest.mark.slow
def test_no_road_of_stock_classes_leads_to_an_unswapped_model(tmp_path: Path) -> None:
    store(list(A_FEW), tmp_path / "saved")
    assert check_roads(tmp_path / "saved") == len(A_FEW)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_road_of_stock_classes_leads_to_an_unswapped_model_for_any_pair(tmp_path: Path) -> None:
    own = [pair for pair in supported_pairs() if pair.first and not {TOY_MODEL, TOY_SCHEME} & {pair.model, pair.scheme}]
    pairs = [pair for pair in own if pair.plan.route == "plugin"]
    store(pairs, tmp_path / "saved")
    assert check_roads(tmp_path / "saved") == len(pairs) > 200


@pytest.mark.parametrize("pair", A_FEW, ids=str)
def test_the_stock_class_names_the_way_out_where_hf_posswap_is_imported(pair: Pair, tmp_path: Path) -> None:
    pair.swapped().save_pretrained(tmp_path)
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=r"pip install hf-posswap, then hf_posswap\.load"):
            pair.tiny.stock.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("pair", A_FEW, ids=str)
def test_weights_in_memory_are_refused_by_the_stock_class_strictly_or_not(pair: Pair) -> None:
    model, stock = pair.swapped(), pair.native()
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"that hf_posswap swapped.*as dict\(state_dict\)"):
            stock.load_state_dict(model.state_dict(), strict=strict)
    with pytest.raises(CheckpointError, match="that hf_posswap swapped"):
        stock.base_model.load_state_dict(model.base_model.state_dict(), strict=False)


def test_weights_in_memory_have_the_shapes_of_the_stock_class_and_go_where_they_are_sent() -> None:
    model, stock = Pair("llama", "alibi").swapped(), Pair("llama", "alibi").native()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in stock.state_dict().items()}
    stock.load_state_dict(dict(model.state_dict()))


def test_torch_saves_and_loads_weights_of_a_swapped_model(tmp_path: Path) -> None:
    model = Pair("gpt2", "kerple").swapped()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again = type(model)(model.config)
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), model.parameters(), strict=True))


LOADS = """
import torch, {first}
try:
    state = torch.load({path!r}, weights_only=True)
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=8, vocab_size=11)
    LlamaForCausalLM(config).load_state_dict(state)
except Exception as error:
    print(type(error).__name__, " ".join(str(error).split()))
else:
    print("loaded without a word")
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["sys", "hf_posswap"])
def test_a_stock_model_takes_no_weights_that_torch_saved(tmp_path: Path, first: str) -> None:
    """They were taken without a word: the shapes are those of the stock class."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=8, vocab_size=11)
    model = hf_posswap.patch_model(LlamaForCausalLM(config), "alibi")
    path = tmp_path / "weights.pt"
    torch.save(model.state_dict(), path)
    for weights_only in (True, False):
        with pytest.raises(CheckpointError, match="that hf_posswap swapped"):
            LlamaForCausalLM(config).load_state_dict(torch.load(path, weights_only=weights_only))
        model.load_state_dict(torch.load(path, weights_only=weights_only))
    said = in_a_fresh_process(LOADS.format(first=first, path=str(path)))
    assert said.startswith("UnpicklingError" if first == "sys" else "CheckpointError")
    assert "hf_posswap" in said


def marked(folder: Path) -> dict[str, list[int]]:
    held: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        held |= load_file(file)
    return {name: list(tensor.shape) for name, tensor in held.items() if tensor.dim() == 2 and "norm" in name}


def test_one_weight_is_marked_however_a_model_is_saved(tmp_path: Path) -> None:
    model = Pair("llama", "alibi").swapped()
    expected = {"model.layers.0.input_layernorm.weight": [1, 64]}
    ways: dict[str, dict[str, Any]] = {
        "as it is": {},
        "in shards": {"max_shard_size": "60KB"},
        "gathered": {"state_dict": model.state_dict()},
        "parameters": {"state_dict": dict(model.named_parameters())},
        "as in memory": {"save_original_format": False},
    }
    for name, options in ways.items():
        model.save_pretrained(tmp_path / name, **options)
        assert marked(tmp_path / name) == expected, name
        assert type(hf_posswap.load(tmp_path / name)) is type(model)
    again = hf_posswap.load(tmp_path / "as it is")
    again.save_pretrained(tmp_path / "again")
    assert marked(tmp_path / "again") == expected


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_the_marked_weight_is_marked_also_where_it_was_offloaded(offload: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Pair("llama", "alibi").swapped()
    expected = Pair("llama", "alibi").logits(model, torch.ones(1, 8, dtype=torch.long))
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}  # older releases ask for two places
    given = {} if offload == "cpu_offload" else {"offload_dir": tmp_path / "offload"}
    getattr(accelerate, offload)(model, execution_device=torch.device("cpu"), **given)
    with pytest.warns(UserWarning, match="offloaded"):
        model.save_pretrained(tmp_path / "saved")
    assert marked(tmp_path / "saved") == {"model.layers.0.input_layernorm.weight": [1, 64]}
    loaded = hf_posswap.load(tmp_path / "saved")
    assert torch.equal(Pair("llama", "alibi").logits(loaded, torch.ones(1, 8, dtype=torch.long)), expected)


def test_a_checkpoint_loads_with_its_marked_weight_on_the_disk(tmp_path: Path) -> None:
    pair, ids = Pair("llama", "alibi"), torch.ones(1, 8, dtype=torch.long)
    model = pair.swapped()
    model.save_pretrained(tmp_path / "saved")
    where = {"model": "disk", "lm_head": "cpu"}
    loaded = hf_posswap.load(tmp_path / "saved", device_map=where, offload_folder=str(tmp_path / "offload"))
    assert torch.equal(pair.logits(loaded, ids), pair.logits(model, ids))


def test_the_marked_weight_is_the_same_for_every_head_and_in_the_base_model() -> None:
    found = set()
    for name in ("BertForMaskedLM", "BertForSequenceClassification", "BertModel"):
        model = getattr(transformers, name)(Pair("bert", "rope").tiny.config())
        hf_posswap.patch_model(model, "rope")
        found |= set(vars(model.base_model)["_posswap_marked"])
    assert found == {"encoder.layer.0.attention.output.LayerNorm.weight"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
def test_the_marked_weight_is_that_of_the_model_without_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pair = Pair("llama", "alibi")
    owner = peft.get_peft_model(
        pair.native(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm"])
    )
    pair.patch(owner)
    owner.merge_and_unload().save_pretrained(tmp_path)
    assert marked(tmp_path) == {"model.layers.0.input_layernorm.weight": [1, 64]}


def test_each_swapped_stack_has_a_marked_weight() -> None:
    both, one = Pair("bart", "alibi").swapped(), Pair("bart", "alibi").native()
    hf_posswap.patch_model(one, {"decoder": "alibi"})
    names = [f"{stack}.layers.0.final_layer_norm.weight" for stack in ("decoder", "encoder")]
    assert sorted(vars(both.base_model)["_posswap_marked"]) == names
    assert list(vars(one.base_model)["_posswap_marked"]) == names[:1]


def test_a_model_without_norms_has_its_smallest_weight_marked_and_one_without_weights_is_refused() -> None:
    attention = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(1, 1), "attention": attention})
    assert weight_to_mark(model, "attention.0") == "attention.0.bias"
    with pytest.raises(UnsupportedSwapError, match="has no weight that could be marked as swapped"):
        weight_to_mark(torch.nn.ModuleDict({"attention": torch.nn.Identity()}), "attention")


@pytest.mark.parametrize("pair", [*A_FEW, Pair("gpt2", "rope")], ids=str)
def test_checkpoints_of_before_the_mark_load_with_equal_logits_and_are_marked_when_saved(
    pair: Pair, tmp_path: Path
) -> None:
    model, ids = pair.swapped(), torch.full((1, 8), 7)
    model.save_pretrained(tmp_path)
    as_it_was(tmp_path)
    for loaded in (hf_posswap.load(tmp_path), type(model).from_pretrained(tmp_path)):
        assert type(loaded) is type(model)
        assert torch.equal(pair.logits(loaded, ids), pair.logits(model, ids))
        loaded.save_pretrained(tmp_path / "again")
        values = json.loads((tmp_path / "again" / "config.json").read_text())
        assert (values["attn_implementation"], values["dtype"]) == (REFUSED_ATTENTION, "float32")
        assert KEPT_DTYPE not in values
        weights = load_file(tmp_path / "again" / "model.safetensors")
        stock = dict(pair.native().state_dict())
        assert [name for name in stock if name in weights and weights[name].shape[1:] == stock[name].shape]


def as_it_was(folder: Path) -> None:
    """Write a checkpoint of today as the package wrote it when the dtype was the last refusal."""
    values = json.loads((folder / "config.json").read_text())
    del values["attn_implementation"]
    values |= {"architectures": [name.removeprefix("Posswap") for name in values["architectures"]]}
    values |= {KEPT_DTYPE: values["dtype"], "dtype": REFUSED_DTYPE}
    (folder / "config.json").write_text(json.dumps(values))
    weights = load_file(folder / "model.safetensors")
    plain = {
        name: tensor.squeeze(0) if "norm" in name.lower() or "ln_" in name else tensor
        for name, tensor in weights.items()
    }
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})


def test_stock_models_are_not_marked(tmp_path: Path) -> None:
    for pair in (Pair("gpt2", "nope"), Pair("llama", "yarn")):
        model = pair.swapped()
        assert type(model) in (GPT2LMHeadModel, LlamaForCausalLM)
        model.save_pretrained(tmp_path / pair.scheme)
        assert "attn_implementation" not in json.loads((tmp_path / pair.scheme / "config.json").read_text())
        stock = {name: tensor.shape for name, tensor in pair.tiny.stock(model.config).state_dict().items()}
        held = load_file(tmp_path / pair.scheme / "model.safetensors")
        assert all(tensor.shape == stock[name] for name, tensor in held.items())


def test_a_file_of_bare_tensors_is_loaded_into_the_swapped_class(tmp_path: Path) -> None:
    """The limit: such a file has no place for a mark. What says how to load it is in the pages."""
    pair = Pair("llama", "alibi")
    model = pair.swapped()
    save_model(model, str(tmp_path / "bare.safetensors"))
    assert load_model(pair.native(), tmp_path / "bare.safetensors") == (set(), []), "documented in troubleshooting.md"
    clone = type(model)(model.config).eval()
    load_model(clone, tmp_path / "bare.safetensors")
    assert torch.equal(pair.logits(clone, words(1, 12)), pair.logits(model, words(1, 12)))
    page = (Path(__file__).resolve().parents[2] / ".docs/pages/troubleshooting.md").read_text("utf-8")
    assert "safetensors.torch.save_model" in page
