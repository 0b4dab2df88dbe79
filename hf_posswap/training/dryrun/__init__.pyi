from hf_posswap.training.dryrun.launching import launch_file as launch_file
from hf_posswap.training.dryrun.prediction import CARDS as CARDS
from hf_posswap.training.dryrun.prediction import Card as Card
from hf_posswap.training.dryrun.prediction import Prediction as Prediction
from hf_posswap.training.dryrun.prediction import card_of as card_of
from hf_posswap.training.dryrun.run import DryRun as DryRun
from hf_posswap.training.dryrun.run import dry_run as dry_run
