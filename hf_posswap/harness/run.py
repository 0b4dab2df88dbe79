"""Tasks of the harness on one model."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from hf_posswap.comparison.report.results import HarnessResults, HarnessSettings
from hf_posswap.errors import DataError, OptionError
from hf_posswap.harness.lengths import (
    KEY,
    by_length,
    load_tasks,
    missing_package,
    questions_by_length,
    reads_lengths,
    tokenizer_folder,
)
from hf_posswap.harness.model import harness_model_class
from hf_posswap.harness.scores import retention, rows_of, table_of
from hf_posswap.harness.task_code import refuse_groups, refuse_task_code, templates_without_code
from hf_posswap.patching.plan.plan_swap import check_max_length
from hf_posswap.utils.devices import resolve_device
from hf_posswap.utils.format import with_older_name
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.schemes.base import Scheme

_YAML = (".yaml", ".yml")


def run_tasks(
    model: PreTrainedModel | str | Path,
    tasks: Sequence[str | Path],
    scheme: Scheme | str | None = None,
    *,
    lengths: Sequence[int] | None = None,
    baseline: PreTrainedModel | str | Path | HarnessResults | None = None,
    max_length: int | None = None,
    longest_input: int | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    apply_chat_template: bool = False,
    fewshot_as_multiturn: bool = False,
    metadata: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
    base: PreTrainedModel | str | Path | HarnessResults | None = None,
) -> HarnessResults:
    """Run tasks and return the harness's results, with the scores of each task under "results".

    The maximum input length, which depends on the swap, is under "longest_input". Under "table" is one row per task and
    metric: its "values" by length, its "effective_length" by RULER's and by NoLiMa's criterion, and with `baseline` its
    "retention", the percentage of the base's score. With `lengths`, "runs" has the harness's output for each length
    instead of "results".

    Args:
        model: a causal model (which is not changed), a folder or a Hub id, with or without a swap.
        tasks: names that the harness knows, or .yaml files of tasks.
        scheme: the scheme to put in first, without training.
        lengths: run each task at each of these lengths, in tokens. RULER and BABILong make or choose their data by
            length; of other tasks, each length gets the questions whose prompts are longer than the length before.
        baseline: the unswapped model, or what `run_tasks` returned for it. It runs at the lengths that it can read.
        max_length: maximum length of `scheme`; None: the longest of `lengths`.
        longest_input: truncate longer inputs, in tokens; None: the swap's maximum length, else the model's.
        tokenizer: the model's tokenizer; None: that of the folder or Hub id.
        num_fewshot: examples before each question; None: the task's default.
        batch_size: questions per batch.
        limit: questions of each task, and of each length; None: all.
        apply_chat_template: write questions as the tokenizer's chat template does.
        fewshot_as_multiturn: in the chat template, examples are turns of their own.
        metadata: more for the functions that make the tasks' data. The tokenizer is always among it.
        device: to run on; None: "auto", a GPU if there is one, and for a model object where it is.
        dtype: to load in; "auto": that of the checkpoint.
        trust_remote_code: run code that comes with the model, its tokenizer or a .yaml file of a task; otherwise such a
            file may name no functions, and its templates are sandboxed. The harness's built-in tasks always run.
        base: an older name of `baseline`.

    Raises:
        MissingDependencyError: lm_eval is not installed, or a package that a task needs.
        OptionError: no tasks, an invalid number, an unknown task, or a length that the model cannot read.
        DataError: a model object without a tokenizer, a tokenizer that cannot be read, data of a task that cannot be
            read, or a `baseline` that answered other questions.
        RemoteCodeError: code is needed without `trust_remote_code`.
        CheckpointError, UnsupportedSwapError, UnsupportedModelError, SchemeError: as `load` and `patch_model`.
    """
    check_max_length(max_length)
    _check_numbers(batch_size=batch_size, limit=limit, longest_input=longest_input, num_fewshot=num_fewshot)
    if fewshot_as_multiturn and not apply_chat_template:
        raise OptionError("fewshot_as_multiturn needs a chat: set apply_chat_template, too.")
    if "tokenizer" in (metadata or {}) and not trust_remote_code:
        raise OptionError("tasks run the code of a tokenizer in metadata: leave it out, or set trust_remote_code.")
    chosen = None if lengths is None else _checked_lengths(lengths, metadata)
    if tokenizer is None and not isinstance(model, str | Path):
        raise DataError("a model object has no tokenizer: give tokenizer=.")
    model_class = harness_model_class()
    requested = [str(task) if chosen is None else by_length(str(task)) for task in tasks]
    settings: HarnessSettings = {
        "tasks": requested,
        "lengths": chosen,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "apply_chat_template": apply_chat_template,
        "fewshot_as_multiturn": fewshot_as_multiturn,
        "metadata": dict(metadata or {}),
    }
    baseline = with_older_name(baseline=baseline, base=base)
    if isinstance(baseline, Mapping):  # fail before anything is loaded
        retention({"table": {"columns": [], "rows": []}, "settings": settings}, baseline)
    shared: dict[str, object] = {}
    manager = _manager(requested, trust_remote_code, shared)
    more: dict[str, object] = {
        "batch_size": batch_size,
        "device": resolve_device(device),
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    if tokenizer is not None:
        more["tokenizer"] = tokenizer

    def run(source: PreTrainedModel | str | Path, **swap: object) -> HarnessResults:
        source = str(source) if isinstance(source, Path) else source
        return _run(model_class(source, **swap, **more), manager, shared, settings, trust_remote_code, bool(swap))

    longest = max_length if scheme is None or max_length is not None or chosen is None else chosen[-1]
    results = run(model, scheme=scheme, swap_length=longest, max_length=longest_input)
    if baseline is not None:
        base_results = baseline if isinstance(baseline, Mapping) else run(baseline)
        results["base"] = {"table": base_results["table"], "longest_input": base_results["longest_input"]}
        results["table"] = retention(results, base_results)
    return results


def _check_numbers(**given: int | None) -> None:
    for name, value in given.items():
        least = 0 if name == "num_fewshot" else 1
        if value is not None and value < least:
            raise OptionError(f"{name} is a whole number of at least {least}, got {value!r}.")


def _checked_lengths(lengths: Sequence[int], metadata: Mapping[str, object] | None) -> list[int]:
    if not lengths or any(isinstance(n, bool) or not isinstance(n, Integral) or n < 1 for n in lengths):
        raise OptionError(f"lengths are whole numbers of at least 1, got {list(lengths)}.")
    if KEY in (metadata or {}):
        raise OptionError(f"lengths and {KEY} in metadata both set the lengths: leave out one of them.")
    return sorted({int(length) for length in lengths})


def _run(
    subject: HFLM,
    manager: TaskManager,
    shared: dict[str, object],
    settings: HarnessSettings,
    trusted: bool,
    strict: bool,
) -> HarnessResults:
    """Run the tasks on one model.

    Args:
        subject: the harness's model.
        manager: the harness's index of tasks.
        shared: the metadata of `manager`, which is changed.
        settings: what to run.
        trusted: templates may run code.
        strict: refuse lengths that the model cannot read; otherwise leave them out.
    """
    lengths = settings["lengths"]
    reach = subject.max_length
    unread = [length for length in lengths or [] if length > reach]
    if unread and (strict or len(unread) == len(lengths or [])):
        raise OptionError(
            f"the {'model' if strict else 'base'} reads at most {reach} tokens, and the lengths go to {unread[-1]}: "
            "longer questions would be cut. Give shorter lengths, or the longest input that it should read."
        )
    if settings["apply_chat_template"] and not subject.tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template: leave out apply_chat_template, or use a chat model.")
    with (
        nullcontext() if trusted else templates_without_code(),
        _random_numbers_kept(subject),
        tokenizer_folder(subject.tokenizer, trust_remote_code=trusted) as folder,
    ):
        shared.clear()
        shared.update({"tokenizer": folder, **settings["metadata"]})
        if lengths is not None:
            readable = [length for length in lengths if length not in unread]
            output = _run_by_length(subject, manager, shared, settings, readable)
        else:
            output = _evaluate(subject, settings["tasks"], manager, settings, folder, limit=settings["limit"])
            output["table"] = table_of(rows_of(output, None, {}), {})
    return cast("HarnessResults", output | {"longest_input": reach, "settings": settings})


@contextmanager
def _random_numbers_kept(subject: HFLM) -> Iterator[None]:
    """Give the random numbers of the process their state back: the harness seeds Python's, numpy's and torch's."""
    device = torch.device(subject.device)
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([]) if on_cpu else torch.random.fork_rng([device], device_type=device.type):
        try:
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(drawn_by_numpy)  # noqa: NPY002


