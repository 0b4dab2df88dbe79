"""Attention from fused calls without [Q, K] tensors. Pure torch, independent of models and schemes."""
