"""Data: every source, kept tokens, what is held out, the mixture, the order, the draws; by index alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from transformers import CTRLTokenizer
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from hf_posswap.comparison.documents import check_paths, read_documents
from hf_posswap.errors import ConfigError, DataError, MissingDependencyError, PositionRangeError
from hf_posswap.text.documents import HubText, files_below, hub_text
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.data import DataSettings, Source, build_data, prove_packing
from hf_posswap.training.data import sources as reading
from hf_posswap.training.data import store as storing
from hf_posswap.training.data.build import concatenation_order
from hf_posswap.training.data.cutting import LEAST, concatenate_documents, cut_pieces, pack_pieces, repeat_pieces
from hf_posswap.training.data.sources import TokenizingProgress, check_source
from hf_posswap.training.data.windows import Order, make_masking, pose_draw, random_positions
from tests.checkpoints.loopback import TOKEN, Repo, running
from tests.training.data.test_packing import built, masked_tokenizer
from tests.training.tiny_models import tiny

TEXTS = [f"document {number} says {'more ' * number}and ends" for number in range(40)]
TOKENIZER = byte_tokenizer()


def rows(texts: list[str], column: str = "text") -> list[dict[str, str]]:
    return [{column: text} for text in texts]


def data(tmp_path: Path, *sources: Source, **more: Any) -> Any:
    settings = DataSettings(sources, cache=tmp_path / "cache", **{"length": 32, "held_out": 0.2} | more)
    return build_data(settings, TOKENIZER, causal=True, scheme_length=1024)


def texts_of(documents: Any) -> set[str]:
    return {TOKENIZER.decode(document[1:]) for document in documents}


def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "folder" / f"{number:02}.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(TEXTS, "body")))
    Dataset.from_list(rows(TEXTS)).to_parquet(tmp_path / "a.parquet")
    hub = tmp_path / "org" / "books"
    hub.mkdir(parents=True)
    Dataset.from_list(rows(TEXTS)).to_parquet(hub / "train.parquet")
    monkeypatch.chdir(tmp_path)
    # beside a folder of that name, where datasets finds it offline
    monkeypatch.setattr(reading, "hub_text", lambda path: HubText(path) if path == "org/books" else None)
    sources = [Source("folder"), Source("a.jsonl", column="body"), Source("a.parquet"), Source("org/books")]
    sources.append(Source("org/books", streaming=False))
    for source in sources:
        found = data(tmp_path, source)
        train, held_out = texts_of(found.train.stores[0]), texts_of(found.held_out)
        assert train | held_out == set(TEXTS)
        assert not train & held_out
        assert 2 <= len(held_out) <= 16
        assert texts_of(data(tmp_path, dataclasses.replace(source, documents=5)).train.stores[0]) <= set(TEXTS[:5])


def test_a_saved_data_set_is_a_source_and_so_is_a_split_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    every = Dataset.from_list(rows([*TEXTS, "left out"], "body"))
    every.filter(lambda row: row["body"] != "left out").save_to_disk("my/saved", num_shards=3)
    train, test = every.select(range(30)), every.select(range(30, 40))
    DatasetDict({"test": test, "train": train}).save_to_disk("my/several")
    DatasetDict({"all": every.select(range(40))}).save_to_disk("my/lone")
    for path, texts in {
        "my/saved": TEXTS, f"{tmp_path}/my/saved": TEXTS, "my/lone": TEXTS,
        "my/several": TEXTS[:30], "my/several:train": TEXTS[:30], "my/several:test": TEXTS[30:],
    }.items():  # fmt: skip
        found = data(tmp_path, Source(path, column="body"))
        assert texts_of(found.train.stores[0]) | texts_of(found.held_out) == set(texts), path
    first = Source("my/saved", column="body", documents=5)
    assert texts_of(data(tmp_path, first).train.stores[0]) <= set(TEXTS[:5])
    measured = read_documents(Path("my/several:test"), TOKENIZER, length=16, limit=99, column="body")
    assert {TOKENIZER.decode(row[1:]) for row in measured.tokens} == {text[:15] for text in TEXTS[30:]}
    for path, message in {
        "my/several:valid": r"my/several has no split 'valid'; it has the splits test, train: name one",
        "my/saved:train": r"my/saved is one data set without splits; give my/saved",
        "my/absent:train": r"my/absent:train does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            check_source(Source(path)) if "absent" not in path else files_below(Path(f"./{path}"))
    with pytest.raises(DataError, match=r"my/several has the splits test, train: name one, as my/several:SPLIT"):
        check_paths(Path("my/several"))
    for elsewhere in ("../saved", str(tmp_path / "my" / "saved"), ".."):
        (tmp_path / "my" / "several" / "dataset_dict.json").write_text(json.dumps({"splits": [elsewhere]}))
        with pytest.raises(DataError, match="dataset_dict.json does not name the splits in my/several"):
            check_paths(Path("my/several"))
    with pytest.raises(
        DataError, match=r"has no text under 'text', it has columns \['body'\]: name the column of text by --col"
    ):
        data(tmp_path, Source("my/saved"))
    changed = data(tmp_path, Source("my/saved", column="body")).identity
    Dataset.from_list(rows(["other", *TEXTS], "body")).save_to_disk("my/saved")
    assert data(tmp_path, Source("my/saved", column="body")).identity != changed
    for file in (tmp_path / "my" / "saved").glob("*.arrow"):
        file.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"the data set saved in my/saved cannot be read: .* Save it again"):
        data(tmp_path, Source("my/saved", column="body"))


def test_there_is_no_text_but_the_requested(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no text to train on: give --text books, .*; .*--text python trains"):
        data(tmp_path)
    with pytest.raises(ConfigError, match=r"source: path is a file, a folder, .* none is given"):
        Source(documents=3)
    with pytest.raises(DataError, match=r"empty holds no document: no file in or below it ends in .txt, .*; give"):
        check_source(Source(str(tmp_path / "empty")))


def test_the_python_corpus_holds_out_what_models_are_measured_on(tmp_path: Path) -> None:
    found = data(tmp_path, Source("python", documents=30))
    corpus = python_corpus()
    assert texts_of(found.held_out) <= {document.text for document in corpus.held_out}
    assert texts_of(found.train.stores[0]) <= {document.text for document in corpus.train}


def test_tokens_are_made_once_and_anew_when_anything_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(TEXTS)))
    written = []
    write = storing._write
    monkeypatch.setattr(storing, "_write", lambda *given, **named: (written.append(1), write(*given, **named))[1])
    first = data(tmp_path, Source(str(path)))
    again = data(tmp_path, Source(str(path)), packing="documents", seed=5)
    assert len(written) == 1
    assert np.array_equal(first.train.stores[0].tokens, again.train.stores[0].tokens)
    data(tmp_path, Source(str(path)), held_out=0.3)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows([*TEXTS, "one more"])))
    assert len(texts_of(data(tmp_path, Source(str(path))).train.stores[0])) > 20
    settings = DataSettings((Source(str(path)),), cache=tmp_path / "cache", length=16, held_out=0.2)
    build_data(settings, masked_tokenizer(), causal=False, scheme_length=16)
    assert len(written) == 4


def at_commit(tmp_path: Path, commit: str | None, text: str, branch: str = "main") -> None:
    """Have datasets read one version of org/set, of the folder of that name, with `commit` in the cache of the Hub."""
    folder = tmp_path / "org" / "set"
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows([f"{text}: {row}" for row in TEXTS])).to_parquet(folder / "train.parquet")
    if commit is not None:
        cached = tmp_path / "hub" / "datasets--org--set"
        for path, content in ((f"refs/{branch}", commit), (f"snapshots/{commit}/README.md", "# A set")):
            (cached / path).parent.mkdir(parents=True, exist_ok=True)
            (cached / path).write_text(content)


def read_set(tmp_path: Path, name: str = "org/set") -> str:
    """Return the text before the colon in the documents of org/set, as a new process reads them."""
    reading._COMMITS.clear()
    (text,) = {document.partition(":")[0] for document in texts_of(data(tmp_path, Source(name)).train.stores[0])}
    return text


@pytest.fixture
def hub_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    # datasets finds the folder of that name offline; hub_text takes it for a path
    monkeypatch.setattr(reading, "hub_text", lambda path: HubText("org/set", None, path.partition("@")[2] or None))
    yield
    reading._COMMITS.clear()


@pytest.mark.usefixtures("hub_set")
def test_the_tokens_of_a_data_set_are_those_of_its_commit(tmp_path: Path) -> None:
    at_commit(tmp_path, "a" * 40, "old")
    assert read_set(tmp_path) == "old"
    at_commit(tmp_path, None, "new")
    assert read_set(tmp_path) == "old"  # of the commit in the cache of the Hub, whose tokens are there
    at_commit(tmp_path, "b" * 40, "new")
    assert read_set(tmp_path) == "new"
    at_commit(tmp_path, "a" * 40, "new", branch="v1")
    assert read_set(tmp_path, "org/set@v1") == "new"
    (tmp_path / "hub" / "datasets--org--set" / "refs" / "main").unlink()
    written = len([*(tmp_path / "cache" / "tokens").iterdir()])
    for text in ("old", "newer", "newer"):  # of an unknown commit: what it is, is read
        at_commit(tmp_path, None, text)
        assert read_set(tmp_path) == text
    assert len([*(tmp_path / "cache" / "tokens").iterdir()]) == written + 4  # two folders with their locks


@pytest.mark.usefixtures("hub_set")
def test_the_commit_of_a_data_set_is_the_newest_one_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        repo = hub.repos["org/set"] = Repo(False, {"a" * 40: {}, "b" * 40: {}}, {"main": "a" * 40, "v1": "a" * 40})
        for commit in ("a" * 40, "b" * 40):
            repo.branches["main"] = commit
            reading._COMMITS.clear()
            assert reading.source_identity(Source("org/set"))["commit"] == commit
        repo.branches["main"] = "a" * 40
        assert reading.source_identity(Source("org/set"))["commit"] == "b" * 40  # one process reads one commit
        assert reading.source_identity(Source("org/set@v1"))["commit"] == "a" * 40
        pinned = []
        monkeypatch.setattr(reading, "hub_documents", lambda source, **how: pinned.append(source) or iter(()))
        assert not list(reading.source_documents(Source("org/set"), commit="b" * 40))
        assert pinned == [HubText("org/set", None, "b" * 40)]


def test_a_revision_of_a_data_set_can_be_named() -> None:
    assert hub_text("org/set@refs/pr/1:test") == HubText("org/set", "test", "refs/pr/1")
    assert hub_text("org/set@v1.0") == HubText("org/set", None, "v1.0")
    assert str(HubText("org/set", "test", "v1.0")) == "org/set@v1.0:test"


def slow_bert(folder: Path, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Hello", "hello"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return BertTokenizerLegacy(str(folder / "vocab.txt"), **options)


def slow_ctrl(folder: Path, merges: str) -> Any:
    folder.mkdir(exist_ok=True)
    words = ("a", "b", "c", "ab</w>", "bc</w>", "<unk>", "c</w>", "a@@")
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text(merges)
    return CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def test_tokenizers_that_read_a_text_differently_share_no_tokens(tmp_path: Path) -> None:
    """Of equal vocabularies: case and merges of slow ones, and special tokens in the text, were not told apart."""
    whole, split = byte_tokenizer(), byte_tokenizer()
    split.split_special_tokens = True
    merges = ("#v\na b\nb c</w>\n", "#v\nb c</w>\na b\n")
    pairs = [
        ([slow_bert(tmp_path / "bert", do_lower_case=lower) for lower in (True, False)], "Hello"),
        ([slow_ctrl(tmp_path / f"ctrl{number}", lines) for number, lines in enumerate(merges)], "abc"),
        ([whole, split], whole.eos_token),
    ]
    for tokenizers, text in pairs:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers]
        assert ids[0] != ids[1]
        assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
        identities = [storing._tokenizer_identity(tokenizer) for tokenizer in tokenizers]
        assert identities[0] != identities[1]
        folder = tmp_path / type(tokenizers[0]).__name__
        tokenizers[0].save_pretrained(folder)
        assert storing._tokenizer_identity(type(tokenizers[0]).from_pretrained(folder)) == identities[0]


def test_groups_of_any_size_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows([*TEXTS[:20], "", *TEXTS[20:]])))
    found = []
    for number, (count, characters) in enumerate([(256, 4_000_000), (3, 4_000_000), (256, 100)]):
        monkeypatch.setattr(storing, "_AT_ONCE", count)
        monkeypatch.setattr(storing, "_CHARACTERS", characters)
        found.append(data(tmp_path / str(number), Source(str(tmp_path / "a.jsonl"))).train.stores[0])
    for other in found[1:]:
        assert np.array_equal(other.tokens, found[0].tokens)
        assert np.array_equal(other.offsets, found[0].offsets)


def _in_a_process(folder: str, queue: Any) -> None:
    found = data(Path(folder), Source("python", documents=60))
    queue.put((len(found.train.stores[0].tokens), int(found.train[3]["input_ids"].sum())))


@pytest.mark.slow
def test_processes_that_ask_at_once_get_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_in_a_process, args=(str(tmp_path), queue)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found[0] == found[1]
    assert len([path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]) == 1


def test_damaged_tokens_are_said(tmp_path: Path) -> None:
    folder = data(tmp_path, Source("python", documents=20)) and next(
        (tmp_path / "cache" / "tokens").glob("tokens-*[0-9a-f]")
    )
    kept = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(kept[:400])
    with pytest.raises(DataError, match=r"holds 100 tokens where \d+ were written: it is damaged. Delete that folder"):
        data(tmp_path, Source("python", documents=20))
    (folder / "train.bin").unlink()
    with pytest.raises(DataError, match=r"the cached tokens in .* cannot be read: .*Delete that folder"):
        data(tmp_path, Source("python", documents=20))


@pytest.mark.parametrize("packing", ["none", "documents", "concatenated", "pose", "random-positions"])
@pytest.mark.parametrize("causal", [True, False])
def test_an_item_depends_on_settings_and_index_alone(tmp_path: Path, packing: Any, causal: bool) -> None:
    one = built(tmp_path, packing, causal=causal).train.sized(200)
    other = built(tmp_path, packing, causal=causal).train.sized(150)
    forward = [one[k] for k in range(100)]
    for k in reversed(range(100)):
        again = other[k]
        assert all(torch.equal(again[name], value) for name, value in forward[k].items())
    reseeded = dataclasses.replace(one, seed=9, order=Order([len(one.cuts[0])], [1.0], 9))
    assert any(not torch.equal(reseeded[k]["input_ids"], forward[k]["input_ids"]) for k in range(9))
    with pytest.raises(IndexError, match="window 150 of 150"):
        other[150]
    with pytest.raises(DataError, match="at least 1 window, got 0"):
        other.sized(0)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), size=st.integers(4, 20), around=st.integers(0, 2))
def test_packing_covers_every_token_once_and_splits_no_document_that_fits(
    lengths: list[int], size: int, around: int
) -> None:
    offsets = np.cumsum([0, *lengths])
    cut = cut_pieces(offsets, size - around)
    packed = pack_pieces(cut, size, around=around)
    seen: Counter[int] = Counter()
    for window in range(len(packed)):
        pieces = packed.pieces(window)
        assert sum(length + around for _, length, _ in pieces) <= size
        for start, length, end in pieces:
            assert length >= LEAST
            assert start + length <= end
            document = int(np.searchsorted(offsets, start, side="right")) - 1
            assert end == offsets[document + 1]
            if lengths[document] <= size - around:
                assert length == lengths[document]
            seen.update(range(start, start + length))
    assert set(seen.values()) <= {1}
    assert len(seen) + packed.left == sum(lengths)
    assert packed.left <= len(lengths)  # at most a lone last token of each
    assert len(packed) <= len(cut)


@given(documents=st.lists(st.tuples(st.integers(2, 12), st.integers(0, 5)), min_size=1, max_size=12))
def test_no_window_holds_a_document_twice(documents: list[tuple[int, int]]) -> None:
    size = 12
    times = np.array([count for _, count in documents])
    cut = cut_pieces(np.cumsum([0, *(length for length, _ in documents)]), size)
    packed = pack_pieces(repeat_pieces(cut, times), size)
    starts = [[start for start, _, _ in packed.pieces(window)] for window in range(len(packed))]
    assert all(len(set(window)) == len(window) for window in starts)
    assert Counter(sum(starts, [])) == +Counter(dict(zip(cut.starts.tolist(), times.tolist(), strict=True)))
    assert all(sum(length for _, length, _ in packed.pieces(window)) <= size for window in range(len(packed)))
    assert len(packed) <= times.sum()


def test_shorter_documents_fill_the_windows_of_copies() -> None:
    """Four copies of 8 tokens, eight texts of 2: four full windows, as without the rule on copies."""
    cut = repeat_pieces(cut_pieces(np.arange(0, 25, 2)[[0, *range(4, 13)]], 12), np.array([4] + [1] * 8))
    packed = pack_pieces(cut, 12)
    assert [[length for _, length, _ in packed.pieces(window)] for window in range(len(packed))] == [[8, 2, 2]] * 4


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    size=st.integers(2, 20),
    separator=st.integers(0, 3),
    data=st.data(),
)
def test_concatenated_windows_are_one_stream_cut_at_the_window(
    lengths: list[int], size: int, separator: int, data: Any
) -> None:
    """Against lists of tokens: joined with separators, and sliced."""
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=25))
    skipped = np.array([data.draw(st.integers(0, min(1, length))) for length in lengths])
    offsets = np.cumsum([0, *lengths])
    stream: list[int] = []
    for number, document in enumerate(order):
        stream += [] if number == 0 else range(-1, -1 - separator, -1)
        stream += range(int(offsets[document]) + int(skipped[document]), int(offsets[document + 1]))
    expected = [stream[start : start + size] for start in range(0, len(stream), size)]
    lone = len(expected.pop()) if expected and len(expected[-1]) < LEAST else 0
    cut = concatenate_documents(offsets, size, np.array(order, dtype=np.int64), skipped=skipped, separator=separator)
    found = []
    for window in range(len(cut)):
        pieces = cut.pieces(window)
        found.append([start + k if start >= 0 else start - k for start, length, _ in pieces for k in range(length)])
        assert all(start < 0 or start + length <= end for start, length, end in pieces)
    assert found == expected
    assert cut.left == lone


@given(times=st.lists(st.integers(0, 4), min_size=2, max_size=8), seed=st.integers(0, 99))
def test_no_document_follows_itself_while_others_are_to_be_read_again(times: list[int], seed: int) -> None:
    order = concatenation_order(np.array(times), np.random.default_rng(seed)).tolist()
    assert Counter(order) == Counter({number: count for number, count in enumerate(times) if count})
    shared = sorted(times)[-2]  # so many rounds have two documents or more
    rounds = [sum(count > number for count in times) for number in range(shared)]
    for number, end in enumerate(itertools.accumulate(rounds)):
        assert len(set(order[end - rounds[number] : end])) == rounds[number]
    assert all(one != next_one for one, next_one in itertools.pairwise(order[: sum(rounds)]))


def test_each_of_many_sources_is_read_at_least_once_in_a_block() -> None:
    for count in (999, 1000, 1001, 2500):
        order = Order([5] * count, [1.0 + (number % 7) for number in range(count)], 0)
        assert set(order.pattern.tolist()) == set(range(count))
        assert len(order.pattern) == max(1000, count)
        assert {order.at(item)[0] for item in range(len(order.pattern))} == set(range(count))


def test_concatenated_documents_are_separated_and_predicted_across(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(TEXTS)))
    whole = {}
    for separator in (None, "<s>", TOKENIZER.eos_token):
        found = data(tmp_path, Source(str(path)), packing="concatenated", separator=separator)
        items = [found.train[k] for k in range(len(found.train))]
        order = sorted(range(len(items)), key=lambda k: found.train.order.at(k)[1])
        stream = torch.cat([items[k]["input_ids"][items[k]["attention_mask"] == 1] for k in order])
        whole[separator] = str(TOKENIZER.decode(stream))
        assert all("position_ids" not in item for item in items)
        for item in items:
            length = int(item["attention_mask"].sum())
            assert length == 32 or length == int(len(stream) % 32)
            assert torch.equal(item["labels"][1:length], item["input_ids"][1:length])
            assert (item["labels"][length:] == -100).all()
            assert item["labels"][0] == -100
    begin = TOKENIZER.bos_token
    plain = whole[None].removeprefix(begin).split(begin)
    assert set(plain) <= set(TEXTS)
    assert len(plain) == len(set(plain)) > 25
    assert whole["<s>"] == "<s>".join(plain)
    assert whole[TOKENIZER.eos_token] == begin.join(plain)


def test_attention_crosses_concatenated_documents(tmp_path: Path) -> None:
    found = data(tmp_path, Source("python", documents=30), packing="concatenated", separator="<s>", length=64)
    model = tiny("llama")
    batch = found.collate([found.train[0], found.train[1]])
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, 0] = 7
    with torch.no_grad():
        assert (model(**batch).logits - model(**other).logits)[:, -1].abs().amax() > 1e-4
    prove_packing(model, found)


def test_short_documents_are_left_out_and_long_ones_read_more_often(tmp_path: Path) -> None:
    lengths = [10] * 40 + [50] * 40 + [90] * 40
    letters = np.random.default_rng(0)
    texts = ["".join(letters.choice(list("abcdefgh"), length - 1)) for length in lengths]  # and a begin-of-text token
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(texts)))

    def reads(source: Source, **more: Any) -> tuple[Counter[int], dict[str, Any], Any]:
        found = data(tmp_path, source, length=128, **more)
        store, cut = found.train.stores[0], found.train.cuts[0]
        times: Counter[int] = Counter()
        for window in range(len(cut)):
            for start, length, _ in cut.pieces(window):
                document = int(np.searchsorted(store.offsets, start, side="right")) - 1
                times[document] += length == len(store[document])
            assert len({start for start, _, _ in cut.pieces(window)}) == len(cut.pieces(window))
        return times, found.summary["sources"][0], found

    for packing in ("none", "documents"):
        times, summary, found = reads(Source(str(path), min_tokens=50), packing=packing)
        sizes = np.diff(found.train.stores[0].offsets)
        assert times == {number: 1 for number, size in enumerate(sizes) if size >= 50}
        assert summary["documents_too_short"] == (sizes < 50).sum()
        assert min(map(len, found.held_out)) >= 50
        assert summary["tokens_left_out"] == sizes[sizes < 50].sum()
        upsample = {0: 0.25, 50: 1, 90: 3.5}
        times, summary, found = reads(Source(str(path), upsample=upsample), packing=packing)
        sizes = np.diff(found.train.stores[0].offsets)
        by_size = {size: [times[int(number)] for number in np.flatnonzero(sizes == size)] for size in (10, 50, 90)}
        assert set(by_size[50]) == {1}
        assert set(by_size[90]) == {3, 4}
        assert set(by_size[10]) == {0, 1}
        assert np.mean(by_size[90]) == pytest.approx(3.5, abs=0.4)
        assert np.mean(by_size[10]) == pytest.approx(0.25, abs=0.25)
        assert summary["documents_not_read"] == by_size[10].count(0)
        assert summary["documents_read_again"] == sum(by_size[90]) - len(by_size[90])
    text = "".join(
        str(TOKENIZER.decode(found.train[k]["input_ids"][found.train[k]["attention_mask"] == 1]))
        for found in [data(tmp_path, Source(str(path), upsample={90: 3}), length=128, packing="concatenated",
                           separator="<s>", seed=2)]
        for k in sorted(range(len(found.train)), key=lambda k: found.train.order.at(k)[1])
    )  # fmt: skip
    documents = text.split("<s>")
    counts = Counter(documents)
    assert {(len(document), count) for document, count in counts.items()} == {(9, 1), (49, 1), (89, 3)}
    distinct = len(counts)
    assert len(set(documents[:distinct])) == distinct, "each is read once before any is read again"
    repeated = reads(Source(str(path), upsample={0: 0.25}))[0]
    assert repeated == reads(Source(str(path), upsample={0: 0.25}))[0]
    with pytest.raises(DataError, match=r"a\.jsonl has no document of 91 tokens \(the longest has 90\): give longer"):
        data(tmp_path, Source(str(path), min_tokens=91))
    with pytest.raises(DataError, match=r"a\.jsonl: upsample leaves no document: give a factor above 0"):
        data(tmp_path, Source(str(path), upsample={0: 0}))


def test_held_out_documents_must_be_long_enough_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows([*TEXTS, "x" * 500])))
    with pytest.raises(DataError, match=r"no held-out document has the tokens of min_tokens, .*: raise data\.held_out"):
        data(tmp_path, Source(str(path), min_tokens=400))


def test_pieces_shorter_than_a_window_are_left_out(tmp_path: Path) -> None:
    cut = cut_pieces(np.array([0, 7, 10, 20]), 4, whole=True)
    assert cut.starts.tolist() == [0, 10, 14]
    assert cut.left == 3 + 3 + 2
    with pytest.raises(DataError, match=r"no window for packing 'pose': its longest document has 9 tokens, and 64"):
        built(tmp_path, "pose", lengths=[8])


@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=4), seed=st.integers(0, 9), data=st.data())
def test_sources_come_by_their_weights_and_windows_once_a_pass(counts: list[int], seed: int, data: Any) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 1), min_size=len(counts), max_size=len(counts)))
    order = Order(counts, weights, seed)
    drawn = [order.at(k) for k in range(2000)]
    for source, count in enumerate(counts):
        windows = [window for found, window in drawn if found == source]
        assert abs(len(windows) / 2000 - weights[source] / sum(weights)) <= 1e-3
        for turn in range(len(windows) // count):
            assert sorted(windows[turn * count : (turn + 1) * count]) == list(range(count))
    assert [Order(counts, weights, seed).at(k) for k in (1999, 0, 700)] == [drawn[k] for k in (1999, 0, 700)]


@given(size=st.integers(4, 40), more=st.integers(0, 60), target=st.integers(1, 200), seed=st.integers(0, 99))
def test_pose_draws_what_the_paper_says(size: int, more: int, target: int, seed: int) -> None:
    first, second, positions = pose_draw(size, size + more, size + target, np.random.default_rng(seed))
    assert 1 <= first <= (size + 1) // 2
    assert first <= second <= size + more - (size - first)
    jump = positions[first] - first
    assert 0 <= jump <= target
    assert positions.tolist() == [*range(first), *(k + jump for k in range(first, size))]


def test_pose_reaches_every_part_of_its_ranges() -> None:
    drawn = [pose_draw(8, 16, 20, np.random.default_rng(seed)) for seed in range(800)]
    assert {first for first, _, _ in drawn} == {1, 2, 3, 4}
    assert {int(positions[-1]) for _, _, positions in drawn} == set(range(7, 20))
    assert {second - first for first, second, _ in drawn} == set(range(9))


def test_pose_reads_the_text_that_stands_there(tmp_path: Path) -> None:
    found = built(tmp_path, "pose").train
    stream = bytes(found.stores[0].tokens.astype(np.uint8))
    for k in range(30):
        item = found[k]
        jump = int((item["position_ids"].diff() != 1).nonzero()[0]) + 1 if item["position_ids"][-1] > 63 else None
        assert int(item["position_ids"].max()) < found.target
        assert item["attention_mask"].all()
        if jump is not None:
            ids = bytes(item["input_ids"].numpy().astype(np.uint8))
            assert ids[:jump] in stream
            assert ids[jump:] in stream
            assert item["labels"][jump] == -100 or ids in stream
            assert (item["labels"][1:] == -100).sum() <= 1


@given(size=st.integers(1, 30), more=st.integers(0, 99), seed=st.integers(0, 99))
def test_random_positions_rise_below_the_target(size: int, more: int, seed: int) -> None:
    found = random_positions(size, size + more, np.random.default_rng(seed))
    assert len(found) == size
    assert found.min() >= 0
    assert found.max() < size + more
    assert (np.diff(found) > 0).all()


def test_random_positions_are_even() -> None:
    drawn = np.concatenate([random_positions(4, 16, np.random.default_rng(seed)) for seed in range(2000)])
    counts = np.bincount(drawn, minlength=16)
    assert (abs(counts - 500) < 5 * np.sqrt(500)).all()


def test_masking_hides_as_bert_did() -> None:
    tokenizer = masked_tokenizer()
    masking = make_masking(tokenizer, 0.15)
    assert (masking.before, masking.after, masking.mask) == ((1,), (2,), 3)
    assert set(masking.words.tolist()) == set(range(5, 31))
    ids = np.random.default_rng(0).integers(5, 31, 200_000)
    shown, labels = masking.hide(ids, np.random.default_rng(1))
    chosen = labels != -100
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert (labels[chosen] == ids[chosen]).all()
    assert (shown[~chosen] == ids[~chosen]).all()
    hidden, kept = shown[chosen] == 3, shown[chosen] == ids[chosen]
    assert hidden.mean() == pytest.approx(0.8, abs=0.01)
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 26, abs=0.01)
    assert not np.isin(shown[chosen][~hidden], tokenizer.all_special_ids).any()
    for seed in range(50):
        assert (masking.hide(ids[:2], np.random.default_rng(seed))[1] != -100).any()


def test_what_an_encoder_reads_is_wrapped(tmp_path: Path) -> None:
    for packing, begins in (("none", 1), ("pose", 1), ("concatenated", 1), ("documents", 2)):
        item = built(tmp_path, packing, causal=False).train[0]  # type: ignore[arg-type]
        assert item["input_ids"][0] == 1
        assert (item["input_ids"] == 1).sum() == (item["input_ids"] == 2).sum() >= 1
        assert begins == 1 or (item["position_ids"][item["input_ids"] == 1] == 0).all()
        assert (item["labels"][item["input_ids"] <= 2] == -100).all()
        assert (item["labels"] != -100).any()
    shifted = dataclasses.replace(built(tmp_path, "pose", causal=False).train, first_position=2)
    ordinary = built(tmp_path, "pose", causal=False).train
    assert torch.equal(shifted[4]["position_ids"], ordinary[4]["position_ids"] + 2)
    assert int(ordinary[4]["position_ids"][0]) == 0


def test_a_summary_counts_all(tmp_path: Path) -> None:
    found = data(tmp_path, Source("python", documents=30), packing="documents")
    row = found.summary["sources"][0]
    assert row["documents"] + row["held_out_documents"] == 30
    assert row["tokens_in_windows"] + row["tokens_left_out"] == row["tokens"] == len(found.train.stores[0].tokens)
    assert row["windows"] == len(found.train)
    json.dumps(found.summary)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: Source("", -1.0, documents=1), r"source: path is .*; weight is .* got -1.0; .*; documents"),
        (
            lambda: Source("a", min_tokens=0, upsample={-1: 1, 5: -2, 9: 1}),
            r"min_tokens is a number of tokens from 1, got 0; upsample maps .* got -1: 1; upsample .* got 5: -2\.",
        ),
        (lambda: DataSettings(separator="<s>"), r"separator .* packing 'concatenated', got '<s>' with packing 'none'"),
        (lambda: DataSettings(separator="", packing="concatenated"), r"separator is text between the documents"),
        (
            lambda: DataSettings(length=1, packing="docs", seed=-1, held_out=1.0, mask_share=0.0),  # type: ignore[arg-type]
            r"data: length .* got 1; packing is one of none, .*'docs'; seed .*; held_out .*; mask_s",
        ),
    ],
)
def test_every_problem_of_settings_is_said_at_once(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings()


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PositionRangeError, match="windows of 2048 tokens .* 1024 positions .* a smaller data.length"):
        data(tmp_path, Source("python"), length=2048)
    with pytest.raises(DataError, match=r"packing 'pose' trains positions beyond the window, and .* both 1024"):
        data(tmp_path, Source("python"), length=1024, packing="pose")
    with pytest.raises(DataError, match="nowhere does not exist"):
        data(tmp_path, Source(str(tmp_path / "nowhere")))
    (tmp_path / "lone.txt").write_text("a text of its own")
    with pytest.raises(DataError, match=r"lone.txt has one text, .*: give at least two different documents"):
        data(tmp_path, Source(str(tmp_path / "lone.txt")))
    settings = DataSettings((Source("python", documents=20),), length=32, cache=tmp_path)
    with pytest.raises(DataError, match="has no mask token"):
        build_data(settings, TOKENIZER, causal=False, scheme_length=64)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="datasets"):
        data(tmp_path, Source("org/books"))


def test_one_text_of_few_is_set_aside_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    texts = [f"book {number} " + "of words " * 30 for number in range(9)]
    for number, text in enumerate([*texts, texts[0]]):
        (tmp_path / "books" / f"{number}.txt").write_text(text)
    said: list[str] = []
    settings = DataSettings((Source(str(tmp_path / "books")),), length=32, cache=tmp_path / "cache", held_out=1e-9)
    for _ in range(2):
        found = build_data(settings, TOKENIZER, causal=True, scheme_length=1024, say=said.append)
        first = TOKENIZER.bos_token_id
        held = [TOKENIZER.decode([one for one in document if one != first]) for document in found.held_out]
        assert len(set(held)) == 1
        assert set(held) < set(texts)
        assert len(held) == (2 if held[0] == texts[0] else 1), "equal texts are together"
    (line,) = [line for line in said if "data.held_out" in line]
    assert "data.held_out=1e-09 sets none of its 10 documents aside" in line
    assert "Raise data.held_out to measure on more" in line
    more = dataclasses.replace(settings, held_out=0.9999999)
    with pytest.raises(DataError, match=r"left to learn from with data.held_out=1: lower data.held_out"):
        build_data(more, TOKENIZER, causal=True, scheme_length=1024)


def test_tokens_that_take_long_are_told_of_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "folder" / f"{number:02}.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(TEXTS)))
    said: list[str] = []

    def build(path: Path, cache: str) -> Any:
        settings = DataSettings((Source(str(path)),), cache=tmp_path / cache, length=32, held_out=0.2)
        return build_data(settings, TOKENIZER, causal=True, scheme_length=64, say=said.append)

    quick = build(tmp_path / "folder", "quick")
    assert said == []
    monkeypatch.setattr(storing, "_AT_ONCE", 15)
    seconds = itertools.count(0.0, 12.0)
    monkeypatch.setattr(
        storing, "TokenizingProgress", lambda source, say: TokenizingProgress(source, say, lambda: next(seconds))
    )
    slow = build(tmp_path / "folder", "slow")
    shown = [line.partition(": ")[2].partition(" a second")[0] for line in said]
    assert shown == [f"{n} of 40 documents are tokens, {rate}" for n, rate in ((15, 1.25), (30, 1.25), (40, 1.11))]
    counted = sum(len(document) for store in (slow.train.stores[0], slow.held_out) for document in store)
    assert said[-1].endswith(f"{counted:,} tokens, about 0 s left")
    assert np.array_equal(slow.train.stores[0].tokens, quick.train.stores[0].tokens)
    said.clear()
    build(tmp_path / "folder", "slow")  # kept
    assert said == []
    build(tmp_path / "rows.jsonl", "slow")  # how many rows there are is not known
    assert re.search(r": 15 documents are tokens, 1.25 a second, [\d,]+ tokens$", said[0])
