"""Model cards: what the Hub reads of one, and what people read, follows from the checkpoint."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap.checkpoints.card import CardFacts, write_card
from hf_posswap.checkpoints.run_artifacts import Results, read_results
from hf_posswap.errors import CheckpointError, PluginWarning
from hf_posswap.patching.record.training import TrainingRecord, training_of
from hf_posswap.schemes import SCHEMES
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.user_paths import import_module
from tests.contract.models import build

REPO = "me/swapped-model"
TRAINED = TrainingRecord(
    base="base", base_weights=None, recipe="control", objective="next-token", what="all", steps=2, tokens=64, data=None,
    held_out={}, swap=None,
).to_dict()  # fmt: skip


def saved(folder: Path, scheme: str | None = "rope", model: Any = None) -> Path:
    model = model or gpt2()
    if scheme is not None:
        hf_posswap.patch_model(model, scheme, max_length=64)
    return hf_posswap.save(model, folder)


def card(folder: Path, **facts: Any) -> ModelCard:
    return ModelCard(write_card(folder, CardFacts(REPO, **facts), online=False))


def test_the_hub_reads_the_base_the_licence_and_the_tags(tmp_path: Path) -> None:
    data = card(saved(tmp_path / "a"), base="openai-community/gpt2", license="mit").data
    assert (data.base_model, data.license, data.library_name) == ("openai-community/gpt2", "mit", "transformers")
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["hf_posswap", "long-context", "rope"]
    assert data["base_model_relation"] == "finetune"


def test_the_task_and_the_class_are_the_models_own(tmp_path: Path) -> None:
    bert = BertForMaskedLM(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    found = card(saved(tmp_path / "a", "alibi", bert))
    assert found.data.pipeline_tag == "fill-mask"
    assert "AutoModelForMaskedLM.from_pretrained" in found.text


def test_the_card_says_what_was_swapped_and_holds_the_record(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    text = card(folder).text
    assert "swapped to **rope**" in text
    assert "learned table, 16 positions" in text
    assert "| max_position_embeddings | 16 | 64 |" in text
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    assert blocks == [json.loads((folder / "config.json").read_text())["posswap"]]
    assert f"| hf_posswap | {hf_posswap.__version__} |" in text


def test_the_loading_code_of_the_card_runs(tmp_path: Path) -> None:
    for scheme, model, blocks in (("rope", None, 2), ("yarn", build("llama"), 2), (None, build("llama"), 2)):
        folder = saved(tmp_path / str(scheme), scheme, model)
        codes = re.findall(r"```python\n(.*?)```", card(folder).text, re.DOTALL)
        assert len(codes) == blocks
        for code in codes:
            scope: dict[str, Any] = {}
            exec(code.replace(REPO, str(folder)), scope)
            assert type(scope["model"]).__name__.endswith(("LMHeadModel", "ForCausalLM"))


def test_a_native_swap_needs_no_custom_code_and_a_plugin_one_says_so(tmp_path: Path) -> None:
    native = card(saved(tmp_path / "a", "yarn", build("llama"))).text
    plugin = card(saved(tmp_path / "b", "alibi", build("llama"))).text
    assert "trust_remote_code" not in native
    assert "With transformers alone" in native
    assert "trust_remote_code=True" in plugin
    assert "Plain transformers refuses this checkpoint" in plugin


@pytest.mark.parametrize("other", ["", "pytest"])
def test_a_card_names_the_module_of_a_scheme_and_no_code_that_is_not_there(other: str, tmp_path: Path) -> None:
    """The file of a scheme goes along, unless it imports what a checkpoint cannot hold."""
    file, name = tmp_path / "schemes_of_a_card.py", "bias-of-a-card"
    file.write_text(
        f"from hf_posswap.schemes import bias\n{f'import {other}' if other else ''}\n"
        f"@bias('{name}')\ndef own(distance):\n    return -distance.abs()\n"
    )
    import_module(str(file))
    try:
        with pytest.warns(PluginWarning, match="saved without the code") if other else nullcontext():
            folder = saved(tmp_path / "model", name)
        for text in (card(folder).text, (folder / "README.md").read_text()):
            assert f"Import the module `{file.stem}` first: it registers the scheme {name}" in text
            assert ("trust_remote_code=True" in text) == (not other)
    finally:
        SCHEMES.remove(name)
        del sys.modules[file.stem]


def test_a_licence_comes_from_the_base_models_card(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: someone/original\n---\n# base\n")
    data = card(saved(tmp_path / "a"), base=str(base)).data
    assert (data.license, data.base_model) == ("apache-2.0", "someone/original")
    assert card(tmp_path / "a", base=str(base), license="mit").data.license == "mit"


def test_an_unknown_licence_is_said_and_a_folder_is_no_base(tmp_path: Path) -> None:
    found = card(saved(tmp_path / "a"), base=str(tmp_path))
    assert found.data.license is None
    assert found.data.base_model is None
    assert str(tmp_path) not in found.content
    assert "The licence of the base model applies; it is not stated here" in found.text


def test_a_folder_that_is_gone_is_no_base_either(tmp_path: Path) -> None:
    found = card(saved(tmp_path / "a"), base=str(tmp_path / "gone"), license="mit")
    assert found.data.base_model is None
    assert str(tmp_path) not in found.content


def test_a_base_card_that_cannot_be_had_warns(tmp_path: Path) -> None:
    facts = CardFacts(REPO, base="someone/missing")
    with pytest.warns(PluginWarning, match="someone/missing cannot be read.*Give license="):
        text = write_card(saved(tmp_path / "a"), facts, online=True)  # the tests are offline
    assert ModelCard(text).data.base_model == "someone/missing"


ROW = {"length": 16, "perplexity": 9.5, "low": 9.0, "high": 10.0}


def gpt2(**values: Any) -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16, **values))


def measured(folder: Path, schemes: dict[str, str | None]) -> Path:
    """Write results of models with these schemes: the n-th has a perplexity of 8 + n at 16 tokens."""
    models: dict[str, Any] = {}
    for number, (label, scheme) in enumerate(schemes.items()):
        plan = None if scheme is None else hf_posswap.plan_swap(gpt2(), scheme, max_length=32).to_dict()
        trained = None if label != "control" else str(training_of(gpt2(posswap_training=TRAINED).config))
        rows = [ROW | {"perplexity": 8.0 + number}]
        cannot = {"64": "ends at 16"} if scheme is None else {}
        entry = {"plan": plan, "trained": trained, "ppl_prefix": rows, "cannot_run": cannot, "conclusion": None}
        models[label] = entry
    base = next(iter(schemes))
    values = {"kind": "hf_posswap evaluation", "base": base, "lengths": [16, 64], "data": {"source": "docs"}}
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(values | {"models": models}))
    (folder / "perplexity-by-length.png").write_bytes(b"png")
    return folder


def values_of(found: ModelCard) -> dict[str, float]:
    return {entry.metric_name: entry.metric_value for entry in found.data.eval_results}


def test_results_become_a_table_pictures_and_metadata(tmp_path: Path) -> None:
    results = measured(tmp_path / "results", {"gpt2": None, "control": None, "gpt2+rope": "rope"})
    found = card(saved(tmp_path / "a"), results=read_results(results))
    assert values_of(found) == {"perplexity at 16 tokens": 10.0}
    assert "| rope | 10.000 (9.000 to 10.000) |" in found.text
    assert "| base | 8.000 (9.000 to 10.000) | cannot run |" in found.text
    assert "| control | 9.000 (9.000 to 10.000) | cannot run |" in found.text
    assert "](pictures/perplexity-by-length.png)" in found.text
    pushed = hf_posswap.push(tmp_path / "a", REPO, dry_run=True, results=results)
    assert pushed.files["pictures/perplexity-by-length.png"] == 3


def test_each_model_of_a_comparison_gets_its_own_numbers(tmp_path: Path) -> None:
    """They were found by the name of the scheme, the first one's for both; and a control got those of the base."""
    schemes = {
        "gpt2": None,
        "control": None,
        "bad": "rope",
        "good": "rope:partial=0.5",
        "same": "alibi",
        "too": "alibi",
    }
    results = measured(tmp_path / "results", schemes)
    control = saved(tmp_path / "control", None, gpt2(posswap_training=TRAINED))
    folders = [
        saved(tmp_path / "base", None),
        control,
        saved(tmp_path / "bad"),
        saved(tmp_path / "good", schemes["good"]),
    ]
    for perplexity, folder in enumerate(folders, 8):
        report = hf_posswap.push(folder, REPO, dry_run=True, results=results)
        assert report.card is not None
        assert values_of(ModelCard(report.card)) == {"perplexity at 16 tokens": perplexity}
    names = [line.split("|")[1].strip() for line in ModelCard(report.card).text.splitlines() if "cannot run" in line]
    assert names == ["base", "control"]
    with pytest.raises(CheckpointError, match="swap alibi .* same, too have the same: give results that hold one"):
        hf_posswap.push(saved(tmp_path / "alibi", "alibi"), REPO, dry_run=True, results=results)
    trained = saved(tmp_path / "trained", "rope", gpt2(posswap_training=TRAINED))
    with pytest.raises(CheckpointError, match=r"the swap rope and was trained \(.*\), and of .* none has the same"):
        hf_posswap.push(trained, REPO, dry_run=True, results=results)


