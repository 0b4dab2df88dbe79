"""Comparing a graph, run by onnxruntime or by torch, with the model that it was made of.

The model reads each text alone; the graph reads them alone, and in batches with padding on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hf_posswap.checkpoints.exports.mechanism import Stated
from hf_posswap.checkpoints.exports.rotary_by_length import FOLLOWS_LENGTH
from hf_posswap.checkpoints.exports.traced import Signature, run
from hf_posswap.errors import SwapVerificationError
from hf_posswap.patching.inspect.describe import describe_positions
from hf_posswap.utils.format import said_by

Inputs = dict[str, Tensor]
Runner = Callable[[Inputs], dict[str, Tensor]]
MOST = 512
"""Tokens of a text that is compared, and of its end where it is longer."""
FARTHEST = 8192
"""Tokens of the longest text that is read only to cross the original length."""
BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 5e-2, torch.bfloat16: 4e-1}
"""How far outputs may be apart, by the weights' type: log probabilities in nats, states by the largest of them."""
_SHORT = 24


@dataclass(frozen=True)
class Trial:
    """Texts that are read together.

    Attributes:
        texts: inputs of each text alone, [1, n].
        side: where shorter ones are padded.
        padding: the token id that pads.
    """

    texts: tuple[Inputs, ...]
    side: Literal["right", "left"]
    padding: int

    @property
    def length(self) -> int:
        return max(text["input_ids"].shape[1] for text in self.texts)

    def together(self) -> Inputs:
        """Return the texts as one batch."""
        return {name: self._padded(name) for name in self.texts[0]}

    def _padded(self, name: str) -> Tensor:
        rows = [text[name][0] for text in self.texts]
        width = max(map(len, rows))
        value = self.padding if name.endswith("input_ids") else 0
        fills = [row.new_full((width - len(row),), value) for row in rows]
        pairs = zip(rows, fills, strict=True)
        return torch.stack([torch.cat((row, fill) if self.side == "right" else (fill, row)) for row, fill in pairs])

    def own(self, held: Tensor, index: int, name: str) -> Tensor:
        """Return what an output of the batch says of a text's own last tokens, [n, ...]; of [B, C], [1, C]."""
        return _own(held, index, name, self.texts[index], self.side)


