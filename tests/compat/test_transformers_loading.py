"""Models of a config, files of a model, and the hooks of loading, of the transformers that is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    PreTrainedTokenizerBase,
    ViTImageProcessor,
)
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from hf_posswap.compat import transformers_loading
from hf_posswap.compat.transformers_loading import WEIGHTS, LoadingHooks, ignore_on_load, ignored_on_load
from hf_posswap.training.fresh import byte_tokenizer
from tests.checkpoints.loopback import TOKEN, running
from tests.toys.house_model import HouseConfig, HouseForCausalLM

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)


def test_auto_mapping() -> None:
    mapping = transformers_loading.auto_mapping(AutoModelForCausalLM)
    assert mapping[GPT2Config] is GPT2LMHeadModel
    assert LlamaConfig in mapping
    assert transformers_loading.auto_mapping(GPT2LMHeadModel) is None


def test_language_classes() -> None:
    assert transformers_loading.language_classes("gpt2") == {"CAUSAL_LM": (GPT2Config, GPT2LMHeadModel)}
    assert set(transformers_loading.language_classes("bert")) == {"CAUSAL_LM", "MASKED_LM"}
    assert transformers_loading.language_classes("no_such_type") == {}


def test_language_classes_that_another_package_registers() -> None:
    assert transformers_loading.language_classes(HouseConfig.model_type) == {
        "CAUSAL_LM": (HouseConfig, HouseForCausalLM)
    }


def test_auto_mappings() -> None:
    class OwnConfig(GPT2Config):
        """A config that no Auto class knows."""

        model_type = "own_of_a_test"

    class OwnModel(GPT2LMHeadModel):
        """Its model."""

        config_class = OwnConfig

    found = list(transformers_loading.auto_mappings())
    of_gpt2 = [mapping for mapping in found if GPT2Config in mapping]
    assert len(of_gpt2) >= 4  # the base, causal, sequences, tokens, ...
    ids = set(map(id, found))
    assert {id(transformers_loading.auto_mapping(auto)) for auto in (AutoModel, AutoModelForCausalLM)} <= ids
    mapping = transformers_loading.auto_mapping(AutoModelForCausalLM)
    assert OwnConfig not in mapping  # a config of the same base, and another name
    mapping.register(OwnConfig, OwnModel, exist_ok=True)
    assert OwnConfig in mapping
    assert type(AutoModelForCausalLM.from_config(OwnConfig(**TINY.to_diff_dict()))) is OwnModel


def test_class_names() -> None:
    for task, kind, name in (
        ("CAUSAL_LM", "gpt2", "GPT2LMHeadModel"),
        ("MASKED_LM", "bert", "BertForMaskedLM"),
        ("SEQ_TO_SEQ_CAUSAL_LM", "t5", "T5ForConditionalGeneration"),
    ):
        names = transformers_loading.class_names(task)
        assert names[kind] == name
        assert set(names.values()) <= set(dir(transformers))


def test_build_model() -> None:
    model = transformers_loading.build_model(GPT2LMHeadModel, TINY, dtype=torch.bfloat16, attn_implementation="eager")
    assert type(model) is GPT2LMHeadModel
    assert model.dtype == torch.bfloat16
    model.set_attn_implementation("sdpa")  # which it may choose, as a loaded one


def test_auto_class_name() -> None:
    for auto, names in {
        "AutoModelForCausalLM": ("GPT2LMHeadModel", "LlamaForCausalLM"),
        "AutoModelForMaskedLM": ("BertForMaskedLM",),
        "AutoModelForSeq2SeqLM": ("T5ForConditionalGeneration", "BartForConditionalGeneration"),
        "AutoModelForImageTextToText": ("Qwen2VLForConditionalGeneration",),
        "AutoModelForSpeechSeq2Seq": ("WhisperForConditionalGeneration",),
        "AutoModelForSequenceClassification": ("BertForSequenceClassification",),
        "AutoModelForTokenClassification": ("BertForTokenClassification",),
        "AutoModelForQuestionAnswering": ("BertForQuestionAnswering",),
        "AutoModelForMultipleChoice": ("BertForMultipleChoice",),
        "AutoModelForImageClassification": ("ViTForImageClassification",),
        "AutoModel": ("BertModel", "LlamaModel"),
    }.items():
        mapping = transformers_loading.auto_mapping(getattr(transformers, auto))
        for name in names:
            assert transformers_loading.auto_class_name(name) == auto
            cls = getattr(transformers, name)
            assert mapping[cls.config_class] is cls


ROOT = Path(__file__).resolve().parents[2]
ASKS = """
import os
from huggingface_hub import HfApi, constants
from hf_posswap.compat.transformers_loading import file_of

