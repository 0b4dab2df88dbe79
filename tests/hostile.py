"""Checkpoints that bring code of their own, which leaves a file behind wherever it is run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap.checkpoints.adapters import without_peft_warning
from hf_posswap.training import byte_tokenizer

CANARY = "POSSWAP_TEST_CANARY"
"""In the environment: the file that such code writes."""

WRITES = f"""
import os
import pathlib

pathlib.Path(os.environ[{CANARY!r}]).write_text("code of a checkpoint was run")
"""


def plain(folder: Path) -> Path:
    """Write a tiny GPT-2 with a tokenizer of bytes to `folder`, which brings no code, and return the folder."""
    torch.manual_seed(1)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 257, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=256, eos_token_id=256)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def with_config_code(folder: Path) -> Path:
    """Write to `folder` a GPT-2 whose config class is code beside it, and return the folder."""
    code = f"{WRITES}\nfrom transformers import GPT2Config\n\n\nclass UnheardConfig(GPT2Config):\n"
    (plain(folder) / "configuration_unheard.py").write_text(code + '    model_type = "unheard"\n')
    named = {"model_type": "unheard", "auto_map": {"AutoConfig": "configuration_unheard.UnheardConfig"}}
    return _set(folder / "config.json", named)


def with_tokenizer_code(folder: Path) -> Path:
    """Write to `folder` a GPT-2 whose tokenizer is code beside it, and return the folder."""
    code = f"{WRITES}\nfrom transformers import PreTrainedTokenizerFast\n\n\n"
    code += "class UnheardTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    (plain(folder) / "tokenization_unheard.py").write_text(code)
    named = {"AutoTokenizer": [None, "tokenization_unheard.UnheardTokenizer"]}
    return _set(folder / "tokenizer_config.json", {"tokenizer_class": "UnheardTokenizer", "auto_map": named})


def with_processor_code(folder: Path) -> Path:
    """Write to `folder` a GPT-2 whose processor is code beside it, and return the folder."""
    code = f"{WRITES}\nfrom transformers import ProcessorMixin\n\n\nclass UnheardProcessor(ProcessorMixin):\n"
    (plain(folder) / "processing_unheard.py").write_text(code + "    pass\n")
    named = {
        "processor_class": "UnheardProcessor",
        "auto_map": {"AutoProcessor": "processing_unheard.UnheardProcessor"},
    }
    return _set(folder / "processor_config.json", named)


def with_image_code(folder: Path) -> Path:
    """Write to `folder` a GPT-2 beside which an image processor lies that is code, and return the folder."""
    code = f"{WRITES}\nfrom transformers import BaseImageProcessor\n\n\nclass UnheardImages(BaseImageProcessor):\n"
    (plain(folder) / "image_unheard.py").write_text(code + "    pass\n")
    named = {"image_processor_type": "UnheardImages", "auto_map": {"AutoImageProcessor": "image_unheard.UnheardImages"}}
    return _set(folder / "preprocessor_config.json", named)


def with_generation_code(folder: Path) -> Path:
    """Write to `folder` a GPT-2 with a `generate` of its own, and return the folder: nothing else of it needs code."""
    (plain(folder) / "custom_generate").mkdir()
    code = f"{WRITES}\n\ndef generate(model, *args, **kwargs):\n    return None\n"
    (folder / "custom_generate" / "generate.py").write_text(code)
    return folder


def adapter_on(folder: Path, base: Path) -> Path:
    """Write to `folder` a LoRA adapter that names `base`, and return the folder."""
    import peft

    model = GPT2LMHeadModel.from_pretrained(plain(folder / "plain"))
    with without_peft_warning():
        peft.get_peft_model(model, peft.LoraConfig(r=1)).save_pretrained(folder / "adapter")
    return _set(folder / "adapter" / "adapter_config.json", {"base_model_name_or_path": str(base)})


def ran() -> bool:
    """Return whether code of a checkpoint was run."""
    return Path(os.environ[CANARY]).exists()


MAKERS: dict[str, Callable[[Path], Path]] = {
    "config": with_config_code,
    "tokenizer": with_tokenizer_code,
    "processor": with_processor_code,
    "images": with_image_code,
    "generation": with_generation_code,
}


def _set(path: Path, values: dict[str, object]) -> Path:
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(held | values))
    return path.parent
