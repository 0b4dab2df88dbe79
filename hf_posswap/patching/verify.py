"""Proof that a swap took effect, and that nothing else changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import NotPatchedError, SwapVerificationError
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Stack
from hf_posswap.patching.actions import EditConfig
from hf_posswap.patching.attention_actions import AddMechanism, PatchAttention
from hf_posswap.patching.attention_hooks import PositionHook, StartHook
from hf_posswap.patching.config_view import ConfigView
from hf_posswap.patching.embedding import BlendedTable, LengthHook, NoPositions
from hf_posswap.patching.image_actions import RemoveGridTable, ReplaceGridTable
from hf_posswap.patching.interface import RemoveRows
from hf_posswap.patching.offloaded import stored
from hf_posswap.patching.relative import LeaveOut
from hf_posswap.patching.rotary import NeutralRotary, is_still, matches
from hf_posswap.patching.rotary_actions import NeutraliseRotary, RebuildRotary
from hf_posswap.patching.table_actions import BlendTable, GuardLength, RemoveTable, ReplaceTable
from hf_posswap.schemes.base import Mechanism, Scheme
from hf_posswap.schemes.rope import RotaryScheme

Fingerprint = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Verification:
    """What `verify_swap` found.

    Attributes:
        checks: each check by name: what was found.
    """

    checks: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(f"ok  {name}: {found}" for name, found in self.checks.items())


def fingerprint(model: Any) -> Fingerprint:
    """Return the identity and version of every parameter: cheap, and exact for one process."""
    return {name: (id(p), p._version if not p.is_inference() else 0) for name, p in model.named_parameters()}


def check_structure(model: Any) -> None:
    """Check that every edit of the plan stands in the model: no forward is run.

    Raises:
        SwapVerificationError: something is not as planned.
    """
    plan = model._posswap.plan
    for edit in plan.edits:
        problem = _problem(model, edit, plan)
        if problem:
            raise SwapVerificationError(f"{edit.path}: {problem}, so the swap to {plan.named} is not what it was.")
    if getattr(model.config, "posswap", None) is None:
        raise SwapVerificationError("config.posswap is gone: a checkpoint saved now would load as the native model.")


def check_untouched(model: Any, before: Fingerprint) -> None:
    """Check that no parameter but the table's and the mechanism's own differs from its `fingerprint` before the swap.

    Raises:
        SwapVerificationError: names those that do.
    """
    after = fingerprint(model)
    actions = [edit.action for edit in model._posswap.plan.edits]
    edited = [
        f"{a.path}."
        for a in actions
        if isinstance(a, RemoveTable | ReplaceTable | BlendTable | AddMechanism | RemoveRows | LeaveOut)
    ]
    edited += [a.path for a in actions if isinstance(a, ReplaceGridTable | RemoveGridTable)]
    names = before.keys() | after.keys()
    changed = sorted(n for n in names if before.get(n) != after.get(n) and not n.startswith(tuple(edited)))
    if changed:
        raise SwapVerificationError(f"parameters outside the plan changed: {', '.join(changed)}.")


def _problem(model: Any, edit: Any, plan: Any) -> str | None:
    """Return what is wrong where `edit` was carried out, or None."""
    action = edit.action
    if hasattr(action, "problem"):
        return action.problem(model)
    scheme, geometry = plan.place(edit)
    match action:
        case EditConfig(name, value):
            held = config_at(model.config, name)
            return None if held == value else f"the config says {held!r} instead of {value!r}"
        case GuardLength():
            guarded = _has_hook(model.get_submodule(action.entry), LengthHook)
            return None if guarded else "the hook that watches the length is gone"
        case ReplaceTable():
            return _table_problem(model.get_submodule(action.path), action)
        case RebuildRotary():
            return _rotary_problem(model.get_submodule(action.path), scheme, plan.sites.stack(edit.stack))
        case BlendTable():
            return _blend_problem(model.get_submodule(action.path), action)
        case AddMechanism():
            fresh = scheme.mechanism(geometry)
            return _mechanism_problem(model.get_submodule(action.path), fresh, model.get_submodule(action.entry))
    return _removal_problem(model.get_submodule(action.path), action)


def _removal_problem(module: Any, action: Any) -> str | None:
    if isinstance(action, RemoveTable) and not (isinstance(module, NoPositions) and module.is_empty):
        return "the position table is still there"
    if isinstance(action, NeutraliseRotary) and not isinstance(module, NeutralRotary):
        return "the native rotation is still active"
    if isinstance(action, PatchAttention):
        if not _has_hook(module, PositionHook) or not isinstance(module.config, ConfigView):
            return "the attention module does not carry the scheme"
    return None


def _has_hook(module: Any, kind: type) -> bool:
    return any(isinstance(hook, kind) for hook in module._forward_pre_hooks.values())


def _table_problem(embedding: Any, action: ReplaceTable) -> str | None:
    weight, scheme = stored(embedding, "old" if hasattr(embedding, "old") else "weight"), action.scheme
    if weight.shape[0] != action.rows + action.offset:
        return f"the table has {weight.shape[0]} rows instead of {action.rows + action.offset}"
    if weight.requires_grad and not scheme.trainable:
        return "the table is trainable where it should be frozen"
    if scheme.trainable or weight.is_meta:
        return None
    held = weight.detach()[action.offset :].cpu()
    same = torch.equal(held, scheme.table(held, action.rows, action.geometry).to(held.dtype))
    return None if same else "the table does not hold what its formula gives"


def _blend_problem(module: Any, action: BlendTable) -> str | None:
    if not isinstance(module, BlendedTable):
        return "the table is not in the blend"
    return None if module.share == action.share else f"the table fades by {module.share} instead of {action.share}"


def _rotary_problem(module: Any, scheme: Scheme, stack: Stack) -> str | None:
    if isinstance(scheme, RotaryScheme):
        good = all(matches(module, scheme, stack.geometry, name) for name in stack.turning)
    else:
        good = is_still(module)
    return None if good else "the rotary module does not have the planned frequencies"


def _mechanism_problem(carried: Any, fresh: Mechanism, entry: Any) -> str | None:
    mechanism = getattr(carried, "original_module", carried)  # PEFT wraps what it trains in full
    if type(mechanism) is not type(fresh):
        return f"a {type(mechanism).__name__} stands where a {type(fresh).__name__} should"
    held, expected = _constants(mechanism), _constants(fresh)
    wrong = [n for n in expected if n not in held or not torch.equal(held[n].cpu(), expected[n].cpu())]
    if wrong:
        return f"{', '.join(wrong)} of the mechanism changed"
    return None if _has_hook(entry, StartHook) else "the hook that keeps forwards apart is gone"


def _constants(mechanism: Mechanism) -> dict[str, Tensor]:
    """Return the constant tensors of a mechanism: angles, slopes."""
    found: dict[str, Tensor] = {}
    for path, module in mechanism.named_modules():
        for name, value in vars(module).items():
            parts = value if isinstance(value, tuple) else (value,)
            held = {f"{path}.{name}[{i}]": part for i, part in enumerate(parts) if isinstance(part, Tensor)}
            found |= {name.lstrip("."): part for name, part in held.items()}
    return found


def verify_swap(model: Any, *, tokens: int = 12, seed: int = 0) -> Verification:
    """Prove that the swap of `model` is in force: its structure, and its behaviour on a small random input.

    Checks that every edit of the plan stands, with the planned frequencies, slopes and frozen tables; that the logits
    differ from the unswapped model's, or are the same where the swap is an identity; that shifting all positions leaves
    a relative scheme's logits alone and moves a table's; that spreading them, or reversing the tokens, matters. Runs on
    a copy that shares the weights, so `model` itself is not touched. A model that sees images is given one of noise,
    whose patches are shuffled instead, and one of another size.

    Args:
        model: a patched model (or a PEFT model around one), off meta.
        tokens: length of the input, at least 2.
        seed: of the input.

    Raises:
        NotPatchedError: the model carries no swap.
        SwapVerificationError: a check failed: which, and by how much.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> _ = patch_model(model, "alibi")
        >>> list(verify_swap(model).checks)
        ['edits', 'finite', 'unswapped model', 'shifted positions', 'spread positions', 'order of tokens']
    """
    from hf_posswap.patching.behaviour import behaviour
    from hf_posswap.patching.image_behaviour import image_behaviour
    from hf_posswap.patching.plan import unwrap

    target = unwrap(model)
    if getattr(target, "_posswap", None) is None:
        raise NotPatchedError(f"{type(target).__name__} carries no swap: nothing to verify.")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise SwapVerificationError(f"tokens must be a whole number >= 2, got {tokens!r}.")
    check_structure(target)
    checks = {"edits": f"{len(target._posswap.plan.edits)} stand as planned"}
    if target._posswap.plan.sites.main.image is not None:
        return Verification(checks | image_behaviour(target, seed))
    return Verification(checks | behaviour(target, tokens, seed))
