"""The byte tokenizer is the bytes; streams and first tokens are those of the documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hf_posswap.errors import DataError
from hf_posswap.training import Document, byte_tokenizer, check_token_ids, token_stream

TOKENIZER = byte_tokenizer()


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"])).filter(lambda text: "<|endoftext|>" not in text))
def test_ids_are_bytes_and_decode_to_the_text(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_it_loads_again_by_the_auto_class(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    return  'ä' . \t\n"
    assert again(text)["input_ids"] == list(text.encode())
    assert (again.bos_token_id, again.eos_token_id, len(again)) == (256, 256, 257)
    assert again.decode(list(text.encode())) == text


def test_a_stream_is_whole_documents_up_to_the_limit() -> None:
    documents = [Document("a", "xy"), Document("b", "z"), Document("c", "never")]
    assert token_stream(documents, TOKENIZER, limit=4).tolist() == [256, *b"xy", 256, *b"z"]
    assert bytes(token_stream(documents, TOKENIZER)[-5:].astype(np.uint8)) == b"never"
    with pytest.raises(DataError, match="0 documents gave no token"):
        token_stream([], TOKENIZER)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    check_token_ids(model, np.array([[0, 15]]))
    with pytest.raises(DataError, match=r"run from 3 to 16, and GPT2LMHeadModel has embeddings for 0 to 15"):
        check_token_ids(model, np.array([3, 16]))
