"""Trains small models for two steps each, really, and prints what the process held at most beyond the start."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hf_posswap.training.config import make_recipe
from recipes.bench.dry_beside import trainer_of
from tests.training.engine.memory_child import status


def measure(values: dict[str, Any]) -> int:
    """Return the most bytes that a training by the recipe of `values` adds to this process."""
    recipe = make_recipe(values)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier training freed would be used again, and not be seen
    before = status("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(recipe, Path(folder), steps=2)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        trainer.train()
    return status("VmHWM") - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    measure(asked[0])  # what is loaded and kept once has no part in it
    found = [measure(values) for values in asked]
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps(found))
