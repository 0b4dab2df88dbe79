"""What a claim about a serving program is, and the conditions that a checkpoint is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hf_posswap.checkpoints.exports.mechanism import Stated

Verdict = Literal["exact", "approximate", "impossible"]
Known = Literal["tested", "run", "read"]
Road = Literal["folder", "gguf", "graph"]
Condition = Callable[[Stated], bool]
_CLOSE = 1e-6

LLAMA_KIND = ("llama", "mistral", "qwen2")
"""Model types whose layers llama.cpp's architecture "llama" computes, which reads `rope_freqs.weight`."""


@dataclass(frozen=True)
class Claim:
    """What one program makes of one kind of positions in some models: a row of the table.

    Attributes:
        target: the program, as `posswap export` calls it.
        positions: rope types or schemes, with the conditions on their values, in words.
        models: which models, in words.
        verdict: "exact": what transformers computes; "approximate": near it, or equal up to some length;
            "impossible": it refuses, or computes something else.
        why: in words.
        command: what to type, with {folder}, {length}, {original} (tokens) and {dtype} to be filled in, and {python}
            or {inner} for the folder in Python code, as it is or between double quotes of a shell; "" where nothing
            helps.
        engine: the program's version that the claim is about.
        known: "tested": a test runs the program; "run": it was run by hand, and no test repeats it; "read": its code
            or documentation was read, and it was not run.
        fits: whether a checkpoint is one of those that the row is about.
        roads: what the program may be given: the "folder" with its config, a "gguf" file, a "graph" of the model;
            () where nothing is written.
    """

    target: str
    positions: str
    models: str
    verdict: Verdict
    why: str
    command: str
    engine: str
    known: Known
    fits: Condition
    roads: tuple[Road, ...] = ("folder",)

    @property
    def source(self) -> str:
        """The version, and how the claim is known, in words."""
        return f"{self.engine}, {KNOWN[self.known]}"


KNOWN: dict[Known, str] = {
    "tested": "run by a test",
    "run": "run by hand",
    "read": "read, not run",
}
"""How a claim is known, in words."""


def anything(stated: Stated) -> bool:
    """Return True: the last row of a program takes what the others leave."""
    return True


def of_type(*names: str) -> Condition:
    """Return the condition that the rope type is one of `names`."""
    return lambda stated: stated.kind == "rope" and stated.rope_type in names


def of_model(*names: str) -> Condition:
    """Return the condition that the stock model type is one of `names`."""
    return lambda stated: stated.model_type in names


def both(*conditions: Condition) -> Condition:
    """Return the condition that all of `conditions` hold."""
    return lambda stated: all(condition(stated) for condition in conditions)


def but_not(condition: Condition) -> Condition:
    """Return the condition that `condition` does not hold."""
    return lambda stated: not condition(stated)


def plugin(stated: Stated) -> bool:
    """Return whether only hf_posswap computes it."""
    return stated.kind == "plugin"


def paged_plugin(stated: Stated) -> bool:
    """Return whether only hf_posswap computes it, and a program with a paged cache of its own can with its help."""
    return plugin(stated) and stated.unpaged is None


def table(stated: Stated) -> bool:
    """Return whether positions are rows of a table."""
    return stated.kind == "table"


def usual_yarn(stated: Stated) -> bool:
    """Return whether it is yarn as programs hard-code it: betas 32 and 1, whole limits, factor 0.1 ln s + 1."""
    betas = (float(stated.rope.get("beta_fast") or 32), float(stated.rope.get("beta_slow") or 1))
    same = betas == (32.0, 1.0) and abs(stated.attention - stated.usual_attention) < _CLOSE
    return stated.rope_type == "yarn" and same and stated.rope.get("truncate") is not False


def one_list(stated: Stated) -> bool:
    """Return whether it is longrope with one list of divisors for all lengths."""
    return stated.rope_type == "longrope" and stated.fixed_list


def no_rotation(stated: Stated) -> bool:
    """Return whether it is "proportional" with a share of 0: rotary modules that rotate nothing."""
    return stated.rope_type == "proportional" and not stated.rope.get("partial_rotary_factor", 1.0) > 0


def windowed(stated: Stated) -> bool:
    """Return whether its attention sees a sliding window shorter than the length it is meant for."""
    return stated.window is not None and stated.window < stated.length


def every_fourth_plain(stated: Stated) -> bool:
    """Return whether layers 4, 8, ... alone do not rotate: the one pattern that llama.cpp has for SmolLM3."""
    return stated.rotates == tuple((i + 1) % 4 != 0 for i in range(len(stated.rotates)))