def _run_by_length(
    subject: HFLM, manager: TaskManager, shared: dict[str, object], settings: HarnessSettings, lengths: list[int]
) -> dict[str, object]:
    """Run the tasks at each length; the arguments are those of `_run`."""
    limit, folder = settings["limit"], str(shared["tokenizer"])
    loaded = load_tasks(settings["tasks"], manager, shared, lengths[0])
    groups = loaded.groups
    measured = {
        name: questions_by_length(task, subject.tokenizer, lengths, limit)
        for name, task in loaded.tasks.items()
        if not reads_lengths(task)
    }
    fixed = {name: loaded.tasks[name] for name in measured}
    again = [name for name, tasks in groups.items() if set(tasks) - set(measured)]
    rows = []
    runs: dict[str, list[dict[str, object]]] = {}
    for length in lengths:
        if length != lengths[0]:
            loaded = load_tasks(again, manager, shared, length)
        by_length_tasks = [task for name, task in loaded.tasks.items() if name not in measured]
        samples = {
            name: rows_by_length[length] for name, (rows_by_length, _) in measured.items() if rows_by_length[length]
        }
        outputs = runs[str(length)] = []
        if by_length_tasks:
            outputs.append(_evaluate(subject, by_length_tasks, manager, settings, folder, limit=limit))
            rows += rows_of(outputs[-1], length, {})
        if samples:
            kept = [fixed[name] for name in samples]
            outputs.append(_evaluate(subject, kept, manager, settings, folder, samples=samples))
            rows += rows_of(outputs[-1], length, {name: len(numbers) for name, numbers in samples.items()})
    if not rows:
        raise DataError(f"no question has a prompt of at most {lengths[-1]} tokens: give longer lengths.")
    longer = {name: count for name, (_, count) in measured.items() if count}
    return {"runs": runs, "lengths": lengths, "longer": longer, "table": table_of(rows, groups)}


