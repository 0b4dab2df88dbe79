"""Training on a busy machine: torch's threads spin while they wait, unless OMP_WAIT_POLICY is PASSIVE.

`posswap` sets it (cli/app.py). Both policies alternate here in separate processes on two threads: on an idle machine,
and with one other program computing on each core.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recipes.bench.harness import interval

POLICY = "OMP_WAIT_POLICY"
PASSIVE, DEFAULT = "PASSIVE", "as torch has it"
SPIN = "while True: pass"
TRAIN = """
import sys, time, torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.set_num_threads(2)
torch.manual_seed(0)
length, seconds = int(sys.argv[1]), float(sys.argv[2])
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=512, n_positions=length))
ids, optimizer = torch.randint(512, (2, length)), torch.optim.AdamW(model.parameters())
def step():
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
step()
started, steps = time.perf_counter(), 0
while time.perf_counter() - started < seconds:
    step()
    steps += 1
print((time.perf_counter() - started) / steps)
"""


def rows(smoke: bool) -> list[dict[str, Any]]:
    """Return the time of a training step by each policy, and their ratio, by the number of other programs."""
    return [_row(programs, smoke) for programs in (0, os.cpu_count() or 1)]


def _row(programs: int, smoke: bool) -> dict[str, Any]:
    length, seconds, turns = (32, 0.2, 1) if smoke else (512, 8.0, 7)
    times: dict[str, list[float]] = {PASSIVE: [], DEFAULT: []}
    with _others(programs):
        for _ in range(turns):
            for policy, policy_times in times.items():
                policy_times.append(_step(policy, length, seconds))
    passive_times, default_times = times.values()
    ratio = statistics.median(passive_times) / statistics.median(default_times)
    return {
        "name": f"a step of training on two threads beside {programs} other programs, {POLICY}={PASSIVE}",
        "wrong": [],
        "most_seconds": None,
        "missing": {},
        "turns": turns,
        "seconds": {policy: statistics.median(policy_times) for policy, policy_times in times.items()},
        "ratios": {
            DEFAULT: {
                "of medians": ratio,
                "of minima": min(passive_times) / min(default_times),
                "interval": interval(passive_times, default_times)[1:],
                "goal": None if programs else 1.02,
            }
        },
    }


@contextmanager
def _others(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _step(policy: str, length: int, seconds: float) -> float:
    """Return the seconds of a step, in a separate process."""
    environment = {name: value for name, value in os.environ.items() if name != POLICY} | {"HF_HUB_OFFLINE": "1"}
    if policy == PASSIVE:
        environment[POLICY] = PASSIVE
    command = [sys.executable, "-c", TRAIN, str(length), str(seconds)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(process.stdout.splitlines()[-1]))
