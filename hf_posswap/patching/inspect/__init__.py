"""The position mechanism of a model, and the swaps that it supports."""
