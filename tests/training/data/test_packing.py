"""Each packing does what it says, on models and under both implementations of attention."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

from hf_posswap import patch_model, unpatch_model
from hf_posswap.errors import DataError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.data import (
    Collate,
    DataSettings,
    Packing,
    Source,
    TokenData,
    build_data,
    document_mask,
    proof,
    prove_packing,
)
from tests.training.tiny_models import WINDOW, tiny

TARGET = 4 * WINDOW
CAUSAL = [
    ("gpt2", "rope"),
    ("gpt2", "alibi"),
    ("gpt2", "learned"),
    ("llama", "yarn"),
    ("llama", "alibi"),
    ("llama", None),
]
ENCODERS = ["rope", "alibi", "learned"]


def masked_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer of lower-case letters with BERT's special tokens."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **named)


def texts(folder: Path, lengths: list[int]) -> Source:
    """Write documents of these lengths, each of random letters."""
    random = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        (folder / f"{number:03}.txt").write_text("".join(random.choice(list("abcdefghij"), length)))
    return Source(str(folder))


LENGTHS = {
    "none": [150, 90, 30],
    "documents": [20, 25, 9, 150],
    "concatenated": [20, 25, 9, 150],
    "pose": [300, 200],
    "random-positions": [300, 200],
}


def built(
    tmp_path: Path, packing: Packing, *, causal: bool = True, lengths: list[int] | None = None, first_position: int = 0
) -> TokenData:
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    source = texts(folder, (lengths or LENGTHS[packing]) * 8)
    settings = DataSettings((source,), length=WINDOW, packing=packing, cache=tmp_path / "cache", held_out=0.2)
    tokenizer = byte_tokenizer() if causal else masked_tokenizer()
    return build_data(settings, tokenizer, causal=causal, scheme_length=TARGET, first_position=first_position)


def swapped(kind: str, scheme: str | None, attention: str) -> Any:
    model = tiny(kind, attention)
    if scheme is not None:
        patch_model(model, scheme, max_length=TARGET)
    return model


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "scheme"), CAUSAL)
def test_packed_documents_are_computed_as_if_each_were_alone(
    tmp_path: Path, kind: str, scheme: str | None, attention: str
) -> None:
    data = built(tmp_path, "documents")
    model = swapped(kind, scheme, attention)
    packed = next(k for k in range(len(data.train)) if (data.train[k]["position_ids"] == 0).sum() >= 2)
    batch = data.collate([data.train[packed], data.train[packed + 1]])
    found = logits(model, batch)[0]
    compare_alone(model, batch, found)
    leaking = logits(model, batch | {"attention_mask": torch.ones_like(batch["input_ids"])})[0]
    second = int((batch["position_ids"][0] == 0).nonzero()[1])
    assert (leaking - found)[second:].abs().max() > 1e-3, "an all-ones mask leaks: the comparison has no power"
    prove_packing(model, data)


def compare_alone(model: Any, batch: dict[str, Any], found: torch.Tensor) -> None:
    """Compare each document of the batch's first row with the same document run alone, without mask or positions."""
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    compared = 0
    for start, stop in zip(starts, [*starts[1:], WINDOW], strict=True):
        if stop - start < 2:  # filled up
            continue
        alone = logits(model, {"input_ids": batch["input_ids"][:1, start:stop]})[0]
        torch.testing.assert_close(found[start:stop], alone, atol=2e-5, rtol=1e-4)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", [None, *ENCODERS])
def test_packed_documents_of_an_encoder_are_computed_as_if_each_were_alone(
    tmp_path: Path, scheme: str | None, attention: str
) -> None:
    data = built(tmp_path, "documents", causal=False)
    model = swapped("bert", scheme, attention)
    packed = next(k for k in range(len(data.train)) if (data.train[k]["position_ids"] == 0).sum() >= 2)
    batch = data.collate([data.train[packed]])
    compare_alone(model, batch, logits(model, batch)[0])
    prove_packing(model, data)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", ["pose", "random-positions"])
@pytest.mark.parametrize(("kind", "scheme"), [pair for pair in CAUSAL if pair[1]])
def test_jumping_positions_attend_across_and_are_in_force(
    tmp_path: Path, kind: str, scheme: str, packing: Packing, attention: str
) -> None:
    data = built(tmp_path, packing)
    model = swapped(kind, scheme, attention)
    item = next(k for k in range(99) if (data.train[k]["position_ids"].diff() > 1).any())
    batch = data.collate([data.train[item]])
    found = logits(model, batch)
    changed = batch["input_ids"].clone()
    changed[0, 0] = 7
    assert (logits(model, batch | {"input_ids": changed}) - found)[0, -1].abs().max() > 1e-4  # across every jump
    ordinary = {name: value for name, value in batch.items() if name != "position_ids"}
    assert (logits(model, ordinary) - found).abs().max() > 1e-3
    cut_off = {name: value for name, value in batch.items() if name != "attention_mask"}
    assert (logits(model, cut_off) - found).abs().max() > 1e-3  # what transformers makes of it without the mask
    prove_packing(model, data)


