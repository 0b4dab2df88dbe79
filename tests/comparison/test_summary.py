"""The conclusion about each model, whether far context helps it, and needles only where they say something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap.comparison import Candidate, EvalSettings, compare, measures
from hf_posswap.comparison.report import render_html
from hf_posswap.comparison.report.conclusion import conclude, control_warnings, inside_statement, percent
from hf_posswap.comparison.tables import markdown
from hf_posswap.errors import DataError
from hf_posswap.evaluation import PasskeyTask, context_gain, far_context, passkey_keys
from hf_posswap.training import byte_tokenizer
from tests.comparison.test_names import TEXTS

BEYOND = {"length": 1024, "difference": -0.036, "low": -0.045, "high": -0.028, "p_holm": 0.003}
INSIDE = {"verdict": "not worse", "difference": -0.01, "lower": -0.02, "upper": 0.0, "margin": 0.02, "reason": None}
WORSE = {"verdict": "worse", "difference": 0.05, "lower": 0.04, "upper": 0.06}
OPEN = {"verdict": "undecided", "difference": 0.018, "lower": 0.007, "upper": 0.029}


def compared(inside: dict[str, Any] | None = None, *, control: str = "control", **row: Any) -> dict[str, Any]:
    """Return results of an unswapped model and of a trained swap, with one row against the sliding window."""
    short = {"loss": INSIDE | (inside or {}), "length": 128}
    rope = {
        "plan": {"scheme": {"name": "rope"}}, "training": {"recipe": "learned-to-rope", "tokens": 4096},
        "cannot_run": {}, "ppl_prefix": [{"length": 1024}], "short_reg": short, "against_sliding": [BEYOND | row],
    }  # fmt: skip
    unswapped = {"plan": None, "training": None, "cannot_run": {"1024": "ends"}, "ppl_prefix": [{"length": 128}]}
    shared = {"window": 128, "base": control, "comparisons": {}, "sliding": {"of": control}}
    return {"models": {control: unswapped, "rope": rope}, **shared}


@pytest.mark.parametrize(
    ("results", "verdict", "text"),
    [
        (compared(), "worth it", "Worth it: reads 8x the window at 3.5 % lower perplexity than the sliding window of"),
        (
            compared(WORSE),
            "worth it beyond the window",
            "; inside the window 5.1 % higher perplexity than control, more",
        ),
        (compared(OPEN), "worth it beyond the window", "and whether within the allowed +2.0 % is undecided."),
        (compared(difference=0.05, low=0.04, high=0.06), "not yet", "Not yet: reads 8x the window at 5.1 % higher"),
        (compared(p_holm=0.4), "not yet", "Not yet: reads 8x the window without a significant difference from the sl"),
        (compared(p_holm=None, no_verdict="3 documents are too few."), "no verdict", "No verdict: 3 documents are too"),
        (compared(control="base"), "no verdict", "No verdict without a control: reads 8x the window at 3.5 % lower"),
    ],
)
def test_the_verdict_follows_the_differences(results: dict[str, Any], verdict: str, text: str) -> None:
    conclusion = conclude(results, "rope")
    assert conclusion is not None
    assert (conclusion.verdict, text in conclusion.text) == (verdict, True), conclusion.text
    assert bool(control_warnings(results)) == ("base" in results["models"])


def test_difference_and_equivalence_are_one_statement() -> None:
    said = inside_statement(compared(OPEN), "rope")
    assert said == (
        "Inside the window: 1.8 % higher perplexity than control (+0.018 nats per token, 95 % interval +0.007 to "
        "+0.029), significant; within the allowed +2.0 %: undecided."
    )
    assert "not significant; within the allowed +2.0 %: yes." in str(inside_statement(compared(), "rope"))
    assert "significant; within the allowed +2.0 %: no." in str(inside_statement(compared(WORSE), "rope"))


def test_a_control_is_known_by_its_name_or_its_recipe_and_must_read_as_many_tokens() -> None:
    results = compared(control="plain")
    assert "no control was compared" in control_warnings(results)[0]
    results["models"]["plain"]["training"] = {"recipe": "control", "tokens": 4096}
    assert control_warnings(results) == []
    results["models"]["plain"]["training"]["tokens"] = 100
    (said,) = control_warnings(results)
    assert "rope was trained on 4,096 tokens, plain on 100" in said
    results["models"]["rope"]["training"] = None  # a swap without training needs none
    assert control_warnings(results) == []


def test_a_difference_of_any_size_has_a_percentage() -> None:
    assert percent(1e5).startswith("+")
    assert percent(-1e5) == "-100 %"


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
        details = markdown(results).split("Details:")[1]
        line = next(line for line in details.splitlines() if line.startswith(f"- {name}: "))
        assert said in line
        assert f"change the loss by {-found['far_context']['gain']:+.3f} nats per token" in line
        assert said in render_html(results).split(f"</svg>{name}<")[1].split("</article>")[0]


def test_needles_are_dropped_by_one_line_where_the_base_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text * 6 for text in TEXTS]
    asked: list[int] = []
    answer = measures.answer_prompt

    def counted(scorer: Any, ids: list[int], count: int) -> Any:
        asked.append(len(ids))
        return answer(scorer, ids, count)

    monkeypatch.setattr(measures, "answer_prompt", counted)
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
