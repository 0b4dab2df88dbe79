"""What transformers keeps of a model class, its config or DeepSpeed under private names.

All are alike in transformers 5.14 to 5.23, but for what says otherwise.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_OF_FILES = ("_name_or_path", "_commit_hash", "transformers_version")
_OF_RUNNING = ("attn_implementation", "_attn_implementation")


_FILLING = (
    nn.init.__name__,
    "transformers.initialization",
)  # modules whose functions replace torch's while weights are filled


class _SkipInit(TorchFunctionMode):
    """Leaves every tensor as it is that `torch.nn.init` is given. A mode is the thread's own."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if getattr(func, "__module__", None) in _FILLING:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_initialising() -> Iterator[None]:
    """Build models of transformers in the block, in this thread alone, without filling their weights; tied ones are.

    Transformers' own `no_init_weights` exchanges functions of torch for the whole process: two threads in it at once
    leave them exchanged, and no model built after that has weights.

    Touches that the functions of `torch.nn.init` ask `__torch_function__` modes, which torch promises of its operators
    alone, and that those of `transformers.initialization` call them. Without it a model on meta takes two to four times
    as long to build.
    """
    with _SkipInit():
        yield


@contextmanager
def building_on_meta() -> Iterator[None]:
    """Build models of transformers on the meta device in the block, in this thread alone.

    Touches what `without_initialising` does. Without it they take two to four times as long to build.
    """
    with torch.device("meta"), _SkipInit():
        yield


def mark_initialised(module: nn.Module | Tensor) -> None:
    """Make transformers skip `module`, or a tensor, when it fills the weights of a loaded model.

    Touches `module._is_hf_initialized`. Without it the replacement of a table is filled as a table.
    """
    vars(module)["_is_hf_initialized"] = True


def is_initialised(tensor: Tensor) -> bool:
    """Return whether a load, or `mark_initialised`, has set the values of `tensor`.

    Touches `tensor._is_hf_initialized`. Without it weights from a checkpoint would be overwritten.
    """
    return bool(getattr(tensor, "_is_hf_initialized", False))


def fill_weights(cls: type[PreTrainedModel], model: PreTrainedModel, module: nn.Module) -> None:
    """Fill the weights of `module`, a part of `model`, as the class `cls` of `model` fills them.

    Touches `PreTrainedModel._init_weights`. Without it a new table would not begin as the family's tables do.
    """
    cls._init_weights(model, module)


def let_record_outputs(cls: type[PreTrainedModel]) -> None:
    """Have models of the class `cls` return hidden states and attentions where no model of it was built, but converted.

    Touches `utils.output_capturing._CAN_RECORD_REGISTRY`, which constructors fill by the name of the class, and
    `PreTrainedModel._can_record_outputs`. Without it `output_hidden_states=True` silently gives None.
    """
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    dict.update(_CAN_RECORD_REGISTRY, {str(cls): cls._can_record_outputs})  # in 5.23 it takes models alone as keys


def unsaved_keys(model: PreTrainedModel | type[PreTrainedModel]) -> tuple[str, ...]:
    """Return the names of weights that `model`, or a class of models, leaves out of checkpoints.

    Touches `PreTrainedModel._keys_to_ignore_on_save`. Without it tables that a class computes by itself would not be
    saved after a swap that changed them.
    """
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


def set_unsaved_keys(model: PreTrainedModel, keys: set[str] | list[str] | None) -> set[str] | list[str] | None:
    """Have `model` leave out of its checkpoints the weights called `keys`, or what its class says, where None.

    Touches the same as `unsaved_keys`.

    Returns:
        The keys that `model` itself had, or None; pass them to this function to restore it.
    """
    before = vars(model).pop("_keys_to_ignore_on_save", None)
    if keys is not None:
        model._keys_to_ignore_on_save = keys
    return before


def tensor_parallel_size(model: nn.Module) -> int:
    """Return over how many processes transformers has spread the weights of `model` by tensor parallelism.

    Touches `PreTrainedModel._tp_size`. Without it a swap would be made of shards.
    """
    return getattr(model, "_tp_size", None) or 1


