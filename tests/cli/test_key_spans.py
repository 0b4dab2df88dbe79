"""`posswap key-spans` writes what longppl reads, on the same documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.comparison import EvalSettings, evaluate
from hf_posswap.evaluation.longppl import KeySpans
from hf_posswap.training import byte_tokenizer

TEXTS = [f"{number}: " + " ".join(str((number * 7 + i) ** 2) for i in range(30)) for number in range(3)]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return the folder of a byte-level GPT-2 of 64 positions; three texts lie beside it."""
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.2}
    config = GPT2Config(vocab_size=257, **shape, bos_token_id=256, eos_token_id=256)
    hf_posswap.save(GPT2LMHeadModel(config), tmp_path / "tiny", tokenizer=byte_tokenizer())
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    return tmp_path / "tiny"


def arguments(tiny: Path, **more: object) -> list[str]:
    given = {"length": 64, "short": 16, "stride": 4, "gain": 0.05, "limit": 99.0} | more
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return ["key-spans", str(tiny), "--text", str(tiny.parent / "text"), "-o", str(tiny.parent / "keys.json"), *options]


def test_the_file_is_what_longppl_measures_on(tiny: Path) -> None:
    done = CliRunner().invoke(app, arguments(tiny))
    assert done.exit_code == 0, done.output
    spans = KeySpans.load(tiny.parent / "keys.json")
    count = sum(int(mask.sum()) for mask in spans.masks([np.array([256, *text.encode()][:64]) for text in TEXTS]))
    assert done.stdout.startswith(f"{count} key tokens in 3 documents of 64 tokens: ")
    assert (spans.evaluator, spans.short, spans.stride, spans.gain, spans.limit) == ("tiny", 16, 4, 0.05, 99.0)
    settings = EvalSettings(lengths=(64,), metrics=("longppl",), key_spans=tiny.parent / "keys.json")
    found = evaluate(tiny, documents=tiny.parent / "text", settings=settings).results["models"]["tiny"]
    assert found["longppl"]["key_tokens"] == count > 0


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ({"gain": 99.0}, 4, "error: tiny predicts no token that much better from 64 tokens than from 16: take longer"),
        ({"length": 100}, 3, "error: tiny ends at 64 tokens: --length 100 is too long.\n"),
        ({"short": 64}, 2, "error: --short is at least 2 and less than --length, got --short 64 --length 64.\n"),
        ({"length": -1}, 2, "error: --short is at least 2 and less than --length, got --short 16 --length -1.\n"),
        ({"length": 0, "short": -4}, 2, "error: --short is at least 2 and less than --length, got --short -4"),
        ({"stride": 0}, 2, "error: --stride is at least 1 and at most --short, got --stride 0 --short 16.\n"),
        ({"documents": 1}, 2, "error: --documents is a whole number of at least 2, got 1.\n"),
        ({"gain": "nan"}, 2, "error: --gain is a number of nats, got nan.\n"),
        ({"limit": "inf"}, 2, "error: --limit is a number of nats, got inf.\n"),
        ({"text": "none.txt"}, 4, "error: none.txt does not exist; give text files"),
    ],
)
def test_an_error_is_one_line_and_writes_nothing(tiny: Path, more: dict[str, object], code: int, message: str) -> None:
    done = CliRunner().invoke(app, arguments(tiny, **more))
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith(message)
    assert not (tiny.parent / "keys.json").exists()
