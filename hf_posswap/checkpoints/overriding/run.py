"""`overrides`: what to paste into a server or a trainer so that it runs an unswapped model with a swap."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.overriding.facts import TARGETS, fact_of
from hf_posswap.checkpoints.overriding.programs import WRITERS
from hf_posswap.checkpoints.overriding.wanted import config_swap
from hf_posswap.compat.transformers_rotary import of_any_release
from hf_posswap.errors import UnknownNameError, UnsupportedSwapError
from hf_posswap.patching.inspect.describe import on_meta
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.schemes.base import Scheme
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_WIDTH = 100


@dataclass(frozen=True, repr=False)
class Overrides(ResultView):
    """Settings that `overrides` returns: a program that gets them runs an unswapped model with a swap.

    `print` shows text that can be pasted whole.

    Attributes:
        target: the program.
        model: its name in the text; MODEL where it has none.
        scheme: with every parameter filled in, as text.
        max_length: tokens that the model is then meant for.
        text: to paste: a command, YAML or Python.
        values: the overrides of the config in it, nested as transformers takes them; for vllm and sglang in that
            program's spelling.
        verdict: "exact": equal to `patch_model`; "approximate"; or "unknown" where nobody looked.
        why: the reason.
        versions: of the program that the text is for.
        source: the code of the program that was read, and what of it was run.
        also: text for other versions or commands, by what it is for.
        notes: what to know before pasting.
    """

    target: str
    model: str
    scheme: str
    max_length: int
    text: str
    values: dict[str, Any]
    verdict: str
    why: str
    versions: str
    source: str
    also: dict[str, str]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        name = self.scheme.partition("(")[0]
        head = f"{name} in {self.model}, {self.max_length} tokens, for {self.versions}"
        lines = [head, f"{self.verdict}: {self.why}", *self.notes]
        blocks = [*(_commented(line) for line in lines), self.text]
        for name, text in self.also.items():
            blocks += [_commented(f"{name}:"), *(f"#   {line}".rstrip() for line in text.splitlines())]
        return "\n".join(blocks)

    def _repr_facts(self) -> dict[str, Any]:
        return {"target": self.target, "scheme": self.scheme, "max_length": self.max_length, "verdict": self.verdict}

    def to_dict(self) -> dict[str, Any]:
        """Return the overrides as JSON."""
        return {**self.__dict__, "notes": list(self.notes)}


def overrides(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    scheme: Scheme | str,
    target: str,
    *,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Overrides:
    """Return what to paste into a server or a trainer so that it runs an unswapped model with `scheme`.

    It works for each swap that the config of stock transformers expresses: yarn, linear, ntk, dynamic, llama3,
    longrope, p_rope, another base. No weights are read. The program's own rule is applied to the config first, and the
    text is returned only if the swap's rope parameters result.

    Args:
        model: a model, its config, a folder with a config.json, or a Hub id.
        scheme: as in `patch_model`.
        target: "transformers", "vllm", "sglang", "trl", "verl", "axolotl" or "llamafactory".
        max_length: as in `plan_swap`.
        trust_remote_code: run custom code of a folder or Hub id if its config needs it.
        options: fields of the scheme, if it is given by name.

    Raises:
        UnknownNameError: no such program.
        UnsupportedSwapError: no config expresses the swap, the program has no setting for it, or `model` is a GGUF
            file; the message says what to do instead.
        UnsupportedModelError: no family describes the model.
        AlreadyPatchedError: it carries a swap.
        CheckpointError: `model` names no readable config.
        RemoteCodeError: its config needs custom code, which was not allowed.
        SchemeError, OptionError: the scheme or its parameters are wrong.

    Example:
        >>> from transformers import LlamaConfig
        >>> pasted = overrides(LlamaConfig(max_position_embeddings=4096), "yarn", "vllm", factor=4)
        >>> pasted.text[:38], pasted.values["rope_parameters"]["factor"]
        ('vllm serve MODEL --max-model-len 16384', 4.0)
    """
    if target not in TARGETS:
        raise UnknownNameError("program", target, TARGETS)
    skeleton = on_meta(model, trust_remote_code=trust_remote_code)
    with of_any_release():
        plan = plan_swap(skeleton, scheme, max_length=max_length, **options)
    swap = config_swap(_name_of(model), _scheme_text(scheme, options), max_length, skeleton, plan, target)
    if isinstance(model, str | Path) and str(checkpoint_of(model)) != str(model):
        raise UnsupportedSwapError(
            f"{target} takes overrides for the config.json of a folder or a Hub id, and {swap.name} is a GGUF file. "
            f"{swap.instead}"
        )
    pasted, fact = WRITERS[target](swap), fact_of(target)
    source = f"{fact.source}; run here: {fact.run}"
    return Overrides(
        target, swap.name, str(plan.scheme), plan.max_length, pasted.text, pasted.values, pasted.verdict, pasted.why,
        fact.versions, source, pasted.also, pasted.notes,
    )  # fmt: skip


def _name_of(model: Any) -> str:
    """Return the model's name for commands; MODEL where it has none."""
    if isinstance(model, str | Path):
        return str(model)
    return str(getattr(getattr(model, "config", model), "name_or_path", "") or "MODEL")


def _scheme_text(scheme: Any, options: dict[str, Any]) -> str:
    """Return a scheme as the command takes it; one with lists goes into a file."""
    if isinstance(scheme, Scheme):
        given = {f.name: getattr(scheme, f.name) for f in dataclasses.fields(scheme)}
        options = {f.name: given[f.name] for f in dataclasses.fields(scheme) if given[f.name] != f.default}
        if not all(isinstance(value, bool | int | float | str) for value in options.values()):
            return "SCHEME.json"
        scheme = scheme.name
    if not isinstance(scheme, str):
        return "SCHEME"
    fields = ",".join(f"{name}={value}" for name, value in options.items())
    return f"{scheme}{',' if ':' in scheme else ':'}{fields}" if fields else scheme


def _commented(line: str) -> str:
    return textwrap.fill(
        line, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )
