"""Print, as JSON, which modules each name of `hf_posswap` loads, each in a process forked before any was loaded."""

from __future__ import annotations

import json
import os
import sys

import torch  # noqa: F401
import transformers  # noqa: F401

BEFORE = set(sys.modules)


def loaded_by(name: str) -> list[str]:
    """Return the modules that asking for `name` loads, in a fork of this process."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        import hf_posswap

        if name:
            getattr(hf_posswap, name)
        with os.fdopen(writing, "w") as pipe:
            json.dump(sorted(set(sys.modules) - BEFORE), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.waitpid(process, 0)
    return list(json.loads(found))


if __name__ == "__main__":
    json.dump({name: loaded_by(name) for name in ["", *sys.argv[1:]]}, sys.stdout)
