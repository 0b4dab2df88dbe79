"""Plans: what a swap would change, found without touching the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hf_posswap.errors import AlreadyPatchedError, OptionError, SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import Action
from hf_posswap.patching.inputs import refuse_length, refuse_other_input
from hf_posswap.patching.parts import refuse_part
from hf_posswap.patching.record import SwapRecord
from hf_posswap.patching.record_schema import LONGEST
from hf_posswap.patching.wrapped import refuse_missed, refuse_wrapped_parts, what_instead
from hf_posswap.schemes.base import Scheme, make_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SiteChoice = Literal["auto", "attention"]
RelativeChoice = Literal["keep", "drop"]
SchemeChoice = Scheme | str | Mapping[str, Any]
"""A scheme, its name, or a mapping of an encoder-decoder's stacks to schemes."""


@dataclass(frozen=True)
class Edit:
    """One change: where, from what, to what.

    Attributes:
        site: "embedding", "rotary", "attention" or "config".
        path: of the module (or the config value) it changes.
        before: what is there.
        after: what will be there.
        action: does it.
        stack: name of the stack that it is in.
    """

    site: str
    path: str
    before: str
    after: str
    action: Action = field(repr=False, compare=False)
    stack: str = ""


@dataclass(frozen=True)
class SwapPlan:
    """What `patch_model` will do, or did. `print(plan)` shows it as a table.

    Attributes:
        model: class name of the model.
        scheme: with every parameter that can be known before the weights are read; the decoder's, where a model has
            several stacks and it is swapped.
        schemes: that of every stack which is swapped, by the stack's name: "" where a model has one.
        edits: in order.
        route: "native": stock transformers will run the saved checkpoint; "plugin": only hf_posswap will.
        cached_equals_full: whether decoding with a cache gives what one full forward gives, at any length.
        unused: parameters of the model that the swap puts out of use, by name: their numbers of elements.
        added: parameters that the swap adds, by name: their numbers of elements.
        adaptation: what training the swapped model will need.
        max_length: positions the swapped model is meant for, in tokens.
        notes: anything else worth knowing.
        record: what will be written to `config.posswap`.
        sites: where the model's positions live.
    """

    model: str
    scheme: Scheme
    schemes: dict[str, Scheme]
    edits: tuple[Edit, ...]
    route: Literal["native", "plugin"]
    cached_equals_full: bool
    unused: dict[str, int]
    added: dict[str, int]
    adaptation: str
    max_length: int
    notes: tuple[str, ...]
    record: SwapRecord
    sites: Sites = field(repr=False)

    def __str__(self) -> str:
        from hf_posswap.patching.show import plan_table

        return plan_table(self)

    @property
    def unbounded(self) -> bool:
        """Whether the swapped model runs at any length."""
        return all(scheme.traits.unbounded for scheme in self.schemes.values())

    @property
    def named(self) -> str:
        """The scheme, or those of the stacks where they differ, as text."""
        if len(set(map(str, self.schemes.values()))) == 1:
            return str(self.scheme)
        return ", ".join(f"{stack}: {scheme}" for stack, scheme in self.schemes.items())

    @property
    def choice(self) -> Scheme | dict[str, Scheme]:
        """What `plan_swap` takes to make this plan again."""
        return self.schemes.get("", dict(self.schemes))

    def with_schemes(self, schemes: dict[str, Scheme]) -> SwapPlan:
        """Return the plan, and its record, with other schemes for the same stacks."""
        main = list(schemes.values())[-1]
        stacks = None if "" in schemes else {name: scheme.to_dict() for name, scheme in schemes.items()}
        record = replace(self.record, scheme=main.to_dict(), stacks=stacks)
        return replace(self, scheme=main, schemes=schemes, record=record)

    def place(self, edit: Edit) -> tuple[Scheme, Geometry]:
        """Return the scheme and the geometry of the stack in which `edit` lies."""
        return self.schemes[edit.stack], self.sites.stack(edit.stack).geometry

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {
            "model": self.model,
            "scheme": self.scheme.to_dict(),
            **({} if "" in self.schemes else {"stacks": {n: scheme.to_dict() for n, scheme in self.schemes.items()}}),
            "edits": [{k: getattr(e, k) for k in ("site", "path", "before", "after")} for e in self.edits],
            "route": self.route,
            "cached_equals_full": self.cached_equals_full,
            "unused": self.unused,
            "added": self.added,
            "adaptation": self.adaptation,
            "max_length": self.max_length,
            "notes": list(self.notes),
        }


