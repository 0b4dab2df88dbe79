"""The light contract on every class; what it finds is written to support/, from which the support table is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from hf_posswap.patching.inspect.census import census
from hf_posswap.schemes import schemes_for
from hf_posswap.testing.tiny import language_models
from hf_posswap.utils.atomic_io import write_json
from tests.contract.light import Cell, cells
from tests.stock import UNBUILT

MODELS = language_models()
ROOT = Path(__file__).resolve().parents[2]


def family_name(name: str) -> str | None:
    """Return the family of the class called `name`; None: it has none."""
    return None if name in UNBUILT else census([name])[0].family


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_scheme_is_proved_or_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    found = dict(cells(name, tmp_path))
    failed = {scheme: what for scheme, what in found.items() if not isinstance(what, Cell)}
    assert not failed, "\n".join(f"{name} x {scheme}: {what!r}" for scheme, what in failed.items())
    assert list(found) == list(schemes_for("text"))
    assert all(cell.reason for cell in found.values() if cell.outcome == "no")
    rows = {scheme: {"outcome": cell.outcome, "reason": cell.reason} for scheme, cell in found.items()}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    told = {"class": name, "model_types": list(MODELS[name]), "family": family_name(name)}
    write_json(ROOT / "support" / f"{name}.json", {**told, **versions, "schemes": rows})
