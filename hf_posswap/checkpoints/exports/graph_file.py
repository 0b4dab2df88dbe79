"""Write a model as a graph that needs neither transformers nor hf_posswap: ONNX, or a torch.export program.

Batch size and length are free. The graph is run and compared with the model before the file is put in place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_posswap.checkpoints.exports.graph_proof import answers, ran_alike, trials
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.checkpoints.exports.traced import Traced, signature_of
from hf_posswap.checkpoints.load import load
from hf_posswap.errors import CheckpointError, MissingDependencyError, UnsupportedSwapError
from hf_posswap.utils.atomic_io import check_room, replacing
from hf_posswap.utils.format import said_by
from hf_posswap.utils.threads import PROCESS, ignored_warnings, quiet_logger, without_stderr

LARGEST = 3 * 2**29
"""Bytes of weights that go into an ONNX file, whose format ends at 2 GiB; larger ones go into a second file."""
_NEEDED = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".pt2": ()}


@dataclass(frozen=True)
class GraphFile:
    """A graph that was written.

    Attributes:
        path: of the file.
        takes: the inputs, as a sentence.
        gives: the outputs, as a sentence.
        weights: their dtype, and where they are.
        compared: how near its outputs are to the model's, as a sentence.
    """

    path: Path
    takes: str
    gives: str
    weights: str
    compared: str


def write_graph(
    source: Path, out: Path, position_config: PositionConfig, *, trust_remote_code: bool = False
) -> GraphFile:
    """Write the model of the checkpoint in `source` to the file `out`, whole or not at all.

    Args:
        source: a folder.
        out: a new file: .onnx (float32) or .pt2 (the weights' dtype).
        position_config: its mechanism.
        trust_remote_code: run code of the checkpoint, where its config needs that.

    Raises:
        MissingDependencyError: the extra `onnx` is not installed.
        UnsupportedModelError: no family describes the model.
        UnsupportedSwapError: its input is not text, or it cannot be traced for every length.
        CheckpointError: the checkpoint cannot be read, or `out` not be written.
        SwapVerificationError: the graph computes something else.
    """
    suffix = out.suffix
    for package in _NEEDED[suffix]:
        if find_spec(package) is None:
            raise MissingDependencyError(package, "onnx")
    data_file = out.with_name(f"{out.name}.data")
    for new_file in (out, data_file):
        if os.path.lexists(new_file):
            raise CheckpointError(f"{new_file} already exists: give a new file name.")
    dtype: dict[str, Any] = {"dtype": torch.float32} if suffix == ".onnx" else {}
    model: Any = load(source, trust_remote_code=trust_remote_code, **dtype).eval()
    signature, width = signature_of(model), _bytes(model)
    check_room(out, width)
    batches = trials(model, signature, position_config)
    expected = [answers(model, signature, trial) for trial in batches]
    traced = Traced(model, signature)
    with _tracing(type(model).__name__, position_config):
        program = _MAKERS[suffix](traced)
    apart = suffix == ".onnx" and width > LARGEST
    with replacing(out) as path, replacing(data_file) if apart else nullcontext() as data:
        _SAVERS[suffix](program, path, apart)
        compared = ran_alike(path, signature, batches, expected, model.dtype)
        if data is not None:
            os.replace(path.with_name(data_file.name), data)
    where = f", in {data_file.name} next to it" if apart else ""
    takes = f"{', '.join(signature.inputs)}: int64, any batch and length"
    return GraphFile(out, takes, ", ".join(signature.outputs), f"{model.dtype}{where}".removeprefix("torch."), compared)


def _bytes(model: Any) -> int:
    return sum(
        weight.numel() * weight.element_size()
        for weight in {id(weight): weight for weight in model.parameters()}.values()
    )


def _onnx(traced: Traced) -> Any:
    """Return `traced` as ONNX."""
    signature = traced.signature
    return torch.onnx.export(
        traced,
        (),
        kwargs=signature.sample(),
        input_names=list(signature.inputs),
        output_names=list(signature.outputs),
        dynamic_shapes=signature.axes,
        dynamo=True,
        verbose=False,
    )


def _exported(traced: Traced) -> Any:
    """Return `traced` as a torch.export program."""
    free = torch.export.Dim.DYNAMIC
    shapes = {name: {axis: free for axis in axes} for name, axes in traced.signature.axes.items()}
    return torch.export.export(traced, (), traced.signature.sample(), dynamic_shapes=shapes)


def _save_onnx(program: Any, path: Path, apart: bool) -> None:
    program.save(path, external_data=apart)


def _save_exported(program: Any, path: Path, apart: bool) -> None:
    torch.export.save(program, path)


_MAKERS: dict[str, Callable[[Traced], Any]] = {".onnx": _onnx, ".pt2": _exported}
_SAVERS: dict[str, Callable[[Any, Path, bool], None]] = {".onnx": _save_onnx, ".pt2": _save_exported}


@contextmanager
def _tracing(named: str, position_config: PositionConfig) -> Iterator[None]:
    """Trace a model inside this block: torch logs nothing, and what it cannot trace is refused.

    Raises:
        UnsupportedSwapError: there is no graph, or it would hold only for the traced length.
    """
    try:
        with quiet_logger("torch", logging.ERROR), ignored_warnings(), torch.no_grad():
            with PROCESS, without_stderr():  # torch prints graphs that failed
                yield
    except Exception as error:  # tracing runs any model's code, and torch's, on symbolic values
        description = named if position_config.scheme is None else f"{named} with {position_config.scheme}"
        raise UnsupportedSwapError(
            f"torch {torch.__version__} cannot make a graph of {description} for any batch and length: "
            f"{_innermost(error)} Nothing was written."
        ) from error


def _innermost(error: BaseException) -> str:
    """Return the message of the error at the root of `error`."""
    while error.__cause__ is not None:
        error = error.__cause__
    return said_by(error)
