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


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: it comes with torch for GPUs")
def test_it_is_the_rotation_bit_by_bit_in_every_memory_layout() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["288"]
