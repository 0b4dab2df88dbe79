"""`posswap show`: what it draws and says, in the shape that is asked for, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.training import byte_tokenizer
from tests.cli.conftest import says


def shown(*arguments: str, code: int = 0) -> str:
    """Return what `posswap show` prints; where it fails, what it says of that."""
    done = CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown") / "gpt2"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).save_pretrained(folder)
    return folder


def test_pictures_of_several_schemes_share_a_sheet(tmp_path: Path) -> None:
    out = tmp_path / "pictures"
    said = shown(
        "rope", "yarn:factor=2", "--picture", "wavelengths", "--length", "100", "--factor", "2", "-o", str(out)
    )
    assert sorted(path.name for path in out.iterdir()) == ["wavelengths.png", "wavelengths.svg"]
    assert Image.open(out / "wavelengths.png").size[0] > 1000
    assert says(said, "yarn:")
    assert says(said, "within 100 tokens")


def test_without_a_choice_all_that_say_something_are_drawn(tmp_path: Path) -> None:
    drawn = json.loads(shown("alibi", "--length", "32", "--heads", "2", "--dim", "8", "--json", "-o", str(tmp_path)))
    assert [one["picture"] for one in drawn] == ["scores", "bias"]
    assert all(Path(one["file"]).is_file() for one in drawn)
    assert drawn[1]["said"] == ["alibi: from -7.94 to 0 over 2 heads"]  # 2^-4 x 127


def test_a_model_gives_its_shape_and_its_table(tmp_path: Path, gpt2: Path) -> None:
    arguments = ("learned", "--model", str(gpt2), "--picture", "table", "--factor", "2", "--json", "-o", str(tmp_path))
    table = hf_posswap.load(gpt2).transformer.wpe.weight.detach()
    (drawn,) = json.loads(shown(*arguments))
    most = f"{float(table.abs().max()):.3g}"
    assert drawn["said"] == [
        f"the model's own: 16 positions of 8 dimensions, up to {most}",
        f"learned: 32 positions of 8 dimensions, up to {most}",
    ]


def test_a_model_alone_shows_its_own_table(tmp_path: Path, gpt2: Path) -> None:
    drawn = json.loads(shown("--model", str(gpt2), "--json", "-o", str(tmp_path)))
    assert [one["picture"] for one in drawn] == ["table", "waves", "similarity", "similarity-by-distance"]
    assert {line.partition(":")[0] for one in drawn for line in one["said"]} == {"the model's own"}


def test_attention_is_drawn_before_and_after_the_swap_and_of_others(tmp_path: Path) -> None:
    base, text = tmp_path / "base", tmp_path / "text.txt"
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
    model.save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    hf_posswap.save(hf_posswap.patch_model(model, "rope"), tmp_path / "trained")
    byte_tokenizer().save_pretrained(tmp_path / "trained")
    text.write_text("the dog chases the pig, and the pig the dog. " * 10)
    (tmp_path / "more.txt").write_text("the pig chases the dog around the house. " * 10)
    said = json.loads(
        shown(
            "alibi",
            "--model",
            str(base),
            "--picture",
            "attention",
            "--also",
            f"after={tmp_path / 'trained'}",
            "--text",
            str(text),
            "--text",
            str(tmp_path / "more.txt"),
            "--factor",
            "2",
            "--layers",
            "--json",
            "-o",
            str(tmp_path / "p"),
        )  # fmt: skip
    )
    (drawn,) = said
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["attention.png", "attention.svg"]
    begun = [line.partition(": ")[0] for line in drawn["said"]]
    assert begun == [f"{name}, {n} tokens" for name in ("base", "alibi", "after") for n in (16, 32)]
    assert drawn["said"][1].endswith("it ends at 16")


def test_a_swapped_model_is_refused(tmp_path: Path, gpt2: Path) -> None:
    swapped = tmp_path / "swapped"
    hf_posswap.save(hf_posswap.patch_model(hf_posswap.load(gpt2), "rope"), swapped)
    assert "give the checkpoint it was made from" in shown(
        "rope", "--model", str(swapped), "-o", str(tmp_path / "p"), code=4
    )
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("yran",), "Did you mean 'yarn'"),
        (("rope", "--picture", "wave"), "unknown picture 'wave'. Did you mean 'waves'"),
        (("alibi", "--picture", "turning"), "the picture 'turning' does not apply"),
        (("rope", "--dim", "7"), "dim must be even"),
        (("rope", "--factor", "0"), "factor is a number of at least 1"),
        ((), "give at least one scheme to draw"),
        (("rope", "--picture", "attention"), "give --model"),
        (("rope", "--layers"), "--layers: only for the attention picture"),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    assert says(shown(*arguments, "-o", str(tmp_path / "out"), code=2), expected)
    assert not (tmp_path / "out").exists()
