"""What the study of claims trains: small models from random weights, one of each scheme, material and seed.

Trainings of one material and seed differ in the scheme alone: they begin with the same weights, as far as they have the
same ones, and read the same tokens in the same order at the same learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import hf_posswap
from hf_posswap.errors import DataError
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.sources import source_documents
from hf_posswap.training.fresh import FreshSettings, fresh_model, fresh_tokenizer
from hf_posswap.utils.atomic_io import write_json
from recipes.studies import puzzles
from recipes.studies.algorithms import TASKS
from recipes.studies.measuring import MULTIPLES
from recipes.studies.running import RECIPES, Run, make_run, source_settings
from recipes.studies.task_runs import TaskRun

CONFIG = RECIPES / "studies" / "claims.yaml"
SCHEMES = ("learned", "sinusoidal", "rope", "alibi", "nope")
_WARMUP = 0.05
_MADE = "made.json"

Material = Literal["text", "needles", "copy", "sorting"]


@dataclass(frozen=True)
class Amount:
    """How much is read of text or of needles.

    Attributes:
        tokens: of a training.
        batch: windows a step.
        schemes: that are trained on it.
        examples: documents that are made, where they are made.
    """

    tokens: int
    batch: int
    schemes: tuple[str, ...] = SCHEMES
    examples: int = 0


@dataclass(frozen=True)
class Tasks:
    """How much is read of each task, and how wide the models are that learn them.

    Attributes:
        steps: of a training.
        batch: examples a step.
        longest: letters of the longest example in training; twice as many are asked for.
        width: of the hidden states.
        rate: learning rate.
        other_rate: at which seed 0 is trained again.
    """

    steps: int
    batch: int
    longest: int
    width: int
    rate: float
    other_rate: float


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        amounts: of text and needles.
        tasks: of copying and sorting.
        window: that is trained on.
        layers: of the models.
        width: of their hidden states.
        heads: of each attention.
        vocabulary: of text and needles; tasks are read in bytes.
        seeds: of the weights and the order, from 0 on.
        rate: learning rate of all schemes on text and needles.
        other_rate: at which seed 0 is trained again, so that no verdict hangs on the rate.
        documents: most to measure on.
        trials: prompts of each length and, of needles, each depth.
    """

    amounts: dict[Material, Amount]
    tasks: Tasks
    window: int = 128
    layers: int = 2
    width: int = 128
    heads: int = 4
    vocabulary: int = 512
    seeds: int = 3
    rate: float = 2e-3
    other_rate: float = 1e-3
    documents: int = 24
    trials: int = 40

    @property
    def longest(self) -> int:
        """Tokens that are read at most."""
        return self.window * MULTIPLES[-1]

    def rates(self, material: Material) -> tuple[float, float]:
        """Return the learning rate of all trainings on `material`, and the second one."""
        held = self.tasks if material in TASKS else self
        return held.rate, held.other_rate


SIZES = {
    "cpu": Sizes(
        {"text": Amount(600_000, 8), "needles": Amount(1_500_000, 16, ("alibi",), examples=30_000)},
        Tasks(1000, 32, 10, width=64, rate=4e-3, other_rate=2e-3),
    ),
    "gpu": Sizes(
        {"text": Amount(16_000_000, 32), "needles": Amount(24_000_000, 64, examples=400_000)},
        Tasks(20_000, 128, 20, width=256, rate=1e-3, other_rate=5e-4),
        layers=6,
        width=384,
        heads=8,
        vocabulary=2048,
        seeds=5,
        rate=1e-3,
        other_rate=5e-4,
        documents=48,
    ),
    "smoke": Sizes(
        {"text": Amount(2_560, 4), "needles": Amount(2_560, 4, ("alibi",), examples=200)},
        Tasks(10, 4, 4, width=32, rate=2e-3, other_rate=1e-3),
        window=64,
        layers=1,
        width=32,
        heads=2,
        seeds=2,
        documents=8,
        trials=2,
    ),
}
"""By name. "smoke" shows that all runs, and nothing else."""


@dataclass(frozen=True)
class Training:
    """One of them.

    Attributes:
        material: that it reads.
        scheme: of the model.
        seed: of weights and order.
        other: whether it has the second learning rate.
        run: by recipes/train.py or, of a task, by recipes/studies/task_runs.py.
    """

    material: Material
    scheme: str
    seed: int
    other: bool
    run: Run | TaskRun


