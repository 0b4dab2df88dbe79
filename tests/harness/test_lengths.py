"""Tasks of the harness by length, against the harness itself on the questions of each length."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_posswap.errors import DataError, MissingDependencyError, OptionError, RemoteCodeError
from hf_posswap.evaluation.passkey import longest_passing
from hf_posswap.training import byte_tokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the harness is not tested")

from hf_posswap.harness import harness_model_class, retention, run_tasks  # noqa: E402
from hf_posswap.harness.lengths import by_length, reads_lengths, tokenizer_folder  # noqa: E402
from hf_posswap.harness.scores import table_of  # noqa: E402

TOKENIZER = byte_tokenizer()
LENGTHS = [16, 32, 64]
SIZES = [4, 30, 16, 17, 70, 64, 9, 33, 12, 50, 32, 3]  # of the prompts; one is longer than all lengths
MADE = '''
"""A synthetic task in the manner of RULER: it makes its data by length, and counts with the model's tokenizer."""

from datasets import Dataset
from transformers import AutoTokenizer


def make(max_seq_lengths=(24,), tokenizer=None, **more):
    count = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=True)
    rows = []
    for length in max_seq_lengths:
        text = "ab" * length
        while len(count(text)["input_ids"]) > length:
            text = text[1:]
        rows += [{"text": text[turn:], "answer": turn % 2, "length": length} for turn in range(6)]
    return {"test": Dataset.from_list(rows)}


def scored(doc, results):
    right = max(range(2), key=lambda choice: results[choice][0]) == doc["answer"]
    return {"24": -1.0, str(doc["length"]): float(right)}


def mean(values):
    known = [value for value in values if value != -1]
    return sum(known) / len(known) if known else -1
