"""Finding modules of a model by their paths, and what little the code of their class says."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_posswap.compat.transformers_calls import forward_parameters


class WeakModule:
    """A reference to a module that leaves its memory to be freed; copied with the module, it refers to the copy.

    What hooks inside a model hold of that model must be no more: the model would be freed by the next search for
    garbage alone, and on a GPU that does not come in time.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    def __call__(self) -> Any:
        """Return the module; None: it is gone."""
        return None if self._reference is None else self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        module = self()
        return WeakModule(None if module is None else memo.get(id(module)))  # None: of a part that is copied by itself

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakModule, (self(),)


class CarriedModule:
    """The module that another one carries under a name, also once that other one is gone and parts of it are in use.

    It is looked up in each call, as PEFT's `modules_to_save` puts a trained copy in its place.

    Args:
        owner: the module that carries it.
        name: under which it does.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = WeakModule(owner), name
        self.last: Any = getattr(owner, name)

    def __call__(self) -> Any:
        """Return the module that is carried now."""
        owner = self.owner()
        if owner is None:
            return self.last
        found = getattr(owner, self.name)
        if found is not self.last and not torch.compiler.is_compiling():
            self.last = found
        return found


def matching(root: nn.Module, pattern: str) -> list[str]:
    """Return the paths below `root` that match `pattern` (see `Family.attention`), in module order."""
    wanted = pattern.split(".")

    def matches(path: str) -> bool:
        parts = path.split(".")
        return len(parts) == len(wanted) and all(
            w == "*" or p in w.split("|") for w, p in zip(wanted, parts, strict=True)
        )

    return [path for path, _ in root.named_modules() if matches(path)]


def paths_of(root: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[str]:
    """Return the paths below `root` of the modules that `wanted` accepts."""
    return [path for path, module in root.named_modules() if wanted(module)]


def get(root: nn.Module, path: str) -> nn.Module | None:
    """Return the module at `path` below `root`, or None."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def has_buffer(root: nn.Module, path: str) -> bool:
    """Return whether there is a buffer at `path` below `root`."""
    owner, _, name = path.rpartition(".")
    return name in dict(root.get_submodule(owner).named_buffers(recurse=False))


def modeling_module(module: nn.Module) -> ModuleType:
    """Return the Python module that defines the class of `module`: its `eager_attention_forward`, `rotate_half`."""
    return sys.modules[type(module).__module__]


def table_of(module: nn.Module) -> torch.Tensor:
    """Return the rows [P, E] of a table's module: its `weight`, or the `weights` that it has computed."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else module.weights  # type: ignore[return-value]


def table_at(root: nn.Module, path: str) -> torch.Tensor | None:
    """Return the rows [P, E] of the table at `path` below `root`, a module or a plain buffer; None: none is there."""
    owner, _, leaf = path.rpartition(".")
    held = getattr(get(root, owner), leaf, None)
    return table_of(held) if isinstance(held, nn.Module) else held


def owner_of(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module below `root` that has what lies at `path`, and the name that it has it by."""
    owner, _, leaf = path.rpartition(".")
    return root.get_submodule(owner), leaf


def entry_signature(module: nn.Module) -> list[str]:
    """Return the names of the positional arguments of `module`."""
    return list(forward_parameters(type(module)))


def by_name(signature: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names; those beyond `signature` are left out.

    The compiler of torch 2.6 takes no `zip` of lists of two lengths, and no `|` of dictionaries.

    Example:
        >>> by_name(["x", "mask"], [1], {"cache": 2})
        {'x': 1, 'cache': 2}
    """
    count = min(len(signature), len(args))
    return {**dict(zip(signature[:count], args[:count], strict=True)), **kwargs}


def join(*parts: str) -> str:
    """Return the path made of those parts that are not empty."""
    return ".".join(part for part in parts if part)


def who(model: nn.Module) -> str:
    """Return how messages call `model`."""
    return type(model).__name__
