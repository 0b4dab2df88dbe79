"""Random numbers for models that are built aside, so that the caller's own random numbers stay what they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import Watch, argument_names


class PrivateRandomness(Watch):
    """A context in which this thread draws random numbers from generators of the context's own, one for each device.

    Touches `torch.Tag` on `OpOverload.tags`, and overloads called `generator` (torch 2.6 to 2.13). Without it building
    a model would draw from the process's generator, and change what other threads and the caller draw next.

    Args:
        seed: of the numbers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` gives, by this context's generator where it draws and no other is given.

        Touches the same as the class.
        """
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        taking = func if "generator" in argument_names(func) else _with_generator(func)
        if taking is None:
            return func(*args, **kwargs)
        return taking(*args, **kwargs, generator=self._generator(kwargs.get("device"), args))

    def _generator(self, device: Any, args: tuple[Any, ...]) -> torch.Generator:
        tensors = [each for each in args if isinstance(each, Tensor)]
        device = torch.device(device or (tensors[0].device if tensors else "cpu"))
        if device.type == "meta":
            device = torch.device("cpu")
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


def _with_generator(func: Any) -> Any:
    """Return the overload of `func` that takes a generator; None: there is none."""
    overload = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return getattr(func.overloadpacket, overload, None)
