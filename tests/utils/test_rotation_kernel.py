"""The GPU's kernel of the rotation, run by Triton's interpreter on a CPU, beside PyTorch's operators."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CODE = """
import contextlib, itertools, torch
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
from hf_posswap.rope_math import LAYOUTS, _joined
from hf_posswap.utils.rotation_kernel import rotated

def fused(batch, heads, tokens, width):
    return torch.randn(batch, tokens, 3, heads, width).unbind(2)[1].transpose(1, 2)

LAID = {
    "contiguous": torch.randn,
    "by token": lambda b, h, q, d: torch.randn(b, q, h, d).transpose(1, 2),
    "a part of a fused projection": fused,
}
torch.manual_seed(0)
shapes = (2, 3, 37, 16, 16), (1, 2, 5, 24, 12), (2, 2, 70, 10, 6), (1, 1, 0, 8, 8)
dtypes = torch.float32, torch.float16, torch.bfloat16
cases = 0
for dtype, (b, h, q, d, r), layout, laid in itertools.product(dtypes, shapes, LAYOUTS, LAID):
    x = LAID[laid](b, h, q, d).to(dtype)
    for shape in ((b, 1, q), (1, 1, q), (b, 1, 1), (b, h, q)):
        cos, sin = (torch.randn(*shape[:2], shape[2] + 9, r // 2)[:, :, 4 : 4 + shape[2]] for _ in range(2))
        found, expected = rotated(x, cos, sin, interleaved=layout == "interleaved"), _joined(x, cos, sin, layout)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        # the interpreter rounds to bfloat16 by cutting
        near = torch.equal(found, expected) if dtype != torch.bfloat16 else torch.allclose(
            found.float(), expected.float(), rtol=2**-7, atol=1e-6
        )
        assert near, (dtype, layout, laid, shape)
        cases += 1
print(cases)
"""


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_posswap.utils.rotation_kernel import _kernel

names = _kernel().arg_names
for interleaved, passed, dtype in ((False, 0, "*bf16"), (True, 16, "*fp32")):
    constants = dict(HALF=32, PAIRS=32, PASSED=passed, PASSED_WIDTH=16, INTERLEAVED=interleaved, TOKENS=64)
    types = {"x": dtype, "out": dtype, "cos": "*fp32", "sin": "*fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    source = ASTSource(_kernel(), signature, constexprs={(names.index(name),): constants[name] for name in constants})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    assert "fma" not in made.asm["ptx"]
"""
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: it comes with torch for GPUs"
)


@needs_triton
def test_it_is_the_rotation_bit_by_bit_in_every_memory_layout() -> None:
    assert run(CODE, TRITON_INTERPRET="1").split() == ["288"]


@needs_triton
def test_it_compiles_for_a_gpu_without_fusing_products_and_sums() -> None:
    """The interpreter runs what the compiler refuses."""
    run(COMPILED)


def run(code: str, **environment: str) -> str:
    """Return what a fresh process prints: Triton either interprets or compiles in a process."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
