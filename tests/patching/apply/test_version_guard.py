"""Untested versions: each swap is proved on a tiny twin first, refused where only the swap fails, and remembered."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel

import hf_posswap
from hf_posswap import patch_model, unpatch_model, versions
from hf_posswap.compat.transformers_calls import find_cache
from hf_posswap.errors import OptionError, UnsupportedSwapError, UntestedVersionWarning
from hf_posswap.patching.apply import version_guard
from hf_posswap.schemes import SCHEMES
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.utils.user_paths import import_module
from tests.contract.models import LENGTH
from tests.contract.pairs import words

IDS = words(2, LENGTH)
PROVED = "proved_swaps"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder that keeps what was proved, in a process that has proved and said nothing yet."""
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(version_guard.SETTING, raising=False)
    monkeypatch.setattr(version_guard, "_verdicts", {})
    monkeypatch.setattr(version_guard, "_warned", set())
    return tmp_path / "cache" / PROVED


@pytest.fixture
def untested(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have no test run the installed transformers and torch, and return the folder of `cache`."""
    listed = tmp_path / "tested_versions.json"
    listed.write_text('{"transformers": ["5.1.0", "5.2.0"], "torch": ["2.1.0"]}')
    monkeypatch.setattr(versions, "FILE", listed)
    return cache


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the classes of which a proof is made, as they come."""
    made: list[str] = []
    run = version_guard.Proof.failures

    def counted(proof: version_guard.Proof, seed: int) -> Any:
        made.append(proof.cls.__name__)
        return run(proof, seed)

    monkeypatch.setattr(version_guard.Proof, "failures", counted)
    return made


@pytest.fixture
def hidden_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have GPT-2's blocks hand the cache to their attention by a way that no hook of a module sees."""
    forward = GPT2Attention.forward

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = find_cache(args, kwargs)
        self.handed = found
        if found is not None and isinstance(found[0], str):
            kwargs = kwargs | {found[0]: None}
        elif found is not None:
            args = tuple(None if place == found[0] else value for place, value in enumerate(args))
        return torch.nn.Module.__call__(self, *args, **kwargs)

    @functools.wraps(forward)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.handed is not None and isinstance(self.handed[0], str):
            kwargs[self.handed[0]] = self.handed[1]
        elif self.handed is not None:
            args = tuple(self.handed[1] if place == self.handed[0] else value for place, value in enumerate(args))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2Attention, "__call__", call, raising=False)
    monkeypatch.setattr(GPT2Attention, "forward", taking)


@pytest.fixture
def hidden_position_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Llama's modules hand on position ids by a way that no hook of a module sees."""
    for cls in (LlamaModel, LlamaDecoderLayer, LlamaAttention):
        _hide_position_ids(cls, monkeypatch)


def _hide_position_ids(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = cls.forward

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.handed = kwargs.pop("position_ids", None)
        return torch.nn.Module.__call__(self, *args, **kwargs)

    @functools.wraps(forward)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs | {"position_ids": self.handed})

    monkeypatch.setattr(cls, "__call__", call, raising=False)
    monkeypatch.setattr(cls, "forward", taking)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntestedVersionWarning)
        yield


