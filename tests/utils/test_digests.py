"""A digest of weights sees every number, name, type and shape, and nothing of where they lie."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_posswap.utils import digests
from hf_posswap.utils.digests import read_array, sync_to_disk, weights_digest, write_array


def test_files_are_synced_where_no_folder_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where a file is synced only if it is open to write."""

    def open_as_windows(path: Path, flags: int) -> int:
        if path.is_dir() or not flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return os.open(path, flags)

    system = SimpleNamespace(**vars(os) | {"name": "nt", "open": open_as_windows})
    monkeypatch.setattr(digests, "os", system)
    digest = write_array(tmp_path / "a.npy", np.arange(3))
    sync_to_disk(tmp_path / "a.npy")
    found = read_array(tmp_path / "a.npy", digest)
    assert found is not None
    assert found.tolist() == [0, 1, 2]


@settings(max_examples=20)
@given(row=st.integers(0, 4095), column=st.integers(0, 1))
def test_any_one_number_changes_it(row: int, column: int) -> None:
    model = nn.Embedding(4096, 2)
    before = weights_digest(model)
    with torch.no_grad():
        model.weight[row, column] = -model.weight[row, column]
    assert weights_digest(model) != before


def test_name_type_and_shape_change_it() -> None:
    class Named(nn.Module):
        def __init__(self, name: str, value: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer(name, value)

    zeros = torch.zeros(2, 4)
    values = [
        ("a", zeros),
        ("b", zeros),
        ("a", zeros.T),
        ("a", zeros.int()),
        ("a", torch.tensor(0.0)),
        ("a", zeros[:0]),
    ]
    found = [weights_digest(Named(*value)) for value in values]
    assert len(set(found)) == len(found)
    assert weights_digest(Named("a", zeros.T.contiguous().T)) == found[0]  # equal numbers, however they lie


def test_a_copy_has_the_same_in_every_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        model = nn.Embedding(8, 4)
        model.weight = nn.Parameter(model.weight.detach().to(dtype), requires_grad=False)
        assert weights_digest(copy.deepcopy(model)) == weights_digest(model)
