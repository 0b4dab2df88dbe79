"""The quickstart, step by step, with its output; finished steps are not repeated."""

from __future__ import annotations

import dataclasses
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

import hf_posswap
from hf_posswap import Candidate, EvalSettings, __version__
from hf_posswap.comparison.documents import read_documents
from hf_posswap.comparison.pictures import require_pictures
from hf_posswap.comparison.report import PAGE
from hf_posswap.comparison.report.results import ModelEntry, Results
from hf_posswap.comparison.tables import details_of, in_short
from hf_posswap.patching.apply.version_guard import package_digest
from hf_posswap.quickstart.base import LOCK, Base, QuickstartSettings, claim_folder, open_base, open_folder, place_base
from hf_posswap.quickstart.recipes import BASE, CONTROL, Variant, choose_variants, command_of, training_recipe
from hf_posswap.quickstart.reload import check_reload
from hf_posswap.text.stdlib import PYTHON, python_corpus
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.utils.atomic_io import alone_in, write_json
from hf_posswap.utils.devices import resolve_device
from hf_posswap.utils.digests import weights_digest
from hf_posswap.utils.printable import printable
from hf_posswap.utils.progress import Reporter, quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from rich.console import Console

    from hf_posswap.comparison.documents import EvalDocuments
    from hf_posswap.utils.progress import Reporter

RELOADED = "reload.json"


@dataclass(frozen=True)
class QuickstartResult:
    """The result of a quickstart.

    Attributes:
        out: the output folder.
        results: the content of results.json, as written by `posswap compare`.
        best: name of the swapped model with the lowest perplexity at the longest length.
        reload: the results of a fresh process: the largest difference of logits, and a continuation.
        left_out: reasons for unsupported schemes, by name.
    """

    out: Path
    results: Results
    best: str
    reload: dict[str, object]
    left_out: dict[str, str]

    @property
    def model(self) -> Path:
        """The folder of the best swapped model's checkpoint."""
        return self.out / self.best / "model"


def run_quickstart(
    out: Path,
    *,
    model: str | None = None,
    schemes: Sequence[str] | None = None,
    steps: int | None = None,
    device: str = "auto",
    seed: int = 0,
    cache: Path | None = None,
    console: Console | None = None,
    trust_remote_code: bool = False,
) -> QuickstartResult:
    """Swap copies of a causal model to other position mechanisms, adapt and compare them, and reload the best.

    Each copy is trained by a recipe of the package, as `posswap train` trains; all are measured as `posswap compare`
    measures. After an interruption at any point, the same call resumes.

    Args:
        out: the output folder.
        model: path or Hub id of a causal model; None: the small GPT-2 that comes with the package.
        schemes: schemes from rope, alibi and sinusoidal (from yarn, ntk, alibi and nope for a rotary `model`); None:
            all of them, or rope and alibi if `model` is None.
        steps: training steps; None: 200.
        device: "auto", "cpu", "cuda", ...
        seed: random seed.
        cache: where tokens are cached; None: $HF_POSSWAP_CACHE, or hf_posswap in the user's cache folder.
        console: console for progress; None: standard output.
        trust_remote_code: run code that comes with `model` if loading needs it.

    Raises:
        CheckpointError: `model` cannot be read, `out` cannot be written or belongs to another run, the disk is full.
        DataError: `model` is not a causal model, has no tokenizer, or supports no swap.
        MissingDependencyError: matplotlib or what training needs is not installed.
        OptionError, UnknownNameError: invalid steps, seed, device or scheme.
        NumericError, TrainingError: a training or an evaluation gave a value that is not finite.

    Example:
        >>> run_quickstart(Path("results"), steps=0)
        Traceback (most recent call last):
            ...
        hf_posswap.errors.OptionError: steps is a whole number of at least 1, got 0.
    """
    wanted = None if schemes is None else tuple(schemes)
    settings = QuickstartSettings(model, wanted, seed=seed, device=device, trust_remote_code=trust_remote_code)
    if steps is not None:
        settings = dataclasses.replace(settings, steps=steps)
    return run(Path(out), settings, cache=cache, console=console)


def run(
    out: Path, settings: QuickstartSettings, *, cache: Path | None = None, console: Console | None = None
) -> QuickstartResult:
    """Like `run_quickstart`, with all settings."""
    from rich.console import Console

    reporter = Reporter(console or Console())
    started = time.monotonic()
    device = resolve_device(settings.device)
    require_pictures()
    with quiet_transformers():
        base = open_base(settings, reporter)
        identity: dict[str, object] = {
            "settings": settings.to_dict(),
            "hf_posswap": f"{__version__}, code {package_digest()[:16]}",  # a checkout changes under one version
            "weights of the model": weights_digest(base.model),
            "corpus": python_corpus().digest,
        }
        open_folder(out, identity)
        try:
            with alone_in(out, "quickstart", LOCK):
                result = _run(out, settings, base, identity, cache, device, reporter)
        except KeyboardInterrupt:
            reporter.line(f"stopped; what is finished is in {out}: the same command resumes from here")
            raise
    show(result.results, result.best, result.reload, out, reporter, time.monotonic() - started)
    return result


