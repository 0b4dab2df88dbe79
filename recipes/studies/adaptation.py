"""Adaptation to long context: the loss in the window and the value of far text after few tokens of training.

    python -m recipes.studies.adaptation --base my-gpt2 --train books/ --valid other/ --tokens 421000 --out results
    python -m recipes.studies.adaptation --base my-llama --recipe recipes/yarn.yaml --set swap.scheme.factor=8 \\
        --tokens 421000 --seeds 3 --out results
    python -m recipes.studies.adaptation --base my-gpt2 --tokens 50000 --tokens 140000 --tokens 421000 --out curve
    python -m recipes.studies.adaptation --base my-gpt2 --tokens 421000 --ablate swap.fit=0 --out without

The base is a folder with a causal model, or a run of recipes/pretrain.py. Each recipe and the control are trained with
recipes/train.py on equal tokens, for each seed; the control uses its own learning rate, so that a rate tuned for the
swap does not disadvantage it. Then all read the same documents. There are three goals, each with an interval over
documents; a document's loss is the mean over seeds:

1. in the window: the upper 95 % bound of the difference from the control is at most 0.02 nats, and the difference from
   the untouched base at most 0.005 (rope, sinusoidal) or 0.01;
2. far text helps: the last of 8 windows after the seven before it, less the same window alone: an upper bound below 0,
   and at most -0.02 (rope, alibi, yarn), below 0 (others), at most 0.02 (sinusoidal, without the bound);
3. it beats the baseline: the loss over 8 windows at once, less that of the control with half-overlapping sliding
   windows of the original length: an upper bound below 0. The base's own sliding window is reported too.

The same command resumes an interrupted run, and trains only what changed. Processes that run at once each need a --work
and an --out. With --device cuda it trains and measures on a GPU, on the CPU otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from hf_posswap.training.config import load_recipe
from hf_posswap.utils.atomic_io import write_json, write_text
from recipes.studies.goals import Subject, judge, markdown
from recipes.studies.measuring import INTERVALS, LAST, MULTIPLES, Texts, document_means, sliding_means
from recipes.studies.pictures import draw_goals
from recipes.studies.running import (
    CONTROL,
    RECIPES,
    Run,
    base_folder,
    check_device,
    control_settings,
    make_run,
    source_settings,
    step_tokens,
    study_command,
    tokens_of,
    versions,
    work_folder,
)

NAME = "adaptation"
WARMUP = 0.05
"""Share of the steps; the recipes' warm-up is meant for a thousand steps."""


def main(
    context: typer.Context,
    base: Annotated[Path, typer.Option(help="A folder with a causal model, or of recipes/pretrain.py.")],
    tokens: Annotated[list[int], typer.Option(help="To train on, recipes and control alike; a row for each.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON, table and picture.")],
    train: Annotated[
        list[str] | None, typer.Option(help="As data.sources[].path; Python's own text otherwise.")
    ] = None,
    valid: Annotated[list[Path] | None, typer.Option(help="Likewise, to measure on.")] = None,
    recipe: Annotated[list[Path] | None, typer.Option(help="To judge; learned-to-rope otherwise.")] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each, from seed 0 on.")] = 1,
    step: Annotated[int, typer.Option(help="Tokens of a step.")] = 4096,
    pieces: Annotated[int, typer.Option(help="Of 8 windows each, from the start of every document on.")] = 1,
    documents: Annotated[int, typer.Option(help="Most documents to measure on.")] = 48,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of the recipes; data.length: where they mix no lengths."),
    ] = None,
    ablate: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: one more row of each recipe, with this besides.")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train recipes and control at equal tokens, and say which goals are reached."""
    check_device(device)
    work_dir = work_folder(work)
    folder = base_folder(base)
    model = hf_posswap.load(folder).eval().to(device)
    tokenizer = load_tokenizer(folder, instead="save it with the model")
    window = reach_of(model).window
    corpus = read_documents(valid, tokenizer, length=pieces * MULTIPLES[-1] * window, limit=documents)
    texts = Texts(corpus, window, tokenizer)
    shared = [f"model.name={folder}", source_settings(train or ["python"])]
    shared += [f"training.use_cpu={'false' if device == 'cuda' else 'true'}"]
    cases = list(_cases(recipe or [RECIPES / "learned-to-rope.yaml"], settings or [], ablate or [], tokens))
    pairs = {case: _pairs(case, shared, (window, step, seeds), work_dir) for case in cases}
    for run in (run for of_case in pairs.values() for pair in of_case for run in pair):
        typer.echo(f"{run.config.stem}, seed {run.recipe.training.seed}: {tokens_of(run.recipe):,} tokens")
        run.finish()
    with RunStore(work_dir / "measured" / texts.documents.to_dict()["digest"][:10]) as store:
        base_subject = _measured(model, texts, store)
        rows = [_row(case, of_case, base_subject, texts, store, device) for case, of_case in pairs.items()]
    text_paths = [Path(path) for path in (*(train or ()), *(valid or ()))]
    text_places = {path.parent: "$TEXT" for path in text_paths if path.parent.parts}
    places = {work_dir: "$WORK", folder: "$BASE", base: "$BASE", **text_places}
    result = {
        "study": NAME,
        "intervals": INTERVALS,
        "versions": versions(),
        "base": {"name": base.name, "parameters": model.num_parameters(), "window": window},
        "tokens": max(row["tokens"] for row in rows),
        "seeds": seeds,
        "texts": texts.to_dict() | {"source": ", ".join(path.name for path in valid or ()) or corpus.source},
        "rows": rows,
        "command": study_command(NAME, context.params | {"device": None if device == "cpu" else device}, places),
        "commands": [run.command(places) for of_case in pairs.values() for run in of_case[0]],
    }
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    draw_goals(result, out / f"{NAME}.png")
    typer.echo(markdown(result))


