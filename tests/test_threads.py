"""Threads at the same time find what each would find alone: models, classes, names, levels of loggers."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posswap
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.registry import Registry
from hf_posswap.utils.progress import quiet_transformers
from hf_posswap.utils.threads import once, quiet_logger

THREADS = 8
TIED = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[], Any]) -> list[Any]:
    """Return what `work` gives in each of some threads, which begin at the same time."""
    barrier = threading.Barrier(THREADS)

    def begin(_: int) -> Any:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(begin, range(THREADS)))


def test_models_are_patched_loaded_and_built_in_threads() -> None:
    child = Path(__file__).parent / "threads_child.py"
    done = subprocess.run([sys.executable, "-W", "ignore", child], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_tied_weights_are_loaded_in_threads(tmp_path: Path) -> None:
    swapped = hf_posswap.patch_model(GPT2LMHeadModel(TIED), "rope", max_length=32)
    swapped.save_pretrained(tmp_path)
    for model in together(lambda: hf_posswap.load(tmp_path)):
        assert model.lm_head.weight is model.transformer.wte.weight
        assert all(torch.equal(weight, swapped.state_dict()[name]) for name, weight in model.state_dict().items())


def test_a_swapped_class_is_made_once() -> None:
    class Llama(LlamaForCausalLM):
        """One of which there is no swapped class."""

    class OfLlama(LlamaConfig):
        """One of which there is no swapped class."""

    Llama.config_class = OfLlama
    made = together(lambda: swapped_class(Llama))
    assert len(set(made)) == 1
    assert len({one.config_class for one in made}) == 1


@pytest.mark.slow
def test_auto_classes_load_the_class_that_a_patched_model_has(tmp_path: Path) -> None:
    code = (
        "import hf_posswap, sys\n"
        "from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "sizes = dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=8, vocab_size=11)\n"
        "model = hf_posswap.patch_model(LlamaForCausalLM(LlamaConfig(**sizes)), 'alibi')\n"
        "model.save_pretrained(sys.argv[1])\n"
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])) is type(model))\n"
        "print(type(AutoModel.from_pretrained(sys.argv[1])) is type(model.model))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_models_patched_in_threads_can_be_pickled() -> None:
    base = GPT2LMHeadModel(TIED)
    models = together(lambda: hf_posswap.patch_model(copy.deepcopy(base), "alibi", max_length=32))
    assert len({type(model) for model in models}) == 1
    assert all(type(pickle.loads(pickle.dumps(model))) is type(model) for model in models)


def test_plugins_are_there_for_each_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[int] = Registry("number", "example.numbers")

    class Point:
        name, value = "slow", "example"

        def load(self) -> None:
            assert "two" not in registry  # a plugin may look
            threading.Event().wait(0.05)
            registry.add("one", 1)

    monkeypatch.setattr("hf_posswap.registry.entry_points", lambda group: [Point()])
    assert together(lambda: registry.get("one")) == [1] * THREADS


def test_once_runs_once_and_takes_what_it_has_asked_for_itself() -> None:
    made: list[object] = []

    def make(name: str) -> object:
        if not made:
            made.append(object())
            return (ask(name), object())[1]
        made.append(object())
        return made[-1]

    ask = once(make)
    assert len(set(together(lambda: ask("a")))) == 1
    assert len(made) == 2
    assert ask("a") is made[1]


def test_a_logger_has_its_level_back_whoever_ends_first() -> None:
    logger, quiet = logging.getLogger("hf_posswap.tests.threads"), logging.ERROR
    logger.setLevel(logging.INFO)
    first, second = quiet_logger(logger.name, quiet), quiet_logger(logger.name, logging.CRITICAL)
    with first:
        second.__enter__()
        assert logger.level == logging.CRITICAL
    assert logger.level == logging.CRITICAL
    second.__exit__(None, None, None)
    assert logger.level == logging.INFO
    with quiet_logger(logger.name, quiet):
        logger.setLevel(logging.DEBUG)  # by somebody else
    assert logger.level == logging.DEBUG


def test_transformers_speaks_as_before_after_threads_that_kept_it_quiet() -> None:
    from transformers.utils import logging as told

    def work() -> None:
        with quiet_transformers():
            assert not told.is_progress_bar_enabled()
            assert told.get_verbosity() == told.ERROR

    before = told.get_verbosity(), told.is_progress_bar_enabled()
    for _ in range(5):
        together(work)
    assert (told.get_verbosity(), told.is_progress_bar_enabled()) == before


def test_random_numbers_go_on_as_before_after_threads_that_drew_by_a_seed() -> None:
    from hf_posswap.testing.tiny import tiny_model

    torch.manual_seed(5)
    expected = torch.random.get_rng_state()
    models = together(lambda: tiny_model("GPT2LMHeadModel", meta=False))
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert all(torch.equal(models[0].lm_head.weight, model.lm_head.weight) for model in models)


@pytest.mark.parametrize("scheme", ["rope", "t5", "self_extend:group=2"])
def test_random_numbers_of_the_process_go_on_while_threads_patch_and_verify(scheme: str) -> None:
    def work(model: Any) -> None:
        hf_posswap.verify_swap(hf_posswap.patch_model(model, scheme))

    models = [GPT2LMHeadModel(TIED) for _ in range(THREADS)]
    torch.manual_seed(5)
    expected = torch.rand(2000)
    torch.manual_seed(5)
    with ThreadPoolExecutor(THREADS) as threads:
        swaps = [threads.submit(work, model) for model in models]
        drawn = [torch.rand(1)]
        while not all(swap.done() for swap in swaps) and len(drawn) < 2000:
            drawn.append(torch.rand(1))
            time.sleep(0.001)
    assert [swap.exception() for swap in swaps] == [None] * THREADS
    assert torch.equal(torch.cat(drawn), expected[: len(drawn)])
    assert torch.equal(torch.rand(2000 - len(drawn)), expected[len(drawn) :])
