from hf_posswap.quickstart.run import QuickstartResult as QuickstartResult
from hf_posswap.quickstart.run import run_quickstart as run_quickstart
from hf_posswap.quickstart.settings import QuickstartSettings as QuickstartSettings
