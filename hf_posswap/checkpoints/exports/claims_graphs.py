"""What onnxruntime and torch make of the graphs that `posswap export` writes: run by tests/serving/test_graphs.py.

A graph holds the mechanism itself, so nothing is read from a config; and each one is run beside its model before it is
there. What the rows tell is which were, and what a graph has of its own.
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
from hf_posswap.checkpoints.exports.mechanism import Stated

ENGINES = {"onnx": "onnxruntime 1.32.0 and torch 2.13", "torch": "torch 2.13"}
_COMMANDS = {
    "onnx": "posswap export {folder} --target onnx -o model.onnx",
    "torch": "posswap export {folder} --target torch -o model.pt2",
}
_ITSELF = (
    "the graph holds the mechanism itself, and needs neither transformers nor hf_posswap: any batch and length, "
    "padding by the mask, no cache."
)
_CHECKED = "It is run and compared before the file is there, or refused."
_COMPARED = f"{_ITSELF} {_CHECKED}"
_LENGTH = (
    "the angles are computed from the length of the longest row of a batch, as in transformers; torch's older exporter "
    "(dynamo=False) keeps those of the length that it traced with: wrong by nats beyond, without a word."
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


def _by_query(stated: Stated) -> bool:
    """Return whether the angles follow each query's own position."""
    return stated.settings.get("follow") == "query"


def _rows(target: str) -> tuple[Claim, ...]:
    exact = (
        Claim(target, positions, models, "exact", why, _COMMANDS[target], ENGINES[target], known, fits, ("graph",))
        for positions, models, why, fits, known in _ROWS
    )
    kind = "dynamic, longrope with follow='query'"
    return (
        Claim(target, kind, "all", "impossible", _VALUES, "", ENGINES[target], "tested", both(plugin, _by_query), ()),
        *exact,
    )


ONNX = _rows("onnx")
TORCH = _rows("torch")
