"""How each program reads a checkpoint's positions, and what config.json must say for it.

The verdicts are rows of one table of claims, which `export`, `doctor` and the page on serving read; with it each
program's spelling of transformers' settings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_posswap.checkpoints.exports.claims import Claim, Verdict
from hf_posswap.checkpoints.exports.claims_files import LLAMACPP, ONNX, TORCH
from hf_posswap.checkpoints.exports.claims_folders import SENTENCE_TRANSFORMERS, SGLANG, TEI, TGI, TRANSFORMERS, VLLM
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.compat.transformers_loading import auto_class_name
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
"""By program, the rows in order: the first that fits a checkpoint applies; the last fits all."""
_SAME_CODE = ("transformers", "onnx", "torch", "sentence-transformers")
"""The programs that run transformers' code, whatever it reads positions from."""
_SEEN_BY_LAYER_TYPE = {"vllm": ("gemma3_text",), "llamacpp": ("gemma3_text",)}
"""The model types with such parameters that other programs were run with."""


def is_known(target: str, position_config: PositionConfig) -> bool:
    """Return whether the rows of the program `target` cover such a checkpoint."""
    if target in _SAME_CODE:
        return True
    seen = position_config.model_type in _SEEN_BY_LAYER_TYPE.get(target, ())
    return position_config.has_length and (seen or not position_config.rope_set)


def claim_for(target: str, position_config: PositionConfig) -> Claim:
    """Return the row of the program `target` for a checkpoint's positions.

    Raises:
        UnsupportedModelError: no row covers it.
    """
    if not is_known(target, position_config):
        known = f"Known: {', '.join(_SAME_CODE)}"
        if not position_config.has_length:
            raise UnsupportedModelError(
                f"the config of a {position_config.model_type} has no max_position_embeddings: it is unknown how "
                f"{target} reads its positions. {known}."
            )
        raise UnsupportedModelError(
            f"the config has rope parameters for each layer type: it is unknown how {target} reads those of a "
            f"{position_config.model_type}. {known}; vllm and llamacpp with gemma3_text."
        )
    return next(claim for claim in CLAIMS[target] if claim.fits(position_config))


def filled(text: str, position_config: PositionConfig, folder: str = "DIR") -> str:
    """Return a text of a row, its placeholders filled in from the checkpoint.

    Args:
        text: `why` or `command` of a row.
        position_config: the mechanism.
        folder: of the checkpoint; it is quoted for a shell or Python.
    """
    known = position_config.original is not None and position_config.scheme is not None
    headless = "AutoModelForCausalLM" if position_config.generates else "AutoModel"
    values = {
        "folder": shlex.quote(folder),
        "python": repr(folder),
        "inner": re.sub(r'([\\"$`])', r"\\\1", repr(folder)),  # as a shell reads it between double quotes
        "length": position_config.length,
        "original": position_config.original or position_config.length,
        "window": position_config.settings.get("window", position_config.window),
        "group": position_config.settings.get("group"),
        "scheme": position_config.scheme,
        "full": ", ".join(str(i + 1) for i, slides in enumerate(position_config.slides) if not slides) or "none",
        "model": position_config.model_type,
        "type": position_config.rope_type,
        "problem": position_config.unpaged,
        "architecture": position_config.architecture or "its class",
        "auto": auto_class_name(position_config.architecture) if position_config.architecture else headless,
        "sentences": "CrossEncoder" if position_config.architecture.endswith(_CLASSIFIER) else "SentenceTransformer",
        "dtype": " --dtype float32" if position_config.dtype == "float32" else "",
        "checked": "It is, in the exported config." if known else "Whether it is here is unknown: check it.",
    }
    return text.format(**values)


_CLASSIFIER = "ForSequenceClassification"


