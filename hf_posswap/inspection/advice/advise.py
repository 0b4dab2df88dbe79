"""`advise`: what to use for a model, a length, a budget and a serving program.

Its program may also run or train the unswapped model with the recommended scheme by its own settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.overriding import overrides
from hf_posswap.errors import PosswapError
from hf_posswap.inspection.advice.candidates import CANDIDATES
from hf_posswap.inspection.advice.case import Case, read_case, serving_of
from hf_posswap.inspection.advice.commands import OTHER, compare_command, line
from hf_posswap.inspection.advice.figures import MOST_TIMES, Literature, figures_of, further_literature
from hf_posswap.inspection.advice.weighing import Option, best_of_others, extrapolated_times, weigh
from hf_posswap.utils import html_tables
from hf_posswap.utils.format import with_older_name
from hf_posswap.utils.gguf_source import gguf_file_of
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_MEASURED_ALONE = (
    "figures are losses of next tokens: whether a fact far back is found was not measured; posswap compare measures "
    "passkeys on your model"
)
_STANDS = {
    "better": "better than a sliding window",
    "level": "level with a sliding window",
    "worse": "worse than a sliding window",
    "mixed": "better than a sliding window on one model and worse, or level, on another",
    "not measured": "not measured against a sliding window",
    "literature": "published for models of this size",
}
_ENOUGH = "it reads this length as it is"
_SERVERS = ("vllm", "sglang", "transformers")
_TRAINERS = ("trl", "verl", "axolotl", "llamafactory")


@dataclass(frozen=True, repr=False)
class Advice(ResultView):
    """The result of `advise`: the recommendation, its reasons, alternatives, and open questions.

    Attributes:
        model: class and mechanism, as text.
        length: target length in tokens.
        windows: target length over the original window.
        budget: training budget in tokens.
        serve: the serving program, or None.
        parameters: number of parameters of the model.
        use: the recommended option.
        others: the other options, best first.
        unknown: what was not measured for any option.
        caution: that the measurements are on much smaller models, or "".
        baseline: what the recommended swap must beat, or "".
        further: published results about methods that are not options here.
        by_config: servers or trainers that need no swapped checkpoint for the recommended swap, or "".
    """

    model: str
    length: int
    windows: float
    budget: int
    serve: str | None
    parameters: int
    use: Option
    others: tuple[Option, ...]
    unknown: tuple[str, ...]
    caution: str = ""
    baseline: str = ""
    further: tuple[Literature, ...] = ()
    by_config: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.length:,} tokens, {self.windows:.3g} of its windows",
            *([f"caution: {self.caution}"] if self.caution else []),
            "",
            f"use: {self.use.title}",
            *([f"  baseline to beat: {self.baseline}"] if self.baseline else []),
            *(f"  because {reason} [{reason.source}]" for reason in self.use.grounds),
            *(f"  served by {self.use.serving}" for _ in [0] if self.use.serving),
            *([f"  without a copy: {self.by_config}"] if self.by_config else []),
            *(f"  not known: {note}" for note in (*self.use.unknown, *self.unknown)),
            *(f"  $ {command}" for command in self.use.commands),
        ]
        for option in self.others:
            lines += ["", f"{'or' if option.advised else 'not'} {option.title}: {'; '.join(why_not(option))}"]
        lines += [line for row in self.further for line in ("", f"see also {row} [{row.source}]")]
        return in_lines(lines)

    def _repr_facts(self) -> dict[str, object]:
        names = ("model", "length", "budget", "serve")
        titles = {"use": self.use.title, "others": len(self.others)}
        return {name: getattr(self, name) for name in names} | titles

    def _repr_html_(self) -> str:
        rows = [
            *(("caution", self.caution) for _ in [0] if self.caution),
            ("use", self.use.title),
            *(("baseline to beat", self.baseline) for _ in [0] if self.baseline),
            *(("because", f"{reason} [{reason.source}]") for reason in self.use.grounds),
            *(("served by", str(self.use.serving)) for _ in [0] if self.use.serving),
            *(("without a copy", self.by_config) for _ in [0] if self.by_config),
            *(("not known", note) for note in (*self.use.unknown, *self.unknown)),
            *(("command", command) for command in self.use.commands),
        ]
        others = [(option.title, "; ".join(why_not(option))) for option in self.others]
        further = [(str(row), row.source) for row in self.further]
        blocks = [
            html_tables.title(f"{self.model}: {self.length:,} tokens, {self.windows:.3g} of its windows"),
            html_tables.table(rows),
            *([html_tables.table(others, ("other option", "why not, or why too"))] if others else []),
            *([html_tables.table(further, ("see also", "source"))] if further else []),
        ]
        return html_tables.together(blocks)

    def to_dict(self) -> dict[str, object]:
        """Return the advice as JSON data."""
        nested = ("use", "others", "unknown", "further")
        plain = {name: value for name, value in self.__dict__.items() if name not in nested}
        others, further = [option.to_dict() for option in self.others], [row.to_dict() for row in self.further]
        return plain | {"use": self.use.to_dict(), "others": others, "unknown": list(self.unknown), "further": further}


def advise(
    model: PreTrainedModel | PreTrainedConfig | type | str | Path,
    max_length: int | None = None,
    *,
    budget: float | None = None,
    target: str | None = None,
    length: int | None = None,
    serve: str | None = None,
) -> Advice:
    """Recommend what to use so that `model` reads `max_length` tokens, based on measurements and published results.

    A swap is recommended if it was measured to predict better than the unswapped model with a sliding window, with as
    much training relative to its size as `budget` allows, and if the serving program supports it. Otherwise the sliding
    window is recommended. For a model more than 10 times larger than the measured ones, published results on models of
    its size decide, if there are any; they are marked as literature. Each figure names its file, each published result
    its paper. Only the config is read, no weights, and only code of transformers is run.

    Args:
        model: a model, its config, a class of transformers (or its name), a folder with a config.json, or a Hub id.
        max_length: tokens that the model should read.
        budget: training budget in tokens; None: no training.
        target: a program that `posswap export` supports, such as "vllm" or "llamacpp", or None.
        length: an older name of `max_length`.
        serve: an older name of `target`.

    Raises:
        OptionError, UnknownNameError: an invalid length, budget or program.
        CheckpointError: `model` names no readable config.
        RemoteCodeError: `model` names a config that needs code.
        UnsupportedModelError: no family describes the model, or it reads images.
        AlreadyPatchedError: it carries a swap.

    Example:
        >>> from transformers import GPT2Config
        >>> small = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=1000, n_positions=128)
        >>> advise(small, 1024).use.title
        'no swap: a sliding window of 128 tokens'
        >>> advise(small, 1024, budget=1e6).use.recipe
        'learned-to-rope'
    """
    max_length = with_older_name(max_length=max_length, length=length)
    case = read_case(model, max_length, budget, with_older_name(target=target, serve=serve))
    options = [] if case.length <= case.window or case.kind == "unlimited" else weigh(case)
    use = next((option for option in options if option.advised), None) or _no_swap(case, options)
    settings_alone, overrides_commands = by_config(case, use)
    window = f"a sliding window of {case.window:,} tokens over the unswapped model"
    return Advice(
        model=f"{case.report.model} ({case.report.native})",
        length=case.length,
        windows=case.windows,
        budget=case.budget,
        serve=case.serve,
        parameters=case.parameters,
        use=replace(use, commands=(*use.commands, *overrides_commands)),
        others=tuple(option for option in options if option is not use),
        unknown=(_MEASURED_ALONE,) if options else (),
        caution=_caution(case, options),
        baseline=f"{window}, which posswap compare measures too" if use.scheme is not None else "",
        further=further_literature(case.parameters) if case.kind == "rope" and options else (),
        by_config=settings_alone,
    )


def _caution(case: Case, options: list[Option]) -> str:
    times = extrapolated_times(case) if options else 0.0
    scaled, most = case.report.geometry.scaled_length, case.report.limit
    if scaled and options:
        return (
            f"its config scales its rotation from {most:,} to {scaled:,} tokens. A swap replaces that; windows are "
            f"of {most:,} tokens: compare with the unswapped model, whose weights may have been trained with it"
        )
    if times <= MOST_TIMES:
        return ""
    measured = f"{case.parameters / times / 1e6:,.1f} M parameters; this one has {times:,.0f} times as many"
    if any(option.standing == "literature" for option in options):
        return f"own measurements are on models of up to {measured}, so published results come first"
    return f"extrapolated: all measurements are on models of up to {measured}. Compare on your model before you decide"


def why_not(option: Option) -> tuple[str, ...]:
    """Return where an alternative stands: its standing, the reasons against it, and its first ground."""
    standing = _STANDS.get(option.standing)
    first = next((f"{reason} [{reason.source}]" for reason in option.grounds), None)
    return tuple(reason for reason in (standing, *option.against, first) if reason)


def _no_swap(case: Case, options: list[Option]) -> Option:
    serving = serving_of(case, None)
    shared: dict[str, Any] = {"scheme": None, "recipe": None, "serving": serving}
    commands = () if case.serve is None else (line("export", case.name, "--target", case.serve),)
    if case.length <= case.window:
        commands = (line("explain", case.name), *commands)
        names = [candidate.recipe for candidate in CANDIDATES[case.kind] if candidate.recipe]
        trained = [figure for name in names for figure in figures_of(name, "control in the window", trained=True)]
        # the trained swap with the smallest measured loss in the window, or the largest gain
        figures = tuple(sorted(trained, key=lambda figure: figure.difference)[:1])
        losses = [figure for figure in figures if figure.difference > 0]
        open_questions = [
            f"whether training with a swap would improve it, as measured: {figure} [{figure.source}]"
            for figure in figures
        ]
        return Option(
            f"no swap: {_ENOUGH}",
            standing="better",
            commands=commands,
            reasons=tuple(losses),
            unknown=() if losses else tuple(open_questions),
            **shared,
        )
    if case.kind == "unlimited":
        arguments: tuple[str, ...] = ("explain", case.name)
        if not case.model.config.is_encoder_decoder:
            arguments = (
                "eval",
                case.name,
                "--lengths",
                f"{case.window},{case.length}",
                "--text",
                OTHER,
                "-o",
                "results",
            )
        return Option(
            f"no swap: its {case.report.native.partition('(')[0]} runs at any length",
            standing="not measured",
            unknown=(f"its loss beyond {case.window:,} tokens was not measured here",),
            commands=(line(*arguments), *commands),
            **shared,
        )
    reasons = best_of_others(options)
    unknown = () if reasons else (f"models of its kind ({case.report.native}) were not measured beyond a window",)
    if case.kind in ("learned", "rope"):
        yarn = f"+yarn:factor={case.factor}"
        untrained = ("+alibi", "+rope:partial=0.5") if case.kind == "learned" else (yarn, "+self_extend")
        commands = (compare_command(case, untrained), *commands)
    else:
        commands = (line("explain", case.name), *commands)
    reading = (
        "a sliding window of {:,} tokens" if case.kind in ("learned", "rope") else "window by window of {:,} tokens"
    )
    title = f"no swap: {reading.format(case.window)}"
    return Option(title, standing="level", reasons=reasons, unknown=unknown, commands=commands, **shared)


def by_config(case: Case, option: Option) -> tuple[str, tuple[str, ...]]:
    """Return which programs need no swapped checkpoint for `option`, and the command for the first; "" and () if none.

    Servers run a scheme that needs no training; trainers train one that needs it.
    """
    if option.scheme is None or option.route != "native":
        return "", ()
    if Path(case.name).exists() and gguf_file_of(case.name) is not None:
        return "", ()
    programs: tuple[str, ...] = _TRAINERS if option.recipe else _SERVERS
    if not option.recipe and case.serve is not None:
        programs = tuple(program for program in programs if program == case.serve)
    exact = [program for program in programs if _is_exact(case, option.scheme, program)]
    if not exact:
        return "", ()
    names = exact[0] if len(exact) == 1 else f"{', '.join(exact[:-1])} and {exact[-1]}"
    verb = "train" if option.recipe else "run"
    length = () if "factor=" in option.scheme else ("--max-length", str(case.length))
    sentence = (
        f"{names} {verb}{'s' if len(exact) == 1 else ''} the unswapped model with this scheme by settings alone, which "
        "posswap overrides prints"
    )
    return sentence, (line("overrides", case.name, option.scheme, *length, "--target", exact[0]),)


def _is_exact(case: Case, scheme: str, program: str) -> bool:
    length = None if "factor=" in scheme else case.length
    try:
        return overrides(case.fresh(), scheme, program, max_length=length).verdict == "exact"
    except PosswapError:  # it has no setting for this scheme; posswap overrides says what to do instead
        return False
