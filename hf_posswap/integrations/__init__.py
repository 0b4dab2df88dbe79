"""Swaps in other programs: axolotl and vLLM."""