def test_the_results_of_a_comparison_become_the_same(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "a"), tmp_path / "results"
    settings = hf_posswap.EvalSettings(lengths=(16, 32), metrics=("ppl_prefix",), documents=2)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
    candidates = [hf_posswap.Candidate(model), hf_posswap.Candidate(model, "rope")]
    found = hf_posswap.compare(candidates, tokenizer=byte_tokenizer(), out=out, settings=settings, pictures=False)
    measured = found.results["models"]["GPT2LMHeadModel+rope"]["ppl_prefix"]
    written = card(folder, results=read_results(out))
    metrics = {entry.metric_name: entry.metric_value for entry in written.data.eval_results}
    assert metrics == {f"perplexity at {row['length']} tokens": row["perplexity"] for row in measured}
    base = next(line for line in written.text.splitlines() if line.startswith("| base |"))
    assert base.endswith("| cannot run |")
    verdict = found.results["models"]["GPT2LMHeadModel+rope"]["conclusion"]["text"]
    assert verdict.startswith("No verdict: 2 documents are too few")
    assert written.text.index(verdict) < written.text.index("| base |")  # first of all
    assert f"> {found.results['notes'][0]}" in written.text
    for model in found.results["models"].values():
        del model["ppl_prefix"]
        model["cannot_run"] = {}
    (out / "results.json").write_text(json.dumps(found.results))
    with pytest.raises(CheckpointError, match=r"hold no perplexities of .*rope \(metric ppl_prefix, or mlm_pos of enc"):
        card(folder, results=read_results(out))


