"""Working out a plan: which edits put one resolved scheme into one model."""

from __future__ import annotations

from typing import Any, Literal

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import Action, EditConfig, SetAttribute
from hf_posswap.patching.attention_actions import AddMechanism, PatchAttention
from hf_posswap.patching.choosing import let_choose
from hf_posswap.patching.following import followed, saved_tables
from hf_posswap.patching.image_actions import PatchImageAttention, TellPlaces
from hf_posswap.patching.image_plan import image_plan, kept_or_resized
from hf_posswap.patching.inside import refuse_inside, refuse_positions_elsewhere, refuse_without_effect, turns
from hf_posswap.patching.interface import AttendThroughInterface, CopyRows, RemoveRows
from hf_posswap.patching.offloaded import KEPT_IN_MEMORY, offloaded_tables
from hf_posswap.patching.own_attention import native_scheme, ready_edits, rows_of
from hf_posswap.patching.plan import Edit, RelativeChoice, SiteChoice, SwapPlan
from hf_posswap.patching.positions import ForwardMemo
from hf_posswap.patching.record import SwapRecord
from hf_posswap.patching.relative import parameters_left_out, relative_edits, relative_part
from hf_posswap.patching.rotary import Scalar
from hf_posswap.patching.rotary_actions import NeutraliseRotary, RebuildRotary
from hf_posswap.patching.rotary_plan import keeping, native_swap, neutral_values
from hf_posswap.patching.show import brief
from hf_posswap.patching.table_actions import BlendTable, GuardLength, RemoveTable, ReplaceTable
from hf_posswap.patching.table_buffer import RemoveTableBuffer
from hf_posswap.patching.told import HandOn, hand_on, refuse_unclaimed
from hf_posswap.patching.wording import adaptation_of, effect_of
from hf_posswap.patching.wrapped import refuse_written
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.table import TableScheme


