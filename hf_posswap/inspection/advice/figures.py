"""The figures behind the advice: those measured here, each with its study, and those of papers, each with its source.

`python -m recipes.studies.figures` writes the measured ones from the results of the studies, and a test checks that
they agree. Each row of the literature states what its source states of sizes that were not measured here, no more;
whether it holds for another model, text or budget is open.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from hf_posswap.utils.result_views import ResultView

FILE = "figures.json"
Against = Literal["sliding window", "control in the window", "base in the window", "same tokens alone"]
_COMPARISONS: dict[str, str] = {
    "sliding window": "read at once, minus the {who} sliding window over the same tokens",
    "control in the window": "in the window, minus a control that read as many tokens",
    "base in the window": "in the window, minus the untouched base",
    "same tokens alone": "the last of {windows} windows after those before it, minus the same tokens alone",
}
MOST_TIMES = 10.0
"""A result applies to models of up to this many times the measured size; beyond it is an extrapolation."""


@dataclass(frozen=True)
class Base:
    """The base model of a measurement.

    Attributes:
        name: the model's name.
        kind: "learned", "rope" or "encoder".
        parameters: number of parameters.
        window: original length in tokens.
    """

    name: str
    kind: str
    parameters: int
    window: int

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.parameters / 1e6:.1f} M parameters, window {self.window})"


@dataclass(frozen=True, repr=False)
class Figure(ResultView):
    """One measured difference of losses, in nats per token; negative if the subject is better.

    Attributes:
        source: file of the results, relative to the repository.
        subject: a recipe, or a scheme without training, as named in the study.
        against: the baseline.
        base: the measured model.
        windows: number of the base's windows read at once.
        difference: loss of the subject minus that of the baseline.
        low: lower end of the 95 % interval over documents, or None.
        high: upper end of the interval, or None.
        tokens: number of training tokens; 0: no training.
        documents: number of documents.
        whose: owner of the sliding window, "base's" or "control's"; "" otherwise.
        remark: a known limitation, or "".
    """

    source: str
    subject: str
    against: Against
    base: Base
    windows: int
    difference: float
    low: float | None
    high: float | None
    tokens: int
    documents: int
    whose: str = ""
    remark: str = ""

    def _repr_facts(self) -> dict[str, object]:
        names = ("subject", "against", "difference", "low", "high", "windows", "tokens", "documents")
        return {name: getattr(self, name) for name in names} | {"base": self.base.name}

    @property
    def bound(self) -> float:
        """The upper end of the interval, or the difference itself without an interval."""
        return self.difference if self.high is None else self.high

    @property
    def rate(self) -> float:
        """Training tokens per parameter of the base."""
        return self.tokens / self.base.parameters

    @property
    def finding(self) -> str:
        """The result as text."""
        interval = "no interval" if self.low is None else f"{self.low:+.3f} to {self.high:+.3f}"
        windows_text = f"{self.windows} windows " if self.against == "sliding window" else ""
        comparison = _COMPARISONS[self.against].format(windows=self.windows, who=self.whose)
        return f"{self.difference:+.3f} nats a token ({interval}), {windows_text}{comparison}"

    @property
    def trained(self) -> str:
        """The subject and its number of training tokens as text."""
        return f"{self.subject}, after {self.tokens:,} tokens" if self.tokens else f"{self.subject}, untrained"

    @property
    def where(self) -> str:
        """The base, the documents and the limitation as text."""
        remark = f"; {self.remark}" if self.remark else ""
        return f"on {self.base}, {self.documents} documents{remark}"

    def __str__(self) -> str:
        return f"{self.trained}: {self.finding}, {self.where}"

    def to_dict(self) -> dict[str, object]:
        """Return the figure as JSON data."""
        return {**self.__dict__, "base": dict(self.base.__dict__)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Figure:
        """Restore a figure from `to_dict`."""
        return cls(**{**values, "base": Base(**values["base"])})


@cache
def load_figures() -> tuple[Figure, ...]:
    """Return all figures in the package.

    Example:
        >>> any(figure.subject == "learned-to-rope" for figure in load_figures())
        True
    """
    text = files("hf_posswap.inspection.advice").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(Figure.from_dict(values) for values in json.loads(text)["figures"])


def figures_of(
    subject: str, against: Against | None = None, *, kind: str | None = None, trained: bool | None = None
) -> list[Figure]:
    """Return the figures of a recipe or scheme, sorted by decreasing number of windows.

    Args:
        subject: the subject as named in the study.
        against: only figures with this baseline.
        kind: only figures on bases of this kind.
        trained: only figures with training, or without; None: both.

    Example:
        >>> [figure.windows for figure in figures_of("learned-to-rope", "sliding window", trained=True)][0]
        8
    """
    figures = [figure for figure in load_figures() if figure.subject == subject and against in (None, figure.against)]
    figures = [
        figure for figure in figures if kind in (None, figure.base.kind) and trained in (None, figure.tokens > 0)
    ]
    return sorted(figures, key=lambda figure: -figure.windows)


@dataclass(frozen=True)
class Literature:
    """One published result.

    Attributes:
        subjects: the schemes without training, or the recipes, that the result is about, as in `candidates`; () if no
            option of `advise` is that method.
        is_trained: whether the weights were trained with the new positions.
        method: name of the method.
        models: the models as text.
        smallest: parameters of the smallest model.
        largest: parameters of the largest model.
        window: tokens before the extension.
        length: tokens after it; None: not stated here.
        finding: the result.
        source: the citation: arXiv id and section, or an address.
        tokens: training tokens; 0 without training; None: not stated here.
    """

    subjects: tuple[str, ...]
    is_trained: bool
    method: str
    models: str
    smallest: float
    largest: float
    window: int
    length: int | None
    finding: str
    source: str
    tokens: int | None = None

    @property
    def windows(self) -> float:
        """Length after the extension over the window before it; 1 if the length is not stated."""
        return (self.length or self.window) / self.window

    def is_near(self, parameters: int) -> bool:
        """Return whether a model with that many parameters is within 10 times the size of the published ones."""
        return self.smallest / MOST_TIMES <= parameters <= self.largest * MOST_TIMES

    def __str__(self) -> str:
        lengths = f"{self.window:,} tokens" if self.length is None else f"{self.window:,} to {self.length:,} tokens"
        return f"literature: {self.method}, on {self.models}, {lengths}: {self.finding}"

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON data."""
        return {**self.__dict__, "subjects": list(self.subjects)}


