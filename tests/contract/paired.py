"""Tiny random encoder-decoders, one a family: every point that is about tokens runs on each of their stacks."""

from __future__ import annotations

from typing import Any

from hf_posswap.testing.contract.models import SMALL, START, T5
from tests.contract.models import LENGTH, QV, Tiny

_BART: dict[str, Any] = START | {
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,  # what is of the one stack does not fit the other
    "max_position_embeddings": LENGTH,
    "init_std": 0.2,
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0
    ),
    "forced_eos_token_id": None,
}
_LED: dict[str, Any] = {
    **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
    "max_encoder_position_embeddings": LENGTH,
    "max_decoder_position_embeddings": LENGTH,
    "attention_window": 8,
}
_WHISPER: dict[str, Any] = {
    **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
    "max_target_positions": LENGTH,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
_TWO = {"num_hidden_layers": 2}
_GEMMA = _TWO | {"attn_logit_softcapping": None}  # older releases run it by sdpa, which has no such thing
_T5GEMMA: dict[str, Any] = START | {"encoder": _GEMMA, "decoder": _GEMMA}
_T5GEMMA2: dict[str, Any] = START | {"encoder": {"text_config": _TWO}, "decoder": _TWO}


def _bart(kind: str, **values: Any) -> Tiny:
    return Tiny(f"{kind}ForConditionalGeneration", f"{kind}Config", _BART | values, QV, paired=True)


def _t5(kind: str, **values: Any) -> Tiny:
    return Tiny(f"{kind}ForConditionalGeneration", f"{kind}Config", T5 | values, ("q", "v"), paired=True, inside="t5")


PAIRED: dict[str, Tiny] = {
    "bart": _bart("Bart"),
    "mvp": _bart("Mvp"),
    "blenderbot": _bart("Blenderbot"),
    "bigbird_pegasus": _bart("BigBirdPegasus", attention_type="original_full"),
    "marian": Tiny("MarianMTModel", "MarianConfig", _BART, QV, paired=True),
    "m2m_100": _bart("M2M100"),
    "led": Tiny("LEDForConditionalGeneration", "LEDConfig", _LED, QV, paired=True),
    "whisper": Tiny("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, QV, paired=True, hears=True),
    "t5": SMALL["t5"],
    "umt5": _t5("UMT5"),  # a table in each layer
    "longt5": _t5("LongT5"),
    "t5gemma": Tiny("T5GemmaForConditionalGeneration", "T5GemmaConfig", _T5GEMMA, QV, paired=True, shrunk=True),
    "t5gemma2": Tiny(
        "T5Gemma2ForConditionalGeneration", "T5Gemma2Config", _T5GEMMA2, QV, paired=True, merged=True, shrunk=True
    ),
}
"""One model of each family of two stacks, or of one of two behind another."""
