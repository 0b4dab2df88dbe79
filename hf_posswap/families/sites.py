"""Where positions are in a model: the full paths of its sites, stack by stack."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from hf_posswap.families.base import FAMILIES, Family, NativeScheme, PositionSource, StackSpec, TableSpec
from hf_posswap.families.modules import join
from hf_posswap.families.rope_config import reaching
from hf_posswap.geometry import Geometry


@dataclass(frozen=True)
class TokenTable:
    """The position table of a stack that reads text: a row for each position.

    Attributes:
        path: of its module, or of the plain buffer [P, E] that it is.
        offset: rows before position 0.
        kind: the type of its rows.
        computed: whether its module computes the rows, at any length, and they are not in checkpoints.
    """

    path: str
    offset: int
    kind: Literal["learned", "sinusoidal"] = "learned"
    computed: bool = False


@dataclass(frozen=True)
class PatchTable:
    """The position table of a vision stack: one row per patch, after the rows of tokens that are not patches.

    Attributes:
        path: of the parameter [P, E] or [1, P, E] that holds it.
        embeddings: path of the module that turns an image into tokens.
        ids: path of the buffer with one entry a row, or None.
        square_config: whether the config can only express square images.
        square_head: whether the model's head assumes a square of patches.
    """

    path: str
    embeddings: str
    ids: str | None
    square_config: bool
    square_head: bool


@dataclass(frozen=True)
class Stack:
    """The full paths of the position sites of one stack of a model.

    Attributes:
        spec: the family data that describes the stack.
        entry: path of the module that takes input ids, position ids and the cache; or the image.
        attention: paths of the self-attention modules, in layer order.
        table: of positions, or of patches where the stack sees images; None: there is none.
        buffers: paths of the buffers with one entry a position.
        rotary: paths of the native rotary modules.
        geometry: of the stack.
        config: path of its sub-config; "": the whole config.
        rope_layer_types: layer types of native frequencies; see `rope_config`.
        inside: the native position mechanism inside attention, in the format of `Scheme.to_dict`; None: there is none.
        nope_layers: which of `attention`, counted from 0, do not rotate, in a stack whose other layers do.
        position_source: what its stock class counts if it gets no position ids.
    """

    spec: StackSpec
    entry: str
    attention: tuple[str, ...]
    table: TokenTable | PatchTable | None
    buffers: tuple[str, ...]
    rotary: tuple[str, ...]
    geometry: Geometry
    config: str = ""
    rope_layer_types: tuple[str, ...] = ()
    inside: NativeScheme | None = None
    nope_layers: tuple[int, ...] = ()
    position_source: PositionSource = "arange"

    @property
    def inputs(self) -> Literal["text", "images"]:
        """The input type of the stack."""
        return "images" if isinstance(self.table, PatchTable) else "text"

    def source_for(self, scheme: str) -> PositionSource:
        """Return what the stock class counts for the mechanism that `scheme` replaces or equals."""
        traits = self.spec.traits
        if traits is not None and traits.position_source is not None and self.inside is not None:
            return traits.position_source if self.inside["name"] == scheme else self.position_source
        return self.position_source

    @property
    def padding_id(self) -> int | None:
        """The id of padding tokens, if positions skip them; None: positions skip no tokens."""
        return self.table_offset - 1 if self.position_source == "input_ids" else None

    @property
    def table_path(self) -> str | None:
        """Path of the table; None: there is none."""
        return None if self.table is None else self.table.path

    @property
    def table_offset(self) -> int:
        """Rows of a table of tokens before position 0."""
        return self.table.offset if isinstance(self.table, TokenTable) else 0

    @property
    def first_row(self) -> int:
        """Rows of the table before those of positions, or of patches."""
        return self.geometry.prefix_tokens if isinstance(self.table, PatchTable) else self.table_offset

    @property
    def full_attention_types(self) -> tuple[str, ...]:
        """The rope layer types that a rotary scheme replaces: those of the layers that see all tokens."""
        return reaching(self.rope_layer_types)

    @property
    def name(self) -> str:
        """Its name for users and in records; "" if the model has only one stack."""
        return self.spec.name

    @property
    def first_position(self) -> int:
        """The value of the model's `position_ids` for position 0: if padding shifts the table, they count its rows."""
        return self.table_offset if self.spec.table is not None and self.spec.table.offset == "padding" else 0

    @property
    def config_name(self) -> str | None:
        """The path in the config of the value with the model's length; None: there is none."""
        if self.inputs == "images":
            return None
        if self.spec.traits is not None and self.spec.table is None:
            return self.spec.traits.length_name
        name = TableSpec.config_name if self.spec.table is None else self.spec.table.config_name
        return join(self.config, name)

    def config_length(self, length: int) -> int:
        """Return that config value for `length` tokens."""
        counts = self.spec.table is not None and self.spec.table.config_counts_offset
        return length + self.table_offset if counts else length


@dataclass(frozen=True)
class Sites:
    """Where positions are in a model: its stacks, of which most models have one.

    Its properties refer to the main stack: the only one, or the decoder.

    Attributes:
        family: of the model.
        base: path of the base model; "" if the model is one.
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
    def table_path(self) -> str | None:
        """Path of the main stack's table, or None."""
        return self.main.table_path

    @property
    def table_offset(self) -> int:
        """Rows of the main stack's table before position 0."""
        return self.main.table_offset

    @property
    def first_position(self) -> int:
        """The value of the main stack's `position_ids` for position 0."""
        return self.main.first_position

    @property
    def rotary(self) -> tuple[str, ...]:
        """Paths of the main stack's native rotary modules."""
        return self.main.rotary

    @property
    def geometry(self) -> Geometry:
        """The geometry of the main stack."""
        return self.main.geometry

    def to_dict(self) -> dict[str, object]:
        """Return the sites as plain values; families are known by their names."""
        return {"family": self.family.name, "base": self.base, "stacks": tuple(map(_stack_to_dict, self.stacks))}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sites:
        """Return the sites that `to_dict` wrote."""
        family = FAMILIES.get(values["family"])
        return cls(family, values["base"], tuple(_stack_from_dict(family, stack) for stack in values["stacks"]))


def _stack_to_dict(stack: Stack) -> dict[str, object]:
    plain = {field.name: getattr(stack, field.name) for field in fields(stack) if field.name not in ("spec", "table")}
    table = None
    if stack.table is not None:
        table = {"kind": type(stack.table).__name__, "fields": dataclasses.asdict(stack.table)}
    return plain | {"name": stack.name, "table": table}


def _stack_from_dict(family: Family, values: dict[str, Any]) -> Stack:
    spec = next(candidate for candidate in family.parts if candidate.name == values["name"])
    table, classes = values["table"], {"TokenTable": TokenTable, "PatchTable": PatchTable}
    if table is None:
        spec = replace(spec, table=None)
    restored = None if table is None else classes[table["kind"]](**table["fields"])
    plain = {name: value for name, value in values.items() if name not in ("name", "table")}
    return Stack(spec=spec, table=restored, **plain)
