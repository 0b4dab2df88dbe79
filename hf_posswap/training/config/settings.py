"""What a recipe says: every argument of a training, documented once. Help, errors and docs are read from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_posswap.training.data import DataSettings
from hf_posswap.training.distill import DistillSettings
from hf_posswap.training.trainable import TrainableSettings

SchemeValue = str | Mapping[str, Any] | None
SENTENCES = ("embedding", "contrastive")
"""Objectives that make one vector of a text."""


@dataclass(frozen=True)
class ModelSettings:
    """The model to start from.

    Attributes:
        name: a folder or a Hub id.
        tokenizer: a folder or a Hub id; none: the model's own.
        revision: of the Hub id.
        dtype: that the weights are loaded and trained in; optimizer.precision says what the forward computes in.
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
        scheme: a name, a name with fields: {name: yarn, factor: 4}, or a .json file that posswap search wrote; none: no
            swap, for a control.
        max_length: tokens that the swapped model is meant for; none: as patch_model has it.
        site: auto, or always inside attention.
        relative: keep or drop the relative positions that DeBERTa has inside attention beside its table; none: keep
            them, and all that other models take.
        centre: move the mean of the position table into the token embeddings first, so that the swap takes positions
            alone: see hf_posswap.centre_table.
        gradual_steps: steps over which the share of the new mechanism grows from 0 to 1; 0: it is put in at once.
    """

    scheme: SchemeValue = None
    max_length: int | None = None
    site: Literal["auto", "attention"] = "auto"
    relative: Literal["keep", "drop"] | None = None
    centre: bool = False
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
class OptimizerSettings:
    """How the weights move.

    Attributes:
        steps: optimizer steps.
        learning_rate: after the warm-up.
        schedule: of the learning rate after the warm-up.
        final_rate: share of the learning rate that is left at the end of cosine or linear.
        warmup: steps of linear warm-up.
        weight_decay: of matrices; vectors have none.
        beta1: of AdamW.
        beta2: of AdamW.
        clip: largest norm of the whole gradient; 0: not clipped.
        batch: windows of data.length that one process reads at once.
        accumulate: batches a step.
        fused: one kernel for all of AdamW; none: where there is a GPU.
        precision: of the forward: float32, or bfloat16 by autocast.
        seed: of everything random but the data, which has its own.
    """

    steps: int = 1000
    learning_rate: float = 2e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_rate: float = 0.1
    warmup: int = 20
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    batch: int = 1
    accumulate: int = 1
    fused: bool | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0


@dataclass(frozen=True)
class ComputeSettings:
    """Where and how it is computed; none of it changes what is computed.

    Attributes:
        device: auto: a GPU where there is one.
        checkpointing: make activations again in the backward, instead of keeping them.
        offload: keep the checkpointed activations in the memory of the CPU.
        compile: each layer by torch.compile.
        workers: processes that prepare batches.
    """

    device: Literal["auto", "cpu"] = "auto"
    checkpointing: bool = False
    offload: bool = False
    compile: bool = False
    workers: int = 0


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
class SaveSettings:
    """What is kept.

    Attributes:
        every: steps between checkpoints to go on from.
        keep: checkpoints that are kept.
        push: Hub id to push the finished model to; none: not pushed.
        private: whether a new repository on the Hub is private.
    """

    every: int = 100
    keep: int = 2
    push: str | None = None
    private: bool = True


@dataclass(frozen=True)
class WatchSettings:
    """What is seen of it.

    Attributes:
        log_every: steps between lines of the log.
        report_to: also to these: tensorboard, trackio, wandb, or what transformers knows.
        evaluate_every: steps between evaluations; 0: one at the end.
        evaluate_lengths: tokens of the held-out documents that are read; empty: nothing is evaluated.
        evaluate_documents: most held-out documents to read.
        picture: draw the loss curve at the end; it needs the extra "plot".
    """

    log_every: int = 10
    report_to: tuple[str, ...] = ("tensorboard",)
    evaluate_every: int = 0
    evaluate_lengths: tuple[int, ...] = ()
    evaluate_documents: int = 16
    picture: bool = True


@dataclass(frozen=True)
class StageSettings:
    """One stage of several: what differs from the rest of the recipe.

    Attributes:
        steps: most optimizer steps of the stage.
        length: tokens of a window; none: data.length.
        scheme: fields that differ from swap.scheme, or another scheme; none: swap.scheme.
        max_length: none: swap.max_length.
        learning_rate: none: optimizer.learning_rate.
        recovered: advance once the loss on short held-out text is at most this many nats above the unswapped model's;
            none: after all steps.
        least_steps: before which the stage does not advance.
        check_every: steps between looks at the short loss.
    """

    steps: int = 100
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
        train: which weights are trained.
        objective: what is minimised.
        optimizer: how the weights move.
        compute: where and how it is computed.
        gates: what stops a training that is not healthy.
        save: what is kept.
        watch: what is seen of it.
        stages: lengths and schemes one after the other; empty: one stage, the recipe itself.
        out: the folder for checkpoints, logs, report and the finished model.
        name: of the recipe, which the finished model's record tells; none: that of its file.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    swap: SwapSettings = field(default_factory=SwapSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainableSettings = field(default_factory=TrainableSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    gates: GateSettings = field(default_factory=GateSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    stages: tuple[StageSettings, ...] = ()
    out: str = "posswap-run"
    name: str | None = None
