"""A model's body and head run apart, without a copy of its forward: softcaps, scales and transforms stay its own.

The forward of transformers models runs the body, hands its states to the head, and does to the logits what the family
does. Run once, it gives the body's states; run again with those states in the body's place, a chunk at a time, it gives
the logits of that chunk alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_wrappers import compiled_original
from hf_posswap.compat.transformers_deepspeed import is_deepspeed_engine
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.patching.plan.plan_swap import unwrap

Head = Callable[[Tensor], Tensor]
"""From states [N, E] to logits [N, V]."""


class Apart(NamedTuple):
    """What a forward gives before its head.

    Attributes:
        states: of the body, [B, L, E].
        head: makes logits of them.
        hidden: states after each layer but the last, [B, L, E] each, where they were asked for.
    """

    states: Tensor
    head: Head
    hidden: tuple[Tensor, ...] = ()


def inner_model(model: Any) -> Any:
    """Return the transformers model inside DDP, DeepSpeed and PEFT.

    Raises:
        UnsupportedModelError: the whole model is compiled, or in DataParallel: it cannot be taken apart.
    """
    original = compiled_original(model)
    if original is not None:
        raise UnsupportedModelError(
            f"{type(original).__name__} is compiled as a whole, so its head cannot be run a chunk at a time: "
            "compile its layers alone, or hold all logits at once."
        )
    if isinstance(model, nn.DataParallel):
        raise UnsupportedModelError(
            f"{type(model.module).__name__} is in DataParallel, whose copies cannot be taken apart: start one process "
            "for each GPU, by torchrun or accelerate launch, or let the process see one GPU."
        )
    around = isinstance(model, nn.parallel.DistributedDataParallel) or is_deepspeed_engine(model)
    return inner_model(model.module) if around else unwrap(model)


def run_apart(model: Any, inputs: dict[str, Any], use: Callable[[Apart], Tensor], *, hidden: bool = False) -> Tensor:
    """Return what `use` makes of the body's states and the head, computed inside the model's own forward.

    So whatever stands around the forward (DDP, FSDP, autocast, PEFT) does its work.

    Args:
        model: with a language modelling head, possibly wrapped.
        inputs: arguments of its forward, without labels.
        use: called once.
        hidden: whether it is given the states after each layer, too.

    Raises:
        UnsupportedModelError: its body cannot be told from its head, or it adds a loss of its own, or it does not tell
            the states after its layers.
    """
    inner = inner_model(model)
    original = inner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=use(_split(inner, original, args, kwargs)))

    with _attribute(inner, "forward", forward):
        return model(**inputs | _asked(inner, hidden)).loss


def split(model: Any, inputs: dict[str, Any], *, hidden: bool = False) -> Apart:
    """Return the body's states and the head of a model that nothing stands around but PEFT.

    Args:
        model: with a language modelling head.
        inputs: arguments of its forward, without labels.
        hidden: whether the states after each layer are wanted, too.

    Raises:
        UnsupportedModelError: as `run_apart`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
        >>> states, head, _ = split(model, {"input_ids": torch.arange(10)[None]})
        >>> states.shape, head(states[0, :3]).shape
        (torch.Size([1, 10, 8]), torch.Size([3, 11]))
    """
    inner = inner_model(model)
    return _split(inner, inner.forward, (), inputs | _asked(inner, hidden))


def _asked(inner: Any, hidden: bool) -> dict[str, Any]:
    return without_cache(inner) | ({"output_hidden_states": True} if hidden else {})


def _split(inner: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Apart:
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
    head = _make_head(inner, original, path, output)
    if not kwargs.get("output_hidden_states"):
        return Apart(states, head)
    told = getattr(output, "hidden_states", None)
    if told is None or len(told) < 3:
        has = "does not tell the states after its layers" if told is None else "has one layer, and none before the last"
        raise UnsupportedModelError(f"{type(inner).__name__} {has}: distill with states=0.")
    return Apart(states, head, tuple(told[1:-1]))


def chosen(apart: Apart, tokens: Tensor) -> Apart:
    """Return what `apart` holds of `tokens`, bool [B, L]: states [N, E] each."""
    return Apart(apart.states[tokens], apart.head, tuple(states[tokens] for states in apart.hidden))


def without_cache(inner: Any) -> dict[str, Any]:
    """Return the arguments that keep a forward from filling a cache: one switches the masks of packed documents off."""
    return {"use_cache": False} if getattr(inner.config.get_text_config(), "use_cache", False) else {}


@contextmanager
def _captured(inner: Any) -> Iterator[list[tuple[str, Any, Tensor]]]:
    """Keep the body's output, its path and its states, and hand on one token of it: that head's run is thrown away."""
    found: list[tuple[str, Any, Tensor]] = []
    running: list[str] = []

    def keep(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            running.append(path)
            try:
                output = run(*args, **kwargs)
            finally:
                running.pop()
            if running or found:  # a decoder inside the body
                return output
            states = output[0]
            found.append((path, output, states))
            return _with_states(output, states[:, -1:].detach())

        return forward

    prefix = inner.base_model_prefix
    bodies = [path for path in (prefix, f"{prefix}.decoder") if prefix and _has(inner, path)]
    with _each_forward(inner, bodies, keep):
        yield found


def _make_head(inner: Any, original: Callable[..., Any], path: str, output: Any) -> Head:
    above, _, name = path.rpartition(".")
    parent = inner.get_submodule(above)
    body = parent.get_submodule(name)

    def head(states: Tensor) -> Tensor:
        ids = torch.zeros((1, states.shape[0]), dtype=torch.long, device=states.device)
        stands_in = _GivenStates(body, _with_states(output, states[None]))
        setattr(parent, name, stands_in)
        try:
            return original(input_ids=ids).logits[0]
        finally:
            setattr(parent, name, body)

    return head


class _GivenStates(nn.Module):
    """Stands where a body was and gives what it gave before; all else is the body's own."""

    def __init__(self, body: nn.Module, output: Any) -> None:
        super().__init__()
        self.__dict__.update(body=body, output=output)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.__dict__["output"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)


def _with_states(output: Any, states: Tensor) -> Any:
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
    inner: nn.Module, paths: list[str], change: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    if not paths:
        yield
        return
    module = inner.get_submodule(paths[0])
    with _attribute(module, "forward", change(paths[0], module.forward)), _each_forward(inner, paths[1:], change):
        yield


@contextmanager
def _attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Give one instance an attribute, and take it away or put the instance's own back."""
    held = vars(module)
    before = held.get(name)
    held[name] = value
    try:
        yield
    finally:
        if before is None:
            held.pop(name, None)
        else:
            held[name] = before
