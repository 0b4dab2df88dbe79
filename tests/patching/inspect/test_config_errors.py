"""What a config says wrongly is refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_posswap.errors import CheckpointError
from hf_posswap.patching.inspect.untrusted_config import architectures_of


@pytest.mark.parametrize("names", [5, [None], {"GPT2Model": 1}, "GPT2Model"])
def test_architectures_that_are_no_list_of_names_are_refused(names: object) -> None:
    with pytest.raises(
        CheckpointError, match="architectures of this SimpleNamespace must be a list of class names, got "
    ):
        architectures_of(SimpleNamespace(architectures=names))


@pytest.mark.parametrize(("names", "read"), [(None, []), ([], []), (("A", "B"), ["A", "B"])])
def test_architectures_are_read(names: object, read: list[str]) -> None:
    assert architectures_of(SimpleNamespace(architectures=names)) == read
