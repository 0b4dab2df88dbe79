"""What the table says of llama.cpp's converter, by the converter: convert_hf_to_gguf.py of the release that is tested.

It is part of the sdist of llama-cpp-python: POSSWAP_LLAMACPP_SOURCE is the folder in it that has llama.cpp.
`.ci/serving` sets it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.exports.gguf_file import run_llamacpp
from hf_posswap.checkpoints.exports.run import export
from hf_posswap.errors import SwapVerificationError, UnsupportedSwapError
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import LENGTH, TINY, build
from tests.gguf_models import FIELDS, tiny
from tests.serving.test_llamacpp import BOUND, GELU_BOUND, WRONG, apart, row_of

SOURCE = os.environ.get("POSSWAP_LLAMACPP_SOURCE", "")
pytestmark = pytest.mark.skipif(
    not SOURCE,
    reason="llama.cpp's converter is not there, so no claim about it is tested: run .ci/serving",
)
Case = tuple[str, str | None, dict[str, Any]]
LISTS = {"short_factor": [2.0] * 8, "long_factor": [2.0] * 8}

FOLDERS: dict[str, Case] = {
    "llama": ("llama", None, {}),
    "ntk": ("mistral", "ntk", {"factor": 4.0}),
    "linear": ("llama", "linear", {"factor": 4.0}),
    "yarn": ("qwen2", "yarn", {"factor": 4.0}),
    "llama3": ("llama", "llama3", {"factor": 4.0}),
    "gpt2": ("gpt2", None, {}),
    "gpt2 sinusoidal": ("gpt2", "sinusoidal", {"max_length": 4 * LENGTH}),
    "smollm3": ("smollm3", "rnope", {"every": 4}),
    "qwen3": ("qwen3", "yarn", {"factor": 4.0}),
    "qwen2_moe": ("qwen2_moe", "linear", {"factor": 4.0}),
    "qwen3_moe": ("qwen3_moe", "yarn", {"factor": 4.0}),
}
"""Folders that `posswap export` writes for it."""
LOST: dict[str, Case] = {
    "yarn, beta 0.1": ("llama", "yarn", {"factor": 4.0, "beta_slow": 0.1}),
    "yarn, attention 1.5": ("llama", "yarn", {"factor": 4.0, "attention_factor": 1.5}),
    "one list": ("llama", "longrope", {"factor": 2.0} | LISTS),
    "p_rope": ("llama", "p_rope", {"p": 0.25}),
    "llama3, qwen2": ("qwen2", "llama3", {"factor": 4.0}),
    "every second": ("smollm3", "rnope", {"every": 2}),
}
"""What it converts, and llama.cpp then computes otherwise."""
STOPPED: dict[str, tuple[Case, str]] = {
    "alibi": (("llama", "alibi", {}), "Model PosswapLlamaForCausalLM is not supported"),
    "bloom": (("bloom", "rope", {}), "Model PosswapBloomForCausalLM is not supported"),
    "gpt2": (("gpt2", "rope", {}), "Model PosswapGPT2LMHeadModel is not supported"),
    "neox": (("gpt_neox", "linear", {"factor": 4.0}), "rotary_pct"),
}
"""What it refuses, and words that it says."""


def saved(folder: Path, case: Case) -> Path:
    """Return a checkpoint with a tokenizer, which the converter asks for."""
    from tokenizers import ByteLevelBPETokenizer

    name, scheme, options = case
    model: Any
    if name == "smollm3":  # a Llama that rotates in some layers alone
        model = patch_model(build("llama", vocab_size=320, num_hidden_layers=4), "rnope", **options)
        hf_posswap.to_native(model, "smollm3").save_pretrained(folder)
    else:
        made = tiny if name in (*TINY, *FIELDS) else functools.partial(tiny_model, meta=False)
        model = made(name, vocab_size=320)
        hf_posswap.save(model if scheme is None else patch_model(model, scheme, **options), folder)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["The quick brown fox"] * 3, vocab_size=270, special_tokens=["<|endoftext|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return folder


def converted(folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run the converter on a checkpoint."""
    command = [sys.executable, str(Path(__file__).with_name("converter_child.py")), SOURCE, str(folder)]
    return subprocess.run([*command, "--outfile", str(path), "--outtype", "f32"], capture_output=True, text=True)


@pytest.mark.parametrize("case", list(FOLDERS))
def test_what_it_makes_of_an_exported_folder_computes_what_transformers_does(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", FOLDERS[case])
    assert row_of(folder).verdict == "exact"
    assert row_of(folder).known == "tested"
    made = export(folder, "llamacpp", tmp_path / "out")
    run = converted(tmp_path / "out", tmp_path / "m.gguf")
    assert run.returncode == 0, run.stderr[-2000:]
    whole = made.config["max_position_embeddings" if "gpt2" not in case else "n_positions"]
    for length in (LENGTH // 2, whole):
        assert apart(folder, tmp_path / "m.gguf", length) < (GELU_BOUND if "gpt2" in case else BOUND)


@pytest.mark.parametrize("case", list(LOST))
def test_where_it_loses_positions_no_folder_is_written_for_it(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", LOST[case])
    run = converted(folder, tmp_path / "m.gguf")
    assert run.returncode == 0, run.stderr[-2000:]
    assert apart(folder, tmp_path / "m.gguf", LENGTH) > WRONG
    with pytest.raises(UnsupportedSwapError, match="Nothing was written"):
        export(folder, "llamacpp", tmp_path / "out")


@pytest.mark.parametrize("case", list(STOPPED))
def test_it_refuses_what_llamacpp_would_run_unswapped(case: str, tmp_path: Path) -> None:
    run = converted(saved(tmp_path / "x", STOPPED[case][0]), tmp_path / "m.gguf")
    assert run.returncode != 0
    assert STOPPED[case][1] in run.stdout + run.stderr
    if (tmp_path / "m.gguf").exists():  # begun, and left behind
        with pytest.raises(SwapVerificationError, match="llama.cpp cannot run m.gguf"):
            run_llamacpp(tmp_path / "m.gguf", torch.arange(5), [5], 5)
