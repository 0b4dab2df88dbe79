"""Where positions live in one kind of Hugging Face model: data and lookups, no surgery.

A family says at which paths the three sites of a model are; `locate` turns that into the full paths of one model and
refuses a model that has position parts which the family does not mention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hf_posswap.errors import UnsupportedModelError
from hf_posswap.geometry import Geometry, Layout
from hf_posswap.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FAMILIES: Registry[Family] = Registry("family", "hf_posswap.families")


@dataclass(frozen=True)
class TableSpec:
    """The additive position table of a family.

    Attributes:
        path: of the table, from the base model.
        offset: rows before position 0; "padding" is the padding index + 1 (RoBERTa).
        config_counts_offset: whether `config.max_position_embeddings` counts those rows too.
        buffers: buffers [1, P] with one entry a position, from the base model; they grow with the length.
        config_name: the config value that says how long the table is.
    """

    path: str
    offset: int | Literal["padding"] = 0
    config_counts_offset: bool = False
    buffers: tuple[str, ...] = ()
    config_name: str = "max_position_embeddings"


@dataclass(frozen=True)
class StackSpec:
    """One stack of layers of a family whose models have several: an encoder-decoder's encoder, or its decoder.

    Attributes:
        name: by which users and records call it; "" where a model has one stack only.
        attention: pattern of the self-attention modules' paths, from the base model; "*" is one path segment.
        entry: path, from the base model, of the module that takes input ids, position ids and the cache.
        table: where the learned table is; None: no table.
        heads: the config value that counts its query heads, which are as many as its key heads; None: the usual ones.
    """

    name: str
    attention: str
    entry: str = ""
    table: TableSpec | None = None
    heads: str | None = None


@dataclass(frozen=True)
class Family:
    """One kind of model, as data.

    Attributes:
        name: shown by `list_families`.
        summary: one line: what position mechanism it has natively.
        attention: pattern of the self-attention modules' paths, from the base model; "*" is one path segment.
        model_types: `config.model_type`s that belong to it.
        entry: path, from the base model, of the module that takes input ids, position ids and the cache.
        table: where the learned table is; None: no table.
        rotary: finds the paths of the native rotary modules, from the base model; None: no rotary.
        attention_proved: model types whose attention is known to treat all layers and dimensions alike, so that a
            scheme can be put inside; None: all of the family.
        matches: for families by rule: whether a config belongs, asked after every `model_types` has missed.
        stacks: of an encoder-decoder, the decoder last; they say what `attention`, `entry` and `table` say of the
            others. A stack whose entry a model lacks (a decoder alone) is left out.
        kept: paths, from the base model, of position parts that are never swapped.
    """

    name: str
    summary: str
    attention: str = ""
    model_types: tuple[str, ...] = ()
    entry: str = ""
    table: TableSpec | None = None
    rotary: Callable[[nn.Module], list[str]] | None = None
    attention_proved: frozenset[str] | None = None
    matches: Callable[[PreTrainedConfig], bool] | None = None
    stacks: tuple[StackSpec, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[StackSpec, ...]:
        """The stacks of its models: one without a name where it states none."""
        return self.stacks or (StackSpec("", self.attention, self.entry, self.table),)


@dataclass(frozen=True)
class Stack:
    """The full paths of the position sites of one stack of a model.

    Attributes:
        spec: whose data found them.
        entry: path of the module that takes input ids, position ids and the cache.
        attention: paths of the self-attention modules, in layer order.
        table: path of the learned table, or None.
        table_offset: rows before position 0.
        buffers: paths of the buffers with one entry a position.
        rotary: paths of the native rotary modules.
        geometry: what a scheme may know of the model.
    """

    spec: StackSpec
    entry: str
    attention: tuple[str, ...]
    table: str | None
    table_offset: int
    buffers: tuple[str, ...]
    rotary: tuple[str, ...]
    geometry: Geometry

    @property
    def name(self) -> str:
        """By which users and records call it; "" where the model has one stack only."""
        return self.spec.name

    @property
    def first_position(self) -> int:
        """What the model's `position_ids` call position 0: where padding shifts a table, they count its rows."""
        return self.table_offset if self.spec.table is not None and self.spec.table.offset == "padding" else 0

    @property
    def config_name(self) -> str:
        """The config value that says how long the model is."""
        return TableSpec.config_name if self.spec.table is None else self.spec.table.config_name

    def config_length(self, length: int) -> int:
        """Return what that config value says for `length` tokens."""
        counts = self.spec.table is not None and self.spec.table.config_counts_offset
        return length + self.table_offset if counts else length


