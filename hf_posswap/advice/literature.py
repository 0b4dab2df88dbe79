"""What published papers report about extending models of the sizes that were not measured here, each with its source.

Each row states what its source states, no more; whether it holds for another model, text or budget is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_TIMES = 10.0
"""A result applies to models of up to this many times the measured size; beyond it is an extrapolation."""


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

    def to_dict(self) -> dict[str, Any]:
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
    """Return the published results near a size about methods that are no option of `advise`."""
    return tuple(row for row in LITERATURE if not row.subjects and row.is_near(parameters))
