"""Serving of swapped checkpoints in vLLM, which finds this plugin through an entry point."""
