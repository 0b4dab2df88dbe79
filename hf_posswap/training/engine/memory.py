"""Estimates the memory of a training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import NotEnoughMemoryError
from hf_posswap.geometry import ConfigSizes
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.utils.format import human_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Values per token that a layer keeps for its backward, in multiples of the hidden and the inner width, as measured on
# small models (tests/training/engine/test_memory.py); frozen matrices do not keep their inputs.
_STATES, _FROZEN_STATES = (10, 4), (7, 3)
_COMPOSED = ("gelu_new", "gelu_fast", "gelu_python", "quick_gelu")  # each of several operations, which keep tensors
_LOGITS = 3  # copies: logits, their logarithms, their gradient
_TAUGHT_LOGITS = 5  # those of both models, the logarithms of both, chances
_SCORES = 4  # copies of a bias: bias, scores, softmax, gradient
_ADAM_STATES = 2
_FEWER_STATES = {"sgd": 1, "adafactor": 1}  # with momentum; an upper bound
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class TrainingNeed:
    """An estimate of what one process holds at once, in bytes.

    Attributes:
        weights: of the model.
        gradients: of the trainable parameters.
        optimizer: its state, two values per weight for AdamW.
        activations: kept for the backward.
        layer: activations of one layer during its backward.
        logits: of one chunk, and with chunks the head's gradient.
        teacher: the weights of the unswapped model; it keeps no activations.
        targets: what the unswapped model gives after each layer, where the loss compares it.
        accumulates: whether gradients of earlier batches exist during the forward.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    layer: int
    logits: int
    teacher: int = 0
    targets: int = 0
    accumulates: bool = False

    @property
    def total(self) -> int:
        """The peak: at the end of the forward, or when the last gradients are computed."""
        forward, backward = self.activations + self.logits, self.layer + self.gradients
        if self.accumulates:
            forward += self.gradients
        return self.weights + self.teacher + self.targets + self.optimizer + max(forward, backward)

    def __str__(self) -> str:
        sizes = {name: size for name, size in vars(self).items() if size and name != "accumulates"}
        size_list = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())
        return f"about {human_bytes(self.total)} (not all at once: {size_list})"


def training_need(
    model: Any,
    recipe: Recipe,
    launch: Launch,
    *,
    biased: tuple[int, ...],
    chunk: int,
    teacher: PreTrainedModel | None = None,
) -> TrainingNeed:
    """Return the memory that training `model` by `recipe` needs.

    Args:
        model: prepared, on any device.
        recipe: without stages.
        launch: sets over how many processes weights are sharded.
        biased: window lengths for which attention materializes scores or biases [H, L, L].
        chunk: tokens whose logits are held at once; 0: all.
        teacher: the unswapped model; None: there is none.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=2))
        >>> need = training_need(model, Recipe(), Launch(), biased=(), chunk=256)
        >>> need.optimizer == 2 * need.gradients == 2 * need.weights
        True
    """
    sizes = ConfigSizes.of(model.config)
    parameters = list(model.parameters())
    shards = launch.replicas * launch.context if launch.shards else 1
    gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad) // shards
    rows, split = recipe.training.per_device_train_batch_size, launch.context * launch.ulysses
    length = recipe.data.length // split
    half = recipe.training.bf16 or recipe.training.fp16
    size = _FLOAT // 2 if half else _FLOAT
    layer = rows * length * _layer_states(model.config, recipe) * size
    scores = [
        rows * (recipe.data.length // biased_length) * (biased_length // split) ** 2 for biased_length in biased
    ]  # shorter windows are more per row
    layer += _SCORES * sizes.heads * max(scores, default=0) * _FLOAT
    residual_size = int(
        model.get_input_embeddings().weight.element_size()
    )  # autocast leaves them in the weights' dtype
    states = sizes.layers * rows * length * sizes.hidden * residual_size
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    options = [getattr(recipe.training, name, None) for name in names]
    offloads = any(isinstance(each, Mapping) and bool(each.get("offload")) for each in options)
    checkpointed = states if recipe.checkpoints_activations and not offloads else 0
    copies = _LOGITS if teacher is None else _TAUGHT_LOGITS
    return TrainingNeed(
        weights=sum(p.numel() * p.element_size() for p in parameters) // shards,
        gradients=gradients,
        optimizer=_FEWER_STATES.get(recipe.training.optim or "", _ADAM_STATES) * gradients,
        activations=checkpointed if recipe.checkpoints_activations else sizes.layers * layer,
        layer=checkpointed + layer,
        logits=_logits(model, sizes.vocabulary, rows * length, chunk, copies=half + copies),
        teacher=0 if teacher is None else sum(p.numel() * p.element_size() for p in teacher.parameters()),
        targets=0 if teacher is None else _targets(recipe, sizes, states, rows * length, size),
        accumulates=recipe.training.gradient_accumulation_steps > 1,
    )


def _targets(recipe: Recipe, sizes: ConfigSizes, states: int, tokens: int, size: int) -> int:
    """Return the bytes of the unswapped model's states, and of both models' queries, keys and values, that are held."""
    distill, total = recipe.objective.distill, 0
    if recipe.objective.kind != "distill":
        return 0
    if distill.states:
        total += states
    if distill.relations:
        total += 2 * sizes.layers * tokens * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim * size
    return total


def _layer_states(config: PreTrainedConfig, recipe: Recipe) -> int:
    """Return the values per token that one layer keeps for its backward."""
    sizes, text = ConfigSizes.of(config), config.get_text_config()
    frozen = recipe.peft is not None and recipe.peft.get("target_modules") is None
    of_hidden, of_inner = _FROZEN_STATES if frozen else _STATES
    activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)
    return of_hidden * sizes.hidden + (of_inner + (activation in _COMPOSED)) * sizes.inner


