"""Attention without anything of [Q, K]: fused calls, put together. Pure torch, and nothing of models or schemes."""
