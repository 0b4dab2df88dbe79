"""DeepSpeed, as transformers and accelerate keep it between two trainings of one process."""

from __future__ import annotations

import sys
from typing import Any


def is_deepspeed_engine(model: Any) -> bool:
    """Return whether `model` is DeepSpeed's engine around another, without importing DeepSpeed.

    Touches no private name; the class is public as `deepspeed.DeepSpeedEngine` (0.16 to 0.19).
    """
    known = sys.modules.get("deepspeed")
    return known is not None and isinstance(model, known.DeepSpeedEngine)


def load_whole() -> None:
    """Load models unsharded in this process, also after a training under ZeRO-3.

    Touches `transformers.integrations.deepspeed.unset_hf_deepspeed_config`, which its docstring gives to tests (5.14 to
    5.23). Without it `from_pretrained` on one process waits for the others, and a swap sees empty weights.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
