"""Where positions are in a kind of Hugging Face model, as data.

A family lists the paths of the three sites of a model; `locating.locate` finds them in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from hf_posswap.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


NativeScheme = dict[str, Any]
"""A position mechanism in the format of `Scheme.to_dict`: families refer to schemes only by name."""


@dataclass(frozen=True)
class RelativePart:
    """Relative positions inside attention that no scheme can express: a swap keeps or drops them.

    Attributes:
        config_name: the config value that says whether the model has them.
        switches: patterns of the modules, from the base model, whose attribute of that name enables them.
        weights: patterns of the modules, from the base model, that are unused without them.
    """

    config_name: str
    switches: tuple[str, ...]
    weights: tuple[str, ...]

    def is_in(self, config: PreTrainedConfig) -> bool:
        """Return whether a model of `config` has them."""
        return bool(getattr(config, self.config_name, False))


@dataclass(frozen=True)
class AttentionTraits:
    """How the attention of one stack differs from the conventions of newer transformers models.

    Attributes:
        interface: maps a self-attention module to the class with transformers' AttentionInterface that equals its own
            (or that class itself, if it has the interface), or to the reason why there is none; None: it has the
            interface.
        positions: maps a config to the native position mechanism inside attention; None: there is none.
        scheme: the name of that mechanism, for lists without a config; None: there is none.
        switch: path, from the base model, and name of the attribute that is true if that mechanism is in use.
        made_from: pattern of the embeddings, from the base model, that it is computed from; "": none.
        angles: path, from the base model, of the module that computes its angles in releases that have one; "": none.
        causal: maps a config to whether a query sees only its past; None: the attention modules decide.
        length_name: the config value with the original length; None: the config has none.
        length: the original length if the config has none.
        heads: maps a config to the number and the width of attention heads; None: the usual config values.
        closed: maps a config to the reason why no scheme fits inside its attention, or to None; None: any config works.
        relative: relative positions inside attention that no scheme expresses; None: there are none.
        ends: whether its own causal mask ends at the original length.
        bounded: whether its native mechanism ends there: a table of angles, a bias built for that length.
        position_source: what the native mechanism inside attention counts; None: the same as the stack.
        eager_masks: whether the model's masks only work with eager attention.
    """

    interface: Callable[[nn.Module], type | str] | None = None
    positions: Callable[[PreTrainedConfig], NativeScheme | None] | None = None
    scheme: str | None = None
    switch: tuple[str, str] | None = None
    made_from: str = ""
    angles: str = ""
    causal: Callable[[PreTrainedConfig], bool] | None = None
    length_name: str | None = "max_position_embeddings"
    length: int = 2048
    heads: Callable[[PreTrainedConfig], tuple[int, int]] | None = None
    closed: Callable[[PreTrainedConfig], str | None] | None = None
    relative: RelativePart | None = None
    ends: bool = False
    bounded: bool = False
    position_source: Literal["arange", "relative"] | None = None
    eager_masks: bool = False

    def inside(self, config: PreTrainedConfig) -> NativeScheme | None:
        """Return the position mechanism that is native inside attention, or None."""
        return None if self.positions is None else self.positions(config)

    def made_for(self, config: PreTrainedConfig) -> int:
        """Return the original length, in tokens, of a model of `config`."""
        length = None if self.length_name is None else getattr(config, self.length_name, None)
        return self.length if length is None else length


PositionSource = Literal["arange", "mask", "input_ids", "relative"]
"""What a stock class counts if it gets no position ids:

