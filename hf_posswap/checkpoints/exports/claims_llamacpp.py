"""How llama.cpp runs positions: read in the code of llama-cpp-python 0.3.36, and run by tests/serving.

Its architecture "llama" divides the angle of each pair by `rope_freqs.weight`, and every architecture multiplies cos
and sin by `rope.scaling.attn_factor`. The converter convert_hf_to_gguf.py writes the first for "llama3" alone and the
second never; `posswap export -o model.gguf` writes both.
"""

from __future__ import annotations

from hf_posswap.checkpoints.exports.claims import (
    LLAMA_KIND,
    Claim,
    Condition,
    Known,
    Road,
    Verdict,
    anything,
    both,
    every_fourth_plain,
    of_model,
    of_type,
    one_list,
    plugin,
    table,
    usual_yarn,
    windowed,
)
from hf_posswap.checkpoints.exports.mechanism import PositionConfig

ENGINE = "llama-cpp-python 0.3.36"
_SERVE = "llama-server -m model.gguf -c {length}"
_CONVERT = f"python convert_hf_to_gguf.py {{folder}} --outfile model.gguf && {_SERVE}"
_WRITE = f"posswap export {{folder}} --target llamacpp -o model.gguf && {_SERVE}"
_SELF_EXTEND = "llama-completion -m base.gguf -c {length} --grp-attn-n {group} --grp-attn-w {window}"
_SAME = "the same angles at every length."
_FREQUENCIES = "the converter loses it silently; rope_freqs.weight and rope.scaling.attn_factor have all of it."
_FILE: tuple[Road, ...] = ("gguf",)
_EITHER: tuple[Road, ...] = ("folder", "gguf")
_LLAMA = "Llama, Mistral, Qwen2"
_llama = of_model(*LLAMA_KIND)
_neox = of_model("gpt_neox")


def _simple(position_config: PositionConfig) -> bool:
    """Return whether the metadata alone express it: plain rope, linear, yarn as llama.cpp has it."""
    return of_type("default", "linear")(position_config) or usual_yarn(position_config)


def _row(
    positions: str,
    models: str,
    verdict: Verdict,
    why: str,
    fits: Condition,
    command: str = "",
    known: Known = "read",
    roads: tuple[Road, ...] = ("folder",),
) -> Claim:
    return Claim("llamacpp", positions, models, verdict, why, command, ENGINE, known, fits, roads)


