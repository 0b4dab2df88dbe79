"""`overrides`: what is printed is parsed back, applied, run, and compared with the model that `patch_model` swapped."""

from __future__ import annotations

import copy
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.checkpoints.overriding import TARGETS, Overrides, facts_markdown, overrides
from hf_posswap.checkpoints.overriding_config import by_axolotl, by_sglang, by_vllm, sglang_length, vllm_length
from hf_posswap.checkpoints.overriding_programs import WRITERS
from hf_posswap.cli import app
from hf_posswap.cli.shipping import Program
from hf_posswap.errors import (
    AlreadyPatchedError,
    CheckpointError,
    SchemeError,
    UnknownNameError,
    UnsupportedSwapError,
)
from hf_posswap.schemes import LongRope
from tests.contract.models import LENGTH, TINY, Tiny
from tests.contract.pairs import logits, words
from tests.contract.rotary_kinds import KINDS_OF_ROTARY
from tests.stock import RELEASE

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL sets it
SCHEMES: dict[str, Any] = {
    "yarn": "yarn:factor=4",
    "yarn with its own betas": "yarn:factor=4,beta_fast=16,attention_factor=1.5,truncate=false",
    "linear": "linear:factor=4",
    "ntk": "ntk:factor=4",
    "base": "rope:base=500000",
    "dynamic": "dynamic:factor=4",
    "llama3": "llama3:factor=4",
    "longrope": LongRope(factor=4.0, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8),
    "by parts": "ntk_by_parts:factor=4",
    "a list of angles": "resonance_yarn:factor=4",
}
LONGROPE = ("longrope", "a list of angles")
"""The schemes that a config has as longrope."""
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "vocab_size": 300,
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 2.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, Tiny] = {
    **{name: TINY[name] for name in ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")},
    "llama 3.1": Tiny(
        "LlamaForCausalLM",
        "LlamaConfig",
        TINY["llama"].values | {"rope_parameters": _SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        (),
    ),
    "phi3": Tiny("Phi3ForCausalLM", "Phi3Config", TINY["llama"].values | {"original_max_position_embeddings": 32}, ()),
    "gemma3": KINDS_OF_ROTARY["gemma3 (frequencies by layer type)"],
    "gemma3 with pictures": Tiny(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": _TEXT | {"num_hidden_layers": 6, "sliding_window": 8}, "vision_config": _VISION},
        (),
    ),
}


class Case:
    """An unswapped model on disk, and how a test compares models with its swapped copies."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = str(folder)
        FAMILIES[name].build().save_pretrained(folder)
        self.model = transformers.AutoModelForImageTextToText if "pictures" in name else None
        self.weights = self.load().state_dict()

    def load(self) -> Any:
        auto = self.model or transformers.AutoModelForCausalLM
        return auto.from_pretrained(self.folder, dtype=torch.float32).eval()

    def of(self, config: Any) -> Any:
        """Return the unswapped weights in the stock class that `config` makes."""
        model = type(self.load())(config).eval()
        model.load_state_dict(self.weights)
        return model

    def config(self) -> Any:
        return transformers.AutoConfig.from_pretrained(self.folder)

    def says(self, model: Any) -> list[torch.Tensor]:
        """Return logits within the original length and beyond; the shorter text last, as dynamic angles follow it."""
        return [logits(model, words(2, length)) for length in (3 * LENGTH, LENGTH // 2)]

    def is_swapped(self, model: Any, scheme: Any) -> None:
        """Assert that `model` computes exactly what the swapped model computes, and not what the unswapped one does."""
        patched = hf_posswap.patch_model(self.load(), scheme)
        native = self.says(hf_posswap.to_native(patched))
        for got, expected, stock in zip(self.says(model), native, self.says(patched), strict=True):
            assert torch.equal(expected, stock)
            assert torch.equal(got, expected)
        assert not torch.equal(self.says(model)[0], self.says(self.load())[0])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp("model") / name.replace(" ", "-"))
        return made[name]

    return case


def expressible(case: Case, scheme: Any) -> bool:
    try:
        return hf_posswap.plan_swap(case.load(), scheme).route == "native"
    except SchemeError as error:
        pytest.skip(f"the lists are for another width: {error}")


def option(text: str, name: str) -> str:
    """Return the value of an option of a command, as a shell reads the command."""
    arguments = shlex.split(text)
    return arguments[arguments.index(name) + 1]


def of_python(text: str, case: Case) -> Any:
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["model"].float().eval()


def of_vllm(text: str, case: Case) -> Any:
    config = by_vllm(case.config(), json.loads(option(text, "--hf-overrides")))
    assert vllm_length(config.get_text_config()) >= int(option(text, "--max-model-len"))
    return case.of(config)


def of_sglang(text: str, case: Case) -> Any:
    config = by_sglang(case.config(), json.loads(option(text, "--json-model-override-args")))
    assert sglang_length(config.get_text_config()) >= int(option(text, "--context-length"))
    return case.of(config)


def of_trl(text: str, case: Case) -> Any:
    scope: dict[str, Any] = {}
    exec(text.replace("args = SFTConfig(", "args = SFTConfig(bf16=False, report_to=[],"), scope)
    from trl.trainer.utils import create_model_from_path

    return create_model_from_path(case.folder, **scope["args"].model_init_kwargs).eval()


def of_axolotl(text: str, case: Case) -> Any:
    given = yaml.safe_load(text)
    assert given["base_model"] == case.folder
    assert all(isinstance(value, int) for value in (given["sequence_len"],))
    return case.of(by_axolotl(case.config(), given["overrides_of_model_config"]))


def of_llamafactory(text: str, case: Case) -> Any:
    """Return the model of what LLaMA-Factory 0.9.5 computes with transformers 4, by its formula."""
    given, config = yaml.safe_load(text), case.config()
    present = config.rope_parameters
    old = present.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = float(-(-given["cutoff_len"] // old))
    rope = {"rope_type": given["rope_scaling"], "factor": factor, "rope_theta": present["rope_theta"]}
    rope |= {name: present[name] for name in ("partial_rotary_factor",) if name in present}
    if given["rope_scaling"] != "linear":
        rope["original_max_position_embeddings"] = old
    if given["rope_scaling"] == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.rope_parameters, config.max_position_embeddings = rope, int(old * factor)
    return case.of(config)


def of_verl(text: str, case: Case) -> Any:
    """Return the model that vLLM has in the rollout, once the trainer's config, which is written first, is checked."""
    write, start = text.splitlines()
    exec(shlex.split(write)[2], {})
    keys = dict(word.lstrip("+").split("=", 1) for word in shlex.split(start)[3:])
    trained = transformers.AutoConfig.from_pretrained(keys["actor_rollout_ref.model.hf_config_path"])
    quoted = keys["actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides"]
    assert (quoted[0], quoted[-1]) == ("'", "'")  # a string to Hydra, as verl hands it to vLLM's command line
    rollout = case.of(by_vllm(case.config(), json.loads(quoted[1:-1])))
    for ours, theirs in zip(case.says(case.of(trained)), case.says(rollout), strict=True):
        assert torch.equal(ours, theirs)
    return rollout


APPLIED = {
    "transformers": of_python,
    "vllm": of_vllm,
    "sglang": of_sglang,
    "trl": of_trl,
    "axolotl": of_axolotl,
    "llamafactory": of_llamafactory,
    "verl": of_verl,
}
REFUSED = {
    "vllm": ("dynamic",),
    "verl": ("dynamic",),
    "axolotl": ("dynamic",),
    "llamafactory": (
        "yarn with its own betas", "ntk", "base", "dynamic", "longrope", "by parts", "a list of angles",
    ),
}  # fmt: skip
"""What each program has no setting for, in a model of one set of rope parameters at the top of its config."""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pasted_into_transformers_it_computes_what_the_swapped_model_does(cases: Any, family: str, scheme: str) -> None:
    case = cases(family)
    if RELEASE < (5, 21) and family.startswith("gemma3") and scheme in LONGROPE:
        with pytest.raises(UnsupportedSwapError, match="which cannot run longrope in a Gemma3"):
            overrides(case.folder, SCHEMES[scheme], "transformers")
        return
    if not expressible(case, SCHEMES[scheme]):
        with pytest.raises(UnsupportedSwapError, match="posswap patch"):
            overrides(case.folder, SCHEMES[scheme], "transformers")
        return
    pasted = overrides(case.folder, SCHEMES[scheme], "transformers")
    assert pasted.verdict == "exact"
    assert any("5.21" in note for note in pasted.notes) == (family.startswith("gemma3") and scheme in LONGROPE)
    case.is_swapped(of_python(pasted.text, case), SCHEMES[scheme])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "transformers"])
