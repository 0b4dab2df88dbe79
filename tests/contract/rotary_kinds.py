"""Tiny random models of each kind of rotary that transformers has: its layout, its width, its layers, what it is in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.contract.models import QV, Tiny

_TWO: dict[str, Any] = {"num_hidden_layers": 2}


def _kind(name: str, config: str, projections: tuple[str, ...] = QV, **values: Any) -> Tiny:
    return Tiny(f"{name}ForCausalLM", f"{config}Config", values, projections, shrunk=True)


KINDS_OF_ROTARY: dict[str, Tiny] = {
    "gemma3 (frequencies by layer type)": _kind("Gemma3", "Gemma3Text"),
    "llama4 (complex numbers, some layers still)": _kind("Llama4", "Llama4Text"),
    "deepseek_v3 (latent, interleaved)": _kind("DeepseekV3", "DeepseekV3", ("q_b_proj", "kv_b_proj"), **_TWO),
    "gpt_oss (cos of half a head)": _kind("GptOss", "GptOss"),
    "nanochat (the other way round)": _kind("NanoChat", "NanoChat", **_TWO),
    "qwen3_5 (sections of a text tower)": replace(_kind("Qwen3_5", "Qwen3_5Text"), rounding=1e-3),
    "lfm2 (convolutions between)": _kind("Lfm2", "Lfm2"),
    "modernbert (an encoder of two types of layers)": Tiny(
        "ModernBertForMaskedLM", "ModernBertConfig", _TWO, ("Wqkv",), generates=False, shrunk=True
    ),
    "dbrx": _kind("Dbrx", "Dbrx", ("Wqkv",), n_layers=2),
    "hrm_text": replace(_kind("HrmText", "HrmText"), rounding=5e-4),
    # PEFT merges an adapter of the blocks that its layers share once for each
    "zamba2": replace(_kind("Zamba2", "Zamba2", ("in_proj",)), rounding=2e-4, steps=False),
}
