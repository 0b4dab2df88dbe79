"""llama.cpp's server, the code of `llama-server`, serving a file that `posswap export` wrote, on the loopback."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posswap
from hf_posswap.checkpoints.exports.run import export
from tests.serving.test_vllm_http import TEXT, checkpoint

LENGTH, NEW = 1024, 16


@contextmanager
def server(file: Path, context: int = LENGTH) -> Iterator[str]:
    """Serve a GGUF file, and give the address."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.verbosity, params.warmup = context, 1, 0, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    running = xllamacpp.Server(params)
    try:
        yield running.listening_address
    finally:
        del running


def reply(address: str, asked: dict[str, Any] | None = None) -> Any:
    """Return the server's answer to a GET, or a POST of `asked`."""
    body = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as answer:
        return json.loads(answer.read())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["p_rope", "yarn"])
def test_it_answers_with_the_tokens_that_generate_gives(scheme: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / scheme, scheme, max_length=LENGTH)
    made = export(folder, "llamacpp", tmp_path / "m.gguf")
    assert made.command == f"llama-server -m {tmp_path / 'm.gguf'} -c {LENGTH}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = hf_posswap.load(folder).eval()
    with server(tmp_path / "m.gguf") as address:
        for prompt in (TEXT, TEXT * 12, "lazy"):  # 12 times: beyond the 256 tokens of the model before its swap
            asked = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "return_tokens": True, "ignore_eos": True}
            found = reply(f"{address}/completion", asked)["tokens"]
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            made_here = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
            assert found == made_here[0, ids.shape[1] :].tolist()