@pytest.mark.parametrize("family", ["llama", "llama 3.1", "gemma3", "gemma3 with pictures"])
def test_pasted_into_a_program_it_gives_its_config_the_swap(
    cases: Any, family: str, target: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target == "trl":
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    case = cases(family)
    inside = "pictures" in family
    refused = scheme in REFUSED.get(target, ()) or (inside and target == "axolotl")
    refused |= target == "llamafactory" and family.startswith("gemma3")
    by_stock_code = ("axolotl", *(("trl", "verl") if RELEASE < (5, 21) else ()))  # axolotl installs transformers 5.16
    refused |= target in by_stock_code and family.startswith("gemma3") and scheme in LONGROPE
    # its merge keeps the original length of a Llama 3.1, and it does not multiply the length of several layer types
    refused |= (target, scheme) == ("sglang", "dynamic") and family != "llama"
    if refused or not expressible(case, SCHEMES[scheme]):
        with pytest.raises(UnsupportedSwapError, match=r"posswap patch|Use yarn or ntk|use yarn or ntk"):
            overrides(case.folder, SCHEMES[scheme], target)
        return
    pasted = overrides(case.folder, SCHEMES[scheme], target)
    case.is_swapped(APPLIED[target](pasted.text, case), SCHEMES[scheme])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("family", "target"), [("llama", "vllm"), ("gemma3", "vllm"), ("llama", "sglang")])
