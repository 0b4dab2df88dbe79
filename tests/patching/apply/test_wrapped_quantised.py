"""Quantised models: the swap is that of the dequantised model, and no quantised weight is touched.

torchao and bitsandbytes are no dependencies of the project; their tests run where they are installed.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import hf_posswap
from hf_posswap import patch_model, swap_plan, unpatch_model, verify_swap
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.errors import CheckpointError, UnsupportedSwapError
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.engine.checkpoints import base_identity
from hf_posswap.training.trainer_proof import base_digest
from tests.contract.models import build
from tests.contract.pairs import CHANGE, NOISE, gap, logits, words

IDS = words(2, 24)
WIDE = {"opt": {"ffn_dim": 128}, "llama": {"intermediate_size": 128}}
"""bitsandbytes wants widths that its blocks of 64 divide."""
SCHEMES = {"opt": ("rope", "alibi", "nope", "sinusoidal", "learned", "t5"), "llama": ("yarn", "alibi", "nope", "fire")}
CASES = [(name, scheme) for name, schemes in SCHEMES.items() for scheme in schemes]
ROUTES = {"yarn": "native", "nope": "native", "sinusoidal": "native", "learned": "native"}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def dynamic(model: Any, folder: Path) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def by_torchao(model: Any, folder: Path) -> Any:
    needs("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def _loaded(model: Any, folder: Path, config: Any) -> Any:
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu").eval()


def loaded_by_torchao(model: Any, folder: Path) -> Any:
    needs("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    return _loaded(model, folder, TorchAoConfig(Int8WeightOnlyConfig()))


def loaded_in_8_bits(model: Any, folder: Path) -> Any:
    needs("bitsandbytes")
    return _loaded(model, folder, BitsAndBytesConfig(load_in_8bit=True))


def loaded_in_4_bits(model: Any, folder: Path) -> Any:
    needs("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return _loaded(model, folder, config)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "quantize_dynamic": dynamic,
    "torchao": by_torchao,
    "torchao, loaded": loaded_by_torchao,
    "bitsandbytes, 8 bits": loaded_in_8_bits,
    "bitsandbytes, 4 bits": loaded_in_4_bits,
}
SAVED = ("torchao, loaded", "bitsandbytes, 8 bits", "bitsandbytes, 4 bits")
"""Ways of which a config tells transformers, which saves and loads such models; it refuses the others, natively too."""


def dequantised(name: str, model: Any) -> Any:
    """Return a plain model whose linear layers compute with the weights that those of `model` stand for."""
    plain = build(name, **WIDE[name])
    for path, layer in plain.named_modules():
        if isinstance(layer, nn.Linear):
            given = torch.eye(layer.in_features)
            with torch.no_grad():
                other = model.get_submodule(path)
                shift = other(torch.zeros(1, layer.in_features))
                layer.weight.copy_((other(given) - shift).T)
    return plain


def swap(model: Any, scheme: str) -> Any:
    torch.manual_seed(3)  # a scheme may begin with random numbers
    return swap_plan(patch_model(model, scheme, max_length=64, **({"init_std": 1.0} if scheme == "t5" else {})))


def held(model: Any) -> dict[str, tuple[int, int]]:
    """Return the identity and version of every tensor that linear layers hold."""
    layers = [(path, one) for path, one in model.named_modules() if "Linear" in type(one).__name__]
    return {f"{path}.{name}": (id(p), p._version) for path, one in layers for name, p in one.named_parameters()}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", list(SCHEMES))
def test_a_swap_of_a_quantised_model_is_that_of_the_dequantised_one(name: str, way: str, tmp_path: Path) -> None:
    model = WAYS[way](build(name, **WIDE[name]), tmp_path / "native")
    native, weights, plain = logits(model, IDS), held(model), dequantised(name, model)
    noise = gap(logits(plain, IDS), native)  # some ways quantise what comes in as well
    lost = gap(native, logits(build(name, **WIDE[name]), IDS))
    assert lost > NOISE, "nothing is quantised"
    assert noise < lost
    for scheme in SCHEMES[name]:
        reference = copy.deepcopy(plain)
        swap(reference, scheme)
        plan = swap(model, scheme)
        assert plan.route == ROUTES.get(scheme, "plugin"), scheme
        found = logits(model, IDS)
        assert gap(found, logits(reference, IDS)) < 4 * noise + NOISE, scheme
        assert gap(found, native) > CHANGE or scheme == "learned"
        verify_swap(model)
        assert held(model) == weights
        if way in SAVED:
            hf_posswap.save(model, tmp_path / scheme)
            assert gap(logits(hf_posswap.load(tmp_path / scheme, device_map="cpu"), IDS), found) == 0, scheme
        unpatch_model(model)
        assert gap(logits(model, IDS), native) == 0, scheme


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", ["quantize_dynamic", "torchao"])
@pytest.mark.parametrize(("name", "scheme"), [("opt", "alibi"), ("opt", "learned"), ("llama", "fire")])
def test_patched_then_quantised_is_quantised_then_patched(name: str, scheme: str, way: str, tmp_path: Path) -> None:
    first, last = build(name), WAYS[way](build(name), tmp_path)
    swap(first, scheme)
    first = WAYS[way](first, tmp_path)
    swap(last, scheme)
    assert gap(logits(first, IDS), logits(last, IDS)) == 0
    verify_swap(first)
    unpatch_model(first)
    unpatch_model(last)
    assert gap(logits(first, IDS), logits(last, IDS)) == 0


def test_what_a_scheme_learns_gets_gradients_over_quantised_weights(tmp_path: Path) -> None:
    model = loaded_in_8_bits(build("llama", **WIDE["llama"]), tmp_path)
    swap(model, "fire")
    model(input_ids=IDS, labels=IDS).loss.backward()
    learned = [p for name, p in model.named_parameters() if "posswap" in name]
    assert learned
    assert all(p.grad is not None and p.grad.any() for p in learned)


def test_a_quantised_table_is_not_written_but_taken_away() -> None:
    needs("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = build("opt")
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, path: path.endswith("embed_positions"))
    before = logits(model, IDS)
    with pytest.raises(UnsupportedSwapError, match=r"'model.decoder.embed_positions' is quantised .*then quantise"):
        swap(model, "sinusoidal")
    assert gap(logits(model, IDS), before) == 0
    swap(model, "alibi")
    verify_swap(model)
    plain = build("opt")
    swap(plain, "alibi")
    assert gap(logits(model, IDS), logits(plain, IDS)) < NOISE
    unpatch_model(model)
    assert gap(logits(model, IDS), before) == 0


def int8_by_hand(model: Any, folder: Path) -> Any:
    """Replace a weight as HQQ and quanto do, without a config that tells transformers."""
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.weight_int8 = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize("way", [by_torchao, int8_by_hand, dynamic])
def test_weights_that_no_load_would_take_are_refused_by_save(way: Callable[..., Any], tmp_path: Path) -> None:
    model = way(build("llama"), tmp_path)
    swap(model, "alibi")
    says = r"cannot hold \d+ quantized weights of .*, of class \w+: nothing would load them\. Save .*before it is quant"
    with pytest.raises(CheckpointError, match=says):
        hf_posswap.save(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", SAVED)
@pytest.mark.parametrize("scheme", ["yarn", "alibi"])
def test_a_checkpoint_that_is_quantised_is_swapped_and_saved(way: str, scheme: str, tmp_path: Path) -> None:
    WAYS[way](build("llama", **WIDE["llama"]), tmp_path / "native").save_pretrained(tmp_path / "quantised")
    model = hf_posswap.load(tmp_path / "quantised", device_map="cpu").eval()
    swap(model, scheme)
    verify_swap(model)
    expected = logits(model, IDS)
    hf_posswap.save(model, tmp_path / "swapped")
    assert gap(logits(model, IDS), expected) == 0
    again = hf_posswap.load(tmp_path / "swapped", device_map="cpu").eval()
    assert gap(logits(again, IDS), expected) == 0
    hf_posswap.save(again, tmp_path / "again")
    assert gap(logits(hf_posswap.load(tmp_path / "again", device_map="cpu"), IDS), expected) == 0


@pytest.mark.parametrize(("name", "scheme"), [("llama", "yarn"), ("opt", "rope")])
def test_layers_that_quantise_what_comes_in_verify(name: str, scheme: str) -> None:
    needs("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = build(name)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    swap(model, scheme)
    verify_swap(model)


def test_a_model_that_holds_tensors_with_a_history_verifies() -> None:
    model = build("llama")
    swap(model, "alibi")
    model.model.layers[0].kept = model.lm_head.weight.sum(0)  # as HQQ keeps the biases of its layers
    verify_swap(model)


@pytest.mark.parametrize("way", SAVED)
def test_digests_are_those_of_all_weights_and_leave_them_alone(way: str, tmp_path: Path) -> None:
    model, other = (WAYS[way](build("llama", seed, **WIDE["llama"]), tmp_path / str(seed)) for seed in (0, 1))
    expected = logits(model, IDS)  # a forward on a CPU may pack weights of 4 bits
    for digest in (fingerprint, base_identity, base_digest):
        before = digest(model)
        assert gap(logits(model, IDS), expected) == 0
        assert digest(model) == before != digest(other)


@pytest.mark.parametrize("scheme", ["alibi", "yarn"])
def test_a_quantised_model_is_measured(scheme: str, tmp_path: Path) -> None:
    model = loaded_by_torchao(build("llama", vocab_size=257, **WIDE["llama"]), tmp_path)
    how: dict[str, Any] = {"lengths": [16], "metrics": "ppl_prefix", "text": ["some words " * 20] * 5}
    found = hf_posswap.evaluate(model, scheme, tokenizer=byte_tokenizer(), **how).results
    assert len(found["models"]) == 2


def test_rows_of_quantised_weights_are_not_moved(tmp_path: Path) -> None:
    model = loaded_by_torchao(build("opt", **WIDE["opt"]), tmp_path / "opt")
    swap(model, "rope")
    with pytest.raises(
        UnsupportedSwapError, match="OPTForCausalLM is quantized, .* convert the swapped model before it"
    ):
        hf_posswap.to_native(model)
    loaded_by_torchao(build("llama", **WIDE["llama"]), tmp_path / "llama").save_pretrained(tmp_path / "quantised")
    with pytest.raises(UnsupportedSwapError, match="LlamaForCausalLM is quantized, .*before it was quantized; --dtype"):
        hf_posswap.export(tmp_path / "quantised", "llamacpp", tmp_path / "model.gguf")


@pytest.mark.parametrize("way", SAVED)
@pytest.mark.parametrize("first", [verify_swap, base_digest])
def test_a_model_that_has_not_run_yet_is_left_as_it_is(first: Callable[[Any], Any], way: str, tmp_path: Path) -> None:
    models = [WAYS[way](build("llama", **WIDE["llama"]), tmp_path / name) for name in ("one", "other")]
    for model in models:
        swap(model, "alibi")
    first(models[0])
    assert gap(logits(models[0], IDS), logits(models[1], IDS)) == 0
    first(models[0])
    hf_posswap.save(models[0], tmp_path / "saved")
    loaded = hf_posswap.load(tmp_path / "saved", device_map="cpu")
    assert gap(logits(loaded, IDS), logits(models[1], IDS)) == 0
