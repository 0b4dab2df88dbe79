"""The harness on swapped models, against the harness on plain ones and against losses counted by hand."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import hf_posswap
from hf_posswap.errors import DataError, MissingDependencyError, OptionError
from hf_posswap.training import byte_tokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the harness is not tested")

from jinja2.exceptions import SecurityError  # noqa: E402
from lm_eval import utils  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from hf_posswap.harness import harness_model_class, run_tasks  # noqa: E402
from hf_posswap.harness.task_code import templates_without_code  # noqa: E402

WINDOW, LONGER = 48, 128
TOKENIZER = byte_tokenizer()
TEXTS = [" ".join(str((number * 7 + i) ** 2) for i in range(n)) for number, n in enumerate((4, 10, 26))]
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": ["1", "2", "3"],
    "doc_to_target": "{{answer}}",
}


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=WINDOW, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    gpt2().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files of two tasks of our own: rolling loss of texts, and a choice of three."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.dumps({"text": text, "answer": number}) for number, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    files = {}
    for name, more, metric in (("rolling", ROLLING, "byte_perplexity"), ("choice", CHOICE, "acc")):
        task: dict[str, Any] = {"task": f"posswap_{name}", "dataset_path": "json", "test_split": "test"} | more
        task["dataset_kwargs"] = {"data_files": {"test": str(folder / "rows.jsonl")}}
        task["metric_list"] = [{"metric": metric}]
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(json.dumps(task))  # JSON is YAML
    return files


def counted_by_hand(model: PreTrainedModel, window: int) -> float:
    """Return the byte perplexity of the texts in disjoint windows, each with the token before it as its first input."""
    total, size = 0.0, 0
    for text in TEXTS:
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        size += len(text.encode())
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            first = [256] if start == 0 else [ids[start - 1]]
            if start and len(part) < window:  # the last window is filled with what came before it
                inputs = ids[len(ids) - window - 1 : -1]
            else:
                inputs = [*first, *part[:-1]]
            with torch.no_grad():
                logits = model(torch.tensor([inputs])).logits[0, -len(part) :].double()
            total += functional.cross_entropy(logits, torch.tensor(part), reduction="sum").item()
    return math.exp(total / size)


def test_a_plain_model_scores_as_in_the_harness_itself(checkpoint: Path, tasks: dict[str, Path]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = [str(path) for path in tasks.values()]
    theirs: Any = simple_evaluate(
        "hf",
        model_args={"pretrained": str(checkpoint), "dtype": "float32"},
        tasks=names,
        device="cpu",
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
        bootstrap_iters=0,
    )
    ours = run_tasks(checkpoint, names, dtype="float32")
    assert ours["longest_input"] == WINDOW
    for task, key in (("posswap_rolling", "byte_perplexity,none"), ("posswap_choice", "acc,none")):
        assert ours["results"][task][key] == theirs["results"][task][key]


def test_windows_of_the_same_tokens_in_one_batch_are_each_scored_by_their_own() -> None:
    """The harness's cache of logits scored a window's last tokens by the first rows of another's that was the same."""
    letters = random.Random(0)
    same, more, most = ("".join(letters.choices("abcdefgh", k=k)) for k in (WINDOW + 1, 10, WINDOW - 1))
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in (more + same, most + same)]
    build: Any = harness_model_class()
    totals = {
        size: build(gpt2(), tokenizer=TOKENIZER, batch_size=size).loglikelihood_rolling(requests, disable_tqdm=True)
        for size in (1, 4)
    }
    assert totals[4] == pytest.approx(totals[1], rel=1e-5)
    model = build(gpt2(), tokenizer=TOKENIZER, batch_size=4)
    theirs = HFLM.loglikelihood_rolling(model, requests, disable_tqdm=True)
    assert theirs != pytest.approx(totals[1], rel=1e-5)  # equal: the method of PosswapLM may go
    assert model.logits_cache


