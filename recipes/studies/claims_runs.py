"""What the study of claims trains: small models from random weights, one of each scheme, material and seed.

Trainings of one material and seed differ in the scheme alone: they begin with the same weights, as far as they have the
same ones, and read the same tokens in the same order at the same learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

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
MATERIALS: tuple[Material, ...] = get_args(Material)


@dataclass(frozen=True)
class Amount:
    """How much is read of text or of needles.

    Attributes:
        tokens: of a training.
        batch: windows a step.
        rate: learning rate of all schemes.
        other_rate: at which seed 0 is trained again, so that no verdict hangs on the rate.
        layers: of the models.
        schemes: that are trained on it.
        checked: those that are trained at the other rate, too.
        examples: documents that are made, where they are made.
    """

    tokens: int
    batch: int
    rate: float
    other_rate: float
    layers: int
    schemes: tuple[str, ...] = SCHEMES
    checked: tuple[str, ...] = SCHEMES
    examples: int = 0


@dataclass(frozen=True)
class Tasks:
    """How much is read of each task, and how wide the models are that learn them.

    Attributes:
        steps: of a training.
        batch: examples a step.
        longest: letters of the longest example in training; twice as many are asked for.
        layers: of the models.
        width: of their hidden states.
        heads: of each attention.
        rate: learning rate of all schemes.
        other_rate: at which seed 0 is trained again.
        trials: examples of each length that are asked.
        schemes: that are trained.
        checked: those that are trained at the other rate, too.
    """

    steps: int
    batch: int
    longest: int
    layers: int
    width: int
    heads: int
    rate: float
    other_rate: float
    trials: int = 100
    schemes: tuple[str, ...] = SCHEMES
    checked: tuple[str, ...] = SCHEMES


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        amounts: of text and needles.
        tasks: of copying and sorting.
        window: that is trained on.
        width: of the hidden states of models of text and needles.
        heads: of each attention.
        vocabulary: of text and needles; tasks are read in bytes.
        seeds: of the weights and the order, from 0 on.
        documents: most to measure on.
        trials: needles of each length and depth.
    """

    amounts: dict[Material, Amount]
    tasks: Tasks
    window: int = 128
    width: int = 128
    heads: int = 4
    vocabulary: int = 512
    seeds: int = 3
    documents: int = 24
    trials: int = 20

    @property
    def longest(self) -> int:
        """Tokens that are read at most."""
        return self.window * MULTIPLES[-1]

    def amount(self, material: Material) -> Amount | Tasks:
        """Return how much is read of `material`."""
        return self.tasks if material in TASKS else self.amounts[material]


SIZES = {
    "cpu": Sizes(
        {
            "text": Amount(600_000, 8, 2e-3, 1e-3, layers=2),
            "needles": Amount(1_600_000, 16, 3e-3, 1.5e-3, layers=3, schemes=("alibi",), examples=30_000),
        },
        Tasks(1500, 32, 4, layers=2, width=64, heads=2, rate=4e-3, other_rate=2e-3),
    ),
    "gpu": Sizes(
        {
            "text": Amount(16_000_000, 32, 1e-3, 5e-4, layers=6),
            "needles": Amount(24_000_000, 64, 1e-3, 5e-4, layers=6, examples=400_000),
        },
        Tasks(20_000, 128, 20, layers=6, width=256, heads=8, rate=1e-3, other_rate=5e-4),
        width=384,
        heads=8,
        vocabulary=2048,
        seeds=5,
        documents=48,
    ),
    "smoke": Sizes(
        {
            "text": Amount(2_560, 4, 2e-3, 1e-3, layers=1),
            "needles": Amount(2_560, 4, 2e-3, 1e-3, layers=1, schemes=("alibi",), examples=200),
        },
        Tasks(10, 4, 4, layers=1, width=32, heads=2, rate=2e-3, other_rate=1e-3, trials=4),
        window=64,
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


def trainings(sizes: Sizes, place: Path, materials: Sequence[Material] = MATERIALS) -> Iterator[Training]:
    """Give all trainings of a size, those of one material after another; what they start from is made first.

    Args:
        sizes: of the study.
        place: the folder of its work.
        materials: to train on.

    Raises:
        DataError: a training of less than one step.
    """
    for material in materials:
        held = sizes.amount(material)
        give = _task_run if isinstance(held, Tasks) else _text_run
        for seed in range(sizes.seeds):
            for scheme in held.schemes:
                yield Training(material, scheme, seed, False, give(material, sizes, scheme, seed, held.rate, place))
        for scheme in (scheme for scheme in held.checked if scheme in held.schemes):
            yield Training(material, scheme, 0, True, give(material, sizes, scheme, 0, held.other_rate, place))


def _text_run(material: Material, sizes: Sizes, scheme: str, seed: int, rate: float, place: Path) -> Run:
    amount = sizes.amounts[material]
    source = _source(material, amount, place)
    shape = FreshSettings("gpt2", sizes.window, amount.layers, sizes.width, sizes.heads, sizes.vocabulary, seed)
    given = [f"model.name={_start(shape, source, place)}", source_settings([source])]
    return make_run(CONFIG, [*given, *run_settings(amount, sizes, scheme, seed, rate)], place)


def _task_run(task: Material, sizes: Sizes, scheme: str, seed: int, rate: float, place: Path) -> TaskRun:
    held = sizes.tasks
    shape = FreshSettings("gpt2", sizes.window, held.layers, held.width, held.heads, 0, seed)
    sized = (sizes.longest, held.longest, held.steps, held.batch, rate, seed, place)
    return TaskRun(_start(shape, None, place), task, scheme, *sized)


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


def _start(shape: FreshSettings, source: str | None, place: Path) -> Path:
    """Return the folder of a model with random weights and learned positions, and a tokenizer: made once.

    Args:
        shape: of the model.
        source: of the text that the tokenizer is made from; None: bytes need none.
        place: the folder of the study's work.
    """
    name = "bytes" if source is None else Path(source).name
    numbers = (shape.window, shape.layers, shape.width, shape.heads, shape.vocabulary, shape.seed)
    folder = place / "starts" / "-".join([name, *map(str, numbers)])
    if not (folder / _MADE).is_file():
        found = () if source is None else source_documents(Source(source))
        tokenizer = fresh_tokenizer(shape, (document.text for document, held_out in found if not held_out))
        hf_posswap.save(fresh_model(shape, tokenizer), folder, tokenizer=tokenizer, overwrite=True)
        write_json(folder / _MADE, {"from": name})
    return folder
