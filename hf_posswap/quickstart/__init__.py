"""One command from nothing to a comparison: a real model, new position mechanisms, adapted, measured, saved."""

from hf_posswap.quickstart.run import QuickstartResult, run, run_quickstart
from hf_posswap.quickstart.settings import BaseSettings, QuickstartSettings

__all__ = ["BaseSettings", "QuickstartResult", "QuickstartSettings", "run", "run_quickstart"]
