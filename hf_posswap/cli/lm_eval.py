"""`posswap lm-eval`: EleutherAI's harness on a model, with or without a new scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posswap.cli.arguments import Json, MaxLength, Model, TrustRemoteCode, make_scheme, source_of
from hf_posswap.cli.completing import scheme_names
from hf_posswap.cli.evaluating import Device, Tokenizer, placing
from hf_posswap.cli.output import quiet_library, show_json, show_table, show_text
from hf_posswap.cli.target import checked_file
from hf_posswap.errors import OptionError


def lm_eval(
    model: Model,
    tasks: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="Tasks of the harness, or .yaml files of tasks.", show_default=False),
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
        int | None, typer.Option(metavar="N", help="Questions of each task. Default: all.", show_default=False)
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
    """
    if scheme is None and max_length is not None:
        raise OptionError("--max-length says how to put in a scheme: name one after MODEL.")
    source = source_of(model)
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
            device=where["device"],
            dtype=where["dtype"] or "auto",
            trust_remote_code=trust_remote_code,
        )
        if target is not None:
            write_text(target, _as_json(results))
    if json:
        show_json(_plain(results))
        return
    show_table(["task", "metric", "value", "standard error"], _rows(results["results"]))
    show_text("", f"Inputs of at most {results['longest_input']:,} tokens.")


def _rows(results: dict[str, Any]) -> list[list[str]]:
    """Return one row per number of each task; the harness's keys are "metric,filter"."""
    rows = []
    for task, scores in results.items():
        for key, value in scores.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = scores.get(f"{metric}_stderr,{kept}")
            shown = f"{error:.4g}" if isinstance(error, float) else "–"
            name = metric if kept == "none" else f"{metric}, {kept}"
            rows.append([task, name, f"{value:.4g}" if isinstance(value, float) else str(value), shown])
    return rows


def _as_json(results: dict[str, Any]) -> str:
    import json

    return json.dumps(results, indent=2, default=str, allow_nan=False) + "\n"


def _plain(results: dict[str, Any]) -> Any:
    import json

    return json.loads(_as_json(results))
