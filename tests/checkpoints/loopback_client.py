"""Runs in a process of its own: does what stdin asks, one JSON call a line, and answers each in one line.

    HF_ENDPOINT=... python loopback_client.py with|without

The Hub's client reads its environment once, at import; so it cannot run inside the tests' own process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

if sys.argv[1] == "with":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
else:
    sys.modules["hf_posswap"] = None  # type: ignore[assignment]  # as if it were not installed

import torch  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
SLEEP, HASTE = time.sleep, 20
time.sleep = lambda seconds: SLEEP(seconds / HASTE)  # the Hub's client tries again as often, but waits less between
IDS = torch.arange(40).reshape(2, 20) % 11


@contextmanager
def room(largest: int | None) -> Iterator[None]:
    """Let no file grow beyond `largest` bytes: the same system call fails as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest or hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def numbers(model: Any) -> list[float]:
    with torch.no_grad():
        return model.eval()(IDS).logits.flatten().tolist()


def made(scheme: str, seed: int = 0) -> Any:
    import hf_posswap

    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=500, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    hf_posswap.patch_model(model, scheme, max_length=64)
    return model


def push(repo_id: str, scheme: str | None = None, folder: str | None = None, seed: int = 0, **kwargs: Any) -> Any:
    from hf_posswap import push

    return push(folder or made(str(scheme), seed), repo_id, **kwargs).to_dict()


def push_to_hub(repo_id: str, scheme: str) -> Any:
    model = made(scheme)
    model.push_to_hub(repo_id)
    return numbers(model)


def save(folder: str, scheme: str, seed: int = 0, **kwargs: Any) -> Any:
    model = made(scheme, seed)
    model.save_pretrained(folder, **kwargs)
    return numbers(model)


def load(repo_id: str, largest: int | None = None, **kwargs: Any) -> Any:
    import hf_posswap

    with room(largest):
        return numbers(hf_posswap.load(repo_id, **kwargs))


def auto(repo_id: str, **kwargs: Any) -> Any:
    return numbers(transformers.AutoModelForCausalLM.from_pretrained(repo_id, **kwargs))


def peak() -> int:
    """Return the most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


CALLS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (push, push_to_hub, save, load, auto, peak)}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            with redirect_stdout(sys.stderr):
                answer = {"value": CALLS[asked.pop("call")](**asked)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
