"""Every trick by which stock transformers, and other programs, refuse a checkpoint that only hf_posswap can run.

A plugin checkpoint read by anything else would load as the unswapped model and be silently wrong. No single measure
stops every way of loading, so each has its own:

==============================================================  ======================================================
road                                                            stopped by
==============================================================  ======================================================
`AutoConfig`, `AutoModel*`, `pipeline`                          `POSSWAP_MODEL_TYPE`
a class by its name, `getattr(transformers, architectures[0])`  `architecture_of`
other programs that go by `architectures` (vLLM, llama.cpp)     `architecture_of`
`LlamaForCausalLM.from_pretrained(folder)`                      `REFUSED_ATTENTION`, also where mismatches are ignored
`LlamaForCausalLM(LlamaConfig.from_pretrained(folder))`         `REFUSED_ATTENTION`
the same with another attention implementation                  `POSSWAP_ROPE_TYPE`, the marked weights
`from_pretrained(folder, config=a_native_config)`               the marked weights, `SENTINEL_SHAPE`
`stock.load_state_dict(load_file(weights))`                     the marked weights, `SENTINEL_SHAPE`
`stock.load_state_dict(swapped.state_dict())`                   `RefusedElsewhere`
the same by way of `torch.save` and `torch.load`                `RefusedElsewhere`
the same with a part: an encoder, a tower, a language model     `RefusedElsewhere`, by the class of parts
`LlamaForCausalLM(swapped.config)`                              the config's class, `plugin_config_class`
`LlamaForCausalLM(LlamaConfig(**swapped.config.to_dict()))`     `REFUSED_IN_MEMORY`
`LlamaForCausalLM(LlamaConfig(**vars(swapped.config)))`         `REFUSED_IN_MEMORY`
==============================================================  ======================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import name_without_adapter
from hf_posswap.compat.torch_modules import state_metadata
from hf_posswap.compat.transformers_attention import IMPLEMENTATION
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.utils.refused_weights import RefusedElsewhere

POSSWAP_MODEL_TYPE = "posswap"
"""The model_type in config.json: the Auto classes know it where hf_posswap is imported, and nowhere else."""
ARCHITECTURE_PREFIX = "Posswap"
"""Begins the names in `architectures`, on disk and in memory: see `architecture_of`."""
REFUSED_ATTENTION = "posswap (pip install hf-posswap, then hf_posswap.load)"
"""The attn_implementation in config.json: the constructor of every stock model refuses it and shows this text."""
REFUSED_IN_MEMORY = {"attn_implementation": REFUSED_ATTENTION, IMPLEMENTATION: REFUSED_ATTENTION}
"""What `config.to_dict()` of a swapped model has besides; `vars(config)` has the public one. A stock config made from
either asks for that attention, whether the values go to its constructor or, as `update` does, are set one by one."""
POSSWAP_ROPE_TYPE = "posswap (pip install hf-posswap)"
"""The rope_type of a rotary model whose rotation is not the native one: it is in no table of rope functions."""
SENTINEL_SHAPE = (1,)
"""Shape of what is saved for a table that is gone: the native class fails to load it, instead of inventing a table."""
REFUSED_DTYPE = "posswap (pip install hf-posswap)"
"""The dtype in config.json of older checkpoints whose weights gave nothing away: torch has no such dtype. Read only:
stock code that asks torch for it, as a Trainer does that resumes, broke on it too."""
KEPT_DTYPE = "posswap_dtype"
"""Where config.json has the dtype then."""
TESTED_MARK = "tested_transformers"
"""Where config.json has the newest transformers that the code which wrote the checkpoint was tested with."""

_ADAPTERS = ("modules_to_save", "lora_", "ln_tuning_layers")


def architecture_of(name: str) -> str:
    """Return what `architectures` calls the swapped class of the stock class `name`.

    No program knows the name, so none that goes by `architectures` takes the model for the stock one. Where hf_posswap
    is, `transformers` has a class of that name.

    Example:
        >>> architecture_of("GPT2LMHeadModel"), architecture_of("PosswapGPT2LMHeadModel")
        ('PosswapGPT2LMHeadModel', 'PosswapGPT2LMHeadModel')
    """
    return name if name.startswith(ARCHITECTURE_PREFIX) else ARCHITECTURE_PREFIX + name


def stock_name(architecture: str) -> str:
    """Return the name of the stock class behind a name in `architectures`.

    Example:
        >>> stock_name("PosswapGPT2LMHeadModel"), stock_name("GPT2LMHeadModel")
        ('GPT2LMHeadModel', 'GPT2LMHeadModel')
    """
    return architecture.removeprefix(ARCHITECTURE_PREFIX)


def plugin_values(values: dict[str, Any]) -> dict[str, object]:
    """Return the values of a native config.json as those of a plugin checkpoint."""
    kept = {key: value for key, value in values.items() if key not in ("auto_map", TESTED_MARK, *REFUSED_IN_MEMORY)}
    refused = {"model_type": POSSWAP_MODEL_TYPE, "attn_implementation": REFUSED_ATTENTION}
    return kept | refused | {"architectures": [architecture_of(name) for name in values.get("architectures") or []]}


def read(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of a plugin checkpoint's config.json without what is there to be refused, but its model_type.

    Those of older checkpoints too, which have REFUSED_DTYPE instead of REFUSED_ATTENTION and of marked weights.
    """
    kept = {key: value for key, value in values.items() if key not in ("auto_map", KEPT_DTYPE, TESTED_MARK)}
    if kept.get("attn_implementation") == REFUSED_ATTENTION:
        del kept["attn_implementation"]
    if kept.get("dtype") == REFUSED_DTYPE:
        kept["dtype"] = values.get(KEPT_DTYPE)
    return kept


