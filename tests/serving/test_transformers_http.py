"""`transformers serve`, the server of transformers itself, with checkpoints of plugin swaps, on the loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posswap
from tests.serving.test_llamacpp_http import reply
from tests.serving.test_vllm_http import TEXT, checkpoint, free_port

NEW = 12
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def server(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve a checkpoint, and give the address once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--device", "cpu", *options], stdout=file, stderr=file,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                reply(f"{address}/health")
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def with_chat(folder: Path, scheme: str, **options: Any) -> Path:
    """Return a swapped checkpoint whose chat template is the text itself."""
    checkpoint(folder, scheme, max_length=512, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def answer(address: str, folder: Path, text: str) -> str:
    message = {"role": "user", "content": text}
    asked = {"model": str(folder), "messages": [message], "max_tokens": NEW, "temperature": 0}
    found: str = reply(f"{address}/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    return found


def by_hand(folder: Path, text: str) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    made = hf_posswap.load(folder).eval().generate(ids, max_new_tokens=NEW, do_sample=False)
    with torch.no_grad():
        return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scheme", "options"),
    [("self_extend", []), ("alibi", ["--continuous-batching"]), ("yarn", ["--continuous-batching"])],
)
def test_it_answers_as_generate_does(scheme: str, options: list[str], tmp_path: Path) -> None:
    folder = with_chat(tmp_path / scheme, scheme)
    if options:
        options = [*options, "--cb-num-blocks", "16", "--cb-block-size", "32"]
    with server(folder, tmp_path / "log", "--trust-remote-code", *options) as address:
        for text in (TEXT, TEXT * 8):
            assert answer(address, folder, text) == by_hand(folder, text), (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_continuous_batching_of_angles_that_follow_the_length_is_refused_and_the_log_says_why(tmp_path: Path) -> None:
    folder = with_chat(tmp_path / "dynamic", "dynamic", site="attention")
    options = ("--trust-remote-code", "--continuous-batching", "--cb-num-blocks", "16", "--cb-block-size", "32")
    with server(folder, tmp_path / "log", *options) as address:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            answer(address, folder, TEXT)
    assert "its angles follow the length of the text" in (tmp_path / "log").read_text()
