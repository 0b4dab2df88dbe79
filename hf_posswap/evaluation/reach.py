"""The lengths that a model can run, and whether one forward gives the loss of every prefix, from its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import UnsupportedModelError
from hf_posswap.patching.inspect.describe import describe_positions
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope")  # rope types whose frequencies depend on the total length


@dataclass(frozen=True, repr=False)
class Reach(ResultView):
    """The lengths that a model can run.

    Attributes:
        limit: maximum number of tokens, beyond which it raises an error; None: any length.
        window: original window in tokens, before any swap.
        prefix_consistent: whether logits at t depend only on tokens up to t, not on the total length: then one forward
            gives the losses of every prefix, and a chunked prefill with a cache equals a full one.
        why: the reason for `prefix_consistent`.
        causal: whether tokens attend only to earlier tokens.
    """

    limit: int | None
    window: int
    prefix_consistent: bool
    why: str
    causal: bool = True


def reach_of(model: PreTrainedModel) -> Reach:
    """Return the lengths that `model` can run, and whether one forward serves every length.

    The plan of a swapped model declares it (`SwapPlan.cached_equals_full`), for an unswapped one the rope type does. A
    model without a family gets one forward per length.

    Args:
        model: a transformers model, patched or not.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
        >>> reach_of(model)
        Reach(limit=8, window=8, prefix_consistent=True, why='a learned table', causal=True)
    """
    model = unwrap(model)
    patch: Any = getattr(model, "_posswap", None)
    if patch is not None:
        plan = patch.plan
        limit = None if plan.unbounded else plan.max_length
        g = plan.sites.geometry
        return Reach(limit, g.original_length, plan.cached_equals_full and g.causal, "the plan of its swap", g.causal)
    try:
        report = describe_positions(model)
    except UnsupportedModelError:
        return Reach(None, _configured_length(model), False, "no family describes it", bool(model.can_generate()))
    causal = report.geometry.causal
    if report.sites["embedding"] != "-":
        return Reach(report.limit, report.limit, causal, "a learned table", causal)
    types = _rope_types(model.config)
    length_dependent = sorted(types & set(_LENGTH_DEPENDENT_TYPES))
    types_text = ", ".join(length_dependent or sorted(types)) or "default"
    return Reach(None, report.limit, causal and not length_dependent, f"rope type {types_text}", causal)


def _configured_length(model: Any) -> int:
    """Return the model's length in its config, or 0."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)


def _rope_types(config: Any) -> set[str]:
    """Return the rope types of a config; some models have one per type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry["rope_type"]) for entry in [parameters, *nested] if entry.get("rope_type")}
