"""Looking for the scheme that suits one model: LongRoPE's divisors, and the rotary pairs that matter."""

from hf_posswap.search.logit_scale import LogitScaleFit, fit_logit_scale
from hf_posswap.search.longrope import search_longrope
from hf_posswap.search.pairs import rank_pairs, select_pairs
from hf_posswap.search.result import LongRopeSearch

__all__ = ["LogitScaleFit", "LongRopeSearch", "fit_logit_scale", "rank_pairs", "search_longrope", "select_pairs"]
