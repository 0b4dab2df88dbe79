"""What planning one stack is given, and what it gives: a frozen context and a draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import Edit
from hf_posswap.schemes.base import Scheme

SiteChoice = Literal["auto", "attention"]
RelativeChoice = Literal["keep", "drop"]


@dataclass(frozen=True)
class SwapContext:
    """All that a site's planning may ask.

    Attributes:
        model: the transformers model, which is read and never touched; it may lie on meta.
        sites: where its positions live.
        stack: for which the site plans.
        scheme: that is to be put into it, resolved.
        length: positions that the swapped model is meant for, in tokens.
        site: "auto" expresses the swap natively where it can be; "attention" always applies it inside attention.
        relative: what becomes of positions inside attention that are no scheme; None: there are none.
    """

    model: Any
    sites: Sites
    stack: Stack
    scheme: Scheme
    length: int
    site: SiteChoice = "auto"
    relative: RelativeChoice | None = None

    @property
    def geometry(self) -> Geometry:
        """The shape of the stack, as the scheme sees it."""
        return self.stack.geometry

    @property
    def replaced_types(self) -> tuple[str, ...]:
        """The types of layers in the place of whose native rotation the scheme comes.

        What rotates q and k is for the layers that see all tokens; what does something else is for all that rotated.
        """
        rotates = self.scheme.acts_inside and self.scheme.mechanism(self.geometry).turns
        return self.stack.full_attention_types if rotates else self.stack.rope_layer_types

    @property
    def model_name(self) -> str:
        """How messages call the model."""
        return type(self.model).__name__


@dataclass
class PlanDraft:
    """What one part of the planning has to say: see `SwapPlan`.

    Attributes:
        edits: in order.
        values: config values, by their paths.
        unused: parameters put out of use, by name: their numbers of elements.
        added: parameters added, by name: their numbers of elements.
        notes: worth knowing.
        plugin: whether no stock config can say it.
        adaptation: what training the model will need; "": this part does not know.
    """

    edits: list[Edit] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    plugin: bool = False
    adaptation: str = ""

    def __add__(self, other: PlanDraft) -> PlanDraft:
        return PlanDraft(
            edits=self.edits + other.edits,
            values=self.values | other.values,
            unused=self.unused | other.unused,
            added=self.added | other.added,
            notes=self.notes + other.notes,
            plugin=self.plugin or other.plugin,
            adaptation=self.adaptation or other.adaptation,
        )
