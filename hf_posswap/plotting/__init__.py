"""Pictures of results; matplotlib is loaded only when one is drawn."""

from hf_posswap.plotting.curves import Curve, Point, draw_loss_by_position, draw_perplexity_by_length
from hf_posswap.plotting.heatmap import Cell, draw_passkey

__all__ = ["Cell", "Curve", "Point", "draw_loss_by_position", "draw_passkey", "draw_perplexity_by_length"]
