"""Questions by length: tasks that make or choose their data by length, and tasks whose prompts are measured."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from hf_posswap.errors import DataError, MissingDependencyError, OptionError, PosswapError
from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

KEY = "max_seq_lengths"
"""The entry of the harness's metadata that RULER and BABILong read."""
_BY_LENGTH = {"babilong": "babilong_longctx"}  # its other tasks have data at one length only
_DEEPEST = 4


@dataclass(frozen=True)
class Loaded:
    """The tasks of one length.

    Attributes:
        tasks: the harness's tasks by name.
        groups: {requested name: its tasks}.
    """

    tasks: dict[str, object]
    groups: dict[str, list[str]]


def by_length(task: str) -> str:
    """Return the name to run by length: BABILong's group of the tasks that have data at each length.

    Example:
        >>> by_length("babilong"), by_length("ruler")
        ('babilong_longctx', 'ruler')
    """
    return _BY_LENGTH.get(task, task)


def load_tasks(names: Sequence[str], manager: TaskManager, metadata: dict[str, object], length: int | None) -> Loaded:
    """Load tasks, and their data of `length`.

    Args:
        names: of tasks and groups, or .yaml files.
        manager: the harness's index, made with `metadata`.
        metadata: the same object, whose entry for the length is changed.
        length: in tokens; None: that of `metadata`, or the task's own.

    Raises:
        OptionError: a task has no data of this length, or is named twice.
        DataError: the data cannot be read.
        MissingDependencyError: a task needs a package that is not installed.
    """
    # As the harness does before it loads tasks, so that all models answer the same questions.
    import numpy as np

    random.seed(0)
    np.random.seed(1234)  # noqa: NPY002
    tasks: dict[str, object] = {}
    groups: dict[str, list[str]] = {}
    for name in names:
        if length is not None:
            metadata[KEY] = _thousands(length) if name.startswith("babilong") else [length]
        with telling_what_is_missing(name):
            loaded = dict(manager.load([name])["tasks"])
        if length is not None and any(
            metadata[KEY] != (task.config.metadata or {}).get(KEY) for task in loaded.values()
        ):
            raise OptionError(f"this version of lm_eval does not pass the length on to {name!r}: install another.")
        twice = sorted(set(loaded) & set(tasks))
        if twice:
            raise OptionError(f"{', '.join(twice)} would run twice: {name!r} and another name both hold it.")
        tasks |= loaded
        groups[name] = list(loaded)
    return Loaded(tasks, groups)


@contextmanager
def telling_what_is_missing(name: str) -> Iterator[None]:
    """Say which package or data a task lacks if it cannot be loaded inside the block."""
    try:
        yield
    except PosswapError:
        raise
    except ImportError as error:
        raise missing_package(error) from error
    except (OSError, ValueError, LookupError) as error:  # LookupError: of nltk, without its data
        raise DataError(
            f"the data of the task {name!r} cannot be read ({' '.join(said_by(error).split()).rstrip('.')}): most "
            "tasks fetch them from the Hub. Connect to it, or fill the cache first."
        ) from error


def missing_package(error: ImportError) -> Exception:
    """Return the error that names the package of the extra which a task lacks, or `error` if it names none."""
    name = getattr(error.__cause__ or error, "name", None)
    return MissingDependencyError(name, "lm-eval") if name else error


def _thousands(length: int) -> str:
    """Return the name of BABILong's data of a length, as "4k"."""
    unit = next((unit for unit in (1024, 1000) if length % unit == 0), None)
    if unit is None:
        raise OptionError(f"BABILong has data of 1k, 2k, 4k, ... tokens, got the length {length}: give 4096, 8192, ...")
    return f"{length // unit}k"


def reads_lengths(task: Task) -> bool:
    """Tell whether the data of a task depend on the length in the metadata: whether its function reads that entry."""
    function = getattr(task.config, "custom_dataset", None)
    return callable(function) and _mentions(function, _DEEPEST)


def _mentions(function: Callable[..., object], depth: int) -> bool:
    function = inspect.unwrap(getattr(function, "func", function))
    if not isinstance(function, FunctionType):
        return False
    codes = list(_codes(function.__code__))
    if any(KEY in code.co_consts or KEY in code.co_varnames for code in codes):
        return True
    called = {name: function.__globals__.get(name) for code in codes for name in code.co_names}
    same_module = [other for other in called.values() if getattr(other, "__module__", None) == function.__module__]
    return depth > 0 and any(_mentions(other, depth - 1) for other in same_module if callable(other))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def questions_by_length(
    task: Task, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], limit: int | None
) -> tuple[dict[int, list[int]], int]:
    """Return the questions whose prompts have more tokens than the length before, up to each length.

    Args:
        task: the harness's task.
        tokenizer: to count with. Examples, descriptions and chat templates come on top.
        lengths: ascending.
        limit: of each length; None: all.

    Returns:
        The numbers of the questions by length, and how many are longer than the longest length.
    """
    whole = task.config.output_type == "loglikelihood_rolling"
    numbers: dict[int, list[int]] = {length: [] for length in lengths}
    longer = 0
    for number, document in enumerate(task.eval_docs):
        text = str(task.doc_to_target(document) if whole else task.doc_to_text(document))
        size = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        length = next((length for length in lengths if size <= length), None)
        if length is None:
            longer += 1
        elif limit is None or len(numbers[length]) < limit:
            numbers[length].append(number)
    return numbers, longer


@contextmanager
def tokenizer_folder(tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool) -> Iterator[str]:
    """Give a temporary folder with a copy of the tokenizer, without its code unless that is trusted.

    The harness's synthetic tasks load the tokenizer themselves, by name, and run its code.
    """
    import tempfile

    with tempfile.TemporaryDirectory(prefix="posswap-") as folder:
        tokenizer.save_pretrained(folder)
        for path in [] if trust_remote_code else Path(folder).glob("*.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.pop("auto_map", None) is not None:
                path.write_text(json.dumps(content), encoding="utf-8")
        yield folder
