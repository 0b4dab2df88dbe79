"""A model as a graph of its own takes it: whole numbers in, tensors out, positions counted behind padding.

Nothing is cached: one run reads whole texts. What in a stock model waits for the numbers that it is given is replaced
in the model by what computes the same. Stock transformers keeps the angles of "dynamic" in the rotary module and
recomputes them when the input values ask for it, as "longrope" did until 5.23: a traced graph would keep the angles of
the traced length.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_posswap.compat.transformers_attention import rope_function
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.rope_config import FOLLOW_LENGTH, buffer_name, parameters_of
from hf_posswap.patching.sites.rotary.modules import AroundNative, rebuilt
from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
"""What a graph gives of what a model gives, where the model has it."""
_NAMES = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_SAMPLE = (2, 7)  # rows, tokens: neither is 0 or 1, which torch.export takes for constants
_TARGET = 5  # tokens of a decoder next to an encoder


@dataclass(frozen=True)
class Signature:
    """What goes into the graph of a model, and what comes out.

    Attributes:
        inputs: names, all of them int64 [B, L], or [B, T] where they begin with "decoder_".
        outputs: names, of `OUTPUTS`.
        counts: whether positions are counted behind padding on the left and given to the model.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = field(default=())
    counts: bool = False

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The names of the axes of each input, which have any size."""
        of_decoder = {name: "decoder_" if name.startswith("decoder_") else "" for name in self.inputs}
        return {name: {0: "batch", 1: f"{of_decoder[name]}sequence_length"} for name in self.inputs}

    def sample(self) -> dict[str, Tensor]:
        """Return inputs to trace with."""
        rows, tokens = _SAMPLE
        sizes = {name: _TARGET if name.startswith("decoder_") else tokens for name in self.inputs}
        fill = {True: torch.ones, False: torch.zeros}
        return {name: fill[name.endswith("_mask")](rows, size, dtype=torch.int64) for name, size in sizes.items()}


class Traced(nn.Module):
    """What `model` computes, by the names of `signature`.

    Args:
        model: in eval mode; its rotary modules are changed.
        signature: of it.
    """

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model, self.signature = model, signature
        follow_length(model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the tensors that `signature` names, from those that it names: torch.export wants names spelled out.

        Args:
            input_ids: [B, L].
            attention_mask: [B, L], 0 at padding.
            token_type_ids: [B, L].
            decoder_input_ids: [B, T].
            decoder_attention_mask: [B, T].
        """
        tensors = (input_ids, attention_mask, token_type_ids, decoder_input_ids, decoder_attention_mask)
        outputs = run(self.model, self.signature, {n: t for n, t in zip(_NAMES, tensors, strict=True) if t is not None})
        return tuple(outputs[name] for name in self.signature.outputs)


def run(model: nn.Module, signature: Signature, inputs: dict[str, Tensor]) -> Any:
    """Return what `model` gives for `inputs`, whose positions are counted where `signature` says so."""
    cached = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    counted = {"position_ids": behind_padding(inputs["attention_mask"])} if signature.counts else {}
    return model(**inputs, **counted, **cached, return_dict=True)


