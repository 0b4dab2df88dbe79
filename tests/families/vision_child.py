"""Runs in a fresh process: loads every checkpoint of a folder in one way, and prints a JSON report.

    python vision_child.py FOLDER plugin|remote|plain

A checkpoint lies there with `expected.safetensors`: images by their size, and the last hidden states of what sees them.
The report holds, by name and way of loading, the largest difference of states, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT, MODE = Path(sys.argv[1]), sys.argv[2]
if MODE == "plugin":
    import hf_posswap
else:
    sys.modules["hf_posswap"] = None  # type: ignore[assignment]  # as if it were not installed

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

transformers.logging.set_verbosity_error()


def compare(model: Any, folder: Path) -> float:
    stored, gaps = load_file(folder / "expected.safetensors"), []
    tower = getattr(model, "vision_model", None) or getattr(model, model.base_model_prefix, model)
    for name in (name.removeprefix("images ") for name in stored if name.startswith("images ")):
        if getattr(model, "_posswap", None) is None and name != "x".join(2 * [str(tower.config.image_size)]):
            continue  # a native checkpoint in a stock class, which takes other sizes only where it is told to
        with torch.no_grad():
            found = tower.eval()(pixel_values=stored[f"images {name}"]).last_hidden_state
        gaps.append(float((found - stored[f"states {name}"]).abs().max()))
    return max(gaps)


def attempt(load: Any, folder: Path) -> float | str:
    try:
        return compare(load(), folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def report(folder: Path) -> dict[str, float | str]:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    flag = {"trust_remote_code": True} if MODE == "remote" else {}
    classes = [transformers.AutoModel] if "ForImage" not in name else [transformers.AutoModelForImageClassification]
    if MODE == "plain":
        classes.append(getattr(transformers, name.removeprefix("Posswap")))
    ways = {cls.__name__: lambda cls=cls: cls.from_pretrained(folder, **flag) for cls in classes}
    if MODE == "plugin":
        ways["load"] = lambda: hf_posswap.load(folder)
    return {way: attempt(load, folder) for way, load in ways.items()}


sys.stdout.write("\n" + json.dumps({folder.name: report(folder) for folder in sorted(ROOT.iterdir())}))
