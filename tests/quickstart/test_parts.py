"""The pieces of the quickstart that a whole run does not show from outside."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.checkpoints.load import EXAMPLE
from hf_posswap.cli import app
from hf_posswap.errors import CheckpointError, DataError, OptionError, UnknownNameError
from hf_posswap.quickstart.base import Base, QuickstartSettings, claim_folder, open_base, open_folder, place_base
from hf_posswap.quickstart.recipes import CONTROL, Variant, choose_variants, command_of, training_recipe
from hf_posswap.quickstart.reload import check_reload, probe_logits
from hf_posswap.quickstart.run import choose_best, command
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.config import load_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.theirs import result_settings
from hf_posswap.utils import progress
from hf_posswap.utils.atomic_io import cache_folder
from hf_posswap.utils.devices import resolve_device
from hf_posswap.utils.progress import Reporter


def gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2} | options
    return GPT2LMHeadModel(GPT2Config(**shape)).eval()


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).eval()


def base(model: Any) -> Base:
    return Base("a/model", model, byte_tokenizer(), 16)


GIVEN = QuickstartSettings(model="a/model")


def test_schemes_go_by_what_the_model_has_and_what_it_can_take() -> None:
    def names(model: Any, settings: QuickstartSettings = GIVEN) -> list[str]:
        return [variant.name for variant in choose_variants(base(model), settings)[0]]

    assert names(gpt2()) == ["control", "rope", "alibi", "sinusoidal"]
    assert names(gpt2(), QuickstartSettings()) == ["control", "rope", "alibi"]
    assert names(llama()) == ["control", "yarn", "ntk", "alibi", "nope"]
    assert names(gpt2(), dataclasses.replace(GIVEN, schemes=("sinusoidal", "rope"))) == [
        "control",
        "rope",
        "sinusoidal",
    ]
    kept, left_out = choose_variants(base(gpt2(n_embd=2)), GIVEN)  # heads of 1 dimension have no pairs to rotate
    assert [variant.name for variant in kept] == ["control", "alibi", "sinusoidal"]
    assert "head_dim 1" in left_out["rope"]
    with pytest.raises(UnknownNameError, match="unknown scheme of the quickstart for this model 'rope'.*yarn"):
        choose_variants(base(llama()), dataclasses.replace(GIVEN, schemes=("rope",)))


def test_a_model_whose_heads_cannot_be_fitted_starts_without() -> None:
    shape = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "attention_types": [[["global"], 1]]}
    neo = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=257, max_position_embeddings=16, **shape)).eval()  # without biases
    for model, fitted in ((neo, False), (gpt2(), True)):
        kept, _ = choose_variants(base(model), dataclasses.replace(GIVEN, schemes=("rope", "alibi")))
        settings = {variant.name: variant.settings for variant in kept}
        assert ("swap.fit=0" not in settings["rope"]) is fitted
        assert "swap.fit=0" not in settings["alibi"]


def test_a_model_that_computes_its_table_starts_neither_centred_nor_fitted(tmp_path: Path) -> None:
    model = tiny_model("xglm", meta=False, vocab_size=257)
    kept, left_out = choose_variants(base(model), GIVEN)
    settings = {variant.name: variant.settings for variant in kept}
    assert settings == {name: ("swap.centre=false", "swap.fit=0") for name in ("rope", "alibi")} | {CONTROL: ()}
    assert "computes its sinusoids, for any length" in left_out["sinusoidal"]
    for variant in kept:
        swap = training_recipe(variant, base(model), GIVEN, "a/model", tmp_path).swap
        assert (swap.centre, swap.fit) == (False, 0)


def test_a_model_in_half_precision_starts_neither_centred_nor_fitted_by_rotation() -> None:
    kept, _ = choose_variants(base(gpt2().to(torch.bfloat16)), dataclasses.replace(GIVEN, schemes=("rope", "alibi")))
    settings = {variant.name: variant.settings for variant in kept}
    assert settings["rope"] == ("swap.centre=false", "swap.fit=0")
    assert settings["alibi"] == ("swap.centre=false",)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_all_read_as_many_tokens_and_the_control_its_own_window(make: Any) -> None:
    settings = dataclasses.replace(GIVEN, steps=7, step_tokens=300)
    start = base(make())
    variants, _ = choose_variants(start, settings)
    recipes = {v.name: training_recipe(v, start, settings, "a/model", Path("out")) for v in variants}
    for recipe in recipes.values():
        rows = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
        assert recipe.training.max_steps * rows * recipe.data.length == 7 * 256
    assert recipes[CONTROL].data.lengths == (16,)
    assert recipes[CONTROL].swap.scheme is None
    for name, recipe in recipes.items():
        if name != CONTROL:
            assert recipe.data.lengths == (128, 16)
            assert recipe.swap.max_length == 128
            assert (recipe.objective.kind, recipe.objective.distill.teacher) == ("distill", "sliding")
            scheme = recipe.swap.scheme
            assert (scheme if isinstance(scheme, str) else dict(scheme or {})["name"]) == name
            assert recipe.swap.centre == (make is gpt2)


def test_larger_given_models_are_adapted_more_gently() -> None:
    def rate(model: Any) -> float:
        recipe = training_recipe(Variant("rope", "learned-to-rope"), base(model), GIVEN, "a/model", Path("out"))
        return recipe.training.learning_rate

    with torch.device("meta"):
        large = GPT2LMHeadModel(GPT2Config())
    assert rate(large) == 1e-4 < rate(gpt2())


@pytest.mark.parametrize("documents", [None, 40])
def test_the_command_of_a_training_is_its_recipe(documents: int | None) -> None:
    start, variant = base(gpt2()), Variant("rope", "learned-to-rope")
    given = dataclasses.replace(GIVEN, training_documents=documents)
    words = shlex.split(command_of(variant, start, given, "a/model", Path("out")))
    assert words[:3] == ["posswap", "train", "learned-to-rope"]
    assert ("--text" in words) == (documents is None)
    shown = CliRunner().invoke(app, [*words[1:], "--show"])
    assert shown.exit_code == 0, shown.output
    typed, recipe = json.loads(shown.stdout), training_recipe(variant, start, given, "a/model", Path("out"))
    expected = json.loads(json.dumps(to_dict(recipe), default=str))
    for section in ("model", "swap", "data", "trainable", "objective", "out"):
        assert typed[section] == expected[section]
    typed_recipe = load_recipe(words[2], [word for word in words[3:] if "=" in word])
    assert result_settings(typed_recipe.training) == result_settings(recipe.training)


def test_the_best_reaches_farthest_first() -> None:
    def model(plan: Any, *values: float) -> dict[str, Any]:
        return {"plan": plan, "ppl_prefix": [{"length": 8 * 2**i, "perplexity": v} for i, v in enumerate(values)]}

    models = {"base": model(None, 1, 1, 1), "a": model({}, 2.0), "b": model({}, 9, 9, 8), "c": model({}, 5, 5, 9)}
    assert choose_best({"models": models}) == "b"


def test_the_command_asks_for_the_same_settings_again() -> None:
    settings = QuickstartSettings(model="a folder/with blanks", schemes=("rope",), steps=7, seed=3, device="cpu")
    assert command(settings) == (
        "posswap quickstart --model 'a folder/with blanks' --schemes rope --steps 7 --seed 3 --device cpu"
    )
    assert command(QuickstartSettings()) == "posswap quickstart --steps 200 --seed 0 --device auto"


def test_the_packages_model_is_small_has_a_learned_table_and_says_how_it_was_made(
    tmp_path: Path, reporter: Reporter
) -> None:
    found = open_base(QuickstartSettings(), reporter)
    assert found.window == 128
    assert hf_posswap.describe_positions(found.model).sites["embedding"] != "-"
    assert sum(path.stat().st_size for path in EXAMPLE.rglob("*")) < 10_000_000
    held = found.model.config.posswap_training
    card = (EXAMPLE / "README.md").read_text()
    assert f"{held['tokens']:,} tokens" in card
    assert "python recipes/pretrain.py gpt2" in card
    placed = place_base(found, QuickstartSettings(), tmp_path)
    copied = hf_posswap.load(placed).state_dict()
    assert all(torch.equal(value, copied[name]) for name, value in found.model.state_dict().items())


def test_the_packages_model_predicts_held_out_text() -> None:
    found = open_base(QuickstartSettings(), Reporter(Console(file=io.StringIO())))
    texts = [document.text[:400] for document in python_corpus().held_out[:8]]
    ids = [torch.tensor([[found.tokenizer.bos_token_id, *found.tokenizer(t)["input_ids"]]])[:, :128] for t in texts]
    with torch.no_grad():
        losses = [found.model(row, labels=row).loss.item() for row in ids]
    uniform = torch.tensor(float(len(found.tokenizer))).log().item()
    assert sum(losses) / len(losses) < 0.6 * uniform


@pytest.mark.slow
def test_reload_refuses_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    model = gpt2()
    hf_posswap.save(model, tmp_path / "model", tokenizer=byte_tokenizer())
    prompt = torch.arange(8).numpy()
    how: dict[str, Any] = {"new_tokens": 4, "seed": 0, "device": torch.device("cpu")}
    expected = probe_logits(model, prompt)
    with torch.no_grad():
        assert (torch.from_numpy(expected) == model(torch.arange(8)[None]).logits[0]).all()
    for known in (None, expected):
        found = check_reload(tmp_path / "model", prompt, **how, expected=known)
        assert found["max_logit_difference"] <= 1e-6
        assert (found["prompt_tokens"], found["new_tokens"]) == (8, 4)
    expected[7, 3] += 1e-3
    with pytest.raises(CheckpointError, match="gives other logits than the model that was measured"):
        check_reload(tmp_path / "model", prompt, **how, expected=expected)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be used in a fresh process: .*CheckpointError"):
        check_reload(tmp_path / "model", prompt, **how, expected=expected)


def test_what_no_swap_fits_is_said_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise hf_posswap.errors.UnsupportedSwapError("because")

    monkeypatch.setattr(hf_posswap, "plan_swap", refuse)
    with pytest.raises(DataError, match="no swap can be made in GPT2LMHeadModel: rope: because; alibi: because"):
        choose_variants(base(gpt2()), GIVEN)


@pytest.mark.parametrize("name", ["abacus", "meta", "cuda:99"])
def test_devices_that_are_not_here_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"device {name!r} .*give 'auto' or 'cpu'"):
        resolve_device(name)


def test_a_folder_says_every_setting_that_differs(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    open_folder(out, {"a": 1, "b": {"c": [1, 2]}})
    assert list(out.iterdir()) == []
    claim_folder(out, {"a": 1, "b": {"c": [1, 2]}})
    open_folder(out, {"b": {"c": [1, 2]}, "a": 1})
    with pytest.raises(CheckpointError, match=r"\(a was 1 and is 2; b.c was \[1, 2\] and is None\)"):
        open_folder(out, {"a": 2, "b": {}})


def test_a_terminal_gets_a_bar_with_rate_loss_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Reporter(console).task("rope: adapting", 3) as task:
        for loss in (3.0, 2.5, 2.25):
            task.advance(1000, loss)
            time.sleep(0.15)
    said = console.file.getvalue()
    assert all(part in said for part in ("rope: adapting", "3/3", "tokens/s", "loss 2.250"))


@pytest.mark.parametrize("terminal", [False, True], ids=["no terminal", "a dumb terminal"])
def test_elsewhere_a_line_each_half_minute(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with Reporter(console).task("base: training", 10) as task:
        task.skip(4)  # done in an earlier run
        for _ in range(4):
            task.advance(1000, 2.0)
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "base: training: 6/10, 50 tokens/s,  loss 2.000, 80 s left",
        "base: training: 8/10, 50 tokens/s,  loss 2.000, 40 s left",
    ]


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_POSSWAP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/someone")
    assert cache_folder(None) == Path("/someone/.cache/hf_posswap")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder(None) == Path("/xdg/hf_posswap")
    monkeypatch.setenv("HF_POSSWAP_CACHE", "/own")
    assert cache_folder(None) == Path("/own")
    assert cache_folder(tmp_path) == tmp_path
