"""Model types whose positions cannot be swapped, each with its reason."""

from __future__ import annotations

_RECURRENT = "its layers are recurrent: they have no attention and no positions"
_HYBRID = "its attention has no positions: the recurrent layers in between encode the order"
_RELATIVE = "its custom attention code mixes relative positions into the scores"
_HASHED = "its custom code chooses which parts of a sequence it attends to (windows, blocks, hashes, landmarks)"
_SEVERAL = "it takes more than a sequence of tokens (layout, speech, several streams), each with separate positions"
_OWN_CODE = "its positions and its attention are custom code, without transformers' AttentionInterface"
_DRAFTS = "it drafts for another model and reads that model's keys, which must not change"
_THETAS = "each layer has its own theta, in config.layer_rope_theta and not in the rope parameters"

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
    "beit": "its custom attention code adds a learned bias for each pair of patches to the scores",
    "dinov2_with_registers": "its register tokens come after its table, which has no rows for them",
    "blt": "four stacks of layers, over bytes and over patches, each have their own rotary module",
    "encoder-decoder": "it combines two models of your choice: swap those, model.encoder and model.decoder",
    "ibert": "its position table is quantised with the rest of its weights",
    "fnet": "it uses Fourier transforms instead of attention, and they see padding too",
    "git": "images precede its text without positions, and its attention is custom code",
    "layoutlmv3": "its custom attention code adds a bias for distances in the text and on the page",
    "luke": "its entities have separate positions, in a second table that would have to change too",
    "perceiver": "it attends from learned latents to bytes: the table belongs to its preprocessor",
    "prophetnet": "it predicts several tokens ahead, in streams that each have relative positions",
    "recurrent_gemma": "its config has no length, and its attention sees only a window of the last tokens",
}
"""The reason by model type, as the end of a sentence that begins with the model's name."""
