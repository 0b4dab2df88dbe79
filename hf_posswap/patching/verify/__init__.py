"""Proof that a swap is in force."""
