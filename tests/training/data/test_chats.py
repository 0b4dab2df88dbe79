"""Chats: which rows are some, their tokens, which of them the loss counts, by hand and as TRL's SFTTrainer has them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import hf_posswap
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.text.chats import Chat, ChatEncoder, row_document
from hf_posswap.text.documents import HubText
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.adapting import nll_at_lengths
from hf_posswap.training.config import make_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.data import DataSettings, Source, TokenData, build_data, prove_packing
from hf_posswap.training.data import sources as reading
from hf_posswap.training.data.sources import data_notes
from hf_posswap.training.data.windows import IGNORED
from hf_posswap.training.engine import Services
from hf_posswap.training.engine.checkpoints import differences, identity_of
from hf_posswap.training.engine.parallel import Launch
from tests.training.data.test_packing import masked_tokenizer
from tests.training.engine_runs import recipe, trained
from tests.training.tiny_models import tiny

TOOLS = (
    "{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
)
ANSWER = "{{ message.content or '' }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>"
END = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = f"{TOOLS}{ANSWER}{END}"
"""ChatML, with tools."""
MARKED = (
    f"{TOOLS}{{% if message.role == 'assistant' %}}{{% generation %}}{ANSWER}{{% endgeneration %}}"
    f"{{% else %}}{ANSWER}{{% endif %}}{END}"
)
"""The same text, with the assistant's marked."""
UNSTOPPED = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
FORGETFUL = PLAIN.replace(
    "{{ message.content or '' }}", "{{ message.content if loop.last or message.role != 'assistant' else '...' }}"
)
"""Rewrites earlier messages, as templates do that drop earlier thoughts."""


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    if template == BEGINNING:
        end = (tokenizer.eos_token, tokenizer.eos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{end[0]} $A", special_tokens=[end])
    return tokenizer


def say(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turns(number: int) -> list[dict[str, Any]]:
    """Return a chat of one to three turns, every other one with a system prompt."""
    start = [say("system", f"You are number {number}.")] if number % 2 else []
    pairs = [[say("user", f"question {number}.{turn}"), say("assistant", f"answer {number} to {turn}.")]
             for turn in range(1 + number % 3)]  # fmt: skip
    return [*start, *sum(pairs, [])]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = [
    say("user", "what is 1 + 2?"), say("assistant", None, tool_calls=[CALL]), say("tool", "3"), say("assistant", "3."),
]  # fmt: skip
PLAIN_TEXTS = [{"text": f"text number {n}" + ("<|endoftext|>" if n % 3 == 0 else "<|im_end|>" * (n % 3 == 1))}
               for n in range(12)]  # fmt: skip
BEGINNING = f"{PLAIN}{{# the tokenizer begins each text #}}"
CHATS = [{"messages": turns(number)} for number in range(12)]
PAIRS = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CHATS]
TEXTS = [{"prompt": f"the number after {n} is", "completion": f" {n + 1}, of course"} for n in range(12)]


def write(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:  # a new time would make new tokens
        path.write_text(text)
    return str(path)


def built(
    place: Path, rows: list[Any], template: str | None = PLAIN, *, length: int = 512, **settings: Any
) -> TokenData:
    place.mkdir(exist_ok=True)
    source = Source(write(place / "rows.jsonl", rows))
    chosen = DataSettings((source,), length=length, cache=place / "cache", held_out=0.3, **settings)
    return build_data(chosen, tokenizer_with(template), causal=True, scheme_length=1024)


def documents(data: TokenData) -> dict[str, str]:
    """Return what the loss counts of each training and held-out document, by its text; one token a window is lost."""
    tokenizer = tokenizer_with(None)
    store = data.train.stores[0]
    trained = [(store[k], store.counted_of(k)) for k in range(len(store))]
    flags = data.held_out_counted or [np.ones(len(ids), dtype=bool) for ids in data.held_out]
    return {
        str(tokenizer.decode(ids)): str(tokenizer.decode(ids[kept]))
        for ids, kept in [*trained, *zip(data.held_out, flags, strict=True)]
    }


def rendered(messages: list[dict[str, Any]], tools: Any = None) -> str:
    """Return ChatML, written differently than in the template."""
    start = "" if tools is None else f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"
    calls = [json.dumps(message["tool_calls"]) if message.get("tool_calls") else "" for message in messages]
    parts = zip(messages, calls, strict=True)
    return start + "".join(f"<|im_start|>{m['role']}\n{m['content'] or ''}{call}<|im_end|>\n" for m, call in parts)


def answers(messages: list[dict[str, Any]], end: str) -> str:
    called = (message for message in messages if message["role"] == "assistant")
    return "".join(
        f"{m['content'] or ''}{json.dumps(m['tool_calls']) if m.get('tool_calls') else ''}{end}" for m in called
    )


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_tokens_alone_are_counted_where_asked(tmp_path: Path, template: str) -> None:
    rows: list[Any] = [
        *CHATS,
        {"messages": WITH_TOOLS, "tools": [TOOL]},
        {"messages": WITH_TOOLS, "tools": json.dumps([TOOL])},
    ]
    rows.append({"messages": [*turns(2), say("user", "and now?"), say("assistant", "")]})
    # by the prefix rule a message ends with what the template writes after it
    end = "<|im_end|>" if template == MARKED else "<|im_end|>\n"
    expected = {rendered(row["messages"], [TOOL] if "tools" in row else None): answers(row["messages"], end)
                for row in rows}  # fmt: skip
    found = documents(built(tmp_path, rows, template, assistant_only_loss=True))
    assert found == expected
    whole = documents(built(tmp_path, rows, template))
    assert whole == {text: text for text in expected}


def test_the_completion_alone_is_counted_unless_all_is_asked_for(tmp_path: Path) -> None:
    messages = [row["messages"] for row in CHATS]
    found = documents(built(tmp_path, PAIRS))
    assert found == {rendered(m): f"{m[-1]['content']}<|im_end|>\n" for m in messages}
    assert documents(built(tmp_path, PAIRS, completion_only_loss=True)) == found
    whole = documents(built(tmp_path, PAIRS, completion_only_loss=False))
    assert whole == {text: text for text in found}
    assistants = documents(built(tmp_path, PAIRS, completion_only_loss=False, assistant_only_loss=True))
    assert assistants == {rendered(m): answers(m, "<|im_end|>\n") for m in messages}
    both = documents(built(tmp_path, PAIRS, assistant_only_loss=True))
    assert both == found
    text = documents(built(tmp_path, TEXTS, template=None))
    end = "<|endoftext|>"
    assert text == {row["prompt"] + row["completion"] + end: row["completion"] + end for row in TEXTS}


@pytest.mark.parametrize("packing", ["none", "documents", "random-positions", "concatenated"])
def test_labels_are_the_counted_tokens_and_nothing_else(tmp_path: Path, packing: Any) -> None:
    length = 64 if packing == "random-positions" else 160
    data = built(tmp_path, CHATS, length=length, packing=packing, assistant_only_loss=True)
    tokenizer = tokenizer_with(None)
    text = "".join(documents(data).values())
    for number in range(len(data.train)):
        item = data.train[number]
        counted = item["labels"] != IGNORED
        assert counted[1:].any()
        assert torch.equal(item["labels"][counted], item["input_ids"][counted])
        spans = str(tokenizer.decode(item["labels"][counted])).split("<|im_end|>\n")
        assert all(span in text for span in spans)
        if packing == "documents":
            expected = sum(_counted_in(data, item["input_ids"], start) for start in _starts(item))
            assert int(counted.sum()) == expected
    if packing == "documents":
        prove_packing(tiny("llama", max_position_embeddings=256), data)


def _starts(item: dict[str, torch.Tensor]) -> list[int]:
    return [k for k in range(len(item["input_ids"])) if item["position_ids"][k] == 0]


def _counted_in(data: TokenData, ids: torch.Tensor, start: int) -> int:
    store = data.train.stores[0]
    for number in range(len(store)):
        piece = store[number][: len(ids) - start]
        if len(piece) > 1 and np.array_equal(ids[start : start + len(piece)].numpy(), piece):
            return int(store.counted_of(number)[: len(piece)].sum())
    return 0


def test_rows_and_windows_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    silent = [{"messages": [say("user", f"nobody answers {number}")]} for number in range(3)]
    late = {"messages": [say("user", "long " * 60), say("assistant", "late")]}
    long = {"messages": [say("user", "short"), say("assistant", "at last " * 60)]}
    rows = [*CHATS, *silent, *[late | {"messages": [say("system", str(k)), *late["messages"]]} for k in range(8)], long]
    data = built(tmp_path, rows, length=200, assistant_only_loss=True)
    (summary,) = data.summary["sources"]
    assert summary["without_loss"] == 3
    assert summary["documents"] + summary["held_out_documents"] == len(rows) - 3
    store = data.train.stores[0]
    unanswered = [k for k in range(len(store)) if not store.counted_of(k)[:200].any()]
    beyond = sum(max(0, len(store[k]) - 200) for k in range(len(store)))
    assert summary["windows_without_loss"] == len(unanswered) > 0
    assert summary["tokens_truncated"] == beyond > 0
    assert summary["windows"] == len(store) - len(unanswered)
    padding, note = data_notes(data.summary)
    assert re.search(
        r"warning: .*rows.jsonl: \d\d% of the windows are padding, which counts as trained tokens", padding
    )
    left_out = "rows.jsonl: left out: rows without a token that the loss counts (3), windows without a"
    assert left_out in note
    assert f"that the loss counts ({len(unanswered)}), tokens of chats beyond a window ({beyond:,})" in note
    assert summary["tokens_counted"] == int(store.counted.sum())  # type: ignore[union-attr]
    with pytest.raises(
        DataError, match=r"no window of 32 tokens has a token that the loss counts, .* larger data\.len"
    ):
        built(tmp_path, [{"messages": [say("system", str(k)), *late["messages"]]} for k in range(9)], length=32,
              assistant_only_loss=True)  # fmt: skip
    with pytest.raises(DataError, match=r"has 3 rows, and none has a token that the loss counts: give messages of the"):
        built(tmp_path, silent, assistant_only_loss=True)


def test_every_kind_of_source_gives_the_same_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*CHATS, {"messages": WITH_TOOLS}]
    expected = documents(built(tmp_path, rows, MARKED, assistant_only_loss=True))
    Dataset.from_list(rows[:-1]).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "org" / "chats").mkdir(parents=True)
    Dataset.from_list(rows[:-1]).to_parquet(tmp_path / "org" / "chats" / "train.parquet")
    monkeypatch.chdir(tmp_path)
    # a folder of that name, where datasets finds it offline
    monkeypatch.setattr(reading, "hub_text", lambda path: HubText(path) if path == "org/chats" else None)
    for path, count in (("rows.parquet", len(CHATS)), ("saved", len(rows)), ("org/chats", len(CHATS))):
        settings = DataSettings((Source(path),), length=512, cache=tmp_path / "cache", held_out=0.3,
                                assistant_only_loss=True)  # fmt: skip
        found = documents(build_data(settings, tokenizer_with(MARKED), causal=True, scheme_length=1024))
        assert len(found) == count
        assert found.items() <= expected.items()