def _evaluate(
    subject: HFLM,
    tasks: Sequence[object],
    manager: TaskManager,
    settings: HarnessSettings,
    folder: str,
    **options: object,
) -> dict[str, object]:
    """Return the harness's output; the temporary folder of the tokenizer is not named in it."""
    from lm_eval import simple_evaluate

    if settings["apply_chat_template"]:
        options |= {"apply_chat_template": True, "fewshot_as_multiturn": settings["fewshot_as_multiturn"]}
    try:
        output = simple_evaluate(
            subject,
            tasks=tasks,
            num_fewshot=settings["num_fewshot"],
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
            **options,
        )
    except ImportError as error:
        raise missing_package(error) from error
    for config in output["configs"].values():
        metadata = config.get("metadata")
        if isinstance(metadata, dict) and metadata.get("tokenizer") == folder:
            config["metadata"] = {key: value for key, value in metadata.items() if key != "tokenizer"}
    return dict(output)


def _manager(tasks: Sequence[str], trust_remote_code: bool, metadata: dict[str, object]) -> TaskManager:
    """Return the harness's index of tasks, after checking that all of `tasks` exist.

    The index keeps `metadata` itself, so that later changes count: it takes long to build.
    """
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise OptionError("tasks names what to run, got none: names of the harness, or .yaml files.")
    files = [expand_home(task) for task in tasks if Path(task).suffix in _YAML]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise OptionError(f"no such file of a task: {', '.join(missing)}.")
    refuse_groups(files)
    if not trust_remote_code:
        refuse_task_code(files)
    metadata[KEY] = []  # an empty one would be replaced
    manager = TaskManager(
        include_defaults=len(files) < len(tasks), metadata=metadata
    )  # the harness's own are more than ten thousand
    for task in tasks:
        if Path(task).suffix not in _YAML and str(task) not in manager.all_tasks:
            near = difflib.get_close_matches(str(task), manager.all_tasks, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise OptionError(f"the harness has no task {str(task)!r}.{hint} Give one of its names, or a .yaml file.")
    return manager
