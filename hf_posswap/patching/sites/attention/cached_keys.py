"""What a cache holds of the keys: in which form, at which positions, and how some are evicted with their positions.

One layer of a cache keeps the positions of all tokens that the cache has seen, for all its layers, which hold the same
tokens. It is made an instance of a subclass of its own class whose operations on rows (beams, repeated prompts) act on
the positions too, so that copies, pickles and whoever reorders the cache take them along. Tokens that a crop removed
are known by the length that the cache says it has.

Each layer that grows also knows the tensor of keys that its own operations left: keys that were evicted by another
hand, or put in another order, are refused, as nothing tells where those that are left stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_tensors import keep_address, version_of
from hf_posswap.compat.transformers_calls import (
    cache_layer_class,
    is_growing_cache,
    is_growing_layer,
    quantized_keys,
    self_attention_cache,
)
from hf_posswap.errors import OptionError, PosswapError, UnsupportedSwapError
from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import device_type

if TYPE_CHECKING:
    from transformers import Cache

UNKNOWN = (
    "What works: fill the cache by this model from its first token on, or pass the whole text at once "
    "(use_cache=False)."
)
BEHIND = (
    "keys were evicted from this cache, and the new tokens stand at {first} and so on, not behind the kept keys, the "
    "last of which stands at {last}. The model counts the kept keys alone, so tell it: pass position_ids that go on "
    "from the last token before. generate makes position ids of its own: call the model in a loop."
)
CHANGED = (
    "the keys of layer {layer} of this cache were replaced by other means than the cache's own methods{shapes}. Where "
    "the keys that are left stand is not known, and this scheme needs it, so the result would be wrong. What works: "
    "hf_posswap.evict_keys, which keeps the same keys in all layers and heads; a scheme whose keys carry their "
    "positions (rope and its scalings with fixed angles, xpos, nope); the cache's own methods (crop, reorder_cache, "
    "batch_select_indices, batch_repeat_interleave, reset); the first keys alone, as a view (layer.keys = "
    "layer.keys[:, :, :n]); or, of all keys, other values in the same places, written in place (layer.keys.copy_)."
)
_CLASSES: dict[type, type] = {}
"""The classes that keep positions, by the class of transformers that each is of."""


def keys_of(cache: Cache | None, layer: int | None, mechanism: Mechanism, hidden: Tensor) -> Keys:
    """Return the form in which layer `layer` of `cache` stores the keys of `hidden`.

    Copies cost memory and the time to move it; one key for each token costs rotating the near ones, which is known only
    on a CPU without compilation. The form that a layer already has is kept: some caches get their shape, that of one
    key a token, before the first key.
    """
    if cache is None or not mechanism.stores_rotated_keys or not (mechanism.rotates or mechanism.keys_per_token > 1):
        return "raw"
    if mechanism.rotates:  # `layer` is not looked at: layers that are compiled one by one then share a graph
        return "rotated"
    single: Keys = "far" if mechanism.turns_on else "raw"
    layers = getattr(cache, "layers", ())
    cache_layer = layers[layer] if layer is not None and layer < len(layers) else None
    keys = getattr(cache_layer, "keys", None)
    if keys is not None and keys.dim() == 4:
        return single if keys.shape[-1] == mechanism.head_dim else "copies"
    grows = not hasattr(cache_layer, "max_cache_len") and not torch.compiler.is_compiling()
    return "far" if mechanism.turns_on and grows and device_type(hidden) == "cpu" else "copies"


class PositionedLayer:
    """Mixed into the class of a cache layer, before it: keeps the positions of the tokens that the cache has seen.

    Attributes:
        posswap_positions: of all tokens [B or 1, T], or of all places of a static layer [B or 1, K]; None: none yet, or
            another layer keeps them.
        posswap_keys: the keys as the layer's own operations left them; None: there were none.
        posswap_stamp: their shape and how often they were written into; None: there were none, or it was compiled.
        posswap_quantized: the quantized keys as the layer's own operations left them; None: it quantizes none.
        posswap_is_evicted: whether `evict_keys` took keys out of it.
    """

    native_class: type
    posswap_positions: Tensor | None
    posswap_keys: Any
    posswap_stamp: tuple[tuple[int, ...], int | None] | None = None
    posswap_quantized: object = None
    posswap_is_evicted = False
    posswap_keeps_positions = True
    """Tells such a class also where a checkpoint's own code made it, which has a `PositionedLayer` of its own."""

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Take new keys and values; return all."""
        intact = is_intact(self)
        result = super().update(*args, **kwargs)  # type: ignore[misc]
        self.keep_keys(intact=intact)
        return result

    def crop(self, *args: object, **kwargs: object) -> None:
        """Remove the last tokens."""
        intact = is_intact(self)
        super().crop(*args, **kwargs)  # type: ignore[misc]
        self.keep_keys(intact=intact)

    def offload(self) -> None:
        """Move the layer to the CPU."""
        intact = is_intact(self)
        super().offload()  # type: ignore[misc]
        self.keep_keys(intact=intact)

    def prefetch(self) -> None:
        """Move the layer back."""
        intact = is_intact(self)
        super().prefetch()  # type: ignore[misc]
        self.keep_keys(intact=intact)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row b by row `beam_idx[b]`."""
        intact = is_intact(self)
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.keep_keys(intact=intact)
        self.batch_positions(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        intact = is_intact(self)
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.keep_keys(intact=intact)
        self.batch_positions(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` alone."""
        intact = is_intact(self)
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.keep_keys(intact=intact)
        self.batch_positions(lambda rows: rows[indices])

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[misc]
        self.posswap_positions, self.posswap_is_evicted = None, False
        self.keep_keys(intact=True)

    def keep_keys(self, *, intact: bool) -> None:
        """Take the keys for what the layer's own operations left, if they were that before (`intact`)."""
        if intact and _grows(self):
            self.posswap_keys, self.posswap_quantized = getattr(self, "keys", None), quantized_keys(self)
            self.posswap_stamp = _stamp(self.posswap_keys)

    def batch_positions(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to the positions, unless all rows share one row of them."""
        if self.posswap_positions is not None and len(self.posswap_positions) > 1:
            self.posswap_positions = change(self.posswap_positions)

    def __reduce__(self) -> tuple[object, ...]:
        state = dict(vars(self))
        if not is_intact(self):
            state["posswap_stamp"] = (), None  # a copy counts its own writes
        elif _grows(self):  # two views are two tensors once they are pickled
            state |= {"posswap_keys": getattr(self, "keys", None), "posswap_stamp": _stamp(getattr(self, "keys", None))}
        return _restored, (self.native_class, state)


def _restored(native: type, state: Mapping[str, object]) -> PositionedLayer:
    """Return a layer of class `native` that keeps positions, from what was pickled or copied."""
    layer: Any = object.__new__(positioned_class(native))
    vars(layer).update(state)
    if layer.posswap_stamp is not None:
        layer.posswap_stamp = layer.posswap_stamp[0], version_of(layer.posswap_keys)
    return layer


def _stamp(keys: object) -> tuple[tuple[int, ...], int | None] | None:
    """Return the shape of the keys that a layer's own operations left, and how often they were written into."""
    if torch.compiler.is_compiling() or not isinstance(keys, Tensor):
        return None
    return keys.shape, version_of(keys)


def positioned_class(native: type) -> type:
    """Return the subclass of the cache layer class `native` that keeps positions."""
    subclass = _CLASSES.get(native)
    if subclass is None:
        attributes = {"native_class": native, "__module__": __name__}
        subclass = cache_layer_class(f"Positioned{native.__name__}", (PositionedLayer, native), attributes)
        _CLASSES[native] = subclass
    return subclass


def prepare() -> None:
    """Make the classes of all cache layers that there are ahead: none can be made while torch.compile traces."""
    from transformers.cache_utils import CacheLayerMixin

    waiting: list[type] = [CacheLayerMixin]
    while waiting:
        native = waiting.pop()
        below: list[type] = native.__subclasses__()
        waiting += [cls for cls in below if not hasattr(cls, "posswap_keeps_positions")]  # of no checkpoint's own code
        positioned_class(native)


def is_intact(layer: Any) -> bool:
    """Return whether the keys of a layer are those that its own operations left, or the first of them, or none.

    What is compiled takes it for granted: each call that is not asks.
    """
    if torch.compiler.is_compiling():
        return True
    if quantized_keys(layer) is not layer.posswap_quantized:
        return False
    keys, left, stamp = getattr(layer, "keys", None), layer.posswap_keys, layer.posswap_stamp
    if stamp is not None and stamp[0] != left.shape:  # layer.keys.data = ...
        return False
    if keys is left or keys is None or left is None or not keys.numel():
        return True
    if keys.dim() != left.dim() or keys.stride() != left.stride() or keys.data_ptr() != left.data_ptr():
        return False
    if keys.shape[-2] < left.shape[-2] and stamp is not None and stamp[1] != version_of(left):
        return False  # kept keys were moved to the front, in place
    return keys.shape[-2] <= left.shape[-2] and (*keys.shape[:-2], keys.shape[-1]) == (*left.shape[:-2], left.shape[-1])


def is_as_left(layer: object) -> bool:
    """Return whether the keys of a growing layer are the very tensor that its own operations left, where it keeps that.

    Less is asked than by `is_intact`, and answered sooner: one that is not may still be intact.
    """
    if not isinstance(layer, PositionedLayer):
        return True
    stamp = layer.posswap_stamp
    return layer.keys is layer.posswap_keys and stamp is not None and stamp[0] == layer.keys.shape  # type: ignore[attr-defined]


def growing_layers(cache: Cache, layer_idx: int) -> tuple[Sequence[object], tuple[type, torch.Size]] | None:
    """Return the layers of a cache that grow, and class and shape of the keys [B, G, K, D] of one that holds some.

    None: of such a cache another layer may count its tokens otherwise, or this one holds none.
    """
    if not is_growing_cache(cache) or layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[layer_idx]
    keys = getattr(layer, "keys", None)
    if keys is None or not is_growing_layer(getattr(layer, "native_class", type(layer))):
        return None
    return cache.layers, (type(layer), keys.shape)


def watch(cache: Cache, layer_idx: int) -> None:
    """Look whether another hand replaced the keys of a layer, which from now on knows what it left.

    Args:
        cache: for self-attention, as the caller passed it.
        layer_idx: of the layer that is about to be written.

    Raises:
        PosswapError: it did.
    """
    if not isinstance(getattr(cache, "layers", None), list):
        return  # `record` refuses it
    layer = _layer(cache, layer_idx)
    if not _grows(layer):
        return
    if not isinstance(layer, PositionedLayer):
        _positioned(cache, layer_idx)
    elif not is_intact(layer):
        before, after = (list(keys.shape) for keys in (layer.posswap_keys, layer.keys))  # type: ignore[attr-defined]
        shapes = f" (they were {before}, and are {after})" if before != after else ""
        raise PosswapError(CHANGED.format(layer=layer_idx, shapes=shapes))


def record(cache: Cache, layer_idx: int, query: Tensor, key_length: int) -> Tensor:
    """Keep the positions of new tokens with a cache that is about to take them; return those of all its keys.

    To do so once more in the same forward changes nothing.

    Args:
        cache: for self-attention, as the caller passed it.
        layer_idx: of the layer that asks.
        query: positions of the new tokens, [B or 1, Q].
        key_length: K, keys that the layer gives after this call.

    Returns:
        Positions of the keys, [B or 1, K], on the device of `query`; in places that hold no key, any.

    Raises:
        PosswapError: where the tokens stand that the cache already holds cannot be known.
    """
    if not isinstance(getattr(cache, "layers", None), list):
        raise PosswapError(
            f"a cache of class {type(cache).__name__} has no layers that could keep where its keys stand. Use a "
            "DynamicCache or a StaticCache, or use_cache=False."
        )
    keeper = _keeper(cache, layer_idx)
    if _is_static(keeper):
        return _write(keeper, cache, layer_idx, query, key_length).to(query.device)
    past = cache.get_seq_length(layer_idx)
    if keeper is not cache.layers[layer_idx]:
        _check_as_many(keeper, layer_idx, past, query)
    known = _known(keeper, past, query)
    keeper.posswap_positions = query if known is None else torch.cat(_same_rows(known, query.to(known.device)), dim=1)
    stored = keeper.posswap_positions
    keys = (stored if stored.shape[1] == key_length else stored[:, -key_length:]).to(query.device)
    short = key_length - keys.shape[1]
    return torch.nn.functional.pad(keys, (0, short)) if short else keys


def _check_as_many(keeper: PositionedLayer, layer_idx: int, past: int | Tensor, query: Tensor) -> None:
    """Refuse a layer that holds fewer tokens than the one that was asked before it: another hand has exchanged it.

    Args:
        keeper: the layer that keeps the positions, the new ones included.
        layer_idx: of the layer that asks.
        past: tokens that it holds.
        query: positions of the new tokens, [B or 1, Q].

    Raises:
        PosswapError: it does.
    """
    stored = keeper.posswap_positions
    if stored is None or torch.compiler.is_compiling() or not isinstance(past, int):
        return
    if past and past + query.shape[1] < stored.shape[1]:
        shapes = f" (it holds {past} tokens, and another layer {stored.shape[1] - query.shape[1]})"
        raise PosswapError(CHANGED.format(layer=layer_idx, shapes=shapes))


def _keeper(cache: Cache, layer_idx: int) -> Any:
    """Return the layer of `cache` that keeps positions for layers like `layer_idx`: that one, where none does yet."""
    layer = _layer(cache, layer_idx)
    for other in cache.layers:
        if isinstance(other, PositionedLayer) and other.posswap_positions is not None:
            if _is_static(other) == _is_static(layer):
                return other
    return layer if isinstance(layer, PositionedLayer) else _positioned(cache, layer_idx)


def _layer(cache: Cache, layer_idx: int) -> object:
    """Return a layer of `cache`, which may not have come to it yet."""
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())  # as its own update does
    return cache.layers[layer_idx]


def _positioned(cache: Cache, layer_idx: int) -> PositionedLayer:
    """Replace a layer that does not keep positions by one that does; return it."""
    layer = cache.layers[layer_idx]
    keeper: Any = object.__new__(positioned_class(type(layer)))
    vars(keeper).update(vars(layer))
    keeper.posswap_positions = None
    keeper.posswap_keys, keeper.posswap_quantized = getattr(layer, "keys", None), quantized_keys(layer)
    keeper.posswap_stamp = _stamp(keeper.posswap_keys)
    cache.layers[layer_idx] = keeper
    return keeper


def _grows(layer: object) -> bool:
    """Return whether a cache layer makes its keys anew when it takes some; others write into a place of theirs."""
    return not hasattr(layer, "max_cache_len")


def _is_static(layer: object) -> bool:
    """Return whether a cache layer has a fixed place for each token, and counts them by a tensor."""
    return hasattr(layer, "max_cache_len") and not getattr(layer, "is_sliding", False)


def _known(keeper: PositionedLayer, past: int, query: Tensor) -> Tensor | None:
    """Return the positions of the `past` tokens that a cache holds, [B or 1, past]; None: it holds none."""
    if past == 0:
        return None
    stored, is_evicted = keeper.posswap_positions, getattr(keeper, "posswap_is_evicted", False)
    if stored is None:
        return _foreign(past, query, is_evicted=is_evicted)
    if stored.shape[1] < past:
        raise PosswapError(
            f"the cache holds {past} tokens, and where they stand is known of {stored.shape[1]} alone: the others were "
            f"not put there by this model as it is now. {UNKNOWN}"
        )
    stored = stored if stored.shape[1] == past else stored[:, :past]
    if is_evicted:
        _check_behind(stored, query)
    return stored


def _check_behind(stored: Tensor, query: Tensor) -> None:
    """Refuse new tokens that do not stand behind the kept keys: no position ids were given, and the model counted."""
    if torch.compiler.is_compiling():  # without fullgraph this part then runs as it is, and is checked
        raise PosswapError(
            "keys were evicted from this cache, and torch.compile cannot check that new tokens stand behind the kept "
            "ones in a full graph. Use fullgraph=False, or run the steps after hf_posswap.evict_keys as they are."
        )
    first, last = query.amin(dim=1), stored.to(query.device).amax(dim=1)
    if not bool((first > last).all()):
        raise PosswapError(BEHIND.format(first=int(first.min()), last=int(last.max())))


def _foreign(past: int, query: Tensor, *, is_evicted: bool = False) -> Tensor:
    """Return positions of keys that another hand put into a cache: from 0 on, if the new tokens go on from there."""
    index = torch.arange(past + query.shape[1], device=query.device)[None]
    if torch.compiler.is_compiling() or is_evicted or not bool((query == index[:, past:]).all()):
        raise PosswapError(
            f"the cache holds {past} tokens that this model did not put there, and the new ones do not stand right "
            f"behind them, at {past} and so on: where the first ones stand cannot be known. {UNKNOWN}"
        )
    return index[:, :past]


def _write(keeper: PositionedLayer, cache: Cache, layer_idx: int, query: Tensor, key_length: int) -> Tensor:
    """Write the positions of new tokens to their places in a static layer; return those of all places."""
    past, stored = cache.get_seq_length(layer_idx), keeper.posswap_positions
    if stored is None or (isinstance(past, int) and past == 0):
        stored = torch.arange(key_length, device=query.device)[None].repeat(len(query), 1)
        if not torch.compiler.is_compiling():
            if bool(past > 0):
                _foreign(int(past), query)
            keep_address(stored)
    elif len(stored) < len(query):
        stored = stored.repeat(len(query), 1)
    columns = torch.arange(query.shape[1], device=stored.device) + past  # [Q]
    keeper.posswap_positions = stored.index_copy_(1, columns, query.to(stored).expand(len(stored), -1))
    return keeper.posswap_positions


def _same_rows(known: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions of two parts of a text, [B or 1, T] and [B or 1, Q], with as many rows each."""
    rows = max(len(known), len(query))
    if len(known) == len(query):
        return known, query
    if {len(known), len(query)} - {1, rows}:
        raise PosswapError(
            f"the cache holds {len(known)} rows, and {len(query)} come: its rows were changed by other means than its "
            f"own methods (reorder_cache, batch_repeat_interleave, batch_select_indices). {UNKNOWN}"
        )
    return known.expand(rows, -1), query.expand(rows, -1)


def evict_keys(cache: Cache, keep: Tensor) -> None:
    """Keep some keys and values of a cache, the same in all layers and heads, and remove the others.

    Plain eviction (`layer.keys = layer.keys[:, :, keep]`) leaves wrong positions for schemes that need those of keys,
    such as alibi, t5 and self_extend, which then refuse the cache. This function removes the positions too. For schemes
    whose keys carry their positions, such as rope, and for stock models it equals plain eviction.

    From then on the model counts only the remaining keys, so pass the `position_ids` of new tokens, and an
    `attention_mask` with one column for each kept key and new token. Code of a stock class that uses the index of a
    key, such as the mask of a sliding window, treats the kept keys as neighbours, as it does after plain eviction.

    Args:
        cache: a `DynamicCache`, or the self-attention cache of an `EncoderDecoderCache`; it is changed in
            place.
        keep: which keys stay: their indices in the cache, ascending, [K], or [B, K] with other ones for each row; or
            bool [T], True for each of T keys that stays.

    Raises:
        OptionError: `cache` is none that holds tokens, or `keep` does not fit it.
        UnsupportedSwapError: the cache does not hold its tokens as growing layers of full attention.
        PosswapError: its keys were replaced before.

    Example:
        >>> import torch
        >>> from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import evict_keys, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model.eval(), "alibi")
        >>> cache = DynamicCache()
        >>> out = model(torch.arange(8)[None], cache)
        >>> evict_keys(cache, torch.tensor([0, 1, 5, 6, 7]))  # attention sinks, and the last tokens
        >>> out = model(torch.tensor([[8]]), cache, position_ids=torch.tensor([[8]]))
        >>> cache.get_seq_length(), tuple(out.logits.shape)
        (6, (1, 1, 11))
    """
    layers = _layers(cache)
    rows, length = layers[0].keys.shape[0], layers[0].keys.shape[-2]
    index = _index(keep, rows, length)
    kept = [(_selected(layer.keys, index), _selected(layer.values, index)) for layer in layers]
    positions = [_selected_positions(getattr(layer, "posswap_positions", None), index) for layer in layers]
    self_cache = self_attention_cache(cache)
    for number, ((keys, values), at) in enumerate(zip(kept, positions, strict=True)):
        layer = self_cache.layers[number]
        if not hasattr(layer, "posswap_keeps_positions"):
            layer = _positioned(self_cache, number)
        layer.keys, layer.values = keys, values
        layer.posswap_positions, layer.posswap_is_evicted = at, True
        layer.keep_keys(intact=True)


def _layers(cache: Cache) -> list[Any]:
    """Return the layers of a cache, whose keys can be chosen from.

    Raises:
        OptionError, UnsupportedSwapError, PosswapError: as `evict_keys`.
    """
    layers = getattr(self_attention_cache(cache), "layers", None)
    if not isinstance(layers, list) or not layers or getattr(layers[0], "keys", None) is None:
        raise OptionError(
            f"evict_keys was given a {type(cache).__name__} that holds no tokens in layers. What works: a DynamicCache "
            "that a forward has filled."
        )
    for number, layer in enumerate(layers):
        native = getattr(layer, "native_class", type(layer))
        if not is_growing_layer(native):
            raise UnsupportedSwapError(
                f"evict_keys: layer {number} of this cache is a {native.__name__}, whose keys have places of their own "
                "(a static cache), follow a window, or are not kept as they are. What works: a DynamicCache without "
                "sliding layers (DynamicCache(), passed to the first forward) and a model of full attention."
            )
        if getattr(layer, "keys", None) is None or layer.keys.shape[-2] != layers[0].keys.shape[-2]:
            raise PosswapError(
                f"evict_keys: layer {number} of this cache does not hold as many keys as layer 0. Evict after a whole "
                "forward, from all layers at once."
            )
        if hasattr(layer, "posswap_keys") and not is_intact(layer):
            raise PosswapError(CHANGED.format(layer=number, shapes=""))
        known = getattr(layer, "posswap_positions", None)
        if known is not None and known.shape[1] < layer.keys.shape[-2]:
            raise PosswapError(
                f"evict_keys: the cache holds {layer.keys.shape[-2]} tokens, and where they stand is known of "
                f"{known.shape[1]} alone. {UNKNOWN}"
            )
    return layers


def _index(keep: object, rows: int, length: int) -> Tensor:
    """Return the indices of the keys that stay, [1, K] or [B, K].

    Args:
        keep: as `evict_keys` takes it.
        rows: B.
        length: T, keys in the cache.

    Raises:
        OptionError: it does not fit.
    """
    expected = f"indices [K] or [{rows}, K], ascending, of the {length} keys in the cache, or bool [{length}]"
    if not isinstance(keep, Tensor) or keep.is_floating_point() or keep.is_complex():
        raise OptionError(f"evict_keys: keep is {type(keep).__name__}; give a tensor: {expected}.")
    if keep.dtype == torch.bool:
        if keep.shape != (length,):
            raise OptionError(f"evict_keys: keep is bool {list(keep.shape)}; give {expected}.")
        keep = keep.nonzero()[:, 0]
    index = keep[None] if keep.dim() == 1 else keep
    if index.dim() != 2 or len(index) not in (1, rows) or not index.shape[1]:
        raise OptionError(f"evict_keys: keep has shape {list(keep.shape)}; give {expected}, at least one of them.")
    ascending = bool((index[:, 1:] > index[:, :-1]).all())
    if not ascending or int(index.min()) < 0 or int(index.max()) >= length:
        raise OptionError(f"evict_keys: keep is {keep.tolist()}; give {expected}, each once.")
    return index.long()


def _selected(states: Tensor, index: Tensor) -> Tensor:
    """Return the keys or values at `index` [1 or B, K] of `states` [B, G, T, D]."""
    index = index.to(states.device)
    if len(index) == 1:
        return states.index_select(2, index[0])
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def _selected_positions(positions: Tensor | None, index: Tensor) -> Tensor | None:
    """Return those of `positions` [1 or B, T] at `index` [1 or B, K]; None: this layer keeps none."""
    if positions is None:
        return None
    index, rows = index.to(positions.device), max(len(positions), len(index))
    return positions.expand(rows, -1).gather(1, index.expand(rows, -1))
