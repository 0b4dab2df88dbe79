"""The page in a real headless Chromium: offline, by keyboard, on a phone, in the dark, on paper."""

from __future__ import annotations

import base64
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from hf_posswap.inspection.explorer.data import PRESETS, SHAPES, page_data
from hf_posswap.inspection.explorer.model import model_facts
from hf_posswap.inspection.explorer.page import render_page, write_page
from hf_posswap.plotting.positions.numbers import sample_geometry
from hf_posswap.schemes import make_scheme
from tests.explorer.conftest import Chromium

pytestmark = pytest.mark.slow

PICTURES = ("wavelengths", "scores", "relative", "bias", "turning", "table", "similarity")
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50,
    max_position_embeddings=128,
)  # fmt: skip


CONTRAST = """
const parse = (text) => {
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d", { willReadFrequently: true });
  canvas.width = canvas.height = 1;
  context.fillStyle = text;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  const layers = [];
  for (let one = element; one; one = one.parentElement) layers.unshift(parse(getComputedStyle(one).backgroundColor));
  return layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const low = [];
for (const element of document.querySelectorAll("body *:not(script):not(style):not(option)")) {
  const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join(" ").trim();
  if (!text || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), below = behind(element);
  const colour = element.closest("svg") ? style.fill : style.color;
  const [x, y] = [luminance(over(parse(colour), below)), luminance(below)];
  const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  if (ratio < (large ? 3 : 4.5)) low.push(`${ratio.toFixed(2)} ${element.tagName} ${text.slice(0, 50)}`);
}
return low;
"""


@lru_cache(maxsize=1)
def page_of_schemes() -> str:
    return render_page()


@lru_cache(maxsize=1)
def data_of_schemes() -> Any:
    """Return the data of `page_of_schemes` as the browser has it, and the names on the page."""
    found, choices = page_data(SHAPES)
    return json.loads(json.dumps(found)), [choice.name for choice in choices if choice.group is not None]


def opened(driver: Any, place: Path, facts: Any = None) -> Any:
    page = page_of_schemes() if facts is None else render_page(facts)
    (place / "page.html").write_text(page, encoding="utf-8")
    visit(driver, (place / "page.html").as_uri())
    driver.execute_script("document.getElementById('more').open = true")
    return driver


def visit(driver: Any, address: str) -> None:
    """Open an address, anew if it is that of the page already, and wait until it is drawn."""
    driver.get("about:blank")
    driver.get(address)
    wait_for_drawing(driver, 0)


def yarn() -> Any:
    return model_facts(LLAMA, make_scheme("yarn:factor=4"), written="yarn:factor=4")


def drawn(driver: Any) -> int:
    return int(driver.execute_script("return document.body.dataset.drawn ?? 0"))


def wait_for_drawing(driver: Any, before: int) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20).until(lambda one: drawn(one) > before)


def state(driver: Any) -> list[Any]:
    """Return the settings and the selected schemes."""
    return driver.execute_script("return [posswap.controls.settings, [...posswap.controls.chosen]]")


def visible(driver: Any) -> list[str]:
    return driver.execute_script(
        "return [...document.querySelectorAll('main > section')].filter(s => !s.hidden).map(s => s.id)"
    )


@pytest.mark.parametrize("kind", ["desktop", "phone", "dark"])
def test_it_opens_without_a_complaint_and_draws_every_picture(chromium: Chromium, tmp_path: Path, kind: str) -> None:
    driver = opened(chromium(kind), tmp_path)
    assert driver.get_log("browser") == []
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert visible(driver) == ["choose", *PICTURES]
    for name in PICTURES:
        sizes = driver.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} :is(svg.plot, svg.round, canvas)`)]"
            ".map(e => e.getBoundingClientRect()).map(r => [r.width, r.height])",
            name,
        )
        assert sizes
        assert all(width > 80 and height > 80 for width, height in sizes)
        assert driver.execute_script("return document.querySelectorAll(`#${arguments[0]} .said li`).length", name) > 0


