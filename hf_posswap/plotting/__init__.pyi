from hf_posswap.plotting.curves import Curve as Curve
from hf_posswap.plotting.curves import Point as Point
from hf_posswap.plotting.curves import draw_loss_by_position as draw_loss_by_position
from hf_posswap.plotting.curves import draw_perplexity_by_length as draw_perplexity_by_length
from hf_posswap.plotting.heatmap import Cell as Cell
from hf_posswap.plotting.heatmap import draw_passkey as draw_passkey
