"""Loading checkpoints in a fresh process: with the plugin, by bundled code, or by plain transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

PROJECT = Path(__file__).resolve().parents[2]
Mode = Literal["plugin", "remote", "plain"]


def store(model: Any, folder: Path, ids: torch.Tensor, how: dict[str, Any] | None = None, **options: Any) -> None:
    """Save `model` as users do, and beside it what its logits are and how to load it."""
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().contiguous()
    model.save_pretrained(folder, **options)
    save_file({"ids": ids.contiguous(), "logits": expected}, folder / "expected.safetensors")
    if how:
        (folder / "how.json").write_text(json.dumps(how))


CHILD = Path(__file__).with_name("fresh_child.py")


def load_all(root: Path, mode: Mode, timeout: int = 280, child: Path = CHILD) -> dict[str, dict[str, float | str]]:
    """Return what the script `child` reports of the checkpoints in `root`."""
    with tempfile.TemporaryDirectory() as home:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
            "HF_HOME": home,  # the cache of remote code too
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if mode == "plugin":
            environment["PYTHONPATH"] = str(PROJECT)
        done = subprocess.run(
            [sys.executable, str(child), str(root), mode],
            capture_output=True,
            stdin=subprocess.DEVNULL,  # transformers may ask whether to run the code
            text=True,
            timeout=timeout,
            cwd=home,
            env=environment,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, dict[str, float | str]] = json.loads(done.stdout.splitlines()[-1])
    return result