'''


def gpt2(seed: int = 0, window: int = 64) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=257, n_positions=window, n_embd=16, n_layer=1, n_head=2, bos_token_id=256, eos_token_id=256
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def choice(folder: Path, name: str, sizes: list[int]) -> Path:
    """Write a task of one choice of two for a prompt of each size, whose right answers do not depend on the order."""
    rows = [{"text": (chr(97 + size % 26) + "xyz ") * size, "answer": size % 2, "size": size} for size in sizes]
    cut = [json.dumps(row | {"text": row["text"][: row["size"]]}) for row in rows]  # type: ignore[index]
    (folder / f"{name}.jsonl").write_text("\n".join(cut) + "\n")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["a", "b"],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))
    return folder / f"{name}.yaml"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return the file of a task that makes its data by length."""
    (tmp_path / "made_by_length.py").write_text(MADE)
    (tmp_path / "made.yaml").write_text(
        "task: made\n"
        "custom_dataset: !function made_by_length.make\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\n'
        'doc_to_choice: ["a", "b"]\n'
        'doc_to_target: "{{answer}}"\n'
        "process_results: !function made_by_length.scored\n"
        "metric_list:\n"
        '  - metric: "24"\n'
        "    aggregation: !function made_by_length.mean\n"
        "    higher_is_better: true\n"
    )
    return tmp_path / "made.yaml"


def stock(model: PreTrainedModel, task: Path, **more: Any) -> dict[str, float]:
    """Return the scores of the harness's own model class and command."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, metadata=more.pop("metadata", None))
    subject = HFLM(pretrained=model, tokenizer=TOKENIZER, device="cpu")
    found: Any = simple_evaluate(subject, tasks=[str(task)], task_manager=manager, bootstrap_iters=0, **more)
    return found["results"][task.stem]


def values(results: dict[str, Any], task: str) -> dict[str, float]:
    row = next(row for row in results["table"]["rows"] if row["task"] == task)
    return {column: cell["score"] for column, cell in row["values"].items()}


def test_each_length_has_the_questions_that_are_longer_than_the_length_before(tmp_path: Path) -> None:
    model = gpt2()
    found = run_tasks(model, [choice(tmp_path, "all", SIZES)], lengths=LENGTHS, tokenizer=TOKENIZER)
    row = found["table"]["rows"][0]
    for shorter, length in zip([0, *LENGTHS], LENGTHS, strict=False):
        within = [size for size in SIZES if shorter < size <= length]
        theirs = stock(model, choice(tmp_path, f"to_{length}", within))["acc,none"]
        assert row["values"][str(length)]["score"] == pytest.approx(theirs), length
        assert row["values"][str(length)]["questions"] == len(within)
    assert len({cell["score"] for cell in row["values"].values()}) > 1  # the lengths differ
    assert found["longer"] == {"all": 1}
    assert found["table"]["columns"] == ["16", "32", "64"]
    assert set(found["runs"]) == {"16", "32", "64"}


def test_a_limit_counts_at_each_length(tmp_path: Path) -> None:
    task = choice(tmp_path, "all", SIZES)
    found = run_tasks(gpt2(), [task], lengths=LENGTHS, limit=2, tokenizer=TOKENIZER)
    assert [cell["questions"] for cell in found["table"]["rows"][0]["values"].values()] == [2, 2, 2]


def test_lengths_without_questions_have_no_score(tmp_path: Path) -> None:
    task = choice(tmp_path, "short", [3, 5, 7])
    found = run_tasks(gpt2(), [task], lengths=[8, 32], tokenizer=TOKENIZER)
    assert list(values(found, "short")) == ["8"]
    assert found["table"]["rows"][0]["effective_length"] is None
    with pytest.raises(DataError, match="no question has a prompt of at most 2 tokens"):
        run_tasks(gpt2(), [task], lengths=[2], tokenizer=TOKENIZER)


def test_data_made_by_length_are_as_in_the_harness(made: Path, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    model = gpt2(1)
    found = run_tasks(model, [made], lengths=[16, 48], limit=4, tokenizer=TOKENIZER, trust_remote_code=True)
    for length in (16, 48):
        metadata = {"max_seq_lengths": [length], "tokenizer": str(tmp_path / "tokenizer")}
        theirs = stock(model, made, metadata=metadata, limit=4)
        assert values(found, "made")[str(length)] == pytest.approx(theirs[f"{length},none"])
    cells = found["table"]["rows"][0]["values"]
    assert {column: cell["questions"] for column, cell in cells.items()} == {"16": 4, "48": 4}
    config = found["runs"]["48"][0]["configs"]["made"]
    assert config["metadata"]["max_seq_lengths"] == [48]
    assert "tokenizer" not in config["metadata"]  # a temporary folder


def test_without_lengths_the_data_are_of_their_own_length(made: Path) -> None:
    found = run_tasks(gpt2(), [made], tokenizer=TOKENIZER, trust_remote_code=True)
    assert list(values(found, "made")) == ["24"]
    given = {"max_seq_lengths": [8]}
    other = run_tasks(gpt2(), [made], tokenizer=TOKENIZER, metadata=given, trust_remote_code=True)
    assert list(values(other, "made")) == ["8"]
    with pytest.raises(RemoteCodeError, match="!function"):
        run_tasks(gpt2(), [made], lengths=[16], tokenizer=TOKENIZER)


def test_two_kinds_of_tasks_run_together(made: Path, tmp_path: Path) -> None:
    measured = choice(tmp_path, "all", SIZES)
    together = run_tasks(gpt2(), [made, measured], lengths=LENGTHS, tokenizer=TOKENIZER, trust_remote_code=True)
    for task in (made, measured):
        alone = run_tasks(gpt2(), [task], lengths=LENGTHS, tokenizer=TOKENIZER, trust_remote_code=True)
        assert values(together, task.stem) == values(alone, task.stem)


def test_a_group_has_the_mean_over_the_questions_of_its_tasks(tmp_path: Path) -> None:
    parts = [choice(tmp_path, "some", [3, 5, 8, 20, 24]), choice(tmp_path, "others", [4, 6, 30])]
    found = run_tasks(gpt2(4), parts, lengths=[8, 32], tokenizer=TOKENIZER)
    mean = table_of(found["table"]["rows"], {"both": ["some", "others"]})["rows"][-1]
    assert mean["task"] == "both, mean of 2 tasks"
    for length, counts in (("8", (3, 2)), ("32", (2, 1))):
        scores = [values(found, task)[length] for task in ("some", "others")]
        expected = sum(score * count for score, count in zip(scores, counts, strict=True)) / sum(counts)
        assert mean["values"][length] == {"score": pytest.approx(expected), "stderr": None, "questions": sum(counts)}
    group = tmp_path / "both.yaml"
    group.write_text(json.dumps({"group": "both", "task": ["some", "others"]}))
    with pytest.raises(OptionError, match=r"both.yaml is a group of tasks, .*: give the files of its tasks"):
        run_tasks(gpt2(4), [group], tokenizer=TOKENIZER)


def test_the_effective_lengths_and_what_is_kept(tmp_path: Path) -> None:
    task = choice(tmp_path, "all", SIZES)
    base, model = gpt2(0), gpt2(3)
    found = run_tasks(model, [task], lengths=LENGTHS, base=base, tokenizer=TOKENIZER)
    mine, theirs = values(found, "all"), values(run_tasks(base, [task], lengths=LENGTHS, tokenizer=TOKENIZER), "all")
    row = found["table"]["rows"][0]
    kept = {length: 100 * mine[length] / theirs[length] if theirs[length] else None for length in mine}
    assert row["retention"] == pytest.approx(kept)
    scores = {int(length): score for length, score in mine.items()}
    expected = longest_passing(scores, 0.85 * scores[16]) if scores[16] else None
    assert row["effective_length"] == {"ruler": longest_passing(scores, 0.856), "nolima": expected}
    itself = run_tasks(base, [task], lengths=LENGTHS, base=base, tokenizer=TOKENIZER)["table"]["rows"][0]
    assert [share for share in itself["retention"].values() if share is not None] == pytest.approx([100.0] * 3)


def test_a_base_runs_at_the_lengths_that_it_reads(tmp_path: Path) -> None:
    task = choice(tmp_path, "all", SIZES)
    short = gpt2(0, window=32)
    found = run_tasks(short, [task], "alibi", lengths=LENGTHS, base=short, tokenizer=TOKENIZER)
    assert (found["longest_input"], found["base"]["longest_input"]) == (64, 32)
    assert found["table"]["rows"][0]["retention"]["64"] is None
    alone = run_tasks(short, [task], lengths=LENGTHS[:2], tokenizer=TOKENIZER)
    again = run_tasks(short, [task], "alibi", lengths=LENGTHS, base=alone, tokenizer=TOKENIZER)
    assert again["table"] == found["table"]
    with pytest.raises(DataError, match=r"different questions: lengths \[32, 64\] and \[16, 32\]"):
        run_tasks(short, [task], "alibi", lengths=LENGTHS[1:], base=alone, tokenizer=TOKENIZER)
    with pytest.raises(OptionError, match="the model reads at most 32 tokens, and the lengths go to 64"):
        run_tasks(short, [task], lengths=LENGTHS, tokenizer=TOKENIZER)
    with pytest.raises(OptionError, match="the base reads at most 32 tokens, and the lengths go to 64"):
        run_tasks(short, [task], "alibi", lengths=[64], base=short, tokenizer=TOKENIZER)


def test_a_base_can_be_an_earlier_run_of_the_same_questions(tmp_path: Path) -> None:
    task = choice(tmp_path, "all", SIZES)
    base = json.loads(json.dumps(run_tasks(gpt2(0), [task], tokenizer=TOKENIZER), default=str))
    found = run_tasks(gpt2(3), [task], base=base, tokenizer=TOKENIZER)
    share = found["table"]["rows"][0]["retention"]["all"]
    key = "acc,none"
    assert share == pytest.approx(100 * found["results"]["all"][key] / base["results"]["all"][key])
    assert retention(found, base)["rows"][0]["retention"] == {"all": share}
    with pytest.raises(DataError, match="answered different questions: limit 2 and None"):
        run_tasks(gpt2(3), [task], base=base, limit=2, tokenizer=TOKENIZER)
    with pytest.raises(DataError, match="base is not a result of run_tasks"):
        run_tasks(gpt2(3), [task], base={"results": {}}, tokenizer=TOKENIZER)


def test_a_chat_template_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = choice(tmp_path, "all", SIZES)
    chatty = byte_tokenizer()
    chatty.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    model = gpt2(2, window=200)
    roles: list[list[str]] = []
    templated = type(chatty).apply_chat_template

    def seeing(self: Any, messages: list[dict[str, str]], **more: Any) -> Any:
        roles.append([message["role"] for message in messages])
        return templated(self, messages, **more)

    monkeypatch.setattr(type(chatty), "apply_chat_template", seeing)
    options: dict[str, Any] = {"tokenizer": chatty, "num_fewshot": 1, "limit": 2, "apply_chat_template": True}
    found = run_tasks(model, [task], **options)
    assert roles == [["user"]] * 2
    both = run_tasks(model, [task], lengths=[32, 64], **options)
    assert roles == [["user"]] * 6
    assert len(both["table"]["columns"]) == 2
    roles.clear()
    run_tasks(model, [task], fewshot_as_multiturn=True, **options)
    assert roles == [["user", "assistant", "user"]] * 2
    assert found["settings"]["apply_chat_template"] is True
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        run_tasks(model, [task], tokenizer=TOKENIZER, apply_chat_template=True)


def test_code_of_a_tokenizer_does_not_reach_the_harness() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["somebody--code.Tokenizer", None]}
    with tokenizer_folder(tokenizer, trust_remote_code=False) as folder:
        assert "auto_map" not in (Path(folder) / "tokenizer_config.json").read_text()
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"lengths": []}, OptionError, r"lengths are whole numbers of at least 1, got \[\]"),
        ({"lengths": [0]}, OptionError, r"lengths are whole numbers of at least 1, got \[0\]"),
        ({"lengths": [1024.5]}, OptionError, r"lengths are whole numbers of at least 1, got \[1024.5\]"),
        ({"lengths": ["1k"]}, OptionError, r"lengths are whole numbers of at least 1, got"),
        ({"lengths": [8], "metadata": {"max_seq_lengths": [9]}}, OptionError, "both set the lengths"),
        ({"metadata": {"tokenizer": "some/body"}}, OptionError, "tasks run the code of a tokenizer in metadata"),
        ({"fewshot_as_multiturn": True}, OptionError, "fewshot_as_multiturn needs a chat"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_tasks(gpt2(), [choice(tmp_path, "all", SIZES)], tokenizer=TOKENIZER, **more)


@pytest.mark.slow
def test_ruler_of_the_harness_runs_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """One needle task needs no data but its own; the harness reads its ten thousand files for the name."""
    pytest.importorskip("wonderwords", reason="wonderwords is not installed: RULER's needles are not tested")
    from lm_eval.api.task import ConfigurableTask

    seen: list[tuple[int, int]] = []
    judged = ConfigurableTask.process_results

    def seeing(task: Any, doc: dict[str, Any], results: Any) -> Any:
        seen.append((doc["max_length"], len(TOKENIZER(doc["input"])["input_ids"])))
        return judged(task, doc, results)

    monkeypatch.setattr(ConfigurableTask, "process_results", seeing)
    model = gpt2(0, window=2048)
    found = run_tasks(model, ["niah_single_1"], lengths=[1024, 2048], limit=2, tokenizer=TOKENIZER)
    cells = found["table"]["rows"][0]["values"]
    assert {column: cell["questions"] for column, cell in cells.items()} == {"1024": 2, "2048": 2}
    assert [length for length, _ in seen] == [1024, 1024, 2048, 2048]
    assert all(0.7 * length < size <= length - 128 for length, size in seen)  # room for the answer


@pytest.mark.slow
def test_the_long_tasks_of_the_page_are_in_the_harness() -> None:
    from lm_eval.tasks import TaskManager

    page = Path(__file__).parents[2] / ".docs" / "pages" / "evaluation.md"
    rows = [line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall("`([a-z0-9_]+)`", row, re.IGNORECASE)}
    groups = ["ruler", "babilong", "longbench2", "infinitebench", "graphwalks"]
    assert set(groups) <= named
    manager = TaskManager()
    assert {*groups, by_length("babilong"), "graphwalks_128k", "graphwalks_1M"} <= set(manager.all_tasks)


def test_an_old_harness_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.delattr(TaskManager, "load")
    with pytest.raises(MissingDependencyError, match=r"lm_eval>=0\.4\.12 is needed here .*hf-posswap\[lm-eval\]"):
        harness_model_class.__wrapped__()


@pytest.mark.slow  # RULER's modules try to fetch data of nltk when they are imported
@pytest.mark.parametrize(
    ("module", "names", "expected"),
    [
        ("babilong.common_utils", ["load_dataset"], True),
        ("graphwalks.utils", ["load_dataset"], False),
        ("ruler.niah_utils", ["niah_single_1", "niah_multiquery"], True),
        ("ruler.vt_utils", ["get_vt_dataset"], True),
        ("ruler.cwe_utils", ["get_cw_dataset"], True),
        ("ruler.fwe_utils", ["fwe_download"], True),
        ("ruler.qa_utils", ["get_squad", "get_hotpotqa"], True),
    ],
)
def test_tasks_that_read_lengths_are_known(module: str, names: list[str], expected: bool) -> None:
    from importlib import import_module
    from types import SimpleNamespace

    if module.startswith("ruler"):
        pytest.importorskip("wonderwords", reason="wonderwords is not installed: RULER's functions are not read")
    functions = import_module(f"lm_eval.tasks.{module}")
    for name in names:
        task = SimpleNamespace(config=SimpleNamespace(custom_dataset=getattr(functions, name)))
        assert reads_lengths(task) is expected
    assert not reads_lengths(SimpleNamespace(config=SimpleNamespace(custom_dataset=None)))
