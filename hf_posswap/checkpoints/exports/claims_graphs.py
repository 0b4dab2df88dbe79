"""How onnxruntime and torch run the graphs that `posswap export` writes: tested by tests/serving/test_graphs.py.

A graph contains the mechanism, so nothing is read from a config, and each graph is compared with its model before it is
put in place. The rows say for which models a test does that.
"""

from __future__ import annotations

from hf_posswap.checkpoints.exports.claims import (
    Claim,
    Condition,
    Known,
    anything,
    both,
    but_not,
    of_model,
    of_type,
    one_list,
    plugin,
    table,
)
from hf_posswap.checkpoints.exports.mechanism import PositionConfig

ENGINES = {"onnx": "onnxruntime 1.32.0 and torch 2.13", "torch": "torch 2.13"}
_COMMANDS = {
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
_ENDS = f"{_ITSELF} A position table ends where its rows end: onnxruntime and torch stop beyond."
_PLUGIN_MODELS = "Llama, GPT-2, OPT, BERT"
_VALUES = (
    "with follow='query' how many rotations a text takes depends on the numbers that come in, and a graph is the "
    "same for all: use follow='sequence'."
)
_ROTARY_MODELS = "Llama, GPT-NeoX, Gemma 3, ModernBERT"
_rotary = of_model("llama", "gpt_neox", "gemma3_text", "modernbert")
_follows = both(of_type("dynamic", "longrope"), but_not(one_list))
_Row = tuple[str, str, str, Condition, Known]
_ROWS: tuple[_Row, ...] = (
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
        _ENDS,
        both(table, of_model("gpt2", "bert", "roberta")),
        "tested",
    ),
    ("a table", "others", f"{_ENDS} {_CHECKED}", table, "read"),
    (
        "dynamic, longrope of two lists",
        _ROTARY_MODELS,
        _LENGTH,
        both(_follows, _rotary),
        "tested",
    ),
    ("dynamic, longrope of two lists", "others", f"{_LENGTH} {_CHECKED}", _follows, "read"),
    ("any other rope", _ROTARY_MODELS, _ITSELF, _rotary, "tested"),
    ("any other rope", "others", _COMPARED, anything, "read"),
)


def _by_query(position_config: PositionConfig) -> bool:
    """Return whether the angles follow each query's own position."""
    return position_config.settings.get("follow") == "query"


def _rows(target: str) -> tuple[Claim, ...]:
    exact = (
        Claim(target, positions, models, "exact", why, _COMMANDS[target], ENGINES[target], known, fits, ("graph",))
        for positions, models, why, fits, known in _ROWS
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
            ENGINES[target],
            "tested",
            both(plugin, _by_query),
            (),
        ),
        *exact,
    )


ONNX = _rows("onnx")
TORCH = _rows("torch")
