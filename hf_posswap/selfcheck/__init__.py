"""A proof of the installation at hand, without downloads: what a swap rests on, and a swap of each kind of family."""

from hf_posswap.selfcheck.report import Check, Report
from hf_posswap.selfcheck.run import selfcheck

__all__ = ["Check", "Report", "selfcheck"]
