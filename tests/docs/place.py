"""A folder with what the pages name: tiny models, a tokenizer that reads bytes, this Python's own texts, and chats."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    ViTConfig,
    ViTModel,
    set_seed,
)

from hf_posswap.text.stdlib import python_corpus
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.fresh import FreshSettings, fresh_model, fresh_tokenizer
from tests.docs.pages import ROOT

TEXT = 2000
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def furnish(folder: Path) -> None:
    """Write my-gpt2, my-qwen-vl (128 positions), my-llama, my-instruct, my-encoder (64), my-vit, texts and chats."""
    set_seed(0)
    words = byte_tokenizer()
    small = {"vocab_size": len(words), "bos_token_id": 256, "eos_token_id": 256}
    llama = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=True, **small,
    )  # fmt: skip
    vit = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    bert = FreshSettings("bert", window=64, layers=2, width=32, heads=2, vocabulary=0)
    letters = fresh_tokenizer(bert, [])
    models: dict[str, PreTrainedModel] = {
        "my-gpt2": GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=128, **small)),
        "my-llama": LlamaForCausalLM(llama),
        "my-instruct": LlamaForCausalLM(llama),
        "my-encoder": fresh_model(bert, letters),
        "my-qwen-vl": Qwen2_5_VLForConditionalGeneration(qwen_vl()),
        "my-vit": ViTModel(ViTConfig(image_size=32, patch_size=8, **vit), add_pooling_layer=False),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        if name != "my-vit":
            (letters if name == "my-encoder" else words).save_pretrained(folder / name)
    (folder / "my-instruct" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    sums = [[("user", f"What is {n} + 2?"), ("assistant", f"{n + 2}.")] for n in range(40)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in sums]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
    texts = [document.text for document in python_corpus().train if len(document.text) > TEXT]
    for name, some in {"books": texts[:12], "other-books": texts[12:24]}.items():
        (folder / name).mkdir()
        for number, text in enumerate(some):
            (folder / name / f"{number}.txt").write_text(text[:TEXT], encoding="utf-8")


def qwen_vl() -> Qwen2_5_VLConfig:
    """Return the config of a tiny Qwen2.5-VL, with 128 positions and three axes of positions in its text part."""
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128, "bos_token_id": 256}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    text |= {"eos_token_id": 256, "rope_parameters": rope}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command in `folder`: this Python's programs, this checkout, a cache of its own."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return os.environ | paths | {"HF_POSSWAP_CACHE": str(folder / "cache"), "COLUMNS": "200"}
