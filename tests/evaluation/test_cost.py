"""Bytes are those of the cache's formula; times are there, and nothing more is asked of them.

What is measured in a process of its own stays under what was said before, and what cannot fit is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posswap import patch_model
from hf_posswap.errors import DataError, NotEnoughMemoryError
from hf_posswap.evaluation import cost
from hf_posswap.evaluation.cost import (
    GIB,
    check_memory,
    choose_prefill,
    costs_are_possible,
    forward_need,
    forward_operations,
    measure_cost,
)
from hf_posswap.utils import devices


@pytest.mark.parametrize("prefill", [None, 7])
@pytest.mark.parametrize("scheme", [None, "alibi", "yarn"])
def test_the_cache_is_layers_heads_dims_and_tokens(scheme: str | None, prefill: int | None) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if scheme is not None:
        patch_model(model, scheme, max_length=256)
    cost = measure_cost(model, torch.randint(0, 50, (1, 48)), prefill=prefill)
    assert cost.cache_bytes == 2 * 3 * 2 * 8 * 48 * 4
    assert (cost.length, cost.peak_bytes) == (48, None)
    assert cost.prefill_seconds > 0
    assert cost.decode_seconds > 0
    assert cost.tokens_per_second == pytest.approx(48 / cost.prefill_seconds)


def test_what_has_no_cost_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(DataError, match=r"one text \[1, L\], L >= 2, and at least 1 new token, got \(2, 9\), 8"):
        measure_cost(model, torch.zeros(2, 9, dtype=torch.long))
    assert costs_are_possible(model, 24)
    assert not costs_are_possible(model, 25)


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    norms = (2 * 3 + 1) * 32  # whose products torch does not count
    for length in (16, 64):
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.long))
        masked = 2 * 3 * 32 * length**2  # eager attention computes what is masked too
        by_module = counted.get_flop_counts()
        angles = sum(by_module.get("LlamaForCausalLM.model.rotary_emb", {}).values())  # products in older transformers
        products = counted.get_total_flops() - masked - angles
        assert forward_operations(model, length) == products + 2 * length * norms


ROOT = Path(__file__).resolve().parents[2]
PEAKS = """
import json, multiprocessing, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from hf_posswap import patch_model
from hf_posswap.evaluation import Scorer
from hf_posswap.evaluation.cost import choose_prefill, forward_need

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def measure(scheme, length, prefill, vocabulary, layers):
    torch.manual_seed(0)
    shape = {"n_embd": 128, "n_layer": 4, "n_head": 4}  # of the quickstart's model
    config = GPT2Config(vocab_size=vocabulary, n_positions=128, **shape, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    patch_model(model, scheme, max_length=length)
    prefill = choose_prefill(model, length) if prefill == "chosen" else prefill or None
    need = forward_need(model, length, prefill=prefill)
    del model.transformer.h[layers:]
    scorer, ids = Scorer(model, prefill=prefill), torch.randint(0, vocabulary, (1, length))
    scorer.nll(ids[:, :64])
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    scorer.nll(ids)
    return {"peak": status("VmHWM") - before, "need": need.total, "cache": need.cache}

torch.set_num_threads(1)
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as fresh:  # what one freed hides no other's peak
    print(json.dumps(fresh.starmap(measure, json.loads(sys.argv[1]), chunksize=1)))
"""


def peaks(*cases: tuple[str, int, int | str, int, int]) -> list[dict[str, int]]:
    """Return what scorings, each in a fresh process, held beyond the model at most, and what was said before, in bytes.

    Args:
        cases: scheme, length, prefill, words, and how many of the four layers are run, of each.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process can be read on Linux alone")
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}  # or freed memory would stay with the process
    command = [sys.executable, "-c", PEAKS, json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_head_of_many_words_is_taken_in_chunks() -> None:
    (found,) = peaks(("rope", 2048, 0, 50_000, 4))
    whole = 2048 * 50_000 * 4
    assert found["peak"] <= found["need"] < whole < 3 * whole


@pytest.mark.slow
def test_the_peak_stays_under_the_estimate_and_not_far() -> None:
    cases = [(scheme, prefill) for scheme in ("rope", "alibi", "fire", "t5", "self_extend") for prefill in (0, 256)]
    found = peaks(*((scheme, 2048, prefill, 257, 4) for scheme, prefill in cases))
    ratios = {case: each["peak"] / each["need"] for case, each in zip(cases, found, strict=True)}
    assert {case: round(ratio, 3) for case, ratio in ratios.items() if not 0.3 <= ratio <= 1.0} == {}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rope", "alibi"])
def test_32768_tokens_of_the_quickstarts_model_stay_under_2_gib(scheme: str) -> None:
    """One of its four layers is run: they come one after the other, and leave nothing but their keys and values."""
    (found,) = peaks((scheme, 32_768, "chosen", 257, 1))
    assert found["peak"] <= found["need"]
    assert found["peak"] + 0.75 * found["cache"] <= 2 * GIB


def llama(length: int, **more: object) -> PreTrainedModel:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(max_position_embeddings=length, **more))