def claims_markdown() -> str:
    """Return the table for the page on serving."""
    head = ["program", "positions", "models", "verdict", "why, and what to type", "known from"]
    lines = [_line(head), _line(["---"] * len(head))]
    names = {name: "{" + name + "}" for name in ("folder", "length", "original", "window", "group", "scheme", "model")}
    shown = names | {"folder": "DIR", "length": "LENGTH", "original": "ORIGINAL", "window": "W", "group": "N"}
    shown |= {"scheme": "the scheme", "model": "model", "type": "it", "checked": "", "dtype": ""}
    shown |= {"full": "its own list"}
    shown |= {"python": "'DIR'", "inner": "'DIR'"}
    shown |= {"problem": "it says why", "architecture": "its class", "auto": "AutoModelForCausalLM"}
    shown |= {"sentences": "SentenceTransformer"}
    for target, claims in CLAIMS.items():
        for claim in claims:
            why = claim.why.format(**shown).strip()
            typed = f" `{claim.command.format(**shown)}`" if claim.command else ""
            lines.append(_line([target, claim.positions, claim.models, claim.verdict, why + typed, claim.source]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


@dataclass(frozen=True)
class Spelling:
    """What a program's config must say.

    Attributes:
        rope: values to set in the rope parameters; None removes one.
        config: values to set in the config itself; None removes one.
    """

    rope: dict[str, object] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """How a program runs a mechanism.

    Attributes:
        claim: its row of the table.
        why: the row's reason, with the numbers of this checkpoint.
        spelling: what the config must say.
    """

    claim: Claim
    why: str
    spelling: Spelling

    @property
    def verdict(self) -> Verdict:
        return self.claim.verdict


def judge(target: str, position_config: PositionConfig) -> Judgement:
    """Return how the program `target` runs a mechanism.

    Raises:
        UnsupportedModelError: as `claim_for`.
    """
    claim = claim_for(target, position_config)
    spelled = Spelling() if claim.verdict == "impossible" else TARGETS[target](position_config)
    return Judgement(claim, filled(claim.why, position_config), spelled)


def spell_rope(parameters: Any, position_config: PositionConfig, judgement: Judgement) -> dict[str, object]:
    """Return the rope parameters `parameters` of a config as a program wants them; of other layer types as they are."""
    rope = {
        name: value for name, value in (position_config.rope | judgement.spelling.rope).items() if value is not None
    }
    return parameters | {position_config.rope_set: rope} if position_config.rope_set else rope


def _vllm(position_config: PositionConfig) -> Spelling:
    match position_config.rope_type:
        case "linear" if position_config.model_type != "gemma3_text":  # of those it takes the length as it is
            return _multiplied(position_config)
        case "yarn":
            return Spelling({"attention_factor": position_config.attention})
        case "longrope":
            return _mscale(position_config)
    return Spelling()


def _sglang(position_config: PositionConfig) -> Spelling:
    match position_config.rope_type:
        case "linear":
            return _multiplied(position_config)
        case "yarn":
            factor = position_config.attention / position_config.usual_attention
            return Spelling({"attn_factor": factor, "mscale": None, "mscale_all_dim": None})
        case "longrope":
            return _mscale(position_config)
    return Spelling()


def _old_spelling(position_config: PositionConfig) -> Spelling:
    """Return transformers 4's spelling of the rope parameters, for programs that read only that."""
    if position_config.rope_set:  # it had none for layer types
        return Spelling()
    if position_config.kind != "rope":
        return Spelling(config={"n_ctx": position_config.length} if position_config.model_type == "gpt2" else {})
    shared = {
        "rope_theta": position_config.rope.get("rope_theta"),
        "partial_rotary_factor": position_config.rope.get("partial_rotary_factor"),
    }
    scaling = (
        None if position_config.rope_type == "default" else position_config.rope | {"type": position_config.rope_type}
    )
    return Spelling(config=shared | {"rope_scaling": scaling})


def _multiplied(position_config: PositionConfig) -> Spelling:
    """Spell "linear" for a program that takes max_position_embeddings times the factor for the context length."""
    known = position_config.original is not None and position_config.scheme is not None
    return Spelling(config={"max_position_embeddings": position_config.original} if known else {})


def _mscale(position_config: PositionConfig) -> Spelling:
    """Spell "longrope" for a program that computes the attention factor itself unless it is given."""
    return Spelling({"short_mscale": position_config.attention, "long_mscale": position_config.attention})


TARGETS: dict[str, Callable[[PositionConfig], Spelling]] = {
    "transformers": lambda position_config: Spelling(),
    "vllm": _vllm,
    "sglang": _sglang,
    "llamacpp": _old_spelling,
    "tgi": _old_spelling,
    "onnx": lambda position_config: Spelling(),
    "torch": lambda position_config: Spelling(),
    "tei": lambda position_config: Spelling(),
    "sentence-transformers": lambda position_config: Spelling(),
}
"""The programs that `export` knows, each with its spelling."""