def behind_padding(mask: Tensor) -> Tensor:
    """Return position ids [B, L]: the first token that `mask` [B, L] shows stands at 0, those before it too.

    Example:
        >>> behind_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist()
        [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    padding = (mask.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)  # [B, 1]
    return (torch.arange(mask.shape[-1], device=mask.device)[None] - padding).clamp(min=0)


def signature_of(model: PreTrainedModel) -> Signature:
    """Return what a graph of `model` takes and gives.

    Raises:
        UnsupportedModelError: no family describes the model.
        UnsupportedSwapError: it reads something else than text, gives something else than scores or states, or stops.
    """
    main, named = locate(model).main, type(model).__name__
    takes = inspect.signature(type(model).forward).parameters
    if main.inputs != "text" or "input_ids" not in takes or "attention_mask" not in takes:
        raise UnsupportedSwapError(f"a graph is written of models that read text, by token ids; {named} does not.")
    names = ["input_ids", "attention_mask"]
    if model.config.is_encoder_decoder:
        names += ["decoder_input_ids", "decoder_attention_mask"]
    elif "token_type_ids" in takes and (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        names.append("token_type_ids")
    alone = main.geometry.causal and not model.config.is_encoder_decoder
    signature = Signature(tuple(names), counts=alone and "position_ids" in takes)
    try:
        with torch.no_grad():
            given = run(model, signature, signature.sample())
    except Exception as error:  # any model's code: of some, each head has its own demands
        raise UnsupportedSwapError(
            f"a graph takes a batch of {', '.join(names)}, and {named} does not run with that: "
            f"{said_by(error).rstrip('.')}. Set the missing value in config.json, or export its base model (AutoModel)."
        ) from error
    outputs = tuple(name for name in OUTPUTS if isinstance(given.get(name), Tensor))
    if not outputs or "logits" in given and given["logits"].dim() not in (2, 3):
        raise UnsupportedSwapError(f"a graph gives {', '.join(OUTPUTS)}, and {named} gives {', '.join(given)}.")
    return Signature(signature.inputs, outputs[:1] if outputs[0] == "logits" else outputs, signature.counts)


class RotaryByLength(AroundNative):
    """A stock rotary module that recomputes its frequencies in each call, from the largest position.

    Args:
        native: the rotary module; it is not changed. Where it has frequencies for each layer type, only those that
            follow the length are recomputed.
    """

    rope_types: dict[str, str]
    originals: dict[str, int]

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.rope_types, self.originals = following(native), {}
        fresh: Any = rebuilt(native, native.config)  # without hooks, which would restore its angles
        still = {
            name: "default" if name in self.rope_types else rope_type for name, rope_type in _rope_types(fresh).items()
        }
        fresh.rope_type = still if isinstance(fresh.rope_type, dict) else "default"
        self.native = fresh
        for rope_set, rope_type in self.rope_types.items():
            if rope_type != "longrope":
                continue
            original = parameters_of(fresh.config, rope_set)["original_max_position_embeddings"]
            self.originals[rope_set] = original  # up to there the short list of frequencies holds
            for name, length in (("short", 1), ("long", original + 1)):
                values = _frequencies(fresh.config, "longrope", rope_set, length)
                self.register_buffer(f"{rope_set}_{name}", values, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> Any:
        """Return the native module's output with these frequencies.

        Args:
            x: a tensor of the output's dtype.
            position_ids: [B or 1, Q].
            args: for the native module.
            kwargs: for the native module.
        """
        length = position_ids.max() + 1
        buffers = {buffer_name(rope_set): self.frequencies(length, rope_set) for rope_set in self.rope_types}
        return functional_call(self.native, buffers, (x, position_ids, *args), kwargs)

    def frequencies(self, length: Tensor, rope_set: str = "") -> Tensor:
        """Return theta [R/2] for a text of `length` tokens, a tensor without dimensions."""
        if self.rope_types[rope_set] == "longrope":
            short, long = (getattr(self, f"{rope_set}_{name}") for name in ("short", "long"))
            return torch.where(length > self.originals[rope_set], long, short)
        return _frequencies(self.native.config, self.rope_types[rope_set], rope_set, length)


def following(module: nn.Module) -> dict[str, str]:
    """Return the rope types of a rotary module that follow the length, by frequency set; {} for any other module."""
    return {name: rope_type for name, rope_type in _rope_types(module).items() if rope_type in FOLLOW_LENGTH}


def _rope_types(module: nn.Module) -> dict[str, str]:
    """Return the rope types of a rotary module by frequency set; "" is the name of an only one."""
    rope_type = vars(module).get("rope_type")  # not inherited: a wrapper passes on the attributes of what it wraps
    return dict(rope_type) if isinstance(rope_type, dict) else {} if rope_type is None else {"": rope_type}


def _frequencies(config: PreTrainedConfig, rope_type: str, rope_set: str, length: int | Tensor) -> Tensor:
    """Return transformers' frequencies [R/2] of a set for texts of `length` tokens."""
    device = getattr(length, "device", "cpu")
    return rope_function(rope_type)(config, device, seq_len=length, layer_type=rope_set or None)[0]


def follow_length(model: nn.Module) -> None:
    """Replace each rotary module of `model` whose angles follow the length with a `RotaryByLength`."""
    for path, module in list(model.named_modules()):
        if not following(module) or isinstance(module, RotaryByLength):
            continue
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, RotaryByLength(module))