def test_text_and_chats_are_told_apart(tmp_path: Path) -> None:
    texts = [{"text": f"a plain text of number {number}"} for number in range(9)]
    mixed = [*texts, *CHATS, *TEXTS]
    data = built(tmp_path, mixed)
    assert data.summary["sources"][0]["chats"] == len(CHATS) + len(TEXTS)
    found = documents(data)
    assert sum(text == counted for text, counted in found.items()) == len(texts) + len(CHATS)
    with pytest.raises(DataError, match=r"rows\.jsonl 0 is text, other rows .* chats, and data\.assistant_only_loss=t"):
        built(tmp_path, [*texts, *CHATS], assistant_only_loss=True)
    both = [{"text": "the text", **row} for row in CHATS[:6]] + [{"text": "another", **row} for row in CHATS[6:]]
    assert built(tmp_path, both).summary["sources"][0].get("chats") is None
    with pytest.raises(DataError, match=r"no source has a row with messages.*data\.sources\.0\.column=messages if"):
        built(tmp_path, both, assistant_only_loss=True)
    path = write(tmp_path / "both.jsonl", both)
    settings = DataSettings((Source(path, column="messages"), Source(write(tmp_path / "texts.jsonl", texts))),
                            length=256, cache=tmp_path / "cache", held_out=0.3, assistant_only_loss=True)  # fmt: skip
    of_two = build_data(settings, tokenizer_with(PLAIN), causal=True, scheme_length=1024)
    assert [row.get("chats") for row in of_two.summary["sources"]] == [12, None]
    assert of_two.train.stores[1].counted is None
    assert of_two.held_out_counted is not None
    text_flags = of_two.held_out_counted[-1]
    assert text_flags.all()
    assert len(text_flags) == len(of_two.held_out[-1])


