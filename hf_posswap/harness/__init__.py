"""EleutherAI's evaluation harness on swapped models: https://github.com/EleutherAI/lm-evaluation-harness."""

from hf_posswap.harness.model import harness_model_class
from hf_posswap.harness.run import run_tasks

__all__ = ["harness_model_class", "run_tasks"]