- "arange": every token after those in the cache, padding too;
- "mask": the tokens that the attention mask shows, by `cumsum(mask) - 1`;
- "input_ids": the tokens of the input that are not padding, by their ids;
- "relative": every token, to distances alone, so that padding on the left of a row shifts nothing.
"""
SourceByConfig = Callable[["PreTrainedConfig"], PositionSource]

FAMILIES: Registry[Family] = Registry("family", "hf_posswap.families")


@dataclass(frozen=True)
class TableSpec:
    """The additive position table of a family: an embedding, or sinusoids that a module computes for itself.

    Attributes:
        path: of the table's module, from the base model, or of a plain buffer [P, E] if it has no module.
        offset: rows before position 0; "padding" is the padding index + 1 (RoBERTa).
        config_counts_offset: whether `config.max_position_embeddings` counts those rows too.
        buffers: buffers [1, P] or [P] with one entry a position, from the base model; they grow with the length.
        config_name: the config value with the length of the table.
        kind: the type of its rows.
        computed: whether its module computes the rows, at any length, as `weights` that are not in checkpoints.
        absent: maps a config to whether a model has no such table; None: all have it.
        padded_to: the config value with the number of tokens of which the model pads a text to a multiple before it
            reads the table, or a list of them, where nothing can be put inside its attention; "": it pads nothing.
        embeds_padded_to: the same for a model that pads input ids too, but counts only the padding of `inputs_embeds`.

    Example:
        >>> TableSpec("embed_positions", offset=2).config_name
        'max_position_embeddings'
    """

    path: str
    offset: int | Literal["padding"] = 0
    config_counts_offset: bool = False
    buffers: tuple[str, ...] = ()
    config_name: str = "max_position_embeddings"
    kind: Literal["learned", "sinusoidal"] = "learned"
    computed: bool = False
    absent: Callable[[PreTrainedConfig], bool] | None = None
    padded_to: str = ""
    embeds_padded_to: str = ""


@dataclass(frozen=True)
class ImageSpec:
    """How the models of a family turn an image into tokens, each with a row of a learned table.

    Attributes:
        table: path of the parameter [P, E] or [1, P, E] that holds the table, below `embeddings`.
        patches: path of the convolution whose stride is the patch, below `embeddings`.
        prefix: tokens before the patches that are not patches: class, distillation.
        embeddings: path, from the base model, of the module that creates the tokens. Its forward takes the rows from
            its method `interpolate_pos_encoding`, always or if its argument of that name says so.
        ids: path of the buffer [1, P] with one entry a row, below `embeddings`; None: there is none.
        square_config: whether its code only supports square images from the config.
        square_heads: classes whose head assumes a square of patches.
    """

    table: str
    patches: str
    prefix: int
    embeddings: str = "embeddings"
    ids: str | None = None
    square_config: bool = False
    square_heads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StackSpec:
    """One stack of layers of a family whose models have several: an encoder-decoder's encoder, or its decoder.

    Attributes:
        name: its name for users and in records; "" if a model has only one stack.
        attention: pattern of the self-attention modules' paths, from the base model; "*" is one path segment.
        entry: path, from the base model, of the module that takes input ids, position ids and the cache.
        table: where the learned table is; None: no table.
        heads: the config value that counts its query heads, which are as many as its key heads; None: the usual ones.
        causal: whether a query sees only its past; None: its attention modules decide.
        layers_share: whether layers share their weights, attention modules and all.
        traits: how its attention differs from the conventions; None: it does not.
        image: how it turns an image into tokens; None: it reads text.
        position_source: what its stock class counts if it gets no position ids, or a function of the config.
        cross: pattern of the cross-attention modules' paths, from the base model, if they are of the same class as the
            self-attention; they have no positions, and stay. "": they are of another class, or there are none.
    """

    name: str
    attention: str
    entry: str = ""
    table: TableSpec | None = None
    heads: str | None = None
    causal: bool | None = None
    layers_share: bool = False
    traits: AttentionTraits | None = None
    image: ImageSpec | None = None
    position_source: PositionSource | SourceByConfig = "arange"
    cross: str = ""

    def length_in(self, config: PreTrainedConfig) -> int | None:
        """Return the original length of a stock model of `config`, in tokens, or None."""
        if self.traits is not None and self.table is None:
            return self.traits.made_for(config)
        return getattr(config, TableSpec.config_name if self.table is None else self.table.config_name, None)

    def counted_by(self, config: PreTrainedConfig) -> PositionSource:
        """Return what a stock model of `config` counts if it gets no position ids."""
        return self.position_source(config) if callable(self.position_source) else self.position_source


@dataclass(frozen=True)
class Family:
    """One kind of model, as data.

    Attributes:
        name: shown by `list_families`.
        summary: its native position mechanism, in one line.
        attention: pattern of the self-attention modules' paths, from the base model; "*" is one path segment, and
            "a|b" a segment that is one of the two.
        model_types: `config.model_type`s that belong to it.
        entry: path, from the base model, of the module that takes input ids, position ids and the cache.
        table: where the learned table is; None: no table.
        rotary: finds the paths of the native rotary modules, from the base model; None: no rotary.
        attention_proved: model types whose attention is known to treat all layers and dimensions alike, so that a
            scheme works inside; None: all of the family.
        attention_refused: by model type, the known reason why no scheme works inside.
        turning_refused: by model type, why no scheme that rotates q and k works inside; one that adds a bias does.
        rotates: by model type, whether an attention module rotates q and k, if not all of them do.
        matches: for families by rule: whether a config belongs, checked if no `model_types` match.
        stacks: of an encoder-decoder, the decoder last; they replace `attention`, `entry` and `table`. A stack whose
            entry is missing in a model (a decoder-only one) is skipped.
        kept: paths, from the base model, of position modules that are never swapped, or of modules around them.
        towers: candidate paths, from the base model, of the module that all other paths start from: in a multimodal
            model, its language model.
        note: a sentence for every plan of its models; "": none.
        position_source: what its stock classes count if they get no position ids; `stacks` have their own.

    Example:
        >>> paths = {"attention": "layers.*.attention", "table": TableSpec("positions")}
        >>> Family("cottage", "a learned table", model_types=("cottage",), **paths).table.path
        'positions'

        `hf_posswap.families` has an example of a registered family and a swap.
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
    turning_refused: Mapping[str, str] = field(default_factory=dict)
    rotates: Mapping[str, Callable[[nn.Module], bool]] = field(default_factory=dict)
    matches: Callable[[PreTrainedConfig], bool] | None = None
    stacks: tuple[StackSpec, ...] = ()
    kept: tuple[str, ...] = ()
    towers: tuple[str, ...] = ("",)
    note: str = ""
    position_source: PositionSource | SourceByConfig = "arange"

    @property
    def parts(self) -> tuple[StackSpec, ...]:
        """The stacks of its models: a single unnamed one if `stacks` is empty."""
        alone = StackSpec("", self.attention, self.entry, self.table, position_source=self.position_source)
        return self.stacks or (alone,)


def register(family: Family) -> Family:
    """Register `family` and return it; see `Family` for its fields.

    Args:
        family: with a unique name.

    Raises:
        DuplicateNameError: the name is taken.
    """
    return FAMILIES.add(family.name, family)
