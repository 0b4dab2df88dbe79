"""Making transformers' Auto classes load swapped checkpoints, as soon as hf_posswap is imported.

A plugin checkpoint's config.json says `model_type: posswap`. Its config class is registered once transformers loads its
Auto classes (`hf_posswap/__init__.py` sees to that). It reads the native config; with that come classes of models that
build the native model and put the swap back before weights are loaded (`patching/record/model_class.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_posswap.patching.apply.patch_model import restore_swap as restore_swap  # what the classes of models run
from hf_posswap.patching.record.config_class import read_plugin_config
from hf_posswap.patching.record.refusals import POSSWAP_MODEL_TYPE

if TYPE_CHECKING:
    from types import ModuleType


def register(module: ModuleType) -> None:
    """Register the config class of plugin checkpoints with the AutoConfig of transformers' `module`."""
    module.AutoConfig.register(POSSWAP_MODEL_TYPE, config_reader(), exist_ok=True)


def config_reader() -> Any:
    """Return the class that reads the config.json of plugin checkpoints."""
    from transformers.configuration_utils import PreTrainedConfig

    class PosswapConfig(PreTrainedConfig):
        """Reads the config.json of a plugin checkpoint; what comes out is the native config, with its swap."""

        model_type = POSSWAP_MODEL_TYPE

        @classmethod
        def from_dict(cls, config_dict: dict[str, object], **kwargs: object) -> Any:
            return read_plugin_config(config_dict, **kwargs)

    return PosswapConfig
