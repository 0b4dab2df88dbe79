from hf_posswap.training.engine.run import Finished as Finished
from hf_posswap.training.engine.run import run_recipe as run_recipe
from hf_posswap.training.engine.services import Services as Services
