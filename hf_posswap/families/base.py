"""Where positions are in a kind of Hugging Face model, as data.

A family lists the paths of the three sites of a model; `locating.locate` finds them in a model.
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
