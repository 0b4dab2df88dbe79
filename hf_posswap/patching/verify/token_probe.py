"""A probe of tokens: positions shifted and spread, the past reversed; and whether the old mechanism is kept.

Where a model takes position ids, they are given. Where it counts tokens by itself (the BART kind), tokens that no other
one may see are put in front: they shift the rest.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import original_of
from hf_posswap.compat.transformers_loading import class_names
from hf_posswap.errors import SwapVerificationError
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary import MOVED_BY_SHIFT
from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.applied import AppliedSwap, applied_swap
from hf_posswap.patching.edits.restore import device_of, stored
from hf_posswap.patching.plan.plan_swap import all_in
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.attention.native import CopyRows, RemoveRows, native_scheme
from hf_posswap.patching.sites.attention.positions import PassPositionIds
from hf_posswap.patching.sites.embedding.table_edits import ReplaceTable, rows_name
from hf_posswap.patching.sites.rotary.edits import NeutraliseRotary, RebuildRotary
from hf_posswap.patching.sites.rotary.modules import matches_within
from hf_posswap.patching.verify.probe import Expected, NoEffectSeen, Noise, Probe, gap
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.layered import Layered
from hf_posswap.schemes.mechanism import Mechanism, by_head
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.schemes.sum import Native, Sum, SumMechanism, Together

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNTRAINED = "the scheme's bias is the same for all keys until it is trained"


@dataclass(frozen=True)
class TokenProbe(Probe):
    """Random tokens, and how the model takes them.

    Attributes:
        ids: random tokens [1, Q]; of both stacks, where a model has two.
        near: positions [1, Q] that count from the start.
        far: positions [1, Q] spread over the original length, so that slow angles show as well.
        position_argument: what the model calls its position ids; None: it takes none.
        passed_on: whether it takes them since it was swapped: its own code drops them.
        features: the input of an audio model instead of tokens, or None.
    """

    outputs: ClassVar[str] = "logits"
    ids: Tensor
    near: Tensor
    far: Tensor
    position_argument: str | None
    passed_on: bool
    features: Tensor | None

    def run(self, model: nn.Module) -> Tensor:
        return self.at(model, self.far)

    def again(self, model: PreTrainedModel) -> float:
        return gap(self.at(model, self.near), self.at(model, self.near))

    def moved(self, model: PreTrainedModel, noise: Noise) -> dict[str, str]:
        plan = applied_swap(model).plan
        return {
            "shifted positions": _shift(model, plan, self, noise),
            "spread positions": _spread(model, plan, self, noise),
            "order of tokens": _order(model, plan, self, noise),
        }

    def expected(self, model: PreTrainedModel) -> Expected:
        swap = applied_swap(model)
        stacks = [swap.plan.sites.stack(name) for name in swap.plan.schemes]
        at = self._compared - swap.plan.sites.first_position
        return "same" if all(is_kept(model, swap, stack, at) for stack in stacks) else "different"

    def comparable(self, model: PreTrainedModel) -> Tensor:
        return self.at(model, self._compared)

    @property
    def _compared(self) -> Tensor:
        """The positions at which the swapped model is compared with the unswapped one, which may drop others."""
        return self.near if self.passed_on else self.far

    def at(
        self, model: nn.Module, positions: Tensor, ids: Tensor | None = None, encoder_ids: Tensor | None = None
    ) -> Tensor:
        """Return the logits at `positions`, of `ids` where they are given; of two stacks, the last hidden states."""
        ids = self.ids if ids is None else ids
        given = {} if self.position_argument is None else {self.position_argument: positions}
        return self._outputs(model, ids, encoder_ids, torch.ones_like(ids), given)

    def shifted(self, model: nn.Module, by: int) -> Tensor:
        """Return what `at` does where every position is larger by `by`."""
        if self.position_argument is not None:
            return self.at(model, self.near + by)
        ids = torch.cat((self.ids[:, :1].expand(-1, by), self.ids), dim=1)  # [1, by + Q]
        mask = torch.ones_like(ids)
        mask[:, :by] = 0
        outputs = self._outputs(model, ids, ids, mask, {})
        is_pooled = outputs.ndim == 2 and outputs.shape == self.at(model, self.near).shape  # of the last token
        return outputs if is_pooled else outputs[:, by:]

    def _outputs(self, model: Any, ids: Tensor, other: Tensor | None, mask: Tensor, given: dict[str, Any]) -> Tensor:
        if not model.config.is_encoder_decoder:
            compare_texts = set(class_names("MULTIPLE_CHOICE").values())
            if compare_texts & {base.__name__ for base in type(model).__mro__}:
                model = model.base_model  # the head takes several texts
            out = model(input_ids=ids, attention_mask=mask, **given)
            return (out.logits if "logits" in out else out[0]).float()
        first = {"input_ids": self.ids if other is None else other, "attention_mask": mask}
        if self.features is not None:
            first = {"input_features": self.features}
        given = first | {"decoder_input_ids": ids, "decoder_attention_mask": mask} | given
        out = model.base_model(**given)  # T5 has no base model: it is its own
        return (out.last_hidden_state if "last_hidden_state" in out else out.logits).float()

    def reordered(self) -> Tensor:
        """Return the tokens with all but the last one reversed, [1, Q]."""
        return torch.cat((self.ids[:, :-1].flip(1), self.ids[:, -1:]), dim=1)


def token_probe(model: PreTrainedModel, tokens: int, seed: int) -> TokenProbe:
    """Return an input of `tokens` tokens, or as many as `model` was made for, of the seed `seed`."""
    generator = torch.Generator().manual_seed(seed)
    sites = applied_swap(model).plan.sites
    configs = (model.config, model.config.get_text_config(decoder=True))
    sizes = [getattr(config, name, None) for config in configs for name in ("vocab_size", "decoder_vocab_size")]
    vocabulary_size = min(size for size in sizes if size)
    longest = min(stack.geometry.original_length for stack in sites.stacks)
    tokens = min(tokens, longest)
    low = min(5, vocabulary_size - 2)  # leave special tokens (padding above all) out of the input
    device = device_of(model)
    ids = torch.randint(low, vocabulary_size, (1, tokens), generator=generator).to(device)
    near = torch.arange(tokens, device=device)[None]
    far = near * max(1, (longest - 1) // max(1, tokens - 1))
    first, argument = sites.first_position, _position_argument(model, sites.main)
    return TokenProbe(
        ids=ids,
        near=near + first,
        far=near + first if argument is None else far + first,
        position_argument=argument,
        passed_on=_passing_on(model, sites.main) is not None,
        features=_features(model, generator),
    )


def _position_argument(model: PreTrainedModel, main: Stack) -> str | None:
    """Return what the forward of `model` calls the position ids that reach its main stack."""
    parameters = inspect.signature(
        type(model.base_model if model.config.is_encoder_decoder else model).forward
    ).parameters
    if model.config.is_encoder_decoder:
        return "decoder_position_ids" if "decoder_position_ids" in parameters else None
    passing_on = _passing_on(model, main)
    if passing_on is not None and passing_on.refusal_text:
        return None
    if "position_ids" in parameters or passing_on is not None:
        return "position_ids"
    passes = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    entry = inspect.signature(type(model.get_submodule(main.entry)).forward).parameters
    return "position_ids" if passes and "position_ids" in entry else None


def _passing_on(model: PreTrainedModel, main: Stack) -> PassPositionIds | None:
    """Return what passes the position ids that `model` is given on to its main stack; None: its own code does."""
    edits = (edit for edit in applied_swap(model).plan.edits if edit.stack == main.name)
    return next((edit for edit in edits if isinstance(edit, PassPositionIds) and edit.entry is not None), None)


def _features(model: PreTrainedModel, generator: torch.Generator) -> Tensor | None:
    """Return random features [1, M, F] as long as a model that hears wants them, or None."""
    config = model.config
    if not config.is_encoder_decoder or getattr(model, "main_input_name", "input_ids") != "input_features":
        return None
    features = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    return features.to(device_of(model), model.dtype)


def _shift(model: PreTrainedModel, plan: SwapPlan, probe: TokenProbe, noise: Noise) -> str:
    """Shift all positions together: nothing may change under relative schemes, and something must under a table."""
    lengths = [stack.geometry.original_length for stack in plan.sites.stacks]
    for each in (inner for scheme in plan.schemes.values() for inner in all_in(scheme)):
        if getattr(each, "length_dependent", False):  # beyond its own original length it turns by other angles
            lengths.append(each.filled("original_length"))
    room = min(lengths) - probe.ids.shape[1]
    if room < 1:
        return "not run: the original length leaves no room"
    by, schemes = min(room, 64), plan.schemes.values()
    moved = gap(probe.shifted(model, by), probe.at(model, probe.near))
    # what keeps its table moves with it, unless the positions are given to the other stack alone
    whole = len(plan.schemes) == len(plan.sites.stacks) or probe.position_argument is not None
    types = [config_at(model.config, stack.config).model_type for stack in plan.sites.stacks]
    why = next((MOVED_BY_SHIFT[name] for name in types if name in MOVED_BY_SHIFT), None)
    if why is not None:
        return f"by {by}, the logits move by {moved:.3g}, as they did: {why}"
    if whole and all(scheme.traits.relative for scheme in schemes) and not noise.explains(moved, 10):
        raise SwapVerificationError(f"{plan.named}: shifting all positions by {by} moves the logits by {moved:.3g}.")
    if any(scheme.table_part is not None for scheme in schemes) and moved == 0:
        raise NoEffectSeen(f"{plan.named}: the logits do not depend on the position ids.")
    return f"by {by}, the logits move by {moved:.3g}"


def _spread(model: PreTrainedModel, plan: SwapPlan, probe: TokenProbe, noise: Noise) -> str:
    """Spread the positions: every mechanism must notice, but for one that knows none, or none yet."""
    if probe.position_argument is None:
        return "not run: the model takes no position ids"
    if torch.equal(probe.near, probe.far):
        return "not run: the original length leaves no room"
    blind = _blind(plan.scheme, plan.sites.main.geometry)
    moved = gap(probe.at(model, probe.far), probe.at(model, probe.near))
    if blind is not None and not blind.acts_inside and not noise.explains(moved):
        raise SwapVerificationError(f"{plan.scheme}: spreading the positions moves the logits by {moved:.3g}.")
    result = f"the logits move by {moved:.3g}"
    if moved > noise.least or blind is not None:
        return result
    if _is_even(model, probe):
        return f"{result}: {_UNTRAINED}"
    raise NoEffectSeen(f"{plan.scheme}: the logits do not depend on the position ids ({moved:.3g}).")


def _order(model: PreTrainedModel, plan: SwapPlan, probe: TokenProbe, noise: Noise) -> str:
    """Reverse the past of the last token, in each stack: it must notice, unless the scheme knows no positions."""
    here, results = probe.at(model, probe.near)[:, -1], []
    for name, scheme in plan.schemes.items():
        way = "encoder_ids" if name == "encoder" and model.config.is_encoder_decoder else "ids"
        moved = gap(here, probe.at(model, probe.near, **{way: probe.reordered()})[:, -1])
        stack_name = f"{name}: " if name and len(plan.schemes) > 1 else ""
        results.append(f"{stack_name}reversing the past moves the last logits by {moved:.3g}")
        if moved > noise.least or _blind(scheme, plan.sites.stack(name).geometry) is not None:
            continue
        if not _is_even(model, probe):
            raise NoEffectSeen(f"{scheme}: the logits do not depend on the order of the tokens ({moved:.3g}).")
        results[-1] += f": {_UNTRAINED}"
    return "; ".join(results)


def _blind(scheme: Scheme, geometry: Geometry) -> Scheme | None:
    """Return the scheme in force in a stack of `geometry` if it knows no positions in any layer, or None."""
    if isinstance(scheme, Blend) and scheme.weight == 1:
        scheme = scheme.new
    if isinstance(scheme, Layered):
        layers = [scheme.of_layer(layer) for layer in range(geometry.num_layers)]
        blind = all(layer.kind == "none" for layer in layers)
        return max(layers, key=lambda layer: layer.acts_inside) if blind else None
    return scheme if scheme.kind == "none" else None


def _is_even(model: nn.Module, probe: TokenProbe) -> bool:
    """Return whether `model` has a bias on its scores that is equal for all keys."""
    biases = [m.bias(probe.far, probe.far) for m in model.modules() if isinstance(m, Mechanism) and m.biases]
    return bool(biases) and all(torch.equal(bias, bias[..., :1].expand_as(bias)) for bias in biases)


def is_kept(model: PreTrainedModel, swap: AppliedSwap, stack: Stack, positions: Tensor) -> bool:
    """Return whether the scheme of `stack` is, within the original length, the mechanism that it had before.

    Args:
        model: swapped.
        swap: of it.
        stack: of it.
        positions: [1, Q], from 0: what a sum adds counts only if it does something there.
    """
    plan, geometry = swap.plan, stack.geometry
    scheme = _at_work(plan.schemes[stack.name], model, swap, stack, positions)
    if plan.record.relative == "drop":
        return False
    if isinstance(scheme, Blend) and scheme.weight == 0:
        return True
    if scheme.keeps_native:
        return isinstance(scheme, Native)  # else what is added to it changes it
    first = next(edit for edit in plan.edits if edit.stack == stack.name)
    if isinstance(first, ReplaceTable) and not scheme.acts_inside:
        before = swap.saved_of(ReplaceTable, first.path)["weight"]
        table = model.get_submodule(first.path)
        now = stored(table, rows_name(table))
        rows = min(len(before), len(now))
        return torch.equal(before[:rows].to(now), now[:rows])
    if stack.inside is not None:
        return (
            (stack.inside["name"] != "t5" or _holds_native_rows(model, swap, stack))
            and stack.table is None
            and _same_inside(scheme, native_scheme(stack.inside, geometry), geometry)
        )
    if not stack.rotary:
        return False
    rotary_edits = RebuildRotary, NeutraliseRotary
    natives = [
        saved["child"] for edit, saved in swap.done() if isinstance(edit, rotary_edits) and edit.stack == stack.name
    ]
    if isinstance(scheme, Layered):
        schemes = {scheme.of_layer(layer) for layer in range(geometry.num_layers)}
    else:
        schemes = {scheme.new if isinstance(scheme, Blend) else scheme}
    return all(_same_angles(native, each, stack) for native in natives for each in schemes)


def _holds_native_rows(model: PreTrainedModel, swap: AppliedSwap, stack: Stack) -> bool:
    """Return whether a table of the scheme of `stack` has the rows from which the same was made natively, untrained."""
    copies = [edit for edit in swap.plan.edits if isinstance(edit, CopyRows) and edit.stack == stack.name]
    for edit in copies:
        before = swap.saved_of(RemoveRows, edit.source)["child"].weight
        now = stored(model.get_submodule(edit.carried), "table")
        if not torch.equal(before.to(now), now):
            return False
    return bool(copies)


def _at_work(scheme: Scheme, model: nn.Module, swap: AppliedSwap, stack: Stack, positions: Tensor) -> Scheme:
    """Return `scheme` without what does nothing at `positions`: a bias of zeros, a query scale of 1."""
    table, within = (scheme.table, scheme.inside) if isinstance(scheme, Together) else (None, scheme)
    if table is None and not isinstance(scheme, Sum):
        return scheme
    added = within.added if isinstance(within, Sum) else (within,)
    path = next(e.path for e in swap.plan.edits if isinstance(e, AddMechanism) and e.stack == stack.name)
    whole: Any = model.get_submodule(path)  # or PEFT's wrapper, which gives what its active copy has
    terms: list[Any] = list(whole.terms) if isinstance(original_of(whole), SumMechanism) else [whole]
    left = [
        term
        for term, mechanism in zip(added, terms, strict=True)
        if not _does_nothing(mechanism, positions, stack.geometry)
    ]
    left = [term for term in (table, within.native if isinstance(within, Sum) else None) if term is not None] + left
    return left[0] if len(left) == 1 else scheme


def _does_nothing(mechanism: Mechanism, positions: Tensor, geometry: Geometry) -> bool:
    """Return whether `mechanism` changes no attention among tokens at `positions` [1, Q]."""
    if mechanism.turns:
        return False
    if mechanism.scales and bool((by_head(mechanism.scale(positions)) != 1).any()):
        return False
    if not mechanism.biases:
        return True
    bias = mechanism.bias(positions, positions)  # [1, H, Q, Q]
    hidden = positions[:, :, None] < positions[:, None, :] if geometry.causal else torch.zeros_like(bias[:, 0]).bool()
    return not bool(bias.masked_fill(hidden[:, None], 0.0).any())


def _same_angles(native: nn.Module, scheme: Scheme, stack: Stack) -> bool:
    """Return whether `native` rotates as `scheme` does within the original length."""
    if not isinstance(scheme, RotaryScheme):
        return False
    geometry = stack.geometry
    plain = scheme.native_rope(geometry) is not None and scheme.layout == (geometry.layout or scheme.layout)
    return plain and all(matches_within(native, scheme, geometry, name) for name in stack.full_attention_types)


def _same_inside(scheme: Scheme, native: Scheme, geometry: Geometry) -> bool:
    """Return whether `scheme` does within the original length what `native`, which was inside attention, does."""
    if scheme == native or not (isinstance(scheme, RotaryScheme) and isinstance(native, RotaryScheme)):
        return scheme == native
    new, old = scheme.angles(geometry), native.angles(geometry)
    alike = scheme.layout == native.layout and new.inv_freq.shape == old.inv_freq.shape
    plain = scheme.native_rope(geometry) is not None and new.attention_factor == old.attention_factor
    return alike and plain and torch.allclose(new.inv_freq, old.inv_freq, rtol=1e-5, atol=0)
