"""`vllm serve` on the loopback, with a checkpoint that needs hf_posswap: typed as `posswap export` says."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.exports.run import export
from tests.contract.models import build

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed, so nothing is served by it: run .ci/serving"
    ),
    pytest.mark.timeout(1800),
]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32, "max_position_embeddings": 256}
TEXT = "The quick brown fox doesn't jump over 12345 lazy dogs.\n\n  Numbers and tabs\there. "
NEW = 16
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM's own helpers compile for minutes
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
}


def checkpoint(folder: Path, scheme: str, **options: Any) -> Path:
    """Return a swapped Llama with a tokenizer of its own."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT] * 3, vocab_size=300, min_frequency=1, special_tokens=["<|endoftext|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|endoftext|>")
    model = patch_model(build("llama", vocab_size=320, initializer_range=0.08, **SIZES), scheme, **options)
    return hf_posswap.save(model, folder, tokenizer=fast)


def typed(folder: Path, port: int) -> list[str]:
    """Return the command that `posswap export` prints, at a port of the loopback."""
    program, *words = shlex.split(export(folder, "vllm").command or f"vllm serve {folder}")
    assert program == "vllm"
    command = [sys.executable, str(Path(__file__).with_name("vllm_command.py"))]
    few_blocks = ["--num-gpu-blocks-override", "64"]  # zeros for a whole GiB take minutes
    return [*command, *words, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *few_blocks]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(folder: Path, log: Path) -> Iterator[str]:
    """Serve a checkpoint, and give the address once it answers."""
    port = free_port()
    with log.open("w") as file:
        process = subprocess.Popen(typed(folder, port), env=os.environ | ENVIRONMENT, stdout=file, stderr=file)
    address = f"http://127.0.0.1:{port}"
    try:
        while not answers(address):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str, model: Path, prompt: str) -> dict[str, Any]:
    """Return the completion of a prompt, as /v1/completions gives it."""
    asked = {"model": str(model), "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked | {"return_token_ids": True}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return dict(json.loads(reply.read())["choices"][0])


@pytest.mark.parametrize("scheme", ["alibi", "dual_chunk"])
def test_it_answers_with_the_tokens_that_generate_gives(scheme: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / scheme, scheme, max_length=1024)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = hf_posswap.load(folder).eval()
    with server(folder, tmp_path / "log") as address:
        for prompt in (TEXT, TEXT * 12, "lazy"):  # 12 times: beyond the 256 tokens of the model before its swap
            found = complete(address, folder, prompt)
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            made = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
            assert found["prompt_token_ids"] == ids[0].tolist()
            assert found["token_ids"] == made.tolist()
            text = tokenizer.decode(made, skip_special_tokens=True)
            assert found["text"].rstrip("\ufffd") == text.rstrip("\ufffd")  # vLLM keeps half a character back


def test_what_cannot_be_served_never_answers(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "dynamic", "dynamic", factor=4.0, site="attention")
    run = subprocess.run(
        typed(folder, free_port()), env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "the angles of dynamic follow the length of the whole text" in run.stdout + run.stderr
