"""Context extension of RoPE in the papers' protocol: before any training, and after the same few steps.

    python recipes/pretrain.py llama my-llama
    python -m recipes.studies.extension --base my-llama --tokens 150000 --seeds 3 --out results

The protocol is that of YaRN's ablation (https://arxiv.org/abs/2309.00071, table of LLaMA-7B, 2k to 32k) and of LCEG
(https://arxiv.org/abs/2409.12181): one base, one text, each method for 8 windows, trained on windows of that length by
one recipe at one learning rate. Self-Extend and dynamic NTK are not trained, as intended. Every document is then read
at 1, 2, 4 and 8 windows, and each order that the papers report is tested: it holds if the 95 % interval of the
difference is below 0, it is reversed if the interval is above 0, and otherwise it is open.

The base is a folder with a causal RoPE model, or a run of recipes/pretrain.py. The same command resumes an interrupted
run, and trains only what changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import read_documents
from hf_posswap.errors import DataError
from hf_posswap.evaluation import RunStore, reach_of
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import write_json, write_text
from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import (
    INTERVALS,
    MULTIPLES,
    Means,
    Texts,
    difference,
    document_means,
    intervals_said,
    mean_with_interval,
)
from recipes.studies.pictures import draw_extension
from recipes.studies.running import (
    RECIPES,
    Run,
    base_folder,
    make_run,
    source_settings,
    study_command,
    tokens_of,
    versions,
    work_folder,
)

NAME = "extension"
FACTOR = MULTIPLES[-1]
TRAINED = ("linear", "ntk", "ntk_by_parts", "yarn")
FROZEN = ("self_extend", "dynamic")
BEFORE, AFTER = "before training", "trained"
_WARMUP = 0.05
_VERDICTS = {1: "holds", 0: "open", -1: "reversed", None: f"no verdict under {LEAST_DOCUMENTS} documents"}


@dataclass(frozen=True)
class Order:
    """One method below another in a paper's table.

    Attributes:
        lower: the method with the lower loss, and its state.
        higher: the other.
        windows: read at once.
        source: the table.
    """

    lower: tuple[str, str]
    higher: tuple[str, str]
    windows: int
    source: str


_YARN = "YaRN, ablation on LLaMA-7B"
_LCEG = "LCEG, PG19"
ORDERS = (
    *(Order(("yarn", BEFORE), ("ntk", BEFORE), windows, _YARN) for windows in (1, FACTOR)),
    *(Order(("ntk_by_parts", AFTER), (other, AFTER), 1, _YARN) for other in ("yarn", "ntk", "linear")),
    *(Order(("yarn", AFTER), (other, AFTER), FACTOR, _YARN) for other in ("ntk_by_parts", "linear", "ntk")),
    *(Order(("ntk", AFTER), (other, AFTER), FACTOR, _LCEG) for other in ("yarn", "linear")),
    Order(("yarn", AFTER), ("linear", AFTER), FACTOR, _LCEG),
    *(Order((other, AFTER), ("self_extend", BEFORE), FACTOR, _LCEG) for other in ("ntk", "yarn", "linear")),
)
"""The papers' orders between two of these rows. They disagree on NTK after training at full length."""


def main(
    context: typer.Context,
    base: Annotated[Path, typer.Option(help="A folder with a causal model of RoPE, or of recipes/pretrain.py.")],
    tokens: Annotated[int, typer.Option(help="To train on.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON, table and picture.")],
    train: Annotated[
        list[str] | None, typer.Option(help="As data.sources[].path; Python's own text otherwise.")
    ] = None,
    valid: Annotated[list[Path] | None, typer.Option(help="Likewise, to measure on.")] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each, from seed 0 on.")] = 1,
    documents: Annotated[int, typer.Option(help="Most documents to measure on.")] = 48,
    learning_rate: Annotated[float, typer.Option(help="Of all trainings.")] = 5e-4,
    work: Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")] = None,
) -> None:
    """Extend a base by each method, train it, measure it by length, and test the papers' orders."""
    work_dir = work_folder(work)
    folder = base_folder(base)
    model = hf_posswap.load(folder).eval()
    tokenizer = load_tokenizer(folder, instead="save it with the model")
    window = reach_of(model).window
    corpus = read_documents(valid, tokenizer, length=FACTOR * window, limit=documents)
    texts = Texts(corpus, window, tokenizer)
    shared = [f"model.name={folder}", source_settings(train or ["python"]), f"training.learning_rate={learning_rate}"]
    runs = {name: list(_runs(name, shared, (window, tokens, seeds), work_dir)) for name in TRAINED}
    rows = {("base", "as it is"): [model], **{(name, BEFORE): [_swapped(folder, name)] for name in (*TRAINED, *FROZEN)}}
    for name, of_method in runs.items():
        for run in of_method:
            typer.echo(f"{name}, seed {run.recipe.training.seed}: {tokens_of(run.recipe):,} tokens")
            run.finish()
        rows[name, AFTER] = [hf_posswap.load(run.model).eval() for run in of_method]
    with RunStore(work_dir / "measured" / texts.documents.to_dict()["digest"][:10]) as store:
        means: dict[tuple[str, str], Means] = {}
        for row, models in rows.items():
            by_seed = [document_means(seed_model, texts, store) for seed_model in models]
            means[row] = {key: np.mean([each[key] for each in by_seed], axis=0) for key in by_seed[0]}
    text_paths = [Path(path) for path in (*(train or ()), *(valid or ()))]
    places = {
        work_dir: "$WORK",
        folder: "$BASE",
        base: "$BASE",
        **{p.parent: "$TEXT" for p in text_paths if p.parent.parts},
    }
    result = {
        "study": NAME,
        "intervals": INTERVALS,
        "versions": versions(),
        "base": {"name": base.name, "parameters": model.num_parameters(), "window": window},
        "tokens": max(tokens_of(run.recipe) for of_method in runs.values() for run in of_method),
        "seeds": seeds,
        "texts": texts.to_dict() | {"source": ", ".join(path.name for path in valid or ()) or corpus.source},
        "rows": [
            {"method": name, "state": state, "lengths": _lengths(method_means)}
            for (name, state), method_means in means.items()
        ],
        "orders": [judge(order, means) for order in ORDERS],
        "command": study_command(NAME, context.params, places),
        "commands": [of_method[0].command(places) for of_method in runs.values()],
    }
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    draw_extension(result, out / f"{NAME}.png")
    typer.echo(markdown(result))


