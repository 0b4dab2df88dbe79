"""Tiny models of transformers' classes, for the tests of this package and of its plugins."""
