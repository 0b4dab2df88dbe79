"""Writes support.json, from which the README's table is made: what became of every pair, each proved on the way."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from hf_posswap import verify_swap
from hf_posswap.files import write_json
from hf_posswap.schemes import SCHEMES
from tests.contract.models import TINY
from tests.contract.pairs import Pair, family_name, own_pairs, refusal

ROOT = Path(__file__).resolve().parents[2]


def outcome(pair: Pair) -> dict[str, str]:
    """Return the row of one pair: patched and verified, or refused."""
    why = refusal(pair)
    if why is None:
        verify_swap(pair.swapped())
    found = "no" if why is not None else {"native": "native", "plugin": "attention"}[pair.plan.route]
    return {
        "family": family_name(pair),
        "model_type": pair.model,
        "scheme": pair.scheme,
        "kind": SCHEMES.get(pair.scheme).kind,
        "promises": SCHEMES.get(pair.scheme)().traits.letters(),
        "outcome": found,
        "reason": (why or "").replace(TINY[pair.model].model_class, "the model"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def test_every_pair_is_native_or_plugin_or_refused_with_a_reason() -> None:
    rows = [outcome(pair) for pair in own_pairs()]
    assert {row["outcome"] for row in rows} == {"native", "attention", "no"}
    assert all(row["reason"] for row in rows if row["outcome"] == "no")
    write_json(ROOT / "support.json", rows)
