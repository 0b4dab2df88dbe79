"""Names of saved files, held against what the transformers that is installed writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase, ViTImageProcessor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from hf_posswap.compat import transformers_saved
from hf_posswap.compat.transformers_saved import WEIGHTS
from hf_posswap.training.fresh import byte_tokenizer


def test_saved_names_are_those_that_are_written(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).save_pretrained(tmp_path)
    ViTImageProcessor().save_pretrained(tmp_path)
    tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    names = set(os.listdir(tmp_path))
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} < names
    assert names <= transformers_saved.saved_names(None)


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
    assert transformers_saved.saved_names(kind) - transformers_saved.saved_names(None) == written


def test_the_index_of_weights_has_its_name() -> None:
    assert set(WEIGHTS.values()) == {SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME}