def give_config_class(config: PreTrainedConfig, cls: type) -> None:
    """Make `config` an instance of `cls`, a subclass or base class of its class, with all its values.

    Touches `config.__class__`, which Python lets one set where both classes lay their objects out alike (configs are
    dataclasses without slots). Without it a config would have to be rebuilt by its class, which may change it.
    """
    config.__class__ = cls


def model_under_construction(name: str) -> object:
    """Return the model whose constructor sets `name`, the first that it sets of its config; None: it is set otherwise.

    It is to be asked by the `__setattr__` of the config's class, which looks at who called it.

    Touches `_attn_implementation_internal`, which `PreTrainedModel.__init__` sets before a model has anything: a setter
    of the config or of the model sets it elsewhere. Without it a stock class would silently build an unswapped model
    of a swapped config.
    """
    if name != "_attn_implementation_internal":  # first: a forward that sets something else may be compiled
        return None
    frame = inspect.currentframe()
    caller = None if frame is None or frame.f_back is None else frame.f_back.f_back
    del frame  # which would keep itself, and all that its callers hold
    if caller is None or caller.f_code.co_name != "__init__":
        return None
    return caller.f_locals.get("self")


def config_validators(cls: type) -> tuple[Callable[[PreTrainedConfig], None], ...]:
    """Return the functions by which a config of the class `cls` is validated as a whole.

    Touches `__class_validators__` of huggingface_hub's strict dataclasses, which transformers' configs are. Without it
    a swapped config, whose rope type is unknown on purpose, cannot be validated for all the rest.
    """
    return tuple(getattr(cls, "__class_validators__", ()))


def lasting_values(config: PreTrainedConfig) -> dict[str, object]:
    """Return what `config` says of the model itself, and not of where it was loaded from, what wrote it or runs it.

    Touches the same keys as `without_origin`, and those of the attention implementation.
    """
    values = without_origin(config.to_dict())
    return {key: value for key, value in values.items() if key not in _OF_RUNNING}


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config for each layer if the layers differ, otherwise the config alone.

    Touches `is_heterogeneous` and `per_layer_config`, where a release has them: it refuses to read what differs, such
    as Gemma 4's head_dim, from the config of all layers.
    """
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def without_origin(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a config as JSON, or as a dict, without those that say where they come from.

    Touches the keys `_name_or_path`, `_commit_hash` and `transformers_version`, also of configs inside. Without it the
    same model from another folder is taken for another one.
    """
    lasting = {key: value for key, value in values.items() if key not in _OF_FILES}
    return {key: without_origin(value) if isinstance(value, dict) else value for key, value in lasting.items()}


def masks_the_future(code: ModuleType) -> bool:
    """Return whether the modeling `code` of an encoder that may be a decoder masks what lies ahead.

    Touches the import of `create_causal_mask` in each modeling module: decoders of BigBird, Megatron-BERT, RemBERT and
    RoFormer see their future where it is missing, as it is in transformers 5.14. Without it that is not noticed.
    """
    return hasattr(code, "create_causal_mask")


def opt_lacks_final_norm(config: PreTrainedConfig) -> bool:
    """Return whether an OPT of `config` has no norm behind its last layer, as some early checkpoints.

    Touches `OPTConfig._remove_final_layer_norm`. Without it such a checkpoint would be converted with a norm.
    """
    return bool(config._remove_final_layer_norm)


def is_deepspeed_engine(model: PreTrainedModel) -> bool:
    """Return whether `model` is DeepSpeed's engine around another, without importing DeepSpeed.

    Touches no private name; the class is public as `deepspeed.DeepSpeedEngine` (0.16 to 0.19).
    """
    known = sys.modules.get("deepspeed")
    return known is not None and isinstance(model, known.DeepSpeedEngine)


def load_whole() -> None:
    """Load models unsharded in this process, also after a training under ZeRO-3.

    Touches `transformers.integrations.deepspeed.unset_hf_deepspeed_config`, which its docstring gives to tests (5.14 to
    5.23). Without it `from_pretrained` on one process waits for the others, and a swap sees empty weights.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
