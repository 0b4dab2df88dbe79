"""Two Llamas that were really trained: the failure beyond the window is there, and what is known to reduce it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_posswap.comparison import Candidate, EvalSettings, compare

PIECES = ("self_extend", "rerope", "dual_chunk")


def stories(shared: Path) -> list[str]:
    """Return stories packed into documents of some 4000 characters, white space collapsed: one symbol set lacks it."""
    from datasets import Dataset

    path = shared.parent / "stories" / "tinystories-sample.parquet"
    if not path.is_file():
        pytest.skip("no stories beside the project")
    packed, current = [], ""
    for text in Dataset.from_parquet(str(path))["text"]:
        current += " ".join(text.split()) + " "
        if len(current) > 4000:
            packed.append(current)
            current = ""
    return packed[:10]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window"), [("stories260K", 512), ("babyllama105", 256)])
def test_schemes_without_training_reduce_the_failure_beyond_the_window(
    shared_checkpoints: Path, name: str, window: int
) -> None:
    source = shared_checkpoints / name
    schemes = [Candidate(source, scheme) for scheme in PIECES]
    factors = [Candidate(source, scheme, {"factor": 2.0}) for scheme in ("ntk", "linear")]
    settings = EvalSettings(lengths=(window, 2 * window), metrics=("ppl_prefix", "short_reg"))
    results = compare(
        [Candidate(source), *schemes, *factors], documents=stories(shared_checkpoints), settings=settings
    ).results
    models = results["models"]
    loss = {label: {row["length"]: row["perplexity"] for row in model["ppl_prefix"]} for label, model in models.items()}
    assert loss[name][2 * window] > 1.05 * loss[name][window]
    for scheme in PIECES:
        label = f"{name}+{scheme}"
        by_length = {row["length"]: row for row in results["comparisons"][label]["lengths"]}
        assert by_length[2 * window]["high"] < 0
        assert by_length[2 * window]["p_holm"] <= 0.05
        assert models[label]["short_reg"]["loss"]["verdict"] == "not worse"
    # interpolating all frequencies alike costs the short context most, without training
    assert loss[f"{name}+linear:factor=2.0"][window] > loss[f"{name}+ntk:factor=2.0"][window] > loss[name][window]
