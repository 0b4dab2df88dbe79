"""Model types whose positions are not swapped, each with its reason: what a family would need to know and does not."""

from __future__ import annotations

_RECURRENT = "its layers are recurrent: they have no attention and no positions"
_HYBRID = "its attention has no positions: the recurrent layers between are what knows the order"
_RELATIVE = "relative positions are woven into its attention scores, by code of its own"
_HASHED = "it attends to parts of a sequence that its own code chooses (windows, blocks, hashes, landmarks)"
_SEVERAL = "it takes more than a sequence of tokens (layout, speech, several streams), each with positions of its own"
_OWN_CODE = "its positions and its attention are code of its own, without transformers' AttentionInterface"
_DRAFTS = "it drafts for another model and reads that model's keys, which must stay as they are"
_THETAS = "each layer has a theta of its own, kept beside the rope parameters in config.layer_rope_theta"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("jamba", "kimi_linear", "nemotron_h", "zamba", "nemo_speechlm"), _HYBRID),
    **dict.fromkeys(("cpmant", "funnel", "inkling_text", "inkling2_text", "inkling2_loop_text", "xlnet"), _RELATIVE),
    **dict.fromkeys(("mra", "nystromformer", "pegasus_x", "reformer", "yoso"), _HASHED),
    **dict.fromkeys(
        (
            "musicgen",
            "musicgen_decoder",
            "musicgen_melody",
            "musicgen_melody_decoder",
            "seamless_m4t",
            "seamless_m4t_v2",
        ),
        _SEVERAL,
    ),
    "fsmt": _OWN_CODE,
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _THETAS),
    "beit": "a learned bias for each pair of patches is added to its attention scores, by code of its own",
    "dinov2_with_registers": "its register tokens come after its table, which has no rows for them",
    "blt": "four stacks of layers, over bytes and over patches, each have a rotary of their own",
    "encoder-decoder": "it is made of two models of your choice: swap those, model.encoder and model.decoder",
    "ibert": "its position table is quantised with the rest of its weights",
    "fnet": "it has Fourier transforms where others have attention, which see padding too",
    "git": "images stand before its text, at no position, and its attention is code of its own",
    "layoutlmv3": "a bias for distances in the text and on the page is added to its scores, by code of its own",
    "luke": "its entities have positions of their own, in a second table that would have to follow",
    "perceiver": "it attends from learned latents to bytes: the table belongs to its preprocessor",
    "prophetnet": "it predicts several tokens ahead, in streams with relative positions of their own",
    "recurrent_gemma": "its config says no length, and its attention sees a window of the last tokens alone",
}
"""The reason by model type, as the end of a sentence that begins with the model's name."""
