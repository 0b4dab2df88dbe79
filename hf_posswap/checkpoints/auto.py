"""Making transformers' Auto classes load swapped checkpoints, as soon as hf_posswap is imported.

A plugin checkpoint's config.json says `model_type: posswap`. Its config class is registered once transformers loads its
Auto classes (`hf_posswap/__init__.py` sees to that). It builds the native config, and registers for it model classes
that build the native model and put the swap back before weights are loaded.
"""

from __future__ import annotations

import functools
from typing import Any

from hf_posswap.errors import RecordError
from hf_posswap.patching.apply import carry_out
from hf_posswap.patching.config_class import POSSWAP_MODEL_TYPE, plugin_config_class, with_dtype
from hf_posswap.patching.plan import plan_swap
from hf_posswap.patching.record import SwapRecord, native_config
from hf_posswap.schemes.blend import Blend


def register(module: Any) -> None:
    """Register the config class of plugin checkpoints with the AutoConfig of transformers' `module`."""
    module.AutoConfig.register(POSSWAP_MODEL_TYPE, config_reader(), exist_ok=True)


def config_reader() -> Any:
    """Return the class that reads the config.json of plugin checkpoints."""
    from transformers.configuration_utils import PreTrainedConfig

    class PosswapConfig(PreTrainedConfig):
        """Reads the config.json of a plugin checkpoint; what comes out is the native config, with its swap."""

        model_type = POSSWAP_MODEL_TYPE

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            return read_plugin_config(config_dict, **kwargs)

    return PosswapConfig


def read_plugin_config(values: dict[str, Any], **kwargs: Any) -> Any:
    """Return the config of a plugin checkpoint; kwargs and result are those of transformers' `from_dict`.

    Raises:
        RecordError: no record, or one that cannot be read.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    record = SwapRecord.from_dict(values.get("posswap"))
    if record.base_type not in CONFIG_MAPPING or record.base_type == POSSWAP_MODEL_TYPE:
        raise RecordError(
            f"config.posswap names model type {record.base_type!r}, which this transformers does not have."
        )
    native: Any = CONFIG_MAPPING[record.base_type]
    values = with_dtype({key: value for key, value in values.items() if key != "auto_map"})  # written anew by each save
    rope = values.get("rope_parameters")  # its rope_type is unknown to transformers, on purpose
    known = {"rope_parameters": record.original["rope_parameters"]} if "rope_parameters" in record.original else {}
    result = native.from_dict({**values, **known, "model_type": record.base_type}, **kwargs)
    config = result[0] if isinstance(result, tuple) else result
    if known:
        config.rope_parameters = rope
    config.__class__ = plugin_config_class(native)
    register_models(config)
    return result


def register_models(config: Any) -> None:
    """Make every Auto class that knows the native config of `config` know `config` itself."""
    from transformers.models.auto import modeling_auto

    config_class: Any = type(config)
    native = config_class.posswap_native
    for name in modeling_auto.__all__:
        mapping: Any = getattr(getattr(modeling_auto, name, None), "_model_mapping", None)
        if not hasattr(mapping, "register") or config_class in mapping._extra_content or native not in mapping:
            continue
        found = mapping[native]
        classes = found if isinstance(found, tuple) else (found,)
        mapping.register(config_class, plugin_model_class(classes[0], config_class), exist_ok=True)


@functools.cache
def plugin_model_class(native: Any, config_class: Any) -> Any:
    """Return a class that builds a model of the class `native` with the swap of its config already in it.

    It only lives while a model is made: what `from_pretrained` and `from_config` return is of the native class, its
    instance patched like any other.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        native.__init__(self, native_config(config), *args, **kwargs)
        restore_swap(self, SwapRecord.from_dict(config.posswap))

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _as_native(super(made, cls).from_pretrained(*args, **kwargs), native)

    def _from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _as_native(super(made, cls)._from_config(*args, **kwargs), native)

    body = {
        "__init__": __init__,
        "__module__": native.__module__,
        "__qualname__": native.__qualname__,
        "config_class": config_class,
        "posswap_native": native,
        "from_pretrained": classmethod(from_pretrained),
        "_from_config": classmethod(_from_config),
    }
    made: Any = type(native.__name__, (native,), body)
    return made


def _as_native(result: Any, native: type) -> Any:
    model = result[0] if isinstance(result, tuple) else result
    model.__class__ = native
    return result


def restore_swap(model: Any, record: SwapRecord) -> None:
    """Put the swap of `record` into a freshly built native `model`; its weights come afterwards.

    Raises:
        RecordError: this version of the package would carry out another swap than the one recorded.
    """
    plan = plan_swap(model, record.choice(), **record.arguments)
    if plan.route != record.route:
        raise RecordError(
            f"config.posswap records a {record.route} swap to {plan.named}, but here it would be {plan.route}: "
            f"use the version of transformers that the checkpoint was made with."
        )
    carry_out(model, plan)
    if not all(isinstance(scheme, Blend) for scheme in plan.schemes.values()):  # a blend holds the old mechanism too
        model._posswap.undo.clear()
