"""What the stock classes of the tiny models do not do themselves: facts of transformers, by the names of the models."""

from __future__ import annotations

from typing import Any

from hf_posswap.testing.contract.models import Limits

LEAKY = (
    *("bert (is_decoder)", "opt", "house", "bloom", "falcon", "biogpt", "xglm", "mpt", "openai-gpt"),
    *("t5gemma", "gpt_oss (cos of half a head)", "qwen3_5 (sections of a text tower)", "zamba2", "trocr"),
)
"""Models whose own code lets packed documents see one another."""
SEES_PLACES = (
    *("mistral (sliding_window)", "gpt_neo", "longformer", "modernbert (an encoder of two types of layers)"),
    *("gemma3 (frequencies by layer type)", "llama4 (complex numbers, some layers still)"),
    *("gpt_oss (cos of half a head)", "t5gemma", "t5gemma2"),
    *("qwen3_5 (sections of a text tower)", "lfm2 (convolutions between)", "zamba2", "mpnet"),
)
"""Models that know a token's place in the row beside its position: by a window, a convolution, a state or a bias."""
CONVOLVED = ("convbert",)
"""Models whose own code convolves padding with the words: it is seen beside attention, whatever the positions."""
COUNTS_EMBEDDINGS_OTHERWISE = ("esm",)
"""Models whose own code reads other rows of its table for embeddings than for the tokens that they are of."""
UNSTATIC = ("led",)
"""Models whose own code masks a static cache wrongly."""
UNABLE = {"dbrx": "must have the same scalar type", "deberta": "cannot be converted to type"}
"""Models whose own code raises in mixed precision, and how: experts are added, scores masked, in the other dtype."""
OVERFLOWING = ("longt5",)
"""Models whose own gradients overflow in float16."""
SINGLE = ("gpt_oss (cos of half a head)", "t5gemma")
"""Models whose own code is not for float64: it has no product of experts, or makes NaN of rows that see nothing."""
STEADY: dict[str, dict[str, Any]] = {
    "opt": {"activation_function": "gelu"},
    "qwen3_5 (sections of a text tower)": {"layer_types": ["full_attention"] * 4},
}
"""Changes of a config without which rounding turns gradients over: ReLU's kink, and linear attention's norms of next to
nothing."""
SETTLES_LATER = ("mpt", "dbrx", "t5gemma", "t5gemma2")
"""Models whose own config writes more after it was read once: the dtype in the configs inside it."""
MIXED = ("deberta",)
"""Models whose own class, loaded in bfloat16, keeps some biases in float32, and cannot run."""
THAWED = {"whisper": frozenset({"model.encoder.embed_positions.weight"})}
"""Parameters that a model's own class freezes, and loads trainable."""
BLURRED = ("gemma3 (frequencies by layer type)", "modernbert (an encoder of two types of layers)")
"""Models of which some layers keep their own angles: their class blurs those in a cast, and makes them anew."""
ROUNDED = ("longformer", "led")
"""Models whose own code, in place on what a projection gave, rounds otherwise beside an adapter that is off."""


def limits_of(name: str) -> Limits:
    """Return the limits of the tiny model called `name`."""
    return Limits(
        leaks=name in LEAKY,
        sees_places=name in SEES_PLACES,
        convolves=name in CONVOLVED,
        counts_embeddings_otherwise=name in COUNTS_EMBEDDINGS_OTHERWISE,
        unstatic=name in UNSTATIC,
        mixed_precision_error=UNABLE.get(name, ""),
        overflows=name in OVERFLOWING,
        single=name in SINGLE,
        steady=STEADY.get(name, {}),
        settles_later=name in SETTLES_LATER,
        mixed_dtypes=name in MIXED,
        thawed=THAWED.get(name, frozenset()),
        blurred=name in BLURRED,
        rounded=name in ROUNDED,
    )
