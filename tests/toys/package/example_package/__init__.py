"""Schemes and a family of another package: importing it registers all of them."""

from . import house, house_model, of_functions, window_toll

__all__ = ["house", "house_model", "of_functions", "window_toll"]
