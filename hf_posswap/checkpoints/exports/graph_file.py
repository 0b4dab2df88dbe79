"""Write a model as a graph that needs neither transformers nor hf_posswap: ONNX, or a torch.export program.

Batch size and length are free. The graph is run and compared with the model before the file is put in place: the model
reads each text alone; the graph also reads batches that are padded on the left or right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.checkpoints.exports.traced import Signature, Traced, run, signature_of
from hf_posswap.checkpoints.load import load
from hf_posswap.errors import MissingDependencyError, SwapVerificationError, UnsupportedSwapError
from hf_posswap.families.rope_config import FOLLOW_LENGTH
from hf_posswap.patching.inspect.describe import describe_positions
from hf_posswap.utils.atomic_io import check_new_file, check_room, replacing
from hf_posswap.utils.format import said_by
from hf_posswap.utils.threads import PROCESS, ignored_warnings, quiet_logger, without_stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = dict[str, Tensor]
MOST = 512
"""Tokens of each text that are compared: the last ones of a longer text."""
FARTHEST = 8192
"""Tokens of the longest text that is read to go beyond the original length."""
BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 5e-2, torch.bfloat16: 4e-1}
"""Largest difference by the dtype of the weights: log probabilities (or log odds, where there is one score) in nats,
states relative to the largest."""
_SHORT = 24
LARGEST = 3 * 2**29
"""Bytes of weights that go into an ONNX file, whose format ends at 2 GiB; larger ones go into a second file."""
_NEEDED = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".pt2": ()}


@dataclass(frozen=True)
class GraphFile:
    """A graph that was written.

    Attributes:
        takes: the inputs, as a sentence.
        gives: the outputs, as a sentence.
        weights: their dtype, and where they are.
        compared: how near its outputs are to the model's, as a sentence.
    """

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
        check_new_file(new_file)
    dtype: dict[str, Any] = {"dtype": torch.float32} if suffix == ".onnx" else {}
    model: PreTrainedModel = load(source, trust_remote_code=trust_remote_code, **dtype).eval()
    signature = signature_of(model)
    width = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    check_room(out, width)
    batches = trials(model, signature, position_config)
    expected = [answers(model, signature, trial) for trial in batches]
    traced = Traced(model, signature)
    with _tracing(type(model).__name__, position_config):
        program = _program_of(traced, suffix)
    apart = suffix == ".onnx" and width > LARGEST
    with replacing(out) as path, replacing(data_file) if apart else nullcontext() as data:
        if suffix == ".onnx":
            program.save(path, external_data=apart)
        else:
            torch.export.save(program, path)
        compared = ran_alike(path, signature, batches, expected, model.dtype)
        if data is not None:
            os.replace(path.with_name(data_file.name), data)
    where = f", in {data_file.name} next to it" if apart else ""
    takes = f"{', '.join(signature.inputs)}: int64, any batch and length"
    return GraphFile(takes, ", ".join(signature.outputs), f"{model.dtype}{where}".removeprefix("torch."), compared)


def _program_of(traced: Traced, suffix: str) -> Any:
    """Return `traced` as ONNX or as a torch.export program, by the suffix of its file."""
    signature = traced.signature
    if suffix == ".pt2":
        free = torch.export.Dim.DYNAMIC
        shapes = {name: {axis: free for axis in axes} for name, axes in signature.axes.items()}
        return torch.export.export(traced, (), signature.sample(), dynamic_shapes=shapes)
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
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        description = named if position_config.scheme is None else f"{named} with {position_config.scheme}"
        raise UnsupportedSwapError(
            f"torch {torch.__version__} cannot make a graph of {description} for any batch and length: "
            f"{said_by(root)} Nothing was written."
        ) from error


@dataclass(frozen=True)
class Trial:
    """Texts that are read as one batch.

    Attributes:
        texts: inputs of each text, [1, n].
        side: where shorter texts are padded.
        padding: the token id that pads.
    """

    texts: tuple[Inputs, ...]
    side: Literal["right", "left"]
    padding: int

    @property
    def length(self) -> int:
        return max(text["input_ids"].shape[1] for text in self.texts)

    def together(self) -> Inputs:
        """Return the texts as one batch, padded."""
        batch = {}
        for name in self.texts[0]:
            rows = [text[name][0] for text in self.texts]
            width = max(map(len, rows))
            value = self.padding if name.endswith("input_ids") else 0
            fills = [row.new_full((width - len(row),), value) for row in rows]
            pairs = [(row, f) if self.side == "right" else (f, row) for row, f in zip(rows, fills, strict=True)]
            batch[name] = torch.stack([torch.cat(pair) for pair in pairs])
        return batch


def trials(model: Any, signature: Signature, position_config: PositionConfig) -> list[Trial]:
    """Return the batches to try a graph of `model` with, the shortest first: some models remember the longest."""
    limit = describe_positions(model).limit  # a table may have rows that are not positions
    whole = min(limit, MOST)
    short = min(whole, _SHORT)
    mixed = (short, max(1, short // 3), max(1, short - 1))
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    pad_token_id = getattr(model.config, "pad_token_id", None)
    padding = pad_token_id if isinstance(pad_token_id, int) and 0 <= pad_token_id < vocabulary_size else 0
    numbers = torch.Generator().manual_seed(0)

    def trial(side: Literal["right", "left"], *lengths: int) -> Trial:
        texts = tuple(_text(signature, length, vocabulary_size, numbers) for length in lengths)
        return Trial(texts, side, padding)

    batches = [trial("right", 1), trial("right", *mixed), trial("left", *mixed), trial("right", whole)]
    original = position_config.original or limit
    beyond = original + original // 4 + 1
    runs = beyond <= limit or position_config.rope_type in FOLLOW_LENGTH
    if runs and whole < beyond <= FARTHEST:
        batches.append(trial("right", beyond))
    return batches


def _text(signature: Signature, length: int, vocabulary_size: int, numbers: torch.Generator) -> Inputs:
    """Return inputs of `length` random tokens; the decoder of an encoder-decoder gets half as many."""
    inputs = {}
    for name in signature.inputs:
        size = (length + 1) // 2 if name.startswith("decoder_") else length
        if name.endswith("input_ids"):
            inputs[name] = torch.randint(0, vocabulary_size, (1, size), generator=numbers)
        else:
            inputs[name] = torch.full((1, size), int(name.endswith("_mask")))
    return inputs


def answers(model: PreTrainedModel, signature: Signature, trial: Trial) -> list[dict[str, Tensor]]:
    """Return the outputs of `model` for the last tokens of each text of `trial`, read alone."""
    expected = []
    for text in trial.texts:
        with torch.no_grad():
            outputs = run(model, signature, text)
        expected.append({name: _last_tokens(outputs[name], 0, name, text, "right") for name in signature.outputs})
    return expected


def _last_tokens(output: Tensor, index: int, name: str, text: Inputs, side: str) -> Tensor:
    """Return the last tokens of a text in an output of its batch, [n, ...]; [1, C] of an output [B, C]."""
    if name == "logits" and output.dim() == 2:  # one row of scores for a whole text
        return output[index : index + 1]
    count = text.get("decoder_input_ids", text["input_ids"]).shape[1]
    row = output[index]
    return (row[:count] if side == "right" else row[len(row) - count :])[-MOST:]


def ran_alike(
    path: Path, signature: Signature, batches: list[Trial], expected: list[list[dict[str, Tensor]]], dtype: torch.dtype
) -> str:
    """Return a sentence on how near a graph's outputs are to the model's, and where texts may be padded.

    Args:
        path: of the graph.
        signature: of the graph.
        batches: the batches that it reads.
        expected: the model's outputs for each.
        dtype: of the weights.

    Raises:
        SwapVerificationError: the graph fails, or its outputs differ.
    """
    bound, distances = BOUNDS[dtype], {"right": 0.0, "left": 0.0}
    try:
        outputs = _outputs_of(path, signature, [trial.together() for trial in batches])
    except Exception as error:  # each runtime has its own errors
        reason = said_by(error).rstrip(".")
        failure = "does not run"
        if "Guard failed" in reason:  # torch.export made a condition of the traced length
            failure = "runs at some lengths only, as the model's own code asks for the length; 'onnx' may serve all"
        raise SwapVerificationError(f"the graph {failure}: {reason}. Nothing was written.") from error
    for trial, batch_outputs, texts in zip(batches, outputs, expected, strict=True):
        distances[trial.side] = max(distances[trial.side], _apart(trial, batch_outputs, texts, signature.outputs))
    if not distances["right"] <= bound:  # a NaN too
        raise SwapVerificationError(
            f"the graph's outputs are up to {distances['right']:.2g} from the model's, more than {bound:g}. Nothing "
            "was written; please report this."
        )
    lengths = f"texts of 1 to {max(trial.length for trial in batches)} random tokens, alone and padded"
    unit = "nats" if signature.outputs == ("logits",) else "of the largest value"
    if distances["left"] <= bound:
        return f"it gives the model's outputs for {lengths} on either side, to {max(distances.values()):.1g} {unit}"
    return (
        f"it gives the model's outputs for {lengths} on the right, to {distances['right']:.1g} {unit}. Pad only "
        "on the right: the model does not ignore padding on the left"
    )


def _apart(trial: Trial, given: dict[str, Tensor], texts: list[dict[str, Tensor]], outputs: tuple[str, ...]) -> float:
    """Return the largest difference from the expected outputs; infinity if any is not finite, also at padding."""
    if not all(bool(given[name].isfinite().all()) for name in outputs):
        return float("inf")
    return max(
        _distance(name, _last_tokens(given[name], index, name, trial.texts[index], trial.side), wanted)
        for index, text in enumerate(texts)
        for name, wanted in text.items()
    )


def _distance(name: str, actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    if name == "logits" and actual.shape[-1] > 1:
        actual, expected = actual.log_softmax(-1), expected.log_softmax(-1)
    if name == "logits":  # one score alone is log odds: its softmax is always 1
        return float((actual - expected).abs().max())
    return float((actual - expected).abs().max() / expected.abs().max())


def _outputs_of(path: Path, signature: Signature, batches: list[Inputs]) -> list[dict[str, Tensor]]:
    """Return the outputs of the graph at `path` for each of the batches, by onnxruntime or torch."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        with torch.no_grad():
            return [dict(zip(signature.outputs, module(**inputs), strict=True)) for inputs in batches]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    outputs = []
    for inputs in batches:
        arrays = session.run(list(signature.outputs), {name: value.numpy() for name, value in inputs.items()})
        outputs.append({name: torch.from_numpy(a) for name, a in zip(signature.outputs, arrays, strict=True)})
    return outputs
