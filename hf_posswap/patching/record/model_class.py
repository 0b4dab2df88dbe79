"""The classes of a model that only hf_posswap can run, and of its submodels: subclasses of their stock classes.

`type(model).__name__` stays the stock one. Much goes by that name: a Trainer's label smoothing, losses, pipelines,
conversions of weights, PEFT. What must not take the model for a stock one goes by `config.architectures`, and there
the class has another name, under which `transformers` has it too: `transformers.PosswapLlamaForCausalLM`.

A submodel attends with the swap, but its config has no record, or that of the whole model. So it gets a subclass of its
stock class, which can be copied with its swap and refuses to be saved or rebuilt.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from torch import Tensor, nn

from hf_posswap.compat.accelerate_state import hook_of
from hf_posswap.compat.peft_wrappers import (
    base_layer_of,
    change_saved_weights,
    copy_for,
    original_of,
    read_adapter_weights,
    unload_whole,
    watch_adapter_names,
    watch_hotswaps,
)
from hf_posswap.compat.torch_modules import give_class
from hf_posswap.compat.transformers_loading import LoadingHooks, auto_mappings
from hf_posswap.compat.transformers_models import building_on_meta, let_record_outputs, tensor_parallel_size
from hf_posswap.errors import RecordError, UnsupportedSwapError
from hf_posswap.patching.record.adapter_marks import (
    RECORD,
    base_of,
    mark_adapter,
    refuse_misfit,
    refuse_misfit_weights,
    unmark_adapter,
)
from hf_posswap.patching.record.config_class import on_new_config_class, plugin_config_class
from hf_posswap.patching.record.record import SwapRecord, native_config
from hf_posswap.patching.record.refusals import architecture_of, mark, refuse_elsewhere, unmark, weight_to_mark
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.public_names import after_import
from hf_posswap.utils.threads import once

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter

    from hf_posswap.patching.record.config_class import PluginConfig

MARKED = "_posswap_marked"
"""Attribute of a swapped model: the weights that its checkpoints show as marked, by name, and their dimensions."""
_building: contextvars.ContextVar[type | None] = contextvars.ContextVar("posswap_building", default=None)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What swapped classes leave to modules that import this one.

    Attributes:
        restore: applies the swap of a record to a freshly built native model.
        initialise: initializes a module of a swapped model, unless a checkpoint did; returns whether a swap added the
            module.
        freeze: freezes the weights in a loaded model that its swap freezes.
    """

    restore: Callable[[Any, SwapRecord], None]
    initialise: Callable[[Any, nn.Module], bool]
    freeze: Callable[[nn.Module], None]


_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_runtime: list[Runtime] = []
_saving: contextvars.ContextVar[bool] = contextvars.ContextVar("posswap_saving", default=False)


def run_by(runtime: Runtime) -> None:
    """Let swapped classes be run by `runtime`."""
    _runtime[:] = [runtime]


def native_class(cls: type) -> type[PreTrainedModel]:
    """Return the stock class of a swapped class; any other class is its own."""
    return getattr(cls, "posswap_native", cls)