HfApi().create_repo("me/files")
HfApi().upload_file(path_or_fileobj=b"{}", path_in_repo="there.json", repo_id="me/files")
print(file_of("me/files", "there.json").read_text())
print(file_of("me/files", "missing.json"))
constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = 2
os.environ["HF_ENDPOINT"] = constants.ENDPOINT = "http://127.0.0.1:9"
print(file_of("me/other", "config.json", certain=False, token=False))
try:
    file_of("me/other", "config.json", token=False)
except OSError:
    print("refused")
"""


def test_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("{}")
    assert transformers_loading.file_of(tmp_path, "there.json") == tmp_path / "there.json"
    assert transformers_loading.file_of(str(tmp_path), "missing.json") is None


def test_file_of_a_repository(tmp_path: Path) -> None:
    with running() as hub:
        drop = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        environment = {key: value for key, value in os.environ.items() if key not in drop}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        environment |= {"HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", ASKS]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["{}", "None", "None", "refused"]


def test_saved_names_are_those_that_are_written(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).save_pretrained(tmp_path)
    ViTImageProcessor().save_pretrained(tmp_path)
    tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    names = set(os.listdir(tmp_path))
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} < names
    assert names <= transformers_loading.saved_names(None)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("GPT2Tokenizer", {"vocab.json", "merges.txt"}),
        ("BertTokenizerFast", {"vocab.txt"}),
        ("T5Tokenizer", {"spiece.model"}),
        ("Unheard", set()),
    ],
)
def test_saved_names_of_a_class_of_tokenizers(kind: str, written: set[str]) -> None:
    assert transformers_loading.saved_names(kind) - transformers_loading.saved_names(None) == written


def test_the_index_of_weights_has_its_name() -> None:
    assert set(WEIGHTS.values()) == {SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME}


TABLE = "wpe.weight"


class Halved(ConversionOps):
    """Halves a weight."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        ((_, held),) = input_dict.items()
        return {target_patterns[0]: (held[0] if isinstance(held, list) else held) / 2}


class Plain(LoadingHooks, GPT2Model):
    """A GPT-2 that leaves all hooks alone."""

    __module__ = GPT2Model.__module__  # models of other packages are filled with other random numbers


class Hooked(LoadingHooks, GPT2Model):
    """A GPT-2 whose position table begins as sevens, and is halved and frozen when it is loaded."""

    def posswap_fill(self, module: nn.Module) -> bool:
        table = isinstance(module, nn.Embedding) and module.num_embeddings == TINY.n_positions
        if table:
            nn.init.constant_(module.weight, 7.0)  # type: ignore[arg-type]
        return table

    def posswap_read(self, state: dict[str, Any], prefix: str, metadata: Any) -> Any:
        if prefix + TABLE in state:
            state[prefix + TABLE] = state[prefix + TABLE] / 2
        return {"version": 5}

    @classmethod
    def posswap_conversions(cls, model: Any) -> list[Any]:
        return [WeightConverter(TABLE.replace(".", r"\.") + "$", TABLE, operations=[Halved()])]

    @classmethod
    def posswap_loaded(cls, model: Any) -> None:
        model.wpe.requires_grad_(False)


@pytest.fixture
def stock() -> GPT2Model:
    torch.manual_seed(0)
    return GPT2Model(TINY)


def same(one: Any, other: Any) -> bool:
    """Return whether two models have the same weights, but for the position table."""
    theirs = other.state_dict()
    return all(torch.equal(held, theirs[name]) for name, held in one.state_dict().items() if name != TABLE)


