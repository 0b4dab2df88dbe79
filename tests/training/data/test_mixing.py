"""Windows of several lengths: which step reads which, that none is read twice in a pass, and what is refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hf_posswap import patch_model
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.data import DataSettings, Packing, Source, TokenData, TokenWindows, build_data, prove_packing
from tests.training.data.test_packing import masked_tokenizer
from tests.training.engine_runs import write_texts
from tests.training.tiny_models import tiny

LENGTH, CUT, ROWS = 64, (4, 1, 4, 2), 3


def built(place: Path, packing: Packing = "none", cut: tuple[int, ...] = CUT, **more: Any) -> TokenData:
    if not (place / "texts").exists():
        write_texts(place / "texts")
    settings = DataSettings(
        (Source(str(place / "texts")),), length=LENGTH, packing=packing, cut=cut, cache=place / "cache", held_out=0.3,
        **more,
    )  # fmt: skip
    return build_data(settings, byte_tokenizer(), causal=True, scheme_length=256)


def batches(data: TokenData, steps: int) -> list[dict[str, Any]]:
    rows = data.steps(steps, ROWS)
    return [data.collate([rows[step * ROWS + row] for row in range(ROWS)]) for step in range(steps)]


@pytest.mark.parametrize("packing", ["none", "documents", "concatenated", "pose", "random-positions"])
def test_every_step_reads_one_length_and_as_many_tokens(tmp_path: Path, packing: Packing) -> None:
    shapes = [tuple(batch["input_ids"].shape) for batch in batches(built(tmp_path, packing), 6)]
    assert shapes == [(12, 16), (3, 64), (12, 16), (6, 32), (12, 16), (3, 64)]


def test_each_length_is_read_in_its_own_order_and_nothing_is_left_out(tmp_path: Path) -> None:
    """Window by window: what the steps of one length read is the sequence of the windows of that length."""
    data = built(tmp_path)
    read: dict[int, list[torch.Tensor]] = {}
    for batch in batches(data, 9):
        for row in batch["input_ids"]:
            read.setdefault(len(row), []).append(row)
    assert {length: len(rows) for length, rows in read.items()} == {16: 5 * 12, 64: 2 * 3, 32: 2 * 6}
    alone = build_data(
        DataSettings((Source(str(tmp_path / "texts")),), length=16, cache=tmp_path / "cache", held_out=0.3),
        byte_tokenizer(), causal=True, scheme_length=256,
    )  # fmt: skip
    assert all(torch.equal(row, alone.train[number]["input_ids"]) for number, row in enumerate(read[16]))
    assert all(torch.equal(row, data.train[number]["input_ids"]) for number, row in enumerate(read[64]))


def test_a_pass_over_the_short_windows_reads_each_once(tmp_path: Path) -> None:
    data = built(tmp_path, cut=(4, 1))
    short = data.shorter[4]
    steps = 2 * (len(short) // (4 * ROWS))
    seen = Counter(tuple(row.tolist()) for b in batches(data, steps)[::2] for row in b["input_ids"])
    every = Counter(tuple(short[item]["input_ids"].tolist()) for item in range(len(short)))
    assert not seen - every
    assert sum(seen.values()) > len(short) - 4 * ROWS


def test_a_row_depends_on_its_index_alone(tmp_path: Path) -> None:
    data = built(tmp_path, "pose")
    few, many = data.steps(4, ROWS), data.steps(400, ROWS)
    for item in reversed(range(len(few))):
        for name, value in few[item].items():
            assert torch.equal(value, many[item][name]), name
    assert len(many) == 1200
    assert many[1199]["input_ids"].shape == (2, 32), "later passes are read, too"
    with pytest.raises(IndexError, match="row 12 of 12"):
        few[12]


def test_processes_read_one_length_in_each_step(tmp_path: Path) -> None:
    """As accelerate deals batches out to two processes that accumulate two each: a step is of one length on both."""
    data = built(tmp_path)
    rows = data.steps(4, 2 * 2 * 3)
    shapes = []
    for process in range(2):
        sampler = BatchSamplerShard(BatchSampler(SequentialSampler(rows), 3, drop_last=False), 2, process)
        shapes.append([batch["input_ids"].shape[1] for batch in DataLoader(rows, batch_sampler=sampler,
                                                                          collate_fn=data.collate)])  # fmt: skip
    assert shapes[0] == shapes[1] == [16, 16, 64, 64, 16, 16, 32, 32]


def test_one_length_is_read_as_without_a_cut(tmp_path: Path) -> None:
    data = built(tmp_path, cut=(1,))
    rows = data.steps(2, ROWS)
    assert not data.shorter
    for item in range(len(rows)):
        assert torch.equal(rows[item]["input_ids"][0], data.train[item]["input_ids"])
    with pytest.raises(DataError, match="at least 1 step of at least 1 row, got 0 of 3"):
        data.steps(0, ROWS)


def test_the_summary_names_the_windows_of_each_length(tmp_path: Path) -> None:
    data = built(tmp_path)
    assert data.summary["cut"] == [4, 1, 4, 2]
    (row,) = data.summary["sources"]
    assert row["windows"] == len(data.train)
    assert row["shorter_windows"] == {"32": len(data.shorter[2]), "16": len(data.shorter[4])}


class Leaking:
    """Packed windows whose mask lets documents see one another."""

    packing = "documents"

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        found = self.windows[item]
        return found | {"attention_mask": torch.ones_like(found["input_ids"])}


def test_the_packing_of_every_length_is_proved(tmp_path: Path) -> None:
    data = built(tmp_path, "documents", cut=(2, 1), seed=1)
    assert any((data.train[item]["position_ids"] == 1).sum() > 1 for item in range(len(data.train)))
    model = patch_model(tiny("gpt2"), "rope", max_length=256)
    prove_packing(model, data)
    leaking: Any = Leaking(data.train)
    with pytest.raises(DataError, match="documents leak into one another"):
        prove_packing(model, dataclasses.replace(data, shorter={2: leaking}))


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ((8,), r"cut must contain 1, for steps of full-length windows, got \[8\]"),
        ((), r"cut must contain 1, .* got \[\]"),
        ((1, 3, 0, 32), r"cut must divide 64 tokens into windows .* 4 tokens each, got 3, 0, 32"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(cut: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataSettings(length=LENGTH, cut=cut)


def test_an_encoders_short_windows_must_hold_text(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    settings = DataSettings((Source(str(tmp_path / "texts")),), length=8, cut=(2, 1), cache=tmp_path / "c")
    data = build_data(settings, masked_tokenizer(), causal=False, scheme_length=64)
    assert data.shorter[2][0]["input_ids"].shape == (4,)
