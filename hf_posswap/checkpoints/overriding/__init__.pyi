from hf_posswap.checkpoints.overriding.run import Overrides as Overrides
from hf_posswap.checkpoints.overriding.run import overrides as overrides
