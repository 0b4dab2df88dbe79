"""llama.cpp serving a file that `posswap export` wrote, on the loopback: by llama-cpp-python's server.

`llama-server` itself, which the command that is printed calls, is no part of that package: it is the same library.
"""

from __future__ import annotations

import json
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
from hf_posswap.checkpoints.exports.run import export
from tests.serving.test_vllm_http import TEXT, checkpoint, free_port

pytestmark = [
    pytest.mark.skipif(
        find_spec("llama_cpp") is None or find_spec("fastapi") is None,
        reason="llama-cpp-python[server] is not installed, so nothing is served by it: run .ci/serving",
    ),
    pytest.mark.timeout(1200),
]
LENGTH, NEW = 1024, 16
FLOAT32 = "0"  # of llama.cpp's types, for its cache


@contextmanager
def server(file: Path, log: Path) -> Iterator[str]:
    """Serve a GGUF file, and give the address once it answers."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(file), "--n_ctx", str(LENGTH)]
    command += ["--type_k", FLOAT32, "--type_v", FLOAT32, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
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
        with urllib.request.urlopen(f"{address}/v1/models", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str, prompt: str) -> tuple[str, int]:
    """Return the greedy completion of a prompt, and how many tokens it is.

    The server's own default punishes words that come again. It goes on for up to three tokens where the last one begins
    a character of several bytes.
    """
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "repeat_penalty": 1.0}
    body = json.dumps(asked).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.loads(reply.read())
    return str(answer["choices"][0]["text"]), int(answer["usage"]["completion_tokens"])


def test_it_answers_with_the_text_that_generate_gives(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "p_rope", "p_rope")
    made = export(folder, "llamacpp", tmp_path / "m.gguf")
    assert made.command == f"llama-server -m {tmp_path / 'm.gguf'} -c {LENGTH}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = hf_posswap.load(folder).eval()
    with server(tmp_path / "m.gguf", tmp_path / "log") as address:
        for prompt in (TEXT, TEXT * 12, "lazy"):  # 12 times: beyond the 256 tokens of the model before its swap
            found, count = complete(address, prompt)
            assert NEW <= count <= NEW + 3
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            tokens = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
            text = tokenizer.decode(tokens).replace("\ufffd", "")  # the server leaves half characters out
            assert found == text != ""
