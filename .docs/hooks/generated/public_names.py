"""The public names in groups, each documented from its docstring by mkdocstrings."""

from __future__ import annotations

import hf_posswap
from hf_posswap.schemes import SCHEMES

_PUBLIC: tuple[str, ...] = tuple(vars(hf_posswap)["__all__"])
_SCHEMES = {cls.__name__ for _, cls in SCHEMES.items()}

GROUPS: dict[str, tuple[str, ...]] = {
    "Plan, patch, verify": (
        "plan_swap", "patch_model", "patched", "unpatch_model", "swap_plan", "verify_swap", "SwapPlan", "SwapRecord",
        "set_backend", "evict_keys",
    ),
    "Look": (
        "explain", "describe_positions", "supports", "list_schemes", "list_families", "check", "CheckReport",
        "doctor", "Diagnosis", "advise", "Advice",
    ),
    "Fit and change": (
        "centre_table", "fit_bias", "fit_rotation", "RotationFit", "search_longrope", "LongRopeSearch",
        "fit_logit_scale", "LogitScaleFit", "set_logit_scale", "rank_pairs", "select_pairs", "permute_rows",
        "set_blend", "finish_blend",
    ),
    "Train": ("load_recipe", "run_recipe", "PosswapCallback"),
    "Evaluate": ("evaluate", "compare", "Candidate", "EvalSettings", "Evaluation"),
    "Save, load, push": (
        "save", "load", "load_example", "push", "PushReport", "to_native", "export", "Export", "overrides",
        "Overrides", "add_adapter", "load_adapter", "position_modules",
    ),
    "Extend": ("Scheme", "Family", "TableSpec"),
}  # fmt: skip
"""The public names by what they are for; the schemes come last, and errors have a page of their own."""


def groups() -> dict[str, tuple[str, ...]]:
    """Return all public names in groups.

    Raises:
        ValueError: a public name is in no group, or in two.
    """
    schemes = tuple(name for name in _PUBLIC if name in _SCHEMES)
    every = {**GROUPS, "Schemes": schemes}
    named = [name for names in every.values() for name in names]
    lacking = set(_PUBLIC) - set(named) - {"errors", "__version__"}
    if lacking or len(named) != len(set(named)) or set(named) - set(_PUBLIC):
        raise ValueError(
            f"the groups of the API page should hold every public name once: {sorted(lacking)} are missing, "
            f"{sorted(set(named) - set(_PUBLIC))} are not public."
        )
    return every


def render() -> str:
    """Return the groups, each name as mkdocstrings wants it."""
    blocks = []
    for title, names in groups().items():
        blocks.append(f"## {title}")
        blocks += [f"::: hf_posswap.{name}" for name in names]
    return "\n\n".join(blocks)