def test_the_callers_random_numbers_stay(checkpoint: Path, tasks: dict[str, Path]) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(1))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = [drawn(), drawn()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    first = drawn()
    run_tasks(checkpoint, [str(tasks["choice"])], limit=1)
    assert [first, drawn()] == expected


def test_templates_stay_without_code_until_the_last_thread_ends() -> None:
    free = utils.env
    first, second = templates_without_code(), templates_without_code()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(SecurityError):
        utils.env.from_string("{{ ''.__class__.__mro__ }}").render()
    second.__exit__(None, None, None)
    assert utils.env is free


def test_the_model_is_registered_once_by_threads() -> None:
    code = (
        "import sys, threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from hf_posswap.harness import harness_model_class\n"
        "import lm_eval.models.huggingface\n"
        "sys.setswitchinterval(1e-6)\n"
        "barrier = threading.Barrier(8)\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    print(len(set(threads.map(lambda _: (barrier.wait(), harness_model_class())[1], range(8)))))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["1"], 0), done.stderr


def test_inputs_grow_with_the_swap(tasks: dict[str, Path]) -> None:
    model = gpt2()
    swapped = gpt2()
    hf_posswap.patch_model(swapped, "alibi", max_length=LONGER)
    found = run_tasks(model, [tasks["rolling"]], "alibi", max_length=LONGER, tokenizer=TOKENIZER)
    value = found["results"]["posswap_rolling"]["byte_perplexity,none"]
    assert found["longest_input"] == LONGER
    assert value == pytest.approx(counted_by_hand(swapped, LONGER), rel=1e-5)
    assert value != pytest.approx(counted_by_hand(swapped, WINDOW), rel=1e-4)  # the windows matter
    assert getattr(model.config, "posswap", None) is None  # what was given stays as it is


def test_a_saved_swap_is_used(checkpoint: Path, tasks: dict[str, Path], tmp_path: Path) -> None:
    model = hf_posswap.load(checkpoint)
    hf_posswap.patch_model(model, "rope", max_length=LONGER)
    model.save_pretrained(tmp_path / "swapped")
    TOKENIZER.save_pretrained(tmp_path / "swapped")
    found = run_tasks(tmp_path / "swapped", [tasks["rolling"]])
    value = found["results"]["posswap_rolling"]["byte_perplexity,none"]
    assert found["longest_input"] == LONGER
    assert value == pytest.approx(counted_by_hand(model, LONGER), rel=1e-5)


def test_the_longest_input_can_be_set(checkpoint: Path, tasks: dict[str, Path]) -> None:
    found = run_tasks(checkpoint, [tasks["rolling"]], longest_input=24, dtype="float32")
    value = found["results"]["posswap_rolling"]["byte_perplexity,none"]
    assert value == pytest.approx(counted_by_hand(hf_posswap.load(checkpoint), 24), rel=1e-5)


def test_the_harness_knows_the_model_by_name() -> None:
    from lm_eval.api.registry import get_model

    ours = harness_model_class()  # which registers it
    assert get_model("posswap") is ours


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"tasks": []}, OptionError, "tasks names what to run, got none"),
        ({"tasks": ["nowhere.yaml"]}, OptionError, "no such file of a task: nowhere.yaml"),
        ({"batch_size": 0}, OptionError, "batch_size is a whole number of at least 1, got 0"),
        ({"limit": 0}, OptionError, "limit is a whole number of at least 1, got 0"),
        ({"longest_input": -1}, OptionError, "longest_input is a whole number of at least 1, got -1"),
        ({"num_fewshot": -1}, OptionError, "num_fewshot is a whole number of at least 0, got -1"),
        ({"tokenizer": None}, DataError, "a model object has no tokenizer: give tokenizer="),
    ],
)
def test_what_cannot_be_run_is_refused(
    tasks: dict[str, Path], more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_tasks(**{"model": gpt2(), "tasks": [tasks["choice"]], "tokenizer": TOKENIZER} | more)


@pytest.mark.slow
def test_an_unknown_task_is_named_with_its_neighbours() -> None:  # the harness reads ten thousand files for this
    with pytest.raises(OptionError, match="the harness has no task 'helaswag'. Did you mean .*'hellaswag'"):
        run_tasks(gpt2(), ["helaswag"], tokenizer=TOKENIZER)


def test_a_missing_harness_is_said(monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Path]) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    again = harness_model_class.__wrapped__  # the class is registered once in a process
    monkeypatch.setattr("hf_posswap.harness.run.harness_model_class", again)
    with pytest.raises(MissingDependencyError, match=r"lm_eval is needed here .* pip install 'hf-posswap\[lm-eval\]'"):
        run_tasks(gpt2(), [tasks["choice"]], tokenizer=TOKENIZER)
