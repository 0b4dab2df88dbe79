"""Peak memory of one training step with the loss in chunks, over that of transformers' own loss.

    python recipes/bench/loss_memory.py                       # 16,384 tokens, writes results/loss_memory.json
    python recipes/bench/loss_memory.py --tokens 2048 --vocabulary 8192 --out small.json

Each step (forward, backward, AdamW) runs in a separate process on one thread; the peak is Linux's high-water mark. The
model is a RoPE-swapped GPT-2 of four layers with the same random weights in both processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

_WAYS = ("whole", "chunks")
_MIB = 1 << 20


def main(
    tokens: Annotated[int, typer.Option(help="Of the one row of the batch.")] = 16_384,
    vocabulary: Annotated[int, typer.Option(help="Rows of the head.")] = 32_000,
    width: Annotated[int, typer.Option(help="Of the hidden states.")] = 256,
    chunk: Annotated[int, typer.Option(help="Tokens whose logits are held at a time.")] = 1024,
    out: Annotated[Path, typer.Option(help="The file for the result.")] = Path(__file__).parent
    / "results"
    / "loss_memory.json",
    way: Annotated[str | None, typer.Option(help="Run one of the two here and print its numbers.")] = None,
) -> None:
    """Measure both ways and print the ratio of their peaks."""
    if way is not None:
        typer.echo(json.dumps(_step(way, tokens, vocabulary, width, chunk)))
        return
    sizes = {"tokens": tokens, "vocabulary": vocabulary, "width": width, "chunk": chunk}
    results = {name: _in_a_process(name, sizes) for name in _WAYS}
    ratio = results["chunks"]["peak_mib"] / results["whole"]["peak_mib"]
    result = {"ratio": round(ratio, 3), "sizes": sizes, **results, "torch": torch.__version__, "threads": 1}
    for name, numbers in results.items():
        typer.echo(f"{name:7} {numbers['peak_mib']:8.0f} MiB  {numbers['seconds']:6.1f} s  loss {numbers['loss']:.6f}")
    typer.echo(f"peak memory of the loss in chunks: {result['ratio']:.2f} of the whole loss's")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _in_a_process(way: str, sizes: dict[str, int]) -> dict[str, float]:
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    # glibc keeps freed memory, which hides peaks, unless large blocks are returned to the system
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--way", way, *options]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        typer.echo(f"error: the {way} step ended with {process.returncode}:\n{process.stderr[-2000:]}", err=True)
        raise typer.Exit(2)
    return json.loads(process.stdout.splitlines()[-1])


def _step(way: str, tokens: int, vocabulary: int, width: int, chunk: int) -> dict[str, float]:
    from hf_posswap.training.chunked_loss import causal_loss

    model = _model(tokens, vocabulary, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    baseline = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    started = time.perf_counter()
    loss = causal_loss(model, inputs, chunk=chunk) if way == "chunks" else model(**inputs, use_cache=False).loss
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - started
    return {"peak_mib": (_status("VmHWM") - baseline) / _MIB, "seconds": seconds, "loss": loss.item()}


def _model(tokens: int, vocabulary: int, width: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    import hf_posswap

    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_embd": width, "n_layer": 4, "n_head": 4, "n_positions": 512}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0,
                   resid_pdrop=0.0, **shape)
    )  # fmt: skip
    hf_posswap.patch_model(model, "rope", max_length=tokens)
    return model.train()


def _status(name: str) -> int:
    """Return a number of bytes from Linux's status of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    typer.run(main)