@dataclass(frozen=True)
class Sites:
    """Where positions live in one model: its stacks, of which most models have one.

    What it says itself is of its main stack: the only one, or the decoder.

    Attributes:
        family: whose data found them.
        base: path of the base model; "" where the model is one.
        stacks: of the model, the main one last.
    """

    family: Family
    base: str
    stacks: tuple[Stack, ...]

    def stack(self, name: str) -> Stack:
        """Return the stack called `name`."""
        return next(stack for stack in self.stacks if stack.name == name)

    @property
    def main(self) -> Stack:
        """The only stack, or the decoder."""
        return self.stacks[-1]

    @property
    def entry(self) -> str:
        """Path of the module that takes the main stack's input."""
        return self.main.entry

    @property
    def attention(self) -> tuple[str, ...]:
        """Paths of the main stack's self-attention modules, in layer order."""
        return self.main.attention

    @property
    def table(self) -> str | None:
        """Path of the main stack's table, or None."""
        return self.main.table

    @property
    def table_offset(self) -> int:
        """Rows of the main stack's table before position 0."""
        return self.main.table_offset

    @property
    def first_position(self) -> int:
        """What the main stack's `position_ids` call position 0."""
        return self.main.first_position

    @property
    def rotary(self) -> tuple[str, ...]:
        """Paths of the main stack's native rotary modules."""
        return self.main.rotary

    @property
    def geometry(self) -> Geometry:
        """What a scheme may know of the main stack."""
        return self.main.geometry


def register(family: Family) -> Family:
    """Register `family`; see `Family` for what it states."""
    return FAMILIES.add(family.name, family)


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family that `config` belongs to.

    Raises:
        UnsupportedModelError: none does; the message lists the families.
    """
    model_type = getattr(config, "model_type", None)
    families = [family for _, family in FAMILIES.items()]
    for family in families:
        if model_type in family.model_types:
            return family
    for family in families:
        if family.matches is not None and family.matches(config):
            return family
    known = "; ".join(f"{f.name}: {f.summary}" for f in families)
    raise UnsupportedModelError(f"no family describes model type {model_type!r}. Families: {known}.")


def locate(model: PreTrainedModel) -> Sites:
    """Return where positions live in `model`, which may lie on the meta device.

    Raises:
        UnsupportedModelError: no family, a path that is missing, or a position part that the family does not mention.
    """
    family = family_of(model.config)
    base = model.base_model_prefix if getattr(model, model.base_model_prefix, None) is not None else ""
    root = model.get_submodule(base)
    present = [spec for spec in family.parts if not spec.name or _get(root, spec.entry) is not None]
    if not present:
        entries = ", ".join(repr(spec.entry) for spec in family.parts)
        raise UnsupportedModelError(f"{_who(model)}: none of the stacks of family {family.name!r} is there: {entries}.")
    sites = Sites(family, base, tuple(_stack(model, root, base, family, spec) for spec in present))
    _refuse_unclaimed(model, sites)
    return sites


def _stack(model: PreTrainedModel, root: nn.Module, base: str, family: Family, spec: StackSpec) -> Stack:
    attention = _matching(root, spec.attention)
    rotary = family.rotary(root) if family.rotary else []
    table = spec.table
    if table is not None and _get(root, table.path) is None:
        raise UnsupportedModelError(
            f"{_who(model)}: family {family.name!r} expects a table at {table.path!r}, none there."
        )
    if not attention:
        raise UnsupportedModelError(f"{_who(model)}: no self-attention modules at {spec.attention!r}.")
    offset = _table_offset(table, root) if table else 0
    return Stack(
        spec=spec,
        entry=_join(base, spec.entry),
        attention=tuple(_join(base, path) for path in attention),
        table=_join(base, table.path) if table else None,
        table_offset=offset,
        buffers=tuple(_join(base, path) for path in table.buffers if _has_buffer(root, path)) if table else (),
        rotary=tuple(_join(base, path) for path in rotary),
        geometry=_geometry(model, root, spec, attention, rotary, offset),
    )


def modeling_module(module: nn.Module) -> ModuleType:
    """Return the Python module that defines the class of `module`: its `eager_attention_forward`, `rotate_half`."""
    return sys.modules[type(module).__module__]


def inv_freq_names(module: nn.Module) -> list[str]:
    """Return the names of the frequency buffers that `module` itself owns: a rotary module has some."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    return [name for name in names if name.endswith("inv_freq") and "original" not in name]


