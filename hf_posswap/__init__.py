"""Swap the position mechanism of a pretrained Hugging Face model, adapt it, prove what happened, and ship it.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> import hf_posswap
>>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
>>> model = hf_posswap.patch_model(model, "rope", max_length=64)
>>> hf_posswap.swap_plan(model).route
'plugin'
"""

from functools import partial
from types import ModuleType

from hf_posswap.utils.public_names import after_import, attach_public_names, call_late

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)

after_import(
    "torch.serialization",
    ready="add_safe_globals",
    action=partial(call_late, "hf_posswap.utils.refused_weights", "let_torch_load"),
)


def _watch_own_adapters(integration: ModuleType) -> None:
    from hf_posswap.compat.peft_wrappers import watch_own_adapters

    marks = "hf_posswap.patching.record.adapter_marks"
    given_weights = partial(call_late, marks, "refuse_misfit_weights")
    watch_own_adapters(integration, partial(call_late, marks, "refuse_misfit"), given_weights)


after_import(
    "peft.peft_model", ready="get_model_status", action=partial(call_late, "hf_posswap.checkpoints.adapters", "watch")
)
after_import("transformers.integrations.peft", ready="maybe_load_adapters", action=_watch_own_adapters)
after_import(
    "transformers.models.auto.configuration_auto",
    ready="AutoConfig",
    action=partial(call_late, "hf_posswap.checkpoints.auto", "register"),
)