@dataclass(frozen=True)
class Case:
    """One row of the study.

    Attributes:
        config: of the recipe.
        settings: KEY=VALUE of the recipe.
        tokens: to train on.
        variant: the difference from other rows of the recipe; "": it is the only row, or the unchanged recipe.
    """

    config: Path
    settings: tuple[str, ...]
    tokens: int
    variant: str = ""


def _cases(
    configs: Sequence[Path], settings: Sequence[str], ablations: Sequence[str], tokens: Sequence[int]
) -> Iterator[Case]:
    """Yield every recipe at each number of tokens, and each ablation at the last number."""
    for config in configs:
        for count in tokens:
            yield Case(config, (*settings,), count, f"{count:,} tokens" if len(tokens) > 1 else "")
        for ablation in ablations:
            yield Case(config, (*settings, ablation), tokens[-1], ablation)


def _pairs(case: Case, shared: Sequence[str], sizes: tuple[int, int, int], work_dir: Path) -> list[tuple[Run, Run]]:
    """Return the trainings of a case and of its controls, by seed.

    Args:
        case: the recipe and its tokens.
        shared: settings of both.
        sizes: window, tokens of a step, seeds.
        work_dir: folder for trainings.
    """
    (window, step, seeds), config, settings, tokens = sizes, case.config, case.settings, case.tokens
    data_settings = load_recipe(config, [*shared, *settings]).data
    has_length = any(setting.startswith("data.length=") for setting in settings)
    length, steps = data_settings.length if has_length else max(data_settings.cut) * window, tokens // step
    if steps < 1 or step % length:
        raise DataError(
            f"{tokens} tokens in steps of {step}: give at least one step, and as --step a multiple of the {length} "
            f"tokens of a window of {config.name}."
        )
    own_settings = [f"data.length={length}", f"training.per_device_train_batch_size={step // length}"]
    own_settings += ["training.gradient_accumulation_steps=1", f"training.max_steps={steps}"]
    own_settings += [f"training.warmup_steps={int(WARMUP * steps)}", *settings]
    longest = MULTIPLES[-1] * window
    recipe = load_recipe(config, [*shared, *own_settings])
    if recipe.swap.max_length is not None and recipe.swap.max_length < longest:
        own_settings.append(f"swap.max_length={longest}")
    if not tokens - step_tokens(recipe) < tokens_of(recipe) <= tokens:
        raise ConfigError(
            f"{config.name} reads {tokens_of(recipe)} tokens, and the study {tokens}: the recipe has stages or other "
            "settings; set them so that both agree."
        )
    pairs = []
    for seed in range(seeds):
        seeded = [*shared, f"data.seed={seed}", f"training.seed={seed}"]
        run = make_run(config, [*seeded, *own_settings], work_dir)
        control_options = control_settings(run.recipe, [*seeded, *settings], window)
        own_rate = [setting for setting in control_options if not setting.startswith("training.learning_rate")]
        pairs.append((run, make_run(CONTROL, [*own_rate, f"training.seed={seed}"], work_dir)))
    return pairs


def _measured(model: Any, texts: Texts, store: RunStore) -> Subject:
    return Subject(document_means(model, texts, store), sliding_means(model, texts, store))


def _row(
    case: Case, pairs: list[tuple[Run, Run]], base: Subject, texts: Texts, store: RunStore, device: str
) -> dict[str, Any]:
    """Return the results of one case over its seeds, measured on `device`."""
    name = case.config.stem
    models = [hf_posswap.load(run.model).eval().to(device) for run, _ in pairs]
    after = [document_means(model, texts, store) for model in models]
    if LAST not in after[0]:
        raise ConfigError(
            f"{name} ends before {MULTIPLES[-1]} windows of {texts.window} tokens: give its swap a larger factor or "
            "max_length by --set."
        )
    controls = [_measured(hf_posswap.load(control.model).eval().to(device), texts, store) for _, control in pairs]
    mean = {key: np.mean([means[key] for means in after], axis=0) for key in after[0]}
    control = Subject(
        {key: np.mean([subject.means[key] for subject in controls], axis=0) for key in controls[0].means},
        np.mean([subject.sliding for subject in controls], axis=0),
    )
    scheme = _name(models[0].config.posswap)
    has_other_scheme = any(setting.startswith("swap.scheme=") for setting in case.settings if setting != case.variant)
    recipe = f"{name} with {scheme}" if has_other_scheme else name
    header = {"recipe": recipe, "variant": case.variant, "scheme": scheme, "tokens": tokens_of(pairs[0][0].recipe)}
    return {**header, **judge(scheme, base, control, mean, after)}


def _name(record: dict[str, Any]) -> str:
    """Return the name of a record's scheme in the goals.

    Layers with one scheme and different fields count as that scheme; replacing RoPE by RoPE is a base change, "abf".
    """
    scheme, rotary = record["scheme"], "rope_parameters" in record["original"]
    names = {layer["name"] for layer in scheme["layers"].values()} if scheme["name"] == "per_layer" else set()
    name = str(names.pop() if len(names) == 1 else scheme["name"])
    return "abf" if name == "rope" and rotary else name


app = script(main)

if __name__ == "__main__":
    app()