def test_posswap_fill() -> None:
    made: Any = Hooked(TINY)
    made.init_weights()
    assert bool((made.wpe.weight == 7).all())
    assert 0 < made.wte.weight.std() < 0.1  # the stock class fills the others


def test_posswap_read(stock: Any) -> None:
    made = Hooked(TINY)
    made.load_state_dict(stock.state_dict())
    assert torch.equal(made.state_dict()[TABLE], stock.state_dict()[TABLE] / 2)
    assert same(made, stock)


def test_posswap_read_gives_the_metadata_to_go_by(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    native = nn.Module._load_from_state_dict

    def watching(module: nn.Module, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if isinstance(module, Hooked):
            seen.append(metadata)
        native(module, state, prefix, metadata, *rest)

    monkeypatch.setattr(nn.Module, "_load_from_state_dict", watching)
    Hooked(TINY).load_state_dict(stock.state_dict())
    assert seen == [{"version": 5}]


def test_posswap_conversions(stock: Any, tmp_path: Path) -> None:
    stock.save_pretrained(tmp_path / "stock")
    made = Hooked.from_pretrained(tmp_path / "stock")
    assert torch.equal(made.state_dict()[TABLE], stock.state_dict()[TABLE] / 2)
    assert same(made, stock)
    made.save_pretrained(tmp_path / "again")  # as it is: saving does not undo the conversion
    again = GPT2Model.from_pretrained(tmp_path / "again")
    assert torch.equal(again.state_dict()[TABLE], made.state_dict()[TABLE])


def test_posswap_loaded(stock: Any, tmp_path: Path) -> None:
    stock.wpe.requires_grad_(False)
    stock.save_pretrained(tmp_path)
    assert Plain.from_pretrained(tmp_path).wpe.weight.requires_grad  # which is what the hook is for
    made = Hooked.from_pretrained(tmp_path)
    assert [name for name, held in made.named_parameters() if not held.requires_grad] == [TABLE]


def test_undoing_what_has_an_inverse(stock: Any, tmp_path: Path) -> None:
    stock.save_pretrained(tmp_path / "stock")
    made = GPT2Model.from_pretrained(tmp_path / "stock")
    made._weight_conversions = before = [WeightConverter(TABLE, TABLE, operations=[Halved()])]
    with pytest.raises(NotImplementedError):
        made.save_pretrained(tmp_path / "again")
    with transformers_loading.undoing_what_has_an_inverse(made):
        made.save_pretrained(tmp_path / "again")
    assert made._weight_conversions is before
    assert same(GPT2Model.from_pretrained(tmp_path / "again"), stock)


def test_unpack_4_bit_weights() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    from bitsandbytes.nn import LinearNF4

    torch.manual_seed(0)
    plain, x = nn.Linear(64, 64), torch.randn(2, 64)
    layer = LinearNF4(64, 64)
    layer.load_state_dict(plain.state_dict())
    layer.to("cpu").eval()
    with torch.no_grad():
        expected = layer(x)  # packs the weight, where the processor can
        transformers_loading.unpack_4_bit_weights(layer)
        assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
        assert layer.weight.quant_state.absmax.shape == (64,)
        assert torch.equal(layer(x), expected)


def test_hooks_that_nobody_overrides_change_nothing(stock: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    built = Plain(TINY)
    stock.save_pretrained(tmp_path)
    loaded, filled = Plain.from_pretrained(tmp_path), Plain(TINY)
    filled.load_state_dict(stock.state_dict())
    for one in (built, loaded, filled):
        assert same(one, stock)
        assert torch.equal(one.state_dict()[TABLE], stock.state_dict()[TABLE])


def test_ignored_on_load_is_what_loading_leaves_out_without_a_word() -> None:
    model = GPT2Model(TINY)
    assert any("attn.bias" in pattern for pattern in ignored_on_load(model))
    assert ignored_on_load(nn.Module.__new__(Plain)) == ignored_on_load(model)


def test_ignore_on_load_is_for_one_model_alone() -> None:
    model, other = GPT2Model(TINY), GPT2Model(TINY)
    before = ignored_on_load(other)
    ignore_on_load(model, ["nothing"])
    assert (ignored_on_load(model), ignored_on_load(other)) == (["nothing"], before)
