"""What a dry run predicts against what Linux measures of the same training, really run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from hf_posswap.training.config import make_recipe
from hf_posswap.training.dryrun import dry_run
from tests.training.dryrun import reality_child

ROOT = Path(__file__).resolve().parents[3]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "rope", {}),
    ("gpt2", "alibi", {"objective": {"chunk": 0}}),
    ("gpt2", "rope", {"data": {"packing": "documents"}}),
    ("llama", "yarn", {}),
    ("llama", "yarn", {"training": {"gradient_checkpointing": True, "per_device_train_batch_size": 8}}),
    ("llama", "yarn", {"training": {"gradient_accumulation_steps": 2}}),
    ("llama", "self_extend", {"peft": {"peft_type": "LORA"}}),
]


def _config(folder: Path, kind: str) -> Path:
    shape = {"vocab_size": 6000, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config: Any = GPT2Config(n_embd=256, n_layer=4, n_head=4, n_positions=256, **shape, **none)
        config.architectures = ["GPT2LMHeadModel"]
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = LlamaConfig(max_position_embeddings=256, num_key_value_heads=2, **sizes, **shape)
        config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / kind)
    return folder / kind


def _values(folder: Path, kind: str, scheme: str, more: dict[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = {
        "model": {"name": str(_config(folder, kind))},
        "swap": {"scheme": scheme, "max_length": 1024},
        "data": {"length": 512},
        "objective": {"chunk": 256},
        "training": {
            "max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": "none",
            "logging_strategy": "no", "use_cpu": True,
        },
    }  # fmt: skip
    return held | {key: held.get(key, {}) | value for key, value in more.items()}


def _measured(asked: list[dict[str, Any]], launcher: list[str]) -> list[int]:
    # glibc keeps what was freed, and hides the peaks, unless large blocks go back to the system
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, reality_child.__file__, json.dumps(asked)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[int] = json.loads(run.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux keeps a high-water mark")
def test_the_peak_is_within_a_tenth_of_what_is_held(tmp_path: Path) -> None:
    asked = [_values(tmp_path, *case) for case in CASES]
    measured = _measured(asked, [])
    predicted = [dry_run(make_recipe(values)).predictions[0].peak for values in asked]
    ratios = [round(mine / held, 3) for mine, held in zip(predicted, measured, strict=True)]
    found = {str(case): (ratio, held) for case, ratio, held in zip(CASES, ratios, measured, strict=True)}
    assert {case: ratio for case, ratio in found.items() if not 0.9 <= ratio[0] <= 1.1} == {}, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux keeps a high-water mark")
def test_the_peak_of_two_processes_under_fsdp2_is_within_a_tenth(tmp_path: Path) -> None:
    file, text = tmp_path / "cpu.yaml", (ROOT / "recipes" / "accelerate" / "fsdp2.yaml").read_text()
    for old, new in {"bf16": '"no"', "num_processes: 8": "num_processes: 2", "use_cpu: false": "use_cpu: true"}.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    values = _values(tmp_path, "llama", "yarn", {})
    (measured,) = _measured([values], ["-m", "accelerate.commands.launch", "--config_file", str(file)])
    assert 0.9 <= dry_run(make_recipe(values), accelerate=file).predictions[0].peak / measured <= 1.1
