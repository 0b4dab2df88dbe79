"""Swap the position mechanism of a pretrained Hugging Face model, adapt it, prove what happened, and ship it.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> import hf_posswap
>>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
>>> hf_posswap.patch_model(model, "rope", max_length=64).route
'plugin'
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_posswap import errors
from hf_posswap.importing import after_import

if TYPE_CHECKING:
    from hf_posswap.adapting import load_recipe, run_recipe
    from hf_posswap.checkpoints import (
        Diagnosis,
        Export,
        PushReport,
        add_adapter,
        doctor,
        export,
        load,
        load_adapter,
        position_modules,
        push,
        save,
        to_native,
    )
    from hf_posswap.comparison import Candidate, EvalSettings, Evaluation, compare, evaluate
    from hf_posswap.families import Family, TableSpec
    from hf_posswap.layout import permute_rows
    from hf_posswap.patching.apply import patch_model, patched, unpatch_model
    from hf_posswap.patching.backends import set_backend
    from hf_posswap.patching.blending import finish_blend, set_blend
    from hf_posswap.patching.centring import centre_table
    from hf_posswap.patching.describe import describe_positions, explain, list_families, list_schemes, supports
    from hf_posswap.patching.logit_scale import set_logit_scale
    from hf_posswap.patching.plan import SwapPlan, plan_swap
    from hf_posswap.patching.record import SwapRecord
    from hf_posswap.patching.verify import verify_swap
    from hf_posswap.schemes import (
        NTK,
        Alibi,
        Blend,
        DualChunk,
        Dynamic,
        Fire,
        Kerple,
        LeakyReRope,
        Learned,
        Linear,
        Llama3,
        LongRope,
        NoPE,
        NTKByParts,
        PerLayer,
        PRope,
        ReRope,
        Resonance,
        ResonanceYarn,
        RNoPE,
        Rope,
        Scheme,
        SelfExtend,
        Sinusoidal,
        T5Bias,
        Together,
        XPos,
        Yarn,
    )
    from hf_posswap.search import (
        LogitScaleFit,
        LongRopeSearch,
        fit_logit_scale,
        rank_pairs,
        search_longrope,
        select_pairs,
    )

__version__ = "0.1.0"

__all__ = [
    "NTK",
    "Alibi",
    "Blend",
    "Candidate",
    "Diagnosis",
    "DualChunk",
    "Dynamic",
    "EvalSettings",
    "Evaluation",
    "Export",
    "Family",
    "Fire",
    "Kerple",
    "LeakyReRope",
    "Learned",
    "Linear",
    "Llama3",
    "LogitScaleFit",
    "LongRope",
    "LongRopeSearch",
    "NTKByParts",
    "NoPE",
    "PRope",
    "PerLayer",
    "PushReport",
    "RNoPE",
    "ReRope",
    "Resonance",
    "ResonanceYarn",
    "Rope",
    "Scheme",
    "SelfExtend",
    "Sinusoidal",
    "SwapPlan",
    "SwapRecord",
    "T5Bias",
    "TableSpec",
    "Together",
    "XPos",
    "Yarn",
    "add_adapter",
    "centre_table",
    "compare",
    "describe_positions",
    "doctor",
    "errors",
    "evaluate",
    "explain",
    "export",
    "finish_blend",
    "fit_logit_scale",
    "list_families",
    "list_schemes",
    "load",
    "load_adapter",
    "load_recipe",
    "patch_model",
    "patched",
    "permute_rows",
    "plan_swap",
    "position_modules",
    "push",
    "rank_pairs",
    "run_recipe",
    "save",
    "search_longrope",
    "select_pairs",
    "set_backend",
    "set_blend",
    "set_logit_scale",
    "supports",
    "to_native",
    "unpatch_model",
    "verify_swap",
]

_HOMES = (
    "layout",
    "schemes",
    "families",
    "patching.apply",
    "patching.backends",
    "patching.blending",
    "patching.centring",
    "patching.describe",
    "patching.logit_scale",
    "patching.plan",
    "patching.record",
    "patching.verify",
    "checkpoints",
    "comparison",
    "search",
    "adapting",
)


def __getattr__(name: str) -> Any:
    """Load the public names when the first is asked for: torch takes seconds, and `posswap --help` needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in _HOMES:
        held = vars(importlib.import_module(f"{__name__}.{home}"))
        globals().update({public: held[public] for public in __all__ if public in held})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(auto_config: Any) -> None:
    from hf_posswap.checkpoints import register

    register(auto_config)


after_import("transformers.models.auto.configuration_auto", ready="AutoConfig", action=_register)
