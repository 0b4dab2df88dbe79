from hf_posswap.harness.model import harness_model_class as harness_model_class
from hf_posswap.harness.run import run_tasks as run_tasks
from hf_posswap.harness.scores import retention as retention