@pytest.mark.parametrize("kind", ["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(chromium: Chromium, tmp_path: Path, kind: str) -> None:
    driver = opened(chromium(kind), tmp_path, yarn())
    widths = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1] == (390 if kind == "phone" else widths[1])
    outside = driver.execute_script(
        "return [...document.querySelectorAll('section, svg.plot, canvas, figure, h1, h2, p, label, input, .commands')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    small = driver.execute_script(
        "return [...document.querySelectorAll('svg.plot text')].map(t => parseFloat(getComputedStyle(t).fontSize))"
    )
    assert min(small) >= 12


def test_it_begins_with_one_slider_and_questions_that_have_answers(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    visit(driver, driver.current_url)
    shown = [slider for slider in driver.find_elements(By.CSS_SELECTOR, "input[type=range]") if slider.is_displayed()]
    assert [slider.get_attribute("id") for slider in shown] == ["slide-factor"]
    assert driver.find_element(By.ID, "answer").text == ""
    buttons = driver.find_elements(By.CSS_SELECTOR, "#questions button")
    assert [button.text for button in buttons] == [preset.question for preset in PRESETS]
    for button, preset in zip(buttons, PRESETS, strict=True):
        before = drawn(driver)
        button.send_keys(Keys.ENTER)
        wait_for_drawing(driver, before)
        assert driver.find_element(By.ID, "answer").text == preset.answer
        assert state(driver) == [{"shape": preset.shape, "factor": 4}, list(preset.schemes)]
        assert button.get_attribute("aria-pressed") == "true"
        assert driver.find_element(By.ID, "refused").text == ""
    before = drawn(driver)
    shown[0].send_keys(Keys.ARROW_RIGHT)  # another length is the same question
    wait_for_drawing(driver, before)
    assert driver.find_element(By.ID, "answer").text == PRESETS[-1].answer
    driver.find_element(By.ID, "reset").send_keys(Keys.ENTER)
    assert driver.find_element(By.ID, "answer").text == ""


def test_a_question_keeps_the_shape_of_a_model(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path, yarn())
    before = driver.execute_script("return posswap.controls.settings")
    driver.find_element(By.CSS_SELECTOR, "#questions button:nth-child(2)").send_keys(Keys.ENTER)
    assert state(driver) == [before, ["rope", "linear", "yarn"]]


def test_text_has_enough_contrast(chromium: Chromium, tmp_path: Path) -> None:
    """WCAG 2.2, AA: 4.5 to 1, and 3 to 1 for large text, in both themes."""
    for kind in ("desktop", "dark"):
        driver = opened(chromium(kind), tmp_path, yarn())
        assert driver.execute_script(CONTRAST) == []


def test_it_is_dark_where_dark_is_preferred(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    def brightness(kind: str) -> float:
        driver = opened(chromium(kind), tmp_path)
        colour = driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        return sum(map(float, colour.partition("(")[2].rstrip(")").split(",")[:3])) / 765

    assert brightness("dark") < 0.2 < 0.9 < brightness("desktop")


def test_a_slider_is_moved_by_keys_and_redraws(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    before, said = drawn(driver), driver.find_element(By.CSS_SELECTOR, "#wavelengths .said").text
    slider = driver.find_element(By.ID, "slide-factor")
    slider.send_keys(*[Keys.ARROW_RIGHT] * 3)
    wait_for_drawing(driver, before)
    assert driver.find_element(By.ID, "length").text == "12 windows, 6,144 tokens"
    assert driver.find_element(By.CSS_SELECTOR, "#wavelengths .said").text != said
    assert "factor=12" in driver.current_url
    assert slider.get_attribute("aria-valuetext") == "12 windows, 6,144 tokens"
    slider.send_keys(Keys.HOME)
    assert driver.find_element(By.ID, "length").text == "1 window, 512 tokens"
    slider.send_keys(Keys.END)
    assert driver.find_element(By.ID, "length").text == "64 windows, 32,768 tokens"


def test_a_shape_is_chosen_by_keys_and_keeps_the_schemes(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    before, schemes = drawn(driver), state(driver)[1]
    driver.find_element(By.CSS_SELECTOR, "#shapes input:checked").send_keys(Keys.ARROW_DOWN)
    wait_for_drawing(driver, before)
    assert state(driver) == [{"shape": "Llama 3 8B", "factor": 4}, schemes]
    assert "32 heads of 128, window 8,192, base 500,000; 32,768 tokens" in driver.find_element(By.ID, "state").text
    assert "original window, 8192" in driver.find_element(By.ID, "wavelengths").text


@pytest.mark.parametrize("kind", PICTURES)
def test_it_draws_and_says_what_python_computed(chromium: Chromium, tmp_path: Path, kind: str) -> None:
    """Every scheme, in two shapes and at two lengths."""
    from selenium.webdriver.common.by import By

    found, names = data_of_schemes()
    driver = opened(chromium("desktop"), tmp_path)
    for shape, factor in ((0, 1), (2, 32)):
        step = next(step for step in found["shapes"][shape]["steps"] if step["factor"] == factor)
        before = drawn(driver)
        settings = {"shape": found["shapes"][shape]["name"], "factor": factor}
        driver.execute_script(
            "location.hash = new URLSearchParams({schemes: arguments[0], ...arguments[1]})", names, settings
        )
        wait_for_drawing(driver, before)
        said, refused = [], []
        for name in names:
            held = step["drawn"][name]
            refused += [f"{name}: {held['refused']}"] if "refused" in held else []
            expected = None
            if kind in held.get("pictures", {}):
                place, sentence = held["pictures"][kind]
                expected = {"name": held["name"], "found": found["pool"][place], "said": sentence}
                said.append(f"{held['name']}: {sentence}")
            shows = driver.execute_script("return posswap.data.picture(...arguments)", kind, name, settings)
            assert shows == expected
        assert [line.text for line in driver.find_elements(By.CSS_SELECTOR, f"#{kind} .said li")] == said
        assert [line.text for line in driver.find_elements(By.CSS_SELECTOR, "#refused p")] == refused


def test_a_map_has_the_colours_of_its_numbers(chromium: Chromium, tmp_path: Path) -> None:
    driver = opened(chromium("desktop"), tmp_path)
    visit(driver, driver.current_url.partition("#")[0] + "#schemes=rope&factor=2")
    side, pixels = driver.execute_script(
        "const c = document.querySelector('#relative canvas');"
        "return [c.width, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]"
    )
    rgba = [pixels[4 * k : 4 * k + 4] for k in range(side * side)]
    assert rgba[1] == [0, 0, 0, 0]  # the future has no colour
    assert rgba[0] == [0, 0x22, 0x4E, 255]  # distance 0
    assert rgba[(side - 1) * side] == [0xFE, 0xE8, 0x38, 255]  # the farthest
    middle = rgba[(side - 1) * side + side // 2]  # half as far
    assert all(abs(a - b) <= 6 for a, b in zip(middle, [0x7D, 0x7C, 0x76, 255], strict=True))


def test_everything_is_reached_by_the_tab_key(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    wanted = driver.execute_script(  # of radio buttons the tab key reaches the one that is checked
        "return document.querySelectorAll('input:not([type=radio]), input:checked, button, summary, svg.plot').length"
    )
    reached = set()
    for _ in range(wanted + 3):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        reached.add(
            driver.execute_script(
                "const e = document.activeElement; return e.id || e.value || e.ariaLabel || e.textContent"
            )
        )
    reached -= {None, ""}
    assert len(reached) >= wanted
    assert {"slide-factor", "reset", "yarn", "a small model"} <= reached


def test_a_scheme_is_chosen_by_the_space_key(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    before = drawn(driver)
    driver.find_element(By.CSS_SELECTOR, "#schemes input[value=alibi]").send_keys(Keys.SPACE)
    wait_for_drawing(driver, before)
    assert "bias" not in visible(driver)
    before = drawn(driver)
    driver.find_element(By.ID, "reset").send_keys(Keys.ENTER)
    wait_for_drawing(driver, before)
    assert "bias" in visible(driver)


def test_arrow_keys_read_a_picture(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    plot = driver.find_element(By.CSS_SELECTOR, "#wavelengths svg.plot")
    driver.execute_script("arguments[0].focus()", plot)
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT):
        driver.switch_to.active_element.send_keys(key)
    values = driver.execute_script("return posswap.data.picture('wavelengths', 'rope', posswap.controls.settings)")
    read = driver.find_element(By.CSS_SELECTOR, "#wavelengths .reader").text
    assert read.startswith(f"pair 1: rope {values['found'][1]:.4g}")


def test_what_cannot_be_is_said_and_nothing_is_drawn_of_it(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    write_page(tmp_path / "page.html", geometry=sample_geometry(heads=2, dim=2, length=64))
    driver, address = chromium("desktop"), (tmp_path / "page.html").as_uri()
    visit(driver, f"{address}#schemes=ntk,rope")
    assert driver.execute_script("return posswap.controls.settings.shape") == "your own"
    refused = driver.find_element(By.ID, "refused").text
    assert refused == "ntk: needs a rotary width of at least 4, here it is 2; use 'linear' or 'yarn' instead."
    said = driver.find_elements(By.CSS_SELECTOR, "#wavelengths .said li")
    assert [line.text.partition(":")[0] for line in said] == ["rope"]
    first = state(driver)
    for wrong in ("#factor=-5", "#factor=many&shape=none", "#schemes=nothing", "#window=wide&dim=-2"):
        visit(driver, f"{address}{wrong}")
        assert state(driver)[0] == first[0]
        assert driver.get_log("browser") == []


def test_an_address_brings_back_what_was_selected(chromium: Chromium, tmp_path: Path) -> None:
    driver = opened(chromium("desktop"), tmp_path)
    page = driver.current_url.partition("#")[0]
    visit(driver, f"{page}#schemes=ntk,kerple&shape=GPT-2&factor=1.5")
    assert state(driver) == [{"shape": "GPT-2", "factor": 1.5}, ["ntk", "kerple"]]
    visit(driver, f"{page}#schemes=ntk,kerple&base=500000&factor=5&window=8000&heads=30&dim=128")  # as it was before
    assert state(driver) == [{"shape": "Llama 3 8B", "factor": 6}, ["ntk", "kerple"]]


def test_options_of_a_scheme_are_kept_in_the_address(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    name = "yarn:factor=8,beta_fast=16"
    driver = opened(chromium("desktop"), tmp_path, model_facts(LLAMA, make_scheme(name)))
    assert state(driver) == [
        {"shape": driver.title.partition(" of ")[2].partition(":")[0], "factor": 8},
        ["rope", name],
    ]
    before = drawn(driver)
    driver.find_element(By.ID, "slide-factor").send_keys(Keys.ARROW_LEFT)
    wait_for_drawing(driver, before)
    visit(driver, driver.current_url)
    assert (state(driver)[0]["factor"], state(driver)[1]) == (6, ["rope", name])


def test_without_what_it_needs_it_says_so(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    (tmp_path / "page.html").write_text(page_of_schemes(), encoding="utf-8")
    old = page_of_schemes().replace('"use strict";', "delete window.DecompressionStream;", 1)
    (tmp_path / "old.html").write_text(old, encoding="utf-8")
    driver = chromium("desktop")
    driver.get((tmp_path / "old.html").as_uri())
    assert driver.find_element(By.ID, "refused").text.startswith("Pictures need a browser with DecompressionStream")
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    driver.get((tmp_path / "page.html").as_uri())
    assert "drawn by JavaScript, which is off" in driver.find_element(By.TAG_NAME, "noscript").text


def test_it_prints_to_pdf(chromium: Chromium, tmp_path: Path) -> None:
    driver = opened(chromium("desktop"), tmp_path, yarn())
    printed = base64.b64decode(driver.print_page())
    assert printed.startswith(b"%PDF")
    assert len(printed) > 30_000


def test_of_a_model_it_says_plan_costs_engines_and_commands(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    facts = yarn()
    driver = opened(chromium("desktop"), tmp_path, facts)
    assert visible(driver)[:6] == ["model", "plan", "costs", "serving", "commands", "choose"]
    text = {name: driver.find_element(By.ID, name).text for name in visible(driver)[:5]}
    assert facts.explanation.plan is not None
    assert facts.explanation.plan.title in text["plan"]
    assert all(f"{cost.length:,}" in text["costs"] for cost in facts.costs)
    assert all(one.target in text["serving"] and one.verdict in text["serving"] for one in facts.serving)
    assert text["commands"].splitlines()[1:] == list(facts.commands)
    assert state(driver) == [{"shape": facts.name, "factor": 4}, ["rope", "yarn:factor=4"]]
    assert "4 heads of 16, window 128, base 10,000" in driver.find_element(By.ID, "state").text


def test_names_are_no_markup(chromium: Chromium, tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_positions=16)
    config.name_or_path = "</script><script>document.title='broken'</script>"
    driver = opened(chromium("desktop"), tmp_path, model_facts(config))
    assert driver.title.startswith("Positions of </script>")
    assert driver.get_log("browser") == []
