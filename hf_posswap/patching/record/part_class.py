"""The class of a submodel of a swapped model: an encoder, a tower, the language model of a multimodal model.

A submodel attends with the swap, but its config has no record, or that of the whole model. So it gets a subclass of its
stock class, which can be copied with its swap and refuses to be saved or rebuilt.
"""

from __future__ import annotations

from typing import Any, NoReturn

from hf_posswap.compat.torch_modules import give_class
from hf_posswap.compat.transformers_loading import LoadingHooks
from hf_posswap.compat.transformers_models import let_record_outputs
from hf_posswap.errors import RecordError, UnsupportedSwapError
from hf_posswap.patching.record.refusals import architecture_of, refuse_elsewhere
from hf_posswap.utils.threads import once


class SwappedPart(LoadingHooks):
    """What parts of swapped models have before their stock class: each is a subclass of both."""

    posswap_native: Any
    """The stock class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        name = self.posswap_native.__name__
        raise RecordError(
            f"this class is that of a {name} inside a swapped model, and the config of a part does not hold the swap: "
            f"a {name} built from it would be unswapped. Use copy.deepcopy(part), or take the part out of a whole that "
            "type(model)(model.config) makes."
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (_empty, (self.posswap_native,), *object.__reduce_ex__(self, max(2, int(protocol)))[2:])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("destination", "prefix"), args, strict=False)) | kwargs
        state = self.posswap_native.state_dict(self, *args, **kwargs)
        refuse_elsewhere(state, given.get("prefix", ""), self.posswap_native.__name__)
        return state

    def posswap_read(self, state: dict[str, Any], prefix: str, metadata: Any) -> Any:
        return dict(metadata)

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        name = self.posswap_native.__name__
        raise UnsupportedSwapError(
            f"this {name} is a part of a swapped model, whose config alone records the swap: saved by itself it would "
            "be loaded without. Save the whole model; or unpatch_model(whole), patch_model(part), and save the part."
        )


def is_part(model: Any) -> bool:
    """Return whether `model` is a submodel of a swapped model, without its own record."""
    return isinstance(model, SwappedPart)


def give_part_class(module: Any) -> None:
    """Make a submodel of a swapped model an instance of its part class."""
    cls: Any = type(module)
    give_class(module, swapped_part_class(cls))


def leave_part_class(module: Any) -> None:
    """Restore the class of a submodel of a swapped model."""
    give_class(module, module.posswap_native)


@once
def swapped_part_class(native: Any) -> Any:
    """Return the part class of submodels of the stock class `native`; the same each time."""
    body = {
        "__module__": native.__module__,
        "__qualname__": architecture_of(native.__qualname__),
        "__doc__": native.__doc__,
        "posswap_native": native,
    }
    part_class = type(native.__name__, (SwappedPart, native), body)
    let_record_outputs(part_class)
    return part_class


def _empty(native: Any) -> Any:
    part_class = swapped_part_class(native)
    return part_class.__new__(part_class)
