"""The page in a real headless Chromium: offline, by keyboard, on a phone, in the dark, on paper."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from hf_posswap.explorer.model import model_facts
from hf_posswap.explorer.page import write_page
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


def opened(driver: Any, place: Path, facts: Any = None) -> Any:
    write_page(place / "page.html", facts)
    driver.get((place / "page.html").as_uri())
    open_all(driver)
    return driver


def open_all(driver: Any) -> None:
    driver.execute_script("document.getElementById('more').open = true")


def yarn() -> Any:
    return model_facts(LLAMA, make_scheme("yarn:factor=4"), written="yarn:factor=4")


def drawn(driver: Any) -> int:
    return int(driver.execute_script("return document.body.dataset.drawn"))


def wait_for_drawing(driver: Any, before: int) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20).until(lambda one: drawn(one) > before)


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

    from hf_posswap.explorer.choices import PRESETS

    driver = opened(chromium("desktop"), tmp_path)
    driver.refresh()
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
        held = driver.execute_script("return [posswap.controls.settings, [...posswap.controls.chosen]]")
        assert held == [preset.settings, list(preset.schemes)]
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
    held = driver.execute_script("return [posswap.controls.settings, [...posswap.controls.chosen]]")
    assert held == [before, ["rope", "linear", "yarn"]]


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
    slider = driver.find_element(By.ID, "slide-base")
    slider.send_keys(*[Keys.ARROW_RIGHT] * 60)
    wait_for_drawing(driver, before)
    base = float(driver.find_element(By.ID, "number-base").get_attribute("value"))
    assert base > 10_000
    assert driver.find_element(By.CSS_SELECTOR, "#wavelengths .said").text != said
    assert f"base={base:g}" in driver.current_url
    assert slider.get_attribute("aria-valuetext") == f"{base:g}"


def test_everything_is_reached_by_the_tab_key(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    wanted = driver.execute_script("return document.querySelectorAll('input, button, summary, svg.plot').length")
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
    assert {"slide-base", "number-dim", "reset", "yarn"} <= reached


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
    values = driver.execute_script("return posswap.data('wavelengths', 'rope', posswap.controls.settings)")
    read = driver.find_element(By.CSS_SELECTOR, "#wavelengths .reader").text
    assert read.startswith(f"pair 1: rope {values[1]:.4g}")


def test_what_cannot_be_is_marked_and_nothing_is_drawn_of_it(chromium: Chromium, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = opened(chromium("desktop"), tmp_path)
    number = driver.find_element(By.ID, "number-window")
    before = driver.execute_script("return posswap.controls.settings.window")
    for wrong in ("-5", "0.5", "1e99"):
        number.send_keys(Keys.CONTROL + "a")
        number.send_keys(wrong)
        assert number.get_attribute("aria-invalid") == "true"
        assert driver.execute_script("return posswap.controls.settings.window") == before
    driver.execute_script("arguments[0].blur()", number)
    assert number.get_attribute("aria-invalid") is None
    driver.get(driver.current_url.partition("#")[0] + "#dim=2&schemes=ntk,rope")
    driver.refresh()
    refused = driver.find_element(By.ID, "refused").text
    assert refused == "ntk: needs at least 4 dimensions a head with these settings."


def test_an_address_brings_back_what_was_chosen(chromium: Chromium, tmp_path: Path) -> None:
    driver = opened(chromium("desktop"), tmp_path)
    driver.get(driver.current_url + "#schemes=ntk,kerple&base=500&factor=2.5&window=100&heads=3&dim=16")
    driver.refresh()
    held = driver.execute_script("return [posswap.controls.settings, [...posswap.controls.chosen]]")
    assert held[0] == {"base": 500, "factor": 2.5, "window": 100, "heads": 3, "dim": 16}
    assert held[1] == ["ntk", "kerple"]


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
    held = driver.execute_script("return [posswap.controls.settings, [...posswap.controls.chosen]]")
    assert held == [{"base": 10000, "factor": 4, "window": 128, "heads": 4, "dim": 16}, ["rope", "yarn"]]


def test_names_are_no_markup(chromium: Chromium, tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_positions=16)
    config.name_or_path = "</script><script>document.title='broken'</script>"
    driver = opened(chromium("desktop"), tmp_path, model_facts(config))
    assert driver.title.startswith("Positions of </script>")
    assert driver.get_log("browser") == []