class SwappedModel(LoadingHooks):
    """What swapped classes have before their stock class: each is a subclass of both, made by `swapped_class`.

    The constructor takes the config of a swapped model and puts the swap in; `save_pretrained` marks what stock classes
    must not load, `from_pretrained` and `load_state_dict` take it marked or not.
    """

    posswap_native: Any
    """The stock class."""

    def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
        native = self.posswap_native
        record = _record_of(config, native)
        model = self
        give_class(model, native)  # until it is swapped: planning looks at a native model
        native.__init__(model, native_config(config), *args, **kwargs)
        carried = getattr(model.config, "posswap", None)
        if carried is None:
            _runtime[0].restore(model, record)
        elif carried != record.to_dict():  # by a constructor of the user's own that patches
            raise RecordError(
                f"{native.__name__} puts a swap into itself as it is built, to {carried['scheme']['name']}, and its "
                f"config records another, to {record.scheme['name']}: build it from a config without a swap."
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return (_empty, (self.posswap_native,), *object.__reduce_ex__(self, max(2, int(protocol)))[2:])

    @classmethod
    def can_generate(cls) -> bool:
        return bool(cls.posswap_native.can_generate())

    def posswap_fill(self, module: nn.Module) -> bool:
        return _runtime[0].initialise(self, module)

    def initialize_weights(self) -> None:
        model = self
        for module in model.modules():  # transformers asks the model nearest to each, which may be stock: a tower
            _runtime[0].initialise(model, module)
        self.posswap_native.initialize_weights(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("destination", "prefix"), args, strict=False)) | kwargs
        state, prefix = self.posswap_native.state_dict(self, *args, **kwargs), given.get("prefix", "")
        refuse_elsewhere(state, prefix, self.posswap_native.__name__)
        if _saving.get():
            _mark(self, state, prefix)
        return state

    def posswap_read(self, state: dict[str, Tensor], prefix: str, metadata: dict[str, object]) -> dict[str, object]:
        unmark(state, _marked(self), prefix)
        if prefix + RECORD in state:  # an adapter's weights, by PEFT's `set_peft_model_state_dict`
            state.update(_unmarked_adapter(self, {name: state.pop(name) for name in list(state)}))
        return dict(metadata)

    def save_pretrained(self, save_directory: str | Path, *args: object, **kwargs: Any) -> object:
        if kwargs.get("state_dict") is not None:  # trainers gather it
            kwargs["state_dict"] = dict(kwargs["state_dict"])
            for prefix, inner in _models_sharing_config(self):
                _mark(inner, kwargs["state_dict"], prefix)
        token = _saving.set(True)
        try:
            return self.posswap_native.save_pretrained(self, save_directory, *args, **kwargs)
        finally:
            _saving.reset(token)

    def get_adapter_state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Return the weights of an adapter that transformers put in; marked where they are to be saved."""
        weights = self.posswap_native.get_adapter_state_dict(self, *args, **kwargs)
        return _marked_adapter(self, weights) if _saving.get() else weights

    def load_adapter(self, *args: object, **kwargs: object) -> object:
        """Put an adapter in, as transformers does, unless it was trained on a base with another mechanism.

        Raises:
            RecordError: it was; nothing is put in.
        """
        native = self.posswap_native.load_adapter
        given = inspect.signature(native).bind(self, *args, **kwargs).arguments
        if given.get("adapter_state_dict") is None:
            loading = given.get("load_config")
            source = given.get("peft_model_id") or getattr(loading, "pretrained_model_name_or_path", None)
            if source is None:
                return native(self, *args, **kwargs)  # raises an error about the missing argument
            hub = {**getattr(loading, "download_kwargs", {}), **(given.get("adapter_kwargs") or {})}
            refuse_misfit(self, Path(source, hub.get("subfolder") or ""))
            config, weights = read_adapter_weights(source, **{key: hub[key] for key in _HUB if hub.get(key)})
            given = {"peft_config": config, **given, "adapter_state_dict": weights, "peft_model_id": None}
        given["adapter_state_dict"] = _unmarked_adapter(self, given["adapter_state_dict"])
        more = given.pop("kwargs", {})
        return native(**{**given, **more})

    @classmethod
    def posswap_conversions(
        cls, model: nn.Module
    ) -> list[WeightConverter]:  # saving does not undo them: it marks by itself
        return list(unmarking(sorted({name for _, inner in _models_sharing_config(model) for name in _marked(inner)})))

    @classmethod
    def posswap_loaded(cls, model: nn.Module) -> None:
        parts = [part for part in model.modules() if isinstance(part, Mechanism)]
        by_head = [part for part in parts if part.biases or next(part.parameters(), None) is not None]
        if by_head and tensor_parallel_size(model) > 1:
            scheme = _record_of(model.config, cls.posswap_native).scheme["name"]  # type: ignore[arg-type]
            raise UnsupportedSwapError(
                f"{scheme} has numbers for each attention head of {cls.__name__}, and tensor parallelism (tp_plan) "
                "leaves a process some of the heads. What works: FSDP2, DDP or device_map; or a scheme that gives all "
                "heads the same, such as rope, yarn or self_extend."
            )
        _runtime[0].freeze(model)


def swapped_class(native: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of the swapped models of a stock class, or of a subclass of one; the same each time."""
    assert native.config_class is not None
    plugin_config_class(native.config_class)  # a new one has the Auto classes ask for this one
    return _make_swapped_class(native)


