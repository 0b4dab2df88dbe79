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
"""Types tested to train, save with the swap's parameters and reload unchanged (tests/training/test_peft.py)."""
_BASE = "it changes the weights of the base, which an adapter does not carry"
_SET_HERE = "hf_posswap sets it"
_REFUSED_FIELDS = {
    "base_model_name_or_path": _SET_HERE, "revision": _SET_HERE, "auto_mapping": _SET_HERE, "peft_version": _SET_HERE,
    "inference_mode": "a frozen adapter cannot be trained",
    "layer_replication": "the swap supports only the layers that the model has",
    "megatron_config": "only transformers models train", "megatron_core": "only transformers models train",
    "alora_invocation_tokens": "windows are plain documents without invocation tokens",
    "arrow_config": "it routes between existing adapters",
    "use_qalora": "weights are not quantized here",
}  # fmt: skip
_REFUSED_STARTS = {
    "pissa": _BASE, "olora": _BASE, "corda": _BASE, "loftq": _BASE, "mica": _BASE, "lora_ga": _BASE,
    "eva": "it starts with passes over data that a recipe does not give",
}  # fmt: skip
_REFUSED_TYPES = {
    "ADALORA": "its ranks need an extra loss and schedule that objective does not add",
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
        "virtual tokens shift the positions of all other tokens, and a swap is about positions",
    ),
}


def read_peft(values: Mapping[str, Any] | None, problems: Problems) -> dict[str, Any] | None:
    """Return the fields of a PEFT config in `values`, with `peft_type`; None if `values` is None.

    Args:
        values: the mapping under `peft`.
        problems: collects what is wrong.

    Example:
        >>> problems = Problems()
        >>> read_peft({"r": 4, "lora_alfa": 8}, problems), [str(problem) for problem in problems.entries]
        ({'peft_type': 'LORA', 'r': 4}, ["peft.lora_alfa: no such key. Did you mean 'lora_alpha'?"])
    """
    if values is None:
        return None
    try:
        configs = _peft_configs()
    except MissingDependencyError as error:
        problems.add("peft", str(error))
        return None
    peft_type = str(values.get(TYPE, "LORA")).upper()
    if peft_type not in PROVED or peft_type not in configs:
        near = difflib.get_close_matches(peft_type, PROVED, n=1)
        reason = "PEFT has it, but it is untested here" if peft_type in configs else "PEFT has no such type"
        hint = f"Did you mean {near[0]}?" if near else f"Use {', '.join(PROVED[:-1])} or {PROVED[-1]}."
        problems.add(f"peft.{TYPE}", f"{peft_type}: {_REFUSED_TYPES.get(peft_type, reason)}. {hint}")
        return None
    requested = {str(name): value for name, value in values.items() if name != TYPE}
    settings = read(_settings_class(peft_type), requested, problems, "peft")
    fields = {name: getattr(settings, name) for name in requested if hasattr(settings, name)}
    for name, value in fields.items():
        if name in _REFUSED_FIELDS and value:
            problems.add(f"peft.{name}", f"leave it out: {_REFUSED_FIELDS[name]}.")
    init_weights = fields.get("init_lora_weights")
    for name, why in _REFUSED_STARTS.items():
        if isinstance(init_weights, str) and init_weights.startswith(name):
            problems.add("peft.init_lora_weights", f"{init_weights} cannot be used: {why}.")
    return {TYPE: peft_type, **fields}


@cache
def _peft_configs() -> dict[str, Any]:
    import_peft()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return {str(peft_type.value): config for peft_type, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


@cache
def _settings_class(peft_type: str) -> Any:
    return settings_like(f"{peft_type.title()}Settings", _peft_configs()[peft_type], {})


def config_class(peft_type: str) -> Any:
    """Return PEFT's config class for the type `peft_type`."""
    return _peft_configs()[peft_type]
