"""New models are what they are said to be, the same for a seed; tokenizers give every text back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_posswap import describe_positions
from hf_posswap.errors import DataError, OptionError
from hf_posswap.training.fresh import KINDS, FreshSettings, fresh_model, fresh_tokenizer

TEXTS = [f"the cat number {n} sat on mat {n % 7}, 你好 and\n\tran" for n in range(400)]
SMALL: dict[str, Any] = {"window": 32, "layers": 2, "width": 32, "heads": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_what_it_is_said_to_be(kind: Any) -> None:
    settings = FreshSettings(kind, vocabulary=0, **SMALL)
    tokenizer = fresh_tokenizer(settings, TEXTS)
    model = fresh_model(settings, tokenizer)
    torch.manual_seed(99)
    again = fresh_model(settings, tokenizer)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    positions = describe_positions(model)
    assert positions.geometry.causal == (kind != "bert")
    assert positions.geometry.original_length == 32
    assert positions.geometry.num_layers == 2
    assert (positions.geometry.base is not None) == (kind == "llama")
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [0, 300])
def test_a_tokenizer_gives_texts_back_also_loaded(tmp_path: Any, kind: Any, vocabulary: int) -> None:
    tokenizer = fresh_tokenizer(FreshSettings(kind, vocabulary=vocabulary, **SMALL), TEXTS)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat sat . On\n mat", "né 漢字 🙂", TEXTS[3]):
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert loaded.decode(ids) == text
        assert not vocabulary or len(ids) < len(text.encode()) or text not in TEXTS
    assert len(loaded) == (vocabulary or 256 + (4 if kind == "bert" else 1))
    whole = loaded("the cat")["input_ids"]
    assert (whole[0], whole[-1]) == (loaded.cls_token_id, loaded.sep_token_id) or kind != "bert"
    assert (loaded.mask_token_id is not None) == (kind == "bert")


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(OptionError, match=r"kind is one of gpt2, llama, bert, got 't5'; window .*; width .* 30; vocab"):
        FreshSettings("t5", 0, 1, 30, 4, 100)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"the text yields merges for only \d+ of 5000 requested tokens"):
        fresh_tokenizer(FreshSettings(vocabulary=5000), TEXTS[:3])
