"""Shared by several schemes: base classes, checks, mathematics."""
