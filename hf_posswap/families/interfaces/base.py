"""Base of the attention classes: their call signature, the eager arithmetic of their originals, whether one fits."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posswap.compat.transformers_attention import attention_function, attention_implementation
from hf_posswap.compat.transformers_calls import (
    cache_names,
    find_cache,
    forward_parameters,
    keys_of_call,
    tokens_before,
)
from hf_posswap.compat.transformers_models import masks_the_future
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.modules import by_name, modeling_module

if TYPE_CHECKING:
    from transformers import Cache


@dataclass(frozen=True)
class StockCall:
    """How the forward of a stock attention class is called, and how that becomes a call of `attention`.

    Attributes:
        stock: name of the stock class.
        names: of the arguments of its forward, in order.
        defaults: of arguments that a call leaves out.
        cache_names: which of them may hold a cache.
        takes_cache: whether `attention` takes one.
        absent: arguments that `attention` knows but does not support: they must be None.
        mismatch: why the stock class cannot be replaced; "": it can.
    """

    stock: str
    names: tuple[str, ...]
    defaults: Mapping[str, object]
    cache_names: tuple[str, ...]
    takes_cache: bool
    absent: tuple[str, ...]
    mismatch: str

    @classmethod
    def between(cls, stock: type, attention: nn.Module, alternatives: tuple[str, ...]) -> StockCall:
        """Return how the forward of `stock`, which `attention` replaces, is called.

        Args:
            stock: an attention class of transformers.
            attention: names the stock arguments that it was written for, after the hidden states. Those without a
                default are in every release; those annotated as None must be left out.
            alternatives: arguments of which the forward of `stock` must have one.
        """
        parameters = [p for p in forward_parameters(stock).values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = tuple(p.name for p in parameters)
        caches = cache_names(stock)
        known = {p.name: p for p in list(inspect.signature(attention).parameters.values())[2:]}
        known = {name: p for name, p in known.items() if p.kind is not p.VAR_KEYWORD}
        needed = {name for name, p in known.items() if p.default is p.empty and name != "cache"}
        unknown = sorted(set(names[1:]) - set(known) - set(caches))
        missing = sorted(needed - set(names)) + (["the hidden states"] if not names else [])
        if alternatives and not set(alternatives) & set(names):
            missing.append(" or ".join(alternatives))
        why = ""
        if unknown or missing:
            changes = [f"names {', '.join(unknown)}, which it did not before"] if unknown else []
            changes += [f"does not name {', '.join(missing)} any more"] if missing else []
            why = f"the forward of {stock.__name__} {' and '.join(changes)}"
        return cls(
            stock=stock.__name__,
            names=names,
            defaults={p.name: p.default for p in parameters[1:] if p.default is not p.empty},
            cache_names=caches,
            takes_cache="cache" in known,
            absent=tuple(name for name, p in known.items() if p.annotation in (None, "None")),
            mismatch=why,
        )

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of `attention` for a call of the stock forward with `args` and `kwargs`.

        Raises:
            UnsupportedSwapError: an argument was given that `attention` does not support.
        """
        given = {**self.defaults, **by_name(self.names, args, kwargs)}
        try:
            cache_argument = find_cache((), given)
        except TypeError as error:
            raise UnsupportedSwapError(f"{self.stock}: {error}") from error
        cache = None if cache_argument is None else given.pop(str(cache_argument[0]))
        for name in self.cache_names:
            if given.pop(name, None) is not None:
                raise UnsupportedSwapError(f"{self.stock} was given {name}, which is not a transformers cache.")
        if self.takes_cache:
            given["cache"] = cache
        elif cache is not None:
            raise UnsupportedSwapError(f"{self.stock} was given a cache, but is not known to use one.")
        for name in self.absent:
            if given.pop(name, None) is not None:
                raise UnsupportedSwapError(
                    f"{self.stock} was given {name}, which it is not known to take with a scheme inside its attention."
                )
        return {"hidden_states": given.pop(self.names[0]), **given}


