from hf_posswap.search.bias import fit_bias as fit_bias
from hf_posswap.search.logit_scale import LogitScaleFit as LogitScaleFit
from hf_posswap.search.logit_scale import fit_logit_scale as fit_logit_scale
from hf_posswap.search.longrope import search_longrope as search_longrope
from hf_posswap.search.pairs import rank_pairs as rank_pairs
from hf_posswap.search.pairs import select_pairs as select_pairs
from hf_posswap.search.result import LongRopeSearch as LongRopeSearch
