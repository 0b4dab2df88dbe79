"""Estimates the memory of a training: what its forward keeps is measured on a few tokens of the loaded model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import gpu_autocast, storage_key
from hf_posswap.errors import NotEnoughMemoryError, UnsupportedModelError
from hf_posswap.geometry import ConfigSizes
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.training.head import inner_model, split, without_cache
from hf_posswap.utils.format import human_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOSS_STATES = 2  # copies of the last states: those with a label, their gradient
_FINAL_STATES = 3  # what a last norm keeps after checkpointed layers, and its result
_WORKING, _FROZEN_WORKING = 2, 3  # gradients as wide as the widest activation, less the input that a matrix kept
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
        layer: activations that one layer keeps for its backward.
        logits: of one chunk, and with chunks the head's gradient.
        activation_gradients: gradients of activations during the backward of one layer.
        loss_gradients: gradients of states, and with chunks of the head, with which the backward begins.
        teacher: the weights of the unswapped model; it keeps no activations.
        targets: what the unswapped model gives after each layer, where the loss compares it.
        tied_gradients: gradients of a table that is tied to the head, held while they are added up.
        recomputes: whether the backward recomputes the activations of each layer.
        accumulates: whether gradients of earlier batches exist during the forward.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    layer: int
    logits: int
    activation_gradients: int = 0
    loss_gradients: int = 0
    teacher: int = 0
    targets: int = 0
    tied_gradients: int = 0
    recomputes: bool = False
    accumulates: bool = False

    @property
    def total(self) -> int:
        """The peak: at the end of the forward, in the backward of the last layer, or in that of the first."""
        forward, last = (
            self.activations + self.logits,
            self.activations + self.activation_gradients + self.loss_gradients,
        )
        if self.recomputes:
            last += self.layer
        if self.accumulates:
            forward, last = forward + self.gradients, last + self.gradients
        first = self.layer + self.activation_gradients + self.gradients + self.tied_gradients
        return self.weights + self.teacher + self.targets + self.optimizer + max(forward, last, first)

    def __str__(self) -> str:
        sizes = {name: size for name, size in vars(self).items() if size and not isinstance(size, bool)}
        size_list = ", ".join(f"{name.replace('_', ' ')} {human_bytes(size)}" for name, size in sizes.items())
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
    tokens = rows * (recipe.data.length // split)
    half = torch.bfloat16 if recipe.training.bf16 else torch.float16 if recipe.training.fp16 else None
    size = _FLOAT if half is None else half.itemsize
    saved = saved_bytes(model, min(recipe.data.lengths), autocast=half, on_gpu=not on_cpu(recipe))
    pairs = [
        rows * (recipe.data.length // biased_length) * (biased_length // split) ** 2 for biased_length in biased
    ]  # shorter windows are more per row
    pairs_held = max(pairs, default=0)
    kept = int(saved.token * tokens) + saved.fixed
    residual_size = int(
        model.get_input_embeddings().weight.element_size()
    )  # autocast leaves them in the weights' dtype
    last_states = tokens * sizes.hidden * residual_size
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    options = [getattr(recipe.training, name, None) for name in names]
    offloads = any(isinstance(each, Mapping) and bool(each.get("offload")) for each in options)
    checkpointed = (0 if offloads else sizes.layers) * last_states
    final, recomputes = _FINAL_STATES * last_states, recipe.checkpoints_activations
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    head_gradient = head.weight.numel() * _FLOAT if head is not None and head.weight.requires_grad else 0
    head_copies = (1 + (tokens > chunk)) if chunk else 0  # summed; that of the chunk before is still held
    head_half = 0 if head is None or half is None else head.weight.numel() * half.itemsize
    compared = (sizes.layers - 1) * last_states if teacher is not None and recipe.objective.distill.states else 0
    accumulates = recipe.training.gradient_accumulation_steps > 1
    # most matrices are frozen, and do not keep their inputs
    few_train = recipe.trainable.what != "full" if recipe.peft is None else recipe.peft.get("target_modules") is None
    is_tied = head is not None and head.weight is table
    logits = (_LOGITS if teacher is None else _TAUGHT_LOGITS) * min(chunk or tokens, tokens) * sizes.vocabulary * _FLOAT
    return TrainingNeed(
        weights=sum(p.numel() * p.element_size() for p in parameters) // shards,
        gradients=gradients,
        optimizer=_FEWER_STATES.get(recipe.training.optim or "", _ADAM_STATES) * gradients,
        activations=checkpointed if recomputes else kept + int(saved.pair * pairs_held),
        layer=max(0, kept - final) // sizes.layers + _SCORES * sizes.heads * pairs_held * _FLOAT,
        logits=logits
        + head_half
        + head_copies * head_gradient
        + _LOSS_STATES * last_states
        + (final if recomputes else 0),
        activation_gradients=int((_FROZEN_WORKING if few_train else _WORKING) * saved.widest * tokens),
        loss_gradients=(head_gradient if chunk else 0) + last_states,
        teacher=0 if teacher is None else sum(p.numel() * p.element_size() for p in teacher.parameters()),
        targets=0 if teacher is None else compared + _relations(recipe, sizes, tokens, size),
        tied_gradients=(2 + accumulates) * head_gradient if is_tied else 0,
        recomputes=recomputes,
        accumulates=accumulates,
    )


def _relations(recipe: Recipe, sizes: ConfigSizes, tokens: int, size: int) -> int:
    """Return the bytes of both models' queries, keys and values, that the loss compares."""
    if recipe.objective.kind != "distill" or not recipe.objective.distill.relations:
        return 0
    return 2 * sizes.layers * tokens * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim * size


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