@once
def _make_swapped_class(native: type[PreTrainedModel]) -> type[PreTrainedModel]:
    assert native.config_class is not None
    swapped = _subclass(SwappedModel, native, config_class=plugin_config_class(native.config_class))
    _announce(swapped)
    return swapped


def _subclass(base: type, native: type[PreTrainedModel], **attributes: object) -> type[PreTrainedModel]:
    """Return a new class of `base` and the stock class `native`, under its name, with more `attributes`."""
    body = {
        "__module__": native.__module__,  # transformers, and families, look at the code around a class
        "__qualname__": architecture_of(native.__qualname__),
        "__doc__": native.__doc__,
        "posswap_native": native,
        **attributes,
    }
    new_class = type(native.__name__, (base, native), body)
    let_record_outputs(new_class)
    return new_class


def take_swapped_class(model: nn.Module, attention: Iterable[str]) -> None:
    """Make a model whose swap only hf_posswap runs, and its base model, instances of their swapped classes.

    Other swapped transformers models inside it become instances of their part classes.

    Args:
        model: after the swap.
        attention: paths of the first attention module of each swapped stack.
    """
    attention = tuple(attention)
    for inner in _inner_models(model):
        if any(path.startswith(f"{inner}.") for path in attention):
            part: Any = model.get_submodule(inner)
            give_class(part, swapped_part_class(type(part)))
    inner_models = _models_sharing_config(model)
    marked = {weight_to_mark(model, path) for path in attention}
    for prefix, inner in reversed(inner_models):  # the innermost first
        own_marked = {name for name in marked if name.startswith(prefix)}
        marked -= own_marked
        dimensions = {name: _tensor(model, name).dim() for name in own_marked}
        inner.__dict__[MARKED] = {name.removeprefix(prefix): count for name, count in dimensions.items()}
        give_class(inner, swapped_class(native_class(type(inner))))


def leave_swapped_class(model: nn.Module) -> None:
    """Restore the classes of a model, its base model and its submodules."""
    for path in _inner_models(model):
        if is_part(inner := model.get_submodule(path)):
            give_class(inner, native_class(type(inner)))
    for _, inner in _models_sharing_config(model):
        inner.__dict__.pop(MARKED, None)
        if inner.__class__ is not native_class(type(inner)):
            give_class(inner, native_class(type(inner)))


def unmarking(names: Iterable[str]) -> Iterator[WeightConverter]:
    """Yield the conversions by which `from_pretrained` gives marked weights of these names their shapes back.

    Weights that are not marked, as those of a base checkpoint and of older swapped ones, stay as they are.
    """
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Unmark(ConversionOps):
        def convert(
            self,
            input_dict: dict[str, Any],
            source_patterns: list[str],
            target_patterns: list[str],
            **kwargs: Any,
        ) -> dict[str, Any]:
            ((_, weight),) = input_dict.items()
            tensor = weight[0] if isinstance(weight, list) else weight
            model, name = kwargs["model"], kwargs["full_layer_name"]
            dimensions = _tensor(model, name).dim()
            return {target_patterns[0]: tensor.squeeze(0) if tensor.dim() == dimensions + 1 else tensor}

    for name in names:
        yield WeightConverter(name.replace(".", r"\.") + "$", name, operations=[Unmark()])


