"""Where positions live in one kind of Hugging Face model, as data: what a family states.

A family says at which paths the three sites of a model are; `locating.locate` finds them in one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn

from hf_posswap.families.attention_traits import AttentionTraits
from hf_posswap.families.images import ImageSpec
from hf_posswap.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PositionSource = Literal["arange", "mask", "input_ids", "relative"]
"""What a stock class counts where it is given no position ids:

- "arange": every token behind those in the cache, padding too;
- "mask": the tokens that the attention mask shows, by `cumsum(mask) - 1`;
- "input_ids": the tokens of the input that are no padding, by their ids;
- "relative": every token, to distances alone, so that padding on the left of a row shifts nothing.
"""
SourceByConfig = Callable[["PreTrainedConfig"], PositionSource]

FAMILIES: Registry[Family] = Registry("family", "hf_posswap.families")


@dataclass(frozen=True)
class TableSpec:
    """The additive position table of a family: an embedding, or sinusoids that a module computes for itself.

    Attributes:
        path: of the table, from the base model: of its module, or of a plain buffer [P, E] where it has none.
        offset: rows before position 0; "padding" is the padding index + 1 (RoBERTa).
        config_counts_offset: whether `config.max_position_embeddings` counts those rows too.
        buffers: buffers [1, P] or [P] with one entry a position, from the base model; they grow with the length.
        config_name: the config value that says how long the table is.
        kind: what stands in it.
        computed: whether its module makes its rows itself, at any length, as `weights` that no checkpoint holds.
        absent: of a config, whether a model has no such table; None: all have it.

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
        traits: what is peculiar to its attention; None: nothing is.
        image: how it makes tokens of an image; None: it reads text.
        position_source: what its stock class counts where it is given no position ids; or that, of a config.
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

    def counted_by(self, config: PreTrainedConfig) -> PositionSource:
        """Return what a stock model of `config` counts where it is given no position ids."""
        return self.position_source(config) if callable(self.position_source) else self.position_source


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
        turning_refused: why nothing that turns q and k can be, by model type; what adds a bias can.
        rotates: by model type, whether an attention module rotates q and k, where not all of them do.
        matches: for families by rule: whether a config belongs, asked after every `model_types` has missed.
        stacks: of an encoder-decoder, the decoder last; they say what `attention`, `entry` and `table` say of the
            others. A stack whose entry a model lacks (a decoder alone) is left out.
        kept: paths, from the base model, of position parts that are never swapped, or of what they all lie in.
        towers: paths, from the base model, where the part that all other paths count from may lie: in a model of
            several modalities, its language model.
        note: what every plan says of its models, as a sentence; "": nothing.
        position_source: what its stock classes count where they are given no position ids; of `stacks`, they say it.

    Example:
        >>> paths = {"attention": "layers.*.attention", "table": TableSpec("positions")}
        >>> Family("cottage", "a learned table", model_types=("cottage",), **paths).table.path
        'positions'

        `hf_posswap.families` has one that is registered, and a swap in it.
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
        """The stacks of its models: one without a name where it states none."""
        alone = StackSpec("", self.attention, self.entry, self.table, position_source=self.position_source)
        return self.stacks or (alone,)


def register(family: Family) -> Family:
    """Register `family`, and return it; see `Family` for what it states.

    Args:
        family: under a name that no other has.

    Raises:
        DuplicateNameError: the name is taken.
    """
    return FAMILIES.add(family.name, family)
