"""`posswap patch`: what it saves is what the library makes; what it cannot do leaves everything as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)
from typer.testing import CliRunner, Result

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.testing.tiny import tiny_model
from tests.cli.conftest import SPREAD, Posswap, says

IDS = torch.arange(40)[None] % 61  # longer than GPT-2's table of 16


def patch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["patch", *map(str, arguments)])


def test_the_saved_model_is_the_swapped_one(posswap: Posswap, gpt2: Path, tmp_path: Path) -> None:
    run = posswap("patch", gpt2, "rope", "--max-length", "64", "-o", tmp_path / "new" / "out", "--json")
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    expected = hf_posswap.load(gpt2)
    plan = hf_posswap.swap_plan(hf_posswap.patch_model(expected, "rope", max_length=64))
    assert said["plan"] == json.loads(json.dumps(plan.to_dict()))
    assert said["saved"] == {"folder": str((tmp_path / "new" / "out").resolve()), "tokenizer": False}
    assert set(said["verification"]) >= {"edits"}
    saved = hf_posswap.load(tmp_path / "new" / "out")
    assert saved.dtype == torch.bfloat16
    torch.testing.assert_close(saved(IDS).logits, expected(IDS).logits, rtol=0, atol=0)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_the_table_is_centred_in_full_precision_and_saved_in_the_models_own(gpt2: Path, tmp_path: Path) -> None:
    result = patch(gpt2, "rope", "--max-length", "64", "--centre", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    expected = hf_posswap.load(gpt2, dtype=torch.float32)
    hf_posswap.centre_table(expected)
    hf_posswap.patch_model(expected.to(torch.bfloat16), "rope", max_length=64)
    saved = hf_posswap.load(tmp_path / "out")
    assert saved.dtype == torch.bfloat16
    torch.testing.assert_close(saved(IDS).logits, expected(IDS).logits, rtol=0, atol=0)


def test_a_table_that_is_not_there_is_not_centred(llama: Path, tmp_path: Path) -> None:
    result = patch(llama, "linear:factor=2", "--centre", "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "LlamaForCausalLM has none: there is no mean to keep." in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_native_swap_loads_without_the_plugin(llama: Path, tmp_path: Path) -> None:
    result = patch(llama, "linear:factor=2", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert says(result.stdout, "stock transformers runs the saved checkpoint")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "linear"
    assert config["model_type"] == "llama"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits.shape == (1, 40, 61)


def test_the_tokenizer_comes_along_and_no_longer_cuts_at_the_old_length(bert: Path, tmp_path: Path) -> None:
    result = patch(bert, "alibi", "--max-length", "128", "-o", tmp_path / "out", "--json")
    assert json.loads(result.stdout)["saved"]["tokenizer"] is True
    shown = patch(bert, "alibi", "--max-length", "128", "-o", tmp_path / "shown")
    assert says(shown.stdout, "shown, with its tokenizer.")
    old, new = AutoTokenizer.from_pretrained(bert), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert new("one two three").input_ids == old("one two three").input_ids
    assert (old.model_max_length, new.model_max_length) == (32, 128)
    assert len(new("one " * 200, truncation=True).input_ids) == 128


def test_the_image_processor_comes_along(tmp_path: Path) -> None:
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    result = patch(tmp_path / "vit", "rope_2d", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert says(result.stdout, "with its ViTImageProcessor")
    image = torch.randint(256, (3, 40, 40), dtype=torch.uint8).numpy()
    old, new = (ViTImageProcessorPil.from_pretrained(tmp_path / name) for name in ("vit", "out"))
    assert (new(image).pixel_values[0] == old(image).pixel_values[0]).all()


def test_no_tokenizer_on_request(bert: Path, tmp_path: Path) -> None:
    result = patch(bert, "alibi", "-o", tmp_path / "out", "--no-tokenizer")
    assert says(result.stdout, "without a tokenizer")
    assert not list((tmp_path / "out").glob("token*"))


def test_a_broken_tokenizer_is_one_line(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{broken")
    result = patch(tmp_path / "in", "alibi", "-o", tmp_path / "out")
    assert_refused(result, 4, "--no-tokenizer saves the model alone", tmp_path / "out")


def assert_refused(result: Result, code: int, text: str, out: Path) -> None:
    assert result.exit_code == code, result.output
    assert text in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not out.exists()


def test_what_is_not_supported(bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert_refused(patch(bert, "nope", "-o", out), 3, "nope needs a causal model", out)


def test_a_swapped_checkpoint_is_not_swapped_again(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for scheme in ("alibi", "linear"):  # one by the plugin, one native
        assert patch(llama, scheme, "--max-length", "64", "-o", tmp_path / scheme).exit_code == 0
        assert_refused(patch(tmp_path / scheme, "rope", "-o", out), 3, f"already carries {scheme}", out)


def test_missing_and_broken_weights(posswap: Posswap, gpt2: Path, tmp_path: Path) -> None:
    out, bare = tmp_path / "out", tmp_path / "bare"
    bare.mkdir()
    shutil.copy(gpt2 / "config.json", bare)
    assert_refused(patch(bare, "rope", "-o", out), 4, "cannot load", out)
    (bare / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes()[:100])
    run = posswap("patch", bare, "rope", "-o", out)
    assert run.returncode == 4
    assert run.stderr.startswith("error: cannot load")
    assert run.stderr.count("\n") == 1
    assert not out.exists()


def test_a_folder_that_holds_something_is_kept(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for options in ([], ["--overwrite"]):
        result = patch(gpt2, "rope", "-o", tmp_path, *options)
        assert result.exit_code == 4
        assert "holds no config.json" in result.stderr if options else "is not empty" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_overwrite_replaces_a_checkpoint_whole(gpt2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert patch(gpt2, "rope", "-o", out).exit_code == 0
    (out / "notes.json").write_text("mine")
    assert patch(gpt2, "alibi", "-o", out).exit_code == 4
    refused = patch(gpt2, "alibi", "-o", out, "--overwrite")
    assert refused.exit_code == 4
    assert "would delete it: notes.json (not written by a save)" in " ".join(refused.stderr.split())
    assert (out / "notes.json").read_text() == "mine"
    (out / "notes.json").unlink()
    assert patch(gpt2, "alibi", "-o", out, "--overwrite").exit_code == 0
    assert hf_posswap.load(out).config.posswap["scheme"]["name"] == "alibi"
    assert patch(gpt2, "sinusoidal", "-o", out, "--overwrite").exit_code == 0
    assert not (out / "modeling_posswap.py").exists()


def test_the_source_is_never_overwritten(gpt2: Path) -> None:
    before = sorted(path.name for path in gpt2.iterdir())
    for out in (gpt2, gpt2.parent, gpt2 / ".." / gpt2.name):
        result = patch(gpt2, "rope", "-o", out, "--overwrite")
        assert result.exit_code == 4
        assert "is or holds the model itself" in result.stderr
    assert sorted(path.name for path in gpt2.iterdir()) == before


def test_a_place_that_cannot_be_written(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        result = patch(gpt2, "rope", "-o", out)
        assert result.exit_code == 4
        assert str(tmp_path / "file") in result.stderr
        assert result.stderr.count("\n") == 1


def test_patching_without_out_is_refused(gpt2: Path) -> None:
    result = patch(gpt2, "rope")
    assert result.exit_code == 2
    assert "--out" in result.stderr


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "nope"])
def test_table_schemes_are_saved_too(gpt2: Path, tmp_path: Path, scheme: str) -> None:
    assert patch(gpt2, scheme, "--max-length", "40", "-o", tmp_path / "out").exit_code == 0
    assert hf_posswap.load(tmp_path / "out")(IDS).logits.isfinite().all()


def test_a_model_of_three_tokens_is_proved_too(tmp_path: Path) -> None:
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 3, "n_positions": 16}
    config = GPT2Config(**size, bos_token_id=0, eos_token_id=0, initializer_range=SPREAD)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "in")
    result = patch(tmp_path / "in", "rope", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr


@pytest.fixture(scope="module")
def deberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a DeBERTa with relative positions."""
    model = tiny_model("DebertaForMaskedLM", meta=False, relative_attention=True, pos_att_type=["c2p", "p2c"])
    folder = tmp_path_factory.mktemp("models") / "deberta"
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("relative", ["keep", "drop"])
def test_relative_positions_stay_or_go(deberta: Path, tmp_path: Path, relative: str) -> None:
    result = patch(deberta, "rope", "--relative", relative, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    expected, ids = hf_posswap.load(deberta), torch.arange(5, 25)[None]
    plan = hf_posswap.swap_plan(hf_posswap.patch_model(expected, "rope", relative=relative))
    assert json.loads(result.stdout)["plan"] == json.loads(json.dumps(plan.to_dict()))
    saved = hf_posswap.load(tmp_path / "out")
    assert saved.config.posswap["relative"] == relative
    torch.testing.assert_close(saved(ids).logits, expected(ids).logits, rtol=0, atol=0)
    explained = CliRunner().invoke(app, ["explain", str(deberta), "rope", "--relative", relative, "--json"])
    assert json.loads(explained.stdout)["plan"] == json.loads(json.dumps(plan.to_dict()))


def test_a_model_without_relative_positions_takes_no_choice(gpt2: Path, tmp_path: Path) -> None:
    for command in (("patch", gpt2, "rope", "-o", tmp_path / "out"), ("explain", gpt2, "rope")):
        result = CliRunner().invoke(app, [*map(str, command), "--relative", "drop"])
        assert result.exit_code == 3
        assert says(result.output, "relative='drop' is for models with relative positions inside attention")
    assert not (tmp_path / "out").exists()
    alone = CliRunner().invoke(app, ["explain", str(gpt2), "--relative", "drop"])
    assert "--relative say how to put in a scheme: name one after MODEL" in " ".join(alone.stderr.split())
