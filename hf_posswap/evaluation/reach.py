"""How far a model runs, and whether one forward gives the loss of every prefix: by its plan, never by guessing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import UnsupportedModelError
from hf_posswap.patching.inspect.describe import describe_positions
from hf_posswap.patching.plan.plan_swap import unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FOLLOW_THE_LENGTH = ("dynamic", "longrope")  # rope types of transformers whose frequencies follow the total length


@dataclass(frozen=True)
class Reach:
    """What a model can run.

    Attributes:
        limit: most tokens before it stops with an error; None: it runs at any length.
        window: tokens that it was made for before any swap.
        prefix_consistent: whether logits at t depend on tokens up to t alone, whatever the total length: then one
            forward gives the losses of every prefix, and a prefill in pieces with a cache gives what a full one does.
        why: what says so.
        causal: whether a token sees only what comes before it.
    """

    limit: int | None
    window: int
    prefix_consistent: bool
    why: str
    causal: bool = True


def reach_of(model: PreTrainedModel) -> Reach:
    """Return how far `model` runs and whether one forward serves every length.

    A swapped model's plan declares it (`SwapPlan.cached_equals_full`), a native one's rope type. Of a model that no
    family describes nothing is assumed: each length gets its own forward.

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
        return Reach(None, _configured(model), False, "no family describes it", bool(model.can_generate()))
    causal = report.geometry.causal
    if report.sites["embedding"] != "-":
        return Reach(report.limit, report.limit, causal, "a learned table", causal)
    types = _rope_types(model.config)
    follows = sorted(types & set(_FOLLOW_THE_LENGTH))
    types_said = ", ".join(follows or sorted(types)) or "default"
    return Reach(None, report.limit, causal and not follows, f"rope type {types_said}", causal)


def _configured(model: Any) -> int:
    """Return what the config calls the model's length; 0 where it says nothing."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)


def _rope_types(config: Any) -> set[str]:
    """Return the rope types of a config; some models have one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part["rope_type"]) for part in [parameters, *nested] if part.get("rope_type")}
