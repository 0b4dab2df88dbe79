"""Where positions live in one kind of Hugging Face model: data and lookups, no surgery.

A family says at which paths the three sites of a model are; `locate` turns that into the full paths of one model and
refuses a model that has position parts which the family does not mention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hf_posswap.errors import UnsupportedModelError
from hf_posswap.families.own import NativeScheme, OwnAttention
from hf_posswap.families.refused import REFUSED
from hf_posswap.families.rope_config import (
    buffer_name,
    config_at,
    config_path,
    factor_of,
    inv_freq_names,
    layer_config,
    parameters_of,
    reaching,
    rope_sets,
)
from hf_posswap.geometry import Geometry, Layout
from hf_posswap.registry import Registry
from hf_posswap.rotary import default_inv_freq

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FAMILIES: Registry[Family] = Registry("family", "hf_posswap.families")


@dataclass(frozen=True)
class TableSpec:
    """The additive position table of a family: an embedding, or sinusoids that a module computes for itself.

    Attributes:
        path: of the table, from the base model.
        offset: rows before position 0; "padding" is the padding index + 1 (RoBERTa).
        config_counts_offset: whether `config.max_position_embeddings` counts those rows too.
        buffers: buffers [1, P] or [P] with one entry a position, from the base model; they grow with the length.
        config_name: the config value that says how long the table is.
        kind: what stands in it.
        computed: whether its module makes its rows itself, at any length, as `weights` that no checkpoint holds.
    """

    path: str
    offset: int | Literal["padding"] = 0
    config_counts_offset: bool = False
    buffers: tuple[str, ...] = ()
    config_name: str = "max_position_embeddings"
    kind: Literal["learned", "sinusoidal"] = "learned"
    computed: bool = False


@dataclass(frozen=True)
class StackSpec:
    """One stack of layers of a family whose models have several: an encoder-decoder's encoder, or its decoder.

    Attributes:
        name: by which users and records call it; "" where a model has one stack only.
        attention: pattern of the self-attention modules' paths, from the base model; "*" is one path segment.
        entry: path, from the base model, of the module that takes input ids, position ids and the cache.
        table: where the learned table is; None: no table.
        heads: the config value that counts its query heads, which are as many as its key heads; None: the usual ones.
        causal: whether a query sees only its past; None: what its attention modules say.
        layers_share: whether layers share their weights, attention modules and all.
        own: what is peculiar to its attention; None: nothing is.
    """

    name: str
    attention: str
    entry: str = ""
    table: TableSpec | None = None
    heads: str | None = None
    causal: bool | None = None
    layers_share: bool = False
    own: OwnAttention | None = None


@dataclass(frozen=True)
class Family:
    """One kind of model, as data.

    Attributes:
        name: shown by `list_families`.
        summary: one line: what position mechanism it has natively.
        attention: pattern of the self-attention modules' paths, from the base model; "*" is one path segment, and
            "a|b" a segment that is one of the two.
        model_types: `config.model_type`s that belong to it.
        entry: path, from the base model, of the module that takes input ids, position ids and the cache.
        table: where the learned table is; None: no table.
        rotary: finds the paths of the native rotary modules, from the base model; None: no rotary.
        attention_proved: model types whose attention is known to treat all layers and dimensions alike, so that a
            scheme can be put inside; None: all of the family.
        attention_refused: why it cannot be, by model type, where that is known.
        matches: for families by rule: whether a config belongs, asked after every `model_types` has missed.
        stacks: of an encoder-decoder, the decoder last; they say what `attention`, `entry` and `table` say of the
            others. A stack whose entry a model lacks (a decoder alone) is left out.
        kept: paths, from the base model, of position parts that are never swapped, or of what they all lie in.
        towers: paths, from the base model, where the part that all other paths count from may lie: in a model of
            several modalities, its language model.
    """

    name: str
    summary: str
    attention: str = ""
    model_types: tuple[str, ...] = ()
    entry: str = ""
    table: TableSpec | None = None
    rotary: Callable[[nn.Module], list[str]] | None = None
    attention_proved: frozenset[str] | None = None
    attention_refused: Mapping[str, str] = field(default_factory=dict)
    matches: Callable[[PreTrainedConfig], bool] | None = None
    stacks: tuple[StackSpec, ...] = ()
    kept: tuple[str, ...] = ()
    towers: tuple[str, ...] = ("",)

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
        config: path of its part of the model's config; "": all of it.
        sets: of native frequencies, by name; see `rope_config`.
        inside: the position mechanism that is native inside attention, as `Scheme.to_dict` writes it; None: none is.
    """

    spec: StackSpec
    entry: str
    attention: tuple[str, ...]
    table: str | None
    table_offset: int
    buffers: tuple[str, ...]
    rotary: tuple[str, ...]
    geometry: Geometry
    config: str = ""
    sets: tuple[str, ...] = ()
    inside: NativeScheme | None = None

    @property
    def turning(self) -> tuple[str, ...]:
        """The sets that a rotary scheme replaces: those of the layers that see all tokens."""
        return reaching(self.sets)

    @property
    def name(self) -> str:
        """By which users and records call it; "" where the model has one stack only."""
        return self.spec.name

    @property
    def first_position(self) -> int:
        """What the model's `position_ids` call position 0: where padding shifts a table, they count its rows."""
        return self.table_offset if self.spec.table is not None and self.spec.table.offset == "padding" else 0

    @property
    def config_name(self) -> str | None:
        """The config value that says how long the model is, by its path in the config; None: none does."""
        if self.spec.own is not None and self.spec.table is None:
            return self.spec.own.length_name
        name = TableSpec.config_name if self.spec.table is None else self.spec.table.config_name
        return _join(self.config, name)

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
        UnsupportedModelError: none does; the message says why, or lists the families.
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
    known = "; ".join(f"{f.name}: {f.summary}" for f in families)
    raise UnsupportedModelError(f"no family describes model type {model_type!r}. Families: {known}.")


