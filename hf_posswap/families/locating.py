"""Finding the positions of a model, and refusing a model with position modules that its family does not list."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posswap.errors import UnsupportedModelError
from hf_posswap.families.base import FAMILIES, Family, StackSpec, TableSpec
from hf_posswap.families.images import PatchTable, image_geometry, patch_table, refuse_other_tables
from hf_posswap.families.measuring import causal_of, geometry_of
from hf_posswap.families.modules import get, has_buffer, join, matching, module_paths, table_at, who
from hf_posswap.families.refused import REFUSED
from hf_posswap.families.rope_config import config_at, config_path, inv_freq_names, rope_sets
from hf_posswap.families.sites import Sites, Stack, TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family that `config` belongs to.

    Args:
        config: of a transformers model.

    Raises:
        UnsupportedModelError: there is none; the message says why, or lists similar model types and how to add a
            family.

    Example:
        >>> from transformers import GPT2Config
        >>> family_of(GPT2Config()).name
        'gpt2'
    """
    model_type = getattr(config, "model_type", None)
    families = [family for _, family in FAMILIES.items()]
    for family in families:
        if model_type in family.model_types:
            return family
    if model_type in REFUSED:
        raise UnsupportedModelError(f"model type {model_type!r} is not supported: {REFUSED[model_type]}.")
    for family in families:
        if family.matches is not None and family.matches(config):
            return family
    raise UnsupportedModelError(_unknown(str(model_type), families))


def _unknown(model_type: str, families: list[Family]) -> str:
    """Return a message in three lines: no family describes the model type, similar names, what to do."""
    known = sorted({name for family in families for name in (family.name, *family.model_types)})
    near = difflib.get_close_matches(model_type, known, n=3)
    hint = f"Near names: {', '.join(map(repr, near))}. " if near else ""
    return (
        f"no family describes model type {model_type!r}, and its config has no rope parameters to go by.\n"
        f"{hint}`posswap families` lists all {len(families)}.\n"
        "To add it, register a Family that says where its position table or rotary module and its self-attention are: "
        "page Extending, 'How to add a family'."
    )


def locate(model: PreTrainedModel) -> Sites:
    """Return where positions are in `model`, which may be on the meta device; for a swapped one, where they were.

    Args:
        model: a transformers model, without a PEFT model around it.

    Raises:
        UnsupportedModelError: no family, a missing path, or a position module that the family does not list.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> locate(model).table_path, locate(model).attention
        ('transformer.wpe', ('transformer.h.0.attn',))
    """
    swapped: Any = getattr(model, "_posswap", None)
    if swapped is not None:  # the modules that the family lists are gone
        return swapped.plan.sites
    family = family_of(model.config)
    base = root_path = model.base_model_prefix if getattr(model, model.base_model_prefix, None) is not None else ""
    root = model.get_submodule(base)
    base = join(base, _tower(root, family))
    kept = [join(root_path, path) for path in family.kept]
    root = model.get_submodule(base)
    present = [spec for spec in family.parts if not spec.name or get(root, spec.entry) is not None]
    if not present:
        entries = ", ".join(repr(spec.entry) for spec in family.parts)
        raise UnsupportedModelError(f"{who(model)}: none of the stacks of family {family.name!r} is there: {entries}.")
    sites = Sites(family, base, tuple(_stack(model, root, base, family, spec) for spec in present))
    _refuse_unclaimed(model, sites, kept)
    return sites


def _tower(root: nn.Module, family: Family) -> str:
    """Return the path in `root` of the module that the family's paths start from."""
    present = [tower for tower in family.towers if get(root, tower) is not None]
    for tower in present:
        if any(matching(root.get_submodule(tower), spec.attention) for spec in family.parts):
            return tower
    return ""


def _stack(model: PreTrainedModel, root: nn.Module, base: str, family: Family, spec: StackSpec) -> Stack:
    attention = matching(root, spec.attention)
    rotary = [path for path in (family.rotary(root) if family.rotary else []) if path.startswith(spec.entry)]
    buffers = () if spec.table is None else spec.table.buffers
    if spec.table is not None and spec.table.absent is not None and spec.table.absent(model.config):
        spec = replace(spec, table=None)
    table = spec.table
    if table is not None and table_at(root, table.path) is None:
        raise UnsupportedModelError(
            f"{who(model)}: family {family.name!r} expects a table at {table.path!r}, none there."
        )
    if table is not None and not _is_whole(table, root):
        raise UnsupportedModelError(
            f"{who(model)}: the table at {table.path!r} was removed by a swap of the model that contains this one. "
            "Use the whole model, or take the swap back: unpatch_model(model)."
        )
    if not attention:
        raise UnsupportedModelError(f"{who(model)}: no self-attention modules at {spec.attention!r}.")
    if family.rotary and not rotary and (spec.traits is None or spec.traits.inside(model.config) is None):
        raise UnsupportedModelError(f"{who(model)} has no rotary module, nor any other positions: its config says so.")
    if spec.image is not None:
        return _image_stack(model, root, base, spec, attention)
    offset = _table_offset(table, root) if table else 0
    subconfig = _config_of(model, root, rotary)
    nope = _nope_layers(model, root, config_at(model.config, subconfig), family, attention) if rotary else ()
    return Stack(
        spec=spec,
        entry=join(base, spec.entry),
        attention=tuple(join(base, path) for path in attention),
        table=None if table is None else TokenTable(join(base, table.path), offset, table.kind, table.computed),
        buffers=tuple(join(base, path) for path in buffers if has_buffer(root, path)),
        rotary=tuple(join(base, path) for path in rotary),
        geometry=geometry_of(model, config_at(model.config, subconfig), root, spec, attention, rotary, offset, nope),
        config=subconfig,
        rope_layer_types=rope_sets(root.get_submodule(rotary[0])) if rotary else (),
        inside=None if spec.traits is None else spec.traits.inside(model.config),
        nope_layers=nope,
        position_source=spec.counted_by(config_at(model.config, subconfig)),
    )


