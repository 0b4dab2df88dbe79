"""The entries of results.json as types: what a comparison, an evaluation or `posswap lm-eval` writes, and reports read.

A difference is the model's loss minus that of the baseline, in nats per token: negative is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict


class Interval(TypedDict):
    """A 95 % interval; None: too few documents for one."""

    low: float | None
    high: float | None


class Change(Interval):
    """A difference in nats per token, with its interval."""

    difference: float


class LengthRow(Interval):
    """Perplexity at one length."""

    length: int
    perplexity: float
    documents: int
    tokens: int


class PositionRow(Interval):
    """The loss of the tokens from `start` to before `stop`."""

    start: int
    stop: int
    loss: float


class GainRow(Interval):
    """What `context` tokens of context gain on the same `tail`."""

    context: int
    gain: float
    reference: bool
    tail: int


class DifferenceRow(Change):
    """A paired difference at one length; `p_holm` is corrected over the lengths, `no_verdict` says why it is None."""

    length: int
    p_holm: float | None
    no_verdict: NotRequired[str | None]


class KeptRow(Change):
    """The scores of tasks at one length, beside those of the baseline; `kept` is in percent of these."""

    length: int
    score: float
    base_score: float
    kept: float | None


class FarContextRow(Interval):
    """What the tokens beyond the window gain."""

    further: int
    tail: int
    gain: float
    verdict: str
    reason: str | None


class ShortLoss(TypedDict):
    """The change of the loss within the window, with the bounds of its test."""

    difference: float
    lower: float | None
    upper: float | None
    margin: float
    verdict: str
    reason: str | None


class ShortContext(TypedDict):
    """The change within the window."""

    loss: ShortLoss
    length: int
    agreement: float
    divergence: float


class NeedleCell(TypedDict):
    """How many passkeys are found at one length and depth."""

    length: int
    depth: float
    share: float
    low: float
    high: float
    answer_nll: float


class EffectiveLength(TypedDict):
    """The length up to which passkeys are found."""

    length: int | None
    no_verdict: str | None


class Needles(TypedDict):
    """The grid of passkeys."""

    trials: int
    cells: list[NeedleCell]
    effective_length: EffectiveLength


class TaskCell(TypedDict):
    """The score of one task at one length."""

    task: str
    length: int
    score: float
    prompts: int


class Tasks(TypedDict):
    """The scores of ruler_lite."""

    cells: list[TaskCell]


class RetrievalRow(TypedDict):
    """How often an encoder finds a document of one length."""

    length: int
    accuracy: float
    low: float
    high: float
    chance: float


class VectorRow(Interval):
    """The cosine of an encoder's vectors to those of the baseline, at one length."""

    length: int
    cosine: float


class OffsetRow(Interval):
    """The change of the loss of a passage that begins at `offset`."""

    offset: int
    change: float


class CostRow(TypedDict):
    """The cost of one length, as `hf_posswap.evaluation.cost.Cost`."""

    length: int
    prefill_seconds: float
    tokens_per_second: float
    decode_seconds: float
    cache_bytes: int
    peak_bytes: int | None


class MaskedScores(TypedDict):
    """The scores of masked tokens."""

    lengths: list[LengthRow]
    positions: list[PositionRow]


class SchemeEntry(TypedDict, total=False):
    """A scheme: its name, and those of its layers if they have schemes of their own; other fields are not listed."""

    name: str
    layers: dict[str, SchemeEntry]


class PlanEntry(TypedDict, total=False):
    """The plan of a swap, as `SwapPlan.to_dict` returns it; other keys are not listed."""

    scheme: SchemeEntry
    route: str
    adaptation: str


class TrainingEntry(TypedDict):
    """The training of a model whose swap was trained."""

    recipe: str | None
    tokens: int


class ProtocolRow(TypedDict):
    """Perplexity by the protocol of a paper."""

    protocol: str
    perplexity: float


