"""Records: those of every version load for ever, and whatever else stands there is one clear error."""

from __future__ import annotations

import copy
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_posswap
from hf_posswap import SwapRecord, patch_model, plan_swap
from hf_posswap.errors import CheckpointError, RecordError, SchemeError
from hf_posswap.patching.record.record import LONGEST, MOST_VALUES, RECORD_VERSION
from hf_posswap.schemes import schemes_for
from tests.contract.models import build

RECORDS = sorted((Path(__file__).parent / "records").glob("*.json"))


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


GOOD = read(Path(__file__).parent / "records" / "v1-native.json")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_each_version_loads_and_is_carried_out_again(path: Path) -> None:
    stored = read(path)
    record = SwapRecord.from_dict(stored)
    assert record.route == stored["route"]
    plan = plan_swap(build(record.base_type), record.make_scheme(), max_length=record.max_length, site=record.site)
    assert plan.route == stored["route"]
    assert plan.max_length == stored["max_length"]
    assert plan.scheme.to_dict().items() >= stored["scheme"].items()
    assert plan.record.original == stored["original"]


def test_every_version_has_a_stored_record_of_each_route() -> None:
    found = {(read(path)["version"], read(path)["route"]) for path in RECORDS}
    assert found == {(v, route) for v in range(1, RECORD_VERSION + 1) for route in ("native", "plugin")}


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """Return the good record with another value at `path`."""
    record = copy.deepcopy(GOOD)
    place: Any = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"x": inner}
    return inner


DEEP_LIST: list[Any] = []
for _ in range(100_000):  # far deeper than Python's own recursion
    DEEP_LIST = [DEEP_LIST]

HOSTILE: dict[str, tuple[Any, str]] = {
    "no object": ([1], "must be an object, which says what the swap is, got a list"),
    "no record": (None, "must be an object, which says what the swap is, got nothing: use the config.json"),
    "unknown version": (GOOD | {"version": 2}, "has version 2; this hf_posswap reads version 1"),
    "version true": (GOOD | {"version": True}, "has version True"),
    "no version": ({k: v for k, v in GOOD.items() if k != "version"}, "has version None"),
    "unknown field": (GOOD | {"code": "x"}, "missing fields: none; unknown fields: 'code'"),
    "unknown field that is no name": (GOOD | {3: "x"}, "unknown fields: 3"),
    "missing field": ({k: v for k, v in GOOD.items() if k != "site"}, "missing fields: site; unknown fields: none"),
    "unknown route": (changed("route", value="pickle"), "route must be 'native' or 'plugin', got 'pickle'"),
    "unknown site": (changed("site", value=1), "site must be 'auto' or 'attention', got 1"),
    "base type a path": (changed("base_type", value="../../x"), "base_type must be a number, true, false, null, or a"),
    "base type two words": (changed("base_type", value="a b"), "base_type must be a model type, got 'a b'"),
    "huge length": (
        changed("max_length", value=2**40),
        f"max_length must be .* from 1 to {LONGEST}, got 1099511627776",
    ),
    "length beyond any integer": (changed("max_length", value=10**400), "max_length must be a whole number of at most"),
    "no length": (changed("max_length", value=0), "max_length must be a whole number of tokens"),
    "length true": (changed("max_length", value=True), "max_length must be a whole number of tokens"),
    "length a float": (changed("max_length", value=64.0), "max_length must be a whole number of tokens"),
    "another config value": (changed("original", "auto_map", value={}), "original.auto_map is not a config value that"),
    "a private config value": (changed("original", "__class__", value=1), "original: each key must be a plain name"),
    "original length negative": (changed("original", "max_position_embeddings", value=-1), "original.max_position_emb"),
    "original rope a list": (changed("original", "rope_parameters", value=[1]), "original.rope_parameters must be an"),
    "unknown scheme": (changed("scheme", "name", value="yarm"), "unknown scheme 'yarm'. Did you mean 'yarn'"),
    "scheme name a list": (changed("scheme", "name", value=["yarn"]), "scheme holds a scheme that cannot be built"),
    "scheme without a name": (changed("scheme", value={"factor": 2.0}), "scheme must be a scheme with its name"),
    "scheme a word": (changed("scheme", value="yarn"), "scheme must be an object"),
    "unknown scheme field": (changed("scheme", "speed", value=1), "scheme 'yarn' has no field 'speed'"),
    "NaN": (changed("scheme", "factor", value=float("nan")), "scheme.factor must be a finite number, got nan"),
    "infinity": (changed("scheme", "base", value=float("inf")), "scheme.base must be a finite number, got inf"),
    "negative factor": (changed("scheme", "factor", value=-4.0), "factor must be a finite number >= 1"),
    "factor a word": (changed("scheme", "factor", value="four"), "factor must be a finite number"),
    "an object for a number": (changed("scheme", "factor", value={}), "factor must be a finite number"),
    "a path": (changed("scheme", "layout", value="/etc/passwd"), r"scheme.layout must be .*\(no path"),
    "a relative path": (changed("scheme", "layout", value=".."), r"scheme.layout must be .*\(no path"),
    "a url": (changed("scheme", "layout", value="http://x"), r"scheme.layout must be .*\(no path"),
    "a long word": (changed("scheme", "layout", value="x" * 1000), "at most 128 letters"),
    "bytes": (changed("scheme", "layout", value=b"half"), "scheme.layout must be a number"),
    "deep objects": (changed("original", "rope_parameters", value=nested(50)), "lies deeper than 10 objects"),
    "deep lists": (changed("scheme", "factor", value=DEEP_LIST), "lies deeper than 10 objects"),
    "a giant list": (
        changed("scheme", "factor", value=[0.0] * 2**21),
        "scheme.factor brings it to more than 65536 values",
    ),
    "schemes in schemes": (
        changed("scheme", "base", value={"name": "rope", "base": {"name": "rope", "base": {"name": "rope"}}}),
        "is a scheme inside more than 2 others",
    ),
    "a bad scheme inside": (
        changed("scheme", "base", value={"0": {"name": "rope", "base": -1}}),
        r"scheme\.base\.0 holds a scheme that cannot be built: rope: base must be a finite number > 1",
    ),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_what_is_no_record_is_one_clear_error(case: str) -> None:
    data, said = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match=said) as caught:
            SwapRecord.from_dict(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000
    assert isinstance(caught.value, ValueError)
    assert peak < 3e6


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(list(schemes_for("text"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "base", "0"]), inner),
    max_leaves=6,
)
PLACES = [(key,) for key in GOOD] + [("scheme", key) for key in GOOD["scheme"]] + [("original", "rope_parameters")]


