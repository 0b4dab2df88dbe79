"""Checkpoints that carry their mechanism: loading, saving, pushing, converting, checking, and the Auto classes."""

from hf_posswap.checkpoints.adapters import add_adapter
from hf_posswap.checkpoints.adapters_load import load_adapter
from hf_posswap.checkpoints.adapters_positions import position_modules
from hf_posswap.checkpoints.auto import register
from hf_posswap.checkpoints.doctor_checks import Diagnosis, doctor
from hf_posswap.checkpoints.exports import Export, export
from hf_posswap.checkpoints.load import load
from hf_posswap.checkpoints.native import to_native
from hf_posswap.checkpoints.push import PushReport, push
from hf_posswap.checkpoints.save import save

__all__ = [
    "Diagnosis",
    "Export",
    "PushReport",
    "add_adapter",
    "doctor",
    "export",
    "load",
    "load_adapter",
    "position_modules",
    "push",
    "register",
    "save",
    "to_native",
]
