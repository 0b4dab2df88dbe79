"""What our calls of flex_attention become on a GPU that is not here: registers, spills and shared memory by kernel.

python -m recipes.bench.kernels [--arch sm80,sm90] [--calls t5-bfloat16-64,...] [--out FOLDER]

Wants PyTorch's build for CUDA, with Triton, and no GPU: `card_here.py` says what is given in place of one. Each call
runs forward and backward, at 2048 tokens and then at 3000, of which PyTorch makes code for any length. Triton and ptxas
compile what inductor would launch for the named target, and cuobjdump, which comes with Triton, reads the binary.
Nothing is launched: no result and no time is seen here.

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

from hf_posswap.kernels.flex import ByDistance, Penalty, attend_read
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.format import said_by
from recipes.bench.card_here import CARDS, KIB, Made, lowering

LENGTHS = {"2048 tokens": 2048, "any length": 3000}
"""In this order: of a second length, PyTorch makes code for any."""


class Nothing:
    """Reads as a bias of zeros, for flex_attention by itself."""

    def __getitem__(self, index: Any) -> float:
        return 0.0


@dataclass(frozen=True)
class Call:
    """A call of `attend_read`, causal: two rows, 8 heads in 2 groups.

    Attributes:
        bias: "alibi"; "t5" for a line by distance, which is learned; "none" for what they are held against.
        dtype: of queries, keys and values.
        width: dimensions of a head.
    """

    bias: str
    dtype: str
    width: int

    @property
    def name(self) -> str:
        """For tables, and to choose it by."""
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
        found = attend_read(query, key, value, biases[self.bias], scaling=scaling, causal=True)
        found.sum().backward()


DTYPES, WIDTHS, BIASES = ("bfloat16", "float32"), (64, 128, 256), ("none", "alibi", "t5")
CALLS = {call.name: call for call in (Call(b, d, w) for d in DTYPES for w in WIDTHS for b in BIASES)}
USUAL = [name for name, call in CALLS.items() if call.dtype == "bfloat16" and call.width <= 128]
"""What is compiled unless other calls are asked for, in 20 minutes."""


def main(
    arch: Annotated[str, typer.Option(help="Of sm80 and sm90, with commas.")] = ",".join(CARDS),
    calls: Annotated[str, typer.Option(help="Of CALLS, by name, with commas.")] = ",".join(USUAL),
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Compile all, and fail where a kernel is refused or does not fit; rows that are not run again stay as they are."""
    if (reason := missing()) is not None:
        raise typer.BadParameter(reason)
    targets, names = _chosen(arch, CARDS), _chosen(calls, CALLS)
    file = out / "kernels.json"
    held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    done: list[dict[str, Any]] = []
    for target in targets:
        for name in names:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                found = fresh.submit(compiled, target, name).result()
            done += found
            held = sorted([row for row in held if _place(row) != (target, name)] + found, key=_order)
            write_text(file, json.dumps(held, indent=1) + "\n")
            write_text(out / "kernels.md", table(held))
            typer.echo(f"{target} {name}: {len(found)} kernels")
    typer.echo(table(done))
    if any("refused" in row or not row["fits"] for row in done):
        raise typer.Exit(1)


def _place(row: dict[str, Any]) -> tuple[str, str]:
    return row["arch"], row["call"]


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return list(CARDS).index(row["arch"]), list(CALLS).index(row["call"])


def _chosen(said: str, known: dict[str, Any]) -> list[str]:
    names = said.split(",")
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(known)}")
    return names


def missing() -> str | None:
    """Return what this process lacks to compile for a GPU; None: nothing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is no build for CUDA: pip install torch, from PyPI, on Linux"
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def compiled(target: str, name: str) -> list[dict[str, Any]]:
    """Return a row for each kernel of the call `name` on `target`, in a process that lowers nothing else."""
    rows: list[dict[str, Any]] = []
    about = {"arch": target, "call": name, "torch": torch.__version__, "triton": version("triton")}
    made: list[Made] = []
    with lowering(CARDS[target], made):
        for length, tokens in LENGTHS.items():
            made.clear()
            try:
                CALLS[name].run(tokens)
            except Exception as problem:  # whatever the compiler raises is what this is to tell
                rows.append({**about, "length": length, "refused": f"{type(problem).__name__}: {said_by(problem)}"})
            rows += [{**about, "length": length, **_read(one, CARDS[target].shared)} for one in made]
    return rows


def _read(made: Made, limit: int) -> dict[str, Any]:
    """Return what the binary of a kernel says, and whether its shared memory is within `limit`."""
    used = resources(made.cubin)
    shared = made.dynamic_shared + used["SHARED"]
    return {
        "kernel": made.name, "direction": made.direction, "config": made.config, "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"], "shared_bytes": shared, "fits": shared <= limit,
    }  # fmt: skip


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers and bytes of stack, local and static shared memory that a binary of one kernel asks for."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {key: int(number) for key, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", said)}
    if len(used) != 4:
        raise RuntimeError(f"cuobjdump should have told REG, STACK, LOCAL and SHARED of one kernel, and said: {said}")
    return used


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown: attention's kernels; of the small ones beside them the worst."""
    parts = [
        "# Kernels of a GPU that was not here",
        "Written by `python -m recipes.bench.kernels`, without a GPU: compiled for the target, read from the binary, "
        "never run. " + "; ".join(sorted({f"torch {row['torch']}, triton {row['triton']}" for row in rows})) + ".",
    ]
    for arch in dict.fromkeys(row["arch"] for row in rows):
        limit = CARDS[arch].shared // KIB
        lines = [_line(row) for row in rows if row["arch"] == arch and ("refused" in row or "_tem_" in row["kernel"])]
        parts += [f"## {arch}: {limit} KiB of shared memory a block", "\n".join([*_HEAD, *lines])]
        small = [row for row in rows if row["arch"] == arch and "_tem_" not in row.get("kernel", "_tem_")]
        if small:
            most = {key: max(row[key] for row in small) for key in ("registers", "spilled_bytes", "shared_bytes")}
            parts.append(f"Beside them {len(small)} small ones: at most {most['registers']} registers, "
                         f"{most['spilled_bytes']} bytes spilled, {most['shared_bytes']} bytes shared.")  # fmt: skip
    return "\n\n".join(parts) + "\n"


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