def plan_swap(
    model: PreTrainedModel,
    scheme: SchemeChoice,
    *,
    max_length: int | None = None,
    site: SiteChoice = "auto",
    relative: RelativeChoice | None = None,
    **options: Any,
) -> SwapPlan:
    """Return what `patch_model` with the same arguments would do. The model is not touched; it may lie on meta.

    Args:
        model: a transformers model, or a PEFT model around one.
        scheme: an object, or a name with its fields as `options`; for an encoder-decoder also a mapping of its stacks
            to schemes, {"encoder": ..., "decoder": ...}: a stack that it leaves out keeps what it has.
        max_length: positions the swapped model is meant for, in tokens; None keeps the model's own (or what a given
            factor reaches).
        site: "auto" expresses the swap natively where it can be; "attention" always applies it inside attention.
        relative: whether DeBERTa's relative positions inside attention stay beside the scheme, "keep", or go, "drop";
            None keeps them, and is all that other models take.
        options: fields of the scheme, where it is given by name.

    Raises:
        UnsupportedSwapError: this scheme cannot be put into this model: why, and what would work.
        UnsupportedModelError: no family describes the model.
        SchemeError, OptionError, UnknownNameError: the scheme or its parameters are wrong.
        AlreadyPatchedError: the model carries a swap.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> plan = plan_swap(model, "rope", max_length=64)
        >>> plan.route, [edit.path for edit in plan.edits][:2]
        ('plugin', ['transformer.wpe', 'transformer.posswap'])
    """
    from hf_posswap.patching.planner import Planner  # which imports this module's classes
    from hf_posswap.patching.relative import relative_choice

    model = unwrap(model)
    carried: Any = getattr(model, "_posswap", None)
    if carried is not None:
        raise AlreadyPatchedError(
            f"{type(model).__name__} already carries {carried.plan.named}: call unpatch_model(model) first."
        )
    if site not in ("auto", "attention"):
        raise UnsupportedSwapError(f"site must be 'auto' or 'attention', got {site!r}.")
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1):
        raise SchemeError(f"max_length must be a whole number of tokens >= 1, got {max_length!r}.")
    refuse_wrapped_parts(model)
    refuse_part(model)
    sites = locate(model)
    refuse_missed(model, sites)
    chosen = choose(scheme, sites, options)
    for name, one in chosen.items():
        refuse_other_input(model, sites.stack(name), one)
        _refuse_two_sided(model, sites.stack(name), one)
    resolved = {name: one.resolve(sites.stack(name).geometry, max_length) for name, one in chosen.items()}
    for name, one in resolved.items():
        refuse_length(model, sites.stack(name), one, max_length)
    length = max_length or max(_length(one, sites.stack(name).geometry) for name, one in resolved.items())
    if length > LONGEST:
        raise SchemeError(
            f"{', '.join(map(str, resolved.values()))}: the model would be meant for {length} tokens; the most is "
            f"{LONGEST}. Give a smaller max_length or factor."
        )
    relative = relative_choice(model, sites, relative)
    return Planner(model, sites, resolved, length, site, relative).plan()


def choose(scheme: SchemeChoice, sites: Sites, options: dict[str, Any]) -> dict[str, Scheme]:
    """Return the scheme of every stack that is to be swapped, by the stack's name, the main stack's last.

    Raises:
        SchemeError: a mapping names a stack that the model does not have, or none.
        OptionError: options were given beside a mapping.
    """
    names = [stack.name for stack in sites.stacks]
    if not isinstance(scheme, Mapping) or not scheme or "name" in scheme or not all(isinstance(k, str) for k in scheme):
        one = make_scheme(scheme, **options)
        return dict.fromkeys(names, one)
    if options:
        raise OptionError(f"options {sorted(options)} were given beside schemes by stack: set them on the schemes.")
    unknown = [name for name in scheme if name not in names]
    if unknown or names == [""]:
        stacks = ", ".join(names) if names != [""] else "one stack only, without a name"
        raise SchemeError(f"schemes were given by stack, for {', '.join(scheme)}; this model has {stacks}.")
    return {name: make_scheme(scheme[name]) for name in names if name in scheme}


def _refuse_two_sided(model: Any, stack: Stack, scheme: Scheme) -> None:
    if stack.geometry.causal or not scheme.traits.causal_only or stack.image is not None:
        return
    whole = type(model).__name__
    raise UnsupportedSwapError(
        f"{scheme.name} needs a causal model; {f'the {stack.name} of ' if stack.name else ''}{whole} sees both sides. "
        "What works: rope, alibi, sinusoidal, learned"
        + (f'; or {{"decoder": "{scheme.name}"}}, which leaves the {stack.name} as it is.' if stack.name else ".")
    )


def _length(scheme: Scheme, geometry: Geometry) -> int:
    return scheme.reach(geometry) or geometry.original_length


def unwrap(model: Any) -> Any:
    """Return the transformers model inside `model`: itself, or the base of a PEFT model.

    Raises:
        UnsupportedSwapError: `model` is no transformers model, or a PEFT method that adds virtual tokens.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    configs = getattr(model, "peft_config", None)
    if configs is not None and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
            raise UnsupportedSwapError(
                "PEFT prompt learning adds tokens without positions of their own: not supported."
            )
        return unwrap(model.get_base_model())
    raise UnsupportedSwapError(
        f"expected a transformers PreTrainedModel (or a PEFT model around one), got {_named(model)}; "
        f"{what_instead(model)}."
    )


def _named(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
