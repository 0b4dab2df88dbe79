"""Parts of a model by what they are: what the swap added, norms, embeddings, projections, layers."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from hf_posswap.compat.peft_wrappers import name_without_adapter
from hf_posswap.compat.torch_wrappers import compiled_original, name_without_wrappers
from hf_posswap.errors import ConfigError
from hf_posswap.families.locating import locate
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.sites.embedding.table_edits import ReplaceTable

_NEW_ROWS = " (new rows)"
_KEEP_ROWS = ("tile", "hierarchical", "random")  # rules that leave the old rows as they were
# What transformers calls the projections of queries and keys, and those that make both at once.
_QUERY_KEY = {
    "q_proj", "k_proj", "query", "key", "q", "k", "q_lin", "k_lin", "q_norm", "k_norm", "query_layernorm",
    "key_layernorm", "query_proj", "key_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv", "in_proj",
}  # fmt: skip


def position_names(base: Any) -> list[str]:
    """Return the names of the parameters that the swap of `base` added, or whose rows it wrote; [] where none."""
    patch = getattr(base, "_posswap", None)
    if patch is None:
        return []
    tables = [edit for edit in patch.plan.edits if isinstance(edit, ReplaceTable)]
    written = {f"{table.path}.weight" for table in tables if table.scheme.trainable}
    added = {name.removesuffix(_NEW_ROWS) for name in patch.plan.added if not name.endswith(".old")}  # which fades
    return [name for name, _ in base.named_parameters() if base_name(name) in added | written]


def grown_tables(base: Any) -> dict[str, int]:
    """Return the names of the tables to which the swap of `base` added rows, and how many rows were there before.

    Raises:
        ConfigError: there is none, or its rule changed the rows that were there.
    """
    patch = getattr(base, "_posswap", None)
    found: dict[str, int] = {}
    for table in patch.plan.edits if patch is not None else ():
        if not isinstance(table, ReplaceTable) or not table.scheme.trainable:
            continue
        rule, old = getattr(table.scheme, "extend", None), table.geometry.original_length
        if rule not in _KEEP_ROWS:
            raise ConfigError(
                f"trainable.what is new_rows, and {table.scheme} changed the rows that were there too: swap with "
                f"extend one of {', '.join(_KEEP_ROWS)}, or train 'positions', which is the whole table."
            )
        if table.rows > old:
            found[f"{table.path}.weight"] = old + table.offset
    if not found:
        held = "carries no swap" if patch is None else f"was swapped to {patch.plan.scheme}"
        raise ConfigError(
            f"trainable.what is new_rows, and {type(base).__name__} {held}: no table has new rows. Swap to 'learned' "
            "with a larger max_length, or train something else."
        )
    return found


def norm_paths(base: nn.Module) -> list[str]:
    """Return the paths of the norms: modules without children whose own parameters are vectors alone."""
    found = []
    for path, module in base.named_modules():
        own = list(module.parameters(recurse=False))
        vectors = own and all(p.ndim == 1 for p in own) and getattr(module, "weight", None) is not None
        if vectors and not list(module.children()):
            found.append(path)
    return found


def embedding_path(base: Any) -> str:
    """Return the path of the token embeddings."""
    table = base.get_input_embeddings()
    return next(path for path, module in base.named_modules() if module is table)


def is_tied(base: Any) -> bool:
    """Return whether the token embeddings and the head share their weight."""
    head = base.get_output_embeddings()
    return head is not None and head.weight is base.get_input_embeddings().weight


def query_key_names(base: Any) -> list[str]:
    """Return the names of the parameters of the query and key projections, of fused ones the whole.

    Raises:
        ConfigError: an attention module has no projection of a known name.
    """
    found: list[str] = []
    for path in attention_paths(base):
        attention = base.get_submodule(path)
        inside = [name for name, _ in attention.named_parameters() if _QUERY_KEY & set(name.split("."))]
        if not inside:
            held = ", ".join(sorted({name.rpartition(".")[0] for name, _ in attention.named_parameters()}))
            raise ConfigError(
                f"trainable.what is norms_qk, and which of {held} in {path} make queries and keys is not known: train "
                "'full', or adapters (peft) instead."
            )
        found += [f"{path}.{name}" for name in inside]
    return found


def attention_paths(base: Any) -> list[str]:
    """Return the paths of the self-attention modules of every stack, in layer order."""
    return [path for stack in locate(base).stacks for path in stack.attention]


def linear_layers(base: Any) -> list[str]:
    """Return the linear layers inside the self-attention modules, by their names within a block, as PEFT matches them.

    Raises:
        ConfigError: there is none.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> linear_layers(model)
        ['attn.c_attn', 'attn.c_proj']
    """
    found: set[str] = set()
    for path in attention_paths(base):
        start = path.removeprefix(block_of(path)).strip(".")
        parts = base.get_submodule(path).named_modules()
        found |= {".".join(filter(None, (start, name))) for name, part in parts if is_linear(part)}
    if not found:
        raise ConfigError(
            f"peft: the attention of {type(base).__name__} has no linear layer that adapters know: name "
            "peft.target_modules, or train 'full' or 'positions' instead."
        )
    return sorted(found)


def block_of(path: str) -> str:
    """Return the path of the block, "transformer.h.3", that holds the attention module at `path`."""
    found = re.match(r"(.*\.\d+)(\.|$)", path)
    return found[1] if found else path


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer, torch's own or transformers' transposed one."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def base_name(name: str) -> str:
    """Return what the transformers model calls the parameter that a wrapper calls `name`.

    Example:
        >>> base_name("module.base_model.model.transformer.wte.modules_to_save.default.weight")
        'transformer.wte.weight'
    """
    return name_without_adapter(name_without_wrappers(name))


def only(base: nn.Module, names: set[str]) -> None:
    """Leave the parameters called `names` to train, and freeze the others."""
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(name in names)


def transformers_model(model: Any) -> Any:
    """Return the transformers model in a PEFT model, or in a wrapper for several processes."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    original = compiled_original(model)
    return unwrap(model if original is None else original)


class KeepsRows:
    """A gradient hook that leaves the first rows of a table without a gradient.

    Args:
        rows: how many.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        masked = gradient.clone()
        masked[: self.rows] = 0
        return masked
