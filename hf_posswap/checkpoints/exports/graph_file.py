"""Writing a model as a graph that needs neither transformers nor hf_posswap: ONNX, or a program of torch.export.

Batch and length are free. The graph is run and compared with the model before the file is there.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_posswap.checkpoints.exports.graph_proof import answers, ran_alike, trials
from hf_posswap.checkpoints.exports.mechanism import Stated
from hf_posswap.checkpoints.exports.traced import Traced, signature_of
from hf_posswap.checkpoints.load import load
from hf_posswap.errors import CheckpointError, MissingDependencyError, UnsupportedSwapError
from hf_posswap.utils.atomic_io import check_room, replacing
from hf_posswap.utils.format import said_by
from hf_posswap.utils.threads import PROCESS, quiet_logger

LARGEST = 3 * 2**29
"""Bytes of weights that go into an ONNX file itself, whose format ends at 2 GiB; more go into a file beside it."""
_NEEDED = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".pt2": ()}


@dataclass(frozen=True)
class GraphFile:
    """A graph that was written.

    Attributes:
        path: of the file.
        takes: what goes in, in words.
        gives: what comes out, in words.
        weights: their type, and where they are.
        compared: with the model's outputs, in words.
    """

    path: Path
    takes: str
    gives: str
    weights: str
    compared: str


def write_graph(source: Path, out: Path, stated: Stated, *, trust_remote_code: bool = False) -> GraphFile:
    """Write the model of the checkpoint in `source` to the file `out`, whole or not at all.

    Args:
        source: a folder.
        out: a new file; what it ends in says the kind: .onnx in float32, .pt2 in the weights' own type.
        stated: its mechanism.
        trust_remote_code: run code that the checkpoint brings, where its config needs that.

    Raises:
        MissingDependencyError: the extra `onnx` is not installed.
        UnsupportedModelError: no family describes the model.
        UnsupportedSwapError: it reads something else than text, or cannot be traced for any length.
        CheckpointError: the checkpoint cannot be read, or `out` not be written.
        SwapVerificationError: the graph computes something else.
    """
    kind = out.suffix
    for package in _NEEDED[kind]:
        if find_spec(package) is None:
            raise MissingDependencyError(package, "onnx")
    beside = out.with_name(f"{out.name}.data")
    for place in (out, beside):
        if os.path.lexists(place):
            raise CheckpointError(f"{place} is there already; give a file that is new.")
    dtype: dict[str, Any] = {"dtype": torch.float32} if kind == ".onnx" else {}
    model: Any = load(source, trust_remote_code=trust_remote_code, **dtype).eval()
    signature, width = signature_of(model), _bytes(model)
    check_room(out, width)
    asked = trials(model, signature, stated)
    expected = [answers(model, signature, trial) for trial in asked]
    traced = Traced(model, signature)
    with _tracing(type(model).__name__, stated):
        program = _MAKERS[kind](traced)
    apart = kind == ".onnx" and width > LARGEST
    with replacing(out) as path, replacing(beside) if apart else nullcontext() as data:
        _SAVERS[kind](program, path, apart)
        compared = ran_alike(path, signature, asked, expected, model.dtype)
        if data is not None:
            os.replace(path.with_name(beside.name), data)
    where = f", in {beside.name} beside it" if apart else ""
    takes = f"{', '.join(signature.inputs)}: int64, any batch and length"
    return GraphFile(out, takes, ", ".join(signature.outputs), f"{model.dtype}{where}".removeprefix("torch."), compared)


def _bytes(model: Any) -> int:
    return sum(one.numel() * one.element_size() for one in {id(one): one for one in model.parameters()}.values())


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
    """Return `traced` as a program of torch.export."""
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
def _tracing(named: str, stated: Stated) -> Iterator[None]:
    """Inside the block, in which a model is traced, torch is quiet, and what it cannot trace is refused.

    Raises:
        UnsupportedSwapError: the graph would hold for the length that it was traced with alone, or there is none.
    """
    try:
        with PROCESS, quiet_logger("torch", logging.ERROR), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            with redirect_stderr(io.StringIO()):  # it shows graphs that failed
                yield
    except Exception as error:  # tracing runs the code of any model, and torch's own, on values that are no numbers
        what = named if stated.scheme is None else f"{named} with {stated.scheme}"
        raise UnsupportedSwapError(
            f"torch {torch.__version__} cannot make a graph of {what} for any batch and length: {_innermost(error)} "
            "Nothing was written."
        ) from error


def _innermost(error: BaseException) -> str:
    """Return what that error says which `error` came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return said_by(error)