@pytest.mark.parametrize("kind", ["BloomForCausalLM", "MptForCausalLM"])
def test_a_model_whose_own_code_drops_position_ids(tmp_path: Path, kind: str) -> None:
    """Swapped, its positions jump as they should; its masks know of no documents, and the proof says so."""
    model = tiny_model(kind, meta=False, vocab_size=300)
    patch_model(model, "rope", max_length=TARGET)
    prove_packing(model, built(tmp_path, "pose"))
    prove_packing(model, built(tmp_path, "random-positions"))
    with pytest.raises(UnsupportedSwapError, match="given to .* without an attention_mask.* documents would see"):
        prove_packing(model, built(tmp_path, "documents"))
    unpatch_model(model)
    with pytest.raises(DataError, match="its forward ignores position_ids"):
        prove_packing(model, built(tmp_path, "pose"))


@pytest.mark.parametrize("scheme", ["learned", "rope"])
def test_a_model_whose_positions_begin_elsewhere(tmp_path: Path, scheme: str) -> None:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = RobertaConfig(
        vocab_size=99, pad_token_id=0, max_position_embeddings=WINDOW + 1, initializer_range=0.2, **shape
    )
    model = RobertaForMaskedLM(config).eval()
    patch_model(model, scheme, max_length=TARGET)
    first = locate(model).first_position
    assert first == 1
    data = built(tmp_path, "documents", causal=False, first_position=first)
    batch = data.collate(
        [next(w for w in map(data.train.__getitem__, range(99)) if (w["position_ids"] == 1).sum() > 1)]
    )
    found = logits(model, batch)[0]
    starts = (batch["position_ids"][0] == 1).nonzero().flatten().tolist()
    stop = starts[1]
    alone = logits(model, {"input_ids": batch["input_ids"][:1, :stop]})[0]
    torch.testing.assert_close(found[:stop], alone, atol=2e-5, rtol=1e-4)
    prove_packing(model, data)
    jumping = built(tmp_path, "pose", causal=False, first_position=first)
    prove_packing(model, jumping)
    with torch.no_grad():
        for k in range(30):
            model(**jumping.collate([jumping.train[k]]))


def test_the_proof_catches_a_leak_a_wall_and_positions_without_effect(tmp_path: Path) -> None:
    model = swapped("gpt2", "rope", "sdpa")
    forward = model.forward
    model.forward = lambda **batch: forward(**batch | {"attention_mask": torch.ones_like(batch["input_ids"])})
    with pytest.raises(DataError, match=r"packing 'documents' on GPT2LMHeadModel: .*documents leak into one another"):
        prove_packing(model, built(tmp_path, "documents"))
    model.forward = lambda **batch: forward(**batch | {"attention_mask": None})
    with pytest.raises(DataError, match=r"packing 'pose' .*treats the pieces as packed documents"):
        prove_packing(model, built(tmp_path, "pose"))
    model.forward = lambda **batch: forward(**batch | {"position_ids": None})
    with pytest.raises(DataError, match="the positions that training gives have no effect"):
        prove_packing(model, built(tmp_path, "random-positions"))
    no_positions = swapped("llama", "nope", "sdpa")
    with pytest.raises(DataError, match="or its scheme has no positions"):
        prove_packing(no_positions, built(tmp_path, "pose"))
    encoder = swapped("bert", None, "sdpa")
    whole = encoder.forward
    encoder.forward = lambda **batch: whole(**batch | {"position_ids": None})
    with pytest.raises(DataError, match="its positions do not restart"):
        prove_packing(encoder, built(tmp_path, "documents", causal=False))


def test_the_proof_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = swapped("gpt2", "rope", "sdpa").train()
    prove_packing(model, built(tmp_path, "pose"))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    prove_packing(model, built(tmp_path, "none"))


def test_padding_is_masked_and_not_counted(tmp_path: Path) -> None:
    data = built(tmp_path, "none")
    model = swapped("llama", "yarn", "sdpa")
    short = next(item for item in map(data.train.__getitem__, range(99)) if not item["attention_mask"].all())
    n = int(short["attention_mask"].sum())
    assert (short["labels"][n:] == -100).all()
    assert (short["labels"][1:n] == short["input_ids"][1:n]).all()
    alone = {"input_ids": short["input_ids"][None, :n], "labels": short["input_ids"][None, :n]}
    torch.testing.assert_close(model(**data.collate([short])).loss, model(**alone).loss)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_of_an_encoder_in_bfloat16(tmp_path: Path, attention: str) -> None:
    model = swapped("bert", "rope", attention).to(torch.bfloat16)
    data = built(tmp_path, "documents", causal=False)
    with pytest.raises(DataError, match=r"mask of packed documents is torch.float32, .* computes in torch.bfloat16"):
        prove_packing(model, data)
    prove_packing(model, dataclasses.replace(data, collate=Collate(False, torch.bfloat16)))


def test_a_document_mask_is_the_definition() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    mask = document_mask(positions)
    for row, documents in enumerate(([0, 0, 0, 1, 1, 2, 3], [0] * 7)):
        for i in range(7):
            for j in range(7):
                assert (mask[row, 0, i, j] == 0) == (documents[i] == documents[j])


def test_logits_that_are_no_numbers_differ() -> None:
    one = torch.ones(2, 3)
    assert not proof._differ(one, one, 1e-5)
    assert proof._differ(one, one.index_fill(1, torch.tensor([1]), torch.nan), 1e-5)
