"""Writes the record of a training into the config of its finished model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.manifest import write_listed_json
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.training import NAME, TrainingRecord, plain_name, swap_digest
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.phase import DONE, PhaseResult
from hf_posswap.training.trainer_proof import versions
from hf_posswap.utils.atomic_io import read_json, read_object

_HOLDERS = {"config.json": (NAME, "posswap"), SIDECAR: ("training", "record")}
"""Files that hold a record: its key, and the key of the swap."""
_NONE = (None, "", "")
_BASE = "weights of the base"
_DATA = "documents of "


def leave_record(
    recipe: Recipe, results: Sequence[PhaseResult], nll: Mapping[str, float | None], saved: Path, *, base: str
) -> TrainingRecord:
    """Write the record of a training into the config.json of its finished model, and return it.

    For an adapter, the record goes into the sidecar file with the swap of its base; without a swap there is no sidecar,
    and the record is only in the report.

    Args:
        recipe: as a whole.
        results: of its phases.
        nll: nats a token of held-out documents, by length.
        saved: folder of the finished model.
        base: public name of the base model.
    """
    identity = read_object(saved.parent / DONE, identity=dict)["identity"]
    path, name, swap = next(
        ((saved / file, *keys) for file, keys in _HOLDERS.items() if (saved / file).is_file()), _NONE
    )
    values = {} if path is None else read_json(path)
    swap_values = values.get(swap)
    record = TrainingRecord(
        base=plain_name(base),
        base_weights=identity[_BASE],
        recipe=None if recipe.name is None else plain_name(recipe.name),
        objective=recipe.objective.kind,
        what=recipe.what,
        steps=sum(result.steps for result in results),
        tokens=sum(result.tokens for result in results),
        data=_digest({key: value for key, value in identity.items() if key.startswith(_DATA)}),
        held_out={length: float(loss) for length, loss in nll.items() if loss is not None},
        swap=None if swap_values is None else swap_digest(SwapRecord.from_dict(swap_values)),
        software=versions(),
    )
    if path is not None:
        write_listed_json(path, {**values, name: record.to_dict()})
    return record


def _digest(documents: dict[str, Any]) -> str:
    """Return one digest of all documents, independent of their file names."""
    return hashlib.sha256(json.dumps(list(documents.values())).encode()).hexdigest()[:16]
