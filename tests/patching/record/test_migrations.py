"""Records of older versions: brought to today's one step after the other, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posswap import SwapRecord
from hf_posswap.errors import RecordError
from hf_posswap.patching.record.record import MIGRATIONS, RECORD_VERSION, Migration, migrate

FIRST = {"version": 1, "span": 64}


def rename(record: dict[str, Any]) -> dict[str, Any]:
    record["max_length"] = record.pop("span")
    return record


def double(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"max_length": 2 * record["max_length"]}


TABLE: dict[int, Migration | str] = {1: rename, 2: double}


def test_each_version_before_todays_has_an_entry() -> None:
    assert sorted(MIGRATIONS) == list(range(1, RECORD_VERSION))


def test_todays_version_is_left_as_it_is() -> None:
    record = {"version": RECORD_VERSION, "anything": [1]}
    assert migrate(record) is record


@pytest.mark.parametrize(
    ("newest", "expected"), [(1, FIRST), (2, {"version": 2, "max_length": 64}), (3, {"version": 3, "max_length": 128})]
)
def test_an_older_record_goes_step_by_step_and_what_was_read_stays(newest: int, expected: dict[str, Any]) -> None:
    assert migrate(FIRST, newest, TABLE) == expected
    assert FIRST == {"version": 1, "span": 64}


@pytest.mark.parametrize("version", [0, -1, 3, True, 1.0, "1", None, 10**400])
def test_a_version_that_nothing_reads_is_refused_by_name(version: object) -> None:
    with pytest.raises(RecordError, match=r"has version .*; this hf_posswap reads versions 1 to 2: update hf_posswap"):
        migrate({"version": version}, 2, TABLE)


def test_a_version_that_was_given_up_names_the_release_that_reads_it() -> None:
    given_up: dict[int, Migration | str] = {1: "0.4.2", 2: double}
    with pytest.raises(RecordError, match=r"has version 1, which hf_posswap 0\.4\.2 was the last to read: install"):
        migrate(FIRST, 3, given_up)
    assert migrate({"version": 2, "max_length": 1}, 3, given_up)["max_length"] == 2


@pytest.mark.parametrize("record", [{"version": 1}, {"version": 2, "max_length": {}}])
def test_what_only_says_that_it_is_old_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=r"says version [12] and is none of it \((Key|Type)Error: .*check the file"):
        migrate(record, 3, TABLE)


def test_reading_a_record_migrates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hf_posswap.patching.record.record.migrate", lambda data: migrate(data | {"version": 1}, 2, {1: modern})
    )
    old = {"mechanism": {"name": "nope"}, "route": "native", "base_type": "gpt2", "max_length": 64, "site": "auto"}
    assert SwapRecord.from_dict(old).scheme == {"name": "nope"}


def modern(old: dict[str, Any]) -> dict[str, Any]:
    old["scheme"] = old.pop("mechanism")
    return old | {"original": {}}
