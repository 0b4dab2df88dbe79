"""Attention classes with transformers' AttentionInterface, for models whose own classes lack it.

Each is a subclass of the model's own class, equal to it in what it computes (a test asserts that), and the one place
where a forward is written. With `native_positions` False it leaves out the positions that the original applies inside
attention. The files import the model code of transformers, so they are imported when a model needs them.
"""
