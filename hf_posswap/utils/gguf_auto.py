"""What the Auto classes of transformers make of a GGUF file. It brings no code; the rest of its folder is not read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_posswap.utils.atomic_io import scratch_folder
from hf_posswap.utils.threads import quiet_logger


def read_gguf_config(path: Path) -> Any:
    """Return the config that AutoConfig reads from the file at `path`; it raises whatever transformers raises."""
    from transformers import AutoConfig

    with _alone(path) as file:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)


def read_gguf_model(path: Path, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return the causal language model of the file at `path`, and what transformers says about its weights."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with _alone(path) as file:
        model, info = auto.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
        )
    return model, info


def count_gguf_weights(config: Any) -> int:
    """Return how many weights the causal language model of `config` has, which is built without memory for them."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def read_gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer that AutoTokenizer reads from the file at `path`."""
    from transformers import AutoTokenizer

    with _alone(path) as file, quiet_logger("transformers", logging.ERROR):  # it says that it makes merges itself
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Give a link to the file, by itself in a folder: transformers reads a tokenizer's config in its folder.

    The link has a plain name, whatever bytes that of the file consists of.
    """
    with scratch_folder() as folder:
        link = folder / "model.gguf"
        try:
            os.symlink(path.resolve(), link)
        except OSError:  # a system without links
            link = path
        yield link
