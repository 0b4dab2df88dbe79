"""The list of tested versions, and what reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_posswap import versions


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tested_versions.json"
    path.write_text('{"transformers": ["5.18.0", "5.9.1", "5.24.0"], "torch": ["2.13.0"]}')
    monkeypatch.setattr(versions, "FILE", path)


@pytest.mark.usefixtures("listed")
def test_versions_are_ordered_as_numbers() -> None:
    assert versions.tested() == {"transformers": ["5.9.1", "5.18.0", "5.24.0"], "torch": ["2.13.0"]}
    assert versions.tested_range("transformers") == "5.9.1 to 5.24.0"
    assert versions.tested_range("torch") == "2.13.0"
    assert versions.tested_range("peft") == "none"


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("transformers", "5.18.0", True),
        ("transformers", "5.18.1", False),
        ("transformers", "5.19.0", False),
        ("transformers", "5.24.0.dev0", False),
        ("transformers", "5.24.0rc1", False),
        ("torch", "2.13.0+cu129", True),
        ("torch", "2.13.0a0+git1234", False),
        ("peft", "0.18.0", False),
    ],
)
def test_only_exact_versions_are_tested(package: str, version: str, expected: bool) -> None:
    assert versions.is_tested(package, version) is expected
