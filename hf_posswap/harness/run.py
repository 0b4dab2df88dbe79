"""Tasks of the harness on one model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import DataError, OptionError
from hf_posswap.harness.model import harness_model_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.schemes.base import Scheme

_YAML = (".yaml", ".yml")


def run_tasks(
    model: PreTrainedModel | str | Path,
    tasks: Sequence[str | Path],
    scheme: Scheme | str | None = None,
    *,
    max_length: int | None = None,
    longest_input: int | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    device: Any = None,
    dtype: Any = "auto",
) -> dict[str, Any]:
    """Return what the harness found: its results, with the scores of each task under "results".

    How long inputs may be follows the swap and stands under "longest_input".

    Args:
        model: a causal model (which stays as it is), a folder or a Hub id; a swap that it carries is used.
        tasks: names that the harness knows, or .yaml files of tasks.
        scheme: to put in first, without training.
        max_length: tokens that `scheme` is meant for.
        longest_input: in tokens, what is longer is cut; None: what the swap is meant for, else the model's own length.
        tokenizer: of the model; None: that of the folder or Hub id.
        num_fewshot: examples before each question; None: what the task says.
        batch_size: questions at a time.
        limit: questions of each task; None: all.
        device: to run on; None: the CPU.
        dtype: to load in; "auto": that of the checkpoint.

    Raises:
        MissingDependencyError: lm_eval is not installed.
        OptionError: no tasks, an impossible number, or a task that the harness does not know.
        DataError: a model object without a tokenizer.
        CheckpointError, UnsupportedSwapError, UnsupportedModelError, SchemeError: as `load` and `patch_model`.
    """
    for name, value in (("batch_size", batch_size), ("limit", limit), ("longest_input", longest_input)):
        if value is not None and value < 1:
            raise OptionError(f"{name} is a whole number of at least 1, got {value!r}.")
    if num_fewshot is not None and num_fewshot < 0:
        raise OptionError(f"num_fewshot is a whole number of at least 0, got {num_fewshot!r}.")
    if tokenizer is None and not isinstance(model, str | Path):
        raise DataError("a model object brings no tokenizer: give tokenizer=.")
    kind = harness_model_class()
    manager = _manager(tasks)
    source = str(model) if isinstance(model, Path) else model
    named = {} if tokenizer is None else {"tokenizer": tokenizer}
    subject = kind(
        source,
        scheme=scheme,
        swap_length=max_length,
        max_length=longest_input,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        **named,
    )
    from lm_eval import simple_evaluate

    found: Any = simple_evaluate(
        subject,
        tasks=[str(task) for task in tasks],
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    return dict(found) | {"longest_input": subject.max_length}


def _manager(tasks: Sequence[str | Path]) -> Any:
    """Return the harness's index of tasks, after a check that it has all of `tasks`, before a model is loaded."""
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise OptionError("tasks names what to run, got none: names of the harness, or .yaml files.")
    files = [Path(task).expanduser() for task in tasks if Path(task).suffix in _YAML]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise OptionError(f"no such file of a task: {', '.join(missing)}.")
    manager = TaskManager(include_defaults=len(files) < len(tasks))  # the harness's own are more than ten thousand
    for task in tasks:
        if Path(task).suffix not in _YAML and str(task) not in manager.all_tasks:
            near = difflib.get_close_matches(str(task), manager.all_tasks, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise OptionError(f"the harness has no task {str(task)!r}.{hint} Give one of its names, or a .yaml file.")
    return manager