def _geometry(
    model: PreTrainedModel, root: nn.Module, spec: StackSpec, attention: list[str], rotary: list[str], offset: int
) -> Geometry:
    config: Any = model.config
    heads = getattr(config, spec.heads or "num_attention_heads")
    kv_heads = None if spec.heads else getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    causal = {bool(getattr(root.get_submodule(path), "is_causal", True)) for path in attention}
    if len(causal) > 1:
        raise UnsupportedModelError(f"{_who(model)}: some attention layers are causal and some are not.")
    width = config.hidden_size
    if spec.table is None:
        length = config.max_position_embeddings
    else:
        table: Any = root.get_submodule(spec.table.path)
        length, width = table.weight.shape[0] - offset, table.weight.shape[1]
    rotary_dim = base = layout = frequencies = None
    factor = 1.0
    if rotary:
        first = root.get_submodule(rotary[0])
        frequencies, factor = _own_angles(first, config)
        rotary_dim = 2 * getattr(first, inv_freq_names(first)[0]).shape[-1]
        base = float((config.rope_parameters or {}).get("rope_theta") or 10000.0)
        layout = rotary_layout(root.get_submodule(attention[0]))
        length = (config.rope_parameters or {}).get("original_max_position_embeddings") or length
    return Geometry(
        hidden_size=config.hidden_size,
        table_width=None if width == config.hidden_size else width,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        num_layers=len(attention),
        original_length=length,
        causal=causal.pop(),
        rotary_dim=rotary_dim,
        layout=layout,
        base=base,
        frequencies=frequencies,
        attention_factor=factor,
        sliding_window=_sliding_window(config),
    )


def _sliding_window(config: Any) -> int | None:
    """Return how many keys a query sees at most where that holds in all layers."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or []
    some_see_all = any(kind != "sliding_attention" for kind in types)
    return None if some_see_all or getattr(config, "use_sliding_window", True) is False else window


def _own_angles(rotary: Any, config: PreTrainedConfig) -> tuple[tuple[float, ...] | None, float]:
    """Return theta_i of the module `rotary` as it is, and its factor on cos and sin; None where they follow the length.

    A module on meta has none, and one that was cast to another dtype has lost digits: both are built again.
    """
    name = inv_freq_names(rotary)[0]
    if (config.rope_parameters or {}).get("rope_type") in ("dynamic", "longrope"):
        return None, 1.0
    held = getattr(rotary, name)
    if held.is_meta or held.dtype != torch.float32:
        with torch.device("cpu"):
            rotary = type(rotary)(config)
        held = getattr(rotary, name)
    return tuple(held.detach().cpu().tolist()), float(getattr(rotary, "attention_scaling", 1.0))


def rotary_layout(attention: nn.Module) -> Layout | None:
    """Return how the model's own code pairs rotary dimensions, found by running its `rotate_half`; None: unknown."""
    rotate_half = getattr(modeling_module(attention), "rotate_half", None)
    if rotate_half is None:
        return None
    turned = rotate_half(torch.tensor([[1.0, 2.0, 3.0, 4.0]], device="cpu")).flatten().tolist()
    layouts: dict[tuple[float, ...], Layout] = {(-3, -4, 1, 2): "half", (-2, 1, -4, 3): "interleaved"}
    return layouts.get(tuple(turned))


def _refuse_unclaimed(model: PreTrainedModel, sites: Sites) -> None:
    """Refuse a model with a rotary module or a position table that its family does not mention."""
    claimed = {_join(sites.base, path) for path in sites.family.kept}
    for stack in sites.stacks:
        claimed |= {*stack.rotary, *([stack.table] if stack.table else [])}
    for path, module in model.named_modules():
        leaf = path.rsplit(".", 1)[-1]
        table_like = isinstance(module, nn.Embedding) and ("position" in leaf or leaf in {"wpe", "pos_embed"})
        if (inv_freq_names(module) or table_like) and path not in claimed:
            raise UnsupportedModelError(
                f"{_who(model)}: {path!r} ({type(module).__name__}) looks like a part of the position mechanism, and "
                f"family {sites.family.name!r} does not mention it; patching the rest would leave it half-swapped."
            )


def _matching(root: nn.Module, pattern: str) -> list[str]:
    """Return the paths below `root` that match `pattern`, "*" standing for one segment, in module order."""
    wanted = pattern.split(".")

    def matches(path: str) -> bool:
        parts = path.split(".")
        return len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True))

    return [path for path, _ in root.named_modules() if matches(path)]


def _table_offset(table: TableSpec, root: nn.Module) -> int:
    if table.offset != "padding":
        return table.offset
    return int(root.get_submodule(table.path).padding_idx) + 1  # type: ignore[arg-type]


def _get(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _has_buffer(root: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in dict(root.get_submodule(owner).named_buffers(recurse=False))


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _who(model: nn.Module) -> str:
    return type(model).__name__


def paths_of(root: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[str]:
    """Return the paths below `root` of the modules that `wanted` accepts."""
    return [path for path, module in root.named_modules() if wanted(module)]