def locate(model: PreTrainedModel) -> Sites:
    """Return where positions live in `model`, which may lie on the meta device.

    Raises:
        UnsupportedModelError: no family, a path that is missing, or a position part that the family does not mention.
    """
    family = family_of(model.config)
    base = root_path = model.base_model_prefix if getattr(model, model.base_model_prefix, None) is not None else ""
    root = model.get_submodule(base)
    base = _join(base, _tower(root, family))
    kept = [_join(root_path, path) for path in family.kept]
    root = model.get_submodule(base)
    present = [spec for spec in family.parts if not spec.name or _get(root, spec.entry) is not None]
    if not present:
        entries = ", ".join(repr(spec.entry) for spec in family.parts)
        raise UnsupportedModelError(f"{_who(model)}: none of the stacks of family {family.name!r} is there: {entries}.")
    sites = Sites(family, base, tuple(_stack(model, root, base, family, spec) for spec in present))
    _refuse_unclaimed(model, sites, kept)
    return sites


def _tower(root: nn.Module, family: Family) -> str:
    """Return where in `root` the part lies that the family's paths count from."""
    held = [tower for tower in family.towers if _get(root, tower) is not None]
    for tower in held:
        if any(matching(root.get_submodule(tower), spec.attention) for spec in family.parts):
            return tower
    return ""


def _stack(model: PreTrainedModel, root: nn.Module, base: str, family: Family, spec: StackSpec) -> Stack:
    attention = matching(root, spec.attention)
    rotary = [path for path in (family.rotary(root) if family.rotary else []) if path.startswith(spec.entry)]
    table = spec.table
    if table is not None and _get(root, table.path) is None:
        raise UnsupportedModelError(
            f"{_who(model)}: family {family.name!r} expects a table at {table.path!r}, none there."
        )
    if not attention:
        raise UnsupportedModelError(f"{_who(model)}: no self-attention modules at {spec.attention!r}.")
    if family.rotary and not rotary and (spec.own is None or spec.own.inside(model.config) is None):
        raise UnsupportedModelError(f"{_who(model)} has no rotary module, nor any other positions: its config says so.")
    offset = _table_offset(table, root) if table else 0
    part = _config_of(model, root, rotary)
    return Stack(
        spec=spec,
        entry=_join(base, spec.entry),
        attention=tuple(_join(base, path) for path in attention),
        table=_join(base, table.path) if table else None,
        table_offset=offset,
        buffers=tuple(_join(base, path) for path in table.buffers if _has_buffer(root, path)) if table else (),
        rotary=tuple(_join(base, path) for path in rotary),
        geometry=_geometry(model, config_at(model.config, part), root, spec, attention, rotary, offset),
        config=part,
        sets=rope_sets(root.get_submodule(rotary[0])) if rotary else (),
        inside=None if spec.own is None else spec.own.inside(model.config),
    )