_LENGTH = 32
"""Most tokens of the shorter rows."""


@dataclass(frozen=True)
class SavedBytes:
    """What a forward keeps for its backward, with its last states, without the weights, the logits and the loss.

    Attributes:
        token: bytes per token.
        pair: bytes per pair of tokens of a row: attention scores, where attention materializes them.
        widest: bytes per token of the largest tensor of them.
        fixed: bytes that no token adds: weights in the precision of autocast.
    """

    token: float
    pair: float
    widest: float
    fixed: int


def saved_bytes(model: PreTrainedModel, length: int, *, autocast: torch.dtype | None, on_gpu: bool) -> SavedBytes:
    """Return what the forward of `model` keeps for its backward, from four forwards of at most 128 tokens.

    Args:
        model: as it is trained, on any device, before any of its layers checkpoint activations.
        length: tokens of a window in training, which the model can read.
        autocast: dtype of mixed precision; None: none.
        on_gpu: whether the training runs on a GPU, also if `model` is on the CPU.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 64}
        >>> saved = saved_bytes(GPT2LMHeadModel(GPT2Config(**shape)), 64, autocast=None, on_gpu=False)
        >>> saved.token > 4 * 10 * 8, saved.pair > 0  # a CPU holds scores where some are dropped out
        (True, True)
    """
    device, short = model.device, max(1, min(_LENGTH, length // 2))
    training, gpus = model.training, [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=gpus))  # dropout must not change what training draws
        if autocast is not None:
            if on_gpu and device.type == "cpu":
                stack.enter_context(gpu_autocast())
            stack.enter_context(torch.autocast(device.type, dtype=autocast))
        stack.callback(model.train, training)
        model.train()
        one, two = (_saved(model, rows, short) for rows in (1, 2))
        long_one, long_two = (_saved(model, rows, 2 * short) for rows in (1, 2))
    # a row of L tokens keeps token L + pair L^2
    row, long_row = sum(two) - sum(one), sum(long_two) - sum(long_one)
    pair = max(0.0, (long_row - 2 * row) / (2 * short**2))
    widest = max(Counter(two) - Counter(one), default=0)  # what both have are weights
    return SavedBytes(row / short - pair * short, pair, widest / (2 * short), max(0, sum(one) - row))


def _saved(model: PreTrainedModel, rows: int, length: int) -> list[int]:
    """Return the sizes of the tensors that a forward of `rows` rows of `length` tokens keeps for its backward."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage_key(storage)] = storage.nbytes()
        return tensor

    padding = getattr(inner_model(model).config.get_text_config(), "pad_token_id", None)
    token = 2 if padding == 1 else 1
    inputs: dict[str, object] = {"input_ids": torch.full((rows, length), token, device=model.device)}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        try:
            kept: object = split(model, inputs).states
        except UnsupportedModelError:  # its logits are then counted too
            sizes.clear()
            kept = model(**inputs | without_cache(inner_model(model)))
    # the graph in `kept` keeps the storages until here, so that no key is used twice
    weights = {storage_key(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
    del kept
    return [size for key, size in sizes.items() if key not in weights]
