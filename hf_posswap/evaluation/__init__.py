"""Measuring what a swap did: losses by length and position, use of context, needles, encoders, and the statistics."""

from hf_posswap.evaluation.compat import PROTOCOLS, protocol_losses, protocol_perplexity
from hf_posswap.evaluation.cost import Cost, measure_cost
from hf_posswap.evaluation.ctx_gain import GainScore, context_gain, context_losses, contexts_of
from hf_posswap.evaluation.eff_len import EffectiveLength, effective_length
from hf_posswap.evaluation.longppl import KeySpans, find_key_spans, long_perplexity
from hf_posswap.evaluation.losses import measure_losses, sliding_losses
from hf_posswap.evaluation.masked import mask_groups, masked_losses, pseudo_perplexity
from hf_posswap.evaluation.memory import check_memory, choose_prefill, forward_need
from hf_posswap.evaluation.offset_probe import OffsetScore, offset_change, offset_losses, offsets_of
from hf_posswap.evaluation.paired import (
    Change,
    NonInferiority,
    holm,
    mcnemar_p,
    non_inferiority,
    paired_change,
    sign_flip_p,
)
from hf_posswap.evaluation.passkey import PasskeyCell, PasskeyTask, answer_prompt, passkey_grid, passkey_keys
from hf_posswap.evaluation.perplexity import (
    LengthScore,
    PositionScore,
    change_with_length,
    loss_by_position,
    perplexity_by_length,
)
from hf_posswap.evaluation.reach import Reach, reach_of
from hf_posswap.evaluation.retrieval import RetrievalScore, embed, retrieval_at_length
from hf_posswap.evaluation.ruler_lite import TASKS as RULER_TASKS
from hf_posswap.evaluation.ruler_lite import RulerPrompt, ruler_prompt, ruler_score
from hf_posswap.evaluation.scoring import Scorer, token_nll
from hf_posswap.evaluation.short_reg import ShortDocument, ShortRegression, compare_short, short_regression
from hf_posswap.evaluation.statistics import ratio_interval, wilson_interval
from hf_posswap.evaluation.store import RunStore, unit_key
from hf_posswap.evaluation.windows import Window, sliding_windows, window_losses

__all__ = [
    "PROTOCOLS",
    "RULER_TASKS",
    "Change",
    "Cost",
    "EffectiveLength",
    "GainScore",
    "KeySpans",
    "LengthScore",
    "NonInferiority",
    "OffsetScore",
    "PasskeyCell",
    "PasskeyTask",
    "PositionScore",
    "Reach",
    "RetrievalScore",
    "RulerPrompt",
    "RunStore",
    "Scorer",
    "ShortDocument",
    "ShortRegression",
    "Window",
    "answer_prompt",
    "change_with_length",
    "check_memory",
    "choose_prefill",
    "compare_short",
    "context_gain",
    "context_losses",
    "contexts_of",
    "effective_length",
    "embed",
    "find_key_spans",
    "forward_need",
    "holm",
    "long_perplexity",
    "loss_by_position",
    "mask_groups",
    "masked_losses",
    "mcnemar_p",
    "measure_cost",
    "measure_losses",
    "non_inferiority",
    "offset_change",
    "offset_losses",
    "offsets_of",
    "paired_change",
    "passkey_grid",
    "passkey_keys",
    "perplexity_by_length",
    "protocol_losses",
    "protocol_perplexity",
    "pseudo_perplexity",
    "ratio_interval",
    "reach_of",
    "retrieval_at_length",
    "ruler_prompt",
    "ruler_score",
    "short_regression",
    "sign_flip_p",
    "sliding_losses",
    "sliding_windows",
    "token_nll",
    "unit_key",
    "wilson_interval",
    "window_losses",
]
