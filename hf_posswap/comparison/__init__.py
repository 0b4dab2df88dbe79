"""Measuring models side by side: on the same tokens, resumable, with intervals, tests and verdicts."""

from hf_posswap.comparison.candidates import Candidate
from hf_posswap.comparison.documents import EvalDocuments, read_documents
from hf_posswap.comparison.ranks import is_main_process
from hf_posswap.comparison.run import Evaluation, compare, evaluate
from hf_posswap.comparison.settings import DEFAULT_METRICS, ENCODER_METRICS, METRICS, EvalSettings

__all__ = [
    "DEFAULT_METRICS",
    "ENCODER_METRICS",
    "METRICS",
    "Candidate",
    "EvalDocuments",
    "EvalSettings",
    "Evaluation",
    "compare",
    "evaluate",
    "is_main_process",
    "read_documents",
]
