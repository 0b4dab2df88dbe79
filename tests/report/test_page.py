"""The page against the results that it is made of: every number is in it, no text becomes markup, nothing is empty."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hf_posswap
from hf_posswap.comparison import EvalSettings, evaluate
from hf_posswap.comparison.report import render_html, write_html
from hf_posswap.comparison.report.conclusion import percent
from hf_posswap.errors import CheckpointError, DataError
from tests.comparison.test_encoder_comparison import TEXTS as ENCODED
from tests.comparison.test_encoder_comparison import TOKENIZER, bert

NETWORK = re.compile(
    r"""(?i:(?:src|href|action|data)\s*=\s*["']?(?:https?:)?//|@import|XMLHttpRequest)|\b(?:url|fetch)\("""
)
NUMBERS = (0, 2, 3)
"""The numbers of the styles of an unswapped model, RoPE and ALiBi, in every picture."""
SECTION_OF = {
    "ppl_prefix": "perplexity",
    "nll_pos": "positions",
    "ctx_gain": "gain",
    "short_reg": "short",
    "passkey": "needles",
    "offset_probe": "offsets",
    "ppl_compat": "protocols",
    "cost": "cost",
}


class _Page(HTMLParser):
    """Reads elements, their attributes and the text of scripts, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def identities(self) -> list[str]:
        return [held["id"] or "" for tag, held in self.elements if tag == "section"]


def test_the_page_is_whole_and_asks_nobody_for_anything(results: dict[str, Any]) -> None:
    text = render_html(results)
    page = _Page(text)
    assert page.open == []
    assert not NETWORK.search(text)
    assert {tag for tag, _ in page.elements} & {"img", "iframe", "object", "embed"} == set()
    assert json.loads(page.scripts[0]) == results
    policy = next(held["content"] for tag, held in page.elements if held.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_names_of_users_stay_text(results: dict[str, Any]) -> None:
    page = _Page(render_html(results))
    assert [script for script in page.scripts if script.startswith("document.title")] == []
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert not any(key.startswith("on") for _, held in page.elements for key in held)


def test_every_metric_has_its_section(results: dict[str, Any]) -> None:
    assert set(SECTION_OF.values()) <= set(_Page(render_html(results)).identities())


@pytest.mark.parametrize("metric", SECTION_OF)
def test_a_metric_that_was_not_measured_has_no_section(results: dict[str, Any], metric: str) -> None:
    for model in results["models"].values():
        model.pop(metric, None)
    shown = _Page(render_html(results)).identities()
    assert SECTION_OF[metric] not in shown
    assert set(SECTION_OF.values()) - {SECTION_OF[metric]} <= set(shown)


def test_results_without_any_metric_still_say_how_they_came_about(results: dict[str, Any]) -> None:
    for model in results["models"].values():
        for metric in SECTION_OF:
            model.pop(metric, None)
        model["not_measured"] = {"passkey": "too short"}
        for found in ("far_context", "against_sliding"):
            model.pop(found, None)
    text = render_html(results | {"comparisons": {}, "sliding": None})
    assert _Page(text).identities() == ["findings", "method"]
    assert text.count("passkey was not measured: too short") == 1  # once for all models, not once for each


@pytest.mark.parametrize("number", range(3))
def test_the_points_of_a_chart_are_where_the_numbers_are(results: dict[str, Any], number: int) -> None:
    """Log axes: pixels are a line through the logarithms of lengths and perplexities."""
    rows = list(results["models"].values())[number]["ppl_prefix"]
    number = NUMBERS[number]
    section = render_html(results).split('id="perplexity"')[1].split("</section>")[0]
    line = next(part for part in section.split("<g ")[1:] if f'data-m="{number}"' in part.split(">")[0])
    dots = [tuple(map(float, found)) for found in re.findall(r"translate\(([\d.]+),([\d.]+)\)", line)]
    dots = dots[: len(rows)]
    assert len(dots) == len(rows) >= 2
    for at, field in ((0, "length"), (1, "perplexity")):
        values = [math.log(row[field]) for row in rows]
        slopes = [
            (dots[i][at] - dots[0][at]) / (values[i] - values[0])
            for i in range(1, len(rows))
            if abs(values[i] - values[0]) > 0.1
        ]
        assert all(slope == pytest.approx(slopes[0], rel=0.03) for slope in slopes)
        assert all((slope > 0) == (at == 0) for slope in slopes)  # y grows downwards


def test_the_first_chart_has_the_paired_differences_and_their_zero_line(results: dict[str, Any]) -> None:
    section = render_html(results).split('id="difference"')[1].split("</section>")[0]
    assert section.count('class="zero"') == 2  # wide and narrow
    assert section.count(">the sliding window of base</text>") == 2
    tips = [json.loads(held["data-tip"] or "") for _, held in _Page(section).elements if "data-tip" in held]
    told = {title.partition(" tokens")[0]: rows for title, rows in tips}
    for number, (name, model) in zip(NUMBERS[1:], list(results["models"].items())[1:], strict=True):
        inside = {row["length"]: row for row in results["comparisons"][name]["lengths"]}
        rows = [inside[128], *model["against_sliding"]]
        assert [row["length"] for row in rows] == [128, 256]
        for row in rows:
            (value,) = (value for at, _, value in told[str(row["length"])] if at == number)
            assert value.startswith(f"{row['difference']:+.3f} nats ({percent(row['difference'])})")
            assert f"{row['low']:+.3f} nats" in value
            assert f"{row['high']:+.3f} nats" in value


def test_pointing_at_a_length_says_the_numbers(results: dict[str, Any]) -> None:
    page = _Page(render_html(results).split('id="perplexity"')[1].split("</section>")[0])
    tips = [json.loads(held["data-tip"] or "") for tag, held in page.elements if tag == "rect" and "data-tip" in held]
    title, rows = next(tip for tip in tips if tip[0] == "128 tokens")
    assert rows.pop()[1] == results["sliding"]["name"] == "base, sliding window"
    for number, name, value in rows:
        row = results["models"][name]["ppl_prefix"][1]
        assert NUMBERS[list(results["models"]).index(name)] == number
        assert value == f"{row['perplexity']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"
    assert (title, len(rows)) == ("128 tokens", 3)


def test_needle_fields_hold_the_shares(results: dict[str, Any]) -> None:
    page = _Page(render_html(results))
    shares = [held["style"] for tag, held in page.elements if tag == "td" and "style" in held]
    cells = [cell for model in results["models"].values() for cell in model["passkey"]["cells"]]
    assert sorted(shares) == sorted(f"--v:{cell['share']:.3f}" for cell in cells)


def test_an_encoder_has_its_own_sections() -> None:
    settings = EvalSettings(lengths=(64, 128), metrics=("mlm_pos", "pseudo_ppl", "retrieval"), documents=2)
    results = evaluate(bert(), "alibi", documents=ENCODED, tokenizer=TOKENIZER, settings=settings).results
    text = render_html(results)
    assert {"perplexity", "positions", "retrieval", "protocols", "overview"} <= set(_Page(text).identities())
    assert "pseudo-perplexity, 64 tokens" in text
    assert "on the masked tokens of the same documents" in text
    assert 'class="whisker"' in text  # the interval of the encoder that runs one length alone
    assert "Only 2 documents: with fewer than" in text
    assert "ends at 64 tokens, so it has no number beyond" in text


def test_tasks_and_longppl_are_shown_where_they_were_measured(results: dict[str, Any]) -> None:
    cells = [{"task": "niah_single", "length": 128, "score": 0.25, "prompts": 4}]
    results["models"]["base"] |= {
        "ruler_lite": {"cells": cells, "left_out": {}},
        "longppl": {"perplexity": 3.5, "key_tokens": 9, "evaluator": "itself", "length": 128},
    }
    page = _Page(text := render_html(results))
    assert "tasks" in page.identities()
    assert "25% over 4 prompts" in text
    assert ">longppl<" in text


@pytest.mark.parametrize(
    ("length", "said"), [(256, "up to 256 tokens, 2 times the window"), (128, "up to 128 tokens, the whole window")]
)
def test_an_effective_length_is_said_and_drawn(results: dict[str, Any], length: int, said: str) -> None:
    found = results["models"]["base"]["passkey"]["effective_length"]
    found |= {"length": length, "no_verdict": None}
    reach = render_html(results).split('id="effective"')[1].split("</section>")[0]
    assert said in reach
    assert f"width:{100 * length / 256:.2f}%" in reach
    assert reach.count('class="bar') == 1  # those without a verdict have words alone


def test_what_could_be_chance_is_called_so(results: dict[str, Any]) -> None:
    other = list(results["models"])[1]
    del results["models"][other]["short_reg"]  # which says the same of the window's length
    row = {"length": 128, "difference": 0.1, "low": -0.1, "high": 0.3, "p_holm": 0.2}
    results["comparisons"] = {other: {"lengths": [row], "passkey": {"needles": 9, "before": 1, "after": 3, "p": 0.5}}}
    text = render_html(results)
    for said in ("At 128 tokens: 10.5 % higher perplexity than base", "not significant (p = 0.2)"):
        assert said in text
    assert "3 of 9 passkeys found, base 1 (not significant, p = 0.5)" in text
    results["comparisons"][other] = {"lengths": [row | {"low": 0.05, "p_holm": 0.01}]}
    assert ", significant (p = 0.01)" in render_html(results)
    results["comparisons"][other] = {"lengths": [row | {"p_holm": None}]}
    assert "too few documents for a verdict" in render_html(results)


def test_one_model_alone_has_a_page(results: dict[str, Any]) -> None:
    alone = results | {"models": {"base": results["models"]["base"]}, "comparisons": {}}
    text = render_html(alone)
    assert "<h1>base by length</h1>" in text
    assert "baseline</small>" not in text


def test_many_models_stay_apart(results: dict[str, Any]) -> None:
    base = results["models"]["base"]
    text = render_html(results | {"models": {f"m{n}": base for n in range(10)}, "base": "m0"})
    assert "c2 dashed" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "needs the results.json of posswap eval or compare, got kind None"),
        ({"kind": "quickstart"}, "got kind 'quickstart'"),
        ({"kind": "hf_posswap evaluation", "schema": 3}, "schema 3, and this version of hf_posswap reads 1 and 2"),
        ({"kind": "hf_posswap evaluation", "schema": 1}, "incomplete: base, comparisons, data, .* is missing"),
    ],
)
def test_what_is_no_result_is_refused_and_nothing_is_written(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_html(given, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_results_without_models_are_refused(results: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="incomplete: models is missing"):
        render_html(results | {"models": {}})


def test_a_place_that_cannot_be_written_is_said(results: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_html(results, tmp_path / "file" / "report.html")


def test_an_evaluation_writes_its_page(measured: Any) -> None:
    assert (measured.folder / "report.html").read_text(encoding="utf-8") == render_html(measured.results)


def damaged(results: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return `results` with one value in it, however deep, gone or another."""
    values: list[Any] = [None, "text", -1, 0, 10**40, 1e308, float("nan"), [], {}, [[]], {"a": 1}, True]
    place: Any = results
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        below = place[key]
        if not isinstance(below, dict | list) or not below or chance.random() < 0.15:
            break
        place = below
    if chance.random() < 0.3:
        del place[key]
    else:
        place[key] = chance.choice(values)
    return results


@pytest.mark.parametrize("seed", range(8))
def test_edited_results_make_a_page_or_one_clear_error(results: dict[str, Any], seed: int) -> None:
    chance, rounds = random.Random(seed), 40
    refusals: list[str] = []
    for _ in range(rounds):
        try:
            assert render_html(damaged(copy.deepcopy(results), chance)).startswith("<!doctype html>")
        except DataError as error:
            refusals.append(str(error))
    assert 0 < len(refusals) < rounds
    assert all(re.match("these results|a report needs the results.json", said) for said in refusals)


def test_what_was_edited_is_said(results: dict[str, Any]) -> None:
    del results["models"]["base"]["ppl_prefix"][0]["low"]
    with pytest.raises(
        DataError, match="these results cannot be shown .*low.*edited or are incomplete.*run the evaluation again"
    ):
        render_html(results)


def test_results_of_the_older_form_are_still_shown() -> None:
    """results-1.json was written by the version before the sliding window, far context, command and date."""
    old = json.loads(Path(__file__).with_name("results-1.json").read_text())
    assert old["schema"] == 1
    text = render_html(old)
    assert {"findings", "perplexity", "positions", "gain", "needles", "short", "method"} <= set(
        _Page(text).identities()
    )
    assert 'id="difference"' in text  # from the base: there is no sliding window
    assert "the sliding window" not in text.split('id="findings"')[1].split("</section>")[0]
    assert json.loads(_Page(text).scripts[0]) == old


def test_an_encoder_without_a_head_has_cards_and_a_table() -> None:
    """A sentence encoder predicts no masked tokens: retrieval is all that is known of it."""
    settings = EvalSettings(lengths=(128,), metrics=("retrieval",), documents=2)
    model = bert().base_model
    hf_posswap.patch_model(model, "rope", max_length=128)
    texts = [text * 2 for text in ENCODED]
    results = evaluate(model, documents=texts, tokenizer=TOKENIZER, settings=settings).results
    text, (row,) = render_html(results), results["models"]["BertModel"]["retrieval"]
    assert {"findings", "overview", "retrieval"} <= set(_Page(text).identities())
    card = text.split('id="findings"')[1].split("</section>")[0]
    assert "BertModel" in card
    assert f"{row['accuracy']:.0%} of the documents of 128 tokens are found" in card
    overview = text.split('id="overview"')[1].split("</section>")[0]
    assert "BertModel" in overview
    assert f"{row['accuracy']:.0%}" in overview
