"""Checkpoints of models that see images: loaded in fresh processes with the plugin, by bundled code, and by neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hf_posswap
from hf_posswap.errors import RecordError
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.schemes import schemes_for
from tests.checkpoints import fresh
from tests.families.vision_models import FIRST, WHOLE, build, images, states

CHILD = Path(__file__).with_name("vision_child.py")
OTHER = (24, 40)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{name}-rope_2d": (name, "rope_2d", {}) for name in (*FIRST, *WHOLE)},
    **{f"{name}-alibi_2d": (name, "alibi_2d", {}) for name in ("SiglipVisionModel", "CLIPModel")},
    **{f"{name}-sinusoidal_2d": (name, "sinusoidal_2d", {}) for name in (*FIRST, "CLIPModel")},
    **{f"{name}-nope": (name, "nope", {}) for name in FIRST},
    **{f"{name}-larger": (name, "learned_2d", {"image_size": 48}) for name in (*FIRST, *WHOLE)},
    "SiglipForImageClassification-sines-larger": (
        "SiglipForImageClassification",
        "sinusoidal_2d",
        {"image_size": 40},
    ),
}


def store(model: Any, folder: Path, size: int) -> None:
    """Save `model`, and beside it what it gives for images of two sizes."""
    given = {f"{high}x{wide}": images(high, wide) for high, wide in ((size, size), OTHER)}
    expected: dict[str, Tensor] = {}
    for name, pixels in given.items():
        expected |= {f"images {name}": pixels, f"states {name}": states(model, pixels).contiguous()}
    model.save_pretrained(folder)
    save_file(expected, folder / "expected.safetensors")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vision")
    for case, (name, scheme, options) in CASES.items():
        model = build(name)
        hf_posswap.patch_model(model, scheme, **options)
        store(model, root / case, options.get("image_size", 32))
    return root


@pytest.mark.slow
def test_a_fresh_process_with_the_plugin_loads_all(stored: Path) -> None:
    found = fresh.load_all(stored, "plugin", child=CHILD)
    assert set(found) == set(CASES)
    assert {case: {way: gap for way, gap in ways.items() if gap != 0} for case, ways in found.items()} == {
        case: {} for case in CASES
    }


@pytest.mark.slow
def test_plain_transformers_runs_what_is_native_and_refuses_the_rest(stored: Path) -> None:
    found = fresh.load_all(stored, "plain", child=CHILD)
    assert set(found) == set(CASES)
    for case, ways in found.items():
        native = CASES[case][1] not in ("rope_2d", "alibi_2d")
        for way, gap in ways.items():
            if native:
                assert gap == 0, (case, way, gap)
            elif way.startswith("Auto"):
                assert "trust_remote_code=True" in str(gap), (case, way, gap)
            else:  # asked by the name of its class
                assert "pip install hf-posswap" in str(gap), (case, way, gap)


@pytest.mark.slow
def test_bundled_code_loads_where_the_package_is_missing(stored: Path, tmp_path: Path) -> None:
    for case in ("SiglipVisionModel-rope_2d", "CLIPModel-alibi_2d"):
        (tmp_path / case).symlink_to(stored / case)
    found = fresh.load_all(tmp_path, "remote", child=CHILD)
    assert {case: list(ways.values()) for case, ways in found.items()} == {
        "SiglipVisionModel-rope_2d": [0],
        "CLIPModel-alibi_2d": [0],
    }


@pytest.mark.parametrize("scheme", list(schemes_for("images")))
@pytest.mark.parametrize("name", ["CLIPModel", "DeiTForImageClassification"])
def test_what_was_loaded_is_verified_and_saved_again(name: str, scheme: str, tmp_path: Path) -> None:
    model = build(name)
    hf_posswap.patch_model(model, scheme)
    expected = states(model, images(*OTHER))
    hf_posswap.save(model, tmp_path / "first")
    again = hf_posswap.load(tmp_path / "first")
    hf_posswap.verify_swap(again)
    hf_posswap.save(again, tmp_path / "second")
    last = hf_posswap.load(tmp_path / "second").eval()
    assert torch.equal(states(last, images(*OTHER)), expected)
    assert hf_posswap.describe_positions(last).swapped == hf_posswap.describe_positions(model).swapped
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert {key for key, value in last.named_parameters() if value.requires_grad} == trained


def test_the_record_of_another_image_size(tmp_path: Path) -> None:
    model = build("CLIPModel")
    hf_posswap.patch_model(model, "learned_2d", image_size=48)
    record = model.config.posswap
    assert record["original"] == {"vision_config.image_size": 32}
    assert (record["scheme"]["image_size"], record["max_length"]) == ([48, 48], 37)
    for wrong in (0, "48", [48], [48, 0], 2**16, {}):
        with pytest.raises(
            RecordError, match="original.vision_config.image_size must be a number of pixels, or height"
        ):
            SwapRecord.from_dict(record | {"original": {"vision_config.image_size": wrong}})
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vision_config"]["image_size"] == 48
    explained = str(hf_posswap.explain(tmp_path))
    assert "swapped to  learned_2d(image_size=(48, 48))" in explained
    assert "native      learned table, 4 x 4 patches" in explained
