"""A byte-level Hugging Face fast tokenizer: 256 symbols and an end of text, no merges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are the bytes of the UTF-8 text, and 256 for the end of a text.

    Saved with a checkpoint, it loads with `AutoTokenizer`.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("né")["input_ids"], tokenizer.decode([110, 195, 169])
        ([110, 195, 169], 'né')
    """
    from transformers import PreTrainedTokenizerFast

    symbols = _symbols()
    vocabulary = {symbols[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    # cleaning up would change " ." into "."
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _symbols() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies (Radford et al. 2019, GPT-2).

    Bytes that Latin-1 prints stand for themselves, the others for the characters from U+0100 on, in order.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]
