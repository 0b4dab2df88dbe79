"""The pieces of the quickstart that a whole run does not show from outside."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_posswap
from hf_posswap.errors import CheckpointError, DataError, OptionError
from hf_posswap.quickstart.folder import claim_folder, open_folder
from hf_posswap.quickstart.measure import Yardstick, running_limits
from hf_posswap.quickstart.reload import check_reload, probe_logits
from hf_posswap.quickstart.report import trend
from hf_posswap.quickstart.results import cautions, choose_best, command
from hf_posswap.quickstart.settings import QuickstartSettings, digest, resolve_device
from hf_posswap.quickstart.variants import choose_variants, learning_rate
from hf_posswap.utils import progress
from hf_posswap.utils.atomic_io import cache_folder
from hf_posswap.utils.progress import Reporter


def gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2, **options)).eval()


def llama(rope_type: str = "default", **rope: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        rope_parameters={"rope_type": rope_type, "rope_theta": 100.0, **rope},
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["rope", "alibi", "nope", "sinusoidal", "learned"])
def test_the_limit_of_a_swapped_model_is_where_it_stops(name: str) -> None:
    model = gpt2()
    hf_posswap.patch_model(model, name, max_length=32)
    limit, one_pass = running_limits(model)
    assert one_pass
    ids = torch.zeros(1, 33, dtype=torch.long)
    if limit is None:
        assert model(ids).logits.shape[1] == 33
    else:
        assert limit == 32
        model(ids[:, :32])
        with pytest.raises(hf_posswap.errors.PositionRangeError):
            model(ids)


def test_the_limit_of_a_native_model_is_its_table_or_none() -> None:
    assert running_limits(gpt2()) == (16, True)
    assert running_limits(llama()) == (None, True)
    assert running_limits(llama("dynamic", factor=2.0)) == (None, False)


def test_variants_go_by_what_the_model_has_and_what_it_can_take() -> None:
    names = [variant.name for variant in choose_variants(gpt2(), 128)[0]]
    assert names == ["base", "control", "rope", "alibi", "sinusoidal", "learned"]
    kept, left_out = choose_variants(llama(), 128)
    assert {*(variant.name for variant in kept), *left_out} == {"base", "control", "yarn", "ntk", "alibi", "nope"}
    odd = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=6, n_layer=1, n_head=2))
    kept, left_out = choose_variants(odd, 128)  # heads of 3 dimensions have no pairs to rotate
    assert [variant.name for variant in kept] == ["base", "control", "alibi", "sinusoidal", "learned"]
    assert "3" in left_out["rope"]


def test_larger_given_models_are_adapted_more_gently() -> None:
    given = QuickstartSettings(model="some/model")
    assert learning_rate(gpt2(), given) == 1e-3
    with torch.device("meta"):
        large = GPT2LMHeadModel(GPT2Config())
    assert learning_rate(large, given) == 1e-4
    assert learning_rate(gpt2(), dataclasses.replace(given, learning_rate=0.5)) == 0.5


def test_the_best_reaches_farthest_first() -> None:
    def rows(*values: float) -> dict[str, Any]:
        lengths = [{"length": 8 * 2**i, "perplexity": value} for i, value in enumerate(values)]
        return {"lengths": [*lengths, *({"length": 99, "cannot_run": "table ends"} for _ in range(3 - len(values)))]}

    models = {"base": rows(1, 1, 1), "control": rows(1, 1, 1), "a": rows(2.0), "b": rows(9, 9, 8), "c": rows(5, 5, 9)}
    assert choose_best(models) == {"name": "b", "length": 32, "perplexity": 8, "folder": "models/b"}


@pytest.mark.parametrize(
    ("low", "high", "word"), [(1.01, 1.2, "worse"), (0.8, 0.99, "better"), (0.9, 1.1, "no clear change")]
)
def test_a_verdict_needs_an_interval_on_one_side(low: float, high: float, word: str) -> None:
    assert trend({"ratio": (low + high) / 2, "low": low, "high": high}) == word


def test_the_command_asks_for_the_same_settings_again() -> None:
    settings = QuickstartSettings(model="a folder/with blanks", steps=7, seed=3, device="cpu")
    assert command(settings) == "posswap quickstart --model 'a folder/with blanks' --steps 7 --seed 3 --device cpu"
    assert command(QuickstartSettings()) == "posswap quickstart --steps 200 --seed 0 --device auto"


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


def test_digests_tell_recipes_apart() -> None:
    one, other = QuickstartSettings().to_dict(), QuickstartSettings(seed=1).to_dict()
    assert digest(one) == digest(dict(reversed(one.items())))
    assert digest(one) != digest(other)


@pytest.mark.parametrize("name", ["abacus", "meta", "cuda:99"])
def test_devices_that_are_not_here_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"device {name!r} .*take 'auto' or 'cpu'"):
        resolve_device(name)


def test_a_folder_says_every_setting_that_differs(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    open_folder(out, {"a": 1, "b": {"c": [1, 2]}})
    assert list(out.iterdir()) == []
    claim_folder(out, {"a": 1, "b": {"c": [1, 2]}})
    open_folder(out, {"b": {"c": [1, 2]}, "a": 1})
    with pytest.raises(CheckpointError, match=r"\(a was 1 and is 2; b.c was \[1, 2\] and is None\)"):
        open_folder(out, {"a": 2, "b": {}})


def test_reload_refuses_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    from hf_posswap.training import byte_tokenizer

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=16, n_embd=16, n_layer=1, n_head=2)).eval()
    hf_posswap.save(model, tmp_path / "model", tokenizer=byte_tokenizer())
    prompt = torch.arange(8).numpy()
    how = {"new_tokens": 4, "seed": 0, "device": torch.device("cpu")}
    expected = probe_logits(model, prompt)
    with torch.no_grad():
        np.testing.assert_array_equal(expected, model(torch.arange(8)[None]).logits[0].numpy())
    found = check_reload(expected, tmp_path / "model", prompt, **how)
    assert found["max_logit_difference"] <= 1e-6
    assert (found["prompt_tokens"], found["new_tokens"]) == (8, 4)
    expected[7, 3] += 1e-3
    with pytest.raises(CheckpointError, match="gives other logits than the model that was saved"):
        check_reload(expected, tmp_path / "model", prompt, **how)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be used in a fresh process: .*CheckpointError"):
        check_reload(expected, tmp_path / "model", prompt, **how)


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


def test_what_no_swap_fits_is_said_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise hf_posswap.errors.UnsupportedSwapError("because")

    monkeypatch.setattr(hf_posswap, "plan_swap", refuse)
    with pytest.raises(DataError, match="no swap can be made in GPT2LMHeadModel: rope: because; alibi: because"):
        choose_variants(gpt2(), 64)


def test_cautions_count_documents_and_unknown_tokens() -> None:
    from hf_posswap.training import byte_tokenizer

    def yardstick(documents: int, unknown: float) -> Yardstick:
        tokens = np.zeros((documents, 100), dtype=np.int32)
        tokens[:, : round(100 * unknown)] = 7
        return Yardstick(tokens, ("a",) * documents, (100,), None, ())

    letters = Tokenizer(models.WordLevel({"?": 7, "a": 0}, unk_token="?"))
    words = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?")
    assert cautions(yardstick(8, 0.01), words) == []
    assert cautions(yardstick(8, 0.25), words) == [
        "25% of the tokens are the tokenizer's unknown token: the text is not of its kind."
    ]
    assert cautions(yardstick(2, 0.25), byte_tokenizer()) == [
        "Only 2 held-out documents are long enough: read no order into this."
    ]
