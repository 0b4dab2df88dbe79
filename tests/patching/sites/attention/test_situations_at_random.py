"""Texts, pads, ids, pieces and caches drawn at random: each way of attention against the formula over all pairs."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_posswap import set_backend
from hf_posswap.kernels import row_bias
from tests.patching.sites.attention.test_situations import EXACT, MODELS, WAYS, by_formula, counted, swapped
from tests.stock import with_cache

NUMBERS = [pytest.param(range(25), id="short"), pytest.param(range(25, 1500), id="long", marks=pytest.mark.slow)]
"""A number is a situation: the same one each time, and what an error is told by."""
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("rope", {"base": 500.0}),
    ("xpos", {}),
    ("alibi", {}),
    ("t5", {"init_std": 1.0}),
    ("kerple", {}),
    ("fire", {}),
    ("self_extend", {"window": 6, "group": 9}),
    ("rerope", {"window": 6}),
    ("leaky_rerope", {"window": 6}),
    ("dual_chunk", {"chunk": 9, "local": 3}),
    ("string", {"shift": 9, "local": 3, "original_length": 160}),
    ("per_layer", {"layers": {1: "nope"}, "default": "rerope:window=5"}),
    ("per_layer", {"layers": {0: "alibi"}, "default": "dual_chunk:chunk=7,local=2"}),
]
NARROW = {"xpos": 1e-5, "fire": 1e-5}  # which compute in float32
PADS = ("none", "left", "right", "inside")
IDS = ("left out", "counted", "that skip")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let texts of some tokens take several blocks."""
    monkeypatch.setattr(row_bias, "BLOCK", 16)
    monkeypatch.setattr(row_bias, "SMALLEST", 4)


