"""Finds the parameters and modules to train: those that the swap added, norms, embeddings, projections, layers."""

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
# transformers' names for query and key projections, separate and fused.
_QUERY_KEY = {
    "q_proj", "k_proj", "query", "key", "q", "k", "q_lin", "k_lin", "q_norm", "k_norm", "query_layernorm",
    "key_layernorm", "query_proj", "key_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv", "in_proj",
}  # fmt: skip


def position_names(base: Any) -> list[str]:
    """Return the names of the parameters that the swap of `base` added, or whose rows it rewrote."""
    patch = getattr(base, "_posswap", None)
    if patch is None:
        return []
    tables = [edit for edit in patch.plan.edits if isinstance(edit, ReplaceTable)]
    rewritten = {f"{table.path}.weight" for table in tables if table.scheme.trainable}
    added = {
        name.removesuffix(_NEW_ROWS) for name in patch.plan.added if not name.endswith(".old")
    }  # the old table fades out
    return [name for name, _ in base.named_parameters() if base_name(name) in added | rewritten]


def grown_tables(base: Any) -> dict[str, int]:
    """Return the names of the tables to which the swap of `base` added rows, and how many rows they had before.

    Raises:
        ConfigError: there is none, or its rule changed the old rows.
    """
    patch = getattr(base, "_posswap", None)
    kept_rows: dict[str, int] = {}
    for table in patch.plan.edits if patch is not None else ():
        if not isinstance(table, ReplaceTable) or not table.scheme.trainable:
            continue
        rule, old = getattr(table.scheme, "extend", None), table.geometry.original_length
        if rule not in _KEEP_ROWS:
            raise ConfigError(
                f"trainable.what is new_rows, and {table.scheme} also changed the old rows: swap with "
                f"extend one of {', '.join(_KEEP_ROWS)}, or train 'positions', the whole table."
            )
        if table.rows > old:
            kept_rows[f"{table.path}.weight"] = old + table.offset
    if not kept_rows:
        swap_state = "carries no swap" if patch is None else f"was swapped to {patch.plan.scheme}"
        raise ConfigError(
            f"trainable.what is new_rows, and {type(base).__name__} {swap_state}: no table has new rows. Swap to "
            "'learned' with a larger max_length, or train something else."
        )
    return kept_rows


def norm_paths(base: nn.Module) -> list[str]:
    """Return the paths of the norms: modules without children, with a weight, whose parameters are all vectors."""
    paths = []
    for path, module in base.named_modules():
        parameters = list(module.parameters(recurse=False))
        is_norm = parameters and all(p.ndim == 1 for p in parameters) and getattr(module, "weight", None) is not None
        if is_norm and not list(module.children()):
            paths.append(path)
    return paths


def embedding_path(base: Any) -> str:
    """Return the path of the token embeddings."""
    table = base.get_input_embeddings()
    return next(path for path, module in base.named_modules() if module is table)


def is_tied(base: Any) -> bool:
    """Return whether the token embeddings and the head share their weight."""
    head = base.get_output_embeddings()
    return head is not None and head.weight is base.get_input_embeddings().weight


def query_key_names(base: Any) -> list[str]:
    """Return the names of the parameters of the query and key projections, fused or not.

    Raises:
        ConfigError: an attention module has no projection of a known name.
    """
    names: list[str] = []
    for path in attention_paths(base):
        attention = base.get_submodule(path)
        projections = [name for name, _ in attention.named_parameters() if _QUERY_KEY & set(name.split("."))]
        if not projections:
            modules = ", ".join(sorted({name.rpartition(".")[0] for name, _ in attention.named_parameters()}))
            raise ConfigError(
                f"trainable.what is norms_qk, and hf_posswap cannot tell which of {modules} in {path} project queries "
                "and keys: train 'full', or adapters (peft) instead."
            )
        names += [f"{path}.{name}" for name in projections]
    return names


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
    names: set[str] = set()
    for path in attention_paths(base):
        prefix = path.removeprefix(block_of(path)).strip(".")
        modules = base.get_submodule(path).named_modules()
        names |= {".".join(filter(None, (prefix, name))) for name, module in modules if is_linear(module)}
    if not names:
        raise ConfigError(
            f"peft: the attention of {type(base).__name__} has no linear layer that adapters support: name "
            "peft.target_modules, or train 'full' or 'positions' instead."
        )
    return sorted(names)


def block_of(path: str) -> str:
    """Return the path of the block, "transformer.h.3", that holds the attention module at `path`."""
    match = re.match(r"(.*\.\d+)(\.|$)", path)
    return match[1] if match else path


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer, torch's own or transformers' transposed one."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def base_name(name: str) -> str:
    """Return the name in the transformers model of the parameter that a wrapper calls `name`.

    Example:
        >>> base_name("module.base_model.model.transformer.wte.modules_to_save.default.weight")
        'transformer.wte.weight'
    """
    return name_without_adapter(name_without_wrappers(name))


def only(base: nn.Module, names: set[str]) -> None:
    """Make exactly the parameters in `names` trainable, and freeze the others."""
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(name in names)


def transformers_model(model: Any) -> Any:
    """Return the transformers model in a PEFT model, or in a wrapper for several processes."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    original = compiled_original(model)
    return unwrap(model if original is None else original)


class FreezeRowsHook:
    """A gradient hook that zeroes the gradient of the first rows of a table.

    Args:
        rows: how many.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        masked = gradient.clone()
        masked[: self.rows] = 0
        return masked
