"""The entry point by which vLLM finds hf_posswap, in each of its processes."""

from __future__ import annotations

import logging

MODEL = "hf_posswap.integrations.vllm.vllm_model:PosswapForCausalLM"
"""Where vLLM finds the class of swapped models."""

_logger = logging.getLogger(__name__)


def register() -> None:
    """Register the `architectures` of swapped checkpoints with vLLM, and the refusal of those that it cannot serve.

    vLLM calls it in each process before any config is read, and would exit on any error raised here. If this vLLM lacks
    what the plugin needs, the error is logged, and vLLM refuses swapped checkpoints as unknown.
    """
    try:
        _register()
    except Exception:
        _logger.exception("hf_posswap cannot serve swapped checkpoints in this vLLM: they stay refused.")


def _register() -> None:
    from vllm import ModelRegistry

    from hf_posswap.compat.transformers_loading import class_names
    from hf_posswap.integrations.vllm.guard import install_guard
    from hf_posswap.patching.record.refusals import architecture_of

    install_guard()
    for name in set(class_names("CAUSAL_LM").values()):
        ModelRegistry.register_model(architecture_of(name), MODEL)
