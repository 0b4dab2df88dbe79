"""Applying a plan, and undoing it."""
