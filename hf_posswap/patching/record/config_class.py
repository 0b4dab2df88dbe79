"""The config class of a model that only hf_posswap can run: native in memory, refused by stock transformers on disk."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_posswap.compat.transformers_attention import IMPLEMENTATION
from hf_posswap.compat.transformers_models import config_validators, give_config_class, model_under_construction
from hf_posswap.errors import PluginWarning, RecordError, UnsupportedSwapError
from hf_posswap.patching.record.record import SwapRecord, native_config_class
from hf_posswap.patching.record.refusals import (
    POSSWAP_MODEL_TYPE,
    REFUSED_ATTENTION,
    REFUSED_IN_MEMORY,
    TESTED_MARK,
    architecture_of,
    plugin_values,
    read,
)
from hf_posswap.patching.record.remote_code import AUTO_MAP, code_files
from hf_posswap.utils.auto_classes import refuse_endless_lists
from hf_posswap.utils.threads import MAKING, once
from hf_posswap.versions import tested

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    class PluginConfig(PreTrainedConfig):
        """What `plugin_config_class` makes: a subclass of the native config class, which it names."""

        posswap_native: ClassVar[type[PreTrainedConfig]]


_SAVED_TYPE = "posswap_saved_model_type"
"""Key of a config that is being read, for the model type in its file."""
_told: list[Callable[[type[PluginConfig]], None]] = []
_told_of: set[type] = set()


def on_new_config_class(action: Callable[[type[PluginConfig]], None]) -> None:
    """Call `action` with each class that `plugin_config_class` makes, once there is one."""
    _told.append(action)


def plugin_config_class(native: type[PreTrainedConfig]) -> type[PluginConfig]:
    """Return the config class of swapped models whose native config class is `native`; the same each time.

    It is a subclass that writes `model_type: posswap` into config.json. In memory the model type is unchanged, so PEFT,
    generation and trainers recognize it; on disk no stock class does. Next to config.json it writes the code that
    `trust_remote_code=True` runs.
    """
    config_class = _make_config_class(native)
    with MAKING:  # other threads wait until all actions are done; the actions call this function too
        if config_class not in _told_of:
            _told_of.add(config_class)
            for action in _told:
                action(config_class)
    return config_class


@once
def _make_config_class(native: type[PreTrainedConfig]) -> type[PluginConfig]:
    body = {
        "__deepcopy__": _deepcopy,
        "__module__": __name__,
        "__reduce__": _reduce,
        "__reduce_ex__": lambda self, _: _reduce(self),
        "__setattr__": _set_attribute,
        "from_dict": classmethod(_from_dict),
        "get_config_dict": classmethod(_get_config_dict),
        "posswap_native": native,
        "to_dict": _to_dict,
        "to_json_file": _to_json_file,
        "to_json_string": _to_json_string,
        "validate": _validate,
    }
    return type(f"Posswap{native.__name__}", (native,), body)


def _get_config_dict(cls: Any, /, *args: object, **kwargs: object) -> tuple[dict[str, object], dict[str, object]]:
    """Read as the native class does, under its model type: of another one it warns that it may be an error."""
    values, rest = cls.posswap_native.get_config_dict.__func__(cls, *args, **kwargs)
    record = values.get("posswap")
    if values.get("model_type") == POSSWAP_MODEL_TYPE and isinstance(record, dict):
        if record.get("base_type") == cls.model_type:
            values = values | {"model_type": cls.model_type, _SAVED_TYPE: POSSWAP_MODEL_TYPE}
    return values, rest


def _from_dict(cls: Any, /, config_dict: Mapping[str, object], **kwargs: object) -> object:
    saved_type = config_dict.get(_SAVED_TYPE, config_dict.get("model_type"))
    config_dict = {name: value for name, value in config_dict.items() if name != _SAVED_TYPE}
    if saved_type == POSSWAP_MODEL_TYPE:  # a class of swapped models reads a folder
        return read_plugin_config(config_dict, **kwargs)
    return cls.posswap_native.from_dict.__func__(cls, config_dict, **kwargs)


def _set_attribute(self: PluginConfig, name: str, value: Any) -> None:
    built = model_under_construction(name)
    if built is not None:
        _refuse_stock(self, type(built))
    if name == "architectures" and value:  # saving a model sets it to the name of its class
        value = [architecture_of(name_given) for name_given in value]
    if name in REFUSED_IN_MEMORY and value == REFUSED_ATTENTION:  # from `to_dict`, and meant for other classes
        value = getattr(self, IMPLEMENTATION, None)
    self.posswap_native.__setattr__(self, name, value)
    if name == "posswap":
        _refuse_by_values(self)


def _refuse_by_values(config: PreTrainedConfig) -> None:
    """Make `vars(config)` name no stock attention either: user code may build a stock config from them."""
    attributes = vars(config)
    for name in REFUSED_IN_MEMORY.keys() - {IMPLEMENTATION}:  # a property, not a value
        attributes.pop(name, None)
        if attributes.get("posswap") is not None:
            attributes[name] = REFUSED_ATTENTION


def _refuse_stock(config: PreTrainedConfig, built: type) -> None:
    """Refuse to be the config of a model that a stock class, or a subclass of one, builds: it would not be swapped.

    A swapped class builds its model from the native config and puts the swap in. A user's own model may be built from
    a swapped config where its class declares no config class of transformers: stock modules inside it refuse.
    """
    config_class = getattr(built, "config_class", None)
    ours = isinstance(config_class, type) and issubclass(config.posswap_native, config_class)
    if not ours or getattr(config, "posswap", None) is None:
        return
    raise RecordError(
        f"{built.__name__}(config) builds a model without the swap that this config records (config.posswap): only the "
        "classes of swapped models put it in. Use type(model)(config), or an Auto class, as "
        "AutoModelForCausalLM.from_config(config); or hf_posswap.load for a checkpoint. For a model without the swap, "
        "take the config that it had before."
    )


def _to_dict(self: PluginConfig) -> dict[str, object]:
    values: dict[str, object] = self.posswap_native.to_dict(self)
    return values if getattr(self, "posswap", None) is None else values | REFUSED_IN_MEMORY


def _to_json_string(self: PluginConfig, use_diff: bool = True) -> str:
    text = str(self.posswap_native.to_json_string(self, use_diff))
    if getattr(self, "posswap", None) is None or self.model_type == POSSWAP_MODEL_TYPE:
        return text  # PEFT reads the config.json of the base, swapped or not, with this class
    code = _code_or_why(self)
    values = plugin_values(json.loads(text)) | {TESTED_MARK: tested()["transformers"][-1]}
    values |= {} if isinstance(code, UnsupportedSwapError) else {"auto_map": AUTO_MAP}
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _to_json_file(self: PluginConfig, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
    write_code(self, Path(json_file_path).parent)
    self.posswap_native.to_json_file(self, json_file_path, use_diff)


def _validate(self: PluginConfig) -> None:
    for check in config_validators(self.posswap_native):
        if check.__name__ != "validate_rope":  # the rope type is unknown to transformers, on purpose
            check(self)


def _reduce(self: PluginConfig) -> tuple[object, ...]:
    return _rebuild, (self.posswap_native, self.__dict__.copy())


def _deepcopy(self: PluginConfig, memo: dict[int, object]) -> PluginConfig:
    new = object.__new__(type(self))  # the compiler, which traces copies, cannot go by way of reduce
    memo[id(self)] = new
    new.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return new


def as_plugin_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Give a swapped model's `config` its class of plugin checkpoints, and return it."""
    give_config_class(config, plugin_config_class(native_config_class(config)))
    _refuse_by_values(config)
    config.architectures = config.architectures  # under the names that the class has for them
    return config


