"""A checkpoint's own code runs for `trust_remote_code=True` alone: in every function that loads, and in the source."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from transformers import GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap.comparison import EvalSettings
from hf_posswap.errors import CheckpointError, OptionError, RemoteCodeError
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.auto_classes import auto_config, auto_processor, auto_tokenizer
from tests import hostile

ROOT = Path(__file__).resolve().parents[1]
SHORT = EvalSettings(lengths=(8,), metrics=("ppl_prefix",))
LOADERS: dict[str, Callable[..., Any]] = {
    "load": hf_posswap.load,
    "explain": hf_posswap.explain,
    "supports": lambda source, **trust: hf_posswap.supports(source, "rope", **trust),
    "export": lambda source, **trust: hf_posswap.export(source, "vllm", **trust),
    "push": lambda source, **trust: hf_posswap.push(source, "me/mine", dry_run=True, **trust),
    "auto_config": auto_config,
}
READERS: dict[str, Callable[..., Any]] = {
    "evaluate": lambda source, **trust: hf_posswap.evaluate(source, settings=SHORT, documents=["words " * 99], **trust),
    "load_tokenizer": lambda source, **trust: load_tokenizer(source, instead="save one", **trust),
    "auto_tokenizer": auto_tokenizer,
    "auto_processor": auto_processor,
}
ASKED = ("auto_config", "auto_tokenizer", "auto_processor")
"""Those that have no default."""


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hostile.CANARY, str(tmp_path / "canary"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))


@pytest.mark.parametrize("name", LOADERS)
def test_code_of_a_config_is_refused_by_default(tmp_path: Path, name: str) -> None:
    folder, trust = hostile.with_config_code(tmp_path / "model"), {"trust_remote_code": False} if name in ASKED else {}
    with pytest.raises(RemoteCodeError, match=r"cannot be read without running code .* trust_remote_code=True"):
        LOADERS[name](folder, **trust)
    assert not hostile.ran()


@pytest.mark.parametrize("name", READERS)
def test_code_of_a_tokenizer_is_refused_by_default(tmp_path: Path, name: str) -> None:
    folder, trust = hostile.with_tokenizer_code(tmp_path / "model"), {"trust_remote_code": False}
    with pytest.raises(RemoteCodeError, match="--trust-remote-code"):
        READERS[name](folder, **(trust if name in ASKED else {}))
    assert not hostile.ran()


def test_doctor_finds_that_a_config_is_code(tmp_path: Path) -> None:
    found = hf_posswap.doctor(hostile.with_config_code(tmp_path / "model"))
    assert not hostile.ran()
    assert any("running code" in finding.what and "--trust-remote-code" in finding.do for finding in found.findings)


@pytest.mark.parametrize("name", ["load", "export", "auto_config"])
def test_code_is_run_where_that_is_asked_for(tmp_path: Path, name: str) -> None:
    LOADERS[name](hostile.with_config_code(tmp_path / "model"), trust_remote_code=True)
    assert hostile.ran()


def test_a_generate_that_is_code_is_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = hostile.with_generation_code(tmp_path / "model")
    hf_posswap.load(folder)
    assert not hostile.ran()
    hf_posswap.load(folder, trust_remote_code=True)
    assert hostile.ran()


@pytest.mark.parametrize("given", [None, "yes", 1])
def test_nothing_but_true_and_false_is_taken(tmp_path: Path, given: object) -> None:
    with pytest.raises(OptionError, match="trust_remote_code is True or False, got"):
        hf_posswap.load(hostile.plain(tmp_path / "model"), trust_remote_code=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["half", "native"])
def test_an_auto_map_beside_a_class_of_transformers_asks_for_no_code(tmp_path: Path, kind: str) -> None:
    folder = hostile.with_tokenizer_code(tmp_path / "model")
    held = json.loads((folder / "tokenizer_config.json").read_text())
    native = "PreTrainedTokenizerFast" if kind == "half" else "TokenizersBackend"
    (folder / "tokenizer_config.json").write_text(json.dumps(held | {"tokenizer_class": native}))
    assert auto_tokenizer(folder, trust_remote_code=False)("text")["input_ids"]
    assert not hostile.ran()


@pytest.mark.parametrize("trust", [False, True])
def test_a_plugin_checkpoint_of_ours_runs_the_installed_package(tmp_path: Path, trust: bool) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
    hf_posswap.patch_model(model, "rope", max_length=32)
    model.save_pretrained(tmp_path / "swapped")
    bundled = tmp_path / "swapped" / "modeling_posswap.py"
    bundled.write_text(hostile.WRITES + bundled.read_text())
    loaded = hf_posswap.load(tmp_path / "swapped", trust_remote_code=trust).eval()
    assert not hostile.ran()
    ids = torch.arange(10)[None]
    assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_a_base_that_needs_code_is_named_where_an_adapter_asks_for_it(tmp_path: Path) -> None:
    base = hostile.with_config_code(tmp_path / "base")
    with pytest.raises(RemoteCodeError, match=str(base)):
        hf_posswap.load(hostile.adapter_on(tmp_path, base))
    assert not hostile.ran()


def test_a_sentence_model_whose_modules_are_code_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence_transformers is not installed")
    from hf_posswap.training.config.settings import ModelSettings
    from hf_posswap.training.engine.sentences import pooling_of

    folder = hostile.plain(tmp_path / "model")
    (folder / "unheard.py").write_text(f"{hostile.WRITES}\n\nclass Unheard:\n    pass\n")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "unheard.Unheard"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(RemoteCodeError, match="--trust-remote-code"):
        pooling_of(ModelSettings(str(folder)))
    assert not hostile.ran()


def test_a_config_that_its_class_refuses_is_no_readable_config(tmp_path: Path) -> None:
    folder = hostile.plain(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": {"deep": []}}))
    with pytest.raises(CheckpointError, match="holds no readable model config"):
        hf_posswap.explain(folder)


# What may call from_pretrained without the option: no Auto class, or the caller's own arguments are passed on.
PASSES_ON = {"checkpoints/auto.py": "super", "checkpoints/load.py": "peft.PeftModel",
             "compat/peft_wrappers.py": "PeftConfig"}  # fmt: skip
AUTO = ("utils/auto_classes.py", "utils/gguf_tokenizer.py")
"""Where Auto classes are called: the second reads files that bring no code."""
OWN_FILES = "testing/contract/"
"""Where the only checkpoints that are read were written a moment before."""
READS_CHECKPOINTS = ("from_pretrained", "SentenceTransformer", "pipeline")


def unasked(root: Path) -> Iterator[str]:
    """Give each call below `root` that reads a checkpoint and leaves it to a library whether its code runs."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            where, owner = path.relative_to(root).as_posix(), called.rpartition(".")[0]
            if called.rpartition(".")[2] not in READS_CHECKPOINTS or where.startswith(OWN_FILES):
                continue
            told = any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
            if "Auto" in called and where not in AUTO:
                yield f"{where}:{node.lineno}: {called} outside hf_posswap.utils.auto_classes"
            elif not told and not owner.startswith(PASSES_ON.get(where, "\0")):
                yield f"{where}:{node.lineno}: {called} without trust_remote_code"


