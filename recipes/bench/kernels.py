"""Resource use of our flex_attention kernels on an absent GPU: registers, spills and shared memory by kernel.

python -m recipes.bench.kernels [--arch sm80,sm90] [--calls t5-bfloat16-64,...] [--out FOLDER]

Needs PyTorch's build for CUDA, with Triton, but no GPU: `card_here.py` emulates one. Each call runs forward and
backward, at 2048 tokens and then at 3000, for which PyTorch generates code for any length. Triton and ptxas compile
what inductor would launch for the named target, and Triton's cuobjdump reads the binary. Nothing is launched, so there
are no results and no times.

Writes results/kernels.json and results/kernels.md.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_posswap.kernels.flex import (
    CHUNK_REGIONS,
    MASKED_REGIONS,
    REGIONS,
    ByDistance,
    Penalty,
    attend_by_regions,
    attend_read,
    attend_settled,
    past_blocks,
    shown_blocks,
)
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.format import said_by
from recipes.bench.card_here import CARDS, KIB, CompiledKernel, lowering

LENGTHS = {"2048 tokens": 2048, "any length": 3000}
"""In this order, because PyTorch generates dynamic-shape code for a second length."""


class Nothing:
    """A bias of zeros, for plain flex_attention."""

    def __getitem__(self, index: Any) -> float:
        return 0.0


@dataclass(frozen=True)
class Call:
    """A causal call of attention: two rows, 8 heads in 2 groups.

    Attributes:
        bias: "alibi"; "t5" for a learned bias by distance; "settled" for one that stays the same from 128 tokens on;
            "none" for the baseline; the first two also "masked", with a mask that is given. Or "regions" with rotations
            of their own: near and far, "regions chunked" by chunks, "regions masked" of a mask.
        dtype: of queries, keys and values.
        width: dimensions of a head.
    """

    bias: str
    dtype: str
    width: int

    @property
    def name(self) -> str:
        """The name in tables and options."""
        return f"{self.bias}-{self.dtype}-{self.width}"

    def run(self, length: int) -> None:
        """Run forward and backward at `length` tokens."""
        dtype = getattr(torch, self.dtype)
        shapes = (2, 8, length, self.width), (2, 2, length, self.width), (2, 2, length, self.width)
        query, key, value = (torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes)
        at = torch.arange(length).expand(2, -1)
        biases: dict[str, Any] = {
            "none": Nothing(),
            "alibi": Penalty(torch.empty(8), at, at),
            "t5": ByDistance(torch.empty(8, length, requires_grad=True), 0, at, at),
        }
        scaling = 1 / math.sqrt(self.width)
        if self.bias.startswith("regions"):
            output = _by_regions(self.bias, (query, key, value), scaling)
        elif self.bias == "settled":
            line = torch.empty(8, 129, requires_grad=True)
            output = attend_settled(query, key, value, line, scaling=scaling)
        else:
            name, _, masked = self.bias.partition(" ")
            shown = shown_blocks(torch.empty(2, 1, length, length, dtype=torch.bool)) if masked else None
            output = attend_read(query, key, value, biases[name], scaling=scaling, causal=True, shown=shown)
        output.sum().backward()


def _by_regions(name: str, tensors: tuple[Tensor, Tensor, Tensor], scaling: float) -> Tensor:
    query, key, value = tensors
    batch, _, length, _ = query.shape
    if name == "regions masked":
        shown = torch.empty(batch, 1, length, length, dtype=torch.bool)
        pairs = [(query, key), (2 * query, 2 * key)]
        return attend_by_regions(MASKED_REGIONS, pairs, value, [shown_blocks(shown)] * 2, scaling=scaling)
    size, bounds = (1024, ((0, 1), (1, 2), (2, None))) if name == "regions chunked" else (1, ((0, 512), (512, None)))
    blocks = [past_blocks(length, length, query.device, low, high, size=size) for low, high in bounds]
    pairs = [(n * query, n * key) for n in range(1, len(bounds) + 1)]
    return attend_by_regions(REGIONS if size == 1 else CHUNK_REGIONS, pairs, value, blocks, scaling=scaling)


DTYPES, WIDTHS = ("bfloat16", "float32"), (64, 128, 256)
BIASES = ("none", "alibi", "t5", "settled", "alibi masked", "t5 masked",
          "regions", "regions chunked", "regions masked")  # fmt: skip
CALLS = {call.name: call for call in (Call(b, d, w) for d in DTYPES for w in WIDTHS for b in BIASES)}
USUAL = [name for name, call in CALLS.items() if call.dtype == "bfloat16" and call.width <= 128]
"""The default calls, which compile in 20 minutes."""


def main(
    arch: Annotated[str, typer.Option(help="Of sm80 and sm90, with commas.")] = ",".join(CARDS),
    calls: Annotated[str, typer.Option(help="Of CALLS, by name, with commas.")] = ",".join(USUAL),
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Compile all, and fail if a kernel is refused or does not fit; rows that are not run again are kept."""
    if (reason := missing()) is not None:
        raise typer.BadParameter(reason)
    targets, names = _chosen(arch, CARDS), _chosen(calls, CALLS)
    file = out / "kernels.json"
    all_rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    new_rows: list[dict[str, Any]] = []
    for target in targets:
        for name in names:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                call_rows = pool.submit(compiled, target, name).result()
            new_rows += call_rows
            all_rows = sorted(
                [row for row in all_rows if (row["arch"], row["call"]) != (target, name)] + call_rows, key=_order
            )
            write_text(file, json.dumps(all_rows, indent=1) + "\n")
            write_text(out / "kernels.md", table(all_rows))
            typer.echo(f"{target} {name}: {len(call_rows)} kernels")
    typer.echo(table(new_rows))
    if any("refused" in row or not row["fits"] for row in new_rows):
        raise typer.Exit(1)


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return list(CARDS).index(row["arch"]), list(CALLS).index(row["call"])


