"""The page in a real headless Chromium: it opens without a complaint, shows its figures, and does what it offers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_posswap.comparison.report import write_html
from tests.chromium import start_chromium
from tests.report.conftest import NAMES

selenium = pytest.importorskip("selenium", reason="selenium is not installed: the page is not tested in a browser")

from selenium.webdriver import ActionChains, Chrome  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.slow

FIGURES = ("perplexity", "positions", "gain", "offsets", "cost")


@pytest.fixture(params=["desktop", "phone", "dark"])
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chrome]:
    with start_chromium(request.param, tmp_path / "profile") as driver:
        yield driver


@pytest.fixture
def desktop(tmp_path: Path) -> Iterator[Chrome]:
    with start_chromium("desktop", tmp_path / "profile") as driver:
        yield driver


def _open(driver: Chrome, results: dict[str, Any], folder: Path) -> None:
    write_html(results, folder / "report.html")
    driver.get((folder / "report.html").as_uri())


def _shown(driver: Chrome, selector: str) -> list[Any]:
    return [found for found in driver.find_elements(By.CSS_SELECTOR, selector) if found.is_displayed()]


def test_it_opens_and_shows_every_figure(browser: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(browser, results, tmp_path)
    assert browser.get_log("browser") == []
    assert browser.title == "3 models by length: hf_posswap"  # no name became a script that sets it
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    for figure in FIGURES:
        charts = _shown(browser, f"#{figure} svg.plot")
        assert len(charts) == (2 if figure == "cost" else 1)  # the wide or the narrow one, not both
        assert all(chart.rect["width"] > 250 and chart.rect["height"] > 150 for chart in charts)
        assert all(path.rect["width"] > 20 for path in _shown(browser, f"#{figure} .stroke"))
    assert len(_shown(browser, "#needles figure")) == 3
    assert all(cell.rect["width"] > 15 for cell in _shown(browser, "#needles td"))
    assert all(bar.rect["width"] > 0 for bar in _shown(browser, "#short .point"))


def test_nothing_is_wider_than_the_screen(browser: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(browser, results, tmp_path)
    widths = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    outside = browser.execute_script(
        "return [...document.querySelectorAll('section, svg, figure, h1, h2, p, .heat, .track')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


def test_letters_on_a_phone_can_be_read(results: dict[str, Any], tmp_path: Path) -> None:
    with start_chromium("phone", tmp_path / "profile") as driver:
        _open(driver, results, tmp_path)
        ratio = "return [...document.querySelectorAll('svg.narrow')].map(s => s.getBoundingClientRect().width / 360)"
        assert all(shrunk * 12.5 > 10.5 for shrunk in driver.execute_script(ratio))  # pixels of the smallest letters


def test_the_page_is_dark_where_dark_is_preferred(results: dict[str, Any], tmp_path: Path) -> None:
    def brightness(kind: str) -> float:
        (tmp_path / kind).mkdir()
        with start_chromium(kind, tmp_path / kind) as driver:
            _open(driver, results, tmp_path)
            colour = driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        return sum(map(float, colour.partition("(")[2].rstrip(")").split(",")[:3])) / 765

    assert brightness("dark") < 0.2 < 0.9 < brightness("desktop")


def test_a_click_on_a_heading_sorts_by_numbers(desktop: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(desktop, results, tmp_path)
    column = results["lengths"].index(128) + 1
    expected = sorted(results["models"], key=lambda name: results["models"][name]["ppl_prefix"][1]["perplexity"])
    heading = desktop.find_elements(By.CSS_SELECTOR, "#overview thead th")[column]
    for order in (expected, expected[::-1]):
        heading.find_element(By.TAG_NAME, "button").click()
        assert _models(desktop, results) == order
    heading = desktop.find_elements(By.CSS_SELECTOR, "#overview thead th")[column + 1]  # the base cannot run it
    for _ in range(2):
        heading.find_element(By.TAG_NAME, "button").click()
        assert _models(desktop, results)[-1] == NAMES[0]


def _models(driver: Chrome, results: dict[str, Any]) -> list[str]:
    """Return the models in the order of the table, without the sliding window."""
    names = [cell.text for cell in driver.find_elements(By.CSS_SELECTOR, "#overview tbody th")]
    assert names.count(results["sliding"]["name"]) == 1
    return [name for name in names if name != results["sliding"]["name"]]


def test_pointing_shows_values(desktop: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(desktop, results, tmp_path)
    strip = next(s for s in _shown(desktop, "#perplexity .strip") if s.get_attribute("data-x") == "128")
    desktop.execute_script("arguments[0].scrollIntoView({block: 'center'})", strip)
    ActionChains(desktop).move_to_element(strip).perform()
    tip = desktop.find_element(By.ID, "tip")
    assert tip.is_displayed()
    assert tip.text.startswith("128 tokens")
    for name, model in results["models"].items():
        assert name in tip.text
        assert f"{model['ppl_prefix'][1]['perplexity']:.4g}" in tip.text
    assert len(_shown(desktop, "#perplexity .dot.on")) == 4  # the sliding window too
    ActionChains(desktop).move_to_element(desktop.find_element(By.CSS_SELECTOR, "#perplexity h2")).perform()
    assert not tip.is_displayed()


def test_a_needle_field_says_its_interval(desktop: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(desktop, results, tmp_path)
    field = desktop.find_element(By.CSS_SELECTOR, "#needles td[style]")
    tip = desktop.find_element(By.ID, "tip")

    def pointed_at(_: Chrome) -> bool:  # again while the page still scrolls under the pointer
        desktop.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
        ActionChains(desktop).move_to_element_with_offset(field, 1, 1).move_to_element(field).perform()
        return tip.is_displayed()

    WebDriverWait(desktop, 20).until(pointed_at)
    assert "95 % interval" in tip.text.replace("95%", "95 %")


def test_a_model_can_be_put_out_of_sight(desktop: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(desktop, results, tmp_path)
    button = desktop.find_elements(By.CSS_SELECTOR, "#perplexity .legend button")[1]
    desktop.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    for shown in (3, 4):  # the sliding window too
        button.click()
        assert len(_shown(desktop, "#perplexity .stroke")) == shown
        assert len(_shown(desktop, "#positions .stroke")) == shown


def test_the_page_prints_to_pdf(desktop: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(desktop, results, tmp_path)
    printed = base64.b64decode(desktop.print_page())
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000


def test_the_results_can_be_saved_from_the_page(desktop: Chrome, results: dict[str, Any], tmp_path: Path) -> None:
    _open(desktop, results, tmp_path)
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    desktop.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    desktop.find_element(By.ID, "save").click()
    saved = tmp_path / "results.json"
    WebDriverWait(desktop, 10).until(lambda _: saved.exists())
    assert json.loads(saved.read_text(encoding="utf-8")) == results
