"""Shell completion: names of schemes, recipes and families."""

from __future__ import annotations

_SIGN = "+"


def scheme_names(incomplete: str) -> list[str]:
    """Return the schemes whose names begin with `incomplete`."""
    from hf_posswap.schemes.base import known_schemes

    sum_so_far, plus, begun = incomplete.rpartition(_SIGN)
    return [f"{sum_so_far}{plus}{name}" for name in known_schemes() if name.startswith(begun)]


def added_schemes(incomplete: str) -> list[str]:
    """Return the matching schemes in the form that `posswap compare` takes, with + before the name."""
    model, plus, begun = incomplete.partition(_SIGN)
    return [f"{model}{_SIGN}{name}" for name in scheme_names(begun)] if plus else []


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipes of the package whose names begin with `incomplete`."""
    from hf_posswap.training.config.shipped import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def training_names(incomplete: str) -> list[str]:
    """Return the training recipes of the package whose names begin with `incomplete`."""
    from hf_posswap.training.config.shipped import shipped_recipes

    return [name for name, recipe in shipped_recipes().items() if recipe.trains and name.startswith(incomplete)]


def family_names(incomplete: str) -> list[str]:
    """Return the families whose names begin with `incomplete`."""
    from hf_posswap.families import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]