def refuse_other_values(config: PreTrainedConfig, original: object, given: Mapping[str, object]) -> None:
    """Refuse what was given for a value of `config` that its swap sets, unless it is that value.

    Args:
        config: of a swapped checkpoint.
        original: the values that the swap replaced, by their names.
        given: values for the config, by their names.

    Raises:
        RecordError: one differs.
    """
    other_names = config.attribute_map or {}
    set_by_swap = {other_names.get(name, name) for name in original} if isinstance(original, dict) else set()
    for name, value in given.items():
        if other_names.get(name, name) in set_by_swap and value != getattr(config, name):
            raise RecordError(
                f"{name}={value!r} was given for a checkpoint whose swap sets it, to {getattr(config, name)!r}.",
                "Leave it out; for another value load the base model and call patch_model with max_length or the "
                "fields of the scheme.",
            )


def read_plugin_config(values: dict[str, object], **kwargs: object) -> object:
    """Return the config of a plugin checkpoint; kwargs and result are those of transformers' `from_dict`.

    Raises:
        RecordError: no record, or one that cannot be read; or kwargs give another value than the swap has set.
    """
    from transformers import CONFIG_MAPPING

    record = SwapRecord.from_dict(values.get("posswap"))
    if record.base_type not in CONFIG_MAPPING or record.base_type == POSSWAP_MODEL_TYPE:
        raise RecordError(
            f"config.posswap names model type {record.base_type!r}, which this transformers does not have.",
            "Use the transformers that the checkpoint was made with. For a model type of your own, first import the "
            "module that registers it, in Python or by posswap --import.",
        )
    native = CONFIG_MAPPING[record.base_type]
    refuse_endless_lists("a swapped checkpoint", values)  # where transformers reads it, and not `hf_posswap.load`
    values = read(values)
    rope = values.get("rope_parameters")  # its rope_type is unknown to transformers, on purpose
    known = {"rope_parameters": record.original["rope_parameters"]} if "rope_parameters" in record.original else {}
    values = {**values, **known, "model_type": record.base_type}
    names = {*record.original, *native.attribute_map, *native.attribute_map.values()}
    if not names.isdisjoint(kwargs):
        saved = native.from_dict(values)
        if known:
            saved.rope_parameters = rope
        refuse_other_values(saved, record.original, kwargs)
    result = native.from_dict(values, **kwargs)
    config = result[0] if isinstance(result, tuple) else result
    if known:
        config.rope_parameters = rope
    as_plugin_config(config)
    return result


def write_code(config: PreTrainedConfig, folder: Path) -> None:
    """Write to `folder` what `trust_remote_code=True` needs to load a checkpoint of `config`; warn where it cannot be.

    Warns:
        PluginWarning: its scheme or family comes from another package, in a form that cannot go along.
    """
    code = _code_or_why(config)
    if isinstance(code, UnsupportedSwapError):
        warnings.warn(
            f"saved without the code for trust_remote_code=True: {code} Whoever loads the checkpoint needs hf_posswap "
            "and that package.",
            PluginWarning,
            stacklevel=4,
        )
        return
    for name, source in code.items():
        (folder / name).write_text(source, encoding="utf-8")


def _code_or_why(config: PreTrainedConfig) -> dict[str, str] | UnsupportedSwapError:
    try:
        return code_files(config)
    except UnsupportedSwapError as error:
        return error


def _rebuild(native: type[PreTrainedConfig], state: Mapping[str, object]) -> PluginConfig:
    config = object.__new__(plugin_config_class(native))
    config.__dict__.update(state)
    return config