def _nope_layers(model: Any, root: nn.Module, config: Any, family: Family, attention: list[str]) -> tuple[int, ...]:
    """Return which of the `attention` modules, counted from 0, do not rotate."""
    rotates = family.rotates.get(config.model_type)
    if rotates is None:
        return ()
    nope = tuple(layer for layer, path in enumerate(attention) if not rotates(root.get_submodule(path)))
    if len(nope) == len(attention):
        raise UnsupportedModelError(f"{who(model)}: none of its layers rotates, so it has no positions to swap.")
    return nope


def _image_stack(model: PreTrainedModel, root: Any, base: str, spec: StackSpec, attention: list[str]) -> Stack:
    assert spec.image is not None
    subconfig = config_path(model.config, root.config)
    if subconfig is None:
        raise UnsupportedModelError(
            f"{who(model)}: its vision part was built from a different config than the model's."
        )
    config = config_at(model.config, subconfig)
    causal = causal_of(model, config, root, spec, attention)
    return Stack(
        spec=spec,
        entry=join(base, spec.entry),
        attention=tuple(join(base, path) for path in attention),
        table=patch_table(model, root, base, spec.image),
        buffers=(),
        rotary=(),
        geometry=image_geometry(model, config, root, spec.image, attention, causal),
        config=subconfig,
    )


def _config_of(model: PreTrainedModel, root: nn.Module, rotary: list[str]) -> str:
    """Return the path of the sub-config that the model's rotary modules were built from."""
    configs = (getattr(root.get_submodule(path), "config", None) for path in rotary)
    paths = {config_path(model.config, config) for config in configs if config is not None}
    if len(paths) > 1 or None in paths:
        raise UnsupportedModelError(
            f"{who(model)}: its rotary modules ({', '.join(rotary)}) were built from different or altered copies of "
            "the config, so no single config describes them."
        )
    return paths.pop() or "" if paths else ""


def _is_whole(table: TableSpec, root: nn.Module) -> bool:
    """Return whether the table is the original one and not what a swap left there."""
    padded = table.offset != "padding" or getattr(get(root, table.path), "padding_idx", None) is not None
    rows = table_at(root, table.path)
    return padded and rows is not None and rows.ndim == 2


def _table_offset(table: TableSpec, root: nn.Module) -> int:
    if table.offset != "padding":
        return table.offset
    return int(root.get_submodule(table.path).padding_idx) + 1  # type: ignore[arg-type]


def _refuse_unclaimed(model: PreTrainedModel, sites: Sites, kept: list[str]) -> None:
    """Refuse a model with a rotary module or a position table that its family does not list."""
    claimed: set[nn.Module | None] = set()
    attention = tuple(f"{path}." for stack in sites.stacks for path in stack.attention)
    for stack in sites.stacks:
        claimed |= {get(model, path) for path in stack.rotary}
        if isinstance(stack.table, PatchTable):
            claimed.add(get(model, stack.table.path.rpartition(".")[0]))
            refuse_other_tables(model, stack.table.path, kept, sites.family.name)
        elif stack.table is not None:
            claimed.add(get(model, stack.table.path))
    for path, module in module_paths(model):
        leaf = path.rsplit(".", 1)[-1]
        table_like = isinstance(module, nn.Embedding) and ("position" in leaf or leaf in {"wpe", "pos_embed"})
        mentioned = module in claimed or any(path == parent or path.startswith(f"{parent}.") for parent in kept)
        computed = "PositionalEmbedding" in type(module).__name__ or (
            "RotaryEmbedding" in type(module).__name__
            and path.startswith(attention)  # which provides angles to no other module
        )
        if (inv_freq_names(module) or table_like or computed) and not mentioned:
            raise UnsupportedModelError(
                f"{who(model)}: {path!r} ({type(module).__name__}) looks like a part of the position mechanism, and "
                f"family {sites.family.name!r} does not mention it; patching the rest would leave it half-swapped."
            )
