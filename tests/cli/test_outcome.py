"""Exit codes and error lines, for every error there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hf_posswap import errors
from hf_posswap.cli.outcome import Code, PosswapGroup, code_of, line_of
from tests.cli.conftest import ROOT, Posswap

EXPECTED = {
    errors.UnknownNameError: 2,
    errors.OptionError: 2,
    errors.SchemeError: 2,
    errors.UnsupportedSwapError: 3,
    errors.UnsupportedModelError: 3,
    errors.AlreadyPatchedError: 3,
    errors.CheckpointError: 4,
    errors.RecordError: 4,
    errors.DataError: 4,
    OSError: 4,
    errors.SwapVerificationError: 1,
    errors.TrainingError: 1,
    errors.TrainingStoppedError: 143,
    errors.NumericError: 1,
    errors.MissingDependencyError: 1,
    ZeroDivisionError: 1,
}


ARGUMENTS = {errors.UnknownNameError: ("scheme", "x", ["y"]), errors.MissingDependencyError: ("matplotlib", "plot")}


@pytest.mark.parametrize(("kind", "code"), EXPECTED.items())
def test_every_kind_of_error_has_its_code(kind: type[Exception], code: int) -> None:
    app = typer.Typer(cls=PosswapGroup)

    @app.callback()
    def group() -> None: ...

    @app.command()
    def fail() -> None:
        raise kind(*ARGUMENTS.get(kind, ("one\ntwo",)))

    result = CliRunner().invoke(app, ["fail"])
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_an_unexpected_error_says_how_to_see_more() -> None:
    assert line_of(ZeroDivisionError("division by zero")) == (
        "unexpected ZeroDivisionError: division by zero. POSSWAP_DEBUG=1 shows where it happened."
    )
    assert code_of(ZeroDivisionError()) is Code.OTHER


def test_an_os_error_names_its_file() -> None:
    assert line_of(FileNotFoundError(2, "No such file or directory", "a.txt")) == "No such file or directory 'a.txt'"


def test_debug_shows_the_traceback_and_the_same_code(posswap: Posswap) -> None:
    quiet = posswap("schemes", "no-such-scheme")
    loud = posswap("schemes", "no-such-scheme", POSSWAP_DEBUG="1")
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr
    assert loud.stderr.endswith(quiet.stderr)
    assert loud.returncode == quiet.returncode == 2


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    script = f'"{sys.executable}" -m hf_posswap schemes --json | head -c 10'
    run = subprocess.run(script, shell=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert len(run.stdout) == 10
    assert "Traceback" not in run.stderr


def test_a_limit_on_files_names_the_file(tmp_path: Path) -> None:
    script = f'ulimit -f 1; exec "{sys.executable}" -m hf_posswap explain --html'
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    path = tmp_path.resolve() / "positions.html"
    assert (run.returncode, run.stdout) == (4, "")
    assert run.stderr.startswith(f"error: cannot write {path}: File too large. Free some space, raise the limit on")


def test_warnings_are_one_line_on_stderr(posswap: Posswap, tmp_path: Path) -> None:
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hf_posswap.schemes]\ntoy = no_such_module\n")
    run = posswap("schemes", "--json", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert run.returncode == 0
    assert run.stdout.startswith("[")
    assert run.stderr.startswith("warning: the entry point 'toy'")
    assert run.stderr.count("\n") == 1


def interrupted(arguments: list[str], delay: float, *, ignored: bool = False) -> tuple[int, str]:
    """Run `posswap` as its console script does, send SIGINT after `delay` seconds, and return how it ended."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"]["posswap"].partition(":")
    script = (
        f"import sys, hf_posswap\nprint('begun', flush=True)\nfrom {module} import {function}\nsys.exit({function}())"
    )
    command, environment = [sys.executable, "-c", script, *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    if ignored:
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    return process.returncode, said


@pytest.mark.parametrize("delay", [0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
def test_ctrl_c_ends_a_command_quietly_from_its_first_moment(delay: float) -> None:
    assert interrupted(["schemes"], delay) in ((130, ""), (0, ""))  # the latter: it was faster


@pytest.mark.slow
def test_ctrl_c_at_any_moment_is_one_exit_code(llama: Path, tmp_path: Path) -> None:
    moments = [0.05 + 0.23 * number for number in range(14)]
    swap = ["patch", str(llama), "linear:factor=2", "-o", str(tmp_path / "out"), "--overwrite"]
    ends = {delay: interrupted(swap, delay) for delay in moments}
    assert all(end == (130, "") or end[0] == 0 for end in ends.values()), ends


MOMENTS = {
    "an import": ("import slow; time.sleep(9)", 130, "imported\n"),
    "the end of Python": ("sys.last = Late()", 0, ""),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_in_odd_moments(tmp_path: Path, moment: str) -> None:
    line, code, said = MOMENTS[moment]
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\nprint('imported', flush=True)\n"
    )
    script = (
        "import os, signal, sys, time\n"
        "from hf_posswap.cli import app\n"
        "from hf_posswap.command import main\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT) -> None:\n"
        "        kill(pid, number)\n"
        "@app.command()\n"
        "def oddly() -> None:\n"
        f"    {line}\n"
        "sys.argv = ['posswap', 'oddly']\n"
        "main()\n"
    )
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")


def test_ctrl_c_that_a_shell_has_ignored_stays_ignored() -> None:
    assert interrupted(["--version"], 0.05, ignored=True) == (0, "")


def test_an_interrupt_that_a_library_makes_another_error_of_is_one() -> None:
    code = (
        "import os, signal, sys\n"
        "from hf_posswap.cli import app, main\n"
        "@app.command()\n"
        "def lazily() -> None:\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt as error:\n"
        "        raise RuntimeError('Could not import module') from error\n"
        "sys.argv = ['posswap', 'lazily']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "")
