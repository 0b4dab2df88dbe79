"""Code that a checkpoint or a task brings is run by no command but with --trust-remote-code, whatever stdin says."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests import hostile
from tests.cli.conftest import Posswap
from tests.cli.letters import letters

YES = "y\n" * 20
COMMANDS: dict[str, list[str]] = {
    "explain": ["explain", "MODEL"],
    "plan": ["explain", "MODEL", "rope"],
    "patch": ["patch", "MODEL", "rope", "-o", "OUT"],
    "to-native": ["to-native", "MODEL", "-o", "OUT"],
    "check": ["check", "MODEL"],
    "doctor": ["doctor", "MODEL"],
    "export": ["export", "MODEL", "--target", "vllm"],
    "push": ["push", "MODEL", "me/mine", "--dry-run"],
    "search": ["search", "MODEL", "TEXT", "--factor", "2", "-o", "FOUND.json"],
    "train": ["train", "-c", "RECIPE", "model.name=MODEL", "out=OUT"],
    "eval": ["eval", "MODEL", "--text", "FOLDER", "--lengths", "16", "--metrics", "ppl_prefix"],
    "base": ["eval", "PLAIN", "--base", "MODEL", "--text", "FOLDER", "--lengths", "16", "--metrics", "ppl_prefix"],
    "compare": ["compare", "MODEL", "+alibi", "--text", "FOLDER", "--lengths", "16", "--metrics", "ppl_prefix"],
    "key-spans": [
        "key-spans",
        "MODEL",
        "--length",
        "16",
        "--short",
        "8",
        "--stride",
        "4",
        "--text",
        "FOLDER",
        "-o",
        "FOUND.json",
    ],
    "lm-eval": ["lm-eval", "MODEL", "--tasks", "TASK"],
    "quickstart": ["quickstart", "--model", "MODEL", "--out", "OUT", "--steps", "1"],
}
OTHER_TOKENIZERS: dict[str, list[str]] = {
    "train": [*COMMANDS["train"][:3], "model.name=PLAIN", "model.tokenizer=MODEL", "out=OUT"],
    "eval": ["eval", "PLAIN", "--tokenizer", "MODEL", *COMMANDS["eval"][2:]],
    "compare": ["compare", "PLAIN", "--tokenizer", "MODEL", *COMMANDS["compare"][3:]],
    "key-spans": ["key-spans", "PLAIN", "--tokenizer", "MODEL", *COMMANDS["key-spans"][2:]],
    "lm-eval": ["lm-eval", "PLAIN", "--tokenizer", "MODEL", "--tasks", "TASK"],
}
READS_NO_TOKENIZER = ("explain", "plan", "check", "doctor", "export", "push")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile.plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def hostiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of the checkpoints that bring code, by what the code is."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in hostile.MAKERS.items()}


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hostile.CANARY, str(tmp_path / "canary"))


def filled(command: list[str], model: Path, plain: Path, folder: Path) -> list[str]:
    """Return the arguments of `command`, its files written to `folder`."""
    text, task, recipe = folder / "text.txt", folder / "task.yaml", folder / "recipe.yaml"
    words = "".join(chr(97 + number * number % 26) for number in range(4000))
    text.write_text(words)
    (folder / "other.txt").write_text(words[::-1])
    task.write_text(json.dumps(letters(folder)))
    data = {"sources": [{"path": str(text)}], "length": 16}
    recipe.write_text(json.dumps({"data": data, "swap": {"scheme": "rope"}, "training": {"max_steps": 1}}))
    names = {
        "MODEL": model,
        "PLAIN": plain,
        "OUT": folder / "out",
        "TEXT": text,
        "FOLDER": folder,
        "TASK": task,
        "RECIPE": recipe,
    }
    names["FOUND.json"] = folder / "found.json"
    done = []
    for argument in command:
        key, equals, name = argument.rpartition("=")
        done.append(f"{key}{equals}{names.get(name, name)}")
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_code_of_a_config_is_refused(
    posswap: Posswap, hostiles: dict[str, Path], plain: Path, tmp_path: Path, name: str
) -> None:
    run = posswap(*filled(COMMANDS[name], hostiles["config"], plain, tmp_path), answers=YES)
    assert not hostile.ran(), run.stdout + run.stderr
    assert run.returncode == (1 if name in ("check", "doctor") else 4), run.stderr
    assert "--trust-remote-code" in " ".join((run.stdout + run.stderr).split())
    assert "[y/N]" not in run.stdout + run.stderr


OF_TOKENIZERS = {name: COMMANDS[name] for name in COMMANDS if name not in READS_NO_TOKENIZER} | {
    f"{name}, of another model": command for name, command in OTHER_TOKENIZERS.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TOKENIZERS)
def test_code_of_a_tokenizer_is_refused(
    posswap: Posswap, hostiles: dict[str, Path], plain: Path, tmp_path: Path, name: str
) -> None:
    run = posswap(*filled(OF_TOKENIZERS[name], hostiles["tokenizer"], plain, tmp_path), answers=YES)
    assert not hostile.ran(), run.stdout + run.stderr
    assert run.returncode == 4, run.stderr
    assert "--trust-remote-code" in run.stderr


@pytest.mark.parametrize("kind", ["processor", "images"])
def test_code_of_a_processor_is_refused(
    posswap: Posswap, hostiles: dict[str, Path], plain: Path, tmp_path: Path, kind: str
) -> None:
    run = posswap(*filled(COMMANDS["patch"], hostiles[kind], plain, tmp_path), answers=YES)
    assert not hostile.ran(), run.stdout + run.stderr
    assert run.returncode == 4, run.stderr
    assert "--trust-remote-code" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patch", "eval", "lm-eval"])
def test_a_generate_that_is_code_is_left_alone(
    posswap: Posswap, hostiles: dict[str, Path], plain: Path, tmp_path: Path, name: str
) -> None:
    run = posswap(*filled(COMMANDS[name], hostiles["generation"], plain, tmp_path), answers=YES)
    assert not hostile.ran(), run.stdout + run.stderr
    assert run.returncode == 0, run.stderr


def test_code_of_an_adapters_base_is_refused(posswap: Posswap, hostiles: dict[str, Path], tmp_path: Path) -> None:
    adapter = hostile.adapter_on(tmp_path, hostiles["config"])
    run = posswap("to-native", adapter, "-o", tmp_path / "out", answers=YES)
    assert not hostile.ran(), run.stdout + run.stderr
    assert run.returncode == 4, run.stderr
    assert "--trust-remote-code" in run.stderr


@pytest.mark.parametrize("name", ["explain", "doctor", "export", "push", "train", "eval", "lm-eval"])
def test_code_of_a_config_is_run_where_that_is_asked_for(
    posswap: Posswap, hostiles: dict[str, Path], plain: Path, tmp_path: Path, name: str
) -> None:
    run = posswap(*filled(COMMANDS[name], hostiles["config"], plain, tmp_path), "--trust-remote-code")
    assert hostile.ran(), run.stdout + run.stderr
    assert "[y/N]" not in run.stdout + run.stderr


def test_code_of_a_tokenizer_is_run_where_that_is_asked_for(
    posswap: Posswap, hostiles: dict[str, Path], plain: Path, tmp_path: Path
) -> None:
    run = posswap(*filled(COMMANDS["eval"], hostiles["tokenizer"], plain, tmp_path), "--trust-remote-code")
    assert run.returncode == 0, run.stderr
    assert hostile.ran()


FUNCTION = "process_docs: !function helper.changed\n"


def hostile_task(folder: Path, how: str) -> Path:
    """Write to `folder` a task that runs code in the way `how`, and return its file."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: the harness is not tested")
    (folder / "helper.py").write_text(f"{hostile.WRITES}\n\ndef changed(docs):\n    return docs\n")
    values, path = letters(folder), folder / "task.yaml"
    if how == "template":
        touch = f"touch ${hostile.CANARY}"
        values["doc_to_text"] = "{{ cycler.__init__.__globals__.os.system('" + touch + "') }}{{text}}"
    if how == "metric":
        (folder / "metric").mkdir()
        (folder / "metric" / "metric.py").write_text(hostile.WRITES)
        metric = {"metric": str(folder / "metric"), "hf_evaluate": True, "aggregation": "mean"}
        values["metric_list"] = [metric | {"higher_is_better": True}]
    path.write_text(_yaml(values) + (FUNCTION if how in ("function", "included") else ""))
    if how == "included":
        (folder / "outer.yaml").write_text("include: task.yaml\ntask: outer\n")
        return folder / "outer.yaml"
    return path


def _yaml(values: dict[str, object]) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["function", "included", "template", "metric"])
def test_code_of_a_task_is_refused(posswap: Posswap, plain: Path, tmp_path: Path, how: str) -> None:
    task = hostile_task(tmp_path, how)
    run = posswap("lm-eval", plain, "--tasks", task, "--device", "cpu", answers=YES)
    assert not hostile.ran(), textwrap.shorten(run.stdout + run.stderr, 2000)
    assert run.returncode != 0
    assert "--trust-remote-code" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["function", "included"])
def test_code_of_a_task_is_run_where_that_is_asked_for(posswap: Posswap, plain: Path, tmp_path: Path, how: str) -> None:
    task = hostile_task(tmp_path, how)
    run = posswap("lm-eval", plain, "--tasks", task, "--device", "cpu", "--trust-remote-code")
    assert run.returncode == 0, run.stderr
    assert hostile.ran()
