"""The recipe's dataclasses: every training setting, documented once. Help, errors and docs are generated from here.

`keys_of` lists the keys of a recipe; `phases_of` splits one of several stages into recipes of one stage each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hf_posswap.training.config.reading import merge, scheme_mapping
from hf_posswap.training.config.theirs import TrainingSettings, non_default_settings
from hf_posswap.training.data import DataSettings
from hf_posswap.training.distill import DistillSettings
from hf_posswap.training.longce import LongCESettings
from hf_posswap.training.trainable import TrainableSettings
from hf_posswap.utils.gguf_source import gguf_path
from hf_posswap.utils.result_views import FactsView, brief

SchemeValue = str | Mapping[str, Any] | None
SENTENCES = ("embedding", "contrastive")
"""Objectives that embed a text as one vector."""


@dataclass(frozen=True)
class ModelSettings:
    """The model to start from.

    Attributes:
        name: a folder, a GGUF file (on the Hub owner/name/file.gguf) or a Hub id.
        tokenizer: a folder or a Hub id; none: the model's own.
        revision: of the Hub id in name, for the weights and the model's own tokenizer.
        gguf_file: the GGUF file in name, where it holds several.
        dtype: of the weights in memory; training.bf16 and fp16 set the precision of the forward.
        attention: attention implementation; none: transformers' choice.
        trust_remote_code: run code from the model or the tokenizer, if loading needs it.
    """

    name: str = ""
    tokenizer: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    attention: str | None = None
    trust_remote_code: bool = False

    @property
    def source(self) -> str:
        """The folder, Hub id or GGUF file to read."""
        return gguf_path(self.name, self.gguf_file)


@dataclass(frozen=True)
class SwapSettings:
    """The swap of the model's position mechanism.

    Attributes:
        scheme: a name, a name with fields: "yarn:factor=4,base=500000" or {name: yarn, factor: 4}, or a .json file from
            posswap search; none: no swap, for a control.
        max_length: tokens that the swapped model is meant for; none: patch_model's default.
        site: auto, or always inside attention.
        relative: keep or drop the relative positions that DeBERTa has inside attention in addition to its table; none:
            keep them, and the default for all other models.
        centre: move the mean of the position table into the token embeddings first, so that the swap removes only
            positions: see hf_posswap.centre_table.
        fit: windows of the training text on which the new mechanism is fitted to the model's own positions before
            training; 0: no fit. alibi, kerple and t5 start with the bias nearest to a learned table or a rotation
            (hf_posswap.fit_bias), and rotary schemes with partial below 1 with the queries and keys nearest to a
            learned table (hf_posswap.fit_rotation). Of each window, the part within the model's length is read, and at
            most 2,048 tokens of it if the model rotates.
        gradual_steps: steps over which the share of the new mechanism grows from 0 to 1; 0: a full swap at once.
    """

    scheme: SchemeValue = None
    max_length: int | None = None
    site: Literal["auto", "attention"] = "auto"
    relative: Literal["keep", "drop"] | None = None
    centre: bool = False
    fit: int = 0
    gradual_steps: int = 0


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss.

    Attributes:
        kind: next-token: cross-entropy of a causal model; longce: the same with more weight on tokens that far text
            helps to predict; masked: cross-entropy of an encoder on masked tokens; distill: next-token
            plus the divergence from the unswapped model, in its window or in sliding windows; embedding: the distance
            of text vectors to those of the unswapped encoder; contrastive: the two halves of a text against other
            texts, by sentence-transformers.
        chunk: tokens whose logits are held at once; 0: those of the whole batch, like the model itself.
        distill: settings of distill.
        longce: settings of longce.
        scale: of the cosines for contrastive: one over the temperature.
    """

    kind: Literal["next-token", "longce", "masked", "distill", "embedding", "contrastive"] = "next-token"
    chunk: int = 1024
    distill: DistillSettings = field(default_factory=DistillSettings)
    longce: LongCESettings = field(default_factory=LongCESettings)
    scale: float = 20.0

    @property
    def predicts_next_token(self) -> bool:
        """Whether the loss is of the next token, of a causal model."""
        return self.kind in ("next-token", "longce", "distill")