def model_of(name: str = "GPT2LMHeadModel", **changes: Any) -> Any:
    return tiny_model(name, meta=False, **changes)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_nothing_happens_on_tested_versions(
    cache: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = tmp_path / "tested_versions.json"
    torch_version = torch.__version__.partition("+")[0]
    listed.write_text(json.dumps({"transformers": [transformers.__version__], "torch": [torch_version]}))
    monkeypatch.setattr(versions, "FILE", listed)
    monkeypatch.setenv(version_guard.SETTING, "refuse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model_of(), "rope")
    assert proofs == []
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "scheme", "options"),
    [
        ("GPT2LMHeadModel", "rope", {}),
        ("GPT2LMHeadModel", "sinusoidal", {"max_length": 64}),
        ("GPT2Model", "alibi", {}),
        ("LlamaForCausalLM", "yarn", {"factor": 2.0}),
        ("LlamaForCausalLM", "t5", {}),
        ("LlamaForCausalLM", "rnope", {"every": 2}),
        ("LlamaForCausalLM", "dynamic", {"factor": 2.0}),
        ("LlamaForCausalLM", "nope", {}),
        ("LlamaForCausalLM", "longrope", {"short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8, "factor": 2.0}),
        ("BertForMaskedLM", "rope", {}),
        ("BertForSequenceClassification", "alibi", {}),
        ("BartForConditionalGeneration", "rope", {}),
        ("BartForConditionalGeneration", {"encoder": "rope"}, {}),
        ("T5ForConditionalGeneration", "kerple", {}),
        ("ViTForImageClassification", "rope_2d", {}),
        ("Qwen2ForCausalLM", "alibi", {"use_sliding_window": True, "max_window_layers": 2}),
        ("LlamaForCausalLM", "alibi", {"use_cache": False}),
        # whose lists change, and whose base grows, within the positions of a proof
        ("LlamaForCausalLM", "longrope", {"long_factor": (2.0,) * 8, "factor": 2.0, "max_position_embeddings": 16}),
        ("LlamaForCausalLM", "dynamic", {"factor": 2.0, "max_position_embeddings": 16}),
    ],
)
def test_a_proved_swap_is_the_same_as_on_tested_versions(
    untested: Path, name: str, scheme: Any, options: dict[str, Any]
) -> None:
    of_config = options.keys() & {"use_sliding_window", "max_window_layers", "use_cache", "max_position_embeddings"}
    config = {key: options.pop(key) for key in sorted(of_config)}
    image = {"image_size": 32, "patch_size": 8} if name.startswith("ViT") else {}
    model, before = model_of(name, **config, **image), torch.get_rng_state()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    patch_model(model, scheme, **options)
    assert torch.equal(torch.get_rng_state(), before)
    (path,) = untested.glob("*.json")
    assert json.loads(path.read_text())["undecided"] == []
    unpatch_model(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "scheme", "built", "most"),
    [
        ("GPT2LMHeadModel", "rope", 1, 20),
        ("LlamaForCausalLM", "alibi", 1, 20),
        ("LlamaForCausalLM", "nope", 2, 19),
        ("BertForMaskedLM", "rope", 1, 7),
        ("BartForConditionalGeneration", "rope", 1, 13),
    ],
)
@pytest.mark.usefixtures("untested")
def test_a_proof_costs_no_more_twins_and_forwards_than_its_checks_need(
    name: str, scheme: str, built: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twins, forwards = model_of(name), [], []
    build, native = version_guard.build_twin, torch.nn.Module.__call__

    def counted(make: Any, seed: int) -> Any:
        twins.append(build(make, seed))
        return twins[-1]

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, getattr(transformers, name)):
            forwards.append(module)
        return native(module, *args, **kwargs)

    monkeypatch.setattr(version_guard, "build_twin", counted)
    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    patch_model(model, scheme)
    assert len(twins) == built
    assert 0 < len(forwards) <= most


@pytest.mark.parametrize(
    ("broken", "name", "scheme", "expected"),
    [
        ("hidden_cache", "GPT2LMHeadModel", "rope", "generate: "),
        ("hidden_position_ids", "LlamaForCausalLM", "alibi", "skipped position ids: position ids that skip"),
    ],
)
def test_a_swap_that_a_release_broke_is_refused_and_nothing_is_touched(
    untested: Path, broken: str, name: str, scheme: str, expected: str, request: pytest.FixtureRequest
) -> None:
    model = model_of(name)
    before = logits(model)
    request.getfixturevalue(broken)
    with pytest.raises(UnsupportedSwapError, match=r"fails with the swap, and not without it \(") as caught:
        patch_model(model, scheme)
    for part in (expected, name, scheme, transformers.__version__, "5.1.0, 5.2.0", "POSSWAP_UNTESTED=allow"):
        assert part in str(caught.value)
    assert not hasattr(model, "_posswap")
    assert torch.equal(logits(model), before)
    assert not untested.exists()


@pytest.mark.usefixtures("untested", "hidden_cache")
def test_a_refusal_holds_for_each_swap_of_the_process_and_is_proved_once(proofs: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedSwapError, match="fails with the swap"):
            patch_model(model_of(), "rope")
    assert proofs == ["GPT2LMHeadModel"] * len(version_guard.SEEDS)


def test_what_the_stock_class_fails_as_well_is_reported_and_not_held_against_the_swap(untested: Path) -> None:
    with pytest.warns(UntestedVersionWarning, match="not decided for .*: padding"):
        patch_model(model_of("ConvBertForMaskedLM"), "rope")
    (path,) = untested.glob("*.json")
    assert json.loads(path.read_text())["undecided"] == ["padding"]


class WithArgument(transformers.GPT2LMHeadModel):
    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config)
        self.width = width


