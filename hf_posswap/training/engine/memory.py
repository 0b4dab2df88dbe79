"""How much memory a training needs, in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.errors import NotEnoughMemoryError
from hf_posswap.patching.show import human_bytes
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.parallel import Launch

_LAYER_STATES = 10  # hidden states and what norms and residuals make of them
_MLP_STATES = 3
_HEAD_COPIES = 4  # logits, their float32, cross-entropy's, and their gradient
_SCORE_COPIES = 4  # bias, scores, softmax, and their gradient
_ADAM_STATES = 2


@dataclass(frozen=True)
class TrainingNeed:
    """An upper estimate of what one process holds at once, in bytes.

    Attributes:
        weights: of the model.
        gradients: of what is trained.
        optimizer: AdamW's two numbers a weight.
        activations: kept for the backward.
        logits: of one chunk.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in vars(self).items() if size)
        return f"about {human_bytes(self.total)} ({parts})"


def training_need(model: Any, recipe: Recipe, launch: Launch, *, biased: bool, chunk: int) -> TrainingNeed:
    """Return what training `model` as `recipe` says needs.

    Args:
        model: prepared, on any device.
        recipe: without stages.
        launch: over how many processes weights are sharded.
        biased: whether attention holds scores or biases as a whole, [H, L, L].
        chunk: tokens whose logits are held at once; 0: all.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=2))
        >>> need = training_need(model, Recipe(), Launch(), biased=False, chunk=256)
        >>> need.optimizer == 2 * need.gradients == 2 * need.weights
        True
    """
    config: Any = model.config.get_text_config()
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    shards = launch.replicas * launch.context if launch.shards else 1
    gradients = sum(p.numel() * p.element_size() for p in trained) // shards
    rows, length = recipe.optimizer.batch, recipe.data.length // (launch.context * launch.ulysses)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", None) or 1
    inner = next(
        (v for n in ("intermediate_size", "n_inner", "ffn_dim") if (v := getattr(config, n, None))), 4 * hidden
    )
    size = 2 if recipe.optimizer.precision == "bfloat16" else 4
    layer = rows * length * (_LAYER_STATES * hidden + _MLP_STATES * inner) * size
    layer += _SCORE_COPIES * rows * heads * length * length * 4 if biased else 0
    kept = rows * length * hidden * size * (0 if recipe.compute.offload else 1)
    return TrainingNeed(
        weights=sum(p.numel() * p.element_size() for p in parameters) // shards,
        gradients=gradients,
        optimizer=_ADAM_STATES * gradients,
        activations=layers * kept + layer if recipe.compute.checkpointing else layers * layer,
        logits=_HEAD_COPIES * min(chunk or rows * length, rows * length) * config.vocab_size * 4,
    )


def refuse_too_much(need: TrainingNeed, free: int | None, recipe: Recipe, *, loaded: bool) -> None:
    """Refuse a training that needs more than its device has.

    Args:
        need: what it needs.
        free: bytes that are free on the device; None: nothing is known.
        recipe: without stages.
        loaded: whether the weights lie on the device already.

    Raises:
        NotEnoughMemoryError: says what would help.
    """
    if free is None or need.total - (need.weights if loaded else 0) <= free:
        return
    helps = []
    if recipe.optimizer.batch > 1:
        helps.append("a smaller optimizer.batch with more optimizer.accumulate")
    if not recipe.compute.checkpointing:
        helps.append("compute.checkpointing=true")
    if recipe.train.what == "full":
        helps.append("train.what=lora")
    if not recipe.objective.chunk:
        helps.append("objective.chunk=1024")
    helps.append("a shorter data.length")
    raise NotEnoughMemoryError(
        f"training needs {need}, and {human_bytes(free)} are free on the device"
        f"{', where the weights lie already' if loaded else ''}. What helps: {', '.join(helps)}. "
        "gates.start=false tries it all the same."
    )
