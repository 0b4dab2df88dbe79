"""Links of the pages lead to files and headings that are there; commands, options and names in them exist."""

from __future__ import annotations

import pydoc
import re
import shlex

import pytest
import typer.main

from hf_posswap.cli.app import app
from hf_posswap.errors import PosswapError
from tests.docs.pages import BESIDE, PAGES, README, ROOT, anchors, blocks_of, links, prose, slug, text_of

EVERY = [*PAGES, *BESIDE]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def broken(page: str, text: str) -> list[str]:
    """Return the links of `text`, at the place of `page`, that lead nowhere."""
    found = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        if not target.exists() or (
            anchor and anchor not in anchors(text if not path else target.read_text(encoding="utf-8"))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", EVERY)
def test_links_lead_somewhere(page: str) -> None:
    assert broken(page, text_of(page)) == []


def test_a_broken_link_is_found() -> None:
    good = "# One thing\n[a](pyproject.toml) [b](#one-thing) [c](https://host.org/x)\n"
    assert broken(README, good) == []
    bad = "[d](nowhere.md) [e](#two) [f](.github/CONTRIBUTING.md#three)\n"
    assert broken(README, good + bad) == ["nowhere.md", "#two", ".github/CONTRIBUTING.md#three"]
    assert slug("What a swap costs: `time`, memory") == "what-a-swap-costs-time-memory"


@pytest.mark.parametrize("page", EVERY)
def test_paths_in_the_text_exist(page: str) -> None:
    paths = re.findall(r"`((?:hf_posswap|recipes|tests|\.ci|\.docs)/[\w./-]+)`", text_of(page))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def command_lines(page: str) -> list[str]:
    """Return what a page has typed to `posswap`: in its blocks, line by line, and in its text."""
    shell = "\n".join(block.code for block in blocks_of(page) if block.language == "bash").replace("\\\n", " ")
    typed = [line.partition("  #")[0] for line in shell.splitlines()]
    typed += re.findall(r"`(posswap [^`]+)`", prose(text_of(page)))
    return [line[found.start() :] for line in typed if (found := re.search(r"\bposswap [a-z-]", line))]


def unknown(line: str) -> list[str]:
    """Return the command and the options of a line that `posswap` does not have."""
    words = shlex.split(re.split(r"&&|\|\s|;", line)[0].replace("...", ""))[1:]
    if not words or words[0].startswith("--"):
        return []
    command = COMMANDS.get(words[0])
    if command is None:
        return [words[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words[1:] if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", EVERY)
def test_commands_in_the_text_exist(page: str) -> None:
    assert [line for line in command_lines(page) if unknown(line)] == []


def test_an_unknown_command_is_found() -> None:
    assert unknown("posswap explain my-gpt2 rope --json") == []
    assert unknown("posswap explain my-gpt2 --jsson") == ["--jsson"]
    assert unknown("posswap explian my-gpt2") == ["explian"]


@pytest.mark.parametrize("page", [page for page in EVERY if "CHANGELOG" not in page])  # it tells what went
def test_names_in_the_text_exist(page: str) -> None:
    missing = []
    for name in set(re.findall(r"`(hf_posswap(?:\.\w+)+)", prose(text_of(page)))):
        try:
            missing += [name] if pydoc.locate(name) is None else []
        except PosswapError:
            missing.append(name)
    assert missing == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(text_of(README).splitlines()) <= 150
    linked = {link.partition("#")[0] for link in links(text_of(README))}
    assert set(PAGES) - {README} - linked == set()
