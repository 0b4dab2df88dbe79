"""The project as a whole: what the README prints is so, the public names are documented, no file leaks a machine."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

import hf_posswap
from hf_posswap import errors

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Folders of one machine, and the data beside the project, which only conftest.py may look for.
MACHINE = re.compile(r"(?<![\w.~-])/(?:work|root|home|tmp|opt|Users|mnt)/|\.\./shared")
EXAMPLE = re.compile(r"<!-- example -->\n+```python\n(.*?)```\n+```text\n(.*?)```\n+<!-- /example -->", re.DOTALL)
EXAMPLES = EXAMPLE.findall(README)
INCLUDE = re.compile(r"<!-- file: (\S+) -->\n+```python\n(.*?)```", re.DOTALL)


def tracked_files() -> list[Path]:
    """Return every file that the repository holds or would hold with the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def machine_paths(files: Iterable[Path]) -> list[str]:
    """Return every line of `files` that names a path of one machine."""
    found = []
    for path in files:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [
            f"{path.name}:{number}: {line.strip()[:80]}" for number, line in enumerate(lines, 1) if MACHINE.search(line)
        ]
    return found


def test_no_file_names_a_path_of_a_machine() -> None:
    allowed = {ROOT / "tests" / "conftest.py", Path(__file__).resolve()}
    assert machine_paths(path for path in tracked_files() if path not in allowed) == []


@pytest.mark.parametrize(
    "line", ["open('/work/main/x')", "#!/root/venv/bin/python", "data: ../shared/data", "(/tmp/a)"]
)
def test_a_path_of_a_machine_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "planted.py").write_text(f"first\n{line}\n")
    assert machine_paths([tmp_path / "planted.py"]) == [f"planted.py:2: {line}"]


@pytest.mark.parametrize("line", ["https://host.org/home/page", "~/.cache/root/x", "#!/usr/bin/env bash", "a/tmp/b"])
def test_other_paths_are_left_alone(tmp_path: Path, line: str) -> None:
    (tmp_path / "innocent.py").write_text(line)
    assert machine_paths([tmp_path / "innocent.py"]) == []


def test_the_checks_run_the_commands_of_the_readme() -> None:
    printed = re.findall(r"<!-- command: \w+ -->\n```bash\n(.+?)\n```", README)
    assert len(printed) == 2
    run = subprocess.run(["bash", ROOT / ".ci" / "run", "--commands"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == printed
    assert "posswap quickstart" in printed[0]
    assert printed[1].endswith("pytest")


def test_the_readme_has_examples() -> None:
    assert EXAMPLES, "the README needs a python block and a text block between its example markers"
    assert len(EXAMPLES) == README.count("<!-- example -->")


@pytest.mark.parametrize(("code", "shown"), EXAMPLES, ids=lambda part: "")
def test_the_readmes_examples_print_what_they_show(code: str, shown: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().rstrip() == shown.rstrip()


def test_the_readme_shows_files_as_they_are() -> None:
    shown = INCLUDE.findall(README)
    assert shown, "the README shows the tested toys of a scheme and of a family under <!-- file: PATH --> lines"
    for path, code in shown:
        assert code == (ROOT / path).read_text(encoding="utf-8"), f"README.md shows an old {path}"


def test_the_support_table_is_there() -> None:
    table = README.partition("<!-- support table -->")[2].partition("<!-- /support table -->")[0]
    assert "| scheme | kind | promises |" in table, "run the light contract, then python recipes/support_table.py"


def test_public_names_are_sorted_importable_and_documented() -> None:
    names = hf_posswap.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(names) == len(set(names))
    assert [name for name in names if not documented(name, getattr(hf_posswap, name))] == []


def documented(name: str, public: object) -> bool:
    """Return whether `public` has words of its own: a dataclass without them is given its signature."""
    words = vars(public).get("__doc__") if isinstance(public, type) else public.__doc__
    return bool(words and words.strip()) and not words.startswith(f"{name}(")


def test_an_undocumented_name_is_found() -> None:
    silent = dataclasses.make_dataclass("Silent", ["x"], bases=(errors.SchemeError,))
    assert not documented("Silent", silent)
    assert not documented("nothing", lambda: None)
    assert documented("SchemeError", errors.SchemeError)


@pytest.mark.parametrize(
    "name",
    [
        "describe_positions", "errors", "explain", "list_families", "list_schemes", "load", "patch_model", "patched",
        "plan_swap", "supports", "unpatch_model", "verify_swap",
    ],
)  # fmt: skip
def test_the_agreed_names_are_public(name: str) -> None:
    assert name in hf_posswap.__all__
    assert name in dir(hf_posswap)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="patch_modle"):
        _ = hf_posswap.patch_modle
