"""What is wrong whatever the model is, is said before a model is looked for: here there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_posswap.cli import app

ABSENT = "nobody/nothing"  # a Hub id: tests run offline, where looking for it fails with an error of its own
SEARCH = ["search", ABSENT, "--text", "TEXT", "--factor", "4", "-o", "OUT.json"]
SPANS = ["key-spans", ABSENT, "--text", "python", "--length", "100", "--short", "20", "--stride", "5"]
LENGTH = "max_length must be a whole number of tokens >= 1, got 0."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", ABSENT, "rope", "--max-length", "0"], LENGTH),
        (["patch", ABSENT, "rope", "--max-length", "0", "-o", "OUT"], LENGTH),
        (["patch", ABSENT, "rope:base=-1", "-o", "OUT"], "base must be a finite number"),
        (["patch", ABSENT, "rope", "-o", "TEXT"], "is a file; give a folder that is new or empty"),
        (["eval", ABSENT, "rope", "--max-length", "0", "--text", "TEXT"], LENGTH),
        (["eval", ABSENT, "--out", "TEXT", "--text", "TEXT"], "it is a file. Choose another."),
        (["eval", ABSENT, "--metrics", "longppl", "--key-spans", "absent.json", "--text", "TEXT"], "absent.json"),
        (["eval", ABSENT, "--lengths", "0", "--text", "TEXT"], "lengths are whole numbers of at least 2 tokens"),
        (["eval", ABSENT, "--text", "absent.txt"], "absent.txt does not exist"),
        (["eval", ABSENT, "--text", "NO_TEXT"], "holds no document: no file in or below it ends in .txt"),
        (["eval", ABSENT], "there is no text to measure on: give --text books/"),
        (["eval", ABSENT, "--text", "python", "--text", "TEXT"], "--text python goes alone"),
        (["compare", ABSENT, "+rope"], "--text python measures on the sources and documentation of this Python"),
        (["compare", ABSENT, "+rope", "--text", "NO_TEXT"], "holds no document: no file in or below it ends in .txt"),
        (["key-spans", ABSENT, "--length", "100", "--short", "20", "--stride", "5", "-o", "OUT"], "give --text books/"),
        (["show", "rope", "--model", ABSENT, "--picture", "attention", "-o", "OUT"], "give --text books/"),
        (["compare", ABSENT, "+rope", "--max-length", "0", "--text", "TEXT"], LENGTH),
        (["compare", ABSENT, "+rope", "--out", "TEXT", "--text", "TEXT"], "it is a file. Choose another."),
        (["compare", ABSENT, "+rope", "--against", "x"], "unknown baseline model 'x'"),
        (["compare", ABSENT, "+rope", "--metrics", "ppl", "--text", "TEXT"], "unknown metric 'ppl'"),
        (["lm-eval", ABSENT, "--tasks", "none.yaml"], "no such file of a task: none.yaml"),
        (["lm-eval", ABSENT, "rope", "--tasks", "none.yaml", "--max-length", "0"], LENGTH),
        (["lm-eval", ABSENT, "--tasks", "none.yaml", "--out", "FOLDER"], "is a folder; give a file"),
        ([*SEARCH[:-1], "OUT.txt"], "must end in .json"),
        ([*SEARCH, "--factor", "0.5"], "search_longrope: factor must be a finite number > 1"),
        ([*SEARCH, "--population", "2"], "search_longrope: population must be a whole number from 8"),
        ([*SEARCH, "--iterations", "0"], "search_longrope: iterations must be a whole number from 1"),
        ([*SEARCH, "--seed", "-1"], "search_longrope: seed must be a whole number from 0"),
        ([*SEARCH, "--state", "FOLDER"], "--state"),
        ([*SPANS, "-o", "FOLDER"], "is a folder; give a file"),
        (
            ["to-native", ABSENT, "-o", "OUT", "--target", "gpt_nox"],
            "Did you mean 'gpt_neox'?",
        ),
        (["to-native", ABSENT, "-o", "TEXT"], "is a file; give a folder"),
        (["export", ".", "--target", "vllm", "-o", "FOLDER"], "is not empty: give a new folder"),
        (["patch", ABSENT, "rope", "-o", "BELOW"], "text.txt is not a folder. Choose another"),
        (
            ["eval", ABSENT, "--metrics", "longppl", "--text", "TEXT"],
            "a file that posswap key-spans wrote, or find",
        ),
        (["eval", ABSENT, "--metrics", "longppl", "--text", "TEXT"], "give it by --key-spans, or by key_spans in Py"),
        (
            ["export", ".", "--target", "llamacpp", "--dtype", "f16"],
            ".gguf file: name one by -o, or by out in Python",
        ),
        (["compare", "first", "first"], r"unique names, got ['first', 'first']: name each of them, NAME=MODEL on the"),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, list) else "",
)
def test_nothing_is_loaded_to_say_it(tmp_path: Path, arguments: list[str], message: str) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "folder"
    text.write_text("words")
    folder.mkdir()
    (folder / "kept").touch()
    (tmp_path / "no-text").mkdir()
    places = {"TEXT": text, "FOLDER": folder, "OUT": tmp_path / "new", "OUT.json": tmp_path / "new.json"}
    places["NO_TEXT"] = tmp_path / "no-text"
    places |= {"OUT.txt": tmp_path / "new.txt", "BELOW": text / "below"}
    done = CliRunner().invoke(app, [str(places.get(word, word)) for word in arguments])
    assert done.exit_code in (2, 4), done.output
    assert message in " ".join(done.stderr.split()), done.stderr
    assert "huggingface" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "LOOP", "rope"], "is a link to 'other', which does not exist; give a folder that holds a config"),
        (
            ["patch", ABSENT, "rope", "-o", "LOOP"],
            "loop: Too many levels of symbolic links. Choose another",
        ),
        (["patch", ABSENT, "rope", "-o", "BELOW"], "loop is not a folder. Choose another"),
        (["to-native", ABSENT, "-o", "LOOP"], "loop: Too many levels of symbolic links. Choose another"),
        ([*SEARCH[:-1], "BELOW.json"], "loop is not a folder. Choose another"),
        (["train", "control", "OUT", f"model.name={ABSENT}", "--text", "TEXT"], "loop"),
        (["--import", "LOOP.py", "schemes"], "loop.py': there is no such file"),
    ],
)
def test_links_that_lead_to_one_another_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    for one, other in (("loop", "other"), ("other", "loop"), ("loop.py", "other.py"), ("other.py", "loop.py")):
        (tmp_path / one).symlink_to(other)
    (tmp_path / "text.txt").write_text("words")
    loop = tmp_path / "loop"
    places = {"LOOP": loop, "LOOP.py": tmp_path / "loop.py", "BELOW": loop / "below", "BELOW.json": loop / "x.json"}
    places |= {"TEXT": tmp_path / "text.txt", "OUT": f"out={loop / 'below'}"}
    done = CliRunner().invoke(app, [str(places.get(word, word)) for word in arguments])
    assert done.exit_code in (2, 4), done.output
    assert message in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["to-native", "nosuch", "-o", "OUT"],
        ["eval", "nosuch", "--text", "python"],
        ["eval", "MODEL", "--baseline", "nosuch", "--text", "python"],
        ["compare", "nosuch", "+yarn", "--text", "python"],
        ["compare", "MODEL", "nosuch", "--text", "python"],
        ["search", "nosuch", "--text", "TEXT", "--factor", "2", "-o", "OUT.json"],
    ],
    ids=" ".join,
)
def test_a_model_that_is_not_there_has_no_smaller_problem(tmp_path: Path, bert: Path, arguments: list[str]) -> None:
    (tmp_path / "text.txt").write_text("words")
    places = {"MODEL": bert, "TEXT": tmp_path / "text.txt", "OUT": tmp_path / "new", "OUT.json": tmp_path / "a.json"}
    done = CliRunner().invoke(app, [str(places.get(word, word)) for word in arguments])
    assert done.exit_code == 4
    assert "'nosuch' holds no readable model config (config.json): there is no such folder here" in done.stderr
    assert "the Hub was not asked, because HF_HUB_OFFLINE is set." in done.stderr
    assert "tokenizer" not in done.stderr


NOWHERE = "~no-such-user/x"


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", NOWHERE],
        ["patch", ABSENT, "rope", "-o", NOWHERE],
        ["patch", ABSENT, f"{NOWHERE}.json", "-o", "OUT"],
        ["eval", ABSENT, "--out", NOWHERE, "--text", "python"],
        ["eval", ABSENT, "--text", NOWHERE],
        ["compare", NOWHERE, ABSENT],
        ["compare", f"a={NOWHERE}", ABSENT],
        ["lm-eval", ABSENT, "--tasks", f"{NOWHERE}.yaml"],
        [*SEARCH[:-1], f"{NOWHERE}.json"],
        [*SPANS, "-o", NOWHERE],
        ["to-native", ABSENT, "-o", NOWHERE],
        ["export", ABSENT, "--target", "onnx", "-o", NOWHERE],
        ["report", NOWHERE],
        ["show", "rope", "-o", NOWHERE],
        ["recipes", "yarn", NOWHERE, "--copy"],
        ["train", f"{NOWHERE}.yaml"],
        ["train", "yarn", "--text", "python", f"out={NOWHERE}", f"model.name={ABSENT}"],
        ["quickstart", "--out", NOWHERE],
    ],
    ids=lambda part: "-".join(part[:1]),
)
def test_the_home_of_a_user_that_is_not_there_is_one_clear_error(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (2, 4), done.output
    assert "'~no-such-user' is the home folder of no user of this machine" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


WAITING = (
    "import importlib, os, sys; commands = importlib.import_module('hf_posswap.cli.app'); "
    "commands.app = lambda **_: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); commands.main()"
)
"""Runs the command up to its first word, and prints what torch's threads will be told."""


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_leave_the_processor_to_others_unless_the_user_has_chosen(
    given: str | None, expected: str
) -> None:
    """Set before torch is imported: OpenMP reads it once."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    command = [sys.executable, "-W", "ignore", "-c", WAITING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [expected, "False"]
