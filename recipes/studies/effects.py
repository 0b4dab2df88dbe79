"""The effect of each recipe: runs every recipe with recipes/train.py on a small base, next to an equal-token control.

    python -m recipes.studies.effects --out recipes/studies/results            # all: about an hour on one core
    python -m recipes.studies.effects --only yarn,pose --out results           # some; other rows are kept
    python -m recipes.studies.effects --smoke --out small                      # tiny: checks that everything runs

Three bases are pretrained by recipes/pretrain.py on the running Python's own text (GPT-2 with learned positions, Llama
with RoPE, BERT). Recipes are shrunk in lengths, steps and batch, and all train at one learning rate; nothing else
changes. All are measured on the same held-out documents. The same command resumes an interrupted run.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import read_documents
from hf_posswap.errors import TrainingError, UnknownNameError
from hf_posswap.evaluation import RunStore
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import cache_folder, read_json, writable_folder, write_json, write_text
from recipes.studies.measuring import (
    INTERVALS,
    LAST,
    LAST_ALONE,
    MULTIPLES,
    WINDOW,
    Means,
    Texts,
    difference,
    document_means,
    mean_with_interval,
)
from recipes.studies.rows import ROWS, SMOKE, Row, Sizes, row_settings
from recipes.studies.running import (
    CONTROL,
    RECIPES,
    command_line,
    control_settings,
    make_run,
    run_script,
    swapped,
    versions,
)
from recipes.studies.tables import markdown

NAME = "effects"
_FACTOR, _SEARCHED = 8, 2
"""The target of LongRoPE's search, in windows, and the number of texts that it reads."""


@dataclass(frozen=True)
class Base:
    """What recipes start from.

    Attributes:
        kind: gpt2, llama or bert.
        folder: with the finished model.
        command: that made it.
        texts: to measure on, by its tokenizer.
    """

    kind: str
    folder: Path
    command: str
    texts: Texts

    def load(self) -> Any:
        """Return the model, in eval mode."""
        return hf_posswap.load(self.folder).eval()


def main(
    out: Annotated[Path, typer.Option(help="The folder for JSON and table.")],
    only: Annotated[str | None, typer.Option(help="Names of recipes, with commas.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, a few steps.")] = False,
    work: Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")] = None,
) -> None:
    """Train, measure, and write a row at a time."""
    rows = _chosen(only)
    sizes = SMOKE if smoke else Sizes()
    work_dir = (work or cache_folder(None) / "studies").expanduser().resolve()
    work_dir = writable_folder(work_dir / "smoke" if smoke else work_dir)
    with RunStore(work_dir / "measured") as store:
        for row in rows:
            row_result = measure_row(row, sizes, work_dir, store)
            result = _with_row(out / f"{NAME}.json", sizes, row_result)
            write_json(out / f"{NAME}.json", result)
            write_text(out / f"{NAME}.md", markdown(result))
    typer.echo(markdown(result))


def _chosen(only: str | None) -> tuple[Row, ...]:
    names = {row.name: row for row in ROWS}
    requested = list(names) if only is None else only.split(",")
    for name in requested:
        if name not in names:
            raise UnknownNameError("recipe", name, names)
    return tuple(names[name] for name in requested)


def _with_row(path: Path, sizes: Sizes, row_result: dict[str, Any]) -> dict[str, Any]:
    """Return the results at `path` with `row_result` added; rows of other sizes or versions are dropped."""
    head: dict[str, Any] = {"study": NAME, "intervals": INTERVALS, "versions": versions(), "seed": 0}
    head["sizes"] = json.loads(json.dumps(dataclasses.asdict(sizes)))
    previous = read_json(path) if path.is_file() else {}
    is_same = all(previous.get(key) == value for key, value in head.items())
    rows = {row["recipe"]: row for row in previous["rows"]} if is_same else {}
    rows[row_result["recipe"]] = row_result
    return head | {"rows": [rows[row.name] for row in ROWS if row.name in rows]}