def _run(
    out: Path,
    settings: QuickstartSettings,
    base: Base,
    identity: dict[str, object],
    cache: Path | None,
    device: torch.device,
    reporter: Reporter,
) -> QuickstartResult:
    variants, left_out = choose_variants(base, settings)
    for name, reason in left_out.items():
        reporter.line(f"{name}: left out: {reason}")
    lengths = settings.lengths(base.window)
    documents = read_documents(None, base.tokenizer, length=max(lengths), limit=settings.documents)
    check_token_ids(base.model, documents.tokens)
    claim_folder(out, identity)
    source = place_base(base, settings, out)
    candidates = [Candidate(source, name=BASE)]
    for variant in variants:
        model = _train(variant, base, settings, source, out, cache, device, reporter)
        candidates.append(Candidate(model, name=variant.name))
    reporter.line(f"comparing {', '.join(str(candidate.name) for candidate in candidates)}")
    results = hf_posswap.compare(
        candidates,
        tokenizer=base.tokenizer,
        text=PYTHON,
        out=out,
        settings=EvalSettings(
            lengths=lengths, metrics=settings.metrics, documents=settings.documents, seed=settings.seed
        ),
        device=device,
        alone=True,
        reporter=reporter,
        trust_remote_code=settings.trust_remote_code,
        baseline=CONTROL,
        command=command(settings),
    ).results
    best = choose_best(results)
    reporter.line(f"{best}: best of the swapped models at the longest length; loading it in a fresh process")
    reload = _reload(out / best / "model", base, documents, settings, device)
    write_json(out / RELOADED, {"best": best, "left_out": left_out, **reload})
    return QuickstartResult(out, results, best, reload, left_out)


def _train(
    variant: Variant,
    base: Base,
    settings: QuickstartSettings,
    source: str,
    out: Path,
    cache: Path | None,
    device: torch.device,
    reporter: Reporter,
) -> Path:
    """Train `variant`, unless it is already trained, and return the folder of its model."""
    folder = out / variant.name
    reporter.line(f"{variant.name}: {command_of(variant, base, settings, source, folder)}")
    on_cpu = device.type == "cpu"
    recipe = training_recipe(variant, base, settings, source, folder, on_cpu=on_cpu, cache=cache)
    finished = hf_posswap.run_recipe(recipe, reporter=TrainingReporter(reporter, variant.name))
    held_out = ", ".join(f"{loss:.3f} at {length} tokens" for length, loss in finished.report["nll"].items() if loss)
    reporter.line(f"{variant.name}: trained, held-out loss {held_out}; its report: {folder / 'report.md'}")
    return finished.model


def choose_best(results: Results) -> str:
    """Return the name of the swapped model with the lowest perplexity at the longest length that any of them runs."""
    swapped = {name: model["ppl_prefix"] for name, model in results["models"].items() if model["plan"] is not None}
    last = {name: (row["length"], -row["perplexity"]) for name, rows in swapped.items() for row in rows[-1:]}
    return max(last, key=last.__getitem__)


def command(settings: QuickstartSettings) -> str:
    """Return the command that reproduces the results."""
    arguments = ["posswap", "quickstart"]
    if settings.model is not None:
        arguments += ["--model", settings.model]
    if settings.schemes is not None:
        arguments += ["--schemes", ",".join(settings.schemes)]
    arguments += ["--steps", str(settings.steps), "--seed", str(settings.seed), "--device", settings.device]
    return shlex.join(arguments)


def _reload(
    folder: Path, base: Base, documents: EvalDocuments, settings: QuickstartSettings, device: torch.device
) -> dict[str, object]:
    """Return the results of a fresh process for the model in `folder`, after comparing its logits with this process."""
    new = min(settings.continuation, base.window)
    prompt = documents.tokens[0][: base.window - new // 2]
    return check_reload(
        folder,
        prompt,
        new_tokens=new,
        seed=settings.seed,
        device=device,
        trust_remote_code=settings.trust_remote_code,
    )


def show(results: Results, best: str, reload: dict[str, object], out: Path, reporter: Reporter, seconds: float) -> None:
    """Show the verdicts, the perplexities, the details, the continuation, and the next commands."""
    window, lengths = results["window"], results["lengths"]
    title = f"Perplexity by length (window {window} tokens)"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for length in lengths:
        table.add_column(f"{length / window:g}x ({length})", justify="right")
    for name, model in results["models"].items():
        table.add_row(printable(name), *_perplexities(model, lengths))
    if sliding := results["sliding"]:
        table.add_row(printable(sliding["name"]), *_perplexities(sliding, lengths), style="dim")
    for line in in_short(results):
        reporter.line(line)
    for note in results["notes"]:
        reporter.line(f"note: {note}")
    reporter.console.print(table)
    for line in details_of(results):
        reporter.line(line)
    reporter.line(f"\n{best} continues a held-out text, past the window:")
    reporter.line(f"{reload['prompt_end']} >>> {reload['text']}\n")
    reporter.line(f"reloaded in a fresh process: logits differ by {reload['max_logit_difference']:.2g} at most")
    folder = out / best / "model"
    reporter.line(f"report: {out / PAGE} ({seconds:.0f} s)\n")
    reporter.line("Next:")
    reporter.line(f"  posswap explain {folder}")
    reporter.line(f"  posswap push {folder} me/my-model --dry-run")
    reporter.line(f"  python -c \"import hf_posswap; model = hf_posswap.load('{folder}')\"")
    reporter.line("  posswap quickstart --model my-gpt2 --out mine   # a model of yours")


def _perplexities(model: ModelEntry, lengths: list[int]) -> list[str]:
    perplexities = {row["length"]: f"{row['perplexity']:.3f}" for row in model["ppl_prefix"]}
    ends = model.get("cannot_run", {})
    return [perplexities.get(length, "table ends" if str(length) in ends else "–") for length in lengths]


class TrainingReporter(Reporter):
    """Prefixes each line with the model's name, and omits the report at the end of a training, which is in a file.

    Args:
        reporter: the quickstart's reporter.
        name: the model's name.
    """

    def __init__(self, reporter: Reporter, name: str) -> None:
        super().__init__(reporter.console)
        self.name, self._reports = name, False

    def line(self, text: str) -> None:
        self._reports = self._reports or text.startswith("# ")
        if not self._reports:
            super().line(f"{self.name}: {text}")