LITERATURE = (
    Literature(
        ("yarn",), True, "YaRN", "Llama 2 7B and 13B", 7e9, 13e9, 4096, 131_072,
        "fine-tuned for 400 steps of 64 windows of 65,536 tokens at factor 16, then 200 more at factor 32; it reads "
        "128k and needs 10 times fewer tokens and 2.5 times fewer steps than earlier methods",
        "arXiv:2309.00071, abstract and section 4.1", 400 * 64 * 65_536,
    ),
    Literature(
        ("yarn",), True, "YaRN", "Llama-3.1-8B-Instruct", 8e9, 8e9, 131_072, 4_194_304,
        "continued pretraining on 1 B tokens, in one step to 1M, 2M or 4M, then instruction tuning on short texts",
        "arXiv:2504.06214", 1_000_000_000,
    ),
    Literature(
        ("abf",), True, "a larger base (500,000)", "Llama 2 7B to 70B", 7e9, 70e9, 4096, 32_768,
        "continued pretraining on 400 B tokens; effective contexts of up to 32,768 tokens, better on most short tasks",
        "arXiv:2309.16039, abstract and section 2", 400_000_000_000,
    ),
    Literature(
        ("abf",), True, "a larger base (10,000 to 1,000,000)", "Code Llama 7B to 34B", 7e9, 34e9, 4096,
        16_384, "trained on sequences of 16k tokens; improvements on inputs of up to 100k",
        "arXiv:2308.12950, abstract and section 2.4",
    ),
    Literature(
        ("abf",), True, "a larger base", "Llama-3-8B", 8e9, 8e9, 8192, 524_288,
        "ProLong: 40 B tokens; better than Llama-3.1-8B-Instruct on most long-context tasks at 128k, with 5 % of its "
        "long-context tokens",
        "arXiv:2410.02660, abstract; the base: train_64K.sh of princeton-nlp/ProLong", 40_000_000_000,
    ),
    Literature(
        ("abf",), True, "a base of 500,000", "Llama 3 405B", 405e9, 405e9, 8192, 131_072,
        "six stages of increasing length on about 800 B tokens", "arXiv:2407.21783, section 3.4.2", 800_000_000_000,
    ),
    Literature(
        ("abf",), True, "a larger base", "Llama 2 7B and 13B", 7e9, 13e9, 4096, 131_072,
        "0.5 to 5 B tokens of continued pretraining are enough to retrieve information anywhere within 128k",
        "arXiv:2402.10171, abstract", 500_000_000,
    ),
    Literature(
        ("abf",), True, "a larger base in each of four stages", "Llama-3-8B-Instruct", 8e9, 8e9, 8192,
        1_048_576, "1.4 B tokens in all, of which 63 M at 65,536 tokens with a base of 15.3 M",
        "model card of gradientai/Llama-3-8B-Instruct-Gradient-1048k", 1_400_000_000,
    ),
    Literature(
        ("linear",), True, "position interpolation", "LLaMA 7B to 65B", 7e9, 65e9, 2048, 32_768,
        "fine-tuned for at most 1,000 steps; the quality within the original window is preserved relatively well",
        "arXiv:2306.15595, abstract",
    ),
    Literature(
        ("pose",), True, "PoSE with interpolation", "LLaMA 7B", 7e9, 7e9, 2048, 131_072,
        "trained on windows of 2,048 tokens only", "arXiv:2309.10400, abstract",
    ),
    Literature(
        ("yarn", "dual_chunk"), False, "YaRN and dual chunk attention at inference", "Qwen2.5 7B to 72B", 7e9, 72e9,
        32_768, 131_072, "four times the trained length without training at it; these models were trained with a base "
        "of 1,000,000",
        "arXiv:2412.15115, section 3.3", 0,
    ),
    Literature(
        ("dual_chunk",), False, "dual chunk attention", "Llama 2 70B", 70e9, 70e9, 4096, 100_000,
        "more than 100k tokens without training; comparable to or better than fine-tuned models on practical tasks",
        "arXiv:2402.17463, abstract", 0,
    ),
    Literature(
        ("dual_chunk",), False, "dual chunk attention", "Qwen2.5-1M 7B and 14B", 7e9, 14e9, 262_144, 1_048_576,
        "at least four times the trained length without further training", "arXiv:2501.15383, abstract", 0,
    ),
    Literature(
        ("self_extend",), False, "Self-Extend", "Llama 2 7B, Mistral 7B, SOLAR 10.7B and Phi-2", 2.7e9,
        10.7e9, 4096, 16_384, "extends the window without fine-tuning", "arXiv:2401.01325", 0,
    ),
    Literature(
        (), True, "LongRoPE2: searched divisors, mixed windows", "Llama-3-8B", 8e9, 8e9, 8192, 131_072,
        "an effective length of 128k with over 98.5 % of the short-context performance, on 10 B tokens",
        "arXiv:2502.20082, abstract", 10_000_000_000,
    ),
    Literature(
        (), True, "LongRoPE: searched divisors", "LLaMA 2 7B and Mistral 7B", 7e9, 7e9, 4096, 2_097_152,
        "up to 1,000 fine-tuning steps at lengths within 256k; the performance at the original window is maintained",
        "arXiv:2402.13753, abstract",
    ),
    Literature(
        (), True, "LinearARD: interpolation, restored by distilling attention relations", "Llama 2 7B", 7e9, 7e9, 4096,
        32_768, "98.3 % of the short-text performance recovered with 4.25 M tokens",
        "arXiv:2604.00004, abstract", 4_250_000,
    ),
    Literature(
        (), True, "DroPE: positions dropped, then recalibrated at the original length", "Llama 2 7B and SmolLM2 1.7B",
        1.7e9, 7e9, 4096, None, "better than YaRN and NTK-aware scaling without training, on RULER and LongBench",
        "arXiv:2512.12167",
    ),
)  # fmt: skip
"""Published results; those of models within ten times the size come before the extrapolation of small measurements."""


def literature_of(subject: str, parameters: int, *, is_trained: bool) -> tuple[Literature, ...]:
    """Return the published results about one scheme or recipe on models near a size.

    Example:
        >>> [row.source for row in literature_of("pose", 8_000_000_000, is_trained=True)]
        ['arXiv:2309.10400, abstract']
        >>> literature_of("pose", 1_000_000, is_trained=True)
        ()
    """
    return tuple(
        row
        for row in LITERATURE
        if subject in row.subjects and row.is_trained == is_trained and row.is_near(parameters)
    )


def further_literature(parameters: int) -> tuple[Literature, ...]:
    """Return the published results near a size about methods that are not options of `advise`."""
    return tuple(row for row in LITERATURE if not row.subjects and row.is_near(parameters))