def trainings(sizes: Sizes, place: Path, only: Material | None = None) -> Iterator[Training]:
    """Give all trainings of a size, those of one material after another; what they start from is made first.

    Args:
        sizes: of the study.
        place: the folder of its work.
        only: one material; None: all.

    Raises:
        DataError: a training of less than one step.
    """
    for material in (*sizes.amounts, *TASKS):
        if only in (None, material):
            for seed, other in [*((seed, False) for seed in range(sizes.seeds)), (0, True)]:
                give = _task_runs if material in TASKS else _runs
                for scheme, run in give(material, sizes, seed, sizes.rates(material)[other], place):
                    yield Training(material, scheme, seed, other, run)


def _runs(material: Material, sizes: Sizes, seed: int, rate: float, place: Path) -> Iterator[tuple[str, Run]]:
    amount = sizes.amounts[material]
    source = _source(material, amount, place)
    start = _start(Path(source).name, sizes, sizes.width, sizes.vocabulary, seed, source, place)
    for scheme in amount.schemes:
        settings = run_settings(amount, sizes, scheme, seed, rate)
        yield scheme, make_run(CONFIG, [f"model.name={start}", source_settings([source]), *settings], place)


def _task_runs(task: Material, sizes: Sizes, seed: int, rate: float, place: Path) -> Iterator[tuple[str, TaskRun]]:
    held = sizes.tasks
    start = _start("bytes", sizes, held.width, 0, seed, None, place)
    sized = (sizes.longest, held.longest, held.steps, held.batch, rate, seed, place)
    for scheme in SCHEMES:
        yield scheme, TaskRun(start, task, scheme, *sized)


def run_settings(amount: Amount, sizes: Sizes, scheme: str, seed: int, rate: float) -> list[str]:
    """Return the settings of one training, as KEY=VALUE, without those of model and text.

    Raises:
        DataError: fewer tokens than a step reads.
    """
    steps = amount.tokens // (amount.batch * sizes.window)
    if steps < 1:
        raise DataError(f"{amount.tokens} tokens are less than a step of {amount.batch} x {sizes.window}: give more.")
    settings = [f"data.length={sizes.window}", f"data.seed={seed}", f"training.seed={seed}"]
    settings += [f"training.max_steps={steps}", f"training.per_device_train_batch_size={amount.batch}"]
    settings += [f"training.learning_rate={rate}", f"training.warmup_steps={round(_WARMUP * steps)}"]
    swap = [] if scheme == "learned" else [f"swap.scheme={scheme}", f"swap.max_length={sizes.longest}"]
    return [*settings, *swap]


def _source(material: Material, amount: Amount, place: Path) -> str:
    """Return what data.sources names: Python's own text, or a folder with puzzles and needles that are made once."""
    if material == "text":
        return "python"
    folder = place / "made" / f"{material}-{amount.examples}"
    if not (folder / _MADE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        puzzles.write_documents(folder, amount.examples, puzzles.IN_A_WINDOW, seed=0)
        write_json(folder / _MADE, {"examples": amount.examples})  # last: it says that all is there
    return str(folder)


def _start(name: str, sizes: Sizes, width: int, vocabulary: int, seed: int, source: str | None, place: Path) -> Path:
    """Return the folder of a model with random weights and learned positions, and a tokenizer: made once.

    Args:
        name: of what the tokenizer is made from.
        sizes: of the study.
        width: of the hidden states.
        vocabulary: of the tokenizer; 0: bytes.
        seed: of the weights.
        source: of the text that the tokenizer is made from; None: none is needed.
        place: the folder of the study's work.
    """
    shape = FreshSettings("gpt2", sizes.window, sizes.layers, width, sizes.heads, vocabulary, seed)
    numbers = (sizes.window, sizes.layers, width, sizes.heads, vocabulary, seed)
    folder = place / "starts" / "-".join([name, *map(str, numbers)])
    if not (folder / _MADE).is_file():
        found = () if source is None else source_documents(Source(source))
        tokenizer = fresh_tokenizer(shape, (document.text for document, held_out in found if not held_out))
        hf_posswap.save(fresh_model(shape, tokenizer), folder, tokenizer=tokenizer, overwrite=True)
        write_json(folder / _MADE, {"from": name})
    return folder