LLAMACPP = (
    _row(
        "self_extend",
        _LLAMA,
        "approximate",
        "llama-completion has Self-Extend itself, on the unswapped base, and groups positions block by block as the "
        "text grows: near hf_posswap's, not equal; the width must be a multiple of the group. llama-server "
        "does not have it.",
        both(plugin, _llama, lambda position_config: position_config.scheme == "self_extend"),
        _SELF_EXTEND,
        roads=(),
    ),
    _row(
        "what needs hf_posswap",
        "all",
        "impossible",
        "only hf_posswap computes {scheme} in a {model}: the attention of other programs is their own. posswap "
        "to-native makes a stock model of it where one is exact: export that.",
        plugin,
        roads=(),
    ),
    _row(
        "a table: learned, sinusoidal, nope",
        "GPT-2",
        "exact",
        "a position table is ordinary weights; it ends where its rows end. The converter asks for n_ctx, which "
        "transformers no longer writes: the exported config has it.",
        both(table, of_model("gpt2")),
        _WRITE,
        "tested",
        _EITHER,
    ),
    _row(
        "a table",
        "BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT",
        "exact",
        "for embeddings and classifiers: the converter drops a language model head. A position table is ordinary "
        "weights; it ends where its rows end.",
        both(table, of_model("bert", "roberta", "xlm-roberta", "camembert", "distilbert")),
        f"{_CONVERT} --embedding --ubatch-size {{length}}",
    ),
    _row(
        "a table",
        "GPT-BigCode",
        "exact",
        "a position table is ordinary weights; it ends where its rows end.",
        both(table, of_model("gpt_bigcode")),
        _CONVERT,
    ),
    _row(
        "a table",
        "others, as OPT, BART, GPT-Neo",
        "impossible",
        "it has no architecture for the model type {model}, and the converter stops.",
        table,
        roads=(),
    ),
    _row(
        "any rope, beyond a sliding window",
        _LLAMA,
        "approximate",
        "its architecture llama has no sliding window: equal up to {window} tokens.",
        both(_llama, windowed),
        "llama-server -m model.gguf -c {window}",
        roads=_FILE,
    ),
    _row(
        "rope, ntk, linear, yarn (betas 32 and 1, attention factor 0.1 ln s + 1)",
        _LLAMA,
        "exact",
        _SAME,
        both(_llama, _simple),
        _WRITE,
        "tested",
        _EITHER,
    ),
    _row(
        "llama3",
        "Llama, Mistral",
        "exact",
        _SAME,
        both(of_model("llama", "mistral"), of_type("llama3")),
        _WRITE,
        "tested",
        _EITHER,
    ),
    _row("llama3", "Qwen2", "exact", _FREQUENCIES, both(_llama, of_type("llama3")), _WRITE, "tested", _FILE),
    _row(
        "yarn (other betas, attention factor or truncate), ntk_by_parts",
        _LLAMA,
        "exact",
        "the converter is silently wrong: it does not read the betas and overwrites the attention factor; "
        "rope_freqs.weight and rope.scaling.attn_factor have both.",
        both(_llama, of_type("yarn")),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row(
        "longrope of one list, resonance_yarn, angles of one's own",
        _LLAMA,
        "exact",
        _FREQUENCIES,
        both(_llama, one_list),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row("p_rope, nope", _LLAMA, "exact", _FREQUENCIES, both(_llama, of_type("proportional")), _WRITE, "tested", _FILE),
    _row(
        "longrope of two lists",
        _LLAMA,
        "approximate",
        "rope_factors_long.weight and rope_factors_short.weight say both lists, and -c, rounded up to a multiple of "
        "256, chooses for all texts: the long one above {original}. Exact for texts beyond {original} tokens; where "
        "{original} is such a multiple, a server with -c {original} is exact for shorter ones.",
        both(_llama, of_type("longrope")),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row(
        "dynamic",
        _LLAMA,
        "approximate",
        "it knows no such type: equal up to {original} tokens, plain rope beyond.",
        both(_llama, of_type("dynamic")),
        f"posswap export {{folder}} --target llamacpp -o model.gguf && {_SERVE.format(length='{original}')}",
        "tested",
        _EITHER,
    ),
    _row(
        "rope, ntk, linear, yarn (betas 32 and 1)",
        "GPT-NeoX",
        "exact",
        "the converter stops without rotary_pct, drops base and scaling, and needs an untied output layer; the file "
        "written here has them.",
        both(_neox, _simple),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row(
        "any other rope",
        "GPT-NeoX",
        "impossible",
        "its architecture gptneox reads no rope_freqs.weight, and the converter drops base and scaling.",
        _neox,
        roads=(),
    ),
    _row(
        "rope, ntk, linear, yarn (betas 32 and 1), layers 4, 8, ... without rotation",
        "SmolLM3",
        "exact",
        "its code rotates in all layers but every fourth, whatever no_rope_layers says; these are those.",
        both(of_model("smollm3"), every_fourth_plain, _simple),
        _CONVERT,
        "tested",
    ),
    _row(
        "any other, as rnope with another `every`, or nope in all layers",
        "SmolLM3",
        "impossible",
        "its code rotates in all layers but every fourth, whatever no_rope_layers says, and reads no "
        "rope_freqs.weight: silently wrong.",
        of_model("smollm3"),
        known="tested",
        roads=(),
    ),
    _row("rope, ntk, linear, yarn (betas 32 and 1)", "others", "exact", _SAME, _simple, _CONVERT),
    _row(
        "llama3",
        "others",
        "exact",
        "the converter writes it for classes that derive from its Llama; check the log.",
        of_type("llama3"),
        _CONVERT,
    ),
    _row(
        "longrope",
        "Phi-3, MiniCPM",
        "approximate",
        "the factors are chosen by the context's length.",
        both(of_type("longrope"), of_model("phi3", "minicpm", "minicpm3")),
        _CONVERT,
    ),
    _row(
        "dynamic",
        "others",
        "approximate",
        "the converter ignores it: equal up to {original} tokens, plain rope beyond.",
        of_type("dynamic"),
        _CONVERT.replace("{length}", "{original}"),
    ),
    _row(
        "any other rope",
        "others",
        "impossible",
        'the converter loses it silently, or warns of an "Unknown" type and writes plain rope.',
        anything,
        roads=(),
    ),
)
"""The first row that fits decides."""
