"""The trainings of the effects study: the bases, and each recipe shrunk to them. All rows read as many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_posswap.training.config.reading import read_yaml
from recipes.studies.running import RECIPES

Kind = Literal["gpt2", "llama", "bert"]


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        window: of the bases, in tokens.
        layers: of the bases.
        width: of their hidden states.
        heads: of each attention.
        vocabulary: of their tokenizers; 0: bytes.
        tokens: of the pretraining of each base.
        pretraining_rate: learning rate of each, at its peak.
        step: tokens of a step of a recipe.
        steps: of a recipe.
        warmup: of these.
        rate: learning rate of all recipes and controls: their own are for models a thousand times larger.
        population: of the search for LongRoPE's divisors.
        iterations: of that search.
        documents: most to measure on.
        training_documents: most to train on; None: all.
    """

    window: int = 128
    layers: int = 4
    width: int = 160
    heads: int = 5
    vocabulary: int = 2048
    tokens: tuple[tuple[Kind, int], ...] = (("gpt2", 1_600_000), ("llama", 1_600_000), ("bert", 1_200_000))
    pretraining_rate: tuple[tuple[Kind, float], ...] = (("gpt2", 2e-3), ("llama", 2e-3), ("bert", 1e-3))
    step: int = 2048
    steps: int = 40
    warmup: int = 5
    rate: float = 3e-4
    population: int = 16
    iterations: int = 8
    documents: int = 48
    training_documents: int | None = None


SMOKE = Sizes(
    window=32,
    width=128,
    heads=4,
    vocabulary=0,
    tokens=(("gpt2", 4096), ("llama", 4096), ("bert", 4096)),
    step=256,
    steps=3,
    warmup=1,
    population=8,
    iterations=1,
    documents=8,
    training_documents=60,
)


@dataclass(frozen=True)
class Row:
    """One recipe.

    Attributes:
        name: of its file.
        base: the base model.
        demonstration: why it proves nothing at this size; "": it is not a demonstration.
    """

    name: str
    base: Kind
    demonstration: str = ""

    @property
    def config(self) -> Path:
        """The recipe's file."""
        return RECIPES / f"{self.name}.yaml"

    @property
    def windows(self) -> int:
        """Length of one training window in windows of the model's original length, by the recipe."""
        values = read_yaml(self.config)
        return REACH if "stages" in values else values["data"]["length"] // _WINDOWS[values["model"]["name"]]

    @property
    def searched(self) -> bool:
        """Whether its divisors are searched first."""
        return isinstance(read_yaml(self.config)["swap"]["scheme"], str)


_WINDOWS = {
    "openai-community/gpt2": 1024,
    "HuggingFaceTB/SmolLM-135M": 2048,
    "huggyllama/llama-7b": 2048,
    "google-bert/bert-base-uncased": 512,
    "sentence-transformers/all-MiniLM-L6-v2": 512,
}
REACH = 8
"""Default length of swaps in windows, and the most windows that are read."""
_UNLEARNED = "masked tokens are learned slowly, and this base hardly uses context, so there is little to lose"
ROWS = (
    Row("learned-to-rope", "gpt2"),
    Row("gradual", "gpt2"),
    Row("distill", "gpt2"),
    Row("to-alibi", "gpt2"),
    Row("learned-to-t5", "gpt2"),
    Row("learned-to-sinusoidal", "gpt2"),
    Row("abf", "llama"),
    Row("linear", "llama"),
    Row("yarn", "llama"),
    Row("rope-to-yarn", "llama"),
    Row("rope-to-abf", "llama"),
    Row("pose", "llama"),
    Row("staged", "llama"),
    Row("longrope", "llama", demonstration="a search of few candidates, where 1344 are meant"),
    Row("rnope", "llama"),
    Row("drope", "llama", demonstration="the paper spends a hundred thousand times as many tokens"),
    Row("encoder-mlm", "bert", demonstration=_UNLEARNED),
    Row("embedding", "bert", demonstration=_UNLEARNED),
)


def row_settings(row: Row, sizes: Sizes, model: Path, scheme: Path | None) -> list[str]:
    """Return KEY=VALUE settings that shrink the recipe of `row`: only sizes, lengths and the learning rate.

    Args:
        row: which.
        sizes: of the study.
        model: folder of its base.
        scheme: file that the search wrote, if there was a search.
    """
    values, length = read_yaml(row.config), row.windows * sizes.window
    limit = "" if sizes.training_documents is None else f", documents: {sizes.training_documents}"
    settings = [f"model.name={model}", f"data.sources=[{{path: python{limit}}}]"]
    if scheme is not None:
        settings.append(f"swap.scheme={scheme}")
    if values["swap"].get("max_length"):
        settings.append(f"swap.max_length={REACH * sizes.window}")
    if values["swap"].get("gradual_steps"):
        settings.append(f"swap.gradual_steps={sizes.steps // 3}")
    batch = sizes.step // length
    training = {
        "max_steps": sizes.steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "warmup_steps": sizes.warmup,
        "learning_rate": sizes.rate,
    }
    settings += [f"data.length={length}", *(f"training.{key}={value}" for key, value in training.items())]
    settings += _stages(values.get("stages", []), sizes, batch)
    return [*settings, "training.gradient_checkpointing=false"]


def _stages(stages: list[dict[str, Any]], sizes: Sizes, batch: int) -> list[str]:
    """Return what shrinks stages: the last is as long as all that is read; each has the same share of the tokens."""
    settings: list[str] = []
    left, longest = sizes.steps * sizes.step, max((stage["length"] for stage in stages), default=0)
    numbered = sorted(enumerate(stages), key=lambda item: -item[1]["length"])
    for done, (number, stage) in enumerate(numbered):  # the longest first; shorter windows use the remaining tokens
        length = REACH * sizes.window * stage["length"] // longest
        steps = left // (len(stages) - done) // (batch * length)
        left -= steps * batch * length
        values = {"max_steps": steps, "length": length, "learning_rate": sizes.rate}
        if "least_steps" in stage:
            values |= {"least_steps": steps // 4, "check_every": max(1, steps // 4)}
        settings = [*(f"stages.{number}.{key}={value}" for key, value in values.items()), *settings]
    return settings
