"""The known position traps of a checkpoint, found without loading its weights."""

from hf_posswap.checkpoints.doctor_checks.diagnose import doctor
from hf_posswap.checkpoints.doctor_checks.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "doctor"]