@pytest.mark.parametrize(
    ("rows", "template", "settings", "message"),
    [
        (CHATS, None, {}, r"rows.jsonl 0 is a chat, and \w+ has no chat template: put chat_template\.jinja next"),
        (CHATS, FORGETFUL, {"assistant_only_loss": True},
         r"rows.jsonl 1: .* cannot tell the tokens of message 2: the chat template has no \{% generation %\} block, "
         r"and its tokens change with the messages after it\. Mark the assistant's text .*, or give a row per answer"),
        ([{"messages": [say("assistant", "hello")]}] * 3, PLAIN, {"assistant_only_loss": True},
         r"cannot tell the tokens of message 0: .* no message comes before it"),
        (CHATS, PLAIN.replace("assistant\n{% endif %}", "Assistant\n{% endif %}"), {"assistant_only_loss": True},
         r"the tokens of the messages before it, with the generation prompt, do not begin its own"),
        (CHATS, MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}")
         .replace("<|im_end|>{% endgeneration %}", "<|im_end|>"), {"assistant_only_loss": True},
         r"rows.jsonl 0: the chat template marks no token of the assistant's messages"),
        (CHATS, "{{ raise_exception('roles must alternate') }}", {},
         r"rows.jsonl 0 cannot be rendered by the chat template \(roles must alternate\)"),
        (CHATS, PLAIN, {"completion_only_loss": True},
         r"rows.jsonl 0 has messages, and data.completion_only_loss=true needs prompt and completion: leave it out"),
        (TEXTS, PLAIN, {"assistant_only_loss": True},
         r"rows.jsonl 0 has prompt and completion as text, and data.assistant_only_loss=true needs messages"),
        (CHATS, PLAIN, {"assistant_only_loss": True, "packing": "pose"},
         r"packing 'pose' reads two regions of a text and would separate questions from answers"),
        ([{"messages": "hello"}], PLAIN, {}, r"rows.jsonl 0: messages is a list of messages, .* got 'hello'"),
        ([{"messages": []}], PLAIN, {}, r"messages is a list of messages, each with a role and content, got \[\]"),
        ([{"messages": [{"role": "user"}]}], PLAIN, {}, r"messages\[0\] is \{'role': 'user'\}"),
        ([{"prompt": "a", "completion": [say("assistant", "b")]}], PLAIN, {}, "both text or both lists of messages"),
        ([{"conversations": []}], PLAIN, {}, r"rename conversations, from and value to messages, role and content"),
        ([{"messages": turns(1), "tools": "no json"}], PLAIN, {}, r"rows.jsonl 0: tools is not valid JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_counted_is_refused(
    tmp_path: Path, rows: list[Any], template: str | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        built(tmp_path, rows, template, length=32, **settings)


def test_texts_end_with_the_token_that_is_asked_for(tmp_path: Path) -> None:
    """Against the ids by hand; without the key nothing changes, and the tokenizer that is given never does."""
    rows = [{"text": f"text {n}" + "<|endoftext|>" * (n % 2)} for n in range(12)]
    tokenizer, end = tokenizer_with(None), 256

    def ids(place: str, **settings: Any) -> set[tuple[int, ...]]:
        data = built(tmp_path / place, rows, None, **settings)
        store = data.train.stores[0]
        return {tuple(store[k].tolist()) for k in range(len(store))} | {tuple(one.tolist()) for one in data.held_out}

    texts = [tuple(f"text {n}".encode()) for n in range(12)]
    assert ids("same") == {(end, *text, *[end] * (n % 2)) for n, text in enumerate(texts)}
    assert ids("same", eos_token="<|endoftext|>") == {(*text, end) for text in texts}
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids("same", eos_token="<|im_end|>") == {(*text, *[end] * (n % 2), stop) for n, text in enumerate(texts)}
    source = Source(write(tmp_path / "rows.jsonl", rows))
    settings = DataSettings((source,), length=32, cache=tmp_path / "cache", held_out=0.3, eos_token="<|im_end|>")
    build_data(settings, tokenizer, causal=True, scheme_length=64)
    assert tokenizer.eos_token_id == end
    with pytest.raises(
        DataError, match=r"data\.eos_token is a token of .* has no '</s>' \(its special tokens: '<\|end"
    ):
        built(tmp_path / "other", rows, None, eos_token="</s>")
    with pytest.raises(ConfigError, match="eos_token is a token of the vocabulary, got ''"):
        DataSettings((source,), eos_token="")
    with pytest.raises(DataError, match=r"data\.eos_token='\[SEP\]' ends texts for a model that predicts the next"):
        build_data(dataclasses.replace(settings, eos_token="[SEP]"), masked_tokenizer(), causal=False, scheme_length=64)
    with pytest.raises(ConfigError, match=r"data\.eos_token: objective\.kind masked does not predict the next token"):
        make_recipe({"model": {"name": "x"}, "objective": {"kind": "masked"}, "data": {"eos_token": "[SEP]"}})


def test_the_saved_model_stops_at_the_token_that_ends_its_texts(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(PLAIN)
    hf_posswap.save(tiny("llama", eos_token_id=256), tmp_path / "llama", tokenizer=tokenizer)
    path = write(tmp_path / "rows.jsonl", [{"text": f"a text of number {n}, " * 20} for n in range(12)])
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for token, expected in (("<|im_end|>", [stop, 256]), ("<|endoftext|>", 256)):
        done = trained(tmp_path, f"data.eos_token={token}", "training.max_steps=2", f"out={tmp_path / token[2:-2]}",
                       kind="llama", data={"sources": [{"path": path}]})  # fmt: skip
        model, saved = hf_posswap.load(done.model), AutoTokenizer.from_pretrained(done.model)
        assert saved.eos_token == token
        assert model.config.eos_token_id == saved.eos_token_id
        assert model.generation_config.eos_token_id == expected
        assert json.loads((done.folder / "recipe.json").read_text())["data"]["eos_token"] == token


def test_an_encoder_counts_no_answers(tmp_path: Path) -> None:
    letters = [{"prompt": "abc" * 9 + "def"[k % 3], "completion": "xyz" * k} for k in range(1, 9)]
    settings = DataSettings((Source(write(tmp_path / "a.jsonl", letters)),), length=32, cache=tmp_path, held_out=0.3)
    with pytest.raises(DataError, match=r"this model is an encoder, .* set data\.completion_only_loss=false"):
        build_data(settings, masked_tokenizer(), causal=False, scheme_length=64)


def test_diverging_prompts_and_uncounted_ends_of_turns_are_reported(tmp_path: Path) -> None:
    unstopped = built(tmp_path / "unstopped", CHATS, UNSTOPPED, assistant_only_loss=True)
    template = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    diverging = built(tmp_path / "diverging", PAIRS, template)
    (_, of_ends), (_, of_prompts) = data_notes(unstopped.summary), data_notes(diverging.summary)
    assert "{% generation %} block of the chat template" in of_ends
    assert "in 12 of its chats, the token after the assistant's text is not counted, so that the model may" in of_ends
    assert "for 12 of its prompts, the prompt's tokens are not the first ones of prompt and completion" in of_prompts
    (padding,) = data_notes(built(tmp_path, CHATS, MARKED, assistant_only_loss=True).summary)
    assert "are padding" in padding


def test_flags_are_cached_and_made_anew_when_template_or_loss_change(tmp_path: Path) -> None:
    first = built(tmp_path, CHATS, PLAIN, assistant_only_loss=True)
    again = built(tmp_path, CHATS, PLAIN, assistant_only_loss=True)
    others = [built(tmp_path, CHATS, MARKED, assistant_only_loss=True), built(tmp_path, CHATS, PLAIN)]
    assert first.identity == again.identity
    assert len({str(data.identity) for data in (first, *others)}) == 3
    assert documents(first) == documents(again)
    for file in (tmp_path / "cache").rglob("*.counted"):
        file.write_bytes(b"\1")
    with pytest.raises(DataError, match=r"counted holds 1 flags for \d+ tokens: delete"):
        built(tmp_path, CHATS, PLAIN, assistant_only_loss=True)


def test_a_training_and_its_held_out_loss_count_the_answers_alone(tmp_path: Path) -> None:
    """Against the loss of the finished model on each answer, cut out by its text, with stock transformers."""
    tokenizer = tokenizer_with(PLAIN)
    hf_posswap.save(tiny("llama"), tmp_path / "llama", tokenizer=tokenizer)
    rows = [{"messages": turns(3 * number)} for number in range(12)]
    path = write(tmp_path / "rows.jsonl", rows)
    settings = ("data.assistant_only_loss=true", "data.packing=documents", "data.length=128", "data.held_out=0.4")
    services = Services(evaluate=nll_at_lengths)
    done = trained(tmp_path, *settings, "training.eval_strategy=steps", "training.eval_steps=3", kind="llama",
                   data={"sources": [{"path": path}]}, services=services)  # fmt: skip
    model, losses = hf_posswap.load(done.model).eval(), []
    chats = [row["messages"] for row in rows]
    data_of_run = build_data(recipe(tmp_path, *settings, kind="llama", data={"sources": [{"path": path}]}).data,
                             tokenizer, causal=True, scheme_length=256)  # fmt: skip
    held_out = {tokenizer.decode(ids) for ids in data_of_run.held_out}
    for messages in (messages for messages in chats if rendered(messages) in held_out):
        prompt = len(tokenizer(rendered(messages[:-1]) + "<|im_start|>assistant\n")["input_ids"])
        ids = torch.tensor([tokenizer(rendered(messages))["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, prompt - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="none").tolist()
    assert len(held_out) > 1
    (found,) = done.report["nll"].values()
    assert found == pytest.approx(np.mean(losses), rel=1e-4)
    assert done.report["phases"][0]["last_loss"] < done.report["phases"][0]["first_loss"]
    saved = AutoTokenizer.from_pretrained(done.model)
    assert saved.chat_template == PLAIN


def test_what_is_counted_belongs_to_a_training_and_older_ones_resume(tmp_path: Path) -> None:
    """New keys at their defaults change no identity: `differences` reads a missing key as None, except in lists."""
    asked = {"data.assistant_only_loss": True, "data.completion_only_loss": False, "data.eos_token": "A",
             "data.sources.0.min_tokens": 5, "data.sources.0.upsample": "{50: 2}"}  # fmt: skip
    plain = recipe(tmp_path, kind="llama")
    identity = identity_of(plain, Launch())["data"]
    new = ("separator", "assistant_only_loss", "completion_only_loss", "eos_token")
    assert [identity.get(name) for name in new] == [None] * 4
    assert not {"min_tokens", "upsample"} & identity["sources"][0].keys()
    other = recipe(tmp_path, *(f"{key}={value}" for key, value in asked.items()), kind="llama")
    changed = differences(identity_of(plain, Launch()), json.loads(json.dumps(identity_of(other, Launch()))))
    assert {key for key, _, _ in changed} == {"data.sources", *(f"data.{name}" for name in new[1:])}
    assert make_recipe(to_dict(other)) == other


def test_the_start_is_checked_where_the_loss_counts(tmp_path: Path) -> None:
    """Questions fill the beginning of the first windows, or of all of them."""
    hf_posswap.save(tiny("llama"), tmp_path / "llama", tokenizer=tokenizer_with(PLAIN))
    question = {"messages": [say("user", "long " * 20), say("assistant", "late")]}
    late = [{"messages": [say("system", str(number)), *question["messages"]]} for number in range(12)]
    settings = ("data.assistant_only_loss=true", "data.length=256", "training.max_steps=2", "data.held_out=0.4")
    for name, rows in (("some", [*late, *CHATS]), ("none", late)):
        path = write(tmp_path / f"{name}.jsonl", rows)
        done = trained(tmp_path, *settings, f"out={tmp_path / name}", kind="llama",
                       data={"sources": [{"path": path}]})  # fmt: skip
        gates = " ".join(done.report["phases"][0]["gates"])
        noted = "the loss counts none of the first 64 tokens of the first windows: the start is checked on all" in gates
        assert noted == (name == "none")


TRAINING_TEMPLATES = ["cohere", "gemma3", "lfm2", "llama3", "qwen3_vl", "smolvlm"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING_TEMPLATES)
def test_the_prefix_rule_counts_what_the_training_templates_of_trl_mark(name: str) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: the prefix rule is not compared with its templates")
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer = tokenizer_with((folder / f"{name}.jinja").read_text())
    marked = tokenizer_with((folder / f"{name}_training.jinja").read_text())
    for number in (0, 2, 4, 8):
        chat = row_document({"messages": turns(number)}, "row", "text", chats=True)
        assert isinstance(chat, Chat)
        found = [ChatEncoder(one, assistant_only=True).encode(chat) for one in (tokenizer, marked)]
        assert np.array_equal(found[0][0], found[1][0])
        assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL 1.16 sets what transformers 5.24 deprecates
@pytest.mark.parametrize(
    ("rows", "template", "settings"),
    [
        ([*CHATS, {"messages": WITH_TOOLS}], MARKED, {"assistant_only_loss": True}),
        ([{**row, "tools": [TOOL]} for row in CHATS], MARKED, {"assistant_only_loss": True}),
        (CHATS, PLAIN, {}),
        (PAIRS, PLAIN, {}),
        (PAIRS, PLAIN, {"completion_only_loss": False}),
        (PAIRS, MARKED, {"assistant_only_loss": True, "completion_only_loss": False}),
        (PAIRS, MARKED, {"assistant_only_loss": True}),
        (TEXTS, PLAIN, {}),
        (PAIRS, PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"), {}),
        (PLAIN_TEXTS, PLAIN, {"eos_token": "<|endoftext|>"}),
        (PLAIN_TEXTS, BEGINNING, {"eos_token": "<|im_end|>"}),
        (TEXTS, BEGINNING, {"eos_token": "<|im_end|>"}),
        (CHATS, f"{PLAIN}{{{{ eos_token }}}}", {"eos_token": "<|im_end|>"}),
    ],
)
def test_tokens_and_labels_are_those_of_trl(
    tmp_path: Path, rows: list[Any], template: str, settings: dict[str, Any]
) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: chats are not compared with its SFTTrainer")
    tokenizer = tokenizer_with(template)
    arguments = trl.SFTConfig(
        str(tmp_path / "trl"), max_length=None, bf16=False, use_cpu=True, report_to="none", **settings
    )
    trainer = trl.SFTTrainer(
        tiny("llama", vocab_size=400), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    expected = {tuple(row["input_ids"]): list(row["labels"]) for row in trainer.train_dataset}
    data = built(tmp_path, rows, template, **settings)
    store = data.train.stores[0]
    flags = data.held_out_counted or [np.ones(len(ids), dtype=bool) for ids in data.held_out]
    found = [(store[k], store.counted_of(k)) for k in range(len(store))] + list(zip(data.held_out, flags, strict=True))
    assert {tuple(ids.tolist()): np.where(kept, ids, IGNORED).tolist() for ids, kept in found} == expected
    for number in range(len(data.train)):
        item = data.train[number]
        length = int(item["attention_mask"].sum())
        labels = expected[tuple(item["input_ids"][:length].tolist())]
        assert item["labels"][1:length].tolist() == labels[1:]
        assert (item["labels"][length:] == IGNORED).all()
