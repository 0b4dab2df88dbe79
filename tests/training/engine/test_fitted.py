"""`swap.fit`: the swap begins fitted to the model's own positions, on the first windows of the training text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap import fit_bias, fit_rotation, patch_model, run_recipe
from hf_posswap.errors import ConfigError, PosswapError, SchemeError, UnsupportedSwapError
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.engine import fitting
from tests.training.engine_runs import assert_same_weights, recipe, write_model

HALF = {"name": "rope", "partial": 0.5}


def windows(place: Path, **values: Any) -> list[Any]:
    """Return the windows without padding that a recipe trains on first."""
    from hf_posswap.text.tokens import load_tokenizer
    from hf_posswap.training.data import build_data

    wanted = recipe(place, **values)
    data = build_data(wanted.data, load_tokenizer(Path(wanted.model.name), instead=""), causal=True, scheme_length=256)
    items = [data.train[item] for item in range(8)]
    return [item["input_ids"] for item in items if item["attention_mask"].all()][:4]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_a_bias_begins_as_fit_bias_has_it(tmp_path: Path, scheme: str, kind: str) -> None:
    swap = {"scheme": {"name": scheme}, "fit": 4}
    fitted = run_recipe(recipe(tmp_path / "fitted", kind=kind, swap=swap))
    texts = windows(tmp_path / "fitted", kind=kind)
    by_hand = fit_bias(hf_posswap.load(tmp_path / "fitted" / kind), scheme, texts)
    file = tmp_path / "scheme.json"
    file.write_text(json.dumps(by_hand.to_dict()))
    assert_same_weights(
        fitted, run_recipe(recipe(tmp_path / "fitted", f"swap.scheme={file}", f"out={tmp_path / 'two'}", kind=kind))
    )
    assert f"fitted to the effect of the model's own positions on {sum(map(len, texts))} tokens" in said(fitted)


@pytest.mark.slow
def test_a_fit_to_a_rotation_reads_the_beginnings_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MOST_TO_ROTATION", 12)
    for kind, tokens in (("gpt2", 4 * 32), ("llama", 4 * 12)):
        swap = {"scheme": {"name": "alibi"}, "fit": 4}
        fitted = run_recipe(
            recipe(tmp_path / kind, "training.max_steps=2", "training.warmup_steps=0", kind=kind, swap=swap)
        )
        assert f"fitted to the effect of the model's own positions on {tokens} tokens" in said(fitted)


@pytest.mark.slow
def test_a_rotation_begins_as_fit_rotation_has_it_and_its_teacher_as_it_was(tmp_path: Path) -> None:
    still = {"training": {"max_steps": 1, "learning_rate": 1e-30, "warmup_steps": 0}, "objective": {"kind": "distill"}}
    fitted = run_recipe(recipe(tmp_path, swap={"scheme": HALF, "fit": 4}, **still))
    model = patch_model(hf_posswap.load(tmp_path / "gpt2"), "rope", partial=0.5, max_length=256)
    found = fit_rotation(model, windows(tmp_path))
    kept = hf_posswap.load(fitted.model).state_dict()
    torch.testing.assert_close(dict(kept), dict(model.state_dict()), atol=1e-6, rtol=1e-6)
    assert str(found) in said(fitted)
    own = hf_posswap.load(tmp_path / "gpt2")  # a teacher changed with it would be as far from itself as the student
    ids = torch.stack(windows(tmp_path))[:, :32]
    assert not torch.equal(own(ids).logits, model(ids).logits)


def said(finished: Any) -> str:
    """Return what the gates of the training found."""
    return "\n".join(finished.report["phases"][0]["gates"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("swap.fit=-1",), "swap.fit: expected a number of windows from 0, got -1"),
        (("swap.fit=4", "swap.gradual_steps=2"), "a fitted mechanism starts whole"),
        (("swap.fit=4", "swap.scheme=null", "swap.max_length=null"), "swap.fit: needs a swap"),
        (("swap.fit=4", "peft.r=2"), "which adapters do not hold"),
        (("swap.fit=4", "stages=[{max_steps: 2}]"), "every stage would fit anew"),
    ],
)
def test_what_does_not_go_together_is_said_by_name(tmp_path: Path, settings: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        recipe(tmp_path, *settings)


@pytest.mark.parametrize(
    ("scheme", "kind", "error", "problem"),
    [
        ("fire", "gpt2", SchemeError, "swap.fit: fire cannot be fitted to the model's positions.*Or swap.fit=0"),
        ("rope", "gpt2", SchemeError, "swap.fit: .* rotates whole heads.*Or swap.fit=0"),
        (
            "yarn:partial=0.5",
            "llama",
            UnsupportedSwapError,
            "swap.fit: .*LlamaForCausalLM has no table: it rotates .*Or swap.fit=0",
        ),
        (
            "rope:partial=0.5",
            "xglm",
            UnsupportedSwapError,
            "swap.fit: .*XGLMForCausalLM has a table that is computed.*Or",
        ),
        (
            "alibi",
            "xglm",
            UnsupportedSwapError,
            "swap.fit: .*XGLMForCausalLM has a table that is computed.*Or swap.fit=0",
        ),
        ("rope:partial=0.5", "gpt_neo", UnsupportedSwapError, "swap.fit: .* has no bias.*Or swap.fit=0"),
        ("alibi", "albert", UnsupportedSwapError, "swap.fit: .* do not run exactly once per forward.*Or swap.fit=0"),
        (
            "alibi:slopes=0.5,0.5,0.5,0.5",
            "gpt2",
            SchemeError,
            "swap.fit: .*slopes .* determined by the fit.*Or swap.fit=0",
        ),
    ],
)
def test_what_has_no_fit_is_refused_with_the_way_on(
    tmp_path: Path, scheme: str, kind: str, error: type[PosswapError], problem: str
) -> None:
    save_tiny(tmp_path / kind, kind)
    with pytest.raises(error, match=problem):
        run_recipe(recipe(tmp_path, f"swap.scheme={scheme}", "swap.fit=2", kind=kind))
    assert not (tmp_path / "cache").exists()  # no text was read


def save_tiny(folder: Path, kind: str) -> None:
    """Save a tiny model of a model type, or of a kind of the training tests, with its tokenizer."""
    if kind in ("gpt2", "llama"):
        write_model(folder, kind)
        return
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    hf_posswap.save(tiny_model(kind, meta=False, vocab_size=300), folder, tokenizer=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("xglm", (), "swap.centre: .*XGLMForCausalLM has none.*Or swap.centre=false"),
        ("gpt2", ("model.dtype=bfloat16",), "swap.centre: .*bfloat16.*Or swap.centre=false"),
        ("gpt2", ("model.dtype=bfloat16", "swap.centre=false"), "swap.fit: .*bfloat16.*Or swap.fit=0"),
    ],
)
def test_the_recipe_for_tables_says_at_once_what_a_model_cannot_take_of_it(
    tmp_path: Path, kind: str, settings: tuple[str, ...], problem: str
) -> None:
    save_tiny(tmp_path / kind, kind)
    given = {"swap": {"scheme": HALF, "centre": True, "fit": 2}, "objective": {"kind": "distill"}}
    with pytest.raises(UnsupportedSwapError, match=problem):
        run_recipe(recipe(tmp_path, *settings, kind=kind, **given))
    assert not (tmp_path / "cache").exists()
    if kind == "xglm":
        finished = run_recipe(recipe(tmp_path, "swap.centre=false", "swap.fit=0", kind=kind, **given))
        assert hf_posswap.load(finished.model).config.posswap["scheme"]["name"] == "rope"