@given(st.sampled_from(PLACES), JSON)
def test_any_json_anywhere_is_read_or_refused(place: tuple[str, ...], value: Any) -> None:
    data = changed(*place, value=value)
    try:
        record = SwapRecord.from_dict(data)
    except RecordError:
        return
    assert record.to_dict() == data
    assert SwapRecord.from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False))) == record


def test_a_swap_whose_record_could_not_be_read_is_not_made() -> None:
    model = build("llama")
    with pytest.raises(SchemeError, match=f"meant for {2**30} tokens; the maximum is {LONGEST}"):
        patch_model(model, "rope", max_length=2**30)
    assert not hasattr(model.config, "posswap")
    with pytest.raises(RecordError, match="route must be"):
        SwapRecord(**GOOD | {"route": "other"})


NESTED: dict[str, dict[str, Any]] = {
    "per_layer": {"layers": {0: "nope", 1: {"name": "yarn", "factor": 2.0}}},
    "blend": {"new": "alibi", "weight": 0.25},
}


@pytest.mark.parametrize("name", list(NESTED))
def test_schemes_in_schemes_are_read_and_checked_by_the_same_rules(name: str) -> None:
    model = build("llama")
    patch_model(model, name, **NESTED[name])
    stored = json.loads(json.dumps(model.config.posswap, allow_nan=False))
    record = SwapRecord.from_dict(stored)
    assert record.make_scheme() == model._posswap.plan.scheme
    assert record.to_dict() == stored
    text = json.dumps(stored)
    for old, new in (('"alibi"', '"alibee"'), ('"nope"', '"nop"'), ('"factor": 2.0', '"factor": -2.0')):
        if old in text:
            with pytest.raises(RecordError, match="config.posswap: scheme"):
                SwapRecord.from_dict(json.loads(text.replace(old, new)))


@pytest.mark.parametrize("count", [MOST_VALUES // 2, 1_000_000])
def test_a_record_of_many_frequencies_is_read_or_refused_in_a_moment(count: int) -> None:
    """In operations, which a busy machine does not change: lines of Python that run for each value."""
    data = changed("scheme", value={"name": "rope", "frequencies": [0.5] * count})
    steps = 0

    def counted(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return counted

    before = sys.gettrace()
    sys.settrace(counted)
    try:
        if count > MOST_VALUES:
            with pytest.raises(RecordError, match=f"frequencies brings it to more than {MOST_VALUES} values"):
                SwapRecord.from_dict(data)
        else:
            SwapRecord.from_dict(data)
    finally:
        sys.settrace(before)
    assert steps < 40 * MOST_VALUES


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"model_type": ' * 100_000, '{"model_type": "gpt2", "posswap": ' + "[" * 9999]
)
def test_a_config_that_is_nested_too_deep_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for read_it in (hf_posswap.load, hf_posswap.explain):
        with pytest.raises(CheckpointError, match="holds no readable model config"):
            read_it(tmp_path)