@dataclass(frozen=True)
class GateSettings:
    """Checks that stop an unhealthy training.

    Attributes:
        start: check plan, swap, positions, memory and one batch's loss before the first step.
        start_above: nats by which the first loss may exceed the unswapped model's; none: the plan's prediction.
        explosion: nats above the best mean of recent losses at which a training stops; 0: only NaN stops it.
        window: losses in that mean.
    """

    start: bool = True
    start_above: float | None = None
    explosion: float = 3.0
    window: int = 20


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of the held-out loss, at the end and as often as training.eval_strategy says.

    Attributes:
        lengths: tokens to read of each held-out document; empty: one length, near data.length.
        documents: most held-out documents to read.
    """

    lengths: tuple[int, ...] = ()
    documents: int = 16


@dataclass(frozen=True)
class StageSettings:
    """One stage of several: its differences from the recipe.

    Attributes:
        max_steps: most optimizer steps of the stage.
        length: tokens of a window; none: data.length.
        scheme: fields that differ from swap.scheme, or another scheme; none: swap.scheme.
        max_length: none: swap.max_length.
        learning_rate: none: training.learning_rate.
        recovered: advance once the loss on short held-out text is at most this many nats above the unswapped model's;
            none: after all steps.
        least_steps: least steps before the stage advances.
        check_every: steps between checks of the short loss.
    """

    max_steps: int = 100
    length: int | None = None
    scheme: SchemeValue = None
    max_length: int | None = None
    learning_rate: float | None = None
    recovered: float | None = None
    least_steps: int = 0
    check_every: int = 50


@dataclass(frozen=True, repr=False)
class Recipe(FactsView):
    """A complete training. A YAML file states only the differences from the files that it includes.

    Attributes:
        model: the model to start from.
        swap: the swap of its position mechanism.
        data: the training data.
        objective: the loss.
        trainable: which weights are trained.
        peft: the fields of a PEFT config for `peft_type`, LORA by default; none: no adapters. Without target_modules,
            the projections of attention are adapted.
        training: the fields of transformers.TrainingArguments.
        evaluation: settings of the held-out loss.
        gates: checks that stop an unhealthy training.
        stages: successive lengths and schemes; empty: one stage, the recipe itself.
        out: the folder for checkpoints, logs, report and the finished model.
        name: of the recipe, for the finished model's record; none: that of its file.
        imports: Python files, relative to the recipe, or modules that register schemes of your own; they are run.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    swap: SwapSettings = field(default_factory=SwapSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    trainable: TrainableSettings = field(default_factory=TrainableSettings)
    peft: dict[str, object] | None = None
    training: TrainingSettings = field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    gates: GateSettings = field(default_factory=GateSettings)
    stages: tuple[StageSettings, ...] = ()
    out: str = "posswap-run"
    name: str | None = None
    imports: tuple[str, ...] = ()

    def _repr_facts(self) -> dict[str, object]:
        swap = self.swap.scheme if isinstance(self.swap.scheme, str) else brief(self.swap.scheme)
        facts = {"name": self.name, "model": self.model.name, "scheme": swap, "max_length": self.swap.max_length}
        training = {"objective": self.objective.kind, "what": self.what, "max_steps": self.training.max_steps}
        return facts | training | {"stages": len(self.stages), "out": self.out}

    @property
    def what(self) -> str:
        """Which weights are trained: the adapter type, or `trainable.what`."""
        return self.trainable.what if self.peft is None else str(self.peft["peft_type"]).lower()

    @property
    def checkpoints_activations(self) -> bool:
        """Whether activation checkpointing is on, under either of transformers' names for it."""
        names = ("activation_checkpointing", "gradient_checkpointing")
        return any(getattr(self.training, name, None) for name in names)


@dataclass(frozen=True)
class Key:
    """One key that a recipe can give.

    Attributes:
        name: dotted, with `[]` after a list of further keys.
        owner: the dataclass that documents it.
        field: its name there.
        default: its value if no file sets it.
    """

    name: str
    owner: type
    field: str
    default: Any


def keys_of(cls: type, above: str = "") -> Iterator[Key]:
    """Yield the keys of the dataclass `cls` and of nested dataclasses, prefixed by `above`; `training` is one key.

    Example:
        >>> from hf_posswap.training.config.settings import Recipe
        >>> [key.name for key in keys_of(Recipe)][:3]
        ['model.name', 'model.tokenizer', 'model.revision']
    """
    hints = get_type_hints(cls)
    for setting in dataclasses.fields(cls):
        hint, name = hints[setting.name], f"{above}{setting.name}"
        item_classes = [item for item in get_args(hint) if dataclasses.is_dataclass(item)]
        if dataclasses.is_dataclass(hint) and hint is not TrainingSettings:
            yield from keys_of(hint, f"{name}.")  # type: ignore[arg-type]
        elif get_origin(hint) is tuple and item_classes:
            yield from keys_of(item_classes[0], f"{name}[].")  # type: ignore[arg-type]
        else:
            default = setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()
            yield Key(
                name,
                cls,
                setting.name,
                non_default_settings(default) if isinstance(default, TrainingSettings) else default,
            )


@dataclass(frozen=True)
class Phase:
    """A section of a training with one length, one scheme and one schedule.

    Attributes:
        name: of its folder; "" if there is only one phase.
        recipe: without stages.
        stage: when to advance; None if there is only one phase.
    """

    name: str
    recipe: Recipe
    stage: StageSettings | None = None


def phases_of(recipe: Recipe) -> list[Phase]:
    """Return the phases of `recipe`, in order.

    Example:
        >>> from hf_posswap.training.config.settings import SwapSettings
        >>> stages = (StageSettings(max_steps=5, length=64), StageSettings(max_steps=3, scheme={"base": 5e5}))
        >>> for phase in phases_of(Recipe(swap=SwapSettings({"name": "rope", "base": 1e5}), stages=stages)):
        ...     print(phase.name, phase.recipe.training.max_steps, phase.recipe.data.length, phase.recipe.swap.scheme)
        stage-1 5 64 {'name': 'rope', 'base': 100000.0}
        stage-2 3 512 {'name': 'rope', 'base': 500000.0}
    """
    if not recipe.stages:
        return [Phase("", recipe)]
    numbered = enumerate(recipe.stages, 1)
    return [Phase(f"stage-{number}", _single_stage_recipe(recipe, stage), stage) for number, stage in numbered]


def _single_stage_recipe(recipe: Recipe, stage: StageSettings) -> Recipe:
    swap = dataclasses.replace(
        recipe.swap, scheme=scheme_of(recipe, stage), max_length=stage.max_length or recipe.swap.max_length
    )
    training = dataclasses.replace(
        recipe.training,
        max_steps=stage.max_steps,
        warmup_steps=min(recipe.training.warmup_steps, stage.max_steps),
        learning_rate=stage.learning_rate or recipe.training.learning_rate,
    )
    data = dataclasses.replace(recipe.data, length=stage.length or recipe.data.length)
    return dataclasses.replace(recipe, swap=swap, training=training, data=data, stages=())


def scheme_of(recipe: Recipe, stage: StageSettings) -> SchemeValue:
    """Return the scheme of a stage: the recipe's, with the fields that the stage gives, or a different scheme."""
    if stage.scheme is None:
        return recipe.swap.scheme
    below, above = scheme_mapping(recipe.swap.scheme), scheme_mapping(stage.scheme)
    return merge({"scheme": below}, {"scheme": above})["scheme"]
