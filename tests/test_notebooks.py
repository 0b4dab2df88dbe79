"""What notebooks show of plans, verifications and results: the object's own values, whatever they are made of."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posswap
from hf_posswap import Candidate, EvalSettings, Evaluation, NoPE, compare, patch_model, swap_plan, verify_swap
from hf_posswap.checkpoints.native import convert
from hf_posswap.comparison import compare_attention, read_documents
from hf_posswap.evaluation import KeySpans, find_key_spans, reach_of, ruler_prompt
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.patching.verify.verify_swap import Verification
from hf_posswap.plotting import draw_positions
from hf_posswap.schemes import SCHEMES
from hf_posswap.training import byte_tokenizer, python_corpus
from hf_posswap.training.config import load_recipe
from hf_posswap.training.dryrun import dry_run
from hf_posswap.training.engine import Finished
from hf_posswap.utils.result_views import ResultView

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
        if tag == "img":
            return
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


LONG = 400
TEXTS = [f"{number}: " + " ".join(str((number * 7 + i) ** 2) for i in range(60)) for number in range(3)]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, vocab_size=257, max_position_embeddings=16))


def rotation_fit() -> Any:
    return hf_posswap.fit_rotation(patch_model(small(), "rope", partial=0.5), torch.arange(32).view(2, 16))


def logit_scale_fit() -> Any:
    return hf_posswap.fit_logit_scale(patch_model(small(), NoPE(logit_scale=0.0)), torch.arange(64).view(2, 32), 32)


def bias_fit() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_layer": 6, "n_head": 4, "n_embd": 16, "vocab_size": 257, "n_positions": 16}
    return hf_posswap.fit_bias(GPT2LMHeadModel(GPT2Config(**shape)), "t5", torch.arange(32).view(2, 16))


def test_a_scheme_with_many_numbers_has_a_short_repr_and_a_plain_one_its_whole() -> None:
    fitted = bias_fit()
    assert len(repr(fitted)) < LONG < len(str(fitted.to_dict()))
    assert len(repr(fitted.of_layer(0))) < LONG
    assert repr(fitted).startswith("PerLayer(layers=")
    pairs = tuple(float(number) for number in range(1, 33))
    assert len(repr(hf_posswap.LongRope(factor=2.0, long_factor=pairs, short_factor=pairs))) < LONG
    classes = {cls.__name__: cls for _, cls in SCHEMES.items()}
    layered = hf_posswap.Rope().per_layer({1: NoPE()})
    for scheme in (hf_posswap.T5Bias(), hf_posswap.Alibi(), hf_posswap.PRope(p=0.5), layered):
        assert eval(repr(scheme), dict(classes)) == scheme


def longrope() -> Any:
    return hf_posswap.search_longrope(llama(), torch.arange(64).view(2, 32), 2.0, population=8, iterations=1)


def saved(folder: Path) -> Path:
    return hf_posswap.save(patch_model(small(), "rope", max_length=64), folder / "model", tokenizer=byte_tokenizer())


def recipe(folder: Path) -> Any:
    return load_recipe(
        {
            "model": {"name": str(hf_posswap.save(small(), folder / "start", tokenizer=byte_tokenizer()))},
            "swap": {"scheme": "rope", "max_length": 64},
            "data": {"sources": [{"path": "python", "documents": 20}], "length": 16, "cache": str(folder)},
            "training": {"max_steps": 1, "report_to": "none", "per_device_train_batch_size": 2},
            "evaluation": {"lengths": [16, 32]},
            "out": str(folder / "run"),
        }
    )


def key_spans() -> KeySpans:
    documents = [torch.arange(16).numpy()] * 2
    return find_key_spans(Scorer(small()), "itself", documents, short=8, stride=4, gain=-9.0, limit=9.0)


def attention(folder: Path) -> Any:
    models = [Candidate(small(), name="base"), Candidate(small(), "alibi", name="alibi")]
    return compare_attention(models, folder, text=TEXTS, tokenizer=byte_tokenizer())


RESULTS: dict[str, Callable[[Path], Any]] = {
    "advise": lambda folder: hf_posswap.advise(small(), 64, budget=1e6, serve="vllm"),
    "an option": lambda folder: hf_posswap.advise(small(), 64).others[0],
    "a figure": lambda folder: hf_posswap.advise(small(), 64, budget=1e6).others[0].reasons[0],
    "plan_swap": lambda folder: hf_posswap.plan_swap(small(), "alibi", max_length=64),
    "a record": lambda folder: hf_posswap.plan_swap(small(), "alibi", max_length=64).record,
    "verify_swap": lambda folder: verify_swap(patch_model(small(), "alibi")),
    "describe_positions": lambda folder: hf_posswap.describe_positions(llama()),
    "explain": lambda folder: hf_posswap.explain(small()),
    "explain a scheme": lambda folder: hf_posswap.explain(small(), "rope"),
    "explain a refusal": lambda folder: hf_posswap.explain(small(), "ntk", factor=2.0),
    "check": lambda folder: hf_posswap.check(llama()),
    "doctor": lambda folder: hf_posswap.doctor(saved(folder)),
    "export": lambda folder: hf_posswap.export(saved(folder), "vllm"),
    "push": lambda folder: hf_posswap.push(saved(folder), "me/model", dry_run=True),
    "to_native": lambda folder: convert(patch_model(small(), "rope", max_length=64)),
    "fit_rotation": lambda folder: rotation_fit(),
    "fit_logit_scale": lambda folder: logit_scale_fit(),
    "search_longrope": lambda folder: longrope(),
    "load_recipe": recipe,
    "run_recipe": lambda folder: hf_posswap.run_recipe(recipe(folder)),
    "dry_run": lambda folder: dry_run(recipe(folder)),
    "a prediction": lambda folder: dry_run(recipe(folder)).predictions[0],
    "draw_positions": lambda folder: draw_positions(["rope", "yarn"], str(folder), pictures=["wavelengths", "scores"]),
    "a picture": lambda folder: draw_positions("rope", folder, pictures="wavelengths")[0],
    "compare_attention": attention,
    "attention": lambda folder: attention(folder).paid["alibi"][16],
    "read_documents": lambda folder: read_documents(TEXTS, byte_tokenizer(), length=32, limit=3),
    "python_corpus": lambda folder: python_corpus(),
    "a document": lambda folder: python_corpus().held_out[0],
    "find_key_spans": lambda folder: key_spans(),
    "ruler_prompt": lambda folder: ruler_prompt(byte_tokenizer(), "niah_single", length=600, seed=0, sample=0),
    "reach_of": lambda folder: reach_of(small()),
}
"""A result of each kind that the package returns, made by the real function."""


SLOW = (
    "advise",
    "run_recipe",
    "dry_run",
    "a prediction",
    "compare_attention",
    "attention",
    "search_longrope",
    "doctor",
)
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in (*RESULTS, "compare")]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, found: Evaluation) -> Callable[[str], Any]:
    """Return what makes the result of a name, once."""

    @functools.cache
    def make(name: str) -> Any:
        return found if name == "compare" else RESULTS[name](tmp_path_factory.mktemp("shown"))

    return make


@pytest.mark.parametrize("name", NAMES)
def test_the_repr_of_a_result_is_short_and_a_notebook_shows_a_table(shown: Callable[[str], Any], name: str) -> None:
    result = shown(name)
    text = repr(result)
    assert text.startswith(f"{type(result).__name__}(")
    assert text.endswith(")")
    assert len(text) < LONG
    assert "\n" not in text
    page = result._repr_html_()
    read = Read(page)
    assert read.tables or "img" in read.tags
    assert {tag for tag in read.tags if tag in ("script", "link", "iframe", "style")} == set()
    sources = [value or "" for attribute, value in read.attributes if attribute in ("src", "href")]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"url\(|https?://[^<]*\"", page)


@pytest.mark.slow
def test_every_public_result_is_shown_here_or_small(shown: Callable[[str], Any]) -> None:
    """What has a view of its own is shown above; of what the package's folders export, nothing else is long."""
    seen = {type(shown(name)) for name in (*RESULTS, "compare")}
    names = ("comparison", "evaluation", "plotting", "search", "training", "checkpoints.exports")
    modules = [importlib.import_module(f"hf_posswap.{name}") for name in names]
    exported = [getattr(module, name) for module in (hf_posswap, *modules) for name in getattr(module, "__all__", ())]
    views = {value for value in exported if isinstance(value, type) and issubclass(value, ResultView)}
    lists = {
        cls
        for cls in views - seen
        if any("tuple" in str(field.type) or "dict" in str(field.type) for field in dataclasses.fields(cls))
    }
    assert {cls.__name__ for cls in lists} <= {"Window", "Finding"}


