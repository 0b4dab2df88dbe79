"""Runs a model's body and head separately through its own forward, so that softcaps, scales and transforms apply.

For texts beyond the model's length, `sliding_states` gives the states of windows that overlap by half.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posswap.compat.torch_modules import compiled_original
from hf_posswap.compat.transformers_models import is_deepspeed_engine
from hf_posswap.errors import DataError, UnsupportedModelError
from hf_posswap.patching.plan.plan_swap import unwrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

Head = Callable[[Tensor], Tensor]
"""From states [N, E] to logits [N, V]."""


class BodyAndHead(NamedTuple):
    """The hidden states of a forward, and the head that turns them into logits.

    Attributes:
        states: of the body, [B, L, E].
        head: computes logits from states.
        hidden: states after each layer but the last, [B, L, E] each, if requested.
    """

    states: Tensor
    head: Head
    hidden: tuple[Tensor, ...] = ()


def inner_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside DDP, DeepSpeed and PEFT.

    Raises:
        UnsupportedModelError: the whole model is compiled, or in DataParallel, so body and head cannot be separated.
    """
    original = compiled_original(model)
    if original is not None:
        raise UnsupportedModelError(
            f"{type(original).__name__} is compiled as a whole, so its head cannot be run a chunk at a time: "
            "compile only its layers, or hold all logits at once."
        )
    if isinstance(model, nn.DataParallel):
        raise UnsupportedModelError(
            f"{type(model.module).__name__} is in DataParallel, whose replicas cannot be split into body and head: "
            "start one process per GPU with torchrun or accelerate launch, or let the process see one GPU."
        )
    is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or is_deepspeed_engine(model)
    return inner_model(model.module) if is_wrapped else unwrap(model)


def run_body_and_head(
    model: nn.Module, inputs: dict[str, object], use: Callable[[BodyAndHead], Tensor], *, hidden: bool = False
) -> Tensor:
    """Return the loss that `use` computes from the body's states and the head, inside the model's own forward.

    Wrappers of the forward (DDP, FSDP, autocast, PEFT) therefore still apply.

    Args:
        model: with a language modelling head, possibly wrapped.
        inputs: arguments of its forward, without labels.
        use: called once.
        hidden: whether it also gets the states after each layer.

    Raises:
        UnsupportedModelError: the body cannot be separated from the head, or the model adds another loss, or it does
            not return the states after its layers.
    """
    inner = inner_model(model)
    original = inner.forward

    def forward(*args: object, **kwargs: object) -> object:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=use(_split(inner, original, args, kwargs)))

    with attribute(inner, "forward", forward):
        return model(**inputs | _forward_options(inner, hidden)).loss


def split(model: nn.Module, inputs: dict[str, object], *, hidden: bool = False) -> BodyAndHead:
    """Return the body's states and the head of a model without wrappers other than PEFT.

    Args:
        model: with a language modelling head.
        inputs: arguments of its forward, without labels.
        hidden: whether to return the states after each layer too.

    Raises:
        UnsupportedModelError: as `run_body_and_head`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
        >>> states, head, _ = split(model, {"input_ids": torch.arange(10)[None]})
        >>> states.shape, head(states[0, :3]).shape
        (torch.Size([1, 10, 8]), torch.Size([3, 11]))
    """
    inner = inner_model(model)
    return _split(inner, inner.forward, (), inputs | _forward_options(inner, hidden))


def _forward_options(inner: PreTrainedModel, hidden: bool) -> dict[str, object]:
    return without_cache(inner) | ({"output_hidden_states": True} if hidden else {})


