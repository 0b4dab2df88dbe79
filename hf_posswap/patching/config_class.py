"""The config class of a model that only hf_posswap can run: native in memory, refused by stock transformers on disk."""

from __future__ import annotations

import copy
import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

from hf_posswap.errors import PluginWarning, UnsupportedSwapError
from hf_posswap.families.locating import family_of
from hf_posswap.patching.bundle import AUTO_MAP, code_files

POSSWAP_MODEL_TYPE = "posswap"
REFUSED_DTYPE = "posswap (pip install hf-posswap)"
"""Written as dtype where a native class would otherwise load the weights without a word: torch has no such dtype."""
KEPT_DTYPE = "posswap_dtype"
"""Where config.json has the dtype then."""


@functools.cache
def plugin_config_class(native: Any) -> Any:
    """Return a subclass of the config class `native` that writes `model_type: posswap` into config.json.

    In memory it stays what it was, so PEFT, generation and trainers find the model type that they know; on disk no
    stock class recognises it. Beside config.json it writes the code that `trust_remote_code=True` runs.
    """

    def to_json_string(self: Any, use_diff: bool = True) -> str:
        if getattr(self, "posswap", None) is None or self.model_type == POSSWAP_MODEL_TYPE:
            # PEFT reads the config.json of the base, swapped or not, with this class
            return str(native.to_json_string(self, use_diff))
        return _json_string(native.to_json_string(self, use_diff), _code_or_why(self), _leaves_no_trace(self))

    def to_json_file(self: Any, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        write_code(self, Path(json_file_path).parent)
        native.to_json_file(self, json_file_path, use_diff)

    def validate(self: Any) -> None:
        for check in getattr(native, "__class_validators__", ()):
            if check.__name__ != "validate_rope":  # the rope type is unknown to transformers, on purpose
                check(self)

    def reduce(self: Any) -> tuple[Any, ...]:
        return _rebuild, (native, self.__dict__.copy())

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        new = object.__new__(type(self))  # the compiler, which traces copies, cannot go by way of reduce
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    body = {
        "__deepcopy__": deepcopy,
        "__module__": __name__,
        "__reduce__": reduce,
        "__reduce_ex__": lambda self, _: reduce(self),
        "posswap_native": native,
        "to_json_file": to_json_file,
        "to_json_string": to_json_string,
        "validate": validate,
    }
    return type(f"Posswap{native.__name__}", (native,), body)


def write_code(config: Any, folder: Path) -> None:
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


def _code_or_why(config: Any) -> dict[str, str] | UnsupportedSwapError:
    try:
        return code_files(config)
    except UnsupportedSwapError as error:
        return error


def _leaves_no_trace(config: Any) -> bool:
    parts = family_of(config).parts
    computed = any(spec.table is not None and spec.table.computed for spec in parts)
    return computed or any(spec.own.leaves_no_trace(config) for spec in parts if spec.own is not None)


def _json_string(native: str, code: dict[str, str] | UnsupportedSwapError, no_trace: bool) -> str:
    values = {key: value for key, value in json.loads(native).items() if key != "auto_map"}
    values["model_type"] = POSSWAP_MODEL_TYPE
    if no_trace:
        values |= {KEPT_DTYPE: values.get("dtype"), "dtype": REFUSED_DTYPE}
    if not isinstance(code, UnsupportedSwapError):
        values["auto_map"] = AUTO_MAP
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def with_dtype(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json with their dtype, where stock classes were to find none."""
    if values.get("dtype") != REFUSED_DTYPE:
        return values
    return {key: value for key, value in values.items() if key != KEPT_DTYPE} | {"dtype": values.get(KEPT_DTYPE)}


def native_config_class(config: Any) -> type:
    """Return the class that the config had before any swap."""
    return getattr(type(config), "posswap_native", type(config))


def _rebuild(native: type, state: dict[str, Any]) -> Any:
    config: Any = object.__new__(plugin_config_class(native))
    config.__dict__.update(state)
    return config
