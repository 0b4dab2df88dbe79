"""Running recipes: transformers' Trainer with gates before, health during, and resume after anything."""

from hf_posswap.training.engine.run import Finished, run_recipe
from hf_posswap.training.engine.services import Services

__all__ = ["Finished", "Services", "run_recipe"]
