"""Adapts a model to a new position mechanism: the Python form of `posswap train`, also for launchers.

    python recipes/train.py yarn model.name=my-llama out=my-run
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train.py yarn ...
    torchrun --nproc_per_node 8 recipes/train.py yarn ...

The same command resumes after an interruption, even by SIGKILL, and ends with the same weights.
"""

from __future__ import annotations

from hf_posswap.cli.outcome import script
from hf_posswap.cli.training import train

app = script(train)

if __name__ == "__main__":
    app()
