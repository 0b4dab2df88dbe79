"""The byte tokenizer is the bytes; streams and first tokens are those of the documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hf_posswap.errors import DataError
from hf_posswap.training import Document, Windows, byte_tokenizer, check_token_ids, leading_tokens, token_stream

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


def test_leading_tokens_are_of_documents_that_are_long_enough() -> None:
    documents = [Document(str(n), "ab" * n) for n in (1, 5, 2, 4, 3)]
    names, tokens = leading_tokens(documents, TOKENIZER, length=7, limit=2)
    assert names == ["5", "4"]
    assert tokens.tolist() == [[256, *b"ababab"]] * 2
    with pytest.raises(DataError, match="1 of 5 held-out documents have 10 tokens, at least 2"):
        leading_tokens(documents, TOKENIZER, length=10, limit=9)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    check_token_ids(model, np.array([[0, 15]]))
    with pytest.raises(DataError, match=r"run from 3 to 16, and GPT2LMHeadModel has embeddings for 0 to 15"):
        check_token_ids(model, np.array([3, 16]))


def test_windows_are_pieces_of_the_stream_and_depend_on_seed_and_step_alone() -> None:
    windows = Windows(np.arange(1000), length=16, batch=4, seed=3)
    batch = windows.at(5)
    assert batch.shape == (4, 16)
    assert (batch.diff(dim=1) == 1).all()
    assert (batch == Windows(np.arange(1000), length=16, batch=4, seed=3).at(5)).all()
    assert (batch != windows.at(6)).any()
    assert (batch != Windows(np.arange(1000), length=16, batch=4, seed=4).at(5)).any()


def test_windows_reach_the_first_and_the_last_token() -> None:
    windows = Windows(np.arange(10), length=8, batch=64, seed=0)
    assert sorted(set(windows.at(0)[:, 0].tolist())) == [0, 1, 2]


@pytest.mark.parametrize(("tokens", "length", "batch"), [(10, 1, 1), (10, 4, 0), (3, 4, 1)])
def test_impossible_windows_are_refused(tokens: int, length: int, batch: int) -> None:
    with pytest.raises(DataError, match="at least 2 tokens and a batch|need a stream at least that long"):
        Windows(np.arange(tokens), length=length, batch=batch, seed=0)
