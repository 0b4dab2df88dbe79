"""LLaMA-Factory trains a native swap as the stock checkpoint that it is.

LLaMA-Factory 0.9.5 caps transformers below the range of this package, so it runs in a Python of its own:
POSSWAP_LLAMAFACTORY_PYTHON names one that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import hf_posswap
from hf_posswap.errors import PosswapError
from hf_posswap.text.tokens import load_tokenizer
from tests.integrations.test_axolotl import write_run

PYTHON = os.environ.get("POSSWAP_LLAMAFACTORY_PYTHON", "")
SKIP = "POSSWAP_LLAMAFACTORY_PYTHON names no Python with LLaMA-Factory: no training by it is tested"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=SKIP)]
TRAIN = "from llamafactory.train.tuner import run_exp; run_exp()"


def run_llamafactory(folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Swap a tiny Llama to YaRN, save it, and have LLaMA-Factory train it on a CPU."""
    write_run(folder)
    model = hf_posswap.load(folder / "base")
    words = load_tokenizer(folder / "base", instead="")
    hf_posswap.save(hf_posswap.patch_model(model, "yarn", factor=4), folder / "longer", tokenizer=words)
    rows = [{"text": f"{number} ships at sea and on the river. " * 12} for number in range(16)]
    (folder / "texts.json").write_text(json.dumps(rows))
    columns = {"file_name": "texts.json", "columns": {"prompt": "text"}}
    (folder / "dataset_info.json").write_text(json.dumps({"texts": columns}))
    values: dict[str, Any] = {
        "model_name_or_path": str(folder / "longer"),
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(folder),
        "dataset": "texts",
        "template": "default",
        "cutoff_len": 256,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "flash_attn": "sdpa",
        "preprocessing_num_workers": 1,
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(values | changes))
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DISABLE_VERSION_CHECK": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [PYTHON, "-c", TRAIN, str(folder / "train.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=folder,
        env=os.environ | quiet,
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj"}],
    ids=["full", "lora"],
)
def test_it_trains_a_native_swap_and_leaves_it(changes: dict[str, Any], tmp_path: Path) -> None:
    run = run_llamafactory(tmp_path, **changes)
    assert run.returncode == 0, run.stderr[-3000:]
    trained = hf_posswap.load(tmp_path / "out")
    plan = hf_posswap.swap_plan(trained)
    assert (plan.scheme.name, plan.max_length) == ("yarn", 256)
    assert hf_posswap.verify_swap(trained).checks
    ids = torch.arange(200)[None]
    with torch.no_grad():
        found, before = trained(ids).logits, hf_posswap.load(tmp_path / "longer")(ids).logits
        assert not torch.equal(found, before)
        if not changes:
            assert torch.equal(found, AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits)


def test_its_own_rope_scaling_stops_it_or_is_found(tmp_path: Path) -> None:
    run = run_llamafactory(tmp_path, rope_scaling="linear", cutoff_len=512)
    if run.returncode == 0:
        with pytest.raises(PosswapError):
            hf_posswap.load(tmp_path / "out")
    else:
        assert "configure_rope" in run.stderr