def measure_row(row: Row, sizes: Sizes, work_dir: Path, store: RunStore) -> dict[str, Any]:
    """Return the results of the recipe of `row`; what `work_dir` does not hold is trained and measured now."""
    base = make_base(row.base, sizes, work_dir)
    scheme, search = _searched(base, sizes, work_dir) if row.searched else (None, None)
    settings = row_settings(row, sizes, base.folder, scheme)
    run = make_run(row.config, settings, work_dir)
    control = make_run(CONTROL, control_settings(run.recipe, settings, sizes.window), work_dir)
    for each in (run, control):
        typer.echo(f"{row.name}: {each.folder.name}")
        each.finish()
    model = hf_posswap.load(run.model).eval()
    teacher = base.load() if run.recipe.objective.kind == "embedding" else None
    subjects = {"base": base.load(), "control": hf_posswap.load(control.model).eval(), "after": model}
    subjects["before"] = swapped(base.load(), run, model)
    means = {name: document_means(subject, base.texts, store, teacher) for name, subject in subjects.items()}
    record = SwapRecord.from_dict(model.config.posswap)
    places = {work_dir: "$WORK"}
    commands = {"base": base.command, "search": search, "recipe": run.command(places)}
    commands["control"] = control.command(places)
    return {
        "recipe": row.name,
        "base": row.base,
        "parameters": model.num_parameters(),
        "measure": "1 - cosine" if teacher is not None else "masked" if row.base == "bert" else "next token",
        "demonstration": row.demonstration,
        "route": record.route,
        "max_length": record.max_length,
        "training_windows": row.windows,
        "tokens": run.tokens_read,
        "control_tokens": control.tokens_read,
        "texts": base.texts.to_dict(),
        **compared(means),
        "commands": {name: command for name, command in commands.items() if command is not None},
    }


def compared(means: dict[str, Means]) -> dict[str, Any]:
    """Return the losses of a row.

    Args:
        means: of documents, of "base", "control", "before" training and "after".
    """
    after = means["after"]
    inside = {name: float(losses[WINDOW].mean()) for name, losses in means.items()}
    lengths = [
        {"windows": m, **{name: mean_with_interval(rows[str(m)]) for name, rows in means.items() if str(m) in rows}}
        for m in MULTIPLES
    ]
    compared_losses = {"in_window": inside | difference(means["control"][WINDOW], after[WINDOW]), "lengths": lengths}
    if LAST in after:
        compared_losses["last_window"] = difference(after[LAST_ALONE], after[LAST])
    return compared_losses


def make_base(kind: str, sizes: Sizes, work_dir: Path) -> Base:
    """Return the base of that kind, pretrained now unless `work_dir` holds it."""
    folder = work_dir / "bases" / kind
    shape = {name: getattr(sizes, name) for name in ("window", "layers", "width", "heads", "vocabulary")}
    rates, tokens = dict[str, float](sizes.pretraining_rate), dict[str, int](sizes.tokens)
    shape |= {"tokens": tokens[kind], "learning-rate": rates[kind]}
    if sizes.training_documents is not None:
        shape["documents"] = sizes.training_documents
    arguments = [
        kind,
        str(folder),
        *(argument for key, value in shape.items() for argument in (f"--{key}", str(value))),
    ]
    arguments += ["--set", "training.report_to=none"]
    run_script(RECIPES / "pretrain.py", arguments)  # reuses a finished run; refuses one with other settings
    tokenizer = load_tokenizer(folder / "model", instead="save it with the model")
    documents = read_documents(None, tokenizer, length=MULTIPLES[-1] * sizes.window, limit=sizes.documents)
    command = command_line("recipes/pretrain.py", arguments, {work_dir: "$WORK"})
    return Base(kind, folder / "model", command, Texts(documents, sizes.window, tokenizer))


def _searched(base: Base, sizes: Sizes, work_dir: Path) -> tuple[Path, str]:
    """Return the file with LongRoPE's divisors, searched now if missing, and the command of the search."""
    folder = writable_folder(work_dir / "longrope")
    texts = [folder / f"text-{number}.txt" for number in range(_SEARCHED)]
    for path, argument in zip(texts, _long_texts(base), strict=False):
        if not path.is_file():
            write_text(path, argument)
    out, state = folder / "longrope.json", folder / "state.json"
    values = {"factor": _FACTOR, "population": sizes.population, "iterations": sizes.iterations, "state": state}
    options = [argument for key, value in values.items() for argument in (f"--{key}", str(value))]
    arguments = ["search", str(base.folder), *map(str, texts), *options, "--native", "-o", str(out)]
    if not out.is_file():
        process = subprocess.run([sys.executable, "-m", "hf_posswap", *arguments], check=False)
        if process.returncode:
            raise TrainingError(f"posswap search ended with exit code {process.returncode}; it says why above.")
    return out, command_line("posswap", arguments, {work_dir: "$WORK"})


def _long_texts(base: Base) -> Iterator[str]:
    """Yield training texts that are more than twice as long as the longest length."""
    for document in python_corpus().train:
        ids = base.texts.tokenizer(document.text[: 64 * base.texts.longest], verbose=False)["input_ids"]
        if len(ids) > 2 * base.texts.longest:
            yield document.text


app = script(main)

if __name__ == "__main__":
    app()