class Situation:
    """A model, a text for it and a way to read it, by a number."""

    def __init__(self, number: int) -> None:
        self.draw = Random(number)
        self.scheme, options = self.draw.choice(SCHEMES)
        self.family = self.draw.choice([*MODELS])
        self.site = {"site": "attention"} if self.scheme == "rope" else {}  # a native swap has no ways to choose from
        self.model = swapped(MODELS[self.family], self.scheme, options | self.site)
        self.way = self.draw.choice(["auto", *(way for name, _, way in WAYS if name == self.scheme)])
        set_backend(self.model, self.way)
        rows, length = self.draw.randint(1, 3), self.draw.randint(2, 64)
        self.words = self.model.config.vocab_size
        self.ids = torch.tensor([[self.draw.randrange(self.words) for _ in range(length)] for _ in range(rows)])
        self.pads, self.positions = self.draw.choice(PADS), self.draw.choice(IDS)
        self.shown = torch.ones_like(self.ids)
        for row in self.shown:
            self._pad(row, length)
        self.at: Tensor | None = None
        if self.positions == "counted":
            self.at = counted(self.shown)
        elif self.positions == "that skip":
            steps = [[self.draw.randint(1, 3) for _ in range(length)] for _ in range(rows)]
            self.at = torch.tensor(steps).cumsum(1) - 1
        # without a mask stock reads ids that skip as documents, and right pads as text
        self.masked = self.pads != "none" or self.at is not None or self.draw.random() < 0.3

    def _pad(self, row: Tensor, length: int) -> None:
        some = self.draw.randint(0, length - 1)
        if self.pads == "left":
            row[:some] = 0
        elif self.pads == "right":
            row[length - some :] = 0
        elif self.pads == "inside":
            row[some : some + self.draw.randint(0, 4)] = 0

    def arguments(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return what the model is given beside the tokens from `start` to `stop`."""
        given = {"attention_mask": self.shown[:, :stop]} if self.masked else {}
        return given if self.at is None else given | {"position_ids": self.at[:, start:stop]}

    def logits(self) -> Tensor:
        """Return logits [B, L, V] of the whole text, without a cache."""
        length = self.ids.shape[1]
        found: Tensor = self.model(self.ids, use_cache=False, **self.arguments(0, length)).logits
        return found

    def only(self, rows: Tensor) -> None:
        """Go on with these of the rows."""
        self.ids, self.shown = self.ids[rows], self.shown[rows]
        self.at = None if self.at is None else self.at[rows]

    def error(self, found: Tensor, expected: Tensor) -> float:
        """Return the largest difference at tokens that are shown, as a share of what is allowed."""
        real = self.shown.bool()
        apart = (found - expected).abs()[real]
        return float(apart.max()) / NARROW.get(self.scheme, EXACT) if len(apart) else 0.0

    def __str__(self) -> str:
        said = f"pads {self.pads}, ids {self.positions}, {'with' if self.masked else 'without'} a mask"
        return f"{self.scheme} in {self.family} by {self.way}, {tuple(self.ids.shape)}, {said}"


def read_in_pieces(of: Situation) -> tuple[Tensor, list[str]]:
    """Return the logits of a text read piece by piece, while its cache is cut, copied and its rows are changed."""
    draw, length = of.draw, of.ids.shape[1]
    grows = draw.random() < 0.6
    cache: Any = (
        DynamicCache(config=of.model.config)
        if grows
        else StaticCache(config=of.model.config, max_cache_len=length + draw.randint(0, 9))
    )
    found, done, said = torch.zeros(len(of.ids), length, of.words, dtype=torch.float64), 0, [type(cache).__name__]
    while done < length:
        stop = min(length, done + draw.choice([1, 1, 1, 2, 3, 7, length // 2 + 1]))
        given = of.arguments(done, stop)
        out = of.model(of.ids[:, done:stop], **with_cache(of.model, cache), use_cache=True, **given)
        found[:, done:stop], done = out.logits, stop
        event = draw.choice(["none", "none", "none", "beams", "copied", "cut", "repeated", "selected"])
        rows = torch.arange(len(of.ids))
        if event == "beams":
            rows = torch.tensor([draw.randrange(len(rows)) for _ in rows])
            cache.reorder_cache(rows)
        elif event == "copied":
            cache = copy.deepcopy(cache)
        elif event == "cut" and grows and of.family != "mistral" and done > 3:  # whose windows cannot be taken back
            cache.crop(-2)
            done -= 2
        elif event == "repeated" and grows and len(rows) < 6:
            rows = rows.repeat_interleave(2)
            cache.batch_repeat_interleave(2)
        elif event == "selected" and grows:
            rows = rows[: draw.randint(1, len(rows))]
            cache.batch_select_indices(rows)
        else:
            event = "none"
        of.only(rows)
        found = found[rows]
        said += [str(stop), event]
    return found, said


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_text_in_pieces_equals_the_whole_by_the_formula(numbers: range) -> None:
    for number in numbers:
        of = Situation(number)
        with torch.no_grad():
            found, said = read_in_pieces(of)
            expected = by_formula(of.model, of.logits)
        assert of.error(found, expected) < 1, f"{number}: {of}, {said}"


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_whole_text_and_its_gradients_equal_the_formula_s(numbers: range) -> None:
    for number in numbers:
        of = Situation(number)
        wanted = torch.randn(*of.ids.shape, of.words, generator=torch.Generator().manual_seed(number))
        wanted *= of.shown[..., None]

        def read(of: Situation = of, wanted: Tensor = wanted) -> tuple[Tensor, dict[str, Tensor]]:
            of.model.zero_grad()
            logits = of.logits()
            (logits * wanted).sum().backward()
            return logits.detach(), {n: p.grad for n, p in of.model.named_parameters() if p.grad is not None}

        found, gradients = read()
        expected, by_hand = by_formula(of.model, read)
        assert of.error(found, expected) < 1, f"{number}: {of}"
        assert gradients.keys() == by_hand.keys()
        for name, gradient in by_hand.items():
            apart = float((gradients[name] - gradient).abs().max()) / max(1.0, float(gradient.abs().max()))
            # FIRE sums its own in float32, of which those of its last bias are all noise: it moves no score
            assert apart < (1e-4 if "posswap" in name else 1e-6), f"{number}: {of}, {name}"
