"""The model to start from: the small GPT-2 of the package, or the user's own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import hf_posswap
from hf_posswap.checkpoints.load import EXAMPLE
from hf_posswap.errors import DataError
from hf_posswap.quickstart.settings import QuickstartSettings
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import replacing
from hf_posswap.utils.progress import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NO_TOKENIZER_ADVICE = "save it in the model's folder"


@dataclass(frozen=True)
class Base:
    """The model that the quickstart starts from.

    Attributes:
        source: its folder or Hub id.
        model: the unswapped model in eval mode on the CPU.
        tokenizer: its tokenizer.
        window: its window, limited to the quickstart's maximum.
    """

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    window: int


def open_base(settings: QuickstartSettings, reporter: Reporter) -> Base:
    """Return the model that `settings` name, in float32.

    Raises:
        CheckpointError: there is no readable checkpoint.
        DataError: it is not a causal language model, already carries a swap, or has no tokenizer.
        UnsupportedModelError: no family describes it.
        RemoteCodeError: it needs code without `trust_remote_code`.
    """
    name, trusted = settings.model or str(EXAMPLE), settings.trust_remote_code
    model = hf_posswap.load(name, dtype=torch.float32, trust_remote_code=trusted).eval()
    report = hf_posswap.describe_positions(model)
    if report.swapped is not None:
        raise DataError(f"{name!r} already carries a swap ({report.swapped}): give the checkpoint it was made from.")
    if model.config.is_encoder_decoder or not model.can_generate() or not report.geometry.causal:
        raise DataError(f"{name!r} is a {type(model).__name__}: the quickstart takes a causal language model.")
    window = min(report.limit, settings.largest_window) // 2 * 2  # even, for half-overlapping windows
    size = f"{model.num_parameters() / 1e6:.1f} million parameters, {report.native}"
    origin = "the package, trained on Python's own sources" if settings.model is None else name
    reporter.line(f"base: {type(model).__name__} of {size}, from {origin}")
    if window < report.limit:
        reporter.line(
            f"base: the model's own window is {report.limit} tokens; it is adapted and measured as if it were "
            f"{window}, so lengths up to {report.limit} tokens are not beyond its original length."
        )
    tokenizer = load_tokenizer(name, instead=_NO_TOKENIZER_ADVICE, trust_remote_code=trusted)
    return Base(name, model, tokenizer, window)


def place_base(base: Base, settings: QuickstartSettings, out: Path) -> str:
    """Return the folder or Hub id of the recipes' base; the package's own model is copied to `out`.

    Raises:
        CheckpointError: it cannot be written, or the disk is full.
    """
    if settings.model is not None:
        return base.source
    folder = out.resolve() / "base"  # independent of the working folder of a later call
    if not folder.is_dir():
        with replacing(folder) as temporary:
            temporary.mkdir()
            for path in EXAMPLE.iterdir():
                shutil.copyfile(path, temporary / path.name)
    return str(folder)