def _split(
    inner: PreTrainedModel, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> BodyAndHead:
    with _captured(inner) as captured:
        result = original(*args, **kwargs)
    if not captured:
        raise UnsupportedModelError(
            f"the forward of {type(inner).__name__} does not call its {inner.base_model_prefix!r}, so its head "
            "cannot be run a chunk at a time: hold all logits at once."
        )
    if getattr(result, "aux_loss", None) is not None:
        raise UnsupportedModelError(
            f"{type(inner).__name__} adds a router's loss to that of the logits: set output_router_logits=False in "
            "its config, or hold all logits at once."
        )
    path, output, states = captured[0]
    # without the tensors of all tokens, which a head that keeps the output would hold as long as itself
    changed = _with_states(output, output[0].new_empty(0))
    if not isinstance(changed, tuple) and getattr(changed, "hidden_states", None) is not None:
        changed["hidden_states"] = None
    head = _make_head(inner, original, path, changed)
    if not kwargs.get("output_hidden_states"):
        return BodyAndHead(states, head)
    hidden_states = getattr(output, "hidden_states", None)
    if hidden_states is None or len(hidden_states) < 3:
        problem = "does not return the states after its layers" if hidden_states is None else "has only one layer"
        raise UnsupportedModelError(f"{type(inner).__name__} {problem}: distill with states=0.")
    return BodyAndHead(states, head, tuple(hidden_states[1:-1]))


def chosen(apart: BodyAndHead, tokens: Tensor) -> BodyAndHead:
    """Return `apart` restricted to `tokens`, bool [B, L]: states [N, E] each."""
    return BodyAndHead(apart.states[tokens], apart.head, tuple(states[tokens] for states in apart.hidden))


def without_cache(inner: PreTrainedModel) -> dict[str, object]:
    """Return the arguments that disable the cache, which would disable the masks of packed documents."""
    return {"use_cache": False} if getattr(inner.config.get_text_config(), "use_cache", False) else {}


@contextmanager
def _captured(inner: PreTrainedModel) -> Iterator[list[tuple[str, ModelOutput | tuple[Tensor, ...], Tensor]]]:
    """Capture the body's path, output and states, and pass one token on to the head, whose result is discarded."""
    captured: list[tuple[str, ModelOutput | tuple[Tensor, ...], Tensor]] = []
    running: list[str] = []

    def keep(path: str, run: Callable[..., Any]) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            running.append(path)
            try:
                output = run(*args, **kwargs)
            finally:
                running.pop()
            if running or captured:  # a decoder inside the body
                return output
            states = output[0]
            captured.append((path, output, states))
            return _with_states(output, states[:, -1:].detach())

        return forward

    prefix = inner.base_model_prefix
    bodies = [path for path in (prefix, f"{prefix}.decoder") if prefix and _has(inner, path)]
    with _each_forward(inner, bodies, keep):
        yield captured


def _make_head(
    inner: PreTrainedModel, original: Callable[..., Any], path: str, output: ModelOutput | tuple[Tensor, ...]
) -> Head:
    parent_path, _, name = path.rpartition(".")
    parent = inner.get_submodule(parent_path)
    body = parent.get_submodule(name)

    def head(states: Tensor) -> Tensor:
        ids = torch.zeros((1, states.shape[0]), dtype=torch.long, device=states.device)
        placeholder = _FixedOutputBody(body, _with_states(output, states[None]))
        setattr(parent, name, placeholder)
        try:
            return original(input_ids=ids).logits[0]
        finally:
            setattr(parent, name, body)

    return head


class _FixedOutputBody(nn.Module):
    """Replaces a body and returns a fixed output; all other attributes are the body's."""

    def __init__(self, body: nn.Module, output: object) -> None:
        super().__init__()
        self.__dict__.update(body=body, output=output)

    def forward(self, *_: object, **__: object) -> object:
        return self.__dict__["output"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)


def _with_states(output: ModelOutput | tuple[Tensor, ...], states: Tensor) -> ModelOutput | tuple[Tensor, ...]:
    if isinstance(output, tuple):
        return (states, *output[1:])
    changed = copy.copy(output)
    changed["last_hidden_state"] = states
    return changed


def _has(inner: nn.Module, path: str) -> bool:
    try:
        inner.get_submodule(path)
    except AttributeError:
        return False
    return True


@contextmanager
def _each_forward(
    inner: nn.Module, paths: list[str], change: Callable[[str, Callable[..., object]], Callable[..., object]]
) -> Iterator[None]:
    if not paths:
        yield
        return
    module = inner.get_submodule(paths[0])
    with attribute(module, "forward", change(paths[0], module.forward)), _each_forward(inner, paths[1:], change):
        yield


@contextmanager
def attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Set an attribute on one instance within the block, then restore or delete it."""
    attributes = vars(module)
    previous = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if previous is None:
            attributes.pop(name, None)
        else:
            attributes[name] = previous


@dataclass(frozen=True)
class Windows:
    """The windows in which a teacher reads some tokens of a batch, [B, L].

    Attributes:
        rows: batch row of each window, int64 [M].
        starts: index in it at which the window begins, int64 [M].
        width: tokens of a window that must be read.
        of_token: window of each token, int64 [N].
        at: index of each token in its window, int64 [N].
    """

    rows: Tensor
    starts: Tensor
    width: int
    of_token: Tensor
    at: Tensor

    def tokens(self, ids: Tensor) -> Tensor:
        """Return the tokens of each window, [M, width], of `ids` [B, L]; past the end the row's last token repeats."""
        indices = self.starts[:, None] + torch.arange(self.width, device=ids.device)  # [M, width]
        return ids[self.rows[:, None], indices.clamp_max(ids.shape[1] - 1)]


def windows_of(wanted: Tensor, begins: Tensor, size: int) -> Windows:
    """Return the windows of `size` tokens that cover the tokens of `wanted`, without unused windows.

    A document's first window gives all its tokens. Every later window starts half a window further and gives its last
    half, so that every token beyond the first window has at least half a window of context. This is sliding-window
    evaluation, https://huggingface.co/docs/transformers/perplexity, with a stride of half a window.

    Args:
        wanted: which tokens, bool [B, L].
        begins: index at which the document of each token begins, int64 [B, L].
        size: tokens of a window, at least 2.

    Example:
        >>> wanted = torch.ones(1, 9, dtype=torch.bool)
        >>> windows = windows_of(wanted, torch.zeros(1, 9, dtype=torch.long), size=4)
        >>> windows.starts.tolist(), windows.of_token.tolist(), windows.at.tolist()
        ([0, 2, 4, 6], [0, 0, 0, 0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 2, 3, 2, 3, 2])
    """
    length, stride = wanted.shape[1], size // 2
    row, index = wanted.nonzero(as_tuple=True)  # [N]
    document = begins[wanted]
    offset = index - document
    start = document + stride * ((offset - size).div(stride, rounding_mode="floor") + 1).clamp_min(0)
    unique_starts, of_token = torch.unique(row * length + start, return_inverse=True)
    at = index - start
    width = int(at.max()) + 1 if len(at) else 0
    return Windows(unique_starts // length, unique_starts % length, width, of_token, at)


def sliding_states(
    teacher: nn.Module, inputs: dict[str, Any], wanted: Tensor, size: int, *, hidden: bool = False
) -> BodyAndHead:
    """Return the teacher's states for the tokens of `wanted`, [N, E] each, and its head, from half-overlapping windows.

    Each window starts at position 0, with no context before it. A forward reads no more tokens than `inputs` has.

    Args:
        teacher: a causal model whose window has `size` tokens.
        inputs: arguments of the forward of the model that learns: `input_ids` [B, L]; rows may end in padding. Packed
            documents are separated by a mask [B, 1, L, L] or, without a mask, by `position_ids`; each is read alone.
        wanted: which tokens, bool [B, L].
        size: tokens of a window.
        hidden: whether to return the states after each layer too.

    Raises:
        DataError: padding stands before text, or `document_begins` cannot read the mask.
        UnsupportedModelError: as `split`.
    """
    ids = inputs["input_ids"]
    if not wanted.any():  # a process whose share of the batch has no labels
        return chosen(split(teacher, {"input_ids": ids[:1, :1]}, hidden=hidden), wanted[:1, :1])
    windows = windows_of(wanted, document_begins(inputs), size)
    rows = windows.tokens(ids)  # [M, width]
    at_once = max(1, ids.numel() // windows.width)
    outputs: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for first in range(0, len(rows), at_once):
            apart = split(teacher, {"input_ids": rows[first : first + at_once]}, hidden=hidden)
            in_batch = (windows.of_token >= first) & (windows.of_token < first + at_once)
            batch_states = (apart.states, *apart.hidden)  # [.., width, E] each
            outputs = outputs or tuple(states.new_empty(len(in_batch), states.shape[-1]) for states in batch_states)
            for output, states in zip(outputs, batch_states, strict=True):
                output[in_batch] = states[windows.of_token[in_batch] - first, windows.at[in_batch]]
    return BodyAndHead(outputs[0], apart.head, outputs[1:])


def document_begins(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the index at which the document of each token begins, int64 [B, L].

    Args:
        inputs: `input_ids` [B, L]; documents are separated by a mask [B, 1, L, L] or, without a mask, by
            `position_ids` that restart with each document. With a mask [B, L], a row is one document.

    Raises:
        DataError: a mask [B, L] has padding before text, or a mask [B, 1, L, L] is not causal within documents.

    Example:
        >>> ids, mask = torch.arange(4)[None], torch.block_diag(torch.ones(3, 3).tril(), torch.ones(1, 1)).bool()
        >>> document_begins({"input_ids": ids, "attention_mask": mask[None, None]}).tolist()
        [[0, 0, 0, 3]]
    """
    ids, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if mask is not None:
        if getattr(mask, "ndim", None) == 4:
            return _begins_of_mask(mask).expand(ids.shape)
        if getattr(mask, "ndim", None) != 2:
            raise DataError(
                f"a teacher reads a mask [B, L] or [B, 1, L, L], got {getattr(mask, 'shape', type(mask).__name__)}."
            )
        if bool((mask.diff(dim=1) > 0).any()):
            raise DataError(
                "a teacher that reads by sliding windows needs padding at the end of rows, and this batch has padding "
                "before text: pad on the right."
            )
    if mask is not None or positions is None:
        return torch.zeros_like(index)
    first = functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)  # [B, L]
    return torch.where(first, index, 0).cummax(dim=1).values


def _begins_of_mask(mask: Tensor) -> Tensor:
    """Return the index at which the document of each token begins, [B, L]; a fully masked token is its own document."""
    seen = mask if mask.dtype == torch.bool else mask == 0  # [B, H, Q, K]
    index = torch.arange(mask.shape[-1], device=mask.device)
    head_mask = seen[:, 0]
    any_seen = head_mask.any(dim=-1)  # [B, Q]
    if mask.shape[-2] == mask.shape[-1]:
        begins = torch.where(any_seen, head_mask.int().argmax(dim=-1), index)
        expected = (index >= begins[..., None]) & (index <= index[:, None]) & any_seen[..., None]
        # same document as the previous token, or a new one
        is_valid_begin = (begins[:, 1:] == begins[:, :-1]) | (begins[:, 1:] == index[1:])
        if bool((seen == expected[:, None]).all()) and bool(is_valid_begin.all()):
            return begins
    raise DataError(
        f"a teacher reads documents from their beginning, and this attention mask {tuple(mask.shape)} is not causal "
        "within whole documents: give a mask [B, 1, L, L] that is, True or 0 where a token is seen, or position_ids "
        "without a mask."
    )
