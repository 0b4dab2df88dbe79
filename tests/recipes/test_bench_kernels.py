"""Kernels of a GPU that is not here: compiled, read and interpreted, where PyTorch and Triton can."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from recipes.bench import interpreted, kernels


def kernels_by(*arguments: object, of: Any = kernels) -> Result:
    app = typer.Typer()
    app.command()(of.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("of", [kernels, interpreted])
@pytest.mark.skipif(kernels.missing() is None, reason="this PyTorch compiles for a GPU")
def test_without_a_compiler_for_gpus_it_says_so(of: Any, tmp_path: Path) -> None:
    done = kernels_by("--out", tmp_path, of=of)
    assert done.exit_code == 2
    assert "pip install" in done.output
    assert list(tmp_path.iterdir()) == []


compiles = pytest.mark.skipif(kernels.missing() is not None, reason=f"cannot compile for a GPU: {kernels.missing()}")


@compiles
@pytest.mark.slow
def test_kernels_are_compiled_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    done = kernels_by("--arch", "sm80", "--calls", "t5-bfloat16-64", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "kernels.json").read_text())
    large = [row for row in rows if "_tem_" in row["kernel"]]
    found = {(row["length"], row["direction"]) for row in large}
    assert found == {(length, way) for length in kernels.LENGTHS for way in ("forward", "backward")}
    for row in large:  # a block of queries, in bfloat16, lies in shared memory, and threads have 255 registers at most
        assert row["config"]["BLOCK_M" if row["direction"] == "forward" else "BLOCK_M1"] * 64 * 2 <= row["shared_bytes"]
        assert 32 <= row["registers"] <= 255
        assert row["fits"] is (row["shared_bytes"] <= 163 * 1024)
    assert (tmp_path / "kernels.md").read_text() in done.output


@compiles
@pytest.mark.slow
def test_a_gpus_kernels_interpreted_equal_the_formula(tmp_path: Path) -> None:
    """At 100 tokens, where grouped heads had no kernel while PyTorch could choose the one for decoding."""
    done = kernels_by("--out", tmp_path, of=interpreted)
    assert done.exit_code == 0, done.output
    alibi, t5 = json.loads((tmp_path / "interpreted.json").read_text())
    grads = {"query", "key", "value"}
    for row, names in ((alibi, {"output"} | grads), (t5, {"output", "line"} | grads)):
        assert row.keys() - {"bias", "torch", "triton"} == names
        assert all(row[name] < 1e-5 for name in names)


PTX = """
.version 7.8
.target sm_80
.address_size 64
.shared .align 4 .b8 held[{shared}];
.visible .entry kernel(.param .u64 to, .param .u32 at) {{
    .local .align 4 .b8 own[{local}];
    .reg .u64 %d<4>; .reg .u32 %r<4>;
    ld.param.u64 %d1, [to]; ld.param.u32 %r1, [at];
    mov.u32 %r2, held; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], %r1; ld.shared.u32 %r2, [held];
    mov.u32 %r3, own; add.u32 %r3, %r3, %r1; st.local.u32 [%r3], %r2; ld.local.u32 %r3, [own];
    st.global.u32 [%d1], %r3; ret;
}}
"""


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("shared", "local"), [(4096, 128), (512, 64)])
def test_a_binary_says_what_its_assembly_asks_for(shared: int, local: int, tmp_path: Path) -> None:
    from triton import knobs

    (tmp_path / "a.ptx").write_text(PTX.format(shared=shared, local=local))
    command = [knobs.nvidia.ptxas.path, "--gpu-name=sm_80", tmp_path / "a.ptx", "-o", tmp_path / "a.cubin"]
    subprocess.run(command, check=True)
    used = kernels.resources((tmp_path / "a.cubin").read_bytes())
    assert (used["SHARED"], used["STACK"] + used["LOCAL"]) == (shared, local)
    assert 1 <= used["REG"] <= 32


def test_kernels_that_do_not_fit_or_are_refused_are_told() -> None:
    row = {
        "arch": "sm90", "call": "t5-bfloat16-64", "torch": "2", "triton": "3", "length": "any length",
        "kernel": "triton_tem_x", "direction": "backward", "config": {"num_warps": 8, "num_stages": 2},
        "registers": 255, "spilled_bytes": 12, "shared_bytes": 300 * 1024, "fits": False,
    }  # fmt: skip
    text = kernels.table([row, row | {"kernel": "triton_poi_x", "fits": True}])
    assert "## sm90: 227 KiB of shared memory a block" in text
    assert "| t5-bfloat16-64 | any length | backward | 8, 2 | 255 | 12 | 300.0 | no |" in text
    assert "In addition, 1 small kernels" in text
    refused = {key: row[key] for key in ("arch", "call", "torch", "triton", "length")} | {"refused": "KeyError: no"}
    assert "| t5-bfloat16-64 | any length | REFUSED: KeyError: no |" in kernels.table([refused])


def test_an_unknown_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "missing", lambda: None)
    done = kernels_by("--calls", "t5")
    assert done.exit_code == 2
    assert "t5: there are none-bfloat16-64" in " ".join(done.output.replace("│", " ").split())
