"""Attention classes with transformers' AttentionInterface, for models whose own classes lack it.

Each is a subclass of the model's own class that computes the same (a test asserts this); only here does the package
write a forward. With `native_positions` False it skips the positions that the original applies inside attention. All
files but `base` import the model code of transformers, so they are imported only when a model needs them, and each
imports that of one kind: a release that moves a class of another kind leaves it alone.
"""
