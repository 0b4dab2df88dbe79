"""Merges YAML files that include one another, and KEY=VALUE overrides, into one mapping.

A scheme given as text becomes a mapping of its fields, so that others can be merged in. `copy_recipe` copies a recipe
of the package, to edit.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import ConfigError, OptionError, UnknownNameError
from hf_posswap.schemes.base import known_schemes
from hf_posswap.training.config.shipped import SUFFIXES, find_recipe, shipped_recipe
from hf_posswap.utils.atomic_io import shown, write_text
from hf_posswap.utils.printable import brief_repr, printable
from hf_posswap.utils.scheme_text import scheme_and_fields
from hf_posswap.utils.untrusted import (
    MOST_LEVELS,
    MOST_YAML_BYTES,
    bounded_float,
    bounded_integer,
    load_yaml,
    read_bounded,
)
from hf_posswap.utils.user_paths import SUFFIX

if TYPE_CHECKING:
    import yaml

    from hf_posswap.schemes.base import Scheme

JSON = ".json"
"""The suffix of a scheme that is a file."""
MOST_FILES = 100
"""Most files that one recipe may include, directly or not; a file counts each time it is read."""
INCLUDE, IMPORTS = "include", "imports"
_ARGUMENTS = {"lr_scheduler_type": "lr_scheduler_kwargs", "optim": "optim_args"}
"""Keys, and the arguments that are dropped when the key's value changes."""
_FIRST = ("swap.scheme=", "training.lr_scheduler_type=", "training.optim=", "peft.peft_type=")
_SCHEME = "scheme"
_LISTS = ("sources", "stages")
"""Keys whose values are lists of mappings; KEY.0.SUB=VALUE begins one that no file has."""
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def takes_fields(scheme: Scheme | str | None) -> bool:
    """Return whether `scheme` is text that fields can be merged into, and not a file.

    Example:
        >>> takes_fields("yarn:factor=4"), takes_fields("longrope.json"), takes_fields({"name": "yarn"})
        (True, False, False)
    """
    return isinstance(scheme, str) and not scheme.endswith(JSON)


