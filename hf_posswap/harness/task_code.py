"""Detection and refusal of code in task files before it runs, unless the user trusts it.

A task of the harness may name Python functions (`!function helper.changed` runs helper.py next to the file), metrics
that are scripts on the Hub, and data sets with loading code; its templates see Python objects. The tasks that are
installed with the harness are trusted and not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hf_posswap.errors import OptionError, RemoteCodeError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.threads import shared
from hf_posswap.utils.untrusted import MOST_YAML_BYTES, load_yaml, read_bounded
from hf_posswap.utils.user_paths import expand_home

_DEEPEST = 50
"""Maximum depth of nested includes, and of nested objects."""


class _Function(str):
    """A placeholder for a function in a file: its name."""


def refuse_task_code(files: Sequence[Path]) -> None:
    """Refuse task files that run code, without running any of it.

    Args:
        files: .yaml files of tasks; included files are checked, too.

    Raises:
        RemoteCodeError: a file names a function, a metric that the harness lacks, or a data set's loading code.
        OptionError: a file cannot be read.
    """
    seen: set[Path] = set()
    waiting = [expand_home(file).resolve() for file in files]
    while waiting:
        file = waiting.pop()
        if file in seen or _is_installed(file):
            continue
        seen.add(file)
        values = _read(file)
        for code in _code_in(values):
            raise RemoteCodeError(file, f"runs code ({code})")
        included = values.get("include") or []
        waiting += [(file.parent / str(name)).resolve() for name in ([included], included)[isinstance(included, list)]]


def refuse_groups(files: Sequence[Path]) -> None:
    """Refuse files of groups, which the harness fails to read by their path.

    Raises:
        OptionError: a file lists tasks, or cannot be read.
    """
    for file in files:
        if isinstance(_read(file).get("task"), list):
            raise OptionError(
                f"{file} is a group of tasks, which the harness reads only by name: give the files of its tasks."
            )


@contextmanager
def templates_without_code() -> Iterator[None]:
    """Run templates of tasks in a sandbox inside the block, so that they cannot run code.

    Raises:
        RemoteCodeError: a template accesses Python internals.
    """
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    def begin() -> Callable[[], None]:
        free = utils.env
        sandboxed = SandboxedEnvironment(loader=free.loader, undefined=free.undefined, keep_trailing_newline=True)
        sandboxed.filters.update(free.filters)
        utils.env = sandboxed
        return partial(setattr, utils, "env", free)

    try:
        with shared("lm_eval.utils.env", begin):  # for other threads too, which at most refuse such a template
            yield
    except SecurityError as error:
        raise RemoteCodeError("a task", f"has a template that reaches into Python ({error})") from error


def _is_installed(file: Path) -> bool:
    import lm_eval

    return file.is_relative_to(Path(lm_eval.__file__).resolve().parent)


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a task file, with functions replaced by their names."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Accepts the harness's YAML without importing functions."""

    Loader.add_constructor("!function", lambda loader, node: _Function(getattr(node, "value", "")))
    try:
        values = load_yaml(read_bounded(file, MOST_YAML_BYTES), Loader)
    except (OSError, ValueError) as error:
        raise OptionError(f"{shown(file)} is not a readable file of a task: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise OptionError(
            f"{file} is not a file of a task: it holds {type(values).__name__}, expected keys with values."
        )
    return values


def _code_in(value: object, depth: int = 0) -> Iterator[str]:
    """Yield a description of each part of `value` that runs code."""
    if isinstance(value, _Function):
        yield f"!function {value}"
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        if "metric" in value and (value.get("hf_evaluate") or not _is_metric(value["metric"])):
            yield f"the metric {value['metric']}, a script of the package evaluate"
        if value.get("trust_remote_code"):
            yield "a data set with trust_remote_code"
        if str(value.get("dataset_path", "")).endswith(".py"):
            yield f"the data set's script {value['dataset_path']}"
    children = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    for child in children:
        yield from _code_in(child, depth + 1)


def _is_metric(name: object) -> bool:
    from lm_eval.api import metrics, registry

    assert metrics  # which fills the registry
    return isinstance(name, str) and name in registry.METRIC_REGISTRY
