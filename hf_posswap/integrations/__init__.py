"""Swaps in trainers that are driven by a file."""
