"""The loops of other libraries in loops.md, run as they are printed, on tiny models and this Python's own text."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed

import hf_posswap
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.training import byte_tokenizer
from tests.docs.pages import blocks

LOOPS = {block.detail: block.code for block in blocks("loop") if not block.detail.endswith("-diff")}
DIFFS = {block.detail: block.code for block in blocks("loop") if block.detail.endswith("-diff")}
NEEDS = {"trl": "trl", "trl-diff": "trl", "sentences": "sentence_transformers", "lm-eval": "lm_eval"}
WINDOW = 64


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with the model, the encoder, the texts and the task that the loops name."""
    set_seed(0)
    words = byte_tokenizer()
    small = {"vocab_size": len(words), "bos_token_id": 256, "eos_token_id": 256}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=WINDOW, **small))
    model.save_pretrained(tmp_path / "my-gpt2")
    words.save_pretrained(tmp_path / "my-gpt2")
    (tmp_path / "books").mkdir()
    texts = [document.text for document in python_corpus().held_out[:16]]
    for number, text in enumerate(texts):
        (tmp_path / "books" / f"{number}.txt").write_text(text[:3000], encoding="utf-8")
    rows = [json.dumps({"text": text[:200]}) for text in texts[:3]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    task = {"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}}
    task |= {
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
    }
    task |= {"metric_list": [{"metric": "bits_per_byte"}]}
    (tmp_path / "my-task.yaml").write_text(json.dumps(task))  # JSON is YAML
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def encoder(folder: Path) -> None:
    """Write a tiny sentence encoder of `WINDOW` positions to `folder`."""
    from sentence_transformers import SentenceTransformer, models

    words = byte_tokenizer()
    words.pad_token = words.eos_token
    size = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=WINDOW, **size)).save_pretrained(
        folder / "bert"
    )
    words.save_pretrained(folder / "bert")
    inner = models.Transformer(str(folder / "bert"))
    SentenceTransformer(modules=[inner, models.Pooling(16)]).save_pretrained(str(folder / "my-encoder"))


def run(name: str) -> dict[str, Any]:
    """Return the names that the loop `name` leaves behind; skip, loudly, where its library is missing."""
    if find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{NEEDS[name]} is not installed: the loop with it is not tested")
    names: dict[str, Any] = {"__name__": "__main__"}
    for part in ("start", name):
        exec(compile(LOOPS[part], f"loops.md, loop {part}", "exec"), names)
    return names


def test_all_loops_are_printed() -> None:
    assert set(LOOPS) | set(DIFFS) == {"start", "trainer", "accelerate", "trainer-diff", *NEEDS}


TRL_ASKS = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # by TRL's default


@pytest.mark.parametrize("name", ["trainer", "accelerate", pytest.param("trl", marks=TRL_ASKS)])
def test_a_loop_trains_a_swapped_model_and_saves_its_swap(name: str, place: Path) -> None:
    before = hf_posswap.patch_model(GPT2LMHeadModel.from_pretrained("my-gpt2"), "rope", max_length=512)
    after, loaded = run(name)["model"].eval(), hf_posswap.load("run/model").eval()
    assert hf_posswap.swap_plan(loaded).scheme.name == "rope"
    tokens = torch.tensor([list((place / "books" / "0.txt").read_bytes()[:400])])  # far beyond the table
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, after(tokens).logits)
        losses = [float(model(tokens, labels=tokens).loss) for model in (before.eval(), after)]
    assert losses[1] < losses[0] - 0.1


def applied(diff: str, *, drop: str) -> str:
    """Return the script before (drop "+") or after (drop "-") a diff without line numbers."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith(drop))


@pytest.mark.parametrize("name", ["trainer-diff", pytest.param("trl-diff", marks=TRL_ASKS)])
def test_three_lines_swap_a_script_that_runs_without_them(name: str, place: Path) -> None:
    if find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{NEEDS[name]} is not installed: the diff with it is not tested")
    set_seed(0)
    words = byte_tokenizer()
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    size["max_position_embeddings"] = 128  # the rows of the loops have 512 tokens
    config = LlamaConfig(vocab_size=len(words), bos_token_id=256, **size)
    LlamaForCausalLM(config).save_pretrained("my-llama")
    words.save_pretrained("my-llama")
    for drop, kind in (("+", "default"), ("-", "yarn")):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(LOOPS["start"], "loops.md, loop start", "exec"), names)
        exec(compile(applied(DIFFS[name], drop=drop), f"loops.md, {name} without {drop}", "exec"), names)
        stock = LlamaForCausalLM.from_pretrained("run/model")
        assert stock.config.rope_parameters["rope_type"] == kind


@pytest.mark.slow
def test_a_sentence_encoder_trains_saves_and_loads_with_its_swap(place: Path) -> None:
    pytest.importorskip(
        "sentence_transformers", reason="sentence_transformers is not installed: its loop is not tested"
    )
    encoder(place)
    from sentence_transformers import SentenceTransformer

    trained = run("sentences")["encoder"]
    loaded, text = SentenceTransformer("run/encoder"), (place / "books" / "0.txt").read_text(encoding="utf-8")
    assert loaded.max_seq_length == 512
    assert hf_posswap.swap_plan(loaded[0].auto_model).scheme.name == "alibi"
    new, old = (model.encode([text[:400]], convert_to_tensor=True) for model in (loaded, trained))
    assert torch.equal(new.cpu(), old.cpu())
    base = SentenceTransformer("my-encoder")[0].auto_model.state_dict()
    moved = {
        name
        for name, value in loaded[0].auto_model.state_dict().items()
        if not torch.equal(value, base.get(name, value))
    }
    assert any("attention" in name for name in moved)


@pytest.mark.slow
def test_the_harness_measures_a_swapped_model(place: Path) -> None:
    scores = run("lm-eval")["scores"]["mine"]
    assert 0 < scores["bits_per_byte,none"] < 16
