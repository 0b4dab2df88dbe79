from hf_posswap.checkpoints.doctor_checks.diagnose import doctor as doctor
from hf_posswap.checkpoints.doctor_checks.findings import Diagnosis as Diagnosis
from hf_posswap.checkpoints.doctor_checks.findings import Finding as Finding
