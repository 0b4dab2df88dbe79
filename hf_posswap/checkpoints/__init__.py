"""Checkpoints that carry their mechanism: loading, saving, pushing, converting, checking, and the Auto classes."""
