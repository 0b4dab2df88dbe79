"""`export`: judging a checkpoint for a program, and writing it as the program wants it."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.exports.gguf_keys import gguf_metadata, rope_freqs
from hf_posswap.checkpoints.exports.mechanism import Stated, stated
from hf_posswap.checkpoints.exports.rules import TARGETS, Judgement, judge
from hf_posswap.errors import CheckpointError, UnknownNameError, UnsupportedSwapError
from hf_posswap.patching.inspect.describe import describe_positions, on_meta, read_config
from hf_posswap.utils.atomic_io import replacing, write_json

GGUF_FILE = "gguf-metadata.json"


@dataclass(frozen=True)
class Export:
    """What a program makes of a checkpoint.

    Attributes:
        target: the program.
        verdict: "exact", "approximate" or "impossible".
        why: in words.
        config: the config.json that the program wants.
        changes: where it differs from the checkpoint's: name, from what, to what.
        gguf: for llama.cpp, metadata by key; {} otherwise.
        folder: where it was written to, or None.
    """

    target: str
    verdict: str
    why: str
    config: dict[str, Any]
    changes: dict[str, tuple[Any, Any]]
    gguf: dict[str, Any]
    folder: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return the export as JSON."""
        changes = {name: list(pair) for name, pair in self.changes.items()}
        folder = None if self.folder is None else str(self.folder)
        return {**self.__dict__, "changes": changes, "folder": folder}


def export(
    source: str | Path, target: str, out: str | Path | None = None, *, trust_remote_code: bool = False
) -> Export:
    """Return what the program `target` makes of the positions of a checkpoint, and write it as the program wants it.

    vLLM and SGLang were judged by their sources, text-generation-inference and llama.cpp by their documentation; none
    of them was run here. Whether a program has the model's class at all is not judged.

    Args:
        source: a folder; a Hub id where nothing is to be written.
        target: "transformers", "vllm", "sglang", "llamacpp" or "tgi".
        out: a new folder: gets the checkpoint with the config that the program wants (for llamacpp the one that
            convert_hf_to_gguf.py reads, and gguf-metadata.json); None writes nothing.
        trust_remote_code: run code that the checkpoint brings, where its config needs that.

    Raises:
        UnknownNameError: no such target.
        UnsupportedSwapError: `out` was given and the verdict is "impossible".
        CheckpointError: the checkpoint cannot be read, or `out` not be written.
        UnsupportedModelError: what its config says of positions is not understood here.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig
        >>> linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     LlamaConfig(rope_parameters=linear).save_pretrained(folder)
        ...     export(folder, "tgi").verdict
        'impossible'
    """
    if target not in TARGETS:
        raise UnknownNameError("target", target, TARGETS)
    if out is not None:
        _check_places(Path(source), Path(out))
    config = read_config(source, trust_remote_code=trust_remote_code)
    found = stated(config)
    judgement = judge(target, found)
    held = json.loads(config.to_json_string(use_diff=False)) if not Path(source).is_dir() else _held(Path(source))
    wanted = held if judgement.verdict == "impossible" else _wanted(held, found, judgement, target)
    changes = {n: (held.get(n), wanted.get(n)) for n in held.keys() | wanted.keys() if held.get(n) != wanted.get(n)}
    gguf = _gguf(config, found) if target == "llamacpp" else {}
    folder = None
    if out is not None:
        if judgement.verdict == "impossible":
            raise UnsupportedSwapError(f"{target} cannot run {str(source)!r}: {judgement.why} Nothing was written.")
        folder = _write(Path(source), Path(out), wanted, gguf)
    return Export(target, judgement.verdict, judgement.why, wanted, dict(sorted(changes.items())), gguf, folder)


def _held(source: Path) -> dict[str, Any]:
    return dict(json.loads((source / "config.json").read_text(encoding="utf-8")))


def _wanted(held: dict[str, Any], found: Stated, judgement: Judgement, target: str) -> dict[str, Any]:
    """Return `held`, a config.json, with what the program wants."""
    wanted = copy.deepcopy(held)
    if target != "transformers":
        wanted.pop("posswap", None)  # the record would no longer be what the config says
    if found.kind == "rope":
        rope = found.rope | judgement.rope
        wanted["rope_parameters"] = {name: value for name, value in rope.items() if value is not None}
        wanted.pop("rope_scaling", None)
    wanted |= judgement.config
    return {name: value for name, value in wanted.items() if value is not None or name not in judgement.config}


def _gguf(config: Any, found: Stated) -> dict[str, Any]:
    """Return llama.cpp's metadata, with the divisors of the angles where they are a tensor of their own."""
    if found.kind == "plugin":
        return {}
    width = describe_positions(on_meta(config)).geometry.rotary_dim
    metadata = gguf_metadata(found, width)
    divisors = rope_freqs(found, width) if metadata and width else None
    return metadata | ({"rope_freqs.weight": divisors} if divisors else {})


def _check_places(source: Path, out: Path) -> None:
    """Raise a CheckpointError where nothing can be copied from `source`, or to `out`."""
    if not source.is_dir():
        raise CheckpointError(f"{str(source)!r} is no folder: download the checkpoint first, and export the folder.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not empty; give a folder that is new.")
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{out} lies in the checkpoint itself; give another folder.")


def _write(source: Path, out: Path, config: dict[str, Any], gguf: dict[str, Any]) -> Path:
    """Copy the checkpoint to `out` with another config.json, whole or not at all."""
    with replacing(out) as temporary:
        shutil.copytree(source, temporary)
        write_json(temporary / "config.json", config)
        if gguf:
            write_json(temporary / GGUF_FILE, gguf)
    return out
