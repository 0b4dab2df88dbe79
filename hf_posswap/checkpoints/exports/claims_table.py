"""All claims about serving programs in one table, which `export`, `doctor` and the page on serving read."""

from __future__ import annotations

import re
import shlex
from typing import Any

from hf_posswap.checkpoints.exports.claims import Claim
from hf_posswap.checkpoints.exports.claims_encoders import SENTENCE_TRANSFORMERS, TEI
from hf_posswap.checkpoints.exports.claims_graphs import ONNX, TORCH
from hf_posswap.checkpoints.exports.claims_llamacpp import LLAMACPP
from hf_posswap.checkpoints.exports.claims_servers import SGLANG, TGI, TRANSFORMERS, VLLM
from hf_posswap.checkpoints.exports.mechanism import Stated
from hf_posswap.errors import UnsupportedModelError

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "transformers": TRANSFORMERS,
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMACPP,
    "tgi": TGI,
    "onnx": ONNX,
    "torch": TORCH,
    "tei": TEI,
    "sentence-transformers": SENTENCE_TRANSFORMERS,
}
"""By program, the rows in order: the first that fits a checkpoint is the one about it; the last fits all."""


_BY_LAYER_TYPE = ("transformers", "onnx", "torch", "sentence-transformers")
"""The programs that run transformers' own code, with rope parameters for each type of layers as with any other."""
_SEEN_BY_LAYER_TYPE = {"vllm": ("gemma3_text",)}
"""The model types with such parameters that others were run with."""


def is_known(target: str, stated: Stated) -> bool:
    """Return whether the rows of the program `target` are about such a checkpoint at all."""
    seen = target in _BY_LAYER_TYPE or stated.model_type in _SEEN_BY_LAYER_TYPE.get(target, ())
    return seen or not stated.rope_set


def claim_for(target: str, stated: Stated) -> Claim:
    """Return the row about a checkpoint's positions in the program `target`.

    Raises:
        UnsupportedModelError: no row is about it.
    """
    if not is_known(target, stated):
        raise UnsupportedModelError(
            f"the config has rope parameters for each type of layers: what {target} makes of those in a "
            f"{stated.model_type} is not known here. Known: {', '.join(_BY_LAYER_TYPE)}; vllm with gemma3_text."
        )
    return next(claim for claim in CLAIMS[target] if claim.fits(stated))


def filled(text: str, stated: Stated, folder: str = "DIR") -> str:
    """Return the words of a row, {length} and the like filled in with what the checkpoint states.

    Args:
        text: `why` or `command` of a row.
        stated: the mechanism.
        folder: of the checkpoint; it is quoted where a shell or Python would take it apart.
    """
    known = stated.original is not None and stated.scheme is not None
    values: dict[str, Any] = {
        "folder": shlex.quote(folder),
        "python": repr(folder),
        "inner": re.sub(r'([\\"$`])', r"\\\1", repr(folder)),  # as a shell reads it between double quotes
        "length": stated.length,
        "original": stated.original or stated.length,
        "window": stated.settings.get("window", stated.window),
        "group": stated.settings.get("group"),
        "scheme": stated.scheme,
        "model": stated.model_type,
        "type": stated.rope_type,
        "problem": stated.unpaged,
        "architecture": stated.architecture,
        "dtype": " --dtype float32" if stated.dtype == "float32" else "",
        "checked": "It is, in the exported config." if known else "Which it is here nothing tells: check it.",
    }
    return text.format(**values)


def claims_markdown() -> str:
    """Return the table for the page on serving."""
    head = ["program", "positions", "models", "verdict", "why, and what to type", "known from"]
    lines = [_line(head), _line(["---"] * len(head))]
    names = {name: "{" + name + "}" for name in ("folder", "length", "original", "window", "group", "scheme", "model")}
    shown = names | {"folder": "DIR", "length": "LENGTH", "original": "ORIGINAL", "window": "W", "group": "N"}
    shown |= {"scheme": "the scheme", "model": "model", "type": "it", "checked": "", "dtype": ""}
    shown |= {"python": "'DIR'", "inner": "'DIR'"}
    shown |= {"problem": "it says why", "architecture": "its class"}
    for target, claims in CLAIMS.items():
        for claim in claims:
            why = claim.why.format(**shown).strip()
            typed = f" `{claim.command.format(**shown)}`" if claim.command else ""
            lines.append(_line([target, claim.positions, claim.models, claim.verdict, why + typed, claim.source]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
