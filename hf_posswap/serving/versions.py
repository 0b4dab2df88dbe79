"""The tested versions of vLLM, and the message for any other."""

from __future__ import annotations

import os
import re

OLDEST, NEWEST = (0, 32), (0, 32)
"""Tested releases, (major, minor)."""
TESTED = "0.32"
"""The tested releases as text."""
OVERRIDE = "POSSWAP_VLLM_UNTESTED"
"""The environment variable that allows any version to serve swapped checkpoints."""


def version_problem(version: str) -> str | None:
    """Return why swapped checkpoints are not served by vLLM `version`, as the rest of a sentence, or None.

    Example:
        >>> version_problem("0.32.0+cu129") is None, version_problem("0.9.1") is None
        (True, False)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    parsed = None if numbers is None else (int(numbers[1]), int(numbers[2]))
    if os.environ.get(OVERRIDE) == "1" or (parsed is not None and OLDEST <= parsed <= NEWEST):
        return None
    return (
        f"this vLLM is {version}, and hf_posswap has been tested with {TESTED}. Install that; or set {OVERRIDE}=1 to "
        "serve it all the same, and compare its answers with those of generate"
    )
