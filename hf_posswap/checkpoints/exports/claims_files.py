"""How the programs that take a file run positions: llama.cpp a GGUF file, onnxruntime and torch a graph.

llama.cpp: read in the code of llama-cpp-python 0.3.36; run by tests/serving with xllamacpp's server, which is that of
llama.cpp. Its architecture "llama" divides the angle of each pair by `rope_freqs.weight`, and every architecture
multiplies cos and sin by `rope.scaling.attn_factor`. The converter convert_hf_to_gguf.py writes the first for "llama3"
alone and the second never; `posswap export -o model.gguf` writes both.

Graphs: tested by tests/serving/test_graphs.py. A graph contains the mechanism, so nothing is read from a config, and
each graph is compared with its model before it is put in place. The rows say for which models a test does that.
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
    but_not,
    every_fourth_plain,
    every_sixth,
    follows_length,
    of_model,
    of_type,
    one_list,
    plugin,
    table,
    usual_bands,
    usual_yarn,
    windowed,
)
from hf_posswap.checkpoints.exports.mechanism import PositionConfig

LLAMACPP_ENGINE = "xllamacpp 2026.10.11549"
_LLAMACPP_READ = "llama-cpp-python 0.3.36"
_SERVE = "llama-server -m model.gguf -c {length}"
_CONVERT = f"python convert_hf_to_gguf.py {{folder}} --outfile model.gguf && {_SERVE}"
_WRITE = f"posswap export {{folder}} --target llamacpp -o model.gguf && {_SERVE}"
_SELF_EXTEND = "llama-completion -m base.gguf -c {length} --grp-attn-n {group} --grp-attn-w {window}"
_SAME = "the same angles at every length."
_FREQUENCIES = "the converter loses it silently; rope_freqs.weight and rope.scaling.attn_factor have all of it."
_FILE: tuple[Road, ...] = ("gguf",)
_EITHER: tuple[Road, ...] = ("folder", "gguf")
_GEMMA3 = "its code scales the layers of full attention alone, and takes a base for each of the two layer types"
_LLAMA = "Llama, Mistral, Qwen2"
_llama = of_model(*LLAMA_KIND)
_neox = of_model("gpt_neox")
_BARE = "Qwen3, Qwen2-MoE, Qwen3-MoE"
_bare = of_model("qwen3", "qwen2_moe", "qwen3_moe")
_phi3 = of_model("phi3")
_gemma3 = of_model("gemma3_text")
_smollm3 = both(of_model("smollm3"), every_fourth_plain)
GRAPH_ENGINES = {"onnx": "onnxruntime 1.32.0 and torch 2.13", "torch": "torch 2.13"}
_GRAPH_COMMANDS = {
    "onnx": "posswap export {folder} --target onnx -o model.onnx",
    "torch": "posswap export {folder} --target torch -o model.pt2",
}
_ITSELF = (
    "the graph contains the mechanism and needs neither transformers nor hf_posswap: any batch and length, "
    "padding by the mask, no cache."
)
_CHECKED = "The export runs it and compares it with the model before it writes the file, or refuses."
_COMPARED = f"{_ITSELF} {_CHECKED}"
_LENGTH = (
    "the angles are computed from the length of the longest row of a batch, as in transformers; torch's older exporter "
    "(dynamo=False) keeps those of the length that it traced with: silently wrong by nats beyond."
)
_TABLE_ENDS = f"{_ITSELF} A position table ends where its rows end: onnxruntime and torch stop beyond."
_PLUGIN_MODELS = "Llama, GPT-2, OPT, BERT"
_VALUES = (
    "with follow='query' how many rotations a text takes depends on the numbers that come in, and a graph is the "
    "same for all: use follow='sequence'."
)
_ROTARY_MODELS = "Llama, GPT-NeoX, Gemma 3, ModernBERT"
_rotary = of_model("llama", "gpt_neox", "gemma3_text", "modernbert")
_GraphRow = tuple[str, str, str, Condition, Known]
_GRAPH_ROWS: tuple[_GraphRow, ...] = (
    (
        "what needs hf_posswap: rope of any kind, alibi, t5, kerple, fire, xpos, rnope, self_extend, dual_chunk",
        _PLUGIN_MODELS,
        _ITSELF,
        both(plugin, of_model("llama", "gpt2", "opt", "bert")),
        "tested",
    ),
    ("what needs hf_posswap", "others", _COMPARED, plugin, "read"),
    (
        "a table: learned, sinusoidal, nope",
        "GPT-2, BERT, RoBERTa",
        _TABLE_ENDS,
        both(table, of_model("gpt2", "bert", "roberta")),
        "tested",
    ),
    ("a table", "others", f"{_TABLE_ENDS} {_CHECKED}", table, "read"),
    (
        "dynamic, longrope of two lists",
        _ROTARY_MODELS,
        _LENGTH,
        both(follows_length, _rotary),
        "tested",
    ),
    ("dynamic, longrope of two lists", "others", f"{_LENGTH} {_CHECKED}", follows_length, "read"),
    ("any other rope", _ROTARY_MODELS, _ITSELF, _rotary, "tested"),
    ("any other rope, a bias of the model's own (BLOOM, MPT, T5)", "others", _COMPARED, anything, "read"),
)


def _simple(position_config: PositionConfig) -> bool:
    """Return whether the metadata alone express it: plain rope, linear, yarn as llama.cpp has it."""
    return of_type("default", "linear")(position_config) or usual_yarn(position_config)


def _scaled(position_config: PositionConfig) -> bool:
    """Return whether the metadata with `rope.scaling.attn_factor` express it."""
    return _simple(position_config) or usual_bands(position_config)


def _one_scaling(position_config: PositionConfig) -> bool:
    """Return whether full attention alone is scaled, by the metadata, and each layer type has a base of its own."""
    others = {(each.layer_type, each.rope_type) for each in position_config.others}
    return _simple(position_config) and others <= {("sliding_attention", "default")}


def _no_window(position_config: PositionConfig) -> bool:
    """Return whether its architecture has no sliding window, and the model has one."""
    return windowed(position_config) and (_bare(position_config) or _smollm3(position_config))


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
    engine = LLAMACPP_ENGINE if known == "tested" else _LLAMACPP_READ
    return Claim("llamacpp", positions, models, verdict, why, command, engine, known, fits, roads)


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
        "rope, ntk, linear, yarn (betas 32 and 1), beyond a sliding window",
        f"{_BARE}, SmolLM3",
        "approximate",
        "its architecture has no sliding window: equal up to {window} tokens.",
        both(_no_window, _scaled),
        "llama-server -m model.gguf -c {window}",
        roads=_FILE,
    ),
    _row(
        "any other rope, beyond a sliding window",
        f"{_BARE}, SmolLM3",
        "impossible",
        "its architecture has no sliding window and reads no rope_freqs.weight: it computes something else.",
        _no_window,
        roads=(),
    ),
    _row(
        "rope, ntk, linear, yarn (betas 32 and 1, attention factor 0.1 ln s + 1)",
        _BARE,
        "exact",
        _SAME,
        both(_bare, _simple),
        _WRITE,
        "tested",
        _EITHER,
    ),
    _row(
        "yarn (betas 32 and 1, another attention factor)",
        f"{_BARE}, SmolLM3",
        "exact",
        "the converter loses the attention factor silently; rope.scaling.attn_factor has it.",
        both(
            lambda position_config: _bare(position_config) or _smollm3(position_config), usual_bands, but_not(_simple)
        ),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row(
        "dynamic",
        _BARE,
        "approximate",
        "it knows no such type: equal up to {original} tokens, plain rope beyond.",
        both(_bare, of_type("dynamic")),
        _WRITE.replace("{length}", "{original}"),
        "tested",
        _EITHER,
    ),
    _row(
        "any other rope",
        _BARE,
        "impossible",
        "its architecture reads no rope_freqs.weight and no betas, and the converter loses both silently.",
        _bare,
        roads=(),
    ),
    _row(
        "longrope of two lists, beyond a sliding window",
        "Phi-3",
        "impossible",
        "its code has no sliding window and no angles that follow the text's length: it computes something else.",
        both(_phi3, windowed, of_type("longrope"), but_not(one_list)),
        roads=(),
    ),
    _row(
        "any other rope, beyond a sliding window",
        "Phi-3",
        "approximate",
        "its code ignores the sliding window: equal up to {window} tokens.",
        both(_phi3, windowed),
        "llama-server -m model.gguf -c {window}",
        roads=_FILE,
    ),
    _row(
        "rope, ntk, linear, yarn, ntk_by_parts, resonance_yarn, llama3, longrope of one list, angles of one's own",
        "Phi-3",
        "exact",
        "a Phi-3 takes all of them as longrope of one list: rope_factors_long.weight and rope_factors_short.weight are "
        "that list. The converter loses an attention factor of one's own.",
        both(_phi3, lambda position_config: of_type("default")(position_config) or one_list(position_config)),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row(
        "longrope of two lists",
        "Phi-3",
        "approximate",
        "-c, rounded up to a multiple of 256, chooses the list for all texts: the long one above {original}. Exact for "
        "texts beyond {original} tokens; where {original} is such a multiple, a server with -c {original} is exact for "
        "shorter ones. The converter loses an attention factor of one's own.",
        both(_phi3, of_type("longrope")),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row(
        "rope, ntk, linear, yarn (betas 32 and 1, attention factor 0.1 ln s + 1) in the layers of full attention",
        "Gemma 3 with full attention in other layers than 6, 12, ...",
        "exact",
        f"{_GEMMA3}; the converter writes no order of layers, without which llama.cpp takes layers 6, 12, ... for "
        "those of full attention, and here they are {full}.",
        both(both(_gemma3, _one_scaling), lambda position_config: not every_sixth(position_config)),
        _WRITE,
        "read",
        _FILE,
    ),
    _row(
        "rope, ntk, linear, yarn (betas 32 and 1, attention factor 0.1 ln s + 1) in the layers of full attention",
        "Gemma 3 with full attention in layers 6, 12, ... alone",
        "exact",
        f"{_GEMMA3}; the layers are in llama.cpp's order. What the converter makes of the bases and the scaling was "
        "not run.",
        both(_gemma3, _one_scaling),
        _WRITE,
        "tested",
        _FILE,
    ),
    _row(
        "any other rope, or sliding layers with a scaling",
        "Gemma 3",
        "impossible",
        "its architecture gemma3 has one scaling, for the layers of full attention, and reads no rope_freqs.weight.",
        _gemma3,
        roads=(),
    ),
    _row(
        "rope, ntk, linear, yarn (betas 32 and 1), layers 4, 8, ... without rotation",
        "SmolLM3",
        "exact",
        "its code rotates in all layers but every fourth, whatever no_rope_layers says; these are those.",
        both(_smollm3, _simple),
        _WRITE,
        "tested",
        _EITHER,
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
        "MiniCPM",
        "approximate",
        "the factors are chosen by the context's length.",
        both(of_type("longrope"), of_model("minicpm", "minicpm3")),
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


def _graph_rows(target: str) -> tuple[Claim, ...]:
    exact = (
        Claim(
            target,
            positions,
            models,
            "exact",
            why,
            _GRAPH_COMMANDS[target],
            GRAPH_ENGINES[target],
            known,
            fits,
            ("graph",),
        )
        for positions, models, why, fits, known in _GRAPH_ROWS
    )
    follows_query = "dynamic, longrope with follow='query'"
    return (
        Claim(
            target,
            follows_query,
            "all",
            "impossible",
            _VALUES,
            "",
            GRAPH_ENGINES[target],
            "tested",
            both(plugin, lambda position_config: position_config.settings.get("follow") == "query"),
            (),
        ),
        *exact,
    )


ONNX = _graph_rows("onnx")


TORCH = _graph_rows("torch")
