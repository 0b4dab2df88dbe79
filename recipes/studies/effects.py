"""Each recipe's effect: every recipe through recipes/train.py on a small base, beside its equal-token control.

    python -m recipes.studies.effects --out recipes/studies/results            # all: about an hour on one core
    python -m recipes.studies.effects --only yarn,pose --out results           # some; the others' rows stay
    python -m recipes.studies.effects --smoke --out small                      # tiny: a check that all of it runs

Three bases are pretrained by recipes/pretrain.py on the running Python's own text (GPT-2 with learned positions, Llama
with RoPE, BERT). Recipes are shrunk in lengths, steps and batch, and all train at one learning rate; nothing else of
them differs. All are measured on the same held-out documents. A run that was stopped goes on by the same command.
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
"""Of the search for LongRoPE's divisors: the target, in windows, and the texts that it reads."""


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
    place = (work or cache_folder(None) / "studies").expanduser().resolve()
    place = writable_folder(place / "smoke" if smoke else place)
    with RunStore(place / "measured") as store:
        for row in rows:
            found = measure_row(row, sizes, place, store)
            result = _with_row(out / f"{NAME}.json", sizes, found)
            write_json(out / f"{NAME}.json", result)
            write_text(out / f"{NAME}.md", markdown(result))
    typer.echo(markdown(result))


def _chosen(only: str | None) -> tuple[Row, ...]:
    names = {row.name: row for row in ROWS}
    asked = list(names) if only is None else only.split(",")
    for name in asked:
        if name not in names:
            raise UnknownNameError("recipe", name, names)
    return tuple(names[name] for name in asked)


def _with_row(path: Path, sizes: Sizes, found: dict[str, Any]) -> dict[str, Any]:
    """Return the results at `path` with one more row; rows of other sizes or versions are dropped."""
    head: dict[str, Any] = {"study": NAME, "intervals": INTERVALS, "versions": versions(), "seed": 0}
    head["sizes"] = json.loads(json.dumps(dataclasses.asdict(sizes)))
    held = read_json(path) if path.is_file() else {}
    same = all(held.get(key) == value for key, value in head.items())
    rows = {row["recipe"]: row for row in held["rows"]} if same else {}
    rows[found["recipe"]] = found
    return head | {"rows": [rows[row.name] for row in ROWS if row.name in rows]}


def measure_row(row: Row, sizes: Sizes, place: Path, store: RunStore) -> dict[str, Any]:
    """Return what the recipe of `row` did: everything is trained and measured now, or found below `place`."""
    base = make_base(row.base, sizes, place)
    scheme, search = _searched(base, sizes, place) if row.searched else (None, None)
    settings = row_settings(row, sizes, base.folder, scheme)
    run = make_run(row.config, settings, place)
    control = make_run(CONTROL, control_settings(run.recipe, settings, sizes.window), place)
    for each in (run, control):
        typer.echo(f"{row.name}: {each.folder.name}")
        each.finish()
    model = hf_posswap.load(run.model).eval()
    teacher = base.load() if run.recipe.objective.kind == "embedding" else None
    subjects = {"base": base.load(), "control": hf_posswap.load(control.model).eval(), "after": model}
    subjects["before"] = swapped(base.load(), run, model)
    means = {name: document_means(subject, base.texts, store, teacher) for name, subject in subjects.items()}
    record = SwapRecord.from_dict(model.config.posswap)
    places = {place: "$WORK"}
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
    """Return what a row says of losses.

    Args:
        means: of documents, of "base", "control", "before" training and "after".
    """
    after = means["after"]
    inside = {name: float(found[WINDOW].mean()) for name, found in means.items()}
    lengths = [
        {"windows": m, **{name: mean_with_interval(found[str(m)]) for name, found in means.items() if str(m) in found}}
        for m in MULTIPLES
    ]
    found = {"in_window": inside | difference(means["control"][WINDOW], after[WINDOW]), "lengths": lengths}
    if LAST in after:
        found["last_window"] = difference(after[LAST_ALONE], after[LAST])
    return found


def make_base(kind: str, sizes: Sizes, place: Path) -> Base:
    """Return the base of that kind, pretrained now or found below `place`."""
    folder = place / "bases" / kind
    shape = {name: getattr(sizes, name) for name in ("window", "layers", "width", "heads", "vocabulary")}
    rates, tokens = dict[str, float](sizes.pretraining_rate), dict[str, int](sizes.tokens)
    shape |= {"tokens": tokens[kind], "learning-rate": rates[kind]}
    if sizes.training_documents is not None:
        shape["documents"] = sizes.training_documents
    arguments = [kind, str(folder), *(part for key, value in shape.items() for part in (f"--{key}", str(value)))]
    arguments += ["--set", "training.report_to=none"]
    run_script(RECIPES / "pretrain.py", arguments)  # finds what it finished; refuses what was made otherwise
    tokenizer = load_tokenizer(folder / "model", instead="save it beside the model")
    found = read_documents(None, tokenizer, length=MULTIPLES[-1] * sizes.window, limit=sizes.documents)
    command = command_line("recipes/pretrain.py", arguments, {place: "$WORK"})
    return Base(kind, folder / "model", command, Texts(found, sizes.window, tokenizer))


def _searched(base: Base, sizes: Sizes, place: Path) -> tuple[Path, str]:
    """Return the file with LongRoPE's divisors, searched now or found, and the command that searches them."""
    folder = writable_folder(place / "longrope")
    texts = [folder / f"text-{number}.txt" for number in range(_SEARCHED)]
    for path, text in zip(texts, _long_texts(base), strict=False):
        if not path.is_file():
            write_text(path, text)
    out, state = folder / "longrope.json", folder / "state.json"
    values = {"factor": _FACTOR, "population": sizes.population, "iterations": sizes.iterations, "state": state}
    options = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    arguments = ["search", str(base.folder), *map(str, texts), *options, "--native", "-o", str(out)]
    if not out.is_file():
        done = subprocess.run([sys.executable, "-m", "hf_posswap.cli", *arguments], check=False)
        if done.returncode:
            raise TrainingError(f"posswap search ended with exit code {done.returncode}; it says why above.")
    return out, command_line("posswap", arguments, {place: "$WORK"})


def _long_texts(base: Base) -> Iterator[str]:
    """Give training texts that are long enough to be read whole windows of, with room to spare."""
    for document in python_corpus().train:
        ids = base.texts.tokenizer(document.text[: 64 * base.texts.longest], verbose=False)["input_ids"]
        if len(ids) > 2 * base.texts.longest:
            yield document.text


app = script(main)

if __name__ == "__main__":
    app()
