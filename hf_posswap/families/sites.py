"""Where positions live in one model: the full paths of its sites, stack by stack."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posswap.families.base import Family, StackSpec, TableSpec
from hf_posswap.families.images import ImageSites
from hf_posswap.families.modules import join
from hf_posswap.families.own import NativeScheme
from hf_posswap.families.rope_config import reaching
from hf_posswap.geometry import Geometry


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
        image: where its table of patches is; None: it reads text.
        still: which of `attention`, counted from 0, do not rotate, in a stack whose other layers do.
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
    image: ImageSites | None = None
    still: tuple[int, ...] = ()

    @property
    def table_path(self) -> str | None:
        """Path of what holds the table: a module, or the parameter of one that sees images; None: it has no table."""
        return self.table if self.image is None else self.image.table

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
        if self.image is not None:
            return None
        if self.spec.own is not None and self.spec.table is None:
            return self.spec.own.length_name
        name = TableSpec.config_name if self.spec.table is None else self.spec.table.config_name
        return join(self.config, name)

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
