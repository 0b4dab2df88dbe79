"""`export`: judge a checkpoint for a program, and write it as the program wants it."""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posswap.checkpoints.exports.gguf_contents import MAKERS, divisors, gguf_metadata, rotated
from hf_posswap.checkpoints.exports.gguf_file import DTYPES, vocabulary_caveat, write_gguf
from hf_posswap.checkpoints.exports.graph_file import write_graph
from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import TARGETS, Judgement, filled, judge, spell_rope
from hf_posswap.checkpoints.manifest import MANIFEST
from hf_posswap.errors import CheckpointError, OptionError, UnknownNameError, UnsupportedSwapError
from hf_posswap.patching.inspect.describe import describe_positions, on_meta, read_config
from hf_posswap.utils.atomic_io import read_object, replacing, write_json
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.weight_shapes import folder_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILES = {"llamacpp": ".gguf", "onnx": ".onnx", "torch": ".pt2"}
"""The suffixes of the files that are written for a program."""
GRAPHS = ("onnx", "torch")
"""The targets that take only a file: the model as a graph."""
_OPENED = {"onnx": "onnxruntime.InferenceSession({file!r})", "torch": "torch.export.load({file!r}).module()"}


@dataclass(frozen=True, repr=False)
class Export(ResultView):
    """What a program makes of a checkpoint, as `export` found.

    Attributes:
        target: the program.
        verdict: "exact", "approximate" or "impossible".
        why: in words.
        engine: the program's version that the verdict is about, and whether it was run or read.
        command: what to type; "" where nothing helps.
        config: the config.json that the program wants.
        changes: where it differs from the checkpoint's: name, from what, to what.
        gguf: for llama.cpp, metadata and tensors of divisors by name; {} otherwise.
        folder: where it was written to, a folder or a file; None where nothing was written.
        notes: of a file, what was written and how it was compared, in words; for llama.cpp without a file, why the
            vocabulary cannot be exported; {} otherwise.
    """

    target: str
    verdict: str
    why: str
    engine: str
    command: str
    config: dict[str, object]
    changes: dict[str, tuple[object, object]]
    gguf: dict[str, object]
    folder: Path | None
    notes: dict[str, str]

    def __str__(self) -> str:
        return in_lines(f"{name:<11} {value}" for name, value in self._html_rows())

    def _repr_facts(self) -> dict[str, object]:
        folder = None if self.folder is None else str(self.folder)
        return {"target": self.target, "verdict": self.verdict, "why": self.why, "folder": folder}

    def _html_rows(self) -> list[tuple[str, str]]:
        rows = [
            ("target", self.target),
            ("verdict", self.verdict),
            ("why", self.why),
            ("engine", self.engine),
            ("command", self.command),
            *((f"config.{name}", f"{before!r} becomes {after!r}") for name, (before, after) in self.changes.items()),
            ("written to", "" if self.folder is None else str(self.folder)),
            *self.notes.items(),
        ]
        return [(name, value) for name, value in rows if value]

    def to_dict(self) -> dict[str, object]:
        """Return the export as JSON."""
        changes = {name: list(pair) for name, pair in self.changes.items()}
        folder = None if self.folder is None else str(self.folder)
        return {**self.__dict__, "changes": changes, "folder": folder}


