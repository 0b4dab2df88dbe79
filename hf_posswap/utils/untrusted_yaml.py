"""YAML that anyone may have written: bounded in what its aliases, its nesting and its integers come to."""

from __future__ import annotations

from typing import Any

from hf_posswap.utils.format import said_by
from hf_posswap.utils.untrusted import MOST_DIGITS, MOST_LEVELS

MOST_YAML_BYTES = 2**18
"""Of a YAML file: PyYAML takes seconds for as much."""
MOST_VALUES = 100_000
"""In a document, each counted as often as aliases repeat it."""


def load_yaml(text: str, loader_class: Any) -> Any:
    """Return what the YAML `text` says.

    Args:
        text: one document.
        loader_class: a subclass of `yaml.SafeLoader`, which constructs the values.

    Raises:
        ValueError: it is no YAML, a text does not fit its tag, or it is deeper than `MOST_LEVELS`, holds itself, comes
            to more than `MOST_VALUES`, or has an integer of more than `MOST_DIGITS` digits.

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
        raise ValueError(_TOO_DEEP) from error
    except yaml.YAMLError as error:
        raise ValueError(said_by(error)) from error
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a value does not fit its tag ({type(error).__name__}: {said_by(error)})") from error
    finally:
        if loader is not None:
            loader.dispose()


_TOO_DEEP = f"values lie more than {MOST_LEVELS} levels inside one another"


def _count_values(node: Any, level: int, above: set[int], known: dict[int, tuple[int, int]]) -> tuple[int, int]:
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
        raise ValueError(_TOO_DEEP)
    return count, levels


def bounded_integer(loader: Any, node: Any) -> int:
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


def bounded_float(loader: Any, node: Any) -> float:
    """Return the number that a scalar writes, as `bounded_integer` does."""
    import yaml

    if len(node.value) > MOST_DIGITS:
        raise ValueError(f"line {node.start_mark.line + 1} has a number of more than {MOST_DIGITS} digits")
    return float(yaml.SafeLoader.construct_yaml_float(loader, node))
