"""Runs in a fresh process: loads every checkpoint of a folder in one way, and prints a JSON report.

    python fresh_child.py FOLDER plugin|remote|plain

A checkpoint lies there with `expected.safetensors` (ids, logits) and, where wanted, `how.json` (arguments of
from_pretrained). The report holds, by name, the largest difference of logits, or the error.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

SEEN: set[str] = set()
ROOT, MODE = Path(sys.argv[1]), sys.argv[2]
if MODE == "plugin":
    import hf_posswap
else:
    sys.modules["hf_posswap"] = None  # type: ignore[assignment]  # as if it were not installed

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

transformers.logging.set_verbosity_error()


def options(folder: Path) -> dict[str, Any]:
    given = json.loads((folder / "how.json").read_text()) if (folder / "how.json").exists() else {}
    return {"trust_remote_code": True, **given} if MODE == "remote" else given


def compare(model: Any, folder: Path) -> float:
    stored = load_file(folder / "expected.safetensors")
    ids = stored["ids"].to(model.device)
    with torch.no_grad():
        found = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if not torch.isfinite(found).all():
        raise FloatingPointError("the logits are not finite")
    return float((found.float().cpu() - stored["logits"].float()).abs().max())


def attempt(load: Any, folder: Path) -> float | str:
    try:
        return compare(load(), folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def report(folder: Path) -> dict[str, float | str]:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    found = {"auto": attempt(lambda: load(folder), folder)}
    if MODE == "plugin":
        found["load"] = attempt(lambda: hf_posswap.load(folder, **options(folder)), folder)
    if MODE == "plain":
        native = getattr(transformers, architecture.removeprefix("Posswap"))
        found["forced"] = attempt(lambda: native.from_pretrained(folder, **options(folder)), folder)
    if MODE == "remote" and is_new(scheme_of(folder)):  # and what it saves loads again
        found["again"] = attempt(lambda: saved_again(folder), folder)
    return found


def scheme_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text()).get("posswap", {}).get("scheme", {}).get("name"))


def is_new(scheme: str) -> bool:
    """Return whether `scheme` is met for the first time: the code of a checkpoint depends on nothing else."""
    new = scheme not in SEEN
    SEEN.add(scheme)
    return new


def load(folder: Path) -> Any:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    masked = architecture.endswith("MaskedLM")
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, **options(folder))


def saved_again(folder: Path) -> Any:
    target = ROOT.parent / "again" / folder.name
    load(folder).save_pretrained(target)
    for name in ("expected.safetensors", "how.json"):
        if (folder / name).exists():
            shutil.copy(folder / name, target)
    return load(target)


def main() -> None:
    folders = sorted(ROOT.iterdir())
    found = {folder.name: report(folder) for folder in folders}
    if MODE == "remote":  # the code of each checkpoint is a copy of its own: none may take the place of another
        first, last = ((folder, load(folder)) for folder in (folders[0], folders[-1]))
        found["side by side"] = {
            "first": attempt(lambda: first[1], first[0]),
            "last": attempt(lambda: last[1], last[0]),
        }
    sys.stdout.write("\n" + json.dumps(found))  # transformers may have asked something on this line


main()
