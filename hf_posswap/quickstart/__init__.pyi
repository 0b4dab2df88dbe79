from hf_posswap.quickstart.base import QuickstartSettings as QuickstartSettings
from hf_posswap.quickstart.run import QuickstartResult as QuickstartResult
from hf_posswap.quickstart.run import run_quickstart as run_quickstart