class ThroughInterface:
    """Mixed into a native attention class, before it: attends as the config says, through the AttentionInterface.

    A subclass defines `attention` with the arguments of the stock forward that it was written for. Its forward takes
    the arguments of the stock forward in the installed release.

    Attributes:
        stock_call: how the native class is called.
        positions_from: arguments of the stock forward, one of which holds the native positions inside attention.
        config: of the model; set on modules whose own class has none.
        upcasts: whether eager scores are computed in float32.
        returns_scores: whether eager code returns the scores instead of the weights.
        native_positions: whether positions that the original applies inside attention are applied here too.
    """

    config: Any
    training: bool
    stock_call: ClassVar[StockCall]
    positions_from: ClassVar[tuple[str, ...]] = ()
    upcasts = False
    returns_scores = False
    native_positions = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        stock = cls.__bases__[-1]
        if not issubclass(stock, nn.Module):
            return  # a base of several classes
        attention = cls.attention  # type: ignore[attr-defined]
        call = cls.stock_call = StockCall.between(stock, attention, cls.positions_from)

        @functools.wraps(stock.forward)
        def forward(self: Any, *args: object, **kwargs: object) -> object:
            return self.attention(**call.bind(args, kwargs))

        cls.forward = forward  # type: ignore[attr-defined]

    @staticmethod
    def eager_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Attend as `eager_attention_forward` does: what the implementation "eager" means for this module."""
        return eager_attention_forward(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        dropout: float,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none.

        Args:
            query: [B, H, Q, D].
            key: [B, G, K, D].
            value: [B, G, K, D].
            mask: additive, or bool (True: attend), [B, 1, Q, K]; None as transformers leaves it out.
            scaling: multiplies the scores.
            dropout: probability of dropping a weight, while training.
            kwargs: for the attention function.
        """
        chosen = attention_function(attention_implementation(self.config), self.eager_attention)
        dropout = dropout if self.training else 0.0
        out, weights = chosen(self, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out.flatten(2), weights


class CausalIfDecoder(ThroughInterface):
    """Base of the self-attention of encoders that their config may make decoders, and of decoders like them."""

    is_decoder: Any

    @property
    def is_causal(self) -> bool:
        """Whether a mask that is left out means causal."""
        return bool(self.is_decoder)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Q, H, D] and the weights [B, H, Q, K] of attention, the softmax in float32 or finer.

    Args:
        module: the attention module, a `ThroughInterface`.
        query: [B, H, Q, D].
        key: [B, G, K, D]; each of its heads serves H / G heads of the query.
        value: [B, G, K, D].
        attention_mask: added to the scores, or bool (True: attend), [B, 1 or H, Q or 1, K]; None: nothing is masked.
        scaling: multiplies the scores.
        dropout: probability of dropping a weight, while training.
        position_bias: added to the scaled scores, [B or 1, H, Q or 1, K].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if module.upcasts:
        query, key = query.float(), key.float()
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling  # [B, H, Q, K]
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(scores.dtype, torch.float32)  # float32 does not hold the lowest number of float64
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), scores if module.returns_scores else weights


def narrowed(mask: Tensor | None, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `mask` with everything masked that is not in `seen`, as what is added to scores of `dtype`.

    Args:
        mask: additive, or bool (True: attend), [B, 1, Q or 1, K]; None: nothing is masked yet.
        seen: bool, [Q, K] or [B, 1, Q, K].
        dtype: of the scores.
    """
    lowest = torch.finfo(dtype).min
    if mask is None:
        mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=seen.device)
    elif mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
    return torch.where(seen, mask, lowest)


def indices(hidden: Tensor, cache: Cache | None, layer: int) -> tuple[Tensor, Tensor]:
    """Return the indices in the sequence of queries [Q] and keys [K], before `cache` takes the new keys.

    Args:
        hidden: input of the attention module, [B, Q, E].
        cache: a transformers cache, or None.
        layer: of the cache.
    """
    length = hidden.shape[1]
    query = torch.arange(length, device=hidden.device)
    if cache is None:
        return query, query
    keys, offset = keys_of_call(cache, length, layer)
    return query + tokens_before(cache, layer), torch.arange(keys, device=hidden.device) + offset


@dataclass(frozen=True)
class ChosenInterface:
    """The `interface` of `AttentionTraits` that chooses by `fitting` among classes of a file of this package.

    A value, so that a plan that was pickled equals the one that was made.

    Attributes:
        file: name of the file.
        names: of the classes.
        may_decode: whether the attention is an encoder's that some configs make a decoder's.
    """

    file: str
    names: tuple[str, ...]
    may_decode: bool = False

    def __call__(self, module: nn.Module) -> type | str:
        """Return the class for `module`, or why none fits and what works."""
        if self.may_decode and module.is_decoder and not masks_the_future(modeling_module(module)):
            return "this release of transformers lets such decoders see future tokens: nothing can be put inside."
        classes = importlib.import_module(f"{__package__}.{self.file}")  # only now: it imports transformers' model code
        return fitting(module, *(getattr(classes, name) for name in self.names))


def fitting(module: nn.Module, *classes: type) -> type | str:
    """Return the one of `classes` that replaces the forward of `module`, or why none does and what works."""
    natives = [cls.__bases__[-1] for cls in classes]
    for cls, native in zip(classes, natives, strict=True):
        if type(module) is native or type(module) is cls:
            return _mismatch(cls, native) or cls
    known = ", ".join(f"{n.__name__} is known to equal {c.__name__}" for n, c in zip(natives, classes, strict=True))
    return (
        f"its class is {type(module).__name__}, and only {known}, so a scheme cannot be put inside. "
        "What works: the same model loaded with attn_implementation='eager'."
    )


def _mismatch(cls: type, native: type) -> str:
    """Return why `cls` cannot replace `native` in the installed release; "": it can."""
    call = getattr(cls, "stock_call", None)
    if call is not None:
        why = call.mismatch
    else:
        now, then = (", ".join(forward_parameters(owner)) for owner in (native, cls))
        why = "" if now == then else f"the forward of {native.__name__} takes {now}, and {cls.__name__} knows {then}"
    return why and (
        f"in this release of transformers {why}, so a scheme cannot be put inside. "
        "What works: a release that hf_posswap was tested with (posswap --version), or a newer hf_posswap."
    )
