"""The date, versions and hardware of results, without paths of the machine."""

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
    """Return the versions and the hardware behind the results.

    Args:
        devices: the models' devices.

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
    """Return the processor's name."""
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name), platform.processor() or platform.machine())


def date_now() -> str:
    """Return the UTC date and time, taken from SOURCE_DATE_EPOCH if a reproducible build sets it.

    Source: https://reproducible-builds.org/docs/source-date-epoch/
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdigit() else datetime.now(UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def same_but_for_the_date(results: dict[str, Any], earlier: Any) -> bool:
    """Return whether the untrusted `earlier` equals `results` except for the date.

    Example:
        >>> same_but_for_the_date({"made": {"date": "b"}, "x": 1}, {"made": {"date": "a"}, "x": 1})
        True
    """
    provenance = earlier.get("made") if isinstance(earlier, dict) else None
    if not isinstance(provenance, dict) or not isinstance(provenance.get("date"), str):
        return False
    return earlier | {"made": provenance | {"date": results["made"]["date"]}} == results
