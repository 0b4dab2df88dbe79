"""Recipes: files that include one another, overrides, and every problem in one message."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_posswap.errors import ConfigError
from hf_posswap.training.config import Recipe, load_recipe, make_recipe, phases_of
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.reading import merge, override, read_yaml
from hf_posswap.training.config.settings import keys_of
from hf_posswap.utils.scheme_text import attribute_docs

SWAP: dict[str, Any] = {"model": {"name": "any"}, "swap": {"scheme": "rope"}}


def written(folder: Path, **files: str) -> Path:
    """Write `files`, name to content, and return the path of the first."""
    paths = [folder / f"{name}.yaml" for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text)
    return paths[0]


def test_a_file_says_only_what_differs(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        mine="include: [middle.yaml, other.yaml]\ntraining: {max_steps: 3}",
        middle="include: base.yaml\nswap: {scheme: {factor: 8}}",
        base="model: {name: any}\nswap: {scheme: {name: yarn, factor: 4, beta_fast: 16}}\n"
        "training: {max_steps: 1, warmup_steps: 1}",
        other="training: {max_grad_norm: 0.5}",
    )
    recipe = load_recipe(path)
    assert recipe.swap.scheme == {"name": "yarn", "factor": 8, "beta_fast": 16}
    assert (recipe.training.max_steps, recipe.training.warmup_steps, recipe.training.max_grad_norm) == (3, 1, 0.5)


def test_another_scheme_brings_nothing_of_the_one_below() -> None:
    below = {"swap": {"scheme": {"name": "yarn", "factor": 4}, "max_length": 64}}
    above = {"swap": {"scheme": {"name": "rope", "base": 5.0}}}
    assert merge(below, above) == {"swap": {"scheme": {"name": "rope", "base": 5.0}, "max_length": 64}}


def test_another_schedule_or_adapter_leaves_no_arguments_of_the_one_below() -> None:
    below = {"training": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}, "peft": {"r": 2}}
    settings = ["training.lr_scheduler_kwargs={min_lr_rate: 0.1}", "training.lr_scheduler_type=cosine_with_min_lr"]
    changed = override(below, [*settings, "peft.peft_type=IA3"])
    assert changed["training"]["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    assert changed["peft"] == {"peft_type": "IA3"}
    assert override(below, ["training.lr_scheduler_type=linear"])["training"] == {"lr_scheduler_type": "linear"}
    assert override(below, ["training.lr_scheduler_kwargs.power=3"])["training"]["lr_scheduler_kwargs"] == {"power": 3}
    assert override(below, ["peft.peft_type=LORA"])["peft"] == {"r": 2, "peft_type": "LORA"}


TREE = st.recursive(
    st.integers(), lambda below: st.dictionaries(st.sampled_from("abc"), below, min_size=1), max_leaves=8
)
MAPPING = st.dictionaries(st.sampled_from("abc"), TREE)


def _leaves(values: Any, path: str = "") -> dict[str, int]:
    if not isinstance(values, dict):
        return {path: values}
    return {key: leaf for name, value in values.items() for key, leaf in _leaves(value, path + name).items()}


@given(MAPPING, MAPPING)
def test_merging_keeps_every_leaf_above_and_those_below_that_nothing_replaces(
    below: dict[str, Any], above: dict[str, Any]
) -> None:
    wanted = _leaves(above)
    kept = {
        path: leaf
        for path, leaf in _leaves(below).items()
        if not any(path.startswith(other) or other.startswith(path) for other in wanted)
    }
    assert _leaves(merge(below, above)) == kept | wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-5", 2e-5), ("1E6", 1e6), ("-1.5e+3", -1500.0), ("0.1", 0.1), (".5e1", 5.0), ("7", 7), ("e5", "e5")],
)
def test_numbers_are_numbers_as_people_write_them(text: str, value: Any) -> None:
    assert override({}, [f"a={text}"]) == {"a": value}
    assert type(override({}, [f"a={text}"])["a"]) is type(value)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, mine="training: {seed: 1, seed: 2}")
    with pytest.raises(ConfigError, match=r"mine.yaml cannot be read as YAML: seed given twice, .* line 1"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a": "include: b.yaml", "b": "include: a.yaml"}, r"a.yaml includes itself: a.yaml -> b.yaml -> a.yaml"),
        ({"a": "include: missing.yaml"}, r"missing.yaml, which .*a.yaml includes, cannot be read: No such file"),
        ({"a": "- 1"}, r"a.yaml must hold keys and values, got a list"),
        ({"a": "# nothing but a comment"}, r"a.yaml must hold keys and values, got nothing"),
        ({"a": "a: [1"}, r"a.yaml cannot be read as YAML: "),
        ({"a": "include: 3"}, r"include must be a file name or a list of them, got 3"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_yaml(written(tmp_path, **files))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("training.max_steps", r"expected KEY=VALUE, for example training.max_steps=100"),
        ("=3", r"expected KEY=VALUE"),
        ("training.max_steps.more=1", r"training.max_steps is 3, which has no keys"),
        ("training.max_steps=[", r"the value cannot be read as YAML"),
        ("stages.7.max_steps=1", r"stages.7: expected the number of an item, 0 to 0"),
    ],
)
def test_an_override_that_means_nothing_is_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        override({"training": {"max_steps": 3}, "stages": [{"max_steps": 1}]}, [setting])


def test_every_problem_is_in_one_message() -> None:
    values = {
        "modell": {"name": "any"},
        "training": {"max_stepz": 3, "learning_rate": "fast", "seed": 1.5, "lr_scheduler_type": "cosin"},
        "swap": {"scheme": ["rope"], "site": "somewhere", "relative": "both"},
        "data": {"length": 2},
        "stages": [{"max_steps": True}],
    }
    with pytest.raises(ConfigError) as caught:
        make_recipe(values, "mine.yaml")
    message = str(caught.value)
    assert message.startswith("mine.yaml has 10 problems: (1) ")
    for part in (
        "modell: no such key. Did you mean 'model'?",
        "training.max_stepz: no such key. Did you mean 'max_steps'?",
        "training.learning_rate: expected a number, got 'fast'.",
        "training.seed: expected a whole number, got 1.5.",
        "got 'cosin'. Did you mean 'cosine'?",
        "swap.scheme: expected text or keys and values, got ['rope'].",
        "swap.site: expected auto or attention, got 'somewhere'.",
        "swap.relative: expected keep or drop, got 'both'.",
        "data: data: length is a whole number of at least 4 tokens, got 2.",
        "stages[0].max_steps: expected a number, got True.",
    ):
        assert part in message


def test_an_unknown_scheme_is_told_together_with_wrong_keys() -> None:
    settings = ["swap.scheme=rop", "training.max_stepz=3", "swap.max_lenght=64", "training.push_to_hub=true"]
    with pytest.raises(ConfigError, match=r"the recipe has 4 problems: ") as caught:
        load_recipe(SWAP, settings)
    for part in (
        "swap.scheme: unknown scheme 'rop'. Did you mean 'rope'",
        "'max_steps'?",
        "'max_length'?",
        "say where to",
    ):
        assert part in str(caught.value)


IMPOSSIBLE = [
    ({"model": {}}, r"model.name: give a folder or a Hub id"),
    ({"out": ""}, r"out: give a folder"),
    ({"swap": {"scheme": "yarm"}}, r"swap.scheme: unknown scheme 'yarm'. Did you mean 'yarn'"),
    ({"swap": {"scheme": {"name": "yarn", "factor": -1}}}, r"swap.scheme: yarn: factor"),
    ({"swap": {"scheme": None, "max_length": 9}}, r"swap.max_length: needs a swap, and swap.scheme is none"),
    ({"swap": {"scheme": None, "relative": "drop"}}, r"swap.relative: needs a swap, and swap.scheme is none"),
    ({"swap": {"scheme": None}, "objective": {"kind": "distill"}}, r"objective.kind: needs a swap"),
    ({"swap": {"scheme": "rope", "max_length": 0}}, r"swap.max_length: expected a number of tokens from 1, got 0"),
    ({"swap": {"scheme": "rope", "gradual_steps": 2000}}, r"2000 steps in a training of 1000"),
    ({"swap": {"scheme": "rope", "gradual_steps": -1}}, r"gradual_steps: expected a number of steps from 0, got -1"),
    ({"swap": {"scheme": "rope", "gradual_steps": 2}, "stages": [{}]}, r"leave one of gradual_steps and stages out"),
    ({"swap": {"scheme": "rope", "gradual_steps": 2}, "peft": {}}, r"gradual_steps: .* adapters \(lora\)"),
    ({"objective": {"chunk": -1}}, r"objective.chunk: expected a number of tokens from 0, got -1"),
    ({"objective": {"distill": {"weight": 2}}}, r"objective.distill: distill: weight .* got 2"),
    ({"objective": {"distill": {"temperature": 0}}}, r"objective.distill: distill: temperature .* got 0"),
    ({"objective": {"distill": {"teacher": "slidng"}}}, r"distill.teacher: expected window or sliding, got 'slidng'"),
    ({"objective": {"distill": {"techer": "sliding"}}}, r"distill.techer: no such key. Did you mean 'teacher'"),
    (
        {"objective": {"kind": "distill", "distill": {"teacher": "sliding"}}, "data": {"packing": "random-positions"}},
        r"use none, documents or concatenated",
    ),
    ({"data": {"cutt": [8, 1]}}, r"data.cutt: no such key. Did you mean 'cut'"),
    ({"data": {"cut": 8}}, r"data.cut: expected a list, got 8"),
    ({"data": {"cut": [8]}}, r"data: data: cut must contain 1"),
    ({"data": {"cut": [3, 1]}}, r"data: data: cut must divide 512 tokens into windows .* got 3"),
    (
        {"data": {"cut": [8, 1]}, "stages": [{"length": 100}]},
        r"stages\[0\].length: data.cut must divide 100 tokens .* got 8",
    ),
    ({"data": {"cut": [2, 1]}, "objective": {"kind": "embedding"}}, r"data.cut: \[2, 1\] mixes lengths, and embedding"),
    ({"objective": {"kind": "distill"}, "data": {"packing": "pose"}}, r"use none, documents or concatenated"),
    (
        {"objective": {"kind": "embedding"}, "data": {"packing": "documents"}},
        r"packing documents are not texts; use none",
    ),
    ({"objective": {"kind": "contrastive", "scale": 0}}, r"objective.scale: expected a number above 0, got 0"),
    (
        {"objective": {"kind": "contrastive"}, "training": {"per_device_train_batch_size": 1}},
        r"objective.kind: contrastive compares the texts .* and a batch has 1",
    ),
    ({"training": {"learning_rate": 0}}, r"training.learning_rate: expected a number above 0, got 0"),
    ({"training": {"max_steps": 0}}, r"training.max_steps: expected at least 1, got 0"),
    ({"training": {"warmup_steps": 2000}}, r"training.warmup_steps: 2000 steps of warm-up in a training of 1000"),
    ({"training": {"adam_beta2": 1}}, r"training.adam_beta2: expected a share from 0 to below 1, got 1"),
    (
        {"training": {"gradient_checkpointing_kwargs": {"offload": True}}},
        r"checkpointing_kwargs: .* set training.gradient_checkpointing too",
    ),
    (
        {"training": {"hub_model_id": "me/my/model"}},
        r"hub_model_id: 'me/my/model' is not a repository on the Hub; give own",
    ),
    ({"training": {"push_to_hub": True}}, r"training.push_to_hub: say where to: training.hub_model_id"),
    ({"training": {"save_steps": -1}}, r"training.save_steps: expected a number above 0, got -1"),
    ({"training": {"bf16": True, "fp16": True}}, r"training.fp16: bf16 is set too"),
    ({"training": {"optim": "galore_adamw"}}, r"training.optim: galore_adamw builds its own parameter groups"),
    (
        {"training": {"optim": "schedule_free_sgd"}},
        r"training.optim: schedule_free_sgd evaluates a model at other weights",
    ),
    (
        {"training": {"eval_strategy": "steps"}, "objective": {"kind": "masked"}},
        r"eval_strategy: .* an encoder has not",
    ),
    (
        {"training": {"metric_for_best_model": "loss_at_64"}, "evaluation": {"lengths": [32, 128]}},
        r"training.metric_for_best_model: expected loss or loss_at_32 or loss_at_128, got 'loss_at_64'",
    ),
    ({"training": {"metric_for_best_model": "accuracy"}}, r"metric_for_best_model: expected loss, got 'accuracy'"),
    ({"evaluation": {"lengths": [1]}}, r"expected at least 2 tokens each, got \[1\]"),
    ({"evaluation": {"documents": 1}}, r"evaluation.documents: expected at least 2, got 1"),
    ({"evaluation": {"lengths": [8]}, "objective": {"kind": "masked"}}, r"which an encoder has not"),
    ({"training": {"report_to": ["tensorbord"]}}, r"training.report_to: unknown 'tensorbord'. Known: .*tensorboard"),
    ({"training": {"report_to": "swanlab"}}, r"swanlab is not installed: pip install swanlab"),
    ({"trainable": {"norms": True}}, r"trainable: embeddings and norms add to .* what is 'full' without peft"),
    ({"trainable": {"what": "positions"}, "peft": {}}, r"trainable.what: positions without adapters, or full"),
    ({"peft": {"rank": 3}}, r"peft.rank: no such key"),
    ({"peft": {"lora_alfa": 3}}, r"peft.lora_alfa: no such key. Did you mean 'lora_alpha'"),
    ({"peft": {"r": "eight"}}, r"peft.r: expected a whole number, got 'eight'"),
    ({"peft": {"peft_type": "LORRA"}}, r"peft.peft_type: LORRA: PEFT has no such type. Did you mean LORA"),
    ({"peft": {"peft_type": "PREFIX_TUNING"}}, r"PREFIX_TUNING: virtual tokens shift the positions"),
    ({"peft": {"peft_type": "ADALORA"}}, r"ADALORA: its ranks need an extra loss and schedule"),
    ({"peft": {"init_lora_weights": "pissa"}}, r"init_lora_weights: pissa cannot be used: it changes the weights of"),
    ({"peft": {"revision": "main"}}, r"peft.revision: leave it out: hf_posswap sets it"),
    ({"stages": [{"scheme": "kerple"}]}, r"its scheme cannot have weights .* got bias"),
    ({"stages": [{"max_steps": 2, "least_steps": 3}]}, r"stages\[0\]: expected .* least_steps from 0 to max_steps"),
    ({"stages": [{"length": 1}]}, r"stages\[0\].length: expected at least 4 tokens, got 1"),
    ({"stages": [{"learning_rate": 0}]}, r"stages\[0\].learning_rate: expected a number above 0, got 0"),
    ({"stages": [{"recovered": -1}]}, r"stages\[0\].recovered: expected nats from 0, got -1"),
    ({"stages": [{"scheme": {"base": -1}}]}, r"stages\[0\].scheme: rope: base"),
]


@pytest.mark.parametrize(("values", "says"), IMPOSSIBLE)
def test_the_impossible_is_refused_and_a_wrong_key_elsewhere_does_not_hide_it(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_recipe(SWAP | values)
    with pytest.raises(ConfigError, match=rf"\(1\) .*zzzz: no such key.* \(2\) .*{says}"):
        make_recipe({"gates": {"zzzz": 1}} | SWAP | values)


def test_what_follows_from_a_wrong_key_is_not_said_and_all_else_is() -> None:
    values = {
        "training": {"max_stepz": 5000, "warmup_steps": 2000, "per_device_train_batch_size": 0},
        "swap": {"scheme": {"name": "yarn", "factor": -1}, "max_length": "long"},
        "stages": [{"scheme": {"bass": 3}, "max_steps": "two"}, {"scheme": "yarm"}],
        "out": "",
    }
    with pytest.raises(ConfigError) as caught:
        make_recipe(SWAP | values)
    message = str(caught.value)
    assert message.startswith("the recipe has 8 problems: ")
    assert "warm-up" not in message  # there may be 5000 steps
    for part in (
        "training.max_stepz: no such key.",
        "training.per_device_train_batch_size: expected at least 1, got 0.",
        "swap.scheme: yarn: factor",
        "swap.max_length: expected a whole number, got 'long'.",
        "stages[0].max_steps: expected a whole number, got 'two'.",
        "stages[0].scheme: scheme 'yarn' has no field 'bass'.",
        "stages[1].scheme: unknown scheme 'yarm'.",
        "out: give a folder.",
    ):
        assert part in message


def test_a_scheme_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"name": "linear", "factor": 2.0}))
    recipe = make_recipe(SWAP | {"swap": {"scheme": str(path)}, "stages": [{"scheme": str(path)}]})
    assert recipe.swap.scheme == recipe.stages[0].scheme == {"name": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match=r"cannot read .*none.json.* posswap search writes such a file.* \(2\) out: "):
        make_recipe(SWAP | {"swap": {"scheme": str(tmp_path / "none.json")}, "out": ""})


def test_a_recipe_goes_through_json_and_back() -> None:
    values = SWAP | {"stages": [{"length": 64}], "data": {"cache": "somewhere", "sources": [{"path": "python"}]}}
    recipe = make_recipe(values)
    assert make_recipe(json.loads(json.dumps(to_dict(recipe)))) == recipe


def test_stages_differ_in_what_they_say_and_in_nothing_else() -> None:
    values = SWAP | {
        "swap": {"scheme": {"name": "rope", "base": 10.0}, "max_length": 100},
        "training": {"warmup_steps": 5, "learning_rate": 0.5},
        "stages": [{"max_steps": 3, "scheme": {"base": 20.0}}, {"length": 64, "max_length": 200, "scheme": "nope"}],
    }
    recipe = make_recipe(values)
    first, second = (phase.recipe for phase in phases_of(recipe))
    assert (first.swap.scheme, first.swap.max_length) == ({"name": "rope", "base": 20.0}, 100)
    assert (first.training.max_steps, first.training.warmup_steps, first.training.learning_rate) == (3, 3, 0.5)
    assert (second.swap.scheme, second.swap.max_length, second.data.length) == ({"name": "nope"}, 200, 64)
    assert [phase.name for phase in phases_of(recipe)] == ["stage-1", "stage-2"]
    single = make_recipe(SWAP)
    assert [(phase.name, phase.recipe) for phase in phases_of(single)] == [("", single)]


def test_every_key_is_documented_and_can_be_given() -> None:
    keys = list(keys_of(Recipe))
    assert len(keys) == len({key.name for key in keys}) > 40
    assert [key.name for key in keys if not attribute_docs(key.owner).get(key.field)] == []
    documented = {(owner, name) for owner in {key.owner for key in keys} for name in attribute_docs(owner)}
    fields = {(owner, field.name) for owner in {key.owner for key in keys} for field in dataclasses.fields(owner)}
    assert documented <= fields


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (f"data.length={2**40}", "data.length: expected at most 67108864 tokens, got 1099511627776"),
        (f"stages=[{{max_steps: 2, length: {2**40}}}]", r"stages\[0\].length: expected at most 67108864 tokens"),
        (f"evaluation.lengths=[16, {2**62}]", "evaluation.lengths: expected at most 67108864 tokens"),
        (f"training.per_device_train_batch_size={2**40}", "1099511627776 windows of .* the most is 67108864 tokens"),
        (f"training.seed={2**32}", "training.seed: expected at most 4294967295, got 4294967296"),
    ],
)
def test_sizes_that_would_fill_any_memory_are_refused(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe({"model": {"name": "gpt2"}, "swap": {"scheme": "rope"}}, [setting])
