"""`advise`: what to use for a model, a length, a budget and a serving program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.advice.candidates import CANDIDATES
from hf_posswap.advice.case import Case, read_case
from hf_posswap.advice.commands import OTHER, compare_command, line
from hf_posswap.advice.figures import Figure, figures_of
from hf_posswap.advice.serving import serving_of
from hf_posswap.advice.weighing import Option, best_of_others, weigh
from hf_posswap.utils.printable import in_lines

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
}
_ENOUGH = "it reads this length as it is"


@dataclass(frozen=True)
class Advice:
    """What `advise` says: what to use, why, what else there is, what is not known. `print(advice)` shows it.

    Attributes:
        model: class and mechanism, in words.
        length: tokens that it is to read.
        windows: how many of its windows that is.
        budget: tokens that may be trained on.
        serve: the program that is to serve it, or None.
        parameters: of the model.
        use: what is advised.
        others: what else was weighed, the best first.
        unknown: what holds for all of it.
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

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.length:,} tokens, {self.windows:.3g} of its windows",
            "",
            f"use: {self.use.title}",
            *(f"  because {reason} [{reason.source}]" for reason in self.use.reasons),
            *(f"  served by {self.use.serving}" for _ in [0] if self.use.serving),
            *(f"  not known: {said}" for said in (*self.use.unknown, *self.unknown)),
            *(f"  $ {command}" for command in self.use.commands),
        ]
        for option in self.others:
            lines += ["", f"not {option.title}: {'; '.join(why_not(option))}"]
        return in_lines(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as JSON."""
        plain = {name: value for name, value in self.__dict__.items() if name not in ("use", "others", "unknown")}
        others = [option.to_dict() for option in self.others]
        return plain | {"use": self.use.to_dict(), "others": others, "unknown": list(self.unknown)}


def advise(
    model: PreTrainedModel | PreTrainedConfig | type | str | Path,
    length: int,
    *,
    budget: float | None = None,
    serve: str | None = None,
) -> Advice:
    """Say what to use so that `model` reads `length` tokens, from what this project has measured.

    Rules are figures: a swap is advised where it was measured to predict better than the same model does without one
    that reads by a sliding window, with as much training for its size as `budget` allows, and where the program that is
    to serve it computes it. Everywhere else the sliding window is. Each figure names the file that it comes from. The
    config alone is read, no weights, and no code but that of transformers is run.

    Args:
        model: a model, its config, a class of transformers (or its name), a folder with a config.json, or a Hub id.
        length: tokens of the texts.
        budget: tokens that may be trained on; None: nothing is trained.
        serve: a program that `posswap export` knows, as "vllm" or "llamacpp"; None: no program is looked at.

    Raises:
        OptionError, UnknownNameError: an impossible length, budget or program.
        CheckpointError: `model` names no readable config.
        RemoteCodeError: it names one that needs code.
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
    case = read_case(model, length, budget, serve)
    options = [] if length <= case.window or case.kind == "unlimited" else weigh(case)
    use = next((option for option in options if option.advised), None) or _no_swap(case, options)
    return Advice(
        model=f"{case.report.model} ({case.report.native})",
        length=case.length,
        windows=case.windows,
        budget=case.budget,
        serve=case.serve,
        parameters=case.parameters,
        use=use,
        others=tuple(option for option in options if option is not use),
        unknown=(_MEASURED_ALONE,) if options else (),
    )


def why_not(option: Option) -> tuple[str, ...]:
    """Return why an option is not the advised one: where it stands, what is against it, and its first figure."""
    stands = _STANDS.get(option.standing)
    first = next((f"{reason} [{reason.source}]" for reason in option.reasons), None)
    return tuple(part for part in (stands, *option.against, first) if part)


def _no_swap(case: Case, options: list[Option]) -> Option:
    serving = serving_of(case, None)
    shared: dict[str, Any] = {"scheme": None, "recipe": None, "serving": serving}
    commands = () if case.serve is None else (line("export", case.name, "--target", case.serve),)
    if case.length <= case.window:
        commands = (line("explain", case.name), *commands)
        least = _least_lost_inside(case)
        lost = [one for one in least if one.difference > 0]
        open_still = [
            f"whether it would gain by a training with a swap, as measured: {one} [{one.source}]" for one in least
        ]
        return Option(
            f"no swap: {_ENOUGH}",
            standing="better",
            commands=commands,
            reasons=tuple(lost),
            unknown=() if lost else tuple(open_still),
            **shared,
        )
    if case.kind == "unlimited":
        told: tuple[str, ...] = ("explain", case.name)
        if not case.model.config.is_encoder_decoder:
            told = ("eval", case.name, "--lengths", f"{case.window},{case.length}", "--text", OTHER, "-o", "results")
        return Option(
            f"no swap: its {case.report.native.partition('(')[0]} runs at any length",
            standing="not measured",
            unknown=(f"what it loses beyond {case.window:,} tokens was not measured here",),
            commands=(line(*told), *commands),
            **shared,
        )
    reasons = best_of_others(options)
    unknown = () if reasons else (f"nothing was measured of models of its kind ({case.report.native}) beyond a window",)
    if case.kind in ("learned", "rope"):
        commands = (compare_command(case, [f"+{name}" for name in _tried(case)]), *commands)
    else:
        commands = (line("explain", case.name), *commands)
    way = "a sliding window of {:,} tokens" if case.kind in ("learned", "rope") else "window by window of {:,} tokens"
    title = f"no swap: {way.format(case.window)}"
    return Option(title, standing="level", reasons=reasons, unknown=unknown, commands=commands, **shared)


def _tried(case: Case) -> tuple[str, ...]:
    """Return the schemes that a comparison without training is to hold against the sliding window."""
    return ("alibi", "rope:partial=0.5") if case.kind == "learned" else (f"yarn:factor={case.factor}", "self_extend")


def _least_lost_inside(case: Case) -> tuple[Figure, ...]:
    """Return the least that a trained swap was measured to lose in the window, or the most to gain."""
    names = [candidate.recipe for candidate in CANDIDATES[case.kind] if candidate.recipe]
    found = [figure for name in names for figure in figures_of(name, "control in the window", trained=True)]
    return tuple(sorted(found, key=lambda figure: figure.difference)[:1])
