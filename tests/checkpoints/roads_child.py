"""Runs in a fresh process without hf_posswap: goes every road that stock classes have to the checkpoints of a folder.

    python roads_child.py FOLDER plain

Beside a checkpoint's files lies `native/config.json`, of its stock class. The report holds, by checkpoint and road, the
error, or 0 where the unswapped model was loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.modules["hf_posswap"] = None  # type: ignore[assignment]  # as if it were not installed

import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

transformers.logging.set_verbosity_error()
ROOT = Path(sys.argv[1])


def roads(folder: Path) -> dict[str, Callable[[], Any]]:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    cls = getattr(transformers, architecture.removeprefix("Posswap"))

    def native() -> Any:
        return cls.config_class.from_pretrained(folder / "native")

    return {
        "its architecture": lambda: getattr(transformers, architecture),
        "the stock class": lambda: cls.from_pretrained(folder),
        "the stock class, mismatches ignored": lambda: cls.from_pretrained(folder, ignore_mismatched_sizes=True),
        "the stock config class": lambda: cls(cls.config_class.from_pretrained(folder)),
        "a config by hand": lambda: cls.from_pretrained(folder, config=native()),
        "an attention by hand": lambda: cls.from_pretrained(folder, attn_implementation="eager"),
        "load_state_dict": lambda: cls(native()).load_state_dict(load_file(folder / "model.safetensors")),
    }


def attempt(road: Callable[[], Any]) -> str | int:
    try:
        road()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return 0


def main() -> None:
    found = {folder.name: {name: attempt(road) for name, road in roads(folder).items()} for folder in ROOT.iterdir()}
    sys.stdout.write("\n" + json.dumps(found))


main()
