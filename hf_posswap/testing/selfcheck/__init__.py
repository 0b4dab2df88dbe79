"""Self-check of an installation without downloads: the APIs that swaps depend on, and a swap per kind of family."""

from hf_posswap.testing.selfcheck.run import Check, Report, selfcheck

__all__ = ["Check", "Report", "selfcheck"]