class Planner:
    """Collects the edits for one model and a resolved scheme for each of its stacks, one stack after another."""

    stack: Stack
    scheme: Scheme
    geometry: Geometry

    def __init__(
        self,
        model: Any,
        sites: Sites,
        schemes: dict[str, Scheme],
        length: int,
        site: SiteChoice,
        relative: RelativeChoice | None = None,
    ) -> None:
        self.model, self.sites, self.schemes, self.length, self.site = model, sites, schemes, length, site
        self.relative = relative
        self.edits: list[Edit] = []
        self.values: dict[str, Any] = {}
        self.unused: dict[str, int] = {}
        self.added: dict[str, int] = {}
        self.notes: list[str] = []
        self.route: Literal["native", "plugin"] = "native"

    def plan(self) -> SwapPlan:
        adaptation: dict[str, str] = {}
        for stack in self.sites.stacks:
            if stack.name in self.schemes:
                self.stack, self.scheme, self.geometry = stack, self.schemes[stack.name], stack.geometry
                self._of_stack() if stack.image is None else self._image()
                what = self._relative() or kept_or_resized(self.scheme, self.geometry) or self._adaptation()
                adaptation.setdefault(what, stack.name)
        self._left_alone()
        self._follow_length()
        self._config()
        self._hand_on()
        self._let_choose()
        self.notes += map(KEPT_IN_MEMORY.format, offloaded_tables(self.model, self.edits))
        several = len(adaptation) > 1
        notes = dict.fromkeys(note for scheme in self.schemes.values() for note in scheme.notes())
        return SwapPlan(
            model=type(self.model).__name__,
            scheme=self.scheme,
            schemes=self.schemes,
            edits=tuple(self.edits),
            route=self.route,
            cached_equals_full=all(scheme.traits.prefix_consistent for scheme in self.schemes.values()),
            unused=self.unused,
            added=self.added,
            adaptation="; ".join(f"{name}: {what}" if several else what for what, name in adaptation.items()),
            max_length=self.length,
            notes=(*self.notes, *notes),
            record=self._record(),
            sites=self.sites,
        )

    def _of_stack(self) -> None:
        scheme = self.scheme
        if self.stack.config_name is not None:
            self.values[self.stack.config_name] = self.stack.config_length(self.length)
        if isinstance(scheme, Blend):
            self._blend(scheme)
        elif scheme.table_part is not None:
            self._table(scheme.table_part)
            if scheme.acts_inside:
                self._conceal(scheme.table_part)
                self._attention()
                self._clear_rows()
        elif self.stack.inside is not None:
            self._inside()
        elif self.stack.rotary:
            self._rotary_family()
        elif not scheme.acts_inside and self.site == "auto":
            self._drop_table(rows=self.length + self.stack.table_offset)
        else:
            self._drop_table(rows=None)
            self._attention()
        own = self.stack.spec.own
        if own is not None and own.ends and (self.length > self.geometry.original_length or not scheme.table_part):
            self._ready(native_positions=True)  # a causal mask of the original length does not go on

    def _image(self) -> None:
        """Plan what a model that sees images needs: for its table, for other image sizes, inside its attention."""
        draft = image_plan(self.model, self.sites, self.stack, self.scheme, self.site)
        for edit in draft.edits:
            self._edit(*edit)
        self.values |= draft.values
        self.unused |= draft.unused
        self.added |= draft.added
        self.notes += draft.notes
        if self.scheme.acts_inside:
            self._attention()

    def _relative(self) -> str:
        """Plan what becomes of positions inside attention that are no scheme; return what training it needs, or ""."""
        part = None if self.relative is None else relative_part(self.model, self.stack)
        if part is None:
            return ""
        if self.relative == "keep":
            self.notes.append('Its relative positions stay beside the scheme; relative="drop" takes them away.')
            return ""
        for edit in relative_edits(self.model, part, self.sites.base):
            self._edit("attention", *edit)
        self.unused |= parameters_left_out(self.model, self.edits)
        self.values[part.config_name] = False
        return "required: the weights have never been without their relative positions"

    def _left_alone(self) -> None:
        """Note the stacks that keep what they have; where their tables end elsewhere, no config can say both."""
        self.notes += [self.sites.family.note] if self.sites.family.note else []
        for stack in self.sites.stacks:
            if stack.name in self.schemes:
                continue
            self.notes.append(f"The {stack.name} keeps its positions, {stack.geometry.original_length} of them.")
            own = stack.config_length(stack.geometry.original_length)
            if stack.config_name is not None and self.values.get(stack.config_name, own) != own:
                self.route = "plugin"

    def _follow_length(self) -> None:
        """Plan what a stock model of the new length has otherwise, outside its tables."""
        unread = {edit.path for edit in self.edits if isinstance(edit.action, AttendThroughInterface)}
        found, same_weights = followed(self.model, self.sites, self.values, unread)
        if not same_weights:
            self.route = "plugin"
            self.notes.append("Stock transformers would change other weights with the length.")
        for edit in (*saved_tables(self.model, self.sites), *found):
            self._edit(*edit)

    def _hand_on(self) -> None:
        """Plan that position ids are obeyed or refused which the model's own code drops without a word."""
        found: list[tuple[str, HandOn | None]] = []
        for stack in self.sites.stacks:
            scheme = self.schemes.get(stack.name)
            if scheme is not None and scheme.kind == "none":
                continue  # it has no positions
            counts = scheme is None or scheme.table_part is not None or not scheme.acts_inside
            if isinstance(scheme, Blend):
                counts = stack.table is not None
            found.append((stack.name, hand_on(self.model, stack, counts=counts, native=self.route == "native")))
        found.append((self.sites.main.name, refuse_unclaimed(self.model, self.sites)))
        for name, action in found:
            if action is not None:
                where, after = action.entry or "(model)", "refused" if action.refusal else "handed on"
                self.edits.append(Edit("attention", where, "drops position ids", after, action, name))

    def _let_choose(self) -> None:
        """Plan that one can choose how a model attends that was given the interface."""
        action = let_choose(self.model, self.sites, self.edits)
        if action is None:
            return
        ways = "eager or sdpa" if action.sdpa else "eager alone"
        self._edit("attention", "(model)", "attends as its class does", f"attends as is chosen: {ways}", action)
        self.notes.append(
            f"set_attn_implementation: {ways}. The stock class ignores it, with a warning; flash and flex are refused."
        )

    def _edit(self, site: str, path: str, before: str, after: str, action: Action) -> None:
        self.edits.append(Edit(site, path, before, after, action, self.stack.name))

    def _table(self, scheme: TableScheme) -> None:
        path = self.stack.table
        if path is None or self.site == "attention":
            raise UnsupportedSwapError(
                f"{scheme.name} needs a position table to stand in, and {type(self.model).__name__} "
                + ("has none" if path is None else "was asked for at the attention site")
                + ". What works: rope and its scalings, alibi, nope."
            )
        self._refuse_computed(scheme)
        refuse_written(path, self.model.get_submodule(path), scheme.name)
        rows = scheme.rows(self.geometry, self.length)
        replace = ReplaceTable(path, scheme, rows, self.stack.table_offset, self.geometry)
        self._edit("embedding", path, self._table_before(), f"{scheme.name}, {rows} positions", replace)
        self._guard(capacity=rows)
        grown = (rows - self.geometry.original_length) * self.geometry.row_width
        if grown > 0 and scheme.trainable:
            self.added[f"{path}.weight (new rows)"] = grown

    def _conceal(self, scheme: TableScheme) -> None:
        """Plan a table that is kept beside another mechanism under a name that stock classes do not know."""
        path = self.stack.table
        assert path is not None
        conceal = BlendTable(path, None, 0.0, self.stack.table_offset, self.geometry)
        self._edit("embedding", path, f"{path}.weight", f"{path}.old, unknown to stock classes", conceal)
        rows = scheme.rows(self.geometry, self.length) + self.stack.table_offset
        self.unused[f"{path}.weight"] = self.model.get_submodule(path).weight.numel()
        self.added.pop(f"{path}.weight (new rows)", None)
        self.added[f"{path}.old"] = rows * self.geometry.row_width

    def _drop_table(self, rows: int | None) -> None:
        path = self.stack.table
        if path is None:  # the model has no table: its positions are inside attention
            return self._guard(capacity=None)
        if self._is_computed:  # no checkpoint holds it, so stock classes would not miss it
            rows, self.route = None, "plugin"
        else:
            self.unused[f"{path}.weight"] = self.model.get_submodule(path).weight.numel()
        owner, _, leaf = path.rpartition(".")
        is_buffer = leaf in self.model.get_submodule(owner)._buffers
        remove = RemoveTableBuffer(path) if is_buffer else RemoveTable(path, rows, self._is_computed)
        self._edit("embedding", path, self._table_before(), "nothing added", remove)
        self._guard(capacity=None)

    @property
    def _is_computed(self) -> bool:
        return self.stack.spec.table is not None and self.stack.spec.table.computed

    def _table_before(self) -> str:
        spec = self.stack.spec.table
        assert spec is not None
        return f"{spec.kind} table, {self.geometry.original_length} positions"

    def _refuse_computed(self, scheme: Scheme) -> None:
        if self._is_computed:
            raise UnsupportedSwapError(
                f"{scheme.name} needs a table that checkpoints hold, and {type(self.model).__name__} computes its "
                "sinusoids itself, for any length, and saves none. What works: rope and its scalings, alibi."
            )

    def _guard(self, capacity: int | None) -> None:
        stack = self.stack
        guard = GuardLength(stack.entry, capacity, stack.table_offset, stack.first_position, stack.buffers, self.length)
        if capacity is None and not self.stack.buffers:
            return
        after = f"a clear error past {capacity} positions" if capacity else "buffers that grow with the length"
        self._edit("embedding", self.stack.entry or "(model)", "no length check", after, guard)

    def _rotary_family(self) -> None:
        if not self.scheme.acts_inside:
            refuse_positions_elsewhere(self.model, self.stack, self.scheme)
        native = None if self.site == "attention" else native_swap(self.model, self.stack, self.scheme, self.length)
        before = f"rope, theta {self.geometry.base:g}, {self.geometry.rotary_dim} of {self.geometry.head_dim} dims"
        if native is not None:
            part = config_at(native.trial, self.stack.config)
            for path in self.stack.rotary:
                self._edit("rotary", path, before, self.scheme.name, RebuildRotary(path, part, self.stack.config))
            self._settings(native.settings)
            self.values |= native.values
            self.notes += native.notes
            return
        self._neutralise()
        self._attention()

    def _blend(self, scheme: Blend) -> None:
        if self.stack.inside is not None:
            native = native_scheme(self.stack.inside, self.geometry).name
            raise UnsupportedSwapError(
                f"{scheme.name} cannot fade the {native} that is native inside the attention of "
                f"{type(self.model).__name__}: it is there, or it is not. What works: {scheme.new.name} by itself."
            )
        table, path = scheme.new.table_part, self.stack.table
        self._refuse_computed(scheme)
        if path is None:
            if table is not None:
                self._table(table)  # which says that there is none
            self._neutralise()
        else:
            if table is not None and self.site == "attention":
                self._table(table)  # which says that it is not there
            if table is not None and table.rows(self.geometry, self.length) != self.geometry.original_length:
                raise UnsupportedSwapError(f"{scheme}: both tables must have the same number of positions.")
            refuse_written(path, self.model.get_submodule(path), scheme.name)
            rows = self.model.get_submodule(path).weight.numel()
            blend = BlendTable(path, table, scheme.weight, self.stack.table_offset, self.geometry)
            after = "faded" if table is None else f"blended with {table.name}"
            self._edit("embedding", path, self._table_before(), after, blend)
            self.unused[f"{path}.weight"] = rows
            self.added[f"{path}.old"] = rows
            if table is not None and table.trainable:
                self.added[f"{path}.new"] = self.geometry.original_length * self.geometry.row_width
            self._guard(capacity=self.geometry.original_length)
        if path is None or scheme.new.acts_inside:
            self._attention()
        self.route = "plugin"

    def _inside(self) -> None:
        """Plan a mechanism in the place of one that is native inside attention, and of the table beside it."""
        if self.stack.table is not None:
            self._drop_table(rows=None)
        if self._zeros_say_it:
            return self._clear_rows(native=True)
        self._attention()
        self._clear_rows()

    @property
    def _zeros_say_it(self) -> bool:
        """Whether a stock model with rows of zeros does what the scheme does: a bias of zero is none."""
        biased = bool(self._rows) and (self.stack.inside or {}).get("name") == "t5"
        return biased and self.scheme.kind == "none" and not self.scheme.acts_inside and self.site == "auto"

    def _clear_rows(self, *, native: bool = False) -> None:
        """Plan that the rows go from which the mechanism native inside attention was made."""
        for path in self._rows:
            embedding = self.model.get_submodule(path)
            before = f"{embedding.weight.shape[0]} rows"
            self._edit("attention", path, before, "nothing added", RemoveRows(path, native=native))
            self.unused[f"{path}.weight"] = embedding.weight.numel()

    @property
    def _rows(self) -> list[str]:
        return rows_of(self.model, self.stack, self.sites.base)

    @property
    def _is_native(self) -> bool:
        """Whether the scheme is the one that is native inside attention."""
        inside = self.stack.inside
        return inside is not None and self.scheme == native_scheme(inside, self.geometry)

    def _ready(self, *, native_positions: bool) -> None:
        """Plan attention classes with the interface where the model's own lack it, once."""
        done = [edit.stack for edit in self.edits if isinstance(edit.action, AttendThroughInterface)]
        if self.stack.name in done:
            return
        for edit in ready_edits(self.model, self.stack, self.sites.base, native_positions=native_positions):
            self._edit("attention", *edit)

    def _neutralise(self) -> None:
        """Plan native rotary modules that rotate by nothing, and a config that stock transformers refuses."""
        before = f"rope, theta {self.geometry.base:g}, {self.geometry.rotary_dim} of {self.geometry.head_dim} dims"
        own, sets = config_at(self.model.config, self.stack.config), self._sets()
        where = f" in layers of type {', '.join(sets)}" if sets != self.stack.sets else ""
        for path in self.stack.rotary:
            neutralise = NeutraliseRotary(path, own, sets)
            self._edit("rotary", path, before, f"rotates by nothing{where}", neutralise)
        self.values |= neutral_values(self.model, self.stack, sets)
        self.notes += keeping(self.stack, sets)

    def _sets(self) -> tuple[str, ...]:
        """Return the sets of native frequencies in whose place the scheme comes.

        What turns q and k is for the layers that see all tokens; what does something else is for all that turned.
        """
        turning = self.scheme.acts_inside and turns(self.scheme.mechanism(self.geometry))
        return self.stack.turning if turning else self.stack.sets

    def _reached(self) -> list[tuple[int, str]]:
        """Return index and path of the attention layers where the scheme acts: those whose rotation it replaces."""
        layers = [(i, path) for i, path in enumerate(self.stack.attention) if i not in self.stack.still]
        if not self.stack.rotary or self.stack.sets == ("",):
            return layers
        types, sets = config_at(self.model.config, self.stack.config).layer_types, self._sets()
        return [(i, path) for i, path in layers if types[self.model.get_submodule(path).layer_idx] in sets]

    def _settings(self, changed: list[tuple[str, str, Scalar, Scalar]]) -> None:
        """Plan what a fresh model of the new config has otherwise, outside its rotary modules."""
        for path, name, old, new in changed:
            edit = SetAttribute(path, name, old, new)
            self._edit("rotary", f"{path}.{name}".lstrip("."), brief(old), brief(new), edit)

    def _attention(self) -> None:
        self.route = "plugin"
        if self.scheme.acts_inside or self.stack.inside is not None:
            self._ready(native_positions=self.stack.inside is None)
        if not self.scheme.acts_inside:
            return
        mechanism, memo = self.scheme.mechanism(self.geometry), ForwardMemo(drops_bias=bool(self._rows))
        refuse_inside(self.model, self.sites, self.stack, self.scheme, mechanism)
        refuse_without_effect(self.model, self.stack, self.scheme, [layer for layer, _ in self._reached()])
        owner = self.stack.entry if self.stack.name else self.sites.base
        where = ".".join(part for part in (owner, "posswap") if part)
        add = AddMechanism(where, self.stack.entry, mechanism, memo)
        self._edit("attention", where, "-", self.scheme.name, add)
        if self.stack.image is not None:
            tell = TellPlaces(self.stack.entry, self.geometry)
            self._edit("attention", self.stack.entry or "(model)", "-", "tells attention the places of patches", tell)
        kind = PatchAttention if self.stack.image is None else PatchImageAttention
        for layer, path in self._reached():
            patch = kind(path, where, memo, self.stack.first_position, layer)
            effect = effect_of(mechanism.for_layer(layer), cached=self.stack.image is None)
            self._edit("attention", path, "raw q and k", effect, patch)
        self.added |= {f"{where}.{name}": p.numel() for name, p in mechanism.named_parameters()}
        if self._is_native and self.scheme.name == "t5" and len(self._rows) == 1:
            copy_rows = CopyRows(self._rows[0], where)
            self._edit("attention", f"{where}.table", "zeros", f"the rows of {self._rows[0]}", copy_rows)

    def _config(self) -> None:
        for name, value in self.values.items():
            before = config_at(self.model.config, name)
            edit = EditConfig(name, value)
            if before != value:
                self._edit("config", name, brief(before), brief(value), edit)

    def _adaptation(self) -> str:
        same = self._is_native and self.stack.table is None and len(self._rows) < 2
        return adaptation_of(self.scheme, self.stack, self.length, same=same)

    def _record(self) -> SwapRecord:
        original = {name: config_at(self.model.config, name) for name in self.values}
        return SwapRecord(
            scheme=self.scheme.to_dict(),
            route=self.route,
            base_type=self.model.config.model_type,
            max_length=self.length,
            site=self.site,
            original=original,
            stacks={name: scheme.to_dict() for name, scheme in self.schemes.items()} if self.stack.name else None,
            relative=self.relative,
        )
