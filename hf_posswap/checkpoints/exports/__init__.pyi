from hf_posswap.checkpoints.exports.claims_table import CLAIMS as CLAIMS
from hf_posswap.checkpoints.exports.rules import TARGETS as TARGETS
from hf_posswap.checkpoints.exports.run import Export as Export
from hf_posswap.checkpoints.exports.run import export as export