def test_a_server_gets_the_positions_of_the_folder_that_export_writes(
    cases: Any, family: str, target: str, scheme: str, tmp_path: Path
) -> None:
    """So a verdict about that folder, which tests of vLLM run, is one about the overrides."""
    case = cases(family)
    if scheme in REFUSED.get(target, ()) or not expressible(case, SCHEMES[scheme]):
        pytest.skip("there are no overrides")
    hf_posswap.save(hf_posswap.patch_model(case.load(), SCHEMES[scheme]), tmp_path / "swapped")
    folder = hf_posswap.export(tmp_path / "swapped", target)
    pasted = overrides(case.folder, SCHEMES[scheme], target)
    applied = {"vllm": by_vllm, "sglang": by_sglang}[target](case.config(), pasted.values)
    assert applied.rope_parameters == folder.config["rope_parameters"]
    assert applied.max_position_embeddings == folder.config["max_position_embeddings"]
    assert (pasted.verdict, pasted.why.rpartition(" (")[2]) == (folder.verdict, f"{folder.engine})")
    length = {"vllm": "--max-model-len", "sglang": "--context-length"}[target]
    if scheme == "dynamic":  # the folder's config has the original length, which export takes for the model's
        assert option(pasted.text, length) == str(4 * LENGTH)
        return
    assert option(pasted.text, length) == option(folder.command, length)


def test_trl_reads_the_command(cases: Any) -> None:
    trl = pytest.importorskip("trl")
    case = cases("llama")
    pasted = overrides(case.folder, "yarn:factor=4", "trl")
    arguments = shlex.split(pasted.also["the command"])
    assert arguments[:2] == ["trl", "sft"]
    parser = trl.TrlParser((trl.SFTConfig, trl.ModelConfig))
    training, model = parser.parse_args_and_config([*arguments[2:], "--bf16", "False", "--report_to", "none"])
    assert (training.max_length, model.model_name_or_path) == (4 * LENGTH, case.folder)
    assert training.model_init_kwargs == pasted.values


