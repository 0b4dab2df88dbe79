"""Swap the position mechanism of a pretrained Hugging Face model, adapt it, prove what happened, and ship it.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> import hf_posswap
>>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
>>> model = hf_posswap.patch_model(model, "rope", max_length=64)
>>> hf_posswap.swap_plan(model).route
'plugin'
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from hf_posswap.utils.public_names import after_import, attach_public_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)


def _register(auto_config: ModuleType) -> None:
    from hf_posswap.checkpoints.auto import register

    register(auto_config)


def _let_torch_load(serialization: ModuleType) -> None:
    from hf_posswap.utils.refused_weights import let_torch_load

    let_torch_load(serialization)


after_import("torch.serialization", ready="add_safe_globals", action=_let_torch_load)


def _watch_adapters(peft_model: ModuleType) -> None:
    from hf_posswap.checkpoints.adapters import watch

    watch(peft_model)


def _watch_own_adapters(integration: ModuleType) -> None:
    from hf_posswap.compat.peft_wrappers import watch_own_adapters

    def loading(model: nn.Module, source: Path) -> None:
        from hf_posswap.patching.record.adapter_marks import refuse_misfit

        refuse_misfit(model, source)

    def given_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        from hf_posswap.patching.record.adapter_marks import refuse_misfit_weights

        refuse_misfit_weights(model, weights)

    watch_own_adapters(integration, loading, given_weights)


after_import("peft.peft_model", ready="get_model_status", action=_watch_adapters)
after_import("transformers.integrations.peft", ready="maybe_load_adapters", action=_watch_own_adapters)
after_import("transformers.models.auto.configuration_auto", ready="AutoConfig", action=_register)
