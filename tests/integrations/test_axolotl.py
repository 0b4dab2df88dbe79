"""axolotl's plugin: its settings and hooks anywhere, and a training by axolotl itself where it is installed.

To run all of it: a virtual environment with axolotl (it pins its own transformers), this package and pytest.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posswap
from hf_posswap import PosswapCallback, swap_plan
from hf_posswap.errors import ConfigError, DataError, PositionRangeError, SwapVerificationError
from hf_posswap.integrations.axolotl import PosswapPlugin, fitting_rows, settings_of
from hf_posswap.patching.record.training import training_of
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.trainer_proof import model_inside
from tests.training.engine_runs import cached_tokenizers, write_model, write_texts
from tests.training.test_trainer_callback import rows, trainer
from tests.training.tiny_models import tiny

ROOT = Path(__file__).resolve().parents[2]
AXOLOTL = find_spec("axolotl") is not None
WITH_AXOLOTL = pytest.mark.skipif(not AXOLOTL, reason="axolotl is not installed: no training by it is tested")
HOOKS = {  # of axolotl 0.19.0, axolotl/integrations/base.py, class BasePlugin
    "get_input_args": ["self"],
    "register": ["self", "cfg"],
    "post_model_build": ["self", "cfg", "model"],
    "add_callbacks_pre_trainer": ["self", "cfg", "model"],
}
YARN: dict[str, Any] = {"posswap": {"scheme": "yarn:factor=4", "max_length": 256}, "sequence_len": 256}


def test_the_hooks_are_those_that_axolotl_calls() -> None:
    own = {name for name in vars(PosswapPlugin) if not name.startswith("_")}
    assert own == HOOKS.keys()
    for name, parameters in HOOKS.items():
        assert list(inspect.signature(getattr(PosswapPlugin, name)).parameters) == parameters
    if AXOLOTL:
        from axolotl.integrations.base import BasePlugin

        assert issubclass(PosswapPlugin, BasePlugin)
        real = {name: list(inspect.signature(getattr(BasePlugin, name)).parameters) for name in HOOKS}
        assert real == HOOKS


@pytest.mark.parametrize(("scheme", "kind"), [("yarn:factor=4", "llama"), ("alibi", "gpt2"), ("kerple", "llama")])
def test_hooks_in_the_order_of_axolotl_train_a_swapped_model(scheme: str, kind: str, tmp_path: Path) -> None:
    cfg = {"posswap": {"scheme": scheme, "max_length": 256, "max_first_loss": 20.0}, "sequence_len": 128}
    plugin, model = PosswapPlugin(), tiny(kind)
    plugin.register(cfg)
    plugin.post_model_build(cfg, model)
    (proof,) = plugin.add_callbacks_pre_trainer(cfg, model)
    assert isinstance(proof, PosswapCallback)
    assert proof.max_first_loss == 20.0
    trainer(model, tmp_path, proof).train()
    assert proof.verification is not None
    assert swap_plan(hf_posswap.load(tmp_path / "checkpoint-4")).max_length == 256


def test_a_base_that_carries_the_swap_is_left_as_it_is_and_another_one_is_refused(tmp_path: Path) -> None:
    model = hf_posswap.patch_model(tiny("llama"), "yarn", factor=4)
    before = swap_plan(model)
    plugin = PosswapPlugin()
    plugin.post_model_build(YARN, model)
    assert swap_plan(model) == before
    other = hf_posswap.patch_model(tiny("llama"), "linear", factor=4)
    with pytest.raises(
        ConfigError, match=r"scheme is 'yarn:factor=4', and my/base already carries linear.*before its swa"
    ):
        plugin.post_model_build(YARN | {"base_model": "my/base"}, other)
    with pytest.raises(SwapVerificationError, match="it carries linear"):
        trainer(other, tmp_path, *plugin.add_callbacks_pre_trainer(YARN, other)).train()


def test_a_fit_of_a_base_that_is_swapped_is_refused(tmp_path: Path) -> None:
    """Its callback proves no scheme, since a fit gives each layer its own: the base was trained as it was."""
    base, texts = hf_posswap.patch_model(tiny("gpt2"), "alibi", max_length=256), write_texts(tmp_path / "texts")
    for scheme in ("kerple", "alibi"):
        section = {"scheme": scheme, "max_length": 256, "fit": 4, "fit_text": str(texts)}
        with pytest.raises(ConfigError, match=r"posswap.fit is 4, and my/base already carries alibi.* fit_text out"):
            PosswapPlugin().post_model_build({"posswap": section, "base_model": "my/base"}, base)


def test_a_fit_reads_by_the_tokenizer_of_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_tokenizers(tmp_path / "hub", monkeypatch)
    texts = write_texts(tmp_path / "texts")
    settings = settings_of({"posswap": {"scheme": "alibi", "fit": 2, "fit_text": str(texts)}})
    bases = [{"base_model": "org/model"}, {"base_model": "org/model", "revision_of_model": "v1"}]
    newest, first = (fitting_rows(settings, cfg, 40)[0].tolist() for cfg in bases)
    assert newest[1:] != first[1:]


@pytest.mark.parametrize("scheme", ["alibi", "rope:partial=0.5"])
def test_a_fit_starts_nearer_to_the_table(scheme: str, tmp_path: Path) -> None:
    base, texts = write_model(tmp_path / "base"), write_texts(tmp_path / "texts")
    section = {"scheme": scheme, "max_length": 256, "fit": 4, "fit_text": str(texts)}
    fitted, alone = tiny("gpt2"), hf_posswap.patch_model(tiny("gpt2"), scheme, max_length=256)
    native = tiny("gpt2")
    plugin = PosswapPlugin()
    plugin.post_model_build({"posswap": section, "base_model": str(base)}, fitted)
    ids = torch.tensor([row["input_ids"] for row in rows(4)])
    with torch.no_grad():
        gaps = [float((one(ids).logits - native(ids).logits).abs().mean()) for one in (fitted, alone)]
    assert gaps[0] < gaps[1]
    trainer(fitted, tmp_path / "run", *plugin.add_callbacks_pre_trainer({"posswap": section}, fitted)).train()
    with pytest.raises(DataError, match=r"asks for 40 texts, and .* has 8"):
        plugin.post_model_build({"posswap": section | {"fit": 40}, "base_model": str(base)}, tiny("gpt2"))
    if scheme != "alibi":
        with pytest.raises(ConfigError, match="which an adapter does not hold"):
            plugin.post_model_build({"posswap": section, "base_model": str(base), "adapter": "lora"}, tiny("gpt2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"posswap": None}, r"posswap: is missing: give at least its scheme"),
        ({"posswap": {"max_length": 8}}, r"posswap.scheme: Field required"),
        ({"posswap": {"scheme": "yarm"}}, r"unknown scheme 'yarm'\. Did you mean 'yarn'"),
        ({"posswap": {"scheme": "yarn", "factor": 4}}, r"posswap.factor: Extra inputs are not permitted, got 4"),
        (
            {"posswap": {"scheme": "yarn", "max_length": 0}},
            r"max_length: Input should be greater than 0, got 0",
        ),
        ({"posswap": {"scheme": "alibi", "fit": 32}}, r"fit .* and posswap.fit_text .* go together"),
        ({"overrides_of_model_config": {"rope_scaling": {}}}, r"overrides_of_model_config sets rope_scaling.* twice"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PosswapPlugin().register(YARN | changes)


def test_a_longer_sequence_len_than_the_swap_is_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sequence_len is 512, and the swap to yarn.* is for 256"):
        PosswapPlugin().post_model_build(YARN | {"sequence_len": 512}, tiny("llama"))


def write_run(folder: Path, **changes: Any) -> Path:
    """Write a tiny Llama with its tokenizer, texts, and a file for axolotl that trains it on a CPU; return the file."""
    words = byte_tokenizer()
    words.pad_token = words.eos_token
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=64, **ends, **size))
    hf_posswap.save(model, folder / "base", tokenizer=words)
    lines = [json.dumps({"text": f"{number} ships at sea and on the river. " * 12}) for number in range(16)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    values: dict[str, Any] = {
        "base_model": str(folder / "base"),
        "plugins": ["hf_posswap.integrations.axolotl.PosswapPlugin"],
        "posswap": {"scheme": "yarn:factor=4", "max_length": 256},
        "datasets": [{"path": str(folder / "data.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "sequence_len": 256,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "output_dir": str(folder / "out"),
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "learning_rate": 1e-3,
        "attn_implementation": "sdpa",
        "val_set_size": 0,
        **{name: False for name in ("bf16", "fp16", "tf32")},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def axolotl_train(path: Path) -> subprocess.CompletedProcess[str]:
    """Run `axolotl train` on the file at `path` in a process of its own, offline."""
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=path.parent,
        env=os.environ | quiet | {"PYTHONPATH": str(ROOT), "HF_HOME": str(path.parent / "hub")},
    )


LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}


@WITH_AXOLOTL
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "scheme"),
    [({}, "yarn"), (LORA, "yarn"), ({"posswap": {"scheme": "alibi", "max_length": 256}}, "alibi")],
    ids=["full", "lora", "alibi"],
)
def test_axolotl_trains_proves_and_saves_a_swapped_model(changes: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, **changes)
    run = axolotl_train(path)
    assert run.returncode == 0, run.stderr[-3000:]
    for folder, steps in [("checkpoint-2", 2), ("checkpoint-4", 4), (".", 4)]:
        model = hf_posswap.load(tmp_path / "out" / folder)
        base = model_inside(model)
        training = training_of(base.config)
        assert swap_plan(model).scheme.name == scheme
        assert swap_plan(model).max_length == 256
        assert training is not None
        assert (training.steps, training.what) == (steps, "lora" if "adapter" in changes else "full")
        assert training.software["axolotl"]
        assert training.data is not None
    further = {"max_steps": 6, "resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-4")}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | further))
    run = axolotl_train(path)
    assert run.returncode == 0, run.stderr[-3000:]
    training = training_of(model_inside(hf_posswap.load(tmp_path / "out" / "checkpoint-6")).config)
    assert training is not None
    assert training.steps == 6


@WITH_AXOLOTL
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"posswap": {"scheme": "yarn:factor=4", "max_first_loss": 0.01}}, "above 0.010 (max_first_loss)"),
        ({"posswap": None}, "posswap: is missing"),
    ],
    ids=["first loss", "no section"],
)
def test_axolotl_stops_where_something_is_wrong(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = axolotl_train(write_run(tmp_path, **changes))
    assert run.returncode != 0
    assert message in run.stderr + run.stdout
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_the_callback_of_the_plugin_refuses_longer_rows(tmp_path: Path) -> None:
    plugin, model = PosswapPlugin(), tiny("llama")
    plugin.post_model_build(YARN, model)
    callbacks = plugin.add_callbacks_pre_trainer(YARN, model)
    with pytest.raises(PositionRangeError, match="sequence_len of axolotl"):
        trainer(model, tmp_path, *callbacks, data=rows(length=257)).train()