def test_results_of_other_models_are_refused(tmp_path: Path) -> None:
    results = read_results(measured(tmp_path / "results", {"base": None, "alibi": "alibi"}))
    says = r"swap rope and no recorded training, and of the models of the results \(base, alibi\) none has the same"
    with pytest.raises(CheckpointError, match=says):
        card(saved(tmp_path / "a"), results=results)


def test_plain_metrics_and_a_recipe(tmp_path: Path) -> None:
    recipe = {"steps": 100, "learning_rate": 1e-4}
    found = card(saved(tmp_path / "a"), results=Results({"perplexity@64": 12.5, "accuracy": 0.25}), recipe=recipe)
    assert [(e.metric_type, e.metric_value) for e in found.data.eval_results] == [
        ("perplexity", 12.5),
        ("accuracy", 0.25),
    ]
    assert "| accuracy | 0.25 |" in found.text
    assert json.dumps(recipe, indent=2) in found.text


@pytest.mark.parametrize("value", [{"a": float("nan")}, {"a": "x"}, {"a": True}, [1], {"models": {}}])
def test_what_is_no_result_is_refused(value: Any, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="results must be {metric: finite number}"):
        read_results(tmp_path)


def test_results_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the results in .*results.json: .*give a JSON file"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the results in"):
        read_results(tmp_path)


