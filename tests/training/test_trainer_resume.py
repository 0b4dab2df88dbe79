"""transformers' own Trainer on swapped models: it resumes, takes the best checkpoint, and shifts labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.contract.models import VOCABULARY
from tests.contract.pairs import Pair, words

pytest.importorskip("accelerate")
PAIRS = (
    Pair("bloom", "rope"),
    Pair("gptj", "alibi"),
    Pair("llama", "kerple"),
    Pair("gpt2", "fire"),
    Pair("mpt", "rope"),
)


class Words(Dataset[dict[str, torch.Tensor]]):
    """Eight rows of random words."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = words(1, 16, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    given: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0}
    arguments = TrainingArguments(str(folder), **given | quiet | options)
    return Trainer(model, arguments, train_dataset=Words(), eval_dataset=Words())


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["", "in shards"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_training_resumes_and_ends_with_the_same_weights(pair: Pair, sharded: bool, tmp_path: Path) -> None:
    whole = trainer(pair.swapped(), tmp_path)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    if sharded:
        from hf_posswap import load

        load(checkpoint).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
        (checkpoint / "model.safetensors").unlink()
        for file in (tmp_path / "shards").glob("model*"):
            file.rename(checkpoint / file.name)
    resumed = trainer(pair.swapped(), tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    left, right = whole.model.state_dict(), resumed.model.state_dict()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.slow
def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    pair = Pair("bloom", "rope")
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 1.0}
    run = trainer(pair.swapped(), tmp_path, **options)
    run.train()
    best = Path(str(run.state.best_model_checkpoint))
    from hf_posswap import load

    ids = words(1, 16)
    assert torch.equal(pair.logits(run.model, ids), pair.logits(load(best), ids))


@pytest.mark.parametrize("pair", [Pair("llama", "alibi"), Pair("bloom", "rope")], ids=str)
def test_label_smoothing_shifts_labels_as_for_the_stock_class(pair: Pair, tmp_path: Path) -> None:
    model, ids = pair.swapped(), words(2, 16)
    run = trainer(model, tmp_path, label_smoothing_factor=0.1)
    found = run.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = pair.logits(model, ids)[:, :-1].reshape(-1, VOCABULARY)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1), label_smoothing=0.1)
    assert torch.allclose(found, expected, atol=1e-5)
