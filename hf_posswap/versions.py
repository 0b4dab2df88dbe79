"""The tested versions of transformers, torch, peft and accelerate, from `tested_versions.json`, which CI writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

FILE = Path(__file__).with_name("tested_versions.json")
"""The one list of tested versions: {"transformers": ["5.14.0", ...], "torch": [...]}."""

_overrides: dict[str, list[str]] = {}


def state_tested(versions: dict[str, list[str]]) -> None:
    """Use `versions` instead of the file, which the code exported with a checkpoint does not have.

    Args:
        versions: as `tested` returns them.
    """
    _overrides.clear()
    _overrides.update(versions)


def tested() -> dict[str, list[str]]:
    """Return the tested versions of each package, the oldest first.

    Raises:
        ValueError: the file is damaged.
        FileNotFoundError: it is missing.

    Example:
        >>> sorted(tested())
        ['accelerate', 'peft', 'torch', 'transformers']
    """
    versions = _overrides or json.loads(FILE.read_text(encoding="utf-8"))
    return {package: sorted(releases, key=_order) for package, releases in versions.items()}


def is_tested(package: str, version: str) -> bool:
    """Return whether the tests have run with exactly this version of `package`.

    A build tag (`+cpu`, `+cu129`) is ignored; patch releases, pre-releases and development versions count as different.

    Example:
        >>> is_tested("torch", "2.13.0+cpu"), is_tested("transformers", "5.14.0.dev0")
        (True, False)
    """
    return version.partition("+")[0] in tested().get(package, [])


def tested_range(package: str) -> str:
    """Return the oldest and the newest tested version of `package` as text.

    Example:
        >>> tested_range("transformers").startswith("5.14.0 to ")
        True
    """
    versions = tested().get(package, [])
    return " to ".join(dict.fromkeys([*versions[:1], *versions[-1:]])) or "none"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
