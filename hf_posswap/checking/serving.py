"""What serving programs make of a model's positions, and the JSON that they want."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hf_posswap.checkpoints.doctor_findings import Diagnosis, Finding
from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import Judgement, filled, is_known, judge

SERVERS = ("vllm", "sglang", "llamacpp", "tgi")
"""The serving programs that compute positions by themselves."""
_USUAL_THETA = 10000.0
"""What programs take where they read none."""


def serving_findings(config: Any, diagnosis: Diagnosis | None = None) -> Iterator[Finding]:
    """Yield the programs that compute other positions than transformers, and those that want other keys.

    Args:
        config: of the model.
        diagnosis: of its checkpoint, whose commands are then named; None: it is a live model.

    Raises:
        PosswapError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError: no family, no length, or values
            that fail.
    """
    positions = position_config_of(config)
    is_plain = positions.kind == "table" or positions.kind == "rope" and positions.rope_type == "default"
    if not positions.generates:
        return
    source = "DIR" if diagnosis is None else diagnosis.source
    served = {} if diagnosis is None else {each.target: each for each in diagnosis.serving}
    for target in SERVERS:
        if not is_known(target, positions):
            continue
        judged = judge(target, positions)
        known = served.get(target)
        verdict: str = judged.verdict
        why, engine = judged.why, judged.claim.source
        command = filled(judged.claim.command, positions, source)
        if known is not None:
            verdict, why, command = known.verdict, known.why, known.command
        if verdict != "exact" and is_plain:
            continue  # the program lacks the class, whatever its positions
        if verdict != "exact":
            what = "does not compute these positions" if verdict == "impossible" else "computes them roughly"
            do = f"Run: {command}" if command else "Serve it with another program."
            yield Finding("note", target, f"{target} ({engine}) {what}: {why}", do, "serving")
            continue
        wanted = _wanted(judged, positions, config)
        if wanted:
            yield Finding(
                "note", target, f"{target} ({engine}) computes these positions if config.json has "
                f"{json.dumps(wanted)}.",
                f"Write that, or run: posswap export {source} --target {target} -o "
                f"{'model.gguf' if target == 'llamacpp' else 'OUT'}", "serving",
            )  # fmt: skip


def _wanted(judged: Judgement, positions: PositionConfig, config: Any) -> dict[str, Any]:
    """Return the keys that a program wants and the config lacks or has otherwise; {}: its defaults are the same."""
    if positions.rope_type == "default" and positions.rope.get("rope_theta", _USUAL_THETA) == _USUAL_THETA:
        return {}
    values = config.to_dict()
    rope = {key: value for key, value in judged.spelling.rope.items() if not _same(positions.rope.get(key), value)}
    outer = {key: value for key, value in judged.spelling.config.items() if not _same(values.get(key), value)}
    return outer | ({"rope_parameters": rope} if rope else {})


def _same(has: Any, wanted: Any) -> bool:
    if isinstance(has, float) and isinstance(wanted, float):
        return abs(has - wanted) < 1e-6 * abs(wanted)
    return bool(has == wanted)
