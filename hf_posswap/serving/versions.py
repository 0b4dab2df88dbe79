"""The versions of vLLM that the tests have run, and what is said of any other."""

from __future__ import annotations

import os
import re

OLDEST, NEWEST = (0, 32), (0, 32)
"""Of the releases that tests/serving has run, (major, minor)."""
TESTED = "0.32"
"""The same in words."""
OVERRIDE = "POSSWAP_VLLM_UNTESTED"
"""The environment variable that has swapped checkpoints served by any version."""


def version_problem(version: str) -> str | None:
    """Return why swapped checkpoints are not served by vLLM `version`, as the rest of a sentence, or None.

    Example:
        >>> version_problem("0.32.0+cu129") is None, version_problem("0.9.1") is None
        (True, False)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = None if numbers is None else (int(numbers[1]), int(numbers[2]))
    if os.environ.get(OVERRIDE) == "1" or (found is not None and OLDEST <= found <= NEWEST):
        return None
    return (
        f"this vLLM is {version}, and hf_posswap has been tested with {TESTED}. Install that; or set {OVERRIDE}=1 to "
        "serve it all the same, and compare its answers with those of generate"
    )
