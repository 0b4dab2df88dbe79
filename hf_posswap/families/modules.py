"""Finding modules of a model by path, and small facts about their classes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_posswap.compat.transformers_calls import forward_parameters


class WeakModule:
    """A weak reference to a module; copied with the module, it refers to the copy.

    Hooks inside a model must hold only weak references to it. Otherwise only garbage collection frees the model, which
    is too late on a GPU.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    def __call__(self) -> Any:
        """Return the module; None: it is gone."""
        return None if self._reference is None else self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        module = self()
        return WeakModule(None if module is None else memo.get(id(module)))  # None: only a submodule is copied

    def __reduce__(self) -> tuple[object, ...]:
        return WeakModule, (self(),)


class CarriedModule:
    """The child module of another module by name; still available if the owner is gone but its parts are in use.

    It is looked up in each call, because PEFT's `modules_to_save` replaces it with a trained copy.

    Args:
        owner: the parent module.
        name: attribute of the parent.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = WeakModule(owner), name
        self.last = getattr(owner, name)

    def __call__(self) -> Any:
        """Return the current module."""
        owner = self.owner()
        if owner is None:
            return self.last
        module = getattr(owner, self.name)
        if module is not self.last and not torch.compiler.is_compiling():
            self.last = module
        return module


def matching(root: nn.Module, pattern: str) -> list[str]:
    """Return the paths below `root` that match `pattern` (see `Family.attention`), one of each module, in order."""
    wanted = pattern.split(".")

    def matches(path: str) -> bool:
        segments = path.split(".")
        return len(segments) == len(wanted) and all(
            w == "*" or p in w.split("|") for w, p in zip(wanted, segments, strict=True)
        )

    paths: dict[int, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if matches(path):
            paths.setdefault(id(module), path)
    return list(paths.values())


def module_paths(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module below `root` once, at its shortest path.

    Other packages register a module of the model a second time, in a place that comes first: kvpress leaves the
    model's rotary module in each attention module.

    Example:
        >>> root = nn.Module()
        >>> root.layer, root.rotary = nn.Linear(2, 2), nn.Identity()
        >>> root.layer.rotary = root.rotary
        >>> [path for path, _ in root.named_modules()], [path for path, _ in module_paths(root)]
        (['', 'layer', 'layer.rotary'], ['', 'layer', 'rotary'])
    """
    shortest: dict[int, tuple[str, nn.Module]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        known = shortest.get(id(module))
        if known is None or path.count(".") < known[0].count("."):
            shortest[id(module)] = path, module
    yield from shortest.values()


def replace_everywhere(root: nn.Module, path: str, new: nn.Module) -> None:
    """Put `new` in the place of the module at `path` below `root`, under each name that this module has."""
    old = root.get_submodule(path)
    for name in [name for name, module in root.named_modules(remove_duplicate=False) if module is old]:
        root.set_submodule(name, new)


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
    table = getattr(get(root, owner), leaf, None)
    return table_of(table) if isinstance(table, nn.Module) else table


def tensor_at(root: nn.Module, path: str) -> torch.Tensor | None:
    """Return the parameter or buffer at `path` below `root`, or None."""
    owner, _, leaf = path.rpartition(".")
    value = getattr(get(root, owner), leaf, None)
    return value if isinstance(value, torch.Tensor) else None


def owner_of(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module below `root` that owns the attribute at `path`, and the attribute's name."""
    owner, _, leaf = path.rpartition(".")
    return root.get_submodule(owner), leaf


def entry_signature(module: nn.Module) -> list[str]:
    """Return the names of the positional arguments of `module`."""
    return list(forward_parameters(type(module)))


def by_name(signature: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a call by their names; those beyond `signature` are left out.

    torch.compile of torch 2.6 supports neither `zip` of lists of different lengths nor `|` of dictionaries.

    Example:
        >>> by_name(["x", "mask"], [1], {"cache": 2})
        {'x': 1, 'cache': 2}
    """
    count = min(len(signature), len(args))
    return {**dict(zip(signature[:count], args[:count], strict=True)), **kwargs}


def join(*segments: str) -> str:
    """Return the path that joins the non-empty segments."""
    return ".".join(segment for segment in segments if segment)


def who(model: nn.Module) -> str:
    """Return the name of `model` in messages."""
    return type(model).__name__


def is_removed(root: nn.Module, path: str) -> bool:
    """Return whether the layer of `path` was taken out of its list, as to prune a model.

    Example:
        >>> root = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
        >>> is_removed(root, "layers.0"), is_removed(root, "layers.1"), is_removed(root, "head")
        (False, True, False)
    """
    parent = root
    for name in path.split("."):
        child = getattr(parent, name, None)
        if not isinstance(child, nn.Module):
            return isinstance(parent, nn.ModuleList)
        parent = child
    return False