def scheme_mapping(scheme: str | Mapping[str, object] | None) -> Mapping[str, object]:
    """Return `scheme` as {name: ..., FIELD: VALUE}; invalid text becomes the name, so that a later check refuses it.

    Args:
        scheme: a name, a name with fields ("yarn:factor=4"), a mapping, returned unchanged, or None: {}.

    Example:
        >>> scheme_mapping("yarn:factor=4,base=500000"), scheme_mapping("rope"), scheme_mapping("rope(base=3)")
        ({'name': 'yarn', 'factor': 4.0, 'base': 500000.0}, {'name': 'rope'}, {'name': 'rope(base=3)'})
    """
    if not isinstance(scheme, str):
        return {} if scheme is None else scheme
    try:
        parsed = scheme_and_fields(scheme, known_schemes())
    except OptionError:
        parsed = None
    return {"name": scheme} if parsed is None else {"name": parsed[0], **parsed[1]}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`, on top of the files that it includes.

    `include:` names one or more files, relative to the including file, or a recipe of the package ("yarn"). Later
    files win, and the including file wins over all. Mappings are merged key by key; everything else is replaced. A
    scheme of another name, or another adapter, optimizer or schedule, also replaces the arguments of the old one.

    Raises:
        ConfigError: a file is missing, not a regular file, not YAML, not a mapping or too large, or includes itself.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     base, mine = Path(folder) / "base.yaml", Path(folder) / "mine.yaml"
        ...     _ = base.write_text("training: {max_steps: 10, warmup_steps: 2}")
        ...     _ = mine.write_text("include: base.yaml\\ntraining: {max_steps: 20}")
        ...     read_yaml(mine)
        {'training': {'max_steps': 20, 'warmup_steps': 2}}
    """
    return _read(Path(path), (), [])


def included_files(path: Path) -> list[Path]:
    """Return the files that the YAML file `path` includes, and those that they include, each once.

    Raises:
        ConfigError: as `read_yaml`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     base, mine = Path(folder) / "base.yaml", Path(folder) / "mine.yaml"
        ...     _ = base.write_text("training: {max_steps: 10}")
        ...     _ = mine.write_text("include: base.yaml")
        ...     [path.name for path in included_files(mine)]
        ['base.yaml']
    """
    visited: list[Path] = []
    _read(path, (), visited)
    return list(dict.fromkeys(visited[1:]))


def _read(path: Path, above: tuple[Path, ...], seen: list[Path]) -> dict[str, object]:
    seen.append(path)
    included_by = f", which {shown(above[-1])} includes," if above else ""
    if len(seen) > MOST_FILES:
        raise ConfigError(
            f"{shown(path)}{included_by} is one file too many: a recipe reads {MOST_FILES} files at most."
        )
    try:
        chain = (*above, path.resolve())
        if chain[-1] in above:
            cycle = " -> ".join(shown(Path(file_path.name)) for file_path in chain)
            raise ConfigError(f"{shown(above[0])} includes itself: {cycle}.")
        text = read_bounded(path, MOST_YAML_BYTES)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        if _is_pipe(path):
            raise ConfigError(
                f"{shown(path)}{included_by} is a pipe, which can be read only once: each process of a training reads "
                "the recipe, and reads it again when it resumes. Write it to a file and give that; values alone can "
                "follow a recipe as KEY=VALUE."
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown(path)}{included_by} cannot be read: {reason}. Give a recipe's file.") from error
    try:
        values = load_yaml(text, _loader())
    except ValueError as error:
        raise ConfigError(f"{shown(path)} cannot be read as YAML: {error}.") from error
    if not isinstance(values, dict):
        content = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{shown(path)} must hold keys and values, got {content}.")
    included = values.pop(INCLUDE, [])
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        value_repr = brief_repr(included)
        raise ConfigError(f"{shown(path)}: include must be a file name or a list of them, got {value_repr}.")
    values |= _imported(path, values)
    merged: dict[str, object] = {}
    for name in names:
        merged = merge(merged, _read(_included(path, name), chain, seen))
    return merge(merged, values)


def _imported(path: Path, values: dict[str, object]) -> dict[str, object]:
    """Return the modules that the recipe `path` imports: files lie in its folder, or where they say."""
    names = values.get(IMPORTS)
    if not isinstance(names, list):
        return {}
    is_file = [isinstance(name, str) and name.endswith(SUFFIX) and not name.startswith("~") for name in names]
    return {
        IMPORTS: [
            str((path.parent / name).absolute()) if is_path else name
            for name, is_path in zip(names, is_file, strict=True)
        ]
    }


def _is_pipe(path: Path) -> bool:
    """Return whether `path` is a pipe; False for a path that cannot be looked at."""
    try:
        return path.is_fifo()
    except (OSError, ValueError):  # a name that is too long, or holds a null
        return False


def _included(path: Path, name: str) -> Path:
    """Return the file that `path` includes as `name`: a file in the same folder, or a recipe of the package."""
    sibling = path.parent / name
    if sibling.suffix or os.path.lexists(sibling):
        return sibling
    try:
        return find_recipe(name)
    except UnknownNameError as error:
        raise ConfigError(f"{shown(path)}: include: {error}") from error


def _loader() -> type[yaml.SafeLoader]:
    """Return a safe YAML loader that refuses duplicate keys, and reads 2e-5 as a number and dates as text."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            twice = sorted(key for key, count in counts.items() if count > 1)
            if twice:
                raise yaml.YAMLError(f"{', '.join(twice)} given twice, {node.start_mark}")
            return node

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    Loader.add_constructor("tag:yaml.org,2002:int", bounded_integer)
    Loader.add_constructor("tag:yaml.org,2002:float", bounded_float)
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    return Loader


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` merged over it.

    Example:
        >>> merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": []})
        {'a': {'b': 3, 'c': 2}, 'd': []}
        >>> merge({"scheme": {"name": "yarn", "factor": 4}}, {"scheme": {"name": "rope"}})
        {'scheme': {'name': 'rope'}}
        >>> merge({"scheme": "yarn:factor=4"}, {"scheme": {"base": 5e5}})
        {'scheme': {'name': 'yarn', 'factor': 4.0, 'base': 500000.0}}
        >>> merge({"optim": "sgd", "optim_args": "momentum=0.9"}, {"optim": "adafactor"})
        {'optim': 'adafactor'}
    """
    outdated = [
        arguments for owner, arguments in _ARGUMENTS.items() if owner in above and above[owner] != below.get(owner)
    ]
    merged = {key: value for key, value in below.items() if key not in outdated}
    for key, value in above.items():
        old = merged.get(key)
        if key == _SCHEME and takes_fields(old) and isinstance(value, Mapping):
            old = scheme_mapping(old)
        if isinstance(value, Mapping) and (isinstance(old, list) or (old is None and key in _LISTS)):
            merged[key] = _with_items(old or [], value, key)
            continue
        is_another = False  # schemes or adapters of different names, so that no field carries over
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            renames = "name" in old and "name" in value and old["name"] != value["name"] and "scheme" not in value
            is_another = renames or ("peft_type" in value and value["peft_type"] != old.get("peft_type", "LORA"))
        are_mappings = isinstance(old, Mapping | None) and isinstance(value, Mapping) and not is_another
        merged[key] = merge(old or {}, value) if are_mappings else value
    return merged


def _with_items(items: list[Any], changes: Mapping[str, Any], key: str) -> list[object]:
    """Return `items` with those replaced or merged that `changes` names by index, from 0; the next index adds one."""
    changed = list(items)
    for number, value in changes.items():
        index = _list_index(number, changed)
        if index is None:
            known = f"the number of an item, 0 to {len(changed) - 1}, or {len(changed)}" if changed else "0"
            raise ConfigError(f"{key}.{printable(number, 200)}: expected {known} for a new one.")
        if index == len(changed):
            changed.append(value)
            continue
        old = changed[index]
        are_mappings = isinstance(old, Mapping) and isinstance(value, Mapping)
        changed[index] = merge(old, value) if are_mappings else value
    return changed


def _list_index(number: object, items: list[object]) -> int | None:
    """Return the index into `items` that the key `number` means, or the index behind the last; None: neither."""
    text = str(number)
    known = text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= len(items)
    return int(text) if known else None


def override(values: Mapping[str, object], settings: Iterable[str]) -> dict[str, object]:
    """Return `values` with each of `settings`, KEY.SUB=VALUE, applied; a VALUE is read as YAML.

    Items of a list are named by index: stages.0.length=64; the index behind the last item adds one.

    Raises:
        ConfigError: a setting is not KEY=VALUE, is not YAML, or names a key below a value that has none.

    Example:
        >>> override({"training": {"max_steps": 10}}, ["training.max_steps=20", "data.length=64"])
        {'training': {'max_steps': 20}, 'data': {'length': 64}}
        >>> override({"stages": [{"max_steps": 1}, {"max_steps": 2}]}, ["stages.1.max_steps=5"])
        {'stages': [{'max_steps': 1}, {'max_steps': 5}]}
        >>> override({}, ["data.sources.0.path=books", "data.sources.1.path=essays"])
        {'data': {'sources': [{'path': 'books'}, {'path': 'essays'}]}}
    """
    changed = dict(values)
    problems = []
    for setting in sorted(settings, key=lambda setting: not setting.startswith(_FIRST)):
        try:
            changed = merge(changed, _nested(setting, changed))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(" ".join(problems))
    return changed


def _nested(setting: str, values: Mapping[str, object]) -> dict[str, object]:
    path, equals, text = setting.partition("=")
    keys, setting_repr = path.strip().split("."), brief_repr(setting)
    if not equals or not all(keys) or len(keys) > MOST_LEVELS:
        raise ConfigError(f"{setting_repr}: expected KEY=VALUE, for example training.max_steps=100.")
    try:
        value = load_yaml(text, _loader())
    except ValueError as error:
        raise ConfigError(f"{setting_repr}: the value cannot be read as YAML: {error}.") from error
    parent: Any = values
    for number, key in enumerate(keys[:-1]):
        if isinstance(parent, list):
            index = _list_index(key, parent)
            parent = {} if index is None or index == len(parent) else parent[index]
        else:
            parent = parent.get(key, {})
        if key == _SCHEME and takes_fields(parent):
            parent = scheme_mapping(parent)
        if not isinstance(parent, Mapping | list):
            above = ".".join(keys[: number + 1])
            raise ConfigError(f"{setting_repr}: {above} is {brief_repr(parent)}, which has no keys.")
    for key in reversed(keys):
        value = {key: value}
    return value


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Copy a recipe of the package and the files that it includes, to edit them; return the files, the recipe first.

    Args:
        name: of the recipe.
        target: a file that ends in .yaml, or a folder, created if missing. Included files keep their names and go to
            the same folder; a file that already exists with the same text is kept.

    Raises:
        UnknownNameError: there is no such recipe.
        ConfigError: a different file exists where one would be written; nothing is written then.
        CheckpointError: the target cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in copy_recipe("control", Path(folder) / "mine.yaml")]
        ['mine.yaml', 'learned-to-rope.yaml', 'base.yaml']
    """
    recipe = shipped_recipe(name)
    main_target = target if target.suffix in SUFFIXES and not target.is_dir() else target / recipe.path.name
    texts = {main_target: recipe.text}
    for path in included_files(recipe.path):
        include_target = main_target.parent / path.relative_to(recipe.path.parent)
        if include_target in texts:
            raise ConfigError(f"{main_target}: {name} includes a file of that name; give another name.")
        texts[include_target] = path.read_text(encoding="utf-8")
    conflicts = [path for path, text in texts.items() if path.exists() and not _has_text(path, text)]
    if conflicts:
        raise ConfigError(
            f"{', '.join(map(str, conflicts))} exists and is not overwritten: give another file or folder, or move it."
        )
    for path, text in texts.items():
        if not path.exists():
            write_text(path, text)
    return list(texts)


def _has_text(path: Path, text: str) -> bool:
    try:
        return read_bounded(path) == text
    except (OSError, ValueError):
        return False
