"""What a checkpoint's positions become in other programs, and the config that each of them wants."""

from hf_posswap.checkpoints.exports.rules import TARGETS
from hf_posswap.checkpoints.exports.run import Export, export

__all__ = ["TARGETS", "Export", "export"]