@pytest.mark.parametrize("name", ["describe_positions", "export", "push", "read_documents"])
def test_hostile_values_stay_text_in_every_table(shown: Callable[[str], Any], name: str) -> None:
    result = shown(name)
    strings = [field.name for field in dataclasses.fields(result) if isinstance(getattr(result, field.name), str)]
    read = Read(replace(result, **dict.fromkeys(strings, HOSTILE))._repr_html_())
    assert read.tags <= {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
    assert HOSTILE in "".join([*read.texts, *(cell for table in read.tables for row in table for cell in row)])


@pytest.mark.slow
def test_a_run_shows_its_folder_and_losses_and_its_whole_report_stays(shown: Callable[[str], Any]) -> None:
    finished = shown("run_recipe")
    assert isinstance(finished, Finished)
    (rows,) = Read(finished._repr_html_()).tables
    cells = dict(row for row in rows if len(row) == 2)
    assert cells["model"] == str(finished.model)
    for length, loss in finished.report["nll"].items():
        assert cells[f"held-out loss at {length} tokens"] == f"{loss:.4f}"
    assert f"{finished.report['nll']['32']:.4f}" in str(finished)


def test_a_picture_that_is_not_there_any_more_is_said(tmp_path: Path) -> None:
    (drawn,) = draw_positions(["rope"], tmp_path, pictures=["wavelengths"])
    assert drawn._repr_png_() == drawn.path.read_bytes()
    drawn.path.unlink()
    assert drawn._repr_png_() is None
    assert "is not there any more" in drawn._repr_html_()


CELLS = """
import hf_posswap, torch
from hf_posswap.plotting import draw_positions
from hf_posswap.schemes import SCHEMES
from transformers import GPT2Config, GPT2LMHeadModel
from hf_posswap.training import byte_tokenizer

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
# %%
draw_positions(["rope"], "pics", pictures="wavelengths")
# %%
hf_posswap.advise(model, 64)
# %%
hf_posswap.evaluate(model, "rope", lengths=[16], metrics="ppl_prefix", documents=2, tokenizer=byte_tokenizer())
# %%
hf_posswap.evaluate(model, lengths=[16], metrics="ppl_prefix", tokenizer=byte_tokenizer(), progress=False)
"""


@pytest.mark.slow
def test_a_real_notebook_shows_pictures_tables_and_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: it is a development dependency")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: it is a development dependency")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: it is a development dependency")
    monkeypatch.setenv("PYTHONPATH", str(Path(hf_posswap.__file__).parents[1]))
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.split("# %%\n")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, pictures, advice, loud, silent = [cell.outputs for cell in notebook.cells]
    assert "data:image/png;base64," in pictures[-1].data["text/html"]
    assert "<table" in advice[-1].data["text/html"]
    assert len(advice[-1].data["text/plain"]) < LONG

    def bars(outputs: Any) -> str:
        return "".join(output.get("text", "") + str(output.get("data", "")) for output in outputs[:-1])

    assert "losses" in bars(loud)
    assert "losses" not in bars(silent)
    assert (tmp_path / "pics" / "wavelengths.svg").is_file()