class LongPerplexity(TypedDict):
    """Perplexity of the tokens that need far context."""

    perplexity: float


class IdentityEntry(TypedDict, total=False):
    """What a model ran as; other keys are not listed."""

    dtype: str
    attention: str
    device: str


class ModelEntry(TypedDict, total=False):
    """What results.json holds of a model; a metric that was not measured is missing."""

    plan: PlanEntry | None
    identity: IdentityEntry
    trained: str | None
    training: TrainingEntry | None
    conclusion: dict[str, object] | None
    cannot_run: dict[str, str]
    not_measured: dict[str, str]
    ppl_prefix: list[LengthRow]
    mlm_pos: MaskedScores
    nll_pos: list[PositionRow]
    ctx_gain: list[GainRow]
    far_context: FarContextRow | None
    against_sliding: list[DifferenceRow]
    short_reg: ShortContext
    passkey: Needles
    ruler_lite: Tasks
    retrieval: list[RetrievalRow]
    vectors: list[VectorRow]
    offset_probe: list[OffsetRow]
    cost: list[CostRow]
    ppl_compat: list[ProtocolRow]
    pseudo_ppl: list[LengthRow]
    longppl: LongPerplexity


class SlidingEntry(ModelEntry, total=False):
    """The control that model `of` reads by a sliding window."""

    of: str
    name: str
    window: int
    stride: int


class NeedleChange(TypedDict):
    """The passkeys found by a model and by the baseline."""

    p: float
    needles: int
    before: int
    after: int


class Comparison(TypedDict, total=False):
    """The differences of a model from the baseline; a metric that was not measured is missing."""

    lengths: list[DifferenceRow]
    passkey: NeedleChange
    ruler_lite: list[KeptRow]


class Protocol(TypedDict):
    """How the documents were read."""

    id: str
    said: str


class DataEntry(TypedDict, total=False):
    """The documents."""

    source: str
    documents: int
    digest: str
    names: list[str]
    protocol: Protocol
    tokenizer: Mapping[str, object]


class Provenance(TypedDict):
    """When and by which command the results were made."""

    command: str | None
    date: str


class HarnessCell(TypedDict):
    """The score of one task of the evaluation harness at one length."""

    score: float
    stderr: float | None
    questions: int | None


class HarnessRow(TypedDict, total=False):
    """The scores of one task and metric by column, with what is derived from them."""

    task: str
    metric: str
    higher_is_better: bool | None
    values: dict[str, HarnessCell]
    effective_length: dict[str, int | None] | None
    retention: dict[str, float | None] | None


class HarnessTable(TypedDict, total=False):
    """The scores of the evaluation harness; `kept`: whether a baseline's table was there to compare with."""

    columns: list[str]
    rows: list[HarnessRow]
    kept: bool


class HarnessSettings(TypedDict, total=False):
    """The settings of `run_tasks` that the questions depend on."""

    tasks: list[str]
    lengths: list[int] | None
    limit: int | None
    num_fewshot: int | None
    apply_chat_template: bool
    fewshot_as_multiturn: bool
    metadata: dict[str, object]


class HarnessResults(TypedDict, total=False):
    """What `run_tasks` returns; other keys, of the harness, are not listed."""

    results: dict[str, dict[str, object]]
    runs: dict[str, list[dict[str, object]]]
    lengths: list[int]
    longer: dict[str, int]
    longest_input: int
    table: HarnessTable
    settings: HarnessSettings
    base: HarnessResults


class Results(TypedDict, total=False):
    """What results.json holds."""

    schema: int
    kind: str
    base: str
    window: int
    lengths: list[int]
    metrics: list[str]
    settings: dict[str, object]
    data: DataEntry
    made: Provenance
    environment: dict[str, object]
    notes: list[str]
    models: dict[str, ModelEntry]
    comparisons: dict[str, Comparison]
    sliding: SlidingEntry | None
    lm_eval: dict[str, HarnessTable]