def test_the_cache_and_the_scores_are_the_formulas_of_the_docstring() -> None:
    model = llama(4096)  # 7 billion parameters: 32 layers, 32 heads of 128, float32
    assert forward_need(model, 131_072, prefill=512).cache == 2 * 32 * 4096 * 131_072 * 4
    assert forward_need(model, 131_072).scores == 0
    model.config._attn_implementation = "eager"
    assert forward_need(model, 8192).scores == 3 * 32 * 8192**2 * 4


def test_pieces_are_chosen_by_model_and_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "available_bytes", lambda device: 1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=128, n_layer=1, n_head=4))
    patch_model(model, "alibi", max_length=1 << 16)
    assert choose_prefill(model, 2048) is None
    piece = choose_prefill(model, 1 << 16)
    assert piece is not None
    assert forward_need(model, 1 << 16, prefill=piece).scores <= GIB
    dynamic = llama(16, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0})
    assert choose_prefill(dynamic, 1 << 20) is None  # each length needs its own whole forward


def test_what_does_not_fit_is_refused_with_its_need() -> None:
    model = llama(4096)
    with pytest.raises(NotEnoughMemoryError) as caught:
        check_memory(model, 131_072, prefill=512, free=8 * GIB)
    message = str(caught.value)
    total = forward_need(model, 131_072, prefill=512).total / GIB
    assert message.startswith(f"131,072 tokens of LlamaForCausalLM need about {total:.1f} GiB beyond the weights")
    assert "cache 128.0" in message
    assert "and 8.0 GiB are free: measure shorter lengths." in message
    assert isinstance(caught.value, MemoryError)
    model.config._attn_implementation = "eager"
    with pytest.raises(NotEnoughMemoryError, match="attn_implementation='sdpa'"):
        check_memory(model, 131_072, prefill=None, free=8 * GIB)
    assert check_memory(model, 128, prefill=None, free=8 * GIB).total < 8 * GIB


def test_free_memory_is_read_from_the_system_and_its_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable:    2048 kB\n")
    assert devices._meminfo(tmp_path / "meminfo") == 2 << 20
    assert devices._meminfo(tmp_path / "none") is None


def control_group(root: Path, processes: str, **groups: dict[str, str]) -> int | None:
    """Return what the control groups leave in a root with /proc/self/cgroup and these files by group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(processes)
    for group, files in groups.items():
        folder = root / "sys/fs/cgroup" / group.replace("_", "/").strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    return devices._control_group(root)


V2 = {"memory.max": "1000\n", "memory.current": "400\n"}
CACHED = {**V2, "memory.current": "900\n", "memory.stat": "anon 100\ninactive_file 750\nactive_file 50\n"}
UNLIMITED = {**V2, "memory.max": "max\n"}
V1 = {
    "memory.limit_in_bytes": "1000\n",
    "memory.usage_in_bytes": "900\n",
    "memory.stat": "inactive_file 7\ntotal_inactive_file 750\n",
}
NO_LIMIT = {**V1, "memory.limit_in_bytes": "9223372036854771712\n"}


@pytest.mark.parametrize(
    ("processes", "groups", "free"),
    [
        ("0::/\n", {"_": V2}, 600),
        ("0::/\n", {"_": UNLIMITED}, None),
        ("0::/\n", {"_": CACHED}, 850),
        ("0::/a/b\n", {"a": V2, "a_b": UNLIMITED}, 600),
        ("0::/a/b\n", {"a": CACHED, "a_b": V2}, 600),
        ("0::/host/path/not/here\n", {"_": V2}, 600),
        ("4:cpu,memory:/job\n0::/\n", {"memory_job": V1, "memory": NO_LIMIT}, 850),
        ("4:memory:/job\n", {"memory_job": NO_LIMIT, "memory": NO_LIMIT}, None),
        ("4:memory:/job\n", {}, None),
        ("", {}, None),
    ],
)
def test_the_least_limit_of_the_control_groups_counts_and_the_page_cache_does_not(
    processes: str, groups: dict[str, dict[str, str]], free: int | None, tmp_path: Path
) -> None:
    assert control_group(tmp_path, processes, **groups) == free
    assert devices._control_group(tmp_path / "none") is None


def test_processes_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_meminfo", lambda: 900)
    monkeypatch.setattr(devices, "_control_group", lambda: 600)
    assert devices.available_bytes(torch.device("cpu")) == 600
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert devices.available_bytes(torch.device("cpu")) == 300


@pytest.mark.parametrize("scheme", ["alibi", "t5", "kerple", "self_extend"])
def test_a_text_in_pieces_needs_no_dense_bias_where_a_kernel_takes_them(scheme: str) -> None:
    """The same as one text of that length by the formula, less what [H, rows, length] would be."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=128, n_embd=128, n_layer=1, n_head=4))
    patch_model(model, scheme, max_length=16_384)
    mask = 3 * 512 * 16_384 * 4
    by_kernel, by_formula = (
        forward_need(model, 16_384, prefill=512, kernels=kernels).scores for kernels in (True, False)
    )
    assert mask < by_kernel < 3 * mask
    assert by_formula > 4 * mask


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["alibi", "t5", "self_extend", "fire"])
def test_the_peak_of_a_text_in_pieces_stays_under_the_estimate_and_not_far(scheme: str) -> None:
    (found,) = peaks((scheme, 8192, 512, 257, 2))
    assert 0.3 <= found["peak"] / found["need"] <= 1.0
