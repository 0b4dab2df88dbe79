"""Does a model retrieve a number from four windows ago? Passkeys by length before a swap, after it and after training.

    python -m recipes.studies.puzzles near
    python -m recipes.studies.puzzles far --documents 4000 --filler 74 --seed 1
    python recipes/pretrain.py llama finder --text near --window 128 --width 128 --layers 3 --vocabulary 512 \\
        --tokens 6000000 --batch 32 --learning-rate 3e-3
    python -m recipes.studies.retrieval --base finder --train far --tokens 175000 --seeds 3 --out results

The base is a folder with a causal model, or a run of recipes/pretrain.py, that finds needles inside its window; another
model shows nothing. Each recipe swaps for 8 windows and trains on windows of that length. The goals: at least 90 of 100
needles at 4 windows are found after training, if the base finds 95 of 100 in its own window; and the effective length,
up to which every length's lower bound is 0.85 of the share in the window (`hf_posswap.evaluation.effective_length`), is
larger than the base's. The untouched base and each swap before training are reported too. The same command resumes an
interrupted run, and trains only what changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.errors import DataError
from hf_posswap.evaluation import RunStore, effective_length, passkey_grid, reach_of, wilson_interval
from hf_posswap.evaluation.passkey import PasskeyTask
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.training.config import load_recipe
from hf_posswap.utils.atomic_io import write_json, write_text
from recipes.studies.pictures import draw_found
from recipes.studies.running import (
    RECIPES,
    Run,
    base_folder,
    make_run,
    source_settings,
    study_command,
    swapped,
    tokens_of,
    versions,
    work_folder,
)

NAME = "retrieval"
MULTIPLES = (0.5, 1, 2, 4, 8)
"""Of the window: the lengths of prompt and answer together."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
IN_WINDOW, FAR, FAR_WINDOWS = 0.95, 0.9, 4
"""Shares of needles that must be found: by the base in its window, and after training at `FAR_WINDOWS` windows."""
_WARMUP = 0.05

Cells = dict[str, list[int]]
"""By multiple of the window: needles found, and total needles."""


def main(
    context: typer.Context,
    base: Annotated[Path, typer.Option(help="A folder with a causal model, or of recipes/pretrain.py.")],
    train: Annotated[list[str], typer.Option(help="As data.sources[].path: text with far needles.")],
    tokens: Annotated[int, typer.Option(help="To train on.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON, table and picture.")],
    recipe: Annotated[list[Path] | None, typer.Option(help="To judge; yarn and abf otherwise.")] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each, from seed 0 on.")] = 1,
    trials: Annotated[int, typer.Option(help="Needles of each length and each of 5 depths.")] = 20,
    learning_rate: Annotated[float, typer.Option(help="Of all recipes.")] = 5e-4,
    work: Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")] = None,
) -> None:
    """Train recipes on far needles, and report the share found by length."""
    work_dir = work_folder(work)
    folder = base_folder(base)
    model = hf_posswap.load(folder).eval()
    window = reach_of(model).window
    task = PasskeyTask(load_tokenizer(folder, instead="save it with the model"), header=False)
    if window < task.shortest:
        raise DataError(f"a passkey takes {task.shortest} tokens here, and the window of {base} has {window}.")
    configs = recipe or [RECIPES / "yarn.yaml", RECIPES / "abf.yaml"]
    shared = [f"model.name={folder}", source_settings(train), f"training.learning_rate={learning_rate}"]
    runs = {config: list(_runs(config, shared, (window, tokens, seeds), work_dir)) for config in configs}
    with RunStore(work_dir / "measured" / NAME) as store:
        rows = [_row("base", "as it is", [model], task, window, trials, store)]
        for config, of_config in runs.items():
            for run in of_config:
                typer.echo(f"{config.stem}, seed {run.recipe.training.seed}: {tokens_of(run.recipe):,} tokens")
                run.finish()
            trained = [hf_posswap.load(run.model).eval() for run in of_config]
            start = swapped(hf_posswap.load(folder).eval(), of_config[0], trained[0])
            rows.append(_row(config.stem, "before training", [start], task, window, trials, store))
            rows.append(_row(config.stem, "trained", trained, task, window, trials, store))
    places = {work_dir: "$WORK", folder: "$BASE", **{Path(path): f"$TEXT/{Path(path).name}" for path in train}}
    result = {
        "study": NAME,
        "versions": versions(),
        "base": {"name": base.name, "parameters": model.num_parameters(), "window": window},
        "tokens": max(tokens_of(run.recipe) for of_config in runs.values() for run in of_config),
        "seeds": seeds,
        "rows": rows,
        "goals": list(goals_of(rows, window)),
        "command": study_command(NAME, context.params, places),
        "commands": [of_config[0].command(places) for of_config in runs.values()],
    }
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    draw_found(result, out / f"{NAME}.png")
    typer.echo(markdown(result))


def _runs(config: Path, shared: Sequence[str], sizes: tuple[int, int, int], work_dir: Path) -> Iterator[Run]:
    """Yield the trainings of a recipe, by seed.

    Args:
        config: of the recipe.
        shared: settings of all.
        sizes: window, tokens, seeds.
        work_dir: folder for trainings.
    """
    window, tokens, seeds = sizes
    longest = int(MULTIPLES[-1] * window)
    steps = tokens // longest
    if steps < 1:
        raise DataError(f"{tokens} tokens are less than one window of {longest}: give as many, or more.")
    own_settings = [f"data.length={longest}", "data.packing=documents", f"training.max_steps={steps}"]
    own_settings += ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=1"]
    own_settings += [f"training.warmup_steps={int(_WARMUP * steps)}", "training.lr_scheduler_type=cosine"]
    scheme = load_recipe(config).swap.scheme
    has_factor = isinstance(scheme, dict) and "factor" in scheme
    own_settings.append(f"swap.scheme.factor={int(MULTIPLES[-1])}" if has_factor else f"swap.max_length={longest}")
    for seed in range(seeds):
        yield make_run(config, [*shared, *own_settings, f"data.seed={seed}", f"training.seed={seed}"], work_dir)


