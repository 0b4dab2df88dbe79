"""What a quickstart starts from: its settings, the folder that belongs to them, and the model.

The settings are all that its numbers depend on. The model is the small GPT-2 of the package, or the user's own.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import hf_posswap
from hf_posswap.checkpoints.load import EXAMPLE
from hf_posswap.errors import CheckpointError, DataError, OptionError
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import read_json, replacing, writable_folder, write_json
from hf_posswap.utils.progress import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SETTINGS = "quickstart.json"
LOCK = ".quickstart.lock"
"""Lock of a running quickstart; its trainings and its comparison have separate locks."""
_NO_TOKENIZER_ADVICE = "save it in the model's folder"


@dataclass(frozen=True)
class QuickstartSettings:
    """Everything that the numbers of a quickstart depend on.

    Attributes:
        model: path or Hub id of a causal model; None: the small GPT-2 of the package.
        schemes: schemes to swap to; None: all that the model supports, or rope and alibi for the package's model.
        steps: training steps, the same for the control and every swapped model.
        seed: random seed of the text order, of needles and intervals, and of the continuation.
        device: the device.
        step_tokens: tokens per training step; at least one window of the longest length.
        multiples: the measured lengths as multiples of the window, starting with 1.
        documents: maximum number of held-out documents for evaluation.
        training_documents: maximum number of training documents, including a few held-out ones; None: all.
        metrics: metrics to measure; None: those of `posswap compare`.
        largest_window: a model with a longer window is trained and measured as if it had this one.
        continuation: number of tokens to generate, half of them past the window.
        trust_remote_code: run code that comes with `model` if loading needs it.
    """

    model: str | None = None
    schemes: tuple[str, ...] | None = None
    steps: int = 200
    seed: int = 0
    device: str = "auto"
    step_tokens: int = 2048
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    documents: int = 48
    training_documents: int | None = None
    metrics: tuple[str, ...] | None = None
    largest_window: int = 1024
    continuation: int = 64
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise OptionError(f"steps is a whole number of at least 1, got {self.steps!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise OptionError(f"seed is a whole number of at least 0, got {self.seed!r}.")

    def lengths(self, window: int) -> tuple[int, ...]:
        """Return the lengths to measure at, in tokens, of a model with `window` positions.

        Example:
            >>> QuickstartSettings().lengths(128)
            (128, 256, 512, 1024)
        """
        return tuple(window * multiple for multiple in sorted(self.multiples))

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON data."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def open_folder(out: Path, identity: dict[str, object]) -> None:
    """Check that `out` can be the folder of the quickstart with `identity`; create it if it is missing.

    Args:
        out: a new or empty folder, or that of an earlier run.
        identity: everything that the numbers depend on, as JSON data.

    Raises:
        CheckpointError: it cannot be written, holds something else, or belongs to a run with other settings.
    """
    if out.is_dir() and any(path.name != LOCK for path in out.iterdir()) and not (out / _SETTINGS).exists():
        raise CheckpointError(f"{out} is not empty and holds no quickstart: choose another folder with --out.")
    writable_folder(out)
    differing = _differences(read_json(out / _SETTINGS), identity) if (out / _SETTINGS).exists() else []
    if differing:
        raise CheckpointError(
            f"{out} holds a quickstart with other settings ({'; '.join(differing)}): choose another folder with "
            "--out, or delete this one."
        )


def claim_folder(out: Path, identity: dict[str, object]) -> None:
    """Mark `out` as the folder of this quickstart, after all checks have passed.

    Raises:
        CheckpointError: it cannot be written.
    """
    write_json(out / _SETTINGS, identity)


def _differences(before: object, now: object, name: str = "") -> list[str]:
    """Return the differences of two JSON values, each as "name was this and is that"."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [d for key in keys for d in _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))]
    return [] if before == now else [f"{name} was {before!r} and is {now!r}"]


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
