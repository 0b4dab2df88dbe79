"""What compat knows of accelerate launch, against the launcher itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_posswap.compat import accelerate_launch
from hf_posswap.compat.accelerate_state import is_connected

FILES = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"


def test_launch_arguments() -> None:
    arguments = accelerate_launch.launch_arguments(FILES / "fsdp2.yaml", None)
    assert (arguments.use_fsdp, arguments.num_processes, arguments.mixed_precision) == (True, 8, "bf16")
    assert accelerate_launch.launch_arguments(FILES / "ddp.yaml", 3).num_processes == 3
    assert accelerate_launch.launch_arguments(FILES / "deepspeed-zero3.yaml", None).use_deepspeed


@pytest.mark.slow
def test_launch_environment(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    file = FILES / "cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = accelerate_launch.launch_environment(accelerate_launch.launch_arguments(file, None))
    assert {name for name in told if f'"{name}": "{told[name]}"' not in done.stdout} == set()
    sharded = accelerate_launch.launch_environment(accelerate_launch.launch_arguments(FILES / "fsdp2.yaml", 2))
    assert (sharded["ACCELERATE_USE_FSDP"], sharded["FSDP_VERSION"]) == ("true", "2")


def test_no_launch() -> None:
    from accelerate import Accelerator

    known = Accelerator(cpu=True)
    with accelerate_launch.no_launch():
        assert not is_connected()
        assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    assert is_connected()
    assert (known.mixed_precision, Accelerator().mixed_precision) == ("no", "no")
