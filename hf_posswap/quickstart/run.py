"""The quickstart, step by step; each step that was finished is not done again."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_posswap import __version__
from hf_posswap.quickstart.base import Base, given_base, trained_base
from hf_posswap.quickstart.folder import claim_folder, open_folder
from hf_posswap.quickstart.measure import make_yardstick, measured
from hf_posswap.quickstart.pictures import draw_pictures
from hf_posswap.quickstart.reload import check_reload, probe_logits
from hf_posswap.quickstart.report import write_report
from hf_posswap.quickstart.results import (
    SCHEMA,
    cautions,
    choose_best,
    command,
    curves_csv,
    describe_adaptation,
    describe_data,
    describe_model,
    describe_passkey,
    environment,
)
from hf_posswap.quickstart.settings import QuickstartSettings, resolve_device
from hf_posswap.quickstart.show import show
from hf_posswap.quickstart.variants import adapted_model, choose_variants, max_length
from hf_posswap.training import Corpus, Windows, check_token_ids, python_corpus, token_stream
from hf_posswap.utils.atomic_io import cache_folder, write_json, write_text
from hf_posswap.utils.progress import Reporter, quiet_transformers

_LEAST_WINDOWS = 100
_SPARE = 20  # times the text that the steps read, so that windows hardly overlap


@dataclass(frozen=True)
class QuickstartResult:
    """What a quickstart left behind.

    Attributes:
        out: its folder.
        results: the content of results.json.
        files: names of the files for people and programs in `out`.
    """

    out: Path
    results: dict[str, Any]
    files: tuple[str, ...]

    @property
    def best(self) -> Path:
        """The folder of the best swapped model's checkpoint."""
        return self.out / self.results["best"]["folder"]


def run_quickstart(
    out: Path,
    *,
    model: str | None = None,
    steps: int | None = None,
    device: str = "auto",
    seed: int = 0,
    cache: Path | None = None,
    console: Console | None = None,
    trust_remote_code: bool = False,
) -> QuickstartResult:
    """Swap copies of a causal model to other position mechanisms, adapt each alike, measure all, save and reload.

    Interrupted at any point, the same call goes on where it stopped.

    Args:
        out: folder for everything it makes.
        model: path or Hub id of a causal model; None trains a small GPT-2 first, once, and keeps it.
        steps: of adaptation; None: 200.
        device: "auto", "cpu", "cuda", ...
        seed: of everything random.
        cache: where trained bases are kept; None: $HF_POSSWAP_CACHE, or hf_posswap in the user's cache folder.
        console: where progress goes; None: standard output.
        trust_remote_code: run code that `model` brings, where it needs that to be loaded.

    Raises:
        CheckpointError: `model` cannot be read, `out` cannot be written or belongs to another run, the disk is full.
        DataError: `model` is no causal model, has no tokenizer, or no swap is possible.
        MissingDependencyError: matplotlib is not installed.
        OptionError: an impossible steps, seed or device.
        NumericError: training or measuring gave something that is no number.

    Example:
        >>> run_quickstart(Path("results"), steps=0)
        Traceback (most recent call last):
            ...
        hf_posswap.errors.OptionError: steps is a whole number of at least 1, got 0.
    """
    settings = QuickstartSettings(model=model, device=device, seed=seed, trust_remote_code=trust_remote_code)
    if steps is not None:
        settings = dataclasses.replace(settings, steps=steps)
    return run(Path(out), settings, cache=cache, console=console)


def run(
    out: Path, settings: QuickstartSettings, *, cache: Path | None = None, console: Console | None = None
) -> QuickstartResult:
    """Do what `run_quickstart` does, with every setting open."""
    reporter = Reporter(console or Console())
    started = time.monotonic()
    device = resolve_device(settings.device)
    _require_matplotlib()
    with quiet_transformers():
        corpus = python_corpus()
        open_folder(out, _identity(settings, corpus))
        try:
            results = _run(out, settings, cache_folder(cache), corpus, device, reporter)
        except KeyboardInterrupt:
            reporter.line(f"stopped; what is finished is in {out}: the same command goes on from here")
            raise
    files = _write(results, out)
    show(results, out, reporter, time.monotonic() - started)
    return QuickstartResult(out, results, tuple(files))


