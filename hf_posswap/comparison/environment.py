"""Where and when results were made, by which command and with which versions; no path of anyone's machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

_PROCESSORS = Path("/proc/cpuinfo")


def environment(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the versions and the hardware that numbers were made with.

    Args:
        devices: of the models.

    Example:
        >>> sorted(environment([torch.device("cpu")]))[:3]
        ['cores', 'hf_posswap', 'processor']
    """
    from transformers import __version__ as transformers_version

    package = sys.modules[__name__.partition(".")[0]]
    gpus = sorted({torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"})
    return {
        "hf_posswap": package.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    } | ({"gpu": ", ".join(gpus)} if gpus else {})


def _processor() -> str:
    """Return what the machine calls its processor."""
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in named if name), platform.processor() or platform.machine())


def date_now() -> str:
    """Return the date and time of day, UTC; that of SOURCE_DATE_EPOCH, in seconds, where a repeatable build sets it.

    Source: https://reproducible-builds.org/docs/source-date-epoch/
    """
    asked = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(asked), UTC) if asked.isdigit() else datetime.now(UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def same_but_for_the_date(results: dict[str, Any], earlier: Any) -> bool:
    """Return whether `earlier`, which anyone may have edited, says what `results` do, on whatever date.

    Example:
        >>> same_but_for_the_date({"made": {"date": "b"}, "x": 1}, {"made": {"date": "a"}, "x": 1})
        True
    """
    made = earlier.get("made") if isinstance(earlier, dict) else None
    if not isinstance(made, dict) or not isinstance(made.get("date"), str):
        return False
    return earlier | {"made": made | {"date": results["made"]["date"]}} == results
