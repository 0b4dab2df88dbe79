"""`posswap lm-eval`: EleutherAI's harness on a model, with or without a new scheme."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json, MaxLength, Model, TrustRemoteCode, make_scheme, scheme_names, source_of
from hf_posswap.cli.evaluating import Device, Tokenizer, placing, whole_numbers
from hf_posswap.cli.output import quiet_library, show_json, show_table, show_text
from hf_posswap.cli.target import checked_file
from hf_posswap.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posswap.comparison.report.results import HarnessResults, HarnessTable


def lm_eval(
    model: Model,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME",
            help="Tasks of the harness, or .yaml files of tasks. Long: ruler, babilong, longbench2, infinitebench, "
            "graphwalks.",
            show_default=False,
        ),
    ],
    scheme: Annotated[
        str | None,
        typer.Argument(
            metavar="SCHEME",
            help="Put this one in first, without training: yarn, or yarn:factor=4,base=500000.",
            show_default=False,
            autocompletion=scheme_names,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Run each task at each of these lengths, in tokens. Default: the data as they are.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            "--base",
            metavar="MODEL",
            help="The unswapped model, or the --out file of its run: shows the percentage of its scores that is kept.",
            show_default=False,
        ),
    ] = None,
    max_length: MaxLength = None,
    longest_input: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Truncate longer inputs, in tokens. Default: the swap's maximum length, or the model's own.",
            show_default=False,
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(metavar="N", help="Examples before each question. Default: the task's.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Questions per batch.")] = 1,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="Questions of each task and length. Default: all.", show_default=False),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Write questions as the tokenizer's chat template does.")
    ] = False,
    fewshot_as_multiturn: Annotated[
        bool, typer.Option("--fewshot-as-multiturn", help="Examples are turns of the chat of their own.")
    ] = False,
    metadata: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="More for the functions that make the data of tasks, as {...}.", show_default=False
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="float32, bfloat16, ... Default: the checkpoint's.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Save the harness's output as JSON.", show_default=False),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Run tasks of EleutherAI's evaluation harness on a model.

    A swap saved in the checkpoint is applied, and inputs may be as long as its maximum length. Needs the extra lm-eval;
    the harness's tasks fetch their data from the Hub.

    Example: posswap lm-eval my-long-llama --tasks hellaswag --limit 100

    Example: posswap lm-eval my-long-llama --tasks ruler --lengths 4096,8192,16384 --limit 50 --baseline llama
    """
    if scheme is None and max_length is not None:
        raise OptionError("--max-length says how to put in a scheme: name one after MODEL.")
    source = source_of(model)
    chosen_lengths = whole_numbers(lengths)
    compared = None if baseline is None else _base(baseline)
    for_tasks = None if metadata is None else _object_of(metadata)
    chosen = None if scheme is None else make_scheme(scheme)
    where = placing(device, dtype)
    target = None if out is None else checked_file(out)
    with quiet_library():
        from hf_posswap.harness import run_tasks
        from hf_posswap.utils.atomic_io import write_text

        results = run_tasks(
            source,
            [task.strip() for task in tasks.split(",") if task.strip()],
            chosen,
            max_length=max_length,
            longest_input=longest_input,
            tokenizer=tokenizer,
            num_fewshot=num_fewshot,
            batch_size=batch_size,
            limit=limit,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=fewshot_as_multiturn,
            lengths=chosen_lengths,
            baseline=compared,
            metadata=for_tasks,
            device=where["device"],
            dtype=where["dtype"] or "auto",
            trust_remote_code=trust_remote_code,
        )
        if target is not None:
            write_text(target, _as_json(results))
    if json:
        show_json(_plain(results))
        return
    _show(results)


def _base(text: str) -> HarnessResults | PreTrainedModel | str | Path:
    """Return the results in a file, or a model."""
    from hf_posswap.utils.atomic_io import read_json
    from hf_posswap.utils.user_paths import expand_home

    path = expand_home(text)
    return read_json(path) if path.suffix == ".json" and path.is_file() else source_of(text)


def _object_of(text: str) -> dict[str, object]:
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise OptionError(f'--metadata {text}: expected a JSON object, such as {{"name": 1}} ({error}).') from error
    if not isinstance(value, dict):
        raise OptionError(f'--metadata {text}: expected a JSON object, such as {{"name": 1}}.')
    return value


def _show(results: HarnessResults) -> None:
    table, lengths = results["table"], results.get("lengths")
    if lengths is None:
        kept = ["kept"] if "base" in results else []
        show_table(["task", "metric", "value", "standard error", *kept], _rows(results))
    else:
        show_table(*length_table(table, lengths))
        longer = [
            f"{name} has {count:,} longer questions, which were left out." for name, count in results["longer"].items()
        ]
        show_text(*longer)
    if "base" in results:
        reach = results["base"]["longest_input"]
        show_text("", f"Kept: percentage of the base's score. The base reads at most {reach:,} tokens.")
    show_text("", f"Inputs of at most {results['longest_input']:,} tokens.")


def length_table(table: HarnessTable, lengths: list[int]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of tasks and lengths.

    Args:
        table: of `hf_posswap.harness.run_tasks`.
        lengths: in tokens.
    """
    header = ["task", "metric", *(f"{length:,}" for length in lengths), "RULER length", "NoLiMa length"]
    rows = []
    for row in table["rows"]:
        kept = row.get("retention") or {}
        cells = []
        for length in lengths:
            cell, share = row["values"].get(str(length)), kept.get(str(length))
            shown = "–" if cell is None else f"{cell['score']:.4g}"
            cells.append(shown if share is None else f"{shown} ({share:.0f} % kept)")
        effective = row["effective_length"] or {}
        measured = [int(column) for column in row["values"] if column != "all"]
        reached = [_reached(effective, criterion, measured) for criterion in ("ruler", "nolima")]
        rows.append([row["task"], row["metric"], *cells, *reached])
    return header, rows


def _reached(effective: dict[str, int | None], criterion: str, measured: list[int]) -> str:
    length = effective.get(criterion)
    if length is None:  # NoLiMa's criterion has no meaning where nothing is right at the shortest length
        return f"< {min(measured):,}" if effective and criterion == "ruler" else "–"
    return f"≥ {length:,}" if length == max(measured) else f"{length:,}"


def _rows(results: HarnessResults) -> list[list[str]]:
    """Return one row per task, metric and column of a run without lengths."""
    rows = []
    for row in results["table"]["rows"]:
        for column, cell in row["values"].items():
            error = "–" if cell["stderr"] is None else f"{cell['stderr']:.4g}"
            name = row["metric"] if column == "all" else f"{row['metric']} at {int(column):,}"
            share = (row.get("retention") or {}).get(column)
            kept = [] if "base" not in results else ["–" if share is None else f"{share:.1f} %"]
            rows.append([row["task"], name, f"{cell['score']:.4g}", error, *kept])
    return rows


def _as_json(results: HarnessResults) -> str:
    import json

    return json.dumps(results, indent=2, default=str, allow_nan=False) + "\n"


def _plain(results: HarnessResults) -> object:
    import json

    return json.loads(_as_json(results))
