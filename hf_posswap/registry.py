"""One registry for everything that has a name: schemes and families."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from hf_posswap.errors import DuplicateNameError, PluginWarning, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping of names to objects, filled by the files that define them and by other packages' entry points.

    Args:
        kind: name of the registered objects, for messages ("scheme").
        entry_point_group: a package that declares an entry point in this group has it loaded at first use;
            loading it must register its objects. One that fails to load warns (`PluginWarning`) and is left out.

    Example:
        >>> numbers = Registry("number", "example.numbers")
        >>> numbers.add("one", 1)
        1
        >>> numbers.get("one"), list(numbers)
        (1, ['one'])
    """

    def __init__(self, kind: str, entry_point_group: str) -> None:
        self.kind = kind
        self._group = entry_point_group
        self._items: dict[str, T] = {}
        self._plugins_loaded = self._loading = False
        self._lock = threading.RLock()

    def add(self, name: str, item: T) -> T:
        """Register `item` under `name`.

        Raises:
            DuplicateNameError: the name is taken by another item.
        """
        registered = self._items.get(name, item)
        if registered is not item:
            raise DuplicateNameError(
                f"{self.kind} {name!r} is already registered as {registered!r}; choose another name."
            )
        self._items[name] = item
        return item

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""
        return lambda item: self.add(name, item)

    def get(self, name: str) -> T:
        """Return the item called `name`.

        Raises:
            UnknownNameError: no such name; the message suggests close matches and lists all names.
        """
        self._load_plugins()
        try:
            return self._items[name]
        except (KeyError, TypeError):
            raise UnknownNameError(self.kind, name, self._items) from None

    def remove(self, name: str) -> None:
        """Forget `name`: for tests and interactive work."""
        self._items.pop(name, None)

    def names_so_far(self) -> set[str]:
        """Return the names that are registered now, without loading other packages' entry points."""
        return set(self._items)

    def items(self) -> list[tuple[str, T]]:
        """Return all pairs of name and item, by name."""
        self._load_plugins()
        return sorted(self._items.items())

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self.items()])

    def __contains__(self, name: object) -> bool:
        self._load_plugins()
        return name in self._items

    def __len__(self) -> int:
        return len(self.items())

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        with self._lock:  # other threads wait: what the plugins register is missing until all are loaded
            if not self._plugins_loaded and not self._loading:
                self._loading = True
                self._load_entry_points()
                self._plugins_loaded = True

    def _load_entry_points(self) -> None:
        for point in entry_points(group=self._group):
            try:
                point.load()
            except Exception as error:  # another package's defect must not take every scheme with it
                warnings.warn(
                    f"the entry point {point.name!r} = {point.value!r} of group {self._group!r} could not be loaded, "
                    f"so its registrations are missing: {type(error).__name__}: {error}",
                    PluginWarning,
                    stacklevel=3,
                )
