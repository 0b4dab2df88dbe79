"""What the table says of llama.cpp, by llama.cpp: each row that is "run by a test", on the outputs of the file written.

A version of xllamacpp other than the table's fails `test_the_version_is_that_of_the_table`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest
import torch
import transformers

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.exports import gguf_file
from hf_posswap.checkpoints.exports.claims import Claim
from hf_posswap.checkpoints.exports.claims_files import LLAMACPP_ENGINE
from hf_posswap.checkpoints.exports.gguf_file import run_llamacpp
from hf_posswap.checkpoints.exports.mechanism import position_config_of
from hf_posswap.checkpoints.exports.rules import CLAIMS, claim_for
from hf_posswap.checkpoints.exports.run import export
from hf_posswap.errors import SwapVerificationError
from tests.contract.models import LENGTH, VOCABULARY, build
from tests.gguf_models import letters, tiny
from tests.serving.seen import Record, Seen, swap_words
from tests.serving.test_llamacpp_http import reply, server

LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
NEW = 8  # tokens that are generated
BOUND = 1e-3  # nats; float32 on both sides
GELU_BOUND = 2e-2  # nats; llama.cpp looks GELU up in a table in half precision, in the stock GPT-2 as well
WRONG = 0.5  # nats; what another mechanism is at least off by on these weights

# model, swap, its options
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llama": ("llama", None, {}),
    "theta": ("llama", "rope", {"base": 5e5}),
    "ntk": ("llama", "ntk", {"factor": 4.0}),
    "linear": ("llama", "linear", {"factor": 4.0}),
    "yarn": ("llama", "yarn", {"factor": 4.0}),
    "yarn, beta 16": ("llama", "yarn", {"factor": 4.0, "beta_fast": 16}),
    "yarn, attention 1.5": ("mistral", "yarn", {"factor": 4.0, "attention_factor": 1.5}),
    "yarn, not truncated": ("qwen2", "yarn", {"factor": 4.0, "truncate": False}),
    "ntk_by_parts": ("llama", "ntk_by_parts", {"factor": 4.0}),
    "resonance_yarn": ("llama", "resonance_yarn", {"factor": 4.0}),
    "angles": ("mistral", "rope", {"frequencies": [1 / (i + 1) for i in range(8)]}),
    "llama3": ("llama", "llama3", {"factor": 4.0}),
    "llama3, qwen2": ("qwen2", "llama3", {"factor": 4.0}),
    "p_rope": ("llama", "p_rope", {}),
    "p_rope, qwen2": ("qwen2", "p_rope", {}),
    "nope": ("llama", "nope", {}),
    "longrope": ("llama", "longrope", {"factor": 2.0} | LISTS),
    "dynamic": ("llama", "dynamic", {"factor": 4.0}),
    "gpt2": ("gpt2", None, {}),
    "gpt2 sinusoidal": ("gpt2", "sinusoidal", {"max_length": 4 * LENGTH}),
    "gpt2 nope": ("gpt2", "nope", {}),
    "neox": ("gpt_neox", None, {}),
    "neox ntk": ("gpt_neox", "ntk", {"factor": 4.0}),
    "neox linear": ("gpt_neox", "linear", {"factor": 4.0}),
    "neox yarn": ("gpt_neox", "yarn", {"factor": 4.0}),
    "qwen3": ("qwen3", None, {}),
    "qwen3 ntk": ("qwen3", "ntk", {"factor": 4.0}),
    "qwen3 linear": ("qwen3", "linear", {"factor": 4.0}),
    "qwen3 yarn": ("qwen3", "yarn", {"factor": 4.0}),
    "qwen3 yarn, attention 1.5": ("qwen3", "yarn", {"factor": 4.0, "attention_factor": 1.5}),
    "qwen3 dynamic": ("qwen3", "dynamic", {"factor": 4.0}),
    "qwen2_moe": ("qwen2_moe", None, {}),
    "qwen2_moe yarn": ("qwen2_moe", "yarn", {"factor": 4.0}),
    "qwen3_moe": ("qwen3_moe", None, {}),
    "qwen3_moe linear": ("qwen3_moe", "linear", {"factor": 4.0}),
    "qwen3_moe yarn": ("qwen3_moe", "yarn", {"factor": 4.0}),
    "gemma3": ("gemma3", None, {}),
    "gemma3 theta": ("gemma3", "rope", {"base": 5e4}),
    "gemma3 linear": ("gemma3", "linear", {"factor": 4.0}),
    "gemma3 yarn": ("gemma3", "yarn", {"factor": 4.0}),
    "phi3": ("phi3", None, {}),
    "phi3 linear": ("phi3", "linear", {"factor": 4.0}),
    "phi3 yarn, beta 16": ("phi3", "yarn", {"factor": 4.0, "beta_fast": 16}),
    "phi3 llama3": ("phi3", "llama3", {"factor": 4.0}),
    "phi3 longrope": ("phi3", "longrope", {"factor": 2.0} | LISTS),
    "smollm3": ("smollm3", None, {}),
    "smollm3 yarn": ("smollm3", "yarn", {"factor": 4.0}),
    "smollm3 yarn, attention 1.5": ("smollm3", "yarn", {"factor": 4.0, "attention_factor": 1.5}),
}


def saved(folder: Path, case: str) -> Path:
    name, scheme, options = CASES[case]
    model = tiny(name)
    if scheme is not None:
        patch_model(model, scheme, **options)
    hf_posswap.save(model, folder)
    letters().save_pretrained(folder)
    return folder


def row_of(folder: Path) -> Claim:
    return claim_for("llamacpp", position_config_of(transformers.AutoConfig.from_pretrained(folder)))


def compared(folder: Path, path: Path, length: int) -> tuple[float, int]:
    """Return how near llama.cpp is to transformers on `length` tokens, the last NEW of which `generate` made.

    Returns:
        How far log probabilities are apart at most, in nats, and how many of the last tokens llama.cpp takes as well:
        as it sees the same text before each, it would generate the same.
    """
    begun = torch.randint(5, VOCABULARY, (1, length - NEW), generator=torch.Generator().manual_seed(length))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        ids = model.generate(begun, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()  # "dynamic" remembers long texts
        expected = model(ids).logits[0].double().log_softmax(-1)
    tokens, found = run_llamacpp(path, ids[0], range(1, length), length)
    assert tokens.shape == (length - 1, model.config.vocab_size)
    assert found.isfinite().all()
    same = tokens[-NEW:, 0] == ids[0, -NEW:]
    return float((found - expected[:-1].gather(1, tokens)).abs().max()), int(same.sum())


def apart(folder: Path, path: Path, length: int) -> float:
    return compared(folder, path, length)[0]


def shared(cases: Iterable[str], fast: Collection[str]) -> list[Any]:
    """Return cases for parametrize, all but the `fast` ones marked slow."""
    return [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", shared(CASES, ("yarn, beta 16", "p_rope", "gpt2", "gemma3 yarn")))
def test_the_file_computes_what_transformers_does(case: str, tmp_path: Path, record_property: Record) -> None:
    folder = saved(tmp_path / "x", case)
    made = export(folder, "llamacpp", tmp_path / "m.gguf")
    assert row_of(folder).known == "tested"
    assert "log probabilities" in made.notes["compared"]
    bound = GELU_BOUND if case.startswith(("gpt2", "neox", "gemma3")) else BOUND
    whole = position_config_of(transformers.AutoConfig.from_pretrained(folder)).length
    lengths = [LENGTH // 2, LENGTH, whole]
    if row_of(folder).verdict == "approximate":
        lengths = [whole] if "longrope" in case else lengths[:2]
    found = [compared(folder, tmp_path / "m.gguf", length) for length in lengths]
    most, same = max(apart for apart, _ in found), sum(same for _, same in found)
    name, scheme, options = CASES[case]
    Seen(LLAMACPP_ENGINE, name, swap_words(scheme, options), lengths, most, same, NEW * len(lengths)).keep(
        record_property
    )
    assert most < bound
    assert same == NEW * len(lengths)


def test_every_row_that_says_so_is_tested(tmp_path: Path) -> None:
    from tests.serving import test_llamacpp_converter as converter

    met = {row_of(saved(tmp_path / str(number), case)) for number, case in enumerate(CASES)}
    folders = (*converter.FOLDERS.values(), *converter.LOST.values())
    met |= {row_of(converter.saved(tmp_path / f"c{number}", case)) for number, case in enumerate(folders)}
    assert {row for row in CLAIMS["llamacpp"] if row.known == "tested"} <= met


def test_the_version_is_that_of_the_table() -> None:
    assert f"xllamacpp {importlib.metadata.version('xllamacpp')}" == LLAMACPP_ENGINE


@pytest.mark.parametrize("case", ["longrope", "phi3 longrope"])
def test_where_it_is_said_to_differ_it_does(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", case)
    export(folder, "llamacpp", tmp_path / "m.gguf")
    assert row_of(folder).verdict == "approximate"
    assert apart(folder, tmp_path / "m.gguf", LENGTH) > WRONG


def test_beyond_the_length_that_is_exact_the_server_refuses_a_dynamic_rope(tmp_path: Path) -> None:
    export(saved(tmp_path / "x", "dynamic"), "llamacpp", tmp_path / "m.gguf")
    with pytest.raises(SwapVerificationError, match=rf"request \({LENGTH} tokens\) exceeds the available context size"):
        run_llamacpp(tmp_path / "m.gguf", torch.arange(LENGTH), [LENGTH], 4 * LENGTH)


@pytest.mark.parametrize(
    "case", shared(("yarn, beta 16", "angles", "p_rope", "nope", "llama3, qwen2", "phi3 llama3"), ("angles",))
)
def test_without_its_divisors_the_file_is_wrong(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "x", case)
    monkeypatch.setattr("hf_posswap.checkpoints.exports.gguf_file.divisors", lambda *_: {})
    with pytest.raises(SwapVerificationError, match="nats from the model's, more than 0.001. Nothing was written"):
        export(folder, "llamacpp", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_model_too_large_to_compare_here_is_written_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "available_bytes", lambda device: 1000)
    made = export(saved(tmp_path / "x", "llama"), "llamacpp", tmp_path / "m.gguf")
    assert re.fullmatch(r"not compared: that takes .* KiB of memory, and 1000 B are free", made.notes["compared"])


def test_a_proxy_is_not_asked_for_the_server_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    made = export(saved(tmp_path / "x", "llama"), "llamacpp", tmp_path / "m.gguf")
    assert made.notes["compared"].startswith("llama.cpp gives the model's")


def test_a_broken_file_ends_no_process_of_ours(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(SwapVerificationError, match=r"cannot run m.gguf \(exit 1\): .* this GGUF file is version"):
        run_llamacpp(tmp_path / "m.gguf", torch.arange(5), [5], 5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are counted as on Linux and macOS")
def test_llamacpp_computes_with_as_many_threads_as_torch(tmp_path: Path) -> None:
    export(saved(tmp_path / "x", "llama"), "llamacpp", tmp_path / "m.gguf")
    before = torch.get_num_threads()
    most = {}
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            most[threads] = _most_threads(lambda: run_llamacpp(tmp_path / "m.gguf", torch.arange(5, 25), [20], LENGTH))
    finally:
        torch.set_num_threads(before)
    assert most[3] - most[1] == 2


def _most_threads(work: Callable[[], object]) -> int:
    """Return how many threads the processes that `work` starts have at most."""
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            with contextlib.suppress(psutil.Error):
                most.append(sum(child.num_threads() for child in psutil.Process().children()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return max(most)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_weights_of_16_bits_stay_so(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    hf_posswap.save(patch_model(build("llama"), "p_rope").to(dtype), tmp_path / "x")
    made = export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(made.folder).tensors}
    assert kinds["blk.0.attn_q.weight"] == made.notes["weights"] == kind
    assert kinds["blk.0.attn_norm.weight"] == kinds["rope_freqs.weight"] == "F32"
    assert made.notes["compared"].startswith("llama.cpp gives the model's")


@pytest.mark.parametrize(
    "case", shared(("llama", "yarn", "gpt2", "qwen3 ntk", "qwen3_moe", "gemma3 linear", "phi3 llama3"), ("yarn",))
)
def test_weights_of_8_bits_are_those_of_the_model_that_was_rounded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = export(saved(tmp_path / "x", case), "llamacpp", tmp_path / "m.gguf", dtype="q8_0")
    assert made.notes["compared"].endswith("nats on average (it rounds activations to 8 bits, too)")
    if case in ("yarn", "qwen3 ntk", "gemma3 linear"):
        known = gguf_file.gguf_metadata
        monkeypatch.setattr(gguf_file, "gguf_metadata", lambda *given: _unscaled(known(*given)))
        with pytest.raises(SwapVerificationError, match="are on average .* nats from the model's, more than 0.12"):
            export(tmp_path / "x", "llamacpp", tmp_path / "n.gguf", dtype="q8_0")


def _unscaled(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of RoPE without a scaling or another base."""
    plain = {key: value for key, value in keys.items() if ".scaling." not in key}
    return {key: 1e4 if key == "qwen3.rope.freq_base" else value for key, value in plain.items()}


