"""A program: llama.cpp's convert_hf_to_gguf.py, for a tiny model with a byte-level BPE that it cannot know.

Usage: converter_child.py SOURCE ARGUMENTS. SOURCE is llama.cpp's; ARGUMENTS are the converter's own.
"""

from __future__ import annotations

import sys
from typing import Any


def no_sentencepiece(*_: Any, **__: Any) -> None:
    """Say what the converter says where there is no tokenizer.model; it imports a package before it looks."""
    raise FileNotFoundError


if __name__ == "__main__":
    sys.path.insert(0, sys.argv.pop(1))
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"  # it knows tokenizers by a hash of what they make of one text
    TextModel._set_vocab_sentencepiece = no_sentencepiece
    convert_hf_to_gguf.main()