def export(
    source: str | Path,
    target: str,
    out: str | Path | None = None,
    *,
    vocab: str | Path | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Export:
    """Return what the program `target` makes of the positions of a checkpoint, and write it as the program wants it.

    The verdict is a row of a table (the page on serving has it), which says of which version it is and whether that was
    run or read. Whether a program has the model's class at all is not judged.

    Args:
        source: a folder or a GGUF file; a Hub id where nothing is to be written.
        target: "transformers", "vllm", "sglang", "llamacpp", "tgi", "onnx", "torch", "tei" (text-embeddings-inference)
            or "sentence-transformers".
        out: None writes nothing. A new folder gets the checkpoint with the config that the program wants (for llamacpp
            the one that convert_hf_to_gguf.py reads). For llamacpp also a new file that ends
            in .gguf (extra `gguf`): the model itself, with every rotation by fixed angles. Where xllamacpp is
            installed, llama.cpp runs it and its outputs are compared before it is there. For onnx a new file that ends
            in .onnx (extra `onnx`), for torch one that ends in .pt2 (a program of torch.export): the model as a graph,
            whatever its mechanism, for any batch and length; it is run and compared before it is there.
        vocab: for a .gguf file, another one that has the vocabulary; needed where the tokenizer is not a byte-level BPE
            that is known here (GPT-2, SmolLM2, Llama 3, Qwen2 and their like).
        dtype: for a .gguf file, "f32", "f16", "bf16" or "q8_0": what the matrices become; None: they stay as they are.
        trust_remote_code: run code that the checkpoint brings, where its config needs that.

    Raises:
        UnknownNameError: no such target.
        OptionError: `out` is not what the program takes, or `vocab` or `dtype` is for another one than llama.cpp.
        UnsupportedSwapError: `out` was given and the verdict is "impossible", or that kind of `out` cannot hold it, or
            torch cannot make a graph of the model.
        CheckpointError: the checkpoint cannot be read, or `out` not be written.
        UnsupportedModelError: what its config says of positions is not understood here, or its tokenizer not.
        MissingDependencyError: a .gguf file is asked for without the extra `gguf`, or .onnx without `onnx`.
        SwapVerificationError: the program computes something else from the file.

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
    source = checkpoint_of(source)
    out_path = None if out is None else Path(out)
    is_file = out_path is not None and out_path.suffix in FILES.values()
    _check_options(target, out_path, vocab, dtype)
    if out_path is not None:
        _check_places(Path(source), out_path, is_file)
    config = read_config(source, trust_remote_code=trust_remote_code)
    position_config = position_config_of(config)
    judgement = judge(target, position_config)
    config_json = (
        json.loads(config.to_json_string(use_diff=False))
        if not Path(source).is_dir()
        else read_object(Path(source) / "config.json")
    )
    wanted_json = (
        config_json if judgement.verdict == "impossible" else _wanted(config_json, position_config, judgement, target)
    )
    changes = {
        n: (config_json.get(n), wanted_json.get(n))
        for n in config_json.keys() | wanted_json.keys()
        if config_json.get(n) != wanted_json.get(n)
    }
    gguf = _gguf(config, position_config) if target == "llamacpp" else {}
    notes: dict[str, str] = {}
    if out_path is not None:
        _check_road(str(source), target, judgement, is_file)
        if target in GRAPHS:
            written = write_graph(Path(source), out_path, position_config, trust_remote_code=trust_remote_code)
            notes = asdict(written)
        elif is_file:
            vocab_path = None if vocab is None else Path(vocab)
            notes = asdict(write_gguf(Path(source), out_path, position_config, vocab_path, dtype))
        else:
            _write(Path(source), out_path, wanted_json)
    command = filled(judgement.claim.command, position_config, str(source if out_path is None or is_file else out_path))
    if is_file and target in GRAPHS:
        command = _OPENED[target].format(file=str(out_path))
    elif is_file:  # the part that serves the file
        command = command.rpartition(" && ")[2].replace("model.gguf", shlex.quote(str(out_path)))
    elif target == "llamacpp" and out_path is None:
        caveat, command = vocabulary_caveat(str(source), command)
        notes = {"vocabulary": caveat} if caveat else notes
    claim, ordered = judgement.claim, dict(sorted(changes.items()))
    return Export(
        target, claim.verdict, judgement.why, claim.source, command, wanted_json, ordered, gguf, out_path, notes
    )


def _check_options(target: str, out: Path | None, vocab: str | Path | None, dtype: str | None) -> None:
    """Raise an OptionError where the program does not take `out`, or `vocab` or `dtype` has no use."""
    suffix = None if out is None else out.suffix
    owner = next((name for name, ending in FILES.items() if ending == suffix), None)
    if owner not in (None, target):
        raise OptionError(f"{target} takes {_wanted_out(target)}: a {suffix} file is for --target {owner}.")
    if out is not None and owner is None and target in GRAPHS:
        raise OptionError(f"{target} takes {_wanted_out(target)}, and {out} is none.")
    if vocab is not None and target != "llamacpp":
        raise OptionError(f"{target} takes {_wanted_out(target)}: a vocabulary is llama.cpp's (llamacpp).")
    if vocab is not None and suffix != FILES["llamacpp"]:
        raise OptionError(f"a vocabulary goes into a {FILES['llamacpp']} file: name one by -o, or by out in Python.")
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype is {', '.join(DTYPES)}, got {dtype!r}.")
    if dtype is not None and suffix != FILES["llamacpp"]:
        raise OptionError(
            f"dtype is of a {FILES['llamacpp']} file: name one by -o, or by out in Python. Other targets keep the "
            "weights as they are."
        )


def _wanted_out(target: str) -> str:
    file = f"a file that ends in {FILES.get(target)}"
    return file if target in GRAPHS else f"a folder or {file}" if target in FILES else "a folder"


def _check_road(source: str, target: str, judgement: Judgement, is_file: bool) -> None:
    """Refuse to write what the program would run wrongly."""
    if judgement.verdict == "impossible":
        raise UnsupportedSwapError(f"{target} cannot run {source!r}: {judgement.why} Nothing was written.")
    roads = judgement.claim.roads
    if not roads:
        raise UnsupportedSwapError(f"nothing needs to be written of {source!r} for {target}: {judgement.why}")
    if is_file and not {"gguf", "graph"} & set(roads):
        raise UnsupportedSwapError(
            f"a {FILES[target]} file of {source!r} is not written here. Give a folder to -o, and use llama.cpp's "
            "convert_hf_to_gguf.py on it. Nothing was written."
        )
    if not is_file and "folder" not in roads:
        raise UnsupportedSwapError(
            f"a folder of {source!r} for llama.cpp's converter is not written here: {judgement.why} Give -o the name "
            f"of a {FILES[target]} file. Nothing was written."
        )


def _check_places(source: Path, out: Path, is_file: bool) -> None:
    """Raise a CheckpointError where `source` cannot be copied, or a folder cannot be made at `out`."""
    if not source.is_dir():
        raise CheckpointError(
            f"{str(source)!r} is not a folder: download the checkpoint first, then export the folder."
        )
    if is_file:
        return
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not empty: give a new folder.")
    if os.path.ismount(out):
        raise CheckpointError(f"{out} is a mount point, which cannot be replaced as a whole: give a folder in it.")
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{out} is inside the checkpoint: give another folder.")


def _wanted(
    config_json: dict[str, object], position_config: PositionConfig, judgement: Judgement, target: str
) -> dict[str, object]:
    """Return `config_json`, the content of a config.json, as the program wants it."""
    wanted = copy.deepcopy(config_json)
    if target != "transformers" and position_config.kind != "plugin":
        wanted.pop("posswap", None)  # the record would no longer match the config
    if position_config.kind == "rope":
        wanted["rope_parameters"] = spell_rope(wanted.get("rope_parameters"), position_config, judgement)
        wanted.pop("rope_scaling", None)
    wanted |= judgement.spelling.config
    return {name: value for name, value in wanted.items() if value is not None or name not in judgement.spelling.config}


def _gguf(config: PreTrainedConfig, position_config: PositionConfig) -> dict[str, object]:
    """Return llama.cpp's metadata, with the divisors of the angles where they are a separate tensor."""
    if position_config.kind == "plugin":
        return {}
    width = describe_positions(on_meta(config)).geometry.rotary_dim
    if position_config.kind == "rope" and position_config.model_type in MAKERS:
        width = rotated(config, position_config)
    metadata = gguf_metadata(position_config, width)
    return metadata | (divisors(config, position_config, width) if metadata and width else {})


def _write(source: Path, out: Path, config: Mapping[str, object]) -> None:
    """Copy the checkpoint to `out` with another config.json, whole or not at all.

    Raises:
        CheckpointError: its weights are incomplete, or it cannot be copied.
    """
    folder_shapes(source)
    with replacing(out) as temporary:
        try:
            shutil.copytree(
                source, temporary, ignore=shutil.ignore_patterns(MANIFEST)
            )  # it lists the files of `source`
        except shutil.Error as error:  # copytree continues after an error, and lists all
            failed_path, _, why = error.args[0][0]
            reason = str(why).partition(": '")[0]  # without the names of both files
            raise CheckpointError(f"cannot copy {failed_path} to {out}: {reason}. Nothing was written.") from error
        write_json(temporary / "config.json", config)