def trials(model: Any, signature: Signature, stated: Stated) -> list[Trial]:
    """Return what a graph of `model` is tried with, the shortest first: a model may remember the longest text."""
    limit = describe_positions(model).limit  # a table may have rows that are no positions
    whole = min(limit, MOST)
    short = min(whole, _SHORT)
    mixed = (short, max(1, short // 3), max(1, short - 1))
    words = model.get_input_embeddings().weight.shape[0]
    given = getattr(model.config, "pad_token_id", None)
    padding = given if isinstance(given, int) and 0 <= given < words else 0
    numbers = torch.Generator().manual_seed(0)

    def trial(side: Literal["right", "left"], *lengths: int) -> Trial:
        texts = tuple(_text(signature, length, words, numbers) for length in lengths)
        return Trial(texts, side, padding)

    made = [trial("right", 1), trial("right", *mixed), trial("left", *mixed), trial("right", whole)]
    original = stated.original or limit
    beyond = original + original // 4 + 1
    runs = beyond <= limit or stated.rope_type in FOLLOWS_LENGTH
    if runs and whole < beyond <= FARTHEST:
        made.append(trial("right", beyond))
    return made


def _text(signature: Signature, length: int, words: int, numbers: torch.Generator) -> Inputs:
    """Return inputs of one text of `length` random tokens; a decoder beside an encoder reads another of half of it."""
    made = {}
    for name in signature.inputs:
        size = (length + 1) // 2 if name.startswith("decoder_") else length
        if name.endswith("input_ids"):
            made[name] = torch.randint(0, words, (1, size), generator=numbers)
        else:
            made[name] = torch.full((1, size), int(name.endswith("_mask")))
    return made


def answers(model: Any, signature: Signature, trial: Trial) -> list[dict[str, Tensor]]:
    """Return what `model` gives for each text of `trial` alone, of its last tokens."""
    found = []
    for text in trial.texts:
        with torch.no_grad():
            held = run(model, signature, text)
        found.append({name: _own(held[name], 0, name, text, "right") for name in signature.outputs})
    return found


def _own(held: Tensor, index: int, name: str, text: Inputs, side: str) -> Tensor:
    if name == "logits" and held.dim() == 2:  # of a whole text
        return held[index : index + 1]
    count = text.get("decoder_input_ids", text["input_ids"]).shape[1]
    row = held[index]
    return (row[:count] if side == "right" else row[len(row) - count :])[-MOST:]


def ran_alike(
    path: Path, signature: Signature, asked: list[Trial], expected: list[list[dict[str, Tensor]]], dtype: Any
) -> str:
    """Return in words how near a graph's outputs are to those of the model, and where texts may be padded.

    Args:
        path: of the graph.
        signature: of it.
        asked: what it is tried with.
        expected: what the model gives for each.
        dtype: of the weights.

    Raises:
        SwapVerificationError: it stops, or its outputs are others.
    """
    bound, found = BOUNDS[dtype], {"right": 0.0, "left": 0.0}
    try:
        runner = _RUNNERS[path.suffix](path, signature)
        given = [runner(trial.together()) for trial in asked]
    except Exception as error:  # runtimes raise errors of their own kinds
        said = said_by(error).rstrip(".")
        raise SwapVerificationError(f"the graph does not run: {said}. Nothing was written.") from error
    for trial, held, texts in zip(asked, given, expected, strict=True):
        found[trial.side] = max(found[trial.side], _apart(trial, held, texts, signature.outputs))
    if not found["right"] <= bound:  # a NaN too
        raise SwapVerificationError(
            f"the graph's outputs are up to {found['right']:.2g} from the model's, more than {bound:g}. Nothing was "
            "written; please report this."
        )
    lengths = f"texts of 1 to {max(trial.length for trial in asked)} random tokens, alone and padded"
    unit = "nats" if signature.outputs == ("logits",) else "of the largest value"
    if found["left"] <= bound:
        return f"it gives the model's outputs for {lengths} on either side, to {max(found.values()):.1g} {unit}"
    return (
        f"it gives the model's outputs for {lengths} on the right, to {found['right']:.1g} {unit}. Pad on the right "
        "alone: the model itself counts padding on the left"
    )


def _apart(trial: Trial, given: dict[str, Tensor], texts: list[dict[str, Tensor]], outputs: tuple[str, ...]) -> float:
    """Return how far outputs are from the expected ones at most; infinity where one is not finite, padding included."""
    if not all(bool(given[name].isfinite().all()) for name in outputs):
        return float("inf")
    return max(
        _distance(name, trial.own(given[name], index, name), wanted)
        for index, text in enumerate(texts)
        for name, wanted in text.items()
    )


def _distance(name: str, found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    if name == "logits":
        return float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max())
    return float((found - expected).abs().max() / expected.abs().max())


def _with_onnxruntime(path: Path, signature: Signature) -> Runner:
    """Return what runs the ONNX file at `path`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def runs(inputs: Inputs) -> dict[str, Tensor]:
        given = session.run(list(signature.outputs), {name: value.numpy() for name, value in inputs.items()})
        return {name: torch.from_numpy(one) for name, one in zip(signature.outputs, given, strict=True)}

    return runs


def _with_torch(path: Path, signature: Signature) -> Runner:
    """Return what runs the program of torch.export at `path`."""
    module = torch.export.load(path).module()

    def runs(inputs: Inputs) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(signature.outputs, module(**inputs), strict=True))

    return runs


_RUNNERS: dict[str, Callable[[Path, Signature], Runner]] = {".onnx": _with_onnxruntime, ".pt2": _with_torch}
