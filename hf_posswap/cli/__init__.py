"""The command `posswap`. Importing it loads neither torch nor transformers; each command imports them on demand."""

from hf_posswap.cli.app import app, main

__all__ = ["app", "main"]