@pytest.mark.parametrize("part", ["hf_posswap", "recipes"])
def test_every_call_that_reads_a_checkpoint_says_whether_its_code_runs(part: str) -> None:
    assert list(unasked(ROOT / part)) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", "outside hf_posswap.utils.auto_classes"),
        ("transformers.AutoTokenizer.from_pretrained(x)", "outside hf_posswap.utils.auto_classes"),
        ("chosen.from_pretrained(x)", "without trust_remote_code"),
        ("SentenceTransformer(x)", "without trust_remote_code"),
    ],
)
def test_the_search_finds_what_it_looks_for(tmp_path: Path, line: str, found: str) -> None:
    (tmp_path / "module.py").write_text(line)
    assert [line.endswith(found) for line in unasked(tmp_path)] == [True]


def test_the_class_of_a_swapped_model_reads_its_checkpoint_without_a_false_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
    stock = tmp_path / "stock"
    model.save_pretrained(stock)
    hf_posswap.patch_model(model, "rope", max_length=32)
    model.save_pretrained(tmp_path / "swapped")
    caplog.clear()
    loaded = type(model).from_pretrained(tmp_path / "swapped").eval()
    ids = torch.arange(10)[None]
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert vars(loaded.config).keys() == vars(hf_posswap.load(tmp_path / "swapped").config).keys()
    assert "to instantiate a model of type" not in caplog.text
    from transformers import LlamaConfig

    LlamaConfig.from_pretrained(stock)  # transformers' warning is still there where it is true
    assert "to instantiate a model of type" in caplog.text
