"""Results of the GPU's flex_attention kernels in Triton's interpreter on a CPU, compared with the formula.

python -m recipes.bench.interpreted

Inductor generates them as for `python -m recipes.bench.kernels`, for 100 tokens, which fill no block. They run
unchanged, forward and backward, in NumPy, which checks the values of operations but not a GPU's order, tensor cores or
races. The two small kernels (the sum of output times its gradient, the zeros of the bias) are replaced by torch.

Writes results/interpreted.json: the largest relative difference of the output and of each gradient.
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

from hf_posswap.kernels.flex import past_blocks
from hf_posswap.utils.atomic_io import write_text
from recipes.bench.card_here import CARDS, CompiledKernel, lowering
from recipes.bench.kernels import Call, missing

LENGTH, WIDTH = 100, 16
CALLS = {bias: Call(bias, "float32", WIDTH) for bias in ("alibi", "t5")}
MOST = 1e-5


def main(
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Run both kinds of bias, save the differences from the formula, and fail above 1e-5."""
    if (reason := missing()) is not None:
        raise typer.BadParameter(reason)
    rows = []
    for bias in CALLS:
        sources = _in_fresh_process(kernel_sources, bias)
        errors = _in_fresh_process(errors_of, bias, sources, TRITON_INTERPRET="1")
        rows.append({"bias": bias, "torch": torch.__version__, "triton": version("triton"), **errors})
        typer.echo(f"{bias}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    write_text(out / "interpreted.json", json.dumps(rows, indent=1) + "\n")
    if any(not errors[name] <= MOST for errors in rows for name in errors.keys() - {"bias", "torch", "triton"}):
        raise typer.Exit(1)


def _in_fresh_process(work: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Return the result of `work` in a fresh process, because Triton either interprets or compiles in a process."""
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(work, *arguments).result()
    finally:
        for name in environment:
            del os.environ[name]


def kernel_sources(bias: str) -> dict[str, tuple[str, str]]:
    """Return the name and source of attention's kernel by direction."""
    kernels: list[CompiledKernel] = []
    with lowering(CARDS["sm80"], kernels):
        CALLS[bias].run(LENGTH)
    return {kernel.direction: (kernel.name, kernel.source) for kernel in kernels if "_tem_" in kernel.name}


def errors_of(bias: str, sources: dict[str, tuple[str, str]]) -> dict[str, float]:
    """Return the relative differences of output and gradients from the formula."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, heads, LENGTH, WIDTH) for heads in (8, 2, 2, 8))
    numbers = torch.randn(8, LENGTH) if bias == "t5" else torch.rand(8)  # a line, or slopes
    blocks = past_blocks(LENGTH, LENGTH, torch.device("cpu"))
    kernel_arguments: dict[str, Any] = {
        "arg_Q": query, "arg_K": key, "arg_V": value, "arg_LSE": torch.empty(2, 8, LENGTH), "arg_DO": grad,
        "arg_MAX": torch.empty(2, 8, LENGTH), "arg_DQ": torch.full_like(query, torch.nan),
        "arg_DV": torch.full_like(value, torch.nan),
        "arg_KV_NUM_BLKS": blocks.kv_num_blocks, "arg_KV_IDX": blocks.kv_indices,
        "arg_FULL_KV_NUM_BLKS": blocks.full_kv_num_blocks, "arg_FULL_KV_IDX": blocks.full_kv_indices,
        "arg_Q_NUM_BLKS": blocks.q_num_blocks, "arg_Q_IDX": blocks.q_indices,
        "arg_FULL_Q_NUM_BLKS": blocks.full_q_num_blocks, "arg_FULL_Q_IDX": blocks.full_q_indices,
    }  # fmt: skip
    output, key_grad, line_grad = torch.full_like(query, torch.nan), torch.full_like(key, torch.nan), numbers * 0
    _interpret(*sources["forward"], kernel_arguments, [numbers], output)
    kernel_arguments["arg_DELTA"] = (output * grad).sum(-1)
    _interpret(*sources["backward"], kernel_arguments, [numbers, line_grad], key_grad)
    results = {
        "output": output,
        "query": kernel_arguments["arg_DQ"],
        "key": key_grad,
        "value": kernel_arguments["arg_DV"],
        "line": line_grad,
    }
    expected = formula(bias, query, key, value, numbers, grad)
    return {
        name: float((results[name] - right).abs().max() / right.abs().max())
        for name, right in expected.items()
    }  # fmt: skip


def _interpret(name: str, source: str, kernel_arguments: dict[str, Any], floats: list[Tensor], last: Tensor) -> None:
    """Run a kernel on CPU tensors: `kernel_arguments` by name, the bias's inputs by dtype, then `last`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        types, blocks = kernel.triton_meta["signature"], kernel.inductor_meta["config_args"]
        positions, rest = torch.arange(LENGTH, dtype=torch.int32).repeat(2, 1), iter(floats)
        arguments = []
        for argument in kernel.fn.arg_names:
            is_bias_input = argument.startswith("in_ptr")
            other = (positions if types[argument] == "*i32" else next(rest)) if is_bias_input else last
            arguments.append(kernel_arguments.get(argument, other))
        if "BLOCK_M" in blocks:
            grid = math.ceil(LENGTH / blocks["BLOCK_M"]), 2, 8
        else:  # a program for each block of queries of a group's 4 heads, and for each block of keys
            grid = 4 * math.ceil(LENGTH / blocks["BLOCK_M2"]) + math.ceil(LENGTH / blocks["BLOCK_N1"]), 2, 2
        kernel.fn[grid](*arguments)


def formula(bias: str, query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output and, by name, the gradients of causal attention, written out in float64."""
    leaves = [x.double().requires_grad_() for x in (query, key, value, numbers)]
    rows = torch.arange(LENGTH)
    distance = rows[:, None] - rows[None]  # [Q, K]
    added = leaves[3][:, distance.clamp(min=0)] if bias == "t5" else -leaves[3][:, None, None] * distance
    keys, values = (x.repeat_interleave(4, dim=1) for x in leaves[1:3])
    scores = leaves[0] @ keys.mT / math.sqrt(WIDTH) + added
    output = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ values
    gradient_names = ["query", "key", "value", "line"][: 4 if bias == "t5" else 3]
    grads = torch.autograd.grad(output, leaves[: len(gradient_names)], grad.double())
    return {"output": output.detach(), **dict(zip(gradient_names, grads, strict=True))}


if __name__ == "__main__":
    typer.run(main)