def register_models(config_class: type[PluginConfig]) -> None:
    """Make every Auto class that knows the native config class of `config_class` know it, too."""
    native = config_class.posswap_native
    for mapping in auto_mappings():
        if config_class in mapping or native not in mapping:
            continue
        registered = mapping[native]
        classes = registered if isinstance(registered, tuple) else (registered,)
        mapping.register(config_class, swapped_class(classes[0]), exist_ok=True)


on_new_config_class(register_models)


def _marked_adapter(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    base = base_of(model)
    return mark_adapter(weights, base.config.posswap) if issubclass(type(base), SwappedModel) else weights


def _unmarked_adapter(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    refuse_misfit_weights(model, weights)
    return unmark_adapter(weights)


def _refuse_mixed_positions(model: nn.Module, adapter_names: list[str]) -> None:
    """Refuse a batch whose rows would need position parameters of several adapters: attention reads one set for all.

    Raises:
        UnsupportedSwapError: names the module, and what works.
    """
    for name, module in model.named_modules():
        if not isinstance(original_of(module), Mechanism):
            continue
        used = {adapter: copy_for(module, adapter) for adapter in adapter_names}
        if any(copy is not copy_for(module, None) for copy in used.values()):
            raise UnsupportedSwapError(
                f"adapter_names gives rows of one batch to {', '.join(used)}, and {name} has position parameters for "
                "each adapter, of which a batch can use only those of the active one. What works: one batch for each "
                "adapter, after set_adapter, or disable_adapter for __base__."
            )


after_import(
    "peft.peft_model",
    ready="get_model_status",
    action=lambda module: change_saved_weights(module, _marked_adapter, _unmarked_adapter),
)
after_import(
    "peft.peft_model",
    ready="get_model_status",
    action=lambda module: watch_adapter_names(module, _refuse_mixed_positions),
)
after_import(
    "peft.utils.hotswap",
    ready="hotswap_adapter",
    action=lambda module: watch_hotswaps(module, refuse_misfit, _unmarked_adapter),
)

after_import(
    "peft.tuners.tuners_utils",
    ready="BaseTuner",
    action=lambda module: unload_whole(module.BaseTuner, Mechanism),
)
after_import(
    "peft.tuners.mixed.model",
    ready="MixedModel",
    action=lambda module: unload_whole(module.MixedModel, Mechanism),
)


def _record_of(config: PreTrainedConfig, native: type[PreTrainedModel]) -> SwapRecord:
    if getattr(config, "posswap", None) is None:
        raise RecordError(
            f"{architecture_of(native.__name__)} is the class of swapped models, and this {type(config).__name__} "
            f"carries no swap (config.posswap): use {native.__name__}, and hf_posswap.patch_model to swap it."
        )
    return SwapRecord.from_dict(config.posswap)


def _models_sharing_config(model: Any) -> list[tuple[str, Any]]:
    """Return `model` and, if it has one that shares its config, its base model, with the prefix of its weights."""
    base = model.base_model
    inner = base is not model and base.config is model.config
    return [("", model), *([(f"{model.base_model_prefix}.", base)] if inner else [])]


def _inner_models(model: nn.Module) -> list[str]:
    """Return the paths of the transformers models in `model`, but for its base model, where that shares its config."""
    from transformers import PreTrainedModel

    known = {id(inner) for _, inner in _models_sharing_config(model)}
    modules = model.named_modules()
    return [path for path, module in modules if isinstance(module, PreTrainedModel) and id(module) not in known]


def _mark(model: Any, state: dict[str, Tensor], prefix: str) -> None:
    """Mark weights of `model` in a state dict that is to be saved, in place."""
    from transformers.integrations.accelerate import load_offloaded_parameter

    names = _marked(model)
    for name in names:
        weight = state.get(prefix + name)
        if weight is not None and weight.is_meta and any(map(hook_of, model.modules())):
            state[prefix + name] = load_offloaded_parameter(model, name)  # which saving would do later, unmarked
    mark(state, names, prefix)


def _marked(model: object) -> dict[str, int]:
    return vars(model).get(MARKED, {})


def _tensor(model: nn.Module, name: str) -> Tensor:
    """Return the weight `name` of `model`, also where PEFT wraps its module."""
    path, _, leaf = name.rpartition(".")
    return getattr(base_layer_of(original_of(model.get_submodule(path))), leaf)


def _announce(swapped: Any) -> None:
    """Set the swapped class of a transformers class in `transformers`, under the name that `architectures` has."""
    import transformers

    name, native = architecture_of(swapped.__name__), swapped.posswap_native
    installed = __name__.startswith("hf_posswap.")  # code that came with a checkpoint must not take its place
    if getattr(transformers, native.__name__, None) is native and (installed or not hasattr(transformers, name)):
        # transformers may import itself a second time: the class of its lazy modules is what both have in common
        home = transformers if type(transformers) is ModuleType else type(transformers)
        setattr(home, name, swapped)


def _empty(native: type[PreTrainedModel], is_part: bool = False) -> PreTrainedModel:
    """Return an empty instance of the swapped class of `native`, or of its part class, for copies and pickles."""
    cls = swapped_part_class(native) if is_part else swapped_class(native)
    return cls.__new__(cls)


class SwappedPart(LoadingHooks):
    """What parts of swapped models have before their stock class: each is a subclass of both."""

    posswap_native: Any
    """The stock class."""

    def __init__(self, *_: object, **__: object) -> None:
        name = self.posswap_native.__name__
        raise RecordError(
            f"this class is that of a {name} inside a swapped model, and the config of a part does not hold the swap: "
            f"a {name} built from it would be unswapped. Use copy.deepcopy(part), or take the part out of a whole that "
            "type(model)(model.config) makes."
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return (_empty, (self.posswap_native, True), *object.__reduce_ex__(self, max(2, int(protocol)))[2:])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("destination", "prefix"), args, strict=False)) | kwargs
        state = self.posswap_native.state_dict(self, *args, **kwargs)
        refuse_elsewhere(state, given.get("prefix", ""), self.posswap_native.__name__)
        return state

    def posswap_read(self, state: dict[str, Tensor], prefix: str, metadata: dict[str, object]) -> dict[str, object]:
        return dict(metadata)

    def save_pretrained(self, *_: object, **__: object) -> NoReturn:
        name = self.posswap_native.__name__
        raise UnsupportedSwapError(
            f"this {name} is a part of a swapped model, whose config alone records the swap: saved by itself it would "
            "be loaded without. Save the whole model; or unpatch_model(whole), patch_model(part), and save the part."
        )


def is_part(model: nn.Module) -> bool:
    """Return whether `model` is a submodel of a swapped model, without its own record."""
    return isinstance(model, SwappedPart)


@once
def swapped_part_class(native: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the part class of submodels of the stock class `native`; the same each time."""
    return _subclass(SwappedPart, native)


class _ReachedSwapError(BaseException):
    """Ends a constructor of the user's own where it would patch `model`, which it builds to plan that very patch."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


def native_skeleton(model: nn.Module, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model on meta of the class of `model` before any swap, for a native `config`; see `build_class`."""
    with building_on_meta():
        return build_class(native_class(type(model)), config)


def build_class(cls: type, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a fresh model of a stock class, or of a subclass of one, for a native `config`.

    Where the class patches itself in its constructor, the model is returned as it is before that.
    """
    token = _building.set(cls)
    try:
        return cls(config)
    except _ReachedSwapError as reached:
        return reached.model
    finally:
        _building.reset(token)


def stop_if_building(model: PreTrainedModel) -> None:
    """End the construction of `model` here, where it is one that `build_class` makes."""
    if _building.get() is type(model):
        raise _ReachedSwapError(model)
