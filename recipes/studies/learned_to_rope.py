"""The judge of learned-to-rope: is a swapped model, after few tokens, as good as the control, and does it read on?

    python -m recipes.studies.learned_to_rope --base my-gpt2 --tokens 400000 --out results
    python -m recipes.studies.learned_to_rope --base my-gpt2 --train books/ --valid other-books/ --tokens 400000 \\
        --pieces 4 --seeds 3 --set optimizer.warmup=10 --out results

The base is a folder with a model of learned positions, or that of a run of recipes/pretrain.py. Recipe and control are
trained by recipes/train.py on the same tokens, with the same optimizer, on each seed. Then all read the same documents:
whole windows of the original length, and the swapped one 1, 2, 4 and 8 windows at a time. Two questions are answered
with intervals over documents, each document's loss being the mean over seeds:

- in the window: the upper 95 % bound of the difference from the control; at most 0.02 nats is "not worse";
- to 8 windows: the loss at 8 windows less that at one; an upper bound of at most 0.05 nats is "not worse".

A run that was stopped goes on by the same command, and what did not change is not trained again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import read_documents
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.evaluation import RunStore, reach_of
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.training.config import Recipe, load_recipe
from hf_posswap.utils.atomic_io import cache_folder, writable_folder, write_json, write_text
from recipes.studies.measuring import (
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
from recipes.studies.pictures import draw_judgement
from recipes.studies.running import (
    CONTROL,
    RECIPES,
    Run,
    control_settings,
    make_run,
    source_settings,
    step_tokens,
    swapped,
    tokens_of,
    versions,
)

NAME = "learned-to-rope"
TO_LONGEST = 0.05
"""Nats a token that the upper bound from one window to the longest may reach."""


def main(
    base: Annotated[Path, typer.Option(help="A folder with a model of learned positions, or of recipes/pretrain.py.")],
    tokens: Annotated[int, typer.Option(help="To train on, recipe and control alike.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON, table and picture.")],
    train: Annotated[
        list[str] | None, typer.Option(help="As data.sources[].path; Python's own text otherwise.")
    ] = None,
    valid: Annotated[list[Path] | None, typer.Option(help="Likewise, to measure on.")] = None,
    recipe: Annotated[Path, typer.Option(help="What to judge.")] = RECIPES / f"{NAME}.yaml",
    seeds: Annotated[int, typer.Option(help="Trainings of each, from seed 0 on.")] = 1,
    pieces: Annotated[int, typer.Option(help="Of 8 windows each, from the start of every document on.")] = 1,
    documents: Annotated[int, typer.Option(help="Most documents to measure on.")] = 48,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of a recipe; the control takes what is not the swap's.")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")] = None,
) -> None:
    """Train recipe and control at equal tokens, and say whether the recipe holds what it promises."""
    place = writable_folder((work or cache_folder(None) / "studies").expanduser().resolve())
    folder = base if (base / "config.json").is_file() else base / "model"
    model, tokenizer = _opened(folder.resolve())
    window = reach_of(model).window
    found = read_documents(valid, tokenizer, length=pieces * MULTIPLES[-1] * window, limit=documents)
    texts = Texts(found, window, tokenizer)
    shared = _shared(folder.resolve(), train or ["python"], window, settings or ())
    runs = [_pair(recipe, shared, tokens, window, seed, place) for seed in range(seeds)]
    for pair in runs:
        for run in pair:
            typer.echo(f"{run.config.stem}, seed {run.recipe.optimizer.seed}: {tokens_of(run.recipe):,} tokens")
            run.finish()
    with RunStore(place / "measured" / texts.documents.to_dict()["digest"][:10]) as store:
        measured = _measure(model, runs, texts, store)
    texts_in = {Path(path).parent: "$TEXT" for path in train or () if Path(path).parent.parts}
    places = {place: "$WORK", folder.resolve(): "$BASE", **texts_in}
    result = {
        "study": NAME,
        "versions": versions(),
        "base": {"name": base.name, "parameters": model.num_parameters(), "window": window},
        "tokens": tokens_of(runs[0][0].recipe),
        "read": [[run.tokens_read for run in pair] for pair in runs],
        "seeds": seeds,
        "texts": texts.to_dict() | {"source": ", ".join(path.name for path in valid or ()) or found.source},
        "commands": [[run.command(places) for run in pair] for pair in runs],
        **judge(*measured),
    }
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    draw_judgement(result, out / f"{NAME}.png")
    typer.echo(markdown(result))


def _opened(folder: Path) -> tuple[Any, Any]:
    return hf_posswap.load(folder).eval(), load_tokenizer(folder, instead="save it beside the model")


def _shared(base: Path, train: Sequence[str], window: int, settings: Sequence[str]) -> list[str]:
    return [f"model.name={base}", source_settings(train), f"data.length={window}", *settings]


def _pair(config: Path, shared: list[str], tokens: int, window: int, seed: int, place: Path) -> tuple[Run, Run]:
    """Return the trainings of the recipe and of its control on one seed."""
    seeded = [*shared, f"data.seed={seed}", f"optimizer.seed={seed}"]
    longest = MULTIPLES[-1] * window
    steps = tokens // step_tokens(_loaded(config, seeded))
    if steps < 1:
        raise DataError(f"{tokens} tokens are less than one step: give more, or a smaller optimizer.batch by --set.")
    mine = [*seeded, f"optimizer.steps={steps}"]
    recipe = load_recipe(config, mine)
    if (recipe.swap.max_length or 0) < longest:
        mine.append(f"swap.max_length={longest}")
    swapped = make_run(config, mine, place)
    if not tokens - step_tokens(swapped.recipe) < tokens_of(swapped.recipe) <= tokens:
        raise ConfigError(
            f"{config.name} reads {tokens_of(swapped.recipe)} tokens in its stages, and the study is of {tokens}: set "
            "stages.N.steps so that both agree."
        )
    return swapped, make_run(CONTROL, control_settings(swapped.recipe, seeded, window), place)


def _loaded(config: Path, settings: list[str]) -> Recipe:
    """Return the recipe with so many steps that nothing of it is too long: for what does not depend on them."""
    return load_recipe(config, [*settings, f"optimizer.steps={10**9}"])


def _measure(
    base: Any, runs: list[tuple[Run, Run]], texts: Texts, store: RunStore
) -> tuple[Means, Means, list[Means], list[Means]]:
    """Return the means of documents of the base, of it swapped and not trained, and of recipe and control by seed."""
    after, control = ([document_means(hf_posswap.load(pair[i].model), texts, store) for pair in runs] for i in (0, 1))
    plain = document_means(base, texts, store)
    before = swapped(base, runs[0][0], hf_posswap.load(runs[0][0].model))
    return plain, document_means(before, texts, store), after, control


def judge(base: Means, before: Means, after: Sequence[Means], control: Sequence[Means]) -> dict[str, Any]:
    """Return the two verdicts and what they rest on.

    Args:
        base: means of documents of the unswapped model.
        before: of it with the swap, not trained.
        after: of the trained one, by seed.
        control: of the trained unswapped one, by seed.
    """
    swapped = {key: np.mean([means[key] for means in after], axis=0) for key in after[0]}
    plain = np.mean([means[WINDOW] for means in control], axis=0)
    seeds = [difference(c[WINDOW], a[WINDOW]) for c, a in zip(control, after, strict=True)]
    longest = str(MULTIPLES[-1])
    lengths = [
        {"windows": m, "before": float(before[str(m)].mean()), **mean_with_interval(swapped[str(m)])} for m in MULTIPLES
    ]
    return {
        "in_window": {
            "base": float(base[WINDOW].mean()),
            "control": float(plain.mean()),
            "before": float(before[WINDOW].mean()),
            "after": float(swapped[WINDOW].mean()),
            **difference(plain, swapped[WINDOW]),
            "by_seed": seeds,
        },
        "lengths": lengths,
        "to_longest": difference(swapped["1"], swapped[longest], TO_LONGEST),
        "last_window": difference(swapped[LAST_ALONE], swapped[LAST], TO_LONGEST),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result for people."""
    window, far, last = result["in_window"], result["to_longest"], result["last_window"]
    texts, top = result["texts"], MULTIPLES[-1]
    seeds = ", ".join(f"{seed['difference']:+.4f} (bound {seed['upper']:+.4f})" for seed in window["by_seed"])
    lines = [
        f"# {NAME}: {result['tokens']:,} tokens on {result['base']['name']}, "
        f"{result['base']['parameters'] / 1e6:.1f} M parameters, window {texts['window']}",
        "",
        f"Read: {texts['documents']} documents ({texts['source']}), {texts['pieces of a document']} x "
        f"{texts['tokens of a piece']} tokens of each; {result['seeds']} seed(s). Nats a token.",
        "",
        "| in the window | base | swapped, not trained | recipe | control | difference | 95 % interval | upper 95 % "
        "bound | allowed | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| | {window['base']:.4f} | {window['before']:.4f} | {window['after']:.4f} | {window['control']:.4f} | "
        + _verdict(window),
        "",
        f"By seed: {seeds}.",
        "",
        "| windows read at once | swapped, not trained | recipe | 95 % interval |",
        "|---|---|---|---|",
        *(
            f"| {r['windows']} | {r['before']:.4f} | {r['nll']:.4f} | {r['low']:.4f} to {r['high']:.4f} |"
            for r in result["lengths"]
        ),
        "",
        "| farther | difference | 95 % interval | upper 95 % bound | allowed | verdict |",
        "|---|---|---|---|---|---|",
        f"| from 1 to {top} windows | {_verdict(far)}",
        f"| the last of {top} windows, after the others less by itself | {_verdict(last)}",
        "",
        *(f"    {command}" for command in result["commands"][0]),
    ]
    return "\n".join(lines) + "\n"


def _verdict(found: dict[str, Any]) -> str:
    interval = f"{found['low']:+.4f} to {found['high']:+.4f}"
    said = found["reason"] or found["verdict"]
    return f"{found['difference']:+.4f} | {interval} | {found['upper']:+.4f} | {found['margin']} | {said} |"


app = script(main)

if __name__ == "__main__":
    app()
