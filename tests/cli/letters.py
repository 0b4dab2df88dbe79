"""A task of EleutherAI's harness that needs no data but its own."""

from __future__ import annotations

import json
from pathlib import Path


def letters(folder: Path) -> dict[str, object]:
    """Return a task of four choices between letters, its rows written to `folder`."""
    rows = [json.dumps({"text": letter * 9, "answer": 0}) for letter in "abcd"]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["a", "b"],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