def test_what_could_not_be_proved_is_no_pass(untested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = WithArgument(model_of().config, 3)
    with pytest.raises(UnsupportedSwapError, match=r"could not be proved .*TypeError.*width"):
        patch_model(model, "rope")
    assert not hasattr(model, "_posswap")
    monkeypatch.setenv(version_guard.SETTING, "allow")
    patch_model(model, "rope")
    assert not untested.exists()


class PatchesItself(transformers.GPT2LMHeadModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        patch_model(self, "rope")


@pytest.mark.usefixtures("untested")
def test_a_class_that_patches_itself_is_proved_once(proofs: list[str]) -> None:
    PatchesItself(model_of().config)
    assert proofs == ["PatchesItself"]


@pytest.mark.usefixtures("untested", "hidden_cache")
def test_the_setting_allows_refuses_and_takes_nothing_else(proofs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(version_guard.SETTING, "allow")
    with pytest.warns(UntestedVersionWarning, match="not proved, since POSSWAP_UNTESTED=allow"):
        patch_model(model_of(), "rope")
    monkeypatch.setenv(version_guard.SETTING, "refuse")
    with pytest.raises(UnsupportedSwapError, match="POSSWAP_UNTESTED=refuse"):
        patch_model(model_of(), "rope")
    monkeypatch.setenv(version_guard.SETTING, "yes")
    with pytest.raises(OptionError, match="must be prove, allow or refuse, got 'yes'"):
        patch_model(model_of(), "rope")
    assert proofs == []


@pytest.mark.usefixtures("untested")
def test_the_warning_comes_once_and_blames_the_caller() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for scheme in ("rope", "alibi"):
            patch_model(model_of(), scheme)
    (warning,) = [one for one in seen if one.category is UntestedVersionWarning]
    assert warning.filename == __file__
    for part in (transformers.__version__, "5.1.0, 5.2.0", torch.__version__, "2.1.0", "posswap selfcheck"):
        assert part in str(warning.message)
    assert version_guard.SETTING in str(warning.message)


def test_a_pass_is_remembered_by_class_scheme_config_and_versions(
    untested: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap_in_another_process(scheme: str = "rope", **changes: Any) -> int:
        version_guard._verdicts.clear()
        patch_model(model_of(**changes), scheme)
        return len(proofs)

    assert swap_in_another_process() == 1
    assert swap_in_another_process() == 1
    assert swap_in_another_process(n_embd=128) == 1  # a size
    assert swap_in_another_process("alibi") == 2
    assert swap_in_another_process(scale_attn_by_inverse_layer_idx=True) == 3  # a switch
    (first, *_) = sorted(untested.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    first.write_text("{")
    assert swap_in_another_process() == 4
    first.write_text('{"key": "of another swap", "undecided": []}')
    assert swap_in_another_process() == 5
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert swap_in_another_process() == 6
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git1234")  # its code may change under one name
    assert [swap_in_another_process(), swap_in_another_process()] == [7, 8]


@pytest.mark.usefixtures("untested")
def test_an_own_scheme_is_proved_anew_where_its_code_was_edited(proofs: list[str], tmp_path: Path) -> None:
    file = tmp_path / "schemes_of_a_proof.py"
    code = (
        'from hf_posswap.schemes import bias\n\n@bias("bias-of-a-proof")\ndef away(distance):\n'
        "    return -{} * distance.abs()\n"
    )
    try:
        for slope, count in ((1, 1), (1, 1), (2, 2), (1, 2)):
            file.write_text(code.format(slope))
            sys.modules.pop(file.stem, None)
            import_module(str(file))
            patch_model(model_of(), "bias-of-a-proof")
            assert len(proofs) == count
    finally:
        sys.modules.pop(file.stem, None)
        SCHEMES.remove("bias-of-a-proof")


def test_a_cache_folder_that_cannot_be_used_fails_no_swap(
    untested: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "file" / "cache"))
    patch_model(model_of(), "rope")
    version_guard._verdicts.clear()
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "cache"))
    untested.mkdir(parents=True)
    for key in list(version_guard._verdicts):
        (untested / f"{key}.json").mkdir()
    patch_model(model_of(), "rope")


@pytest.mark.usefixtures("untested")
def test_threads_prove_a_swap_once_and_draw_the_random_numbers_that_they_would(proofs: list[str]) -> None:
    models, errors = [model_of() for _ in range(4)], []

    def swap(model: Any) -> None:
        try:
            patch_model(model, "rope")
        except Exception as error:
            errors.append(error)

    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    threads = [threading.Thread(target=swap, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert proofs == ["GPT2LMHeadModel"]
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("scheme", ["rope", "t5"])
def test_the_proof_sees_nothing_of_what_is_around_it(scheme: str, proofs: list[str]) -> None:
    with torch.device("meta"), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        patch_model(tiny_model("GPT2LMHeadModel"), scheme)
    version_guard._verdicts.clear()
    patch_model(tiny_model("LlamaForCausalLM").to(torch.bfloat16), scheme)
    assert proofs == ["GPT2LMHeadModel", "LlamaForCausalLM"]


@pytest.mark.usefixtures("cache")
def test_loads_and_clones_are_guarded_too(
    proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model, native = patch_model(model_of(), "rope"), patch_model(model_of("LlamaForCausalLM"), "yarn", factor=2.0)
    model.save_pretrained(tmp_path / "plugin")
    native.save_pretrained(tmp_path / "native")
    request.getfixturevalue("untested")
    proofs.clear()
    assert torch.equal(logits(hf_posswap.load(tmp_path / "plugin")), logits(model))
    assert torch.equal(logits(hf_posswap.load(tmp_path / "native")), logits(native))
    assert proofs == ["GPT2LMHeadModel", "LlamaForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plugin", dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    monkeypatch.setenv(version_guard.SETTING, "refuse")
    for attempt in (
        lambda: type(model)(model.config),
        lambda: hf_posswap.load(tmp_path / "plugin"),
        lambda: hf_posswap.load(tmp_path / "native"),
        lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plugin"),
    ):
        with pytest.raises(UnsupportedSwapError, match="POSSWAP_UNTESTED=refuse"):
            attempt()


@pytest.mark.usefixtures("untested")
def test_a_first_proof_in_a_load_with_narrow_weights_passes(tmp_path: Path, proofs: list[str]) -> None:
    for name, scheme in (("LlamaForCausalLM", "alibi"), ("BloomForCausalLM", "rope")):
        patch_model(model_of(name), scheme).save_pretrained(tmp_path / name)
        version_guard._verdicts.clear()
        for path in (tmp_path / "cache" / PROVED).iterdir():
            path.unlink()
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
    assert proofs == ["LlamaForCausalLM"] * 2 + ["BloomForCausalLM"] * 2


LOAD = """
import sys
sys.modules["hf_posswap"] = None  # as if it were not installed
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[2])
"""


@pytest.mark.slow
def test_the_code_in_a_checkpoint_proves_itself_on_versions_that_it_was_not_tested_with(
    cache: Path, tmp_path: Path
) -> None:
    model, folder = patch_model(model_of(), "rope"), tmp_path / "saved"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["tested_transformers"] == versions.tested()["transformers"][-1]
    assert not hasattr(hf_posswap.load(folder).config, "tested_transformers")
    entry, mark = folder / "modeling_posswap.py", f"TESTED_VERSIONS = {json.dumps(versions.tested())}"
    assert mark in entry.read_text()
    other = 'TESTED_VERSIONS = {"transformers": ["5.1.0"], "torch": ["2.1.0"]}'
    entry.write_text(entry.read_text().replace(mark, other))

    def load(**environment: str) -> subprocess.CompletedProcess[str]:
        torch.save(IDS, tmp_path / "io.pt")
        command = [sys.executable, "-c", LOAD, str(folder), str(tmp_path / "io.pt")]
        where = os.environ | {"HF_HOME": str(tmp_path / "home")} | environment
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=where, check=False)

    run = load()
    assert run.returncode == 0, run.stderr[-2000:]
    assert torch.equal(torch.load(tmp_path / "io.pt"), logits(model))
    assert "hf_posswap has not been tested with transformers" in run.stderr
    (path,) = cache.glob("*.json")
    assert json.loads(path.read_text())["class"].endswith("GPT2LMHeadModel")
    run = load(POSSWAP_UNTESTED="refuse")
    assert run.returncode == 1
    assert "POSSWAP_UNTESTED=refuse" in run.stderr


@pytest.mark.parametrize("scheme", ["self_extend:window=16,group=4", "rerope:window=32", "dual_chunk"])
def test_a_window_beyond_that_of_the_tiny_model_is_proved(scheme: str, untested: Path, proofs: list[str]) -> None:
    model = tiny_model("mistral", meta=False, sliding_window=64, max_position_embeddings=128)
    with pytest.warns(UntestedVersionWarning):
        patch_model(model, scheme)
    assert proofs == ["MistralForCausalLM"]


@pytest.mark.parametrize("scheme", ["alibi", "kerple"])
def test_a_program_that_puts_each_parameter_on_meta_may_build_a_swapped_model(
    scheme: str, untested: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UntestedVersionWarning):
        config = patch_model(tiny_model("llama", meta=False), scheme).config
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: Any, name: str, parameter: Any) -> None:  # as vLLM and accelerate do
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", register_on_meta)
    built = transformers.AutoModel.from_config(config)
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    assert proofs == ["LlamaForCausalLM", "LlamaModel"]
