"""Proof that a swap took effect, and that nothing else changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.compat.torch_modules import unchanged
from hf_posswap.errors import NotPatchedError, SwapVerificationError
from hf_posswap.patching.apply.structure import check_structure, unread_record
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.verify.behaviour import behaviour
from hf_posswap.utils import html_tables
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class Verification(ResultView):
    """What `verify_swap` found.

    Attributes:
        checks: each check by name: what was found.
    """

    checks: dict[str, str]

    def _repr_facts(self) -> dict[str, Any]:
        return {"passed": list(self.checks)} if len(self.checks) < 5 else {"passed": len(self.checks)}

    def __str__(self) -> str:
        return in_lines(f"ok  {name}: {result}" for name, result in self.checks.items())

    def _repr_html_(self) -> str:
        return html_tables.together(
            [html_tables.table((f"ok  {name}", result) for name, result in self.checks.items())]
        )


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
        >>> model = patch_model(model, "alibi")
        >>> list(verify_swap(model).checks)
        ['edits', 'finite', 'unswapped model', 'shifted positions', 'spread positions', 'order of tokens']
    """
    target = unwrap(model)
    if getattr(target, "_posswap", None) is None:
        raise NotPatchedError(f"{type(target).__name__} carries no swap: nothing to verify.{unread_record(target)}")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise SwapVerificationError(f"tokens must be a whole number >= 2, got {tokens!r}.")
    check_structure(target)
    checks = {"edits": f"{len(target._posswap.plan.edits)} stand as planned"}
    with unchanged(target):  # a copy shares buffers, and longrope writes its angles into one
        return Verification(checks | behaviour(target, tokens, seed))