def _runs(name: str, shared: Sequence[str], sizes: tuple[int, int, int], work_dir: Path) -> Iterator[Run]:
    """Yield the trainings of a method, by seed.

    Args:
        name: of its scheme.
        shared: settings of all.
        sizes: window, tokens, seeds.
        work_dir: folder for trainings.
    """
    window, tokens, seeds = sizes
    steps = tokens // (FACTOR * window)
    if steps < 1:
        raise DataError(f"{tokens} tokens are less than one window of {FACTOR * window}: give as many, or more.")
    own_settings = [f"swap.scheme={{name: {name}, factor: {FACTOR}}}", f"data.length={FACTOR * window}"]
    own_settings += ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=1"]
    own_settings += [f"training.max_steps={steps}", f"training.warmup_steps={int(_WARMUP * steps)}"]
    own_settings += ["training.lr_scheduler_type=cosine", "training.gradient_checkpointing=false", "gates.start=false"]
    for seed in range(seeds):
        yield make_run(
            RECIPES / "yarn.yaml", [*shared, *own_settings, f"data.seed={seed}", f"training.seed={seed}"], work_dir
        )


def _swapped(folder: Path, name: str) -> Any:
    """Return the base with an untrained method for 8 windows."""
    model = hf_posswap.load(folder).eval()
    scheme = {"name": name} if name == "self_extend" else {"name": name, "factor": FACTOR}
    hf_posswap.patch_model(model, scheme, max_length=FACTOR * reach_of(model).window)
    return model


def _lengths(means: Means) -> list[dict[str, Any]]:
    return [{"windows": m, **mean_with_interval(means[str(m)])} for m in MULTIPLES if str(m) in means]


def judge(order: Order, means: dict[tuple[str, str], Means]) -> dict[str, Any]:
    """Return the verdict on an order (1: holds, -1: reversed, 0: open) and the difference behind it.

    Args:
        order: of two rows.
        means: of documents, by method and state.

    Example:
        >>> order = Order(("yarn", "trained"), ("ntk", "trained"), 8, "a paper")
        >>> low, high = {"8": np.arange(8.0)}, {"8": np.arange(8.0) + 0.5}
        >>> result = judge(order, {("yarn", "trained"): low, ("ntk", "trained"): high})
        >>> result["verdict"], result["difference"]
        (1, -0.5)
    """
    higher, lower = (means[key][str(order.windows)] for key in (order.higher, order.lower))
    change = difference(higher, lower)
    verdict = None
    if len(lower) >= LEAST_DOCUMENTS and change["low"] is not None:
        verdict = int(change["high"] < 0) - int(change["low"] > 0)
    fields = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(order).items()}
    return fields | {
        "verdict": verdict,
        **{key: change[key] for key in ("difference", "low", "high", "documents", "by_document")},
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a page."""
    base, texts = result["base"], result["texts"]
    lines = [
        f"# extension: {result['tokens']:,} tokens on {base['name']}, {base['parameters'] / 1e6:.1f} M parameters, "
        f"window {base['window']}",
        "",
        f"Nats/token on {texts['documents']} documents ({texts['source']}), read from their start, with 1 to "
        f"{FACTOR} windows at once; mean of {result['seeds']} seed(s). Every method is for {FACTOR} windows. Later "
        "text may be easier than the start: compare within a column.",
        "",
        "| method | state | " + " | ".join(f"{m}x" for m in MULTIPLES) + " |",
        "|---" * (2 + len(MULTIPLES)) + "|",
    ]
    for row in result["rows"]:
        cells = [f"{cell['nll']:.3f}" for cell in row["lengths"]] + ["–"] * (len(MULTIPLES) - len(row["lengths"]))
        lines.append(f"| {row['method']} | {row['state']} | {' | '.join(cells)} |")
    lines += [
        "",
        "Orders that papers report: the first less the second, with its interval.",
        intervals_said(result),
        "",
    ]
    lines += ["| order | windows | source | difference | verdict |", "|---|---|---|---|---|"]
    for order in result["orders"]:
        first, second = (", ".join(order[key]) for key in ("lower", "higher"))
        change_text = f"{order['difference']:+.3f} [{interval_text(order, '+.3f', ', ')}]"
        verdict = _VERDICTS[order["verdict"]]
        lines.append(f"| {first} below {second} | {order['windows']} | {order['source']} | {change_text} | {verdict} |")
    return "\n".join([*lines, "", *(f"    {line}" for line in [result["command"], *result["commands"]]), ""])


app = script(main)

if __name__ == "__main__":
    app()
