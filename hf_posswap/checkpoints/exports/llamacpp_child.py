"""A program: runs llama.cpp on a GGUF file and stores the logits. It imports nothing of the package.

Usage: llamacpp_child.py MODEL.gguf TOKENS.npy LOGITS.npy CONTEXT
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np


def main(path: str, tokens: str, logits: str, context: int) -> None:
    """Store the logits [L, V] of the tokens [L] in one batch."""
    import llama_cpp

    ids = np.load(tokens)
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
    if not model:
        raise SystemExit("the file does not load")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = context, len(ids), len(ids)
    options.type_k = options.type_v = 0  # float32
    options.flash_attn_type = 0  # off: it computes in half precision
    running = llama_cpp.llama_init_from_model(model, options)
    if not running:
        raise SystemExit("no context can be made of it")
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = int(token), i, 1, 0, 1
    if llama_cpp.llama_decode(running, batch):
        raise SystemExit("it does not run")
    count = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    logits_pointer = llama_cpp.llama_get_logits(running)
    flat = np.ctypeslib.as_array(ctypes.cast(logits_pointer, ctypes.POINTER(ctypes.c_float)), (len(ids), count))
    np.save(logits, flat)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