def _row(
    name: str, state: str, models: Sequence[Any], task: PasskeyTask, window: int, trials: int, store: RunStore
) -> dict[str, Any]:
    """Return how many needles `models`, of several seeds, find by length."""
    counts_by_seed = [_needle_counts(model, task, window, trials, store) for model in models]
    cells = {
        length: [sum(counts[length][i] for counts in counts_by_seed) for i in (0, 1)] for length in counts_by_seed[0]
    }
    return {"recipe": name, "state": state, "found": cells}


def _needle_counts(model: Any, task: PasskeyTask, window: int, trials: int, store: RunStore) -> Cells:
    lengths = {f"{m:g}": int(m * window) for m in MULTIPLES}
    limit = reach_of(model).limit
    lengths = {m: n for m, n in lengths.items() if n >= task.shortest and (limit is None or n <= limit)}
    key = {"what": NAME, "model": fingerprint(model), "lengths": lengths, "depths": DEPTHS, "trials": trials}

    def measure() -> Cells:
        cells: Cells = {}
        for name, length in lengths.items():
            grid = passkey_grid(model, task, lengths=[length], depths=DEPTHS, trials=trials)
            cells[name] = [sum(cell.exact for cell in grid), sum(cell.trials for cell in grid)]
        return cells

    return dict(store.value(key, measure))


def goals_of(rows: Sequence[dict[str, Any]], window: int) -> Iterator[dict[str, Any]]:
    """Yield the goals, each with its measurement and whether it is reached.

    Args:
        rows: of the result; the first is the base's.
        window: of the base, in tokens.
    """
    inside = [rows[0]["found"][m] for m in ("0.5", "1") if m in rows[0]["found"]]
    share = sum(hits for hits, _ in inside) / sum(total for _, total in inside)
    yield _goal("base", "finds them in its window", f"{share:.1%}", share >= IN_WINDOW)
    before = effective_tokens(rows[0], rows[0], window)
    for row in (row for row in rows if row["state"] == "trained"):
        hits, total = row["found"].get(f"{FAR_WINDOWS}", (0, 1))
        yield _goal(row["recipe"], f"finds them at {FAR_WINDOWS} windows", f"{hits / total:.1%}", hits / total >= FAR)
        after = effective_tokens(row, rows[0], window)
        length_texts = [f"{tokens} tokens" if tokens else "no verdict" for tokens in (after, before)]
        lengths_text = f"{length_texts[0]}, {length_texts[1]} before"
        yield _goal(row["recipe"], "the effective length grows", lengths_text, (after or 0) > (before or 0))


def _goal(recipe: str, goal: str, result: str, reached: bool) -> dict[str, Any]:
    return {"recipe": recipe, "goal": goal, "found": result, "reached": reached}


def effective_tokens(row: dict[str, Any], base: dict[str, Any], window: int) -> int | None:
    """Return the effective length of a row in tokens, relative to its own share in the window; None: no verdict.

    All seeds have the same needles, so intervals are for the number of one seed's.

    Args:
        row: of the result.
        base: the base's row, which has one seed.
        window: of the base, in tokens.
    """
    needles = base["found"]["1"][1]
    answers = {
        int(float(m) * window): (round(needles * hits / total), needles) for m, (hits, total) in row["found"].items()
    }
    return effective_length(answers, base_length=window).length


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a page."""
    base, columns = result["base"], list(result["rows"][0]["found"])
    needles = result["rows"][0]["found"][columns[0]][1]
    lines = [
        f"# retrieval: {result['tokens']:,} tokens on {base['name']}, {base['parameters'] / 1e6:.1f} M parameters, "
        f"window {base['window']}",
        "",
        f"Passkeys found of {needles} per length, at five depths; mean of {result['seeds']} seed(s). Brackets: the "
        f"95 % Wilson interval for {needles} needles, because all seeds have the same ones.",
        "",
        "| recipe | state | " + " | ".join(f"{m} x {base['window']}" for m in columns) + " | effective length |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for row in result["rows"]:
        cells = [_cell(*row["found"][m], needles=needles) if m in row["found"] else "ends before" for m in columns]
        reach = effective_tokens(row, result["rows"][0], base["window"])
        lines.append(f"| {row['recipe']} | {row['state']} | {' | '.join(cells)} | {'–' if reach is None else reach} |")
    lines += ["", "| recipe | goal | found | verdict |", "|---|---|---|---|"]
    for goal in result["goals"]:
        verdict = "reached" if goal["reached"] else "missed"
        lines.append(f"| {goal['recipe']} | {goal['goal']} | {goal['found']} | {verdict} |")
    commands = [result["command"], *result["commands"]]
    return "\n".join([*lines, "", *(f"    {line}" for line in commands), ""])


def _cell(hits: int, total: int, *, needles: int) -> str:
    """Return the share of needles found, with the interval for one seed's number."""
    low, high = wilson_interval(round(needles * hits / total), needles)
    return f"{hits / total:.0%} [{low:.0%}, {high:.0%}]"


app = script(main)

if __name__ == "__main__":
    app()
