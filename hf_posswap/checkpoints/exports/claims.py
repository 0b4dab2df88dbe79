"""Claims about serving programs, and the conditions on a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hf_posswap.checkpoints.exports.mechanism import PositionConfig

Verdict = Literal["exact", "approximate", "impossible"]
Known = Literal["tested", "run", "read"]
Road = Literal["folder", "gguf", "graph"]
Condition = Callable[[PositionConfig], bool]
_CLOSE = 1e-6

LLAMA_KIND = ("llama", "mistral", "qwen2")
"""Model types whose layers llama.cpp's architecture "llama" computes, which reads `rope_freqs.weight`."""
FACTORED = (*LLAMA_KIND, "phi3")
"""Model types whose architecture in llama.cpp reads a divisor for each pair; "phi3" a long and a short list of them."""


@dataclass(frozen=True)
class Claim:
    """How one program runs one kind of positions in some models: a row of the table.

    Attributes:
        target: the program, as `posswap export` calls it.
        positions: rope types or schemes, with the conditions on their values, as text.
        models: which models, as text.
        verdict: "exact": equal to transformers; "approximate": near it, or equal up to some length; "impossible": it
            refuses, or computes something else.
        why: the reason, as text.
        command: the command, with placeholders {folder}, {length}, {original} (tokens) and {dtype}, {auto} for the
            Auto class, {sentences} for the class of sentence-transformers, and {python} or {inner} for the folder in
            Python code, plain or between a shell's double quotes; "" if none helps.
        engine: the program's version that the claim is about.
        known: "tested": a test runs the program; "run": it was run once, without a test; "read": its code or
            documentation was read, and it was not run.
        fits: whether a checkpoint is one of those that the row is about.
        roads: what the program takes: the "folder" with its config, a "gguf" file, a "graph" of the model; () if
            nothing is written.
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
        """The version, and how the claim is known, as text."""
        return f"{self.engine}, {KNOWN[self.known]}"


KNOWN: dict[Known, str] = {
    "tested": "run by a test",
    "run": "run once",
    "read": "read, not run",
}
"""How a claim is known, as text."""


def anything(position_config: PositionConfig) -> bool:
    """Return True: a program's last row fits all that the others do not."""
    return True


def of_type(*names: str) -> Condition:
    """Return the condition that the rope type is one of `names`."""
    return lambda position_config: position_config.kind == "rope" and position_config.rope_type in names


def of_model(*names: str) -> Condition:
    """Return the condition that the stock model type is one of `names`."""
    return lambda position_config: position_config.model_type in names


def both(*conditions: Condition) -> Condition:
    """Return the condition that all of `conditions` hold."""
    return lambda position_config: all(condition(position_config) for condition in conditions)


def but_not(condition: Condition) -> Condition:
    """Return the condition that `condition` does not hold."""
    return lambda position_config: not condition(position_config)


def plugin(position_config: PositionConfig) -> bool:
    """Return whether only hf_posswap computes it."""
    return position_config.kind == "plugin"


def paged_plugin(position_config: PositionConfig) -> bool:
    """Return whether only hf_posswap computes it, and a program with its own paged cache can do so with hf_posswap."""
    return plugin(position_config) and position_config.unpaged is None


def own_attention(position_config: PositionConfig) -> bool:
    """Return whether a program with its own paged cache computes it by hf_posswap's attention instead of its own."""
    return paged_plugin(position_config) and position_config.own_attention


def table(position_config: PositionConfig) -> bool:
    """Return whether positions are rows of a table."""
    return position_config.kind == "table"


def usual_yarn(position_config: PositionConfig) -> bool:
    """Return whether it is yarn as programs hard-code it: betas 32 and 1, truncated limits, factor 0.1 ln s + 1."""
    return usual_bands(position_config) and abs(position_config.attention - position_config.usual_attention) < _CLOSE


def usual_bands(position_config: PositionConfig) -> bool:
    """Return whether it is yarn with the angles that programs hard-code, and any factor on cos and sin."""
    betas = (float(position_config.rope.get("beta_fast") or 32), float(position_config.rope.get("beta_slow") or 1))
    truncated = position_config.rope.get("truncate") is not False
    return position_config.rope_type == "yarn" and betas == (32.0, 1.0) and truncated


def one_list(position_config: PositionConfig) -> bool:
    """Return whether it is longrope with one list of divisors for all lengths."""
    return position_config.rope_type == "longrope" and position_config.rotation.has_one_list


def follows_length(position_config: PositionConfig) -> bool:
    """Return whether its angles follow the length of the text: dynamic, or longrope of two lists."""
    return position_config.kind == "rope" and position_config.rotation.follows_length


def no_rotation(position_config: PositionConfig) -> bool:
    """Return whether it is "proportional" with a share of 0: rotary modules that rotate nothing."""
    return (
        position_config.rope_type == "proportional" and not position_config.rope.get("partial_rotary_factor", 1.0) > 0
    )


def encoder(position_config: PositionConfig) -> bool:
    """Return whether it is an encoder, which generates no text."""
    return not position_config.generates


def windowed(position_config: PositionConfig) -> bool:
    """Return whether its attention window is shorter than its length."""
    return position_config.window is not None and position_config.window < position_config.length


def every_fourth_plain(position_config: PositionConfig) -> bool:
    """Return whether layers 4, 8, ... alone do not rotate: the one pattern that llama.cpp has for SmolLM3."""
    return position_config.rotates == tuple((i + 1) % 4 != 0 for i in range(len(position_config.rotates)))


def every_sixth(position_config: PositionConfig) -> bool:
    """Return whether layers 6, 12, ... alone are of full attention: llama.cpp's order where a file has none."""
    return position_config.slides == tuple((i + 1) % 6 != 0 for i in range(len(position_config.slides)))