def _logits(model: PreTrainedModel, vocabulary: int, tokens: int, chunk: int, *, copies: int) -> int:
    logits_bytes = copies * min(chunk or tokens, tokens) * vocabulary * _FLOAT
    head = model.get_output_embeddings()
    if not chunk or head is None or not head.weight.requires_grad:
        return logits_bytes
    return logits_bytes + head.weight.numel() * _FLOAT  # its gradient is computed along with the loss


def process_bytes() -> int | None:
    """Return the resident memory of this process, with its libraries; None: this system does not say.

    Example:
        >>> process_bytes() is None or process_bytes() > 10_000_000
        True
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def need_message(need: TrainingNeed, process: int | None) -> str:
    """Return the estimate as text, on a CPU with what the process holds besides.

    Args:
        need: the estimate.
        process: resident memory of the process once the weights are loaded; None: the weights are on a GPU, or the
            system does not say.

    Example:
        >>> need_message(TrainingNeed(100 << 20, 0, 0, 50 << 20, 0, 0), 700 << 20).partition("; ")[2]
        'with the libraries, 600 MiB, about 750 MiB'
    """
    if process is None:
        return f"memory needed: {need}"
    libraries = max(0, process - need.weights - need.teacher)
    total = human_bytes(need.total + libraries)
    return f"memory needed: {need}; with the libraries, {human_bytes(libraries)}, about {total}"


def refuse_too_much(need: TrainingNeed, free: int | None, recipe: Recipe, *, loaded: bool) -> None:
    """Refuse a training that needs more memory than its device has.

    Args:
        need: the estimate.
        free: free bytes of the device; None: not known.
        recipe: without stages.
        loaded: whether the weights are on the device already.

    Raises:
        NotEnoughMemoryError: names settings that would help.
    """
    if free is None or need.total - (need.weights + need.teacher if loaded else 0) <= free:
        return
    helps = []
    if recipe.training.per_device_train_batch_size > 1:
        helps.append("a smaller training.per_device_train_batch_size with more training.gradient_accumulation_steps")
    if not recipe.checkpoints_activations:
        helps.append("training.gradient_checkpointing=true")
    if recipe.what == "full":
        helps.append("peft.peft_type=LORA")
    if not recipe.objective.chunk:
        helps.append("objective.chunk=1024")
    helps.append("a shorter data.length")
    raise NotEnoughMemoryError(
        f"training needs {need}, and {human_bytes(free)} are free on the device"
        f"{', where the weights are already' if loaded else ''}. What helps: {', '.join(helps)}. "
        "gates.start=false skips this check."
    )