def test_a_readme_of_the_folder_is_left_as_it_is(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    (folder / "README.md").write_text("mine")
    assert hf_posswap.push(folder, REPO, dry_run=True).files["README.md"] == 4
    (folder / "README.md").unlink()
    assert "README.md" not in hf_posswap.push(folder, REPO, dry_run=True, card=False).files


def test_a_save_says_how_to_load_and_a_push_writes_its_card_in_its_place_unless_it_was_edited(tmp_path: Path) -> None:
    model = BertModel(BertConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=8)).eval()
    hf_posswap.patch_model(model, "rope")
    folder = hf_posswap.save(model, tmp_path / "saved")
    readme = folder / "README.md"
    (ours, theirs) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    ids = torch.arange(9)[None]
    for code in (ours, theirs):
        names: dict[str, Any] = {}
        exec(code.replace("path/to/this/folder", str(folder)), names)
        assert torch.equal(names["model"].eval()(ids).last_hidden_state, model(ids).last_hidden_state)
    report = hf_posswap.push(folder, REPO, dry_run=True)
    assert report.card is not None
    assert report.files["README.md"] == len(report.card.encode())
    hf_posswap.save(model, folder, overwrite=True)
    readme.write_text(readme.read_text() + "Mine.\n")
    assert hf_posswap.push(folder, REPO, dry_run=True).card is None
    hf_posswap.unpatch_model(model)
    assert not (hf_posswap.save(model, tmp_path / "stock") / "README.md").exists()


def test_a_model_that_was_loaded_knows_its_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    saved(base, None)
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    hf_posswap.patch_model(model, "rope", max_length=64)
    report = hf_posswap.push(model, REPO, dry_run=True)
    without = hf_posswap.push(saved(tmp_path / "b"), REPO, dry_run=True)
    assert report.files["README.md"] != without.files["README.md"]  # it has the licence
    assert "nothing was sent" in str(report)


EVALUATED: dict[str, Any] = {
    "kind": "hf_posswap evaluation",
    "base": "base",
    "lengths": [16],
    "data": {"source": "/place/of/me/texts"},
    "models": {"base": {"plan": None, "cannot_run": {}, "ppl_prefix": [ROW]}},
}


@pytest.mark.parametrize(
    "results",
    [
        {"kind": "hf_posswap evaluation"},
        EVALUATED | {"models": []},
        EVALUATED | {"models": {"base": {"plan": None}}},
        EVALUATED | {"models": {"base": {"plan": 3, "cannot_run": {}}}},
        EVALUATED | {"models": {"base": {"plan": None, "cannot_run": {"x": "y"}, "ppl_prefix": []}}},
        EVALUATED | {"data": {}},
        EVALUATED | {"data": {"source": None}},
        EVALUATED
        | {"models": {"base": {"plan": None, "cannot_run": {}, "ppl_prefix": [{"length": 8, "perplexity": "3"}]}}},
    ],
)
def test_edited_results_are_refused_clearly(tmp_path: Path, results: dict[str, Any]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results))
    folder = saved(tmp_path / "a", None)
    with pytest.raises(CheckpointError, match="the results (cannot be read .* edited, or are not whole|hold no)"):
        card(folder, results=read_results(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\xff"])
def test_results_that_are_no_json_are_refused_clearly(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="cannot read the results in .*give a JSON file"):
        read_results(tmp_path)


def test_the_name_of_the_text_stays_text(tmp_path: Path) -> None:
    found = read_results(EVALUATED | {"data": {"source": "/place/of/me/<texts>"}})
    text = card(saved(tmp_path / "a", None), results=found).text
    assert "Text: &lt;texts&gt;." in text
    assert "/place/of/me" not in text