def _chosen(option: str, known: dict[str, Any]) -> list[str]:
    names = option.split(",")
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(known)}")
    return names


def missing() -> str | None:
    """Return what this process lacks to compile for a GPU, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is no build for CUDA: pip install torch, from PyPI, on Linux"
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def compiled(target: str, name: str) -> list[dict[str, Any]]:
    """Return a row for each kernel of the call `name` on `target`; the process must not lower anything else."""
    rows: list[dict[str, Any]] = []
    header = {"arch": target, "call": name, "torch": torch.__version__, "triton": version("triton")}
    kernels: list[CompiledKernel] = []
    with lowering(CARDS[target], kernels):
        for length, tokens in LENGTHS.items():
            kernels.clear()
            try:
                CALLS[name].run(tokens)
            except Exception as error:  # any compiler error is a result
                rows.append({**header, "length": length, "refused": f"{type(error).__name__}: {said_by(error)}"})
            rows += [{**header, "length": length, **_read(kernel, CARDS[target].shared)} for kernel in kernels]
    return rows


def _read(kernel: CompiledKernel, limit: int) -> dict[str, Any]:
    """Return the resources of a kernel's binary, and whether its shared memory is within `limit`."""
    used = resources(kernel.cubin)
    shared = kernel.dynamic_shared + used["SHARED"]
    return {
        "kernel": kernel.name, "direction": kernel.direction, "config": kernel.config, "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"], "shared_bytes": shared, "fits": shared <= limit,
    }  # fmt: skip


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers and bytes of stack, local and static shared memory of a kernel's binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {key: int(number) for key, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", report)}
    if len(used) != 4:
        raise RuntimeError(f"expected REG, STACK, LOCAL and SHARED of one kernel from cuobjdump, got: {report}")
    return used


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown: the attention kernels, and the maxima over the small ones."""
    sections = [
        "# Kernels of a GPU that was not here",
        "Written by `python -m recipes.bench.kernels`, without a GPU: compiled for the target, read from the binary, "
        "never run. " + "; ".join(sorted({f"torch {row['torch']}, triton {row['triton']}" for row in rows})) + ".",
    ]
    for arch in dict.fromkeys(row["arch"] for row in rows):
        limit = CARDS[arch].shared // KIB
        lines = [_line(row) for row in rows if row["arch"] == arch and ("refused" in row or "_tem_" in row["kernel"])]
        sections += [f"## {arch}: {limit} KiB of shared memory a block", "\n".join([*_HEAD, *lines])]
        small = [row for row in rows if row["arch"] == arch and "_tem_" not in row.get("kernel", "_tem_")]
        if small:
            most = {key: max(row[key] for row in small) for key in ("registers", "spilled_bytes", "shared_bytes")}
            sections.append(f"In addition, {len(small)} small kernels: at most {most['registers']} registers, "
                         f"{most['spilled_bytes']} bytes spilled, {most['shared_bytes']} bytes shared.")  # fmt: skip
    return "\n\n".join(sections) + "\n"


_COLUMNS = ("call", "code for", "kernel", "warps, stages", "registers", "spilled, bytes", "shared, KiB", "fits")
_HEAD = (f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|")


def _line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"| {row['call']} | {row['length']} | REFUSED: {row['refused']} | | | | | no |"
    config = f"{row['config']['num_warps']}, {row['config']['num_stages']}"
    cells = [row["call"], row["length"], row["direction"], config, row["registers"], row["spilled_bytes"],
             f"{row['shared_bytes'] / KIB:.1f}", "yes" if row["fits"] else "no"]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    typer.run(main)
