"""`posswap search`: the library's own result in a file that `posswap patch` takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.training import byte_tokenizer
from tests.cli.conftest import SPREAD, says

SMALL = ("--population", "8", "--iterations", "1")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama made for 16 bytes, with its tokenizer."""
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 257}
    config = LlamaConfig(**sizes, intermediate_size=16, max_position_embeddings=16, initializer_range=SPREAD)
    folder = tmp_path_factory.mktemp("models") / "reader"
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text("a text of some fifty letters, which is long enough")
    paths[1].write_text("and another one that is not much shorter, I believe")
    return paths


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_file_holds_what_the_library_finds_and_patch_takes_it(
    reader: Path, texts: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "scheme.json"
    result = run("search", reader, *texts, "--factor", "2", "-o", out, "--state", tmp_path / "state", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    expected = hf_posswap.search_longrope(
        hf_posswap.load(reader),
        [path.read_text() for path in texts],
        2.0,
        tokenizer=AutoTokenizer.from_pretrained(reader),
        population=8,
        iterations=1,
        progress=False,
    )
    assert said == json.loads(json.dumps(expected.to_dict())) | {"saved": str(out.resolve())}
    assert json.loads(out.read_text()) == said["scheme"]
    assert (tmp_path / "state").is_file()
    result = run("patch", reader, out, "-o", tmp_path / "swapped")
    assert result.exit_code == 0, result.output
    swapped, model = hf_posswap.load(tmp_path / "swapped"), hf_posswap.load(reader)
    hf_posswap.patch_model(model, expected.scheme)
    ids = torch.arange(32)[None]
    assert torch.equal(swapped(ids).logits, model(ids).logits)


def test_people_read_a_summary_and_may_ask_for_what_stock_code_runs(
    reader: Path, texts: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "scheme.json"
    result = run("search", reader, *texts, "--factor", "2", "-o", out, "--native", *SMALL)
    assert result.exit_code == 0, result.output
    assert says(result.stdout, "on 2 texts of 32 tokens")
    assert says(result.stdout, "linear")
    assert json.loads(out.read_text())["original_positions"] == 0
    shown = run("explain", reader, out, "--json")
    assert json.loads(shown.stdout)["plan"]["route"] == "native"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--factor", "0.5"], 2, "factor must be a finite number > 1"),
        (["--factor", "8"], 4, "texts[0] has 51 tokens, and each is measured at the target length of 128"),
        (["--factor", "2", "--population", "3"], 2, "population must be a whole number from 8"),
        (["--factor", "2", "--device", "tpu9"], 2, "device 'tpu9' cannot be used here"),
        (["--factor", "2", "-o", "scheme.txt"], 4, "must end in .json"),
        (["--factor", "2", "-o", "there.json"], 4, "there.json exists; give another file, or --overwrite"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    reader: Path,
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    result = run("search", reader, *texts, "-o", "scheme.json", *SMALL, *arguments)
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
    assert Path("there.json").read_text() == "{}"


def test_a_model_without_words_and_a_text_that_is_none(llama: Path, reader: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    result = run("search", reader, tmp_path / "a.txt", "--factor", "2", "-o", tmp_path / "s.json")
    assert (result.exit_code, "cannot be read as UTF-8 text" in result.stderr) == (4, True)
    (tmp_path / "a.txt").write_text("text")
    result = run("search", llama, tmp_path / "a.txt", "--factor", "2", "-o", tmp_path / "s.json")
    assert (result.exit_code, "holds no tokenizer to read texts with" in result.stderr) == (4, True)
    shutil.copytree(reader, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{broken")
    result = run("search", tmp_path / "broken", tmp_path / "a.txt", "--factor", "2", "-o", tmp_path / "s.json")
    assert (result.exit_code, "cannot be read; save one in the model's folder: " in result.stderr) == (4, True)
    assert "--no-tokenizer" not in result.stderr  # which posswap search does not have


def test_texts_are_given_as_posswap_eval_takes_them(reader: Path, texts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("what these are: no document, and too short to be searched on")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"words": path.read_text()}) + "\n" for path in texts))
    ways: list[tuple[str | Path, ...]] = [
        tuple(texts),
        ("--text", texts[0], "--text", texts[1]),
        (texts[0], "--text", texts[1]),
        ("--text", rows, "--column", "words"),
    ]
    found = []
    for number, way in enumerate(ways):
        out = tmp_path / f"{number}.json"
        result = run("search", reader, *way, "--factor", "2", "-o", out, *SMALL)
        assert result.exit_code == 0, result.output
        found.append(out.read_text())
    folder = tmp_path / "books"
    folder.mkdir()
    for path in [*texts, tmp_path / "README.md"]:
        path.rename(folder / path.name)
    result = run("search", reader, "--text", folder, "--factor", "2", "-o", tmp_path / "last.json", *SMALL)
    assert result.exit_code == 0, result.output
    assert {*found, (tmp_path / "last.json").read_text()} == {found[0]}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "give texts to search on: --text books/."),
        (("--text", "org/books"), 4, "org/books: give files or folders; a data set on the Hub has no end"),
        (("--text", "none/"), 4, "none does not exist; give text files"),
    ],
)
def test_texts_that_are_none_are_said_before_a_model_is_loaded(
    arguments: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "no-model").mkdir()
    result = run("search", tmp_path / "no-model", *arguments, "--factor", "2", "-o", tmp_path / "s.json")
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        ("{", 4, "is not a readable file of a scheme"),
        ("[1]", 4, "holds no scheme, which is an object with a name and fields"),
        ('{"factor": 2}', 2, "a scheme's dict needs its name under 'name'"),
        ('{"name": "yarm"}', 2, "Did you mean 'yarn'"),
    ],
)
def test_a_file_that_holds_no_scheme(llama: Path, tmp_path: Path, content: str, code: int, says: str) -> None:
    path = tmp_path / "scheme.json"
    path.write_text(content)
    result = run("explain", llama, path)
    assert result.exit_code == code, result.output
    assert says in " ".join(result.stderr.split())
