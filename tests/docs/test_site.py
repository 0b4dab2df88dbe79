"""The built site: its pages are there, their links and anchors lead somewhere, and nothing is fetched from elsewhere.

The site is built for these tests, unless HF_POSSWAP_SITE_DONE names the folder of one that was built before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import hf_posswap
from hf_posswap import errors
from hf_posswap.cli.app import app
from hf_posswap.inspection.explorer.page import render_page
from hf_posswap.schemes import SCHEMES
from tests.chromium import start_chromium
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Html(HTMLParser):
    """What a page has: ids, links, and what a browser fetches for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {name for name in (values.get("id"), values.get("name")) if name}
        for name, value in values.items():
            if (tag, name) in FETCHED and value and values.get("rel") != "canonical":
                self.fetched.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the built site."""
    if os.environ.get("HF_POSSWAP_SITE_DONE"):
        yield Path(os.environ["HF_POSSWAP_SITE_DONE"])
        return
    if any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings", "nbclient", "jupytext")):
        pytest.skip("mkdocs and nbclient are not installed (extra docs): the site is not built")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".docs/mkdocs.yml", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    yield folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    """Return the pages of the site by their paths."""
    return {path.relative_to(site).as_posix(): Html(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_there(pages: dict[str, Html]) -> None:
    written = {f"{path.stem}.html" for path in (ROOT / ".docs" / "pages").glob("*.md")}
    assert written | {"index.html", "changelog.html", "results/effects.html", "results/bench.html"} <= set(pages)
    notebooks = {f"tutorial-{name}.html" for name in ("swap", "adapt", "compare")}
    assert notebooks <= set(pages)


def test_result_pages_are_linked_from_results_and_not_from_the_side_bar(pages: dict[str, Html]) -> None:
    single = {name for name in pages if name.startswith("results/")}
    assert len(single) > 20
    assert single - set(pages["results.html"].links) == set()
    assert {link for link in pages["quickstart.html"].links if "results/" in link} == {"results/quickstart.html"}


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[str, Html]) -> None:
    broken = []
    for name, page in pages.items():
        if name == "404.html":  # it is served for any address, and its links begin at the root
            continue
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            if "://" in link or link.startswith(("mailto:", "javascript:")):
                continue
            target = (site / name).parent.joinpath(path).resolve() if path else site / name
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target.relative_to(site.resolve()).as_posix()) if path else page
            if not target.exists() or (anchor and (known is None or anchor not in known.ids)):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_nothing_is_fetched_from_elsewhere(pages: dict[str, Html]) -> None:
    assert {name: far for name, page in pages.items() if (far := [u for u in page.fetched if "//" in u])} == {}


def test_the_interactive_page_is_there_and_linked(site: Path, pages: dict[str, Html]) -> None:
    assert (site / "explorer.html").read_text(encoding="utf-8") == render_page()
    assert {name for name, page in pages.items() if "explorer.html" in page.links} >= {
        "index.html", "pictures.html", "numbers.html",
    }  # fmt: skip


def test_the_tutorial_is_a_page_and_a_notebook_that_were_run(site: Path, pages: dict[str, Html]) -> None:
    notebook = json.loads((site / "tutorial" / "positions.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    shown = [link for link in pages["tutorial.html"].fetched if "pictures/tutorial/positions-" in link]
    assert len(shown) == len(drawn) > 5
    assert all((site / link).is_file() for link in shown)
    assert "tutorial/positions.ipynb" in pages["tutorial.html"].links


def test_results_are_tables_on_the_pages_of_notebooks(site: Path) -> None:
    """Not blocks of text: the plan of a swap, its verification, and a comparison with its verdicts."""
    for page, cells in (
        ("tutorial.html", ("embedding", "learned table, 128 positions", "rope")),
        ("tutorial-swap.html", ("embedding", "learned table, 128 positions", "ok  finite")),
        ("tutorial-compare.html", ("fitted alibi", "sliding window", "128 (1x)")),
    ):
        text = (site / page).read_text(encoding="utf-8")
        tables = "".join(re.findall(r'<table style=".*?</table>', text, flags=re.DOTALL))
        shown = [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][ >].*?</t[hd]>", tables)]
        assert [cell for cell in cells if not any(cell in other for other in shown)] == [], page
        blocks = "".join(re.findall(r"<pre>.*?</pre>", text, flags=re.DOTALL))
        assert "route       plugin" not in blocks, page


def test_notebooks_print_no_warnings_and_link_into_no_folder(site: Path) -> None:
    notebooks = sorted((site / "tutorial").glob("*.ipynb"))
    assert [path.stem for path in notebooks] == ["adapt", "compare", "positions", "swap"]
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        assert [output["text"] for output in outputs if output.get("name") == "stderr"] == [], path.name
        prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link] == [], path.name


def test_what_is_generated_is_whole(site: Path, pages: dict[str, Html]) -> None:
    assert {name for name, _ in SCHEMES.items()} <= pages["schemes.html"].ids
    names = {f"hf_posswap.{name}" for name in hf_posswap.__all__} - {"hf_posswap.errors", "hf_posswap.__version__"}
    assert names <= pages["api.html"].ids
    commands = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert {f"posswap-{name}" for name in commands} <= pages["cli.html"].ids
    public = {name: value for name, value in vars(errors).items() if not name.startswith("_")}
    known = {name.lower() for name, value in public.items() if isinstance(value, type)} - {"iterable"}
    assert known <= pages["troubleshooting.html"].ids
    text = "".join((site / name).read_text(encoding="utf-8") for name in pages)
    assert re.findall(r"(?:<|&lt;)!-- generated: (?!NAME)\S*", text) == []


def opened(kind: str, page: Path, profile: Path) -> Any:
    """Return a Chromium with a page of the site, read as a file, once its scripts have run."""
    browser = start_chromium(kind, profile)
    browser.get(page.as_uri())
    browser.implicitly_wait(20)
    return browser


def test_the_search_works_in_pages_that_are_read_as_files(site: Path, tmp_path: Path) -> None:
    with opened("desktop", site / "schemes.html", tmp_path / "profile") as browser:
        browser.find_element("css selector", "input.md-search__input").send_keys("babyllama105")
        hits = browser.find_elements("css selector", ".md-search-result__item a")
        assert hits, browser.get_log("browser")
        assert any("results" in hit.get_attribute("href") for hit in hits)
        assert browser.get_log("browser") == []


@pytest.mark.parametrize(("page", "word"), [("support.html", "qwen3_next"), ("serving.html", "sglang")])
def test_a_filter_shows_the_rows_with_all_the_words(page: str, word: str, site: Path, tmp_path: Path) -> None:
    with opened("desktop", site / page, tmp_path / "profile") as browser:
        rows = "return [...document.querySelectorAll('tbody tr')].filter(r => r.offsetParent && %s).length"
        has = f"r.textContent.toLowerCase().includes('{word}')"
        before = browser.execute_script(rows % has)
        boxes = browser.find_elements("css selector", ".posswap-filter input")
        assert before
        assert boxes
        for box in boxes:
            if box.is_displayed():
                box.send_keys(word.upper())
        assert browser.execute_script(rows % has) == before
        long = "r.parentElement.children.length >= 12 && "
        assert browser.execute_script(rows % f"{long}!{has}") == 0
        boxes[0].clear()
        boxes[0].send_keys(f"{word} nothing-has-this-word")
        assert "0 of" in browser.find_element("css selector", ".posswap-filter output").text


def test_no_page_is_wider_than_a_phone(site: Path, pages: dict[str, Html], tmp_path: Path) -> None:
    wide = {}
    with start_chromium("phone", tmp_path / "profile") as browser:
        for name in ("index", "support", "serving", "results", "howto", "choosing", "evaluation", "results/effects"):
            assert f"{name}.html" in pages
            browser.get((site / f"{name}.html").as_uri())
            size = browser.execute_script("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
            if size[0] > size[1]:
                wide[name] = size
    assert wide == {}
