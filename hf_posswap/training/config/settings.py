"""The recipe's dataclasses: every training setting, documented once. Help, errors and docs are generated from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_posswap.training.config.theirs import TrainingSettings
from hf_posswap.training.data import DataSettings
from hf_posswap.training.distill import DistillSettings
from hf_posswap.training.trainable import TrainableSettings

SchemeValue = str | Mapping[str, Any] | None
SENTENCES = ("embedding", "contrastive")
"""Objectives that embed a text as one vector."""


@dataclass(frozen=True)
class ModelSettings:
    """The model to start from.

    Attributes:
        name: a folder or a Hub id.
        tokenizer: a folder or a Hub id; none: the model's own.
        revision: of the Hub id.
        dtype: that the weights are loaded and trained in; training.bf16 and fp16 say what the forward computes in.
        attention: attention implementation; none: transformers' choice.
        trust_remote_code: run code that the model or the tokenizer brings, where it needs that to be loaded.
    """

    name: str = ""
    tokenizer: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    attention: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class SwapSettings:
    """What is put in place of the model's position mechanism.

    Attributes:
        scheme: a name, a name with fields: "yarn:factor=4,base=500000" or {name: yarn, factor: 4}, or a .json file that
            posswap search wrote; none: no swap, for a control.
        max_length: tokens that the swapped model is meant for; none: as patch_model has it.
        site: auto, or always inside attention.
        relative: keep or drop the relative positions that DeBERTa has inside attention beside its table; none: keep
            them, and all that other models take.
        centre: move the mean of the position table into the token embeddings first, so that the swap takes positions
            alone: see hf_posswap.centre_table.
        fit: windows of the training text on which the new mechanism is fitted to what the position table did, before
            any training; 0: none. alibi and t5 begin with the nearest bias (hf_posswap.fit_bias), rope and its kind
            with partial below 1 with the nearest queries and keys (hf_posswap.fit_rotation).
        gradual_steps: steps over which the share of the new mechanism grows from 0 to 1; 0: it is put in at once.
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
    """What is minimised.

    Attributes:
        kind: next-token: cross-entropy of a causal model; masked: of an encoder on masked tokens; distill: next-token,
            and the divergence from the unswapped model, within its window or sliding on; embedding: the vectors of
            texts against those of the unswapped encoder; contrastive: the two halves of a text against other texts, by
            sentence-transformers.
        chunk: tokens whose logits are held at once; 0: those of the whole batch, as the model itself does.
        distill: how to stay close to the unswapped model, under distill.
        scale: of the cosines under contrastive: one over the temperature.
    """

    kind: Literal["next-token", "masked", "distill", "embedding", "contrastive"] = "next-token"
    chunk: int = 1024
    distill: DistillSettings = field(default_factory=DistillSettings)
    scale: float = 20.0


@dataclass(frozen=True)
class GateSettings:
    """What stops a training that is not healthy.

    Attributes:
        start: check plan, swap, positions, memory and one batch's loss before the first step.
        start_above: nats by which the first loss may stand above the unswapped model's; none: what the plan predicts.
        explosion: nats above the best mean of recent losses at which a training stops; 0: only NaN stops it.
        window: losses in that mean.
    """

    start: bool = True
    start_above: float | None = None
    explosion: float = 3.0
    window: int = 20


@dataclass(frozen=True)
class EvaluationSettings:
    """What held-out loss is measured on, at the end, and before as training.eval_strategy says.

    Attributes:
        lengths: tokens of the held-out documents that are read; empty: one length, near data.length.
        documents: most held-out documents to read.
    """

    lengths: tuple[int, ...] = ()
    documents: int = 16


@dataclass(frozen=True)
class StageSettings:
    """One stage of several: what differs from the rest of the recipe.

    Attributes:
        max_steps: most optimizer steps of the stage.
        length: tokens of a window; none: data.length.
        scheme: fields that differ from swap.scheme, or another scheme; none: swap.scheme.
        max_length: none: swap.max_length.
        learning_rate: none: training.learning_rate.
        recovered: advance once the loss on short held-out text is at most this many nats above the unswapped model's;
            none: after all steps.
        least_steps: before which the stage does not advance.
        check_every: steps between looks at the short loss.
    """

    max_steps: int = 100
    length: int | None = None
    scheme: SchemeValue = None
    max_length: int | None = None
    learning_rate: float | None = None
    recovered: float | None = None
    least_steps: int = 0
    check_every: int = 50


@dataclass(frozen=True)
class Recipe:
    """A whole training. A YAML file states what differs from the files that it includes.

    Attributes:
        model: the model to start from.
        swap: what is put in place of its position mechanism.
        data: what is read.
        objective: what is minimised.
        trainable: which weights are trained.
        peft: the fields of a PEFT config, that of `peft_type`, LORA by itself; none: no adapters. target_modules left
            out: the projections of attention.
        training: the fields of transformers.TrainingArguments.
        evaluation: what held-out loss is measured on.
        gates: what stops a training that is not healthy.
        stages: lengths and schemes one after the other; empty: one stage, the recipe itself.
        out: the folder for checkpoints, logs, report and the finished model.
        name: of the recipe, which the finished model's record tells; none: that of its file.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    swap: SwapSettings = field(default_factory=SwapSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    trainable: TrainableSettings = field(default_factory=TrainableSettings)
    peft: dict[str, Any] | None = None
    training: TrainingSettings = field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    gates: GateSettings = field(default_factory=GateSettings)
    stages: tuple[StageSettings, ...] = ()
    out: str = "posswap-run"
    name: str | None = None

    @property
    def what(self) -> str:
        """Which weights are trained, in a word: the kind of adapter, or that of `trainable`."""
        return self.trainable.what if self.peft is None else str(self.peft["peft_type"]).lower()

    @property
    def checkpoints_activations(self) -> bool:
        """Whether activations are made again in the backward, under either name that transformers has for it."""
        names = ("activation_checkpointing", "gradient_checkpointing")
        return any(getattr(self.training, name, None) for name in names)