@pytest.mark.parametrize("name", ["x", "my-Phi-3"])  # by such a name llama.cpp strips spaces behind special tokens
def test_gpt2s_tokenizer_goes_along(name: str, tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    text = ["The quick brown fox doesn't jump over 12345 lazy dogs.\n\n  Ünïcödé, 数字 and tabs\there"] * 3
    special = ["<|endoftext|>", "<unk>", "<s>", "</s>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(text, vocab_size=300, min_frequency=1, special_tokens=special)
    trained.add_tokens(["<tool>", "dogs"])  # taken whole wherever they stand, before words are split
    hf_posswap.save(build("gpt2", vocab_size=320), tmp_path / name)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path / name)
    made = export(tmp_path / name, "llamacpp", tmp_path / "m.gguf")
    assert made.notes["vocabulary"].startswith("byte-level BPE")
    with server(made.folder) as address:
        for words in [*text, "dogs  dogs\n jump<|endoftext|>over", "it's 7 o", "a<tool>dogs<tool>", "dogs</s> over"]:
            asked = {"content": words, "add_special": False, "parse_special": True}
            assert reply(f"{address}/tokenize", asked)["tokens"] == fast(words)["input_ids"]
        assert reply(f"{address}/props")["eos_token"] == "<|endoftext|>"
