"""What PEFT calls the modules that it wraps, and the copies that it trains."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_posswap.compat.transformers_loading import unpack_4_bit_weights

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

ChangeWeights = Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]
"""Takes a model and weights of it, and returns the weights to use instead."""
LEFT_OVER = "posswap_left_over"
"""Attribute of a PEFT model: the names of the weights, of the adapter read last, that it has no place for."""
MISSING = "posswap_missing"
"""Attribute of a PEFT model: the names of the weights that the adapter read last lacks."""
_WRAPPED = re.compile(r"\.(modules_to_save\.[^.]+|original_module|base_layer)\.")


def is_adapted(module: nn.Module) -> bool:
    """Return whether `module` is one of PEFT's around a module of the model.

    Touches `base_layer` of tuner layers and `original_module` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it
    a swap would write into weights that an adapter goes by.
    """
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def adapters_at_work(model: nn.Module) -> dict[str, object]:
    """Return which adapters each wrapped module of `model` adds, by its path; {} without PEFT.

    Touches `active_adapters`, `disable_adapters`, `merged_adapters` and `scaling` of tuner layers and of
    `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it a model is measured once for all of its adapters.
    """
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    wrapped = {path: module for path, module in model.named_modules() if is_adapted(module)}
    return {path: [getattr(module, name, None) for name in names] for path, module in wrapped.items()}


def original_of(module: nn.Module) -> Any:
    """Return the module of the model that PEFT has wrapped in `module`; `module` where it has not.

    Touches `original_module` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it a mechanism that is trained in
    full is taken for another one.
    """
    return getattr(module, "original_module", module)


def base_layer_of(module: nn.Module) -> nn.Module:
    """Return the module of the model that PEFT adds to in `module`, a tuner layer; `module` where it is none.

    Touches `base_layer` of tuner layers (peft 0.18 to 0.21). Without it the weights below an adapter are not found.
    """
    return getattr(module, "base_layer", module)


def trained_copies_of(module: nn.Module) -> list[Any]:
    """Return the copies that PEFT trains in full instead of `module`, and saves with adapters; [] where there is none.

    Touches `modules_to_save` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it what is set on a module does
    not reach the copy that is trained, and position parameters that an adapter holds are taken for lost.
    """
    return list(getattr(module, "modules_to_save", {}).values())


def copy_for(module: nn.Module, adapter: str | None) -> object:
    """Return the copy of `module` that rows of an adapter use, or the module of the model where it has none.

    Touches `modules_to_save`, `original_module`, `active_adapters` and `disable_adapters` of `ModulesToSaveWrapper`
    (peft 0.18 to 0.21). Without it a batch of several adapters gets the positions of one of them silently.

    Args:
        module: wrapped by PEFT, or not.
        adapter: its name; None: the one that is active.
    """
    copies = getattr(module, "modules_to_save", {})
    if adapter is None and not getattr(module, "disable_adapters", True):
        adapter = next(iter(getattr(module, "active_adapters", ())), None)
    return copies[adapter] if adapter in copies else original_of(module)


def is_copy(path: str) -> bool:
    """Return whether the parameter at `path` is one of the copies that PEFT keeps of a module.

    Touches the names of `ModulesToSaveWrapper` in a path (peft 0.18 to 0.21). Without it a copy of a position table is
    taken for another table.
    """
    return not {"original_module", "modules_to_save"}.isdisjoint(path.split("."))


def name_without_adapter(name: str) -> str:
    """Return what the transformers model calls the parameter that a PEFT model calls `name`.

    Touches the names of wrappers in a state dict, and the prefix of `PeftModel` (peft 0.18 to 0.21). Without it the
    parameters of a swap are not found in a PEFT model.

    Example:
        >>> name_without_adapter("base_model.model.transformer.wte.modules_to_save.default.weight")
        'transformer.wte.weight'
    """
    return _WRAPPED.sub(".", name.removeprefix("base_model.model."))


def weights_without_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a transformers model into which PEFT put adapters, as the model has them without.

    Touches `base_layer` of tuner layers and `original_module` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it
    a model with adapters is taken for another base.
    """
    adapted = {name for name, module in model.named_modules() if is_adapted(module)}
    weights = {}
    unpack_4_bit_weights(model)
    for key, weight in model.state_dict().items():
        segments = key.split(".")
        inside = [".".join(segments[:end]) in adapted for end in range(len(segments))]
        here = [segment for segment, is_inside in zip(segments, inside, strict=True) if is_inside]
        if all(segment in ("base_layer", "original_module") for segment in here):
            kept = [segment for segment, is_inside in zip(segments, inside, strict=True) if not is_inside]
            weights[".".join(kept)] = weight
    return weights


def read_adapter_weights(source: str | Path, **hub: Any) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Return the PEFT config and the weights of the adapter at `source`, as its files hold them.

    Touches `peft.PeftConfig.from_pretrained` and `peft.utils.load_peft_weights` (peft 0.18 to 0.21). Without it
    transformers would read the weights itself, and take marked ones for those of another shape.

    Args:
        source: a folder or a Hub id.
        hub: arguments for the Hub: revision, token, cache_dir, ...
    """
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    return PeftConfig.from_pretrained(str(source), **hub), load_peft_weights(str(source), device="cpu", **hub)


def change_saved_weights(module: ModuleType, saved: ChangeWeights, loaded: ChangeWeights) -> None:
    """Have the state dicts that PEFT's models write to a file, and take from one, go through two functions.

    Touches `get_peft_model_state_dict` and `set_peft_model_state_dict` of `peft.peft_model`, which `PeftModel` calls
    when it saves and loads (peft 0.18 to 0.21). Without it adapters of a swapped base go on an unswapped one.

    Args:
        module: `peft.peft_model`.
        saved: given the PEFT model and an adapter's weights, returns what is written.
        loaded: given the PEFT model and what was read, returns the weights to load.
    """
    write = module.get_peft_model_state_dict
    take = module.set_peft_model_state_dict

    @functools.wraps(write)
    def _get(model: nn.Module, *args: object, **kwargs: object) -> object:
        return saved(model, write(model, *args, **kwargs))

    @functools.wraps(take)
    def _set(model: nn.Module, peft_model_state_dict: dict[str, Tensor], *args: object, **kwargs: object) -> object:
        return take(model, loaded(model, peft_model_state_dict), *args, **kwargs)

    vars(module).update(get_peft_model_state_dict=_get, set_peft_model_state_dict=_set)


def watch_hotswaps(module: ModuleType, loading: Callable[[nn.Module, Path], None], loaded: ChangeWeights) -> None:
    """Have two functions called before PEFT exchanges the weights of an adapter for those of another one.

    Touches `load_peft_weights` and `hotswap_adapter_from_state_dict` as `hotswap_adapter` calls them, and the names of
    their arguments (peft 0.18 to 0.21). Without it marked weights of the right base end in "unexpected keys found", and
    weights of another base that are not marked are taken silently.

    Args:
        module: `peft.utils.hotswap`.
        loading: given the PEFT model and the new adapter's folder or Hub id, its subfolder appended, where it was read
            from one; it may raise.
        loaded: given the PEFT model and what was read, returns the weights to take.
    """
    read, take = module.load_peft_weights, module.hotswap_adapter_from_state_dict
    arguments = {each: inspect.signature(each) for each in (read, take)}
    last: ContextVar[tuple[Path, dict[str, Tensor]] | None] = ContextVar("posswap_hotswap", default=None)

    @functools.wraps(read)
    def _read(*args: object, **kwargs: object) -> object:
        given, weights = arguments[read].bind(*args, **kwargs).arguments, read(*args, **kwargs)
        hub = given.get("hf_hub_download_kwargs", {})
        last.set((Path(given["model_id"], hub.get("subfolder") or ""), weights))
        return weights

    @functools.wraps(take)
    def _take(*args: object, **kwargs: object) -> object:
        given = arguments[take].bind(*args, **kwargs).arguments
        source, weights = last.get() or (None, {})
        last.set(None)
        if source is not None and not {*map(id, weights.values())}.isdisjoint(map(id, given["state_dict"].values())):
            loading(given["model"], source)
        given["state_dict"] = loaded(given["model"], given["state_dict"])
        return take(**given)

    vars(module).update(load_peft_weights=_read, hotswap_adapter_from_state_dict=_take)


def watch_adapter_names(module: ModuleType, naming: Callable[[nn.Module, list[str]], None]) -> None:
    """Have a function called before PEFT runs a batch whose rows use different adapters.

    Touches `PeftModel._enable_peft_forward_hooks` (peft 0.18 to 0.21), which forward and generate enter first. An error
    that is raised later leaves PEFT's hooks in the model. Without it all rows get one adapter's positions silently.

    Args:
        module: `peft.peft_model`.
        naming: given the PEFT model and the `adapter_names` of the rows; it may raise.
    """
    cls = module.PeftModel
    enable = cls._enable_peft_forward_hooks

    @functools.wraps(enable)
    def _enable(self: nn.Module, *args: object, **kwargs: object) -> object:
        names = kwargs.get("adapter_names")
        if isinstance(names, list | tuple):
            naming(self, list(names))
        return enable(self, *args, **kwargs)

    cls._enable_peft_forward_hooks = _enable


def unload_whole(cls: type, whole: type[nn.Module]) -> None:
    """Have tuners of PEFT put some modules back as they are when they unload, and hand them no `weight` and `bias`.

    Touches `_replace_module` of a tuner's model, by the order of its arguments (peft 0.18 to 0.21). Without it
    `merge_and_unload` of IA3, LoHa, OFT and others ends in an AttributeError, half done.

    Args:
        cls: `peft.tuners.tuners_utils.BaseTuner`, or a class that has its own `_replace_module`.
        whole: class of the modules that are put back as they are.
    """
    replace = vars(cls)["_replace_module"]

    @functools.wraps(replace)
    def _replace(self: object, parent: nn.Module, name: str, new: nn.Module, old: nn.Module) -> None:
        if isinstance(new, whole):
            setattr(parent, name, new)
        else:
            replace(self, parent, name, new, old)

    cls._replace_module = _replace  # type: ignore[attr-defined]


def watch_own_adapters(
    module: ModuleType,
    loading: Callable[[nn.Module, Path], None],
    given_weights: Callable[[nn.Module, dict[str, Tensor]], None],
) -> None:
    """Have two functions called before transformers itself puts an adapter into one of its models.

    Touches `PeftAdapterMixin.load_adapter` by the names of its arguments, and `download_kwargs` of what `load_config`
    is (transformers 5.14 to 5.24). Without it an adapter of a swapped base is refused by its shapes, after empty layers
    were put into the model for it.

    Args:
        module: `transformers.integrations.peft`.
        loading: given the model and the adapter's folder or Hub id, its subfolder appended; it may raise.
        given_weights: given the model and the adapter's weights, where they are passed in memory; it may raise.
    """
    cls = module.PeftAdapterMixin
    load = cls.load_adapter
    arguments = inspect.signature(load)

    @functools.wraps(load)
    def _load(self: nn.Module, *args: object, **kwargs: object) -> object:
        given = arguments.bind(self, *args, **kwargs).arguments
        config, weights = given.get("load_config"), given.get("adapter_state_dict")
        source = given.get("peft_model_id") or getattr(config, "pretrained_model_name_or_path", None)
        if weights is not None:
            given_weights(self, weights)
        elif source is not None:
            hub = {**getattr(config, "download_kwargs", {}), **(given.get("adapter_kwargs") or {})}
            loading(self, Path(source, hub.get("subfolder") or ""))
        return load(self, *args, **kwargs)

    cls.load_adapter = _load


def watch_adapters(
    module: ModuleType,
    saving: Callable[[PreTrainedModel, bool], None],
    saved: Callable[[PreTrainedModel, Path, list[str] | None], None],
    loading: Callable[[nn.Module, Path], None],
) -> None:
    """Have three functions called where PEFT's models save themselves, and load adapters.

    Touches `PeftModel.save_pretrained`, `.from_pretrained` and `.load_adapter` by the names of their arguments,
    `is_prompt_learning` of a config, and `unexpected_keys` and `missing_keys` of what the last one returns, kept as
    `LEFT_OVER` and `MISSING` (peft 0.18 to 0.21). Without it an adapter that PEFT, TRL or a Trainer saves says nothing
    of the swap of its base.

    Args:
        module: `peft.peft_model`.
        saving: before it is saved, given the PEFT model and whether PEFT converts the weights to those of another
            initialization (PiSSA, OLoRA, ...); it may raise.
        saved: afterwards, in the process that writes, given the folder as well, and the names of the adapters that
            were saved; None: all.
        loading: before an adapter is put on a model, given that model, PEFT's or not, and the adapter's folder or Hub
            id, its subfolder appended; it may raise.
    """
    cls = module.PeftModel
    save, load, begin = cls.save_pretrained, cls.load_adapter, cls.from_pretrained.__func__
    arguments = {each: inspect.signature(each) for each in (save, load, begin)}

    @functools.wraps(save)
    def _save(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
        given = arguments[save].bind(self, *args, **kwargs).arguments
        saving(self, given.get("path_initial_model_for_weight_conversion") is not None)
        out = save(self, *args, **kwargs)
        if given.get("is_main_process", True):
            saved(self, Path(given["save_directory"]), given.get("selected_adapters"))
        return out

    @functools.wraps(load)
    def _load(self: Any, *args: object, **kwargs: object) -> object:
        given = arguments[load].bind(self, *args, **kwargs).arguments
        loading(self, Path(given["model_id"], given.get("kwargs", {}).get("subfolder") or ""))
        result = load(self, *args, **kwargs)
        left_over = tuple(getattr(result, "unexpected_keys", ()))
        if self.peft_config[given["adapter_name"]].is_prompt_learning:  # PEFT takes prompts, which are not in the base
            left_over = tuple(name for name in left_over if name.startswith("base_model."))
        vars(self).update({LEFT_OVER: left_over, MISSING: tuple(getattr(result, "missing_keys", ()))})
        return result

    @functools.wraps(begin)
    def _begin(cls: type, /, *args: object, **kwargs: object) -> object:
        given = arguments[begin].bind(cls, *args, **kwargs).arguments
        loading(given["model"], Path(given["model_id"], given.get("kwargs", {}).get("subfolder") or ""))
        return begin(cls, *args, **kwargs)

    cls.save_pretrained, cls.load_adapter = _save, _load
    cls.from_pretrained = classmethod(_begin)
