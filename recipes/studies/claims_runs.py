"""The trainings of the study of claims: small models from random weights, one per scheme, material and seed.

Trainings of one material and seed differ only in the scheme: they start with the same weights, as far as they share
them, and read the same tokens in the same order at the same learning rate.
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
_DONE_FILE = "made.json"

Material = Literal["text", "needles", "copy", "sorting"]
MATERIALS: tuple[Material, ...] = get_args(Material)


@dataclass(frozen=True)
class Amount:
    """The size of trainings on text or needles.

    Attributes:
        tokens: of a training.
        batch: windows a step.
        rate: learning rate of all schemes.
        other_rate: second learning rate for seed 0, so that no verdict depends on the rate.
        layers: of the models.
        schemes: that are trained on it.
        checked: those that are trained at the other rate, too.
        examples: number of generated documents, if generated.
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
    """The size of trainings on tasks, and of their models.

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
        """Most tokens that are read at once."""
        return self.window * MULTIPLES[-1]

    def amount(self, material: Material) -> Amount | Tasks:
        """Return the training size for `material`."""
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
"""By name. "smoke" only checks that everything runs."""


@dataclass(frozen=True)
class Training:
    """One training of the study.

    Attributes:
        material: that it reads.
        scheme: of the model.
        seed: of weights and order.
        other: whether it uses the second learning rate.
        run: by recipes/train.py or, of a task, by recipes/studies/task_runs.py.
    """

    material: Material
    scheme: str
    seed: int
    other: bool
    run: Run | TaskRun


def trainings(sizes: Sizes, work_dir: Path, materials: Sequence[Material] = MATERIALS) -> Iterator[Training]:
    """Yield all trainings of a size, material by material, after creating what they start from.

    Args:
        sizes: of the study.
        work_dir: the folder of its work.
        materials: to train on.

    Raises:
        DataError: a training of less than one step.
    """
    for material in materials:
        amount = sizes.amount(material)
        make_training = _task_run if isinstance(amount, Tasks) else _text_run
        for seed in range(sizes.seeds):
            for scheme in amount.schemes:
                yield Training(
                    material, scheme, seed, False, make_training(material, sizes, scheme, seed, amount.rate, work_dir)
                )
        for scheme in (scheme for scheme in amount.checked if scheme in amount.schemes):
            yield Training(
                material, scheme, 0, True, make_training(material, sizes, scheme, 0, amount.other_rate, work_dir)
            )


def _text_run(material: Material, sizes: Sizes, scheme: str, seed: int, rate: float, work_dir: Path) -> Run:
    amount = sizes.amounts[material]
    source = _source(material, amount, work_dir)
    shape = FreshSettings("gpt2", sizes.window, amount.layers, sizes.width, sizes.heads, sizes.vocabulary, seed)
    model_settings = [f"model.name={_start(shape, source, work_dir)}", source_settings([source])]
    return make_run(CONFIG, [*model_settings, *run_settings(amount, sizes, scheme, seed, rate)], work_dir)


def _task_run(task: Material, sizes: Sizes, scheme: str, seed: int, rate: float, work_dir: Path) -> TaskRun:
    task_sizes = sizes.tasks
    shape = FreshSettings("gpt2", sizes.window, task_sizes.layers, task_sizes.width, task_sizes.heads, 0, seed)
    run_sizes = (sizes.longest, task_sizes.longest, task_sizes.steps, task_sizes.batch, rate, seed, work_dir)
    return TaskRun(_start(shape, None, work_dir), task, scheme, *run_sizes)


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


def _source(material: Material, amount: Amount, work_dir: Path) -> str:
    """Return the source for data.sources: Python's own text, or a folder of puzzles and needles, generated once."""
    if material == "text":
        return "python"
    folder = work_dir / "made" / f"{material}-{amount.examples}"
    if not (folder / _DONE_FILE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        puzzles.write_documents(folder, amount.examples, puzzles.IN_A_WINDOW, seed=0)
        # written last, so that it marks a complete folder
        write_json(folder / _DONE_FILE, {"examples": amount.examples})
    return str(folder)


def _start(shape: FreshSettings, source: str | None, work_dir: Path) -> Path:
    """Return the folder of a model with random weights and learned positions, and its tokenizer, created once.

    Args:
        shape: of the model.
        source: of the text that the tokenizer is trained on; None: a byte tokenizer.
        work_dir: the folder of the study's work.
    """
    name = "bytes" if source is None else Path(source).name
    numbers = (shape.window, shape.layers, shape.width, shape.heads, shape.vocabulary, shape.seed)
    folder = work_dir / "starts" / "-".join([name, *map(str, numbers)])
    if not (folder / _DONE_FILE).is_file():
        documents = () if source is None else source_documents(Source(source))
        tokenizer = fresh_tokenizer(shape, (document.text for document, held_out in documents if not held_out))
        hf_posswap.save(fresh_model(shape, tokenizer), folder, tokenizer=tokenizer, overwrite=True)
        write_json(folder / _DONE_FILE, {"from": name})
    return folder
