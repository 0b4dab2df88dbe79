from hf_posswap.checkpoints.native.convert import CONVERSIONS as CONVERSIONS
from hf_posswap.checkpoints.native.convert import Native as Native
from hf_posswap.checkpoints.native.convert import to_native as to_native
