"""Advice on what to use for a model, a length and a budget, based on the project's own measurements."""
