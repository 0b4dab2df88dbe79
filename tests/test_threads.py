"""Threads at the same time find what each would find alone: models, classes, names, levels of loggers."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posswap
from hf_posswap.checkpoints.adapters import without_peft_warning
from hf_posswap.checkpoints.exports import graph_file
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.cli.listing import warnings_off
from hf_posswap.families.rope_config import RopeSettings
from hf_posswap.patching.inspect.untrusted_config import Bounds, refuse_endless
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.registry import Registry
from hf_posswap.utils.hub_session import hub_session
from hf_posswap.utils.progress import quiet_transformers
from hf_posswap.utils.threads import once, quiet_logger, without_stderr

THREADS = 8
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 11,
    "max_position_embeddings": 16,
}  # fmt: skip
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


@contextmanager
def elsewhere(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[Callable[[], None]]:
    """Let another thread be inside `context()`; give the function that has it leave."""
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with context():
                inside.set()
                assert leave.wait(60)
        finally:
            inside.set()

    def end() -> None:
        leave.set()
        work_done.result()

    with ThreadPoolExecutor(1) as threads:
        work_done = threads.submit(work)
        inside.wait()
        try:
            yield end
        finally:
            end()


CONFIG = PositionConfig("rope", "llama", RopeSettings(), 16, None, None)
IGNORING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "loading an adapter": without_peft_warning,
    "exporting a graph": lambda: graph_file._tracing("a model", CONFIG),
    "listing": warnings_off,
}


@pytest.mark.parametrize("name", IGNORING)
def test_warnings_of_other_threads_are_given_and_recorded(name: str) -> None:
    before = warnings.filters.copy(), warnings.showwarning, warnings._showwarnmsg_impl  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        outer = warnings.filters.copy()
        with elsewhere(IGNORING[name]):
            warnings.warn("one", stacklevel=1)
        assert warnings.filters == outer
        assert [str(each.message) for each in given] == ["one"]
    recorder = warnings.catch_warnings(record=True)
    recorder.__enter__()
    with elsewhere(IGNORING[name]) as end:
        recorder.__exit__(None, None, None)  # whoever ends last must not bring the recorder back
        end()
    assert (warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", IGNORING)
def test_warnings_of_the_thread_itself_are_ignored(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with IGNORING[name]():
            warnings.warn("`is_gradient_checkpointing` is deprecated and more", FutureWarning, stacklevel=1)
        with without_peft_warning(), pytest.raises(FutureWarning, match="another"):
            warnings.warn("another", FutureWarning, stacklevel=1)


def test_stderr_of_other_threads_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    stream = sys.stderr
    with elsewhere(IGNORING["exporting a graph"]):
        sys.stderr.write("from another thread\n")
    with without_stderr():
        sys.stderr.write("nothing\n")
        sys.stderr.writelines(["nothing", "at all"])
    assert sys.stderr is stream
    aside = io.StringIO()
    redirected = redirect_stderr(aside)
    with elsewhere(without_stderr) as end:
        redirected.__enter__()
        end()
        sys.stderr.write("aside\n")
    redirected.__exit__(None, None, None)  # brings back what it found, which another thread has left since
    sys.stderr.write("afterwards\n")
    sys.stderr = stream
    assert capsys.readouterr().err == "from another thread\nafterwards\n"
    assert aside.getvalue() == "aside\n"


class _Kept(logging.Handler):
    """Keeps the texts of records."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_what_other_threads_log_is_shown() -> None:
    outer, inner = logging.getLogger("transformers"), logging.getLogger("transformers.models.gpt2")
    kept, level = _Kept(), outer.level
    outer.addHandler(kept)
    try:
        with elsewhere(quiet_transformers):
            inner.warning("weights are missing")
        with quiet_transformers():
            inner.warning("not shown")
            with quiet_logger("transformers", logging.CRITICAL):
                inner.error("not shown either")
            inner.error("an error")
            logging.getLogger("transformers_of_mine").warning("shown by nobody here")
        outer.warning("afterwards")
    finally:
        outer.removeHandler(kept)
    assert kept.texts == ["weights are missing", "an error", "afterwards"]
    assert outer.level == level


def test_what_the_hubs_client_logs_is_shown_but_in_a_session() -> None:
    from huggingface_hub.utils import http_backoff

    logger, kept = logging.getLogger(http_backoff.__module__), _Kept()
    logger.addHandler(kept)
    try:
        with hub_session():
            logger.warning("retrying")
            threads = ThreadPoolExecutor(1)
            threads.submit(logger.warning, "retrying in a thread of the session's").result()
        logger.warning("afterwards")
        with elsewhere(hub_session):
            logger.warning("another thread retries")
    finally:
        threads.shutdown()
        logger.removeHandler(kept)
    assert kept.texts == ["afterwards", "another thread retries"]


def test_the_error_of_an_unreachable_hub_is_of_one_class() -> None:
    code = (
        "import sys, threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from hf_posswap.utils.hub_session import unreachable_error\n"
        "sys.setswitchinterval(1e-6)\n"
        "barrier = threading.Barrier(8)\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    print(len(set(threads.map(lambda _: (barrier.wait(), unreachable_error())[1], range(8)))))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_transformers_shows_bars_as_before_after_threads_that_hid_them() -> None:
    from transformers.utils import logging as told

    def work() -> None:
        with quiet_transformers():
            assert not told.is_progress_bar_enabled()

    before = told.get_verbosity(), told.is_progress_bar_enabled()
    for _ in range(5):
        together(work)
    assert (told.get_verbosity(), told.is_progress_bar_enabled()) == before


def test_the_default_dtype_stays_while_models_of_another_are_built() -> None:
    model = hf_posswap.patch_model(LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16(), "yarn", factor=2.0)
    config = LlamaConfig(**SMALL, dtype="bfloat16")

    def work() -> Any:
        refuse_endless(AutoModelForCausalLM, config, Bounds())
        native = hf_posswap.to_native(model)
        return native

    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    natives = together(work)
    assert torch.get_default_dtype() == torch.float32
    assert {native.dtype for native in natives} == {torch.bfloat16}
    assert all(native.model.rotary_emb.inv_freq.dtype == torch.float32 for native in natives)
    assert torch.equal(torch.get_rng_state(), drawn)  # weights that are loaded are not filled before


def test_random_numbers_go_on_as_before_after_threads_that_drew_by_a_seed() -> None:
    from hf_posswap.testing.tiny import tiny_model

    torch.manual_seed(5)
    expected = torch.random.get_rng_state()
    models = together(lambda: tiny_model("GPT2LMHeadModel", meta=False))
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert all(torch.equal(models[0].lm_head.weight, model.lm_head.weight) for model in models)


@pytest.mark.parametrize("scheme", ["rope", "t5", "self_extend:group=2"])
def test_random_numbers_of_the_process_go_on_while_threads_patch_verify_and_check(scheme: str) -> None:
    def work(model: Any) -> None:
        hf_posswap.verify_swap(hf_posswap.patch_model(model, scheme))
        hf_posswap.check(model)

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