def test_older_vllm_gets_the_spelling_of_transformers_4() -> None:
    config = transformers.LlamaConfig(max_position_embeddings=4096)
    older = {
        scheme: overrides(config, scheme, "vllm").also.get("vLLM 0.11.2 and older")
        for scheme in ("yarn:factor=4", "linear:factor=4", "rope:base=500000", "yarn:factor=4,truncate=false")
    }
    given = {scheme: json.loads(option(text, "--hf-overrides")) for scheme, text in older.items() if text is not None}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert given["yarn:factor=4"] == {
        "rope_scaling": yarn | {"beta_fast": 32.0, "beta_slow": 1.0},
        "rope_theta": 10000.0,
    }
    assert given["linear:factor=4"] == {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 10000.0}
    assert given["rope:base=500000"] == {
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "max_position_embeddings": 4096,
    }
    assert "yarn:factor=4,truncate=false" not in given  # it does not read truncate


def test_a_length_that_a_program_multiplies_or_not() -> None:
    llama = overrides(transformers.LlamaConfig(max_position_embeddings=4096), "linear:factor=4", "vllm")
    assert llama.values == {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
    gemma = overrides(TINY_GEMMA, "linear:factor=4", "vllm")  # vLLM takes the length of a Gemma 3 as it is
    assert gemma.values["max_position_embeddings"] == 4 * LENGTH
    half = overrides(transformers.LlamaConfig(max_position_embeddings=4096), "linear:factor=4", "vllm", max_length=8192)
    assert option(half.text, "--max-model-len") == "8192"
    limited = transformers.LlamaConfig(max_position_embeddings=4096)
    limited.seq_length = 4096  # vLLM and SGLang take it for the model's length
    for target in ("vllm", "sglang"):
        with pytest.raises(UnsupportedSwapError, match="at most 4096 tokens of this config with yarn, not 16384"):
            overrides(limited, "yarn:factor=4", target)


TINY_GEMMA = FAMILIES["gemma3"].config()


def test_settings_that_a_merge_would_keep_are_refused() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=yarn | {"mscale": 0.7})
    with pytest.raises(UnsupportedSwapError, match=r"mscale of the model's present rope parameters would stay"):
        overrides(config, "yarn:factor=4,original_length=32", "sglang")
    replaced = overrides(config, "yarn:factor=4,original_length=32", "vllm")  # vLLM replaces the whole dict
    assert "mscale" not in by_vllm(config, replaced.values).rope_parameters


