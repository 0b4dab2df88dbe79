"""What the tests must know of the transformers that is installed: its release, and how its models take caches."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

from hf_posswap.compat.transformers_calls import cache_in
from hf_posswap.testing.contract.pairs import takes_cache, with_cache

__all__ = ["RELEASE", "TOKENS_ARE_NOT_ENOUGH", "UNBUILT", "cache_in", "model_class", "takes_cache", "with_cache"]

RELEASE = Version(transformers.__version__).release[:2]
"""Of the transformers that is installed, as (5, 24): what an old release lacks is skipped by it, never by a name."""


UNBUILT = {
    "EncoderDecoderModel": "it combines two models of your choice",
    "Gemma3nForConditionalGeneration": "requires the timm library",
    "Gemma4AssistantForCausalLM": "set of layer types producing a cache",
    "Gemma4UnifiedAssistantForCausalLM": "set of layer types producing a cache",
}
"""Classes of which transformers builds no tiny model by itself, and what it says; any other has to be built."""
TOKENS_ARE_NOT_ENOUGH = {"VoxtralRealtimeForConditionalGeneration": "input_features"}
"""Classes that do not run on tokens alone, and what they say of it; any other has to run."""
if RELEASE < (5, 23):  # as 5.18 and 5.14 are
    UNBUILT |= {
        "CohereCompassForCausalLM": "The expanded size of the tensor",
        "EncoderDecoderModel": "cannot be instantiated because not both",
    }
if RELEASE < (5, 18):  # stock defects of 5.14: their own caches do not fit the rest of the release
    TOKENS_ARE_NOT_ENOUGH |= {"Lfm2ForCausalLM": "has_previous_state", "OlmoHybridForCausalLM": "get_query_offset"}


def model_class(name: str) -> Any:
    """Return the model class of transformers that is called `name`."""
    return getattr(transformers, name)
