"""Input and output of planning one stack: a frozen context and a draft."""

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
    """The input of planning a site.

    Attributes:
        model: the transformers model, which is read and never changed; it may be on meta.
        sites: where its positions are.
        stack: the stack to plan.
        scheme: its new scheme, resolved.
        length: positions that the swapped model is meant for, in tokens.
        site: "auto" expresses the swap natively where it can be; "attention" always applies it inside attention.
        relative: whether to keep or drop relative positions that no scheme expresses; None: there are none.
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
        """The layer types whose native rotation the scheme replaces.

        A scheme that rotates q and k replaces it in layers that see all tokens; any other, in all rotary layers.
        """
        rotates = self.scheme.acts_inside and self.scheme.mechanism(self.geometry).turns
        return self.stack.full_attention_types if rotates else self.stack.rope_layer_types

    @property
    def model_name(self) -> str:
        """The name of the model in messages."""
        return type(self.model).__name__


@dataclass
class PlanDraft:
    """The result of one planning step; see `SwapPlan`.

    Attributes:
        edits: in order.
        values: config values by path.
        unused: disabled parameters by name, with their numbers of elements.
        added: new parameters by name, with their numbers of elements.
        notes: worth knowing.
        plugin: whether no stock config can express the swap.
        adaptation: the training that the model will need; "": unknown to this step.
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
