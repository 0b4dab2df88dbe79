"""What the kernels of flex_attention for a GPU compute, by Triton's interpreter on a CPU, beside the formula.

python -m recipes.bench.interpreted

Inductor writes them as for `python -m recipes.bench.kernels`, of 100 tokens, which fill no block. They are run as they
stand, forward and backward, by NumPy: each operation's numbers, and not a GPU's order, tensor cores or races. The two
small kernels beside them (the sum of output times its gradient, the line's zeros) are torch's here.

Writes results/interpreted.json: the largest difference of the output and of each gradient, over the largest number.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_posswap.kernels.flex import _causal_blocks
from hf_posswap.utils.atomic_io import write_text
from recipes.bench.card_here import CARDS, Made, lowering
from recipes.bench.kernels import Call, missing

LENGTH, WIDTH = 100, 16
CALLS = {bias: Call(bias, "float32", WIDTH) for bias in ("alibi", "t5")}
MOST = 1e-5


def main(
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Run both kinds of bias, write down how far they are from the formula, and fail beyond 1e-5."""
    if (reason := missing()) is not None:
        raise typer.BadParameter(reason)
    rows = []
    for bias in CALLS:
        sources = _elsewhere(written, bias)
        errors = _elsewhere(errors_of, bias, sources, TRITON_INTERPRET="1")
        rows.append({"bias": bias, "torch": torch.__version__, "triton": version("triton"), **errors})
        typer.echo(f"{bias}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    write_text(out / "interpreted.json", json.dumps(rows, indent=1) + "\n")
    if any(not errors[name] <= MOST for errors in rows for name in errors.keys() - {"bias", "torch", "triton"}):
        raise typer.Exit(1)


def _elsewhere(work: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Return what `work` gives in a fresh process: Triton interprets in all of a process, or compiles."""
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(work, *arguments).result()
    finally:
        for name in environment:
            del os.environ[name]


def written(bias: str) -> dict[str, tuple[str, str]]:
    """Return the name and source of attention's kernel by direction."""
    made: list[Made] = []
    with lowering(CARDS["sm80"], made):
        CALLS[bias].run(LENGTH)
    return {one.direction: (one.name, one.source) for one in made if "_tem_" in one.name}


def errors_of(bias: str, sources: dict[str, tuple[str, str]]) -> dict[str, float]:
    """Return how far output and gradients lie from the formula, over its largest number."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, heads, LENGTH, WIDTH) for heads in (8, 2, 2, 8))
    numbers = torch.randn(8, LENGTH) if bias == "t5" else torch.rand(8)  # a line, or slopes
    blocks = _causal_blocks(LENGTH, LENGTH, torch.device("cpu"))
    held: dict[str, Any] = {
        "arg_Q": query, "arg_K": key, "arg_V": value, "arg_LSE": torch.empty(2, 8, LENGTH), "arg_DO": grad,
        "arg_MAX": torch.empty(2, 8, LENGTH), "arg_DQ": torch.full_like(query, torch.nan),
        "arg_DV": torch.full_like(value, torch.nan),
        "arg_KV_NUM_BLKS": blocks.kv_num_blocks, "arg_KV_IDX": blocks.kv_indices,
        "arg_FULL_KV_NUM_BLKS": blocks.full_kv_num_blocks, "arg_FULL_KV_IDX": blocks.full_kv_indices,
        "arg_Q_NUM_BLKS": blocks.q_num_blocks, "arg_Q_IDX": blocks.q_indices,
        "arg_FULL_Q_NUM_BLKS": blocks.full_q_num_blocks, "arg_FULL_Q_IDX": blocks.full_q_indices,
    }  # fmt: skip
    output, key_grad, line_grad = torch.full_like(query, torch.nan), torch.full_like(key, torch.nan), numbers * 0
    _interpret(*sources["forward"], held, [numbers], output)
    held["arg_DELTA"] = (output * grad).sum(-1)
    _interpret(*sources["backward"], held, [numbers, line_grad], key_grad)
    found = {"output": output, "query": held["arg_DQ"], "key": key_grad, "value": held["arg_DV"], "line": line_grad}
    expected = formula(bias, query, key, value, numbers, grad)
    return {
        name: float((found[name] - right).abs().max() / right.abs().max())
        for name, right in expected.items()
    }  # fmt: skip


def _interpret(name: str, source: str, held: dict[str, Any], floats: list[Tensor], last: Tensor) -> None:
    """Run a kernel on tensors of a CPU: `held` by name; what the bias reads by its dtype; then `last`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        kinds, blocks = kernel.triton_meta["signature"], kernel.inductor_meta["config_args"]
        positions, rest = torch.arange(LENGTH, dtype=torch.int32).repeat(2, 1), iter(floats)
        arguments = []
        for argument in kernel.fn.arg_names:
            read = argument.startswith("in_ptr")
            other = (positions if kinds[argument] == "*i32" else next(rest)) if read else last
            arguments.append(held.get(argument, other))
        if "BLOCK_M" in blocks:
            grid = math.ceil(LENGTH / blocks["BLOCK_M"]), 2, 8
        else:  # a program for each block of queries of the 4 heads of a group, and for each of keys
            grid = 4 * math.ceil(LENGTH / blocks["BLOCK_M2"]) + math.ceil(LENGTH / blocks["BLOCK_N1"]), 2, 2
        kernel.fn[grid](*arguments)


def formula(bias: str, query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output and, by name, the gradients of causal attention, written out in float64."""
    leaves = [x.double().requires_grad_() for x in (query, key, value, numbers)]
    rows = torch.arange(LENGTH)
    apart = rows[:, None] - rows[None]  # [Q, K]
    added = leaves[3][:, apart.clamp(min=0)] if bias == "t5" else -leaves[3][:, None, None] * apart
    keys, values = (x.repeat_interleave(4, dim=1) for x in leaves[1:3])
    scores = leaves[0] @ keys.mT / math.sqrt(WIDTH) + added
    output = scores.masked_fill(apart < 0, -torch.inf).softmax(-1) @ values
    wanted = ["query", "key", "value", "line"][: 4 if bias == "t5" else 3]
    grads = torch.autograd.grad(output, leaves[: len(wanted)], grad.double())
    return {"output": output.detach(), **dict(zip(wanted, grads, strict=True))}


if __name__ == "__main__":
    typer.run(main)
