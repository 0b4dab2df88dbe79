"""In short: whether far context helps or harms each model, the base too; and needles only where they say something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap.comparison import Candidate, EvalSettings, compare, needles
from hf_posswap.comparison.tables import markdown
from hf_posswap.errors import DataError
from hf_posswap.evaluation import PasskeyTask, context_gain, far_context, passkey_keys
from hf_posswap.report import render_html
from hf_posswap.training import byte_tokenizer
from tests.comparison.test_names import TEXTS


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=32, initializer_range=0.4, bos_token_id=256, **shape)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("gains", "documents", "verdict"),
    [
        ([0.5] * 9, 9, "helps"),
        ([-0.5] * 9, 9, "harms"),
        ([-0.5, 0.5] * 5, 10, "undecided"),
        ([-0.5] * 7, 7, "no verdict"),
    ],
)
def test_far_context_is_the_longest_against_a_full_window(gains: list[float], documents: int, verdict: str) -> None:
    tail = 4
    reference = np.full(documents, 8.0)
    losses = np.stack([reference + 1.0, reference, reference - tail * np.array(gains)], axis=1)  # a short context too
    found = far_context(context_gain(losses, [3, 12, 20], tail, reference=12), tail, documents)
    assert found is not None
    assert (found.context, found.further, found.tail) == (20, 8, 4)
    assert found.gain == pytest.approx(np.mean(gains))
    assert found.verdict == verdict
    assert (found.reason is not None) == (verdict == "no verdict")
    assert far_context(context_gain(losses[:, :2], [3, 12], tail, reference=12), tail, documents) is None


def test_scores_without_a_reference_are_refused() -> None:
    scores = context_gain(np.ones((8, 2)), [3, 12], 4, reference=12)
    with pytest.raises(DataError, match=r"none of the contexts \[3\] is the reference"):
        far_context(scores[:1], 4, 8)


def test_the_base_too_is_told_to_gain_or_suffer_from_far_context() -> None:
    """A Llama runs beyond its window: nobody has to swap it to see what that does to it."""
    model = llama()
    settings = EvalSettings(lengths=(32, 128), metrics=("ppl_prefix", "ctx_gain"))
    candidates = [Candidate(model, name="base"), Candidate(model, "alibi", name="alibi")]
    results = compare(candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings).results
    far = results["models"]["base"]["far_context"]
    ids = torch.tensor([[256, *text.encode()][:128] for text in TEXTS])
    losses = []
    for begin in (128 - 32, 0):  # the last 16 tokens, after 16 and after 112
        with torch.no_grad():
            scores = torch.log_softmax(model(ids[:, begin:]).logits[:, -17:-1], -1)
        losses.append(-scores.gather(-1, ids[:, -16:, None]).mean().item())
    assert (far["context"], far["further"], far["tail"]) == (112, 96, 16)
    assert far["gain"] == pytest.approx(losses[0] - losses[1], abs=1e-4)
    wanted = {"helps": "Far context helps: ", "harms": "Far context harms: ", "undecided": "Far context has no"}
    for name, found in results["models"].items():
        said = wanted[found["far_context"]["verdict"]]
        line = next(line for line in markdown(results).splitlines() if line.startswith(f"- {name}: "))
        assert said in line
        assert f"{abs(found['far_context']['gain']):.3f} nats per token" in line
        assert said in render_html(results).split(f"</svg>{name}<")[1].split("</article>")[0]


def test_needles_are_dropped_by_one_line_where_the_base_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text * 6 for text in TEXTS]
    asked: list[int] = []
    answer = needles.answer_prompt

    def counted(scorer: Any, ids: list[int], count: int) -> Any:
        asked.append(len(ids))
        return answer(scorer, ids, count)

    monkeypatch.setattr(needles, "answer_prompt", counted)
    model = llama()
    settings: dict[str, Any] = {"lengths": (160, 320), "trials": 2, "depths": (0.5,)}
    candidates = [Candidate(model, name="base"), Candidate(model, "nope", name="nope", max_length=320)]
    model.config.max_position_embeddings = 160
    arguments: dict[str, Any] = {"documents": texts, "tokenizer": byte_tokenizer()}
    results = compare(candidates, settings=EvalSettings(**settings), **arguments).results
    assert asked == [160, 160]  # the base, in its window, and nothing else
    assert all("passkey" not in found for found in results["models"].values())
    why = "passkey was not measured: base finds none of 2 passkeys within its own 160 tokens"
    assert markdown(results).count(why) == 1
    assert render_html(results).count(why) == 1
    named = EvalSettings(**settings, metrics=("passkey",))  # asked for by its name it is measured all the same
    results = compare(candidates, settings=named, **arguments).results
    assert [len(found["passkey"]["cells"]) for found in results["models"].values()] == [2, 2]


def test_needles_are_measured_where_the_base_finds_one() -> None:
    """A model that has learned one prompt by heart."""
    model, texts = llama().train(), [text * 6 for text in TEXTS]
    model.config.max_position_embeddings = 160
    (key,) = passkey_keys(0, 160, 0.5, 1)
    task = PasskeyTask(byte_tokenizer(), header=PasskeyTask(byte_tokenizer()).shortest <= 160)
    ids, answer = task.prompt(length=160, depth=0.5, key=key)
    prompt = torch.tensor([ids])
    labels = prompt.masked_fill(torch.arange(160) < 160 - answer, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        model(prompt, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    settings = EvalSettings(lengths=(160, 320), trials=1, depths=(0.5,))
    candidates = [Candidate(model, name="base"), Candidate(model, "nope", name="nope", max_length=320)]
    results = compare(candidates, documents=texts, tokenizer=byte_tokenizer(), settings=settings).results
    assert results["models"]["base"]["passkey"]["cells"][0]["share"] == 1.0
    assert [len(found["passkey"]["cells"]) for found in results["models"].values()] == [2, 2]
