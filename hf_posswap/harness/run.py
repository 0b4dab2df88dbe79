"""Tasks of the harness on one model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import DataError, OptionError
from hf_posswap.harness.model import harness_model_class
from hf_posswap.harness.task_code import refuse_task_code, templates_without_code
from hf_posswap.patching.plan.plan_swap import check_max_length
from hf_posswap.utils.user_paths import expand_home

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
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Run tasks and return the harness's results, with the scores of each task under "results".

    The maximum input length, which depends on the swap, is under "longest_input".

    Args:
        model: a causal model (which is not changed), a folder or a Hub id, with or without a swap.
        tasks: names that the harness knows, or .yaml files of tasks.
        scheme: the scheme to put in first, without training.
        max_length: maximum length of `scheme`.
        longest_input: truncate longer inputs, in tokens; None: the swap's maximum length, else the model's.
        tokenizer: the model's tokenizer; None: that of the folder or Hub id.
        num_fewshot: examples before each question; None: the task's default.
        batch_size: questions per batch.
        limit: questions of each task; None: all.
        device: to run on; None: the CPU.
        dtype: to load in; "auto": that of the checkpoint.
        trust_remote_code: run code that comes with the model, its tokenizer or a .yaml file of a task; otherwise such a
            file may name no functions, and its templates are sandboxed. The harness's built-in tasks always run.

    Raises:
        MissingDependencyError: lm_eval is not installed.
        OptionError: no tasks, an invalid number, or an unknown task.
        DataError: a model object without a tokenizer, or a tokenizer that cannot be read.
        RemoteCodeError: code is needed without `trust_remote_code`.
        CheckpointError, UnsupportedSwapError, UnsupportedModelError, SchemeError: as `load` and `patch_model`.
    """
    check_max_length(max_length)
    for name, value in (("batch_size", batch_size), ("limit", limit), ("longest_input", longest_input)):
        if value is not None and value < 1:
            raise OptionError(f"{name} is a whole number of at least 1, got {value!r}.")
    if num_fewshot is not None and num_fewshot < 0:
        raise OptionError(f"num_fewshot is a whole number of at least 0, got {num_fewshot!r}.")
    if tokenizer is None and not isinstance(model, str | Path):
        raise DataError("a model object has no tokenizer: give tokenizer=.")
    model_class = harness_model_class()
    manager = _manager(tasks, trust_remote_code)
    source = str(model) if isinstance(model, Path) else model
    named = {} if tokenizer is None else {"tokenizer": tokenizer}
    subject = model_class(
        source,
        scheme=scheme,
        swap_length=max_length,
        max_length=longest_input,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **named,
    )
    from lm_eval import simple_evaluate

    with nullcontext() if trust_remote_code else templates_without_code():
        results: Any = simple_evaluate(
            subject,
            tasks=[str(task) for task in tasks],
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    return dict(results) | {"longest_input": subject.max_length}


def _manager(tasks: Sequence[str | Path], trust_remote_code: bool) -> Any:
    """Return the harness's index of tasks, after checking that all of `tasks` exist."""
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise OptionError("tasks names what to run, got none: names of the harness, or .yaml files.")
    files = [expand_home(task) for task in tasks if Path(task).suffix in _YAML]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise OptionError(f"no such file of a task: {', '.join(missing)}.")
    if not trust_remote_code:
        refuse_task_code(files)
    manager = TaskManager(include_defaults=len(files) < len(tasks))  # the harness's own are more than ten thousand
    for task in tasks:
        if Path(task).suffix not in _YAML and str(task) not in manager.all_tasks:
            near = difflib.get_close_matches(str(task), manager.all_tasks, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise OptionError(f"the harness has no task {str(task)!r}.{hint} Give one of its names, or a .yaml file.")
    return manager