def weight_to_mark(model: nn.Module, attention: str) -> str:
    """Return the name of the weight that stands for one stack of `model` as marked; it is the same for every head.

    It is saved with a dimension of one before its own, [1, *shape]. Every class of the family needs it, and no stock
    class takes that shape. A norm's is taken, the nearest around the first attention module: no adapter, no quantizer
    and no tying is after those; where there is none, the smallest weight.

    Args:
        model: after the swap.
        attention: path of the stack's first attention module.

    Raises:
        UnsupportedSwapError: the model has no weights.
    """
    path = attention
    while path:
        path = path.rpartition(".")[0]
        norms = [name for name, _, module in _weights(model, path) if "norm" in type(module).__name__.lower()]
        if norms:
            return min(norms, key=lambda name: (not name.endswith("weight"), "encoder_attn" in name, name))
    weights = _weights(model, "")
    others = [(tensor.numel(), name) for name, tensor, module in weights if not isinstance(module, nn.Embedding)]
    if not others:
        raise UnsupportedSwapError(
            f"{type(model).__name__} has no weight that could be marked as swapped in its checkpoints, so stock "
            "classes would load them without the swap."
        )
    return min(others)[1]


def mark(state: dict[str, Tensor], names: dict[str, int], prefix: str = "") -> None:
    """Give the weights of a state dict that are to be marked the shape [1, *shape], in place.

    Args:
        state: of a swapped model.
        names: of the weights, and how many dimensions they have in the model.
        prefix: of the keys.
    """
    for name, dimensions in names.items():
        weight = state.get(prefix + name)
        if isinstance(weight, Tensor) and weight.dim() == dimensions:
            state[prefix + name] = weight.unsqueeze(0)


def unmark(state: dict[str, Tensor], names: dict[str, int], prefix: str = "") -> None:
    """Give marked weights of a state dict their own shape back, in place; those that are not marked stay."""
    for name, dimensions in names.items():
        weight = state.get(prefix + name)
        if isinstance(weight, Tensor) and weight.dim() == dimensions + 1 and weight.shape[0] == 1:
            state[prefix + name] = weight.squeeze(0)


def refuse_elsewhere(state: object, prefix: str, name: str) -> None:
    """Make classes other than the swapped one of the stock class `name` refuse a state dict in memory."""
    metadata = state_metadata(state)
    if prefix[:-1] in metadata:
        metadata[prefix[:-1]] = RefusedElsewhere(dict(metadata[prefix[:-1]]), name)


def _weights(model: nn.Module, path: str) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Yield the model's own weights below `path`, by the names that they have without PEFT, and their modules."""
    for at, module in model.get_submodule(path).named_modules(prefix=path):
        for leaf, tensor in module.named_parameters(recurse=False):
            name = f"{at}.{leaf}".lstrip(".")
            if "posswap" in name.split(".") or any(word in name for word in _ADAPTERS):
                continue
            yield name_without_adapter(name), tensor, module
