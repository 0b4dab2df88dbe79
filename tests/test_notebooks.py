"""What notebooks show of plans, verifications and results: the object's own values, whatever they are made of."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap import Candidate, EvalSettings, Evaluation, compare, patch_model, swap_plan, verify_swap
from hf_posswap.patching.verify.verify_swap import Verification
from hf_posswap.training import byte_tokenizer

HOSTILE = '<script>alert("1")</script>&amp;<b>\''
VOID = {"br", "img", "meta", "link", "hr", "input"}


class Read(HTMLParser):
    """The tables, paragraphs and list items of a page, as text; it raises where tags do not close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        assert tag not in VOID
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("p", "li"):
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        elif {"p", "li"} & set(self.open):
            self.texts[-1] += data
        else:
            raise AssertionError(f"text outside of all: {data!r}")


def small() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))


@pytest.fixture(scope="module")
def found() -> Evaluation:
    model, settings = small(), EvalSettings(lengths=(16, 32), metrics=("ppl_prefix", "passkey"), documents=2, trials=1)
    models = [Candidate(model, name="base"), Candidate(model, "rope", name=HOSTILE)]
    return compare(models, tokenizer=byte_tokenizer(), settings=settings)


def test_a_plan_shows_its_edits_and_facts() -> None:
    plan = swap_plan(patch_model(small(), "alibi", max_length=64))
    read = Read(plan._repr_html_())
    assert read.texts == [f"{plan.model}: {plan.named}"]
    header, *edits = read.tables[0]
    assert header == ["site", "path", "before", "after"]
    assert list(map(tuple, edits)) == plan.edit_rows()
    assert list(map(tuple, read.tables[1])) == plan.fact_rows()


def test_a_verification_shows_each_check() -> None:
    proved = verify_swap(patch_model(small(), "alibi"))
    (rows,) = Read(proved._repr_html_()).tables
    assert [": ".join(row) for row in rows] == str(proved).splitlines()
    assert [row[1] for row in rows] == list(proved.checks.values())


def test_a_comparison_shows_what_its_text_says(found: Evaluation) -> None:
    read = Read(found._repr_html_())
    ((header, *rows),) = read.tables
    assert header[:3] == ["model", "16 (1x)", "32 (2x)"]
    assert [row[0].partition(" ")[2] for row in rows[:2]] == ["base", HOSTILE]
    for row, model in zip(rows, found.results["models"].values(), strict=False):
        scores = {score["length"]: score for score in model["ppl_prefix"]}
        for cell, length in zip(row[1:3], (16, 32), strict=True):
            if length in scores:
                assert cell.startswith("{perplexity:.3g}".format(**scores[length]))
                ends = scores[length]["low"], scores[length]["high"]
                said = "no interval" if None in ends else "{:.3g}, {:.3g}".format(*ends)
                assert cell.endswith(f"[{said}]")
            else:
                assert cell == model["cannot_run"][str(length)]
    (title,) = (text for text in read.texts if text.startswith("Perplexity by length on 2 documents ("))
    assert [line for line in found.results["notes"] if line not in read.texts] == []
    plain = [line for line in str(found).splitlines() if line.startswith("- ")]
    assert len(plain) == sum(text not in ("Details:", title) for text in read.texts) - 1


def test_hostile_names_stay_text(found: Evaluation) -> None:
    plan = replace(swap_plan(patch_model(small(), "alibi")), model=HOSTILE, notes=(HOSTILE,))
    pages: list[Any] = [plan, Verification({HOSTILE: HOSTILE}), found]
    for page in pages:
        read = Read(page._repr_html_())
        assert read.tags <= {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
        assert {name for name, _ in read.attributes} <= {"style", "scope"}
        assert HOSTILE in "".join([*read.texts, *(cell for table in read.tables for row in table for cell in row)])


def test_a_page_brings_no_colours_of_its_own_and_needs_no_network(found: Evaluation) -> None:
    for page in (swap_plan(patch_model(small(), "rope")), verify_swap(patch_model(small(), "rope")), found):
        styles = " ".join(value or "" for name, value in Read(page._repr_html_()).attributes if name == "style")
        assert not re.search(r"#[0-9a-f]{3}|rgb|url\(|black|white", styles)
        assert "color:inherit" in styles