def _config_of(model: PreTrainedModel, root: nn.Module, rotary: list[str]) -> str:
    """Return the path of the part of the model's config that its rotary modules were built from."""
    held = (getattr(root.get_submodule(path), "config", None) for path in rotary)
    paths = {config_path(model.config, config) for config in held if config is not None}
    if len(paths) > 1 or None in paths:
        raise UnsupportedModelError(
            f"{_who(model)}: its rotary modules ({', '.join(rotary)}) were built from different or altered copies of "
            "the config, so no one config says what they do."
        )
    return paths.pop() or "" if paths else ""


def modeling_module(module: nn.Module) -> ModuleType:
    """Return the Python module that defines the class of `module`: its `eager_attention_forward`, `rotate_half`."""
    return sys.modules[type(module).__module__]


def table_of(module: nn.Module) -> torch.Tensor:
    """Return the rows [P, E] of a table's module: its `weight`, or the `weights` that it has computed."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else module.weights  # type: ignore[return-value]


def _geometry(
    model: PreTrainedModel,
    config: Any,
    root: nn.Module,
    spec: StackSpec,
    attention: list[str],
    rotary: list[str],
    offset: int,
) -> Geometry:
    turning = reaching(rope_sets(root.get_submodule(rotary[0]))) if rotary else ("",)
    config, whole = layer_config(config, turning[0]), config
    heads = getattr(config, spec.heads or "num_attention_heads")
    kv_heads = None if spec.heads else getattr(config, "num_key_value_heads", None)
    own_width = _head_dim(whole, root, attention, turning[0]) if turning[0] else None
    head_dim = own_width or getattr(config, "head_dim", None) or config.hidden_size // heads
    causal = {bool(getattr(root.get_submodule(path), "is_causal", True)) for path in attention}
    if spec.own is not None and spec.own.causal is not None:
        causal = {spec.own.causal(config)}
    if spec.causal is not None:
        causal = {spec.causal}
    if len(causal) > 1:
        raise UnsupportedModelError(f"{_who(model)}: some attention layers are causal and some are not.")
    width = config.hidden_size
    if spec.table is None:
        length = getattr(config, TableSpec.config_name, None) if spec.own is None else spec.own.made_for(config)
        if length is None:
            raise UnsupportedModelError(f"{_who(model)}: its config says no length ({TableSpec.config_name}).")
    else:
        rows, width = table_of(root.get_submodule(spec.table.path)).shape
        length = config.max_position_embeddings if spec.table.computed else rows - offset
    rotary_dim = base = layout = frequencies = None
    factor = 1.0
    if rotary:
        first = root.get_submodule(rotary[0])
        parameters = _common(model, whole, turning)
        frequencies, factor = _own_angles(first, whole, turning[0])
        rotary_dim = 2 * getattr(first, buffer_name(turning[0])).shape[-1]
        base = float(parameters.get("rope_theta") or 10000.0)
        layout = rotary_layout(root.get_submodule(attention[0]))
        length = parameters.get("original_max_position_embeddings") or length
    inside = None if spec.own is None else spec.own.inside(config)
    if inside is not None and inside["name"] == "rope":
        rotary_dim, base, layout = round(head_dim * inside["partial"]), inside["base"], inside["layout"]
        frequencies = tuple(default_inv_freq(base, rotary_dim).tolist())
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


def _common(model: PreTrainedModel, config: Any, turning: tuple[str, ...]) -> dict[str, Any]:
    """Return the rope parameters of the layers that a rotary scheme replaces, which must be the same in all of them."""
    parameters = [parameters_of(config, name) for name in turning]
    if any(one != parameters[0] for one in parameters):
        raise UnsupportedModelError(
            f"{_who(model)}: its layers of types {', '.join(turning)} see all tokens and rotate differently, so no one "
            "scheme takes their place."
        )
    return parameters[0]


def _head_dim(config: Any, root: nn.Module, attention: list[str], rope_set: str) -> int | None:
    """Return the width of a head in the layers of one type, where their attention modules say it."""
    types = getattr(config, "layer_types", None) or []
    layers = [root.get_submodule(path) for path in attention]
    widths = {getattr(m, "head_dim", None) for m in layers if types[getattr(m, "layer_idx", 0)] == rope_set}
    return widths.pop() if len(widths) == 1 else None


def _sliding_window(config: Any) -> int | None:
    """Return how many keys a query sees at most where that holds in all layers."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or []
    some_see_all = any(kind != "sliding_attention" for kind in types)
    return None if some_see_all or getattr(config, "use_sliding_window", True) is False else window