@pytest.mark.parametrize("scheme", LONGROPE)
def test_longrope_by_layer_type_is_refused_where_transformers_cannot_run_it(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See the test of `runs_longrope_by_layer_type` for what the installed transformers does."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.20.2")
    for target in ("transformers", "trl", "verl"):
        with pytest.raises(UnsupportedSwapError) as raised:
            overrides(TINY_GEMMA, SCHEMES[scheme], target)
        message = str(raised.value)
        assert "transformers 5.20.2 is installed, which cannot run longrope in a Gemma3ForCausalLM" in message
        assert message.endswith("Install transformers 5.21 or newer, or use yarn or ntk.")
        overrides(TINY["llama"].config(), SCHEMES[scheme], target)
        overrides(TINY_GEMMA, "yarn:factor=4", target)
    for target in ("vllm", "sglang"):  # they compute the angles themselves
        overrides(TINY_GEMMA, SCHEMES[scheme], target)
    for version in ("5.21.0", "5.22.0.dev0", "6.0.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        for target in ("transformers", "trl", "verl"):
            assert any(
                "transformers 5.21 or newer" in note for note in overrides(TINY_GEMMA, SCHEMES[scheme], target).notes
            )
        with pytest.raises(
            UnsupportedSwapError, match=r"axolotl 0\.19\.0 installs transformers 5\.16\.1, which cannot"
        ):
            overrides(TINY_GEMMA, SCHEMES[scheme], "axolotl")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scheme", ["alibi", "self_extend:window=8,group=4", "rnope:every=2"])
def test_what_no_config_says_is_refused_with_what_to_do(target: str, scheme: str) -> None:
    with pytest.raises(UnsupportedSwapError) as raised:
        overrides(TINY["llama"].config(), scheme, target)
    said = str(raised.value)
    assert f"posswap patch MODEL {scheme} -o DIR" in said or shlex.quote(scheme) in said
    after = {"vllm": "posswap export DIR --target vllm", "sglang": "posswap export DIR --target sglang"}
    assert after.get(target, "hf_posswap") in said


@pytest.mark.parametrize("target", TARGETS)
def test_a_table_is_no_config(target: str) -> None:
    with pytest.raises(UnsupportedSwapError, match="it changes transformer.*, which a config does not hold"):
        overrides(TINY["gpt2"].config(), "sinusoidal", target)


def test_llamafactory_says_what_it_would_compute() -> None:
    config = transformers.LlamaConfig(max_position_embeddings=4096)
    with pytest.raises(UnsupportedSwapError, match=r"a factor of 2\.5.*computes a factor of 3 from 4096 tokens"):
        overrides(config, "yarn", "llamafactory", max_length=10240)
    whole = overrides(config, "yarn", "llamafactory", max_length=12288)
    assert yaml.safe_load(whole.text) == {"model_name_or_path": "MODEL", "rope_scaling": "yarn", "cutoff_len": 12288}
    assert any("transformers 5" in note for note in whole.notes)


def test_arguments_are_checked() -> None:
    config = TINY["llama"].config()
    with pytest.raises(UnknownNameError, match="vllm"):
        overrides(config, "yarn:factor=4", "vlm")
    with pytest.raises(SchemeError):
        overrides(config, "yarn:factor=4", "vllm", max_length=0)
    with pytest.raises(CheckpointError):
        overrides("/nowhere/at-all", "yarn:factor=4", "vllm")
    swapped = hf_posswap.patch_model(TINY["llama"].build(), "yarn", factor=4)
    with pytest.raises(AlreadyPatchedError):
        overrides(swapped, "linear:factor=4", "vllm")


def test_nothing_that_is_given_changes() -> None:
    config = TINY["llama"].config()
    before = copy.deepcopy(config).to_dict()
    for target in TARGETS:
        overrides(config, "yarn", target, factor=4)
    assert config.to_dict() == before


def test_names_with_odd_letters_survive_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a $(model) "x"'
    TINY["llama"].build().save_pretrained(folder)
    served = overrides(folder, "yarn:factor=4", "vllm")
    assert shlex.split(served.text)[2] == str(folder)
    model = of_python(overrides(folder, "yarn:factor=4", "transformers").text, Case.__new__(Case))
    assert model.config.rope_parameters["factor"] == 4.0


def test_all_that_is_printed_can_be_pasted(cases: Any) -> None:
    case = cases("llama")
    for target in TARGETS:
        pasted = overrides(case.folder, "yarn:factor=4", target)
        lines = [line for line in str(pasted).splitlines() if not line.startswith("# ") and line != "#"]
        code = [line for line in pasted.text.splitlines() if not line.startswith("# ")]
        assert lines == code
        assert json.loads(json.dumps(pasted.to_dict()))["text"] == pasted.text
        assert pasted.versions in " ".join(str(pasted).replace("\n#   ", " ").split())


def test_the_command_prints_the_same(cases: Any) -> None:
    case, runner = cases("llama"), CliRunner()
    for target in TARGETS:
        expected: Overrides = overrides(case.folder, "yarn:factor=4", target, max_length=4 * LENGTH)
        arguments = ["overrides", case.folder, "yarn:factor=4", "--target", target, "--max-length", str(4 * LENGTH)]
        shown = runner.invoke(app, arguments)
        assert (shown.exit_code, shown.stdout) == (0, f"{expected}\n"), shown.output
        told = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
        assert told == json.loads(json.dumps(expected.to_dict()))


def test_one_list_of_programs_and_its_page() -> None:
    assert set(WRITERS) == set(TARGETS) == {program.value for program in Program}
    page = (Path(__file__).resolve().parents[2] / ".docs" / "pages" / "serving.md").read_text(encoding="utf-8")
    table = page.partition("<!-- facts table -->")[2].partition("<!-- /facts table -->")[0].strip()
    assert table == facts_markdown(), "run python recipes/claims_table.py"
