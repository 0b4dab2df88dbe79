"""Swapped checkpoints in vLLM: what `vllm serve DIR` needs of hf_posswap, found by vLLM through an entry point."""
