"""Text, tokens and a training loop that goes on where it stopped."""

from hf_posswap.corpus import Corpus, Document, python_corpus, split
from hf_posswap.tokens import check_token_ids, leading_tokens, token_stream
from hf_posswap.training.loop import Trained, TrainSettings, train
from hf_posswap.training.tokenizer import byte_tokenizer
from hf_posswap.training.windows import Windows

__all__ = [
    "Corpus",
    "Document",
    "TrainSettings",
    "Trained",
    "Windows",
    "byte_tokenizer",
    "check_token_ids",
    "leading_tokens",
    "python_corpus",
    "split",
    "token_stream",
    "train",
]