def _own_angles(rotary: Any, config: Any, rope_set: str) -> tuple[tuple[float, ...] | None, float]:
    """Return theta_i of a set of the module `rotary`, and its factor on cos and sin; None where they follow the length.

    A module on meta has none, and one that was cast to another dtype has lost digits: both are built again.
    """
    name = buffer_name(rope_set)
    if parameters_of(config, rope_set).get("rope_type") in ("dynamic", "longrope"):
        return None, 1.0
    held = getattr(rotary, name)
    if held.is_meta or held.dtype != torch.float32:
        with torch.device("cpu"):
            rotary = type(rotary)(config)
        held = getattr(rotary, name)
    return tuple(held.detach().cpu().tolist()), factor_of(rotary, rope_set)


def rotary_layout(attention: nn.Module) -> Layout | None:
    """Return how the model's own code pairs rotary dimensions, found by running it; None: unknown."""
    code, probe = modeling_module(attention), torch.tensor([[1.0, 2.0, 3.0, 4.0]], device="cpu")
    if hasattr(code, "rotate_half"):
        turned = code.rotate_half(probe)
    elif hasattr(code, "_apply_rotary_emb"):  # GPT-OSS: a quarter turn, cos 0 and sin 1, of half the width
        turned = code._apply_rotary_emb(probe, *torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]], device="cpu"))
    else:
        return None
    layouts: dict[tuple[float, ...], Layout] = {(-3, -4, 1, 2): "half", (-2, 1, -4, 3): "interleaved"}
    return layouts.get(tuple(turned.flatten().tolist()))


def _refuse_unclaimed(model: PreTrainedModel, sites: Sites, kept: list[str]) -> None:
    """Refuse a model with a rotary module or a position table that its family does not mention."""
    claimed: set[str] = set()
    for stack in sites.stacks:
        claimed |= {*stack.rotary, *([stack.table] if stack.table else [])}
    for path, module in model.named_modules():
        leaf = path.rsplit(".", 1)[-1]
        table_like = isinstance(module, nn.Embedding) and ("position" in leaf or leaf in {"wpe", "pos_embed"})
        mentioned = path in claimed or any(path == one or path.startswith(f"{one}.") for one in kept)
        computed = "PositionalEmbedding" in type(module).__name__
        if (inv_freq_names(module) or table_like or computed) and not mentioned:
            raise UnsupportedModelError(
                f"{_who(model)}: {path!r} ({type(module).__name__}) looks like a part of the position mechanism, and "
                f"family {sites.family.name!r} does not mention it; patching the rest would leave it half-swapped."
            )


def matching(root: nn.Module, pattern: str) -> list[str]:
    """Return the paths below `root` that match `pattern` (see `Family.attention`), in module order."""
    wanted = pattern.split(".")

    def matches(path: str) -> bool:
        parts = path.split(".")
        return len(parts) == len(wanted) and all(
            w == "*" or p in w.split("|") for w, p in zip(wanted, parts, strict=True)
        )

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
