"""Programs that run or train the unswapped model with the recommended scheme by their own settings."""

from __future__ import annotations

from pathlib import Path

from hf_posswap.advice.case import Case
from hf_posswap.advice.commands import line
from hf_posswap.advice.weighing import Option
from hf_posswap.checkpoints.overriding import overrides
from hf_posswap.errors import PosswapError
from hf_posswap.utils.gguf_source import checkpoint_of

_SERVERS = ("vllm", "sglang", "transformers")
_TRAINERS = ("trl", "verl", "axolotl", "llamafactory")


def by_config(case: Case, option: Option) -> tuple[str, tuple[str, ...]]:
    """Return which programs need no swapped checkpoint for `option`, and the command for the first; "" and () if none.

    Servers run a scheme that needs no training; trainers train one that needs it.
    """
    if option.scheme is None or option.route != "native" or _is_gguf(case.name):
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


def _is_gguf(name: str) -> bool:
    return Path(name).exists() and str(checkpoint_of(name)) != name
