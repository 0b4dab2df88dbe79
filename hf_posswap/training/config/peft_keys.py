"""The keys of `peft:`, which are the fields of a PEFT config, read from the installed version."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from hf_posswap.checkpoints.adapters import import_peft
from hf_posswap.errors import MissingDependencyError
from hf_posswap.training.config.problems import Problems
from hf_posswap.training.config.theirs import settings_like
from hf_posswap.training.config.typed import read

TYPE = "peft_type"
PROVED = (
    "LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "VERA", "RANDLORA", "FOURIERFT", "MISS",
)  # fmt: skip
"""Types that train, are saved with what the swap added, and load again as they were (tests/training/test_peft.py)."""
_BASE = "it changes the weights of the base, which an adapter does not carry"
_OWN = "hf_posswap says it"
_REFUSED_FIELDS = {
    "base_model_name_or_path": _OWN, "revision": _OWN, "auto_mapping": _OWN, "peft_version": _OWN,
    "inference_mode": "an adapter that is not trained has no place in a training",
    "layer_replication": "the swap knows the layers that the model has",
    "megatron_config": "models are transformers' own", "megatron_core": "models are transformers' own",
    "alora_invocation_tokens": "windows are whole documents, and no invocation stands in them",
    "arrow_config": "it routes between adapters that are there already",
    "use_qalora": "weights are not quantized here",
}  # fmt: skip
_REFUSED_STARTS = {
    "pissa": _BASE, "olora": _BASE, "corda": _BASE, "loftq": _BASE, "mica": _BASE, "lora_ga": _BASE,
    "eva": "it begins with passes over data of its own",
}  # fmt: skip
_REFUSED_TYPES = {
    "ADALORA": "its ranks follow from a loss and a schedule of its own, which objective does not add",
    **dict.fromkeys(
        (
            "PROMPT_TUNING",
            "MULTITASK_PROMPT_TUNING",
            "P_TUNING",
            "PREFIX_TUNING",
            "ADAPTION_PROMPT",
            "CPT",
            "CARTRIDGE",
        ),
        "virtual tokens shift the positions of all others, which are what a swap is about",
    ),
}


def read_peft(values: Mapping[str, Any] | None, problems: Problems) -> dict[str, Any] | None:
    """Return the fields of a PEFT config that `values` say, `peft_type` among them; None where there are none.

    Args:
        values: what stands under `peft`.
        problems: what was found wrong.

    Example:
        >>> problems = Problems()
        >>> read_peft({"r": 4, "lora_alfa": 8}, problems), [str(problem) for problem in problems.said]
        ({'peft_type': 'LORA', 'r': 4}, ["peft.lora_alfa: no such key. Did you mean 'lora_alpha'?"])
    """
    if values is None:
        return None
    try:
        known = _known()
    except MissingDependencyError as error:
        problems.add("peft", str(error))
        return None
    kind = str(values.get(TYPE, "LORA")).upper()
    if kind not in PROVED or kind not in known:
        near = difflib.get_close_matches(kind, PROVED, n=1)
        there = "PEFT has it, and it is not proved here" if kind in known else "PEFT has no such"
        hint = f"Did you mean {near[0]}?" if near else f"Use {', '.join(PROVED[:-1])} or {PROVED[-1]}."
        problems.add(f"peft.{TYPE}", f"{kind}: {_REFUSED_TYPES.get(kind, there)}. {hint}")
        return None
    given = {str(name): value for name, value in values.items() if name != TYPE}
    made = read(_settings(kind), given, problems, "peft")
    found = {name: getattr(made, name) for name in given if hasattr(made, name)}
    for name, value in found.items():
        if name in _REFUSED_FIELDS and value:
            problems.add(f"peft.{name}", f"leave it out: {_REFUSED_FIELDS[name]}.")
    start = found.get("init_lora_weights")
    for name, why in _REFUSED_STARTS.items():
        if isinstance(start, str) and start.startswith(name):
            problems.add("peft.init_lora_weights", f"{start} cannot be used: {why}.")
    return {TYPE: kind, **found}


@cache
def _known() -> dict[str, Any]:
    import_peft()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return {str(kind.value): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


@cache
def _settings(kind: str) -> Any:
    return settings_like(f"{kind.title()}Settings", _known()[kind], {})


def config_class(kind: str) -> Any:
    """Return PEFT's config class of the type called `kind`."""
    return _known()[kind]