def _run(
    out: Path, settings: QuickstartSettings, cache: Path, corpus: Corpus, device: torch.device, reporter: Reporter
) -> dict[str, Any]:
    """Do everything up to the numbers, and return them as results.json has them."""
    if settings.model is None:
        base = trained_base(corpus, settings, cache, device, reporter)
    else:
        base = given_base(settings.model, settings, device, reporter)
    variants, left_out = choose_variants(base.model, max_length(base, settings))
    for name, reason in left_out.items():
        reporter.line(f"{name}: left out: {reason}")
    yardstick, skipped = make_yardstick(base, corpus, settings)
    windows = _windows(base, corpus, settings)
    claim_folder(out, _identity(settings, corpus))
    new = min(settings.continuation, base.window)
    prompt = yardstick.documents[0][: base.window - new // 2]
    models: dict[str, Any] = {}
    probes = {}
    for variant in variants:
        model, note = adapted_model(variant, base, windows, settings, out, reporter)
        models[variant.name] = {"adaptation": note} | measured(variant.name, model, yardstick, settings, out, reporter)
        probes[variant.name] = probe_logits(model, prompt)
    best = choose_best(models)
    reporter.line(f"{best['name']}: best at {best['length']} tokens; loading it in a fresh process")
    reload = check_reload(
        probes[best["name"]],
        out / best["folder"],
        prompt,
        new_tokens=new,
        seed=settings.seed,
        device=device,
        trust_remote_code=settings.trust_remote_code,
    )
    return {
        "schema": SCHEMA,
        "protocols": ["ppl_prefix", "nll_pos", "hf_stride", "passkey"],
        "command": command(settings),
        "settings": settings.to_dict(),
        "environment": environment(device),
        "model": describe_model(base.model, base.source, base.window),
        "data": describe_data(corpus, yardstick, len(windows.tokens)),
        "notes": [*base.notes, *cautions(yardstick, base.tokenizer)],
        "adaptation": describe_adaptation(base.model, windows, settings),
        "lengths": list(yardstick.lengths),
        "passkey": describe_passkey(yardstick, settings, skipped),
        "models": models,
        "left_out": left_out,
        "best": best,
        "reload": reload,
    }


def _identity(settings: QuickstartSettings, corpus: Corpus) -> dict[str, Any]:
    """Return what a folder is made for: results of anything else must not be mixed into it."""
    return {"settings": settings.to_dict(), "hf_posswap": __version__, "corpus": corpus.digest}


def _windows(base: Base, corpus: Corpus, settings: QuickstartSettings) -> Windows:
    """Return the batches of adaptation, the same for every variant."""
    batch = max(1, settings.step_tokens // base.window)
    wanted = max(settings.steps * batch * _SPARE, _LEAST_WINDOWS) * base.window
    stream = token_stream(corpus.train, base.tokenizer, min(settings.stream_tokens, wanted))
    check_token_ids(base.model, stream)
    return Windows(stream, base.window, batch, settings.seed + 1)


def _write(results: dict[str, Any], out: Path) -> list[str]:
    pictures = draw_pictures(results, out)
    vectors = [Path(name).with_suffix(".svg").name for name in pictures]
    write_text(out / "curves.csv", curves_csv(results))
    write_text(out / "report.md", write_report(results))
    write_json(out / "results.json", results)
    return ["results.json", "curves.csv", "report.md", *pictures, *vectors]


def _require_matplotlib() -> None:
    """Find out now, and not after minutes of work, that no picture can be drawn."""
    from hf_posswap.plotting.canvas import figure

    figure(1, 1)
