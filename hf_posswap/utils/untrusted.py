"""Text, JSON, YAML and model cards from files that anyone may have written.

They are regular files of a bounded size, with values of a bounded depth. A device such as /dev/zero has no end, a FIFO
waits for a writer, and values a few thousand levels deep, or integers of a few hundred digits, end in errors of Python
wherever they are looked at. All of that is refused as it is read; of YAML also what its aliases come to.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 2**26
"""Of a file that is read whole: several times the longest tokenizer.json or index of weights."""
MOST_LEVELS = 64
"""Of objects and lists inside one another: several times those of any config."""
MOST_DIGITS = 308
"""Of an integer: no longer one fits a float."""
_NOT_WAITING = getattr(os, "O_NONBLOCK", 0)
MOST_YAML_BYTES = 2**18
"""Of a YAML file: PyYAML takes seconds for as much."""
MOST_VALUES = 100_000
"""In a document, each counted as often as aliases repeat it."""
CARD = "README.md"
KEPT = ("license", "license_name", "license_link", "language")
"""What stays true of a model whose positions are swapped."""


def read_bounded(path: Path, most: int = MOST_BYTES) -> str:
    """Return the text in the regular file `path`, as UTF-8.

    Args:
        path: a link may lead to the file.
        most: bytes that it may have.

    Raises:
        OSError: it is missing or unreadable, no regular file (a folder, a FIFO, a device), or longer.
        ValueError: it is not UTF-8, or `path` cannot be a path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.txt"
        ...     _ = path.write_text("words")
        ...     read_bounded(path)
        'words'
        >>> read_bounded(Path("/dev/zero"))
        Traceback (most recent call last):
        OSError: it is not a regular file
    """
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        content = file.read(most + 1) if status.st_size <= most else b""
    if status.st_size > most or len(content) > most:
        raise OSError(f"it has more than {most} bytes")
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def _open(path: str, flags: int) -> int:
    """Open `path` without waiting for whoever writes to it, where it is a FIFO."""
    return os.open(path, flags | _NOT_WAITING)


def parse_json(text: str) -> Any:
    """Return the JSON value that `text` holds.

    Raises:
        ValueError: it is not valid JSON, deeper than `MOST_LEVELS`, or an integer has more than `MOST_DIGITS` digits.

    Example:
        >>> parse_json('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> parse_json("[" * 9999 + "]" * 9999)
        Traceback (most recent call last):
        ValueError: objects and lists lie more than 64 levels inside one another
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    refuse_deep(value)
    return value


_TOO_DEEP = f"objects and lists lie more than {MOST_LEVELS} levels inside one another"


def refuse_deep(value: object) -> None:
    """Raise a ValueError where dicts and lists lie more than `MOST_LEVELS` levels inside one another in `value`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS + 1):
        containers = [each.values() if isinstance(each, dict) else each for each in level]
        level = [child for children in containers for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(text.lstrip('-'))} digits")
    return int(text)


def read_bounded_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the JSON value in the regular file `path`.

    Raises:
        OSError, ValueError: as `read_bounded` and `parse_json`.
    """
    return parse_json(read_bounded(path, most))


def load_yaml(text: str, loader_class: type[yaml.SafeLoader]) -> Any:
    """Return what the YAML `text` says.

    Args:
        text: one document.
        loader_class: a subclass of `yaml.SafeLoader`, which constructs the values.

    Raises:
        ValueError: it is not valid YAML, a text does not fit its tag, or it is deeper than `MOST_LEVELS`, holds itself,
            comes to more than `MOST_VALUES`, or has an integer of more than `MOST_DIGITS` digits.

    Example:
        >>> import yaml
        >>> load_yaml("a: &x [1, 2]\\nb: *x", yaml.SafeLoader)
        {'a': [1, 2], 'b': [1, 2]}
        >>> load_yaml("a: &x [*x]", yaml.SafeLoader)
        Traceback (most recent call last):
        ValueError: an alias is inside the node that it repeats, in line 1
    """
    import yaml

    loader = None
    try:
        loader = loader_class(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, 0, set(), {})
        return loader.construct_document(node)
    except RecursionError as error:
        raise ValueError(_YAML_TOO_DEEP) from error
    except yaml.YAMLError as error:
        raise ValueError(said_by(error)) from error
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a value does not fit its tag ({type(error).__name__}: {said_by(error)})") from error
    finally:
        if loader is not None:
            loader.dispose()


_YAML_TOO_DEEP = f"values lie more than {MOST_LEVELS} levels inside one another"


def _count_values(node: yaml.Node, level: int, above: set[int], known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of values in `node`, and of levels below it.

    Args:
        node: of the graph that PyYAML composes, in which an alias is the node that it repeats.
        level: at which it lies.
        above: ids of the nodes that it lies in.
        known: answers by the id of a node, so that each node is looked at once.
    """
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return 1, 0
    if id(node) in above:
        raise ValueError(f"an alias is inside the node that it repeats, in line {node.start_mark.line + 1}")
    if id(node) not in known:
        children = [child for pair in node.value for child in (pair if isinstance(pair, tuple) else (pair,))]
        inner = [_count_values(child, level + 1, above | {id(node)}, known) for child in children]
        known[id(node)] = 1 + sum(count for count, _ in inner), 1 + max((levels for _, levels in inner), default=0)
    count, levels = known[id(node)]
    if count > MOST_VALUES:
        raise ValueError(f"its aliases come to more than {MOST_VALUES} values, in line {node.start_mark.line + 1}")
    if level + levels > MOST_LEVELS:
        raise ValueError(_YAML_TOO_DEEP)
    return count, levels


def bounded_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Return the integer of a scalar: a constructor for a loader that replaces PyYAML's.

    Raises:
        ValueError: it has more than `MOST_DIGITS` digits.
    """
    import yaml

    text = node.value
    value = yaml.SafeLoader.construct_yaml_int(loader, node) if len(text) <= MOST_DIGITS else None
    if value is None or abs(value) >= 10**MOST_DIGITS:
        raise ValueError(f"line {node.start_mark.line + 1} has an integer of more than {MOST_DIGITS} digits")
    return int(value)


def bounded_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    """Return the number that a scalar writes, as `bounded_integer` does."""
    import yaml

    if len(node.value) > MOST_DIGITS:
        raise ValueError(f"line {node.start_mark.line + 1} has a number of more than {MOST_DIGITS} digits")
    return float(yaml.SafeLoader.construct_yaml_float(loader, node))


def card_data(folder: str | Path) -> dict[str, Any]:
    """Return the metadata of the card in `folder`; {} where there is none that can be read."""
    from huggingface_hub import ModelCard

    path = Path(folder) / CARD
    if not path.is_file():
        return {}
    try:
        text = read_bounded(path)
        if not text.startswith("---"):
            return {}
        return dict(ModelCard(text, ignore_metadata_errors=True).data.to_dict())
    except Exception:  # yaml and the Hub's classes may raise anything
        return {}


def kept_header(folder: str | Path) -> str:
    """Return the head of a card with what is kept of the one in `folder`; "": nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / CARD).write_text("---\\nlicense: mit\\ntags: [a]\\n---\\n# A\\n")
        ...     kept_header(folder)
        '---\\nlicense: mit\\n---\\n\\n'
    """
    data = card_data(folder)
    return header({name: data[name] for name in KEPT if data.get(name)})


def header(data: dict[str, Any]) -> str:
    """Return the head of a card; "" for no data."""
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n" if data else ""
