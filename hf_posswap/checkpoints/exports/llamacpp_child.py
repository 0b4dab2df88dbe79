"""A program: serves a GGUF file by llama.cpp's server and stores log probabilities. It imports nothing of the package.

Usage: llamacpp_child.py MODEL.gguf TOKENS.npy ENDS.npy OUT.npz CONTEXT THREADS
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

import numpy as np

MOST_PROBABLE = 1000


def main(path: str, tokens: str, ends: str, out: str, context: int, threads: int) -> None:
    """Store, for each end N, the most probable tokens [K] after the first N of `tokens`, and their log probabilities.

    The server keeps the keys of one text for the next, as it does when it is asked for one token after the other.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.swa_full = context, 1, 0, True
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # its flash attention computes in half precision
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup, params.verbosity = False, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise SystemExit(f"the file does not load ({error})") from error
    ids = np.load(tokens).tolist()
    # what it answers is forced to be a whole character: it tells no probabilities of a part of one, nor of an end
    bias = [[_whole_character(server.listening_address), 1e5]]
    request = {"max_tokens": 1, "temperature": 0.0, "logprobs": MOST_PROBABLE, "logit_bias": bias}
    rows = []
    for end in np.load(ends).tolist():
        answer = server.handle_completions({**request, "prompt": ids[:end]})
        if "choices" not in answer:
            raise SystemExit(f"it does not run ({answer})")
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs is None:
            raise SystemExit("it tells no probabilities: its vocabulary has neither a letter nor a digit")
        rows.append(logprobs["content"][0]["top_logprobs"])
    np.savez(
        out,
        tokens=np.array([[entry["id"] for entry in row] for row in rows]),
        logprobs=np.array([[entry["logprob"] for entry in row] for row in rows]),
    )


def _whole_character(address: str) -> int:
    """Return a token that is a whole character; 0 where the vocabulary has no characters."""
    body = json.dumps({"content": "a0", "add_special": False}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this machine's loopback
    try:
        with direct.open(request, timeout=60) as answer:
            tokens: list[int] = json.loads(answer.read())["tokens"]
    except urllib.error.HTTPError:  # a character that no token stands for
        return 0
    return tokens[-1] if tokens else 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
