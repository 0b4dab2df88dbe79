"""Positions change outside inference mode and forwards, by one thread at a time: whoever comes second is refused."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_posswap
from hf_posswap import Blend, load, patch_model, patched, save, unpatch_model, verify_swap
from hf_posswap.errors import AlreadyPatchedError, ModelInUseError, NotPatchedError, PosswapError, UnsupportedSwapError
from hf_posswap.patching.apply import guard
from hf_posswap.patching.apply.guard import changing
from hf_posswap.patching.tools.scheme_values import finish_blend
from hf_posswap.testing.tiny import tiny_model
from tests.training.tiny_models import tiny

IDS = torch.arange(12)[None]
INFERENCE = r"under torch.inference_mode\(\) would create parameters that can never be trained.*use torch.no_grad\(\)"


def state_of(model: Any) -> tuple[Any, ...]:
    """Return all that a change of positions may touch: modules, hooks, tensors, config."""
    hooks = {name: list(part._forward_pre_hooks) + list(part._forward_hooks) for name, part in model.named_modules()}
    tensors = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    modules = {name: id(part) for name, part in model.named_modules()}
    return modules, hooks, tensors, model.config.to_dict(), "_posswap" in vars(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return what `work` gives, or the error that it raises, in a thread called "other"."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("scheme", ["kerple", "t5", "fire", "learned", "sinusoidal", "rope", "nope"])
def test_under_inference_mode_a_swap_is_refused_and_the_model_untouched(scheme: str) -> None:
    model = tiny("gpt2")
    before = state_of(model)
    with torch.inference_mode(), pytest.raises(UnsupportedSwapError, match=f"patch_model {INFERENCE}"):
        patch_model(model, scheme, max_length=96)
    assert state_of(model) == before
    patch_model(model, scheme, max_length=96)
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])


def test_under_inference_mode_a_swap_is_not_taken_back_or_ended() -> None:
    model = tiny("llama")
    patch_model(model, Blend(new=hf_posswap.Alibi(), weight=1.0))
    before = state_of(model)
    with torch.inference_mode():
        with pytest.raises(UnsupportedSwapError, match=f"unpatch_model {INFERENCE}"):
            unpatch_model(model)
        with pytest.raises(UnsupportedSwapError, match=f"finish_blend {INFERENCE}"):
            finish_blend(model)
        with pytest.raises(UnsupportedSwapError, match=INFERENCE), patched(tiny("gpt2"), "rope"):
            pytest.fail("it was swapped")
    assert state_of(model) == before


@pytest.mark.parametrize("scheme", ["kerple", "learned", "rope"])
def test_what_is_loaded_under_inference_mode_trains(tmp_path: Path, scheme: str) -> None:
    model = tiny("gpt2")
    patch_model(model, scheme, max_length=96)
    hf_posswap.save(model, tmp_path / "model")
    with torch.inference_mode():
        loaded = hf_posswap.load(tmp_path / "model")
    before = {name: weight.detach().clone() for name, weight in loaded.named_parameters()}
    loaded(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(loaded.parameters(), lr=1.0).step()
    assert [name for name, weight in loaded.named_parameters() if torch.equal(weight, before[name])] == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_whose_base_would_be_swapped_under_inference_mode_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    hf_posswap.save(tiny("gpt2"), tmp_path / "base")
    model = hf_posswap.load(tmp_path / "base")
    patch_model(model, "kerple", max_length=96)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    hf_posswap.save(adapted, tmp_path / "adapter")
    with torch.inference_mode(), pytest.raises(UnsupportedSwapError, match=INFERENCE):
        hf_posswap.load(tmp_path / "adapter")


@pytest.fixture
def impatient() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("take_back", [False, True])
def test_of_two_threads_one_changes_the_model(take_back: bool) -> None:
    for _ in range(10):
        model = tiny("llama")
        if take_back:
            patch_model(model, "alibi")
        barrier, found = threading.Barrier(2), []

        def change(scheme: str, model: Any = model, barrier: Any = barrier, found: list[Any] = found) -> None:
            barrier.wait()
            try:
                found.append(unpatch_model(model) if take_back else patch_model(model, scheme))
            except PosswapError as error:
                found.append(error)

        threads = [threading.Thread(target=change, args=(scheme,)) for scheme in ("alibi", "kerple")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (refused,) = [one for one in found if isinstance(one, PosswapError)]
        assert isinstance(refused, (NotPatchedError if take_back else AlreadyPatchedError, ModelInUseError))
        if not take_back:
            assert any(one is model for one in found)
            hf_posswap.verify_swap(model)
            unpatch_model(model)
        assert torch.equal(logits(model), logits(tiny("llama")))


@pytest.mark.usefixtures("impatient")
def test_a_forward_meanwhile_gives_one_mechanism_or_is_refused() -> None:
    model = tiny("llama")
    for layer in model.model.layers:  # forwards that are in a generator most of their time
        layer.register_forward_pre_hook(lambda module, arguments: sum(0 for _ in range(1000)) or None)
    native = logits(model)
    with patched(model, "alibi"):
        swapped = logits(model)
    stop, seen = threading.Event(), {"native": 0, "swapped": 0, "refused": 0, "neither": 0, "other": 0}

    def forwards() -> None:
        while not stop.wait(0.001):  # between two forwards a change has a chance
            try:
                found = logits(model)
            except ModelInUseError:
                seen["refused"] += 1
                continue
            except Exception:
                seen["other"] += 1
                continue
            kind = "native" if torch.equal(found, native) else "swapped" if torch.equal(found, swapped) else "neither"
            seen[kind] += 1

    threads = [threading.Thread(target=forwards) for _ in range(2)]
    for thread in threads:
        thread.start()
    changed = refused = 0
    while changed < 20 or changed + refused < 400:
        try:
            (unpatch_model(model) if changed % 2 else patch_model(model, "alibi"))
            changed += 1
        except ModelInUseError:
            refused += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert (seen["neither"], seen["other"]) == (0, 0), seen


@pytest.mark.usefixtures("impatient")
def test_a_forward_that_runs_generators_is_seen_at_each_look() -> None:
    """A suspended generator has no caller, so a stack that is read from within one ends there."""

    class Generators(torch.nn.Module):
        def forward(self, stop: threading.Event) -> None:
            started.set()
            while not stop.is_set():
                sum(number for number in range(8))

    model, started, stop = Generators(), threading.Event(), threading.Event()
    thread = threading.Thread(target=model, args=(stop,))
    thread.start()
    started.wait(60)
    try:
        seen = [guard._calls_by_thread({id(model)})[thread.ident or 0] for _ in range(10_000)]
    finally:
        stop.set()
        thread.join()
    assert set(seen) == {"a forward"}


def test_a_thread_whose_first_function_is_a_generator_runs_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = (number for number in range(8)).gi_frame
    looks: list[int] = []
    monkeypatch.setattr(guard, "stacks_of_threads", lambda: looks.append(1) or {0: frame})
    assert guard._calls_by_thread({id(tiny("gpt2"))}) == {0: None}
    assert len(looks) == guard._MOST_LOOKS


def test_what_is_no_frame_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 gave a function for the caller of a frame of a thread that went on."""
    given: list[Any] = [{0: changing}, {0: None}]
    monkeypatch.setattr(guard, "stacks_of_threads", lambda: given.pop(0))
    assert guard._calls_by_thread({id(tiny("gpt2"))}) == {0: None}
    assert not given


def test_while_positions_change_forwards_and_changes_of_other_threads_are_refused() -> None:
    model = tiny("llama")
    before, native = state_of(model), logits(model)
    with changing(model, "patch_model"):
        assert torch.equal(logits(model), native)
        for part in (model, model.model):
            error = in_a_thread(lambda part=part: part(IDS))
            assert isinstance(error, ModelInUseError)
            assert "in thread 'MainThread' is changing the positions of this Llama" in str(error)
        for work in (lambda: patch_model(model, "alibi"), lambda: patch_model(model.model, "alibi")):
            error = in_a_thread(work)
            assert isinstance(error, ModelInUseError)
            assert "patch_model overlaps patch_model of the same LlamaForCausalLM in thread 'MainThread'" in str(error)
        assert hf_posswap.swap_plan(in_a_thread(lambda: patch_model(tiny("llama"), "alibi"))).scheme.name == "alibi"
        copied = copy.deepcopy(model)
        with changing(model, "unpatch_model"):
            pass
    assert state_of(model) == before
    assert torch.equal(in_a_thread(lambda: logits(copied)), native)


def test_a_swap_inside_a_forward_of_its_own_is_refused() -> None:
    model = tiny("llama")
    native = logits(model)
    errors: list[Exception] = []

    def change(module: Any, arguments: Any, output: Any) -> None:
        with pytest.raises(
            ModelInUseError, match="patch_model inside a forward of the same .* in this thread"
        ) as error:
            patch_model(model, "alibi")
        errors.append(error.value)

    handle = model.model.layers[0].register_forward_hook(change)
    assert torch.equal(logits(model), native)
    handle.remove()
    assert len(errors) == 1
    patch_model(model, "alibi")


class Changes(LogitsProcessor):
    """Tries to change the model between two steps of `generate`."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change, self.errors = change, list[str]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        try:
            self.change()
        except ModelInUseError as error:
            self.errors.append(str(error))
        return scores


@pytest.mark.parametrize("take_back", [False, True])
def test_a_change_inside_generate_is_refused(take_back: bool) -> None:
    model = tiny("llama")
    if take_back:
        patch_model(model, "alibi")
    whole = model.generate(IDS, max_new_tokens=3, do_sample=False)
    changes = Changes(lambda: unpatch_model(model) if take_back else patch_model(model, "alibi"))
    held = model.generate(IDS, max_new_tokens=3, do_sample=False, logits_processor=LogitsProcessorList([changes]))
    assert torch.equal(held, whole)
    assert len(changes.errors) == 3
    assert "patch_model inside generate of the same LlamaForCausalLM, which runs in this thread" in changes.errors[0]


def test_a_change_while_another_thread_generates_is_refused() -> None:
    model = tiny("llama")
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        done.wait(60)

    waits = LogitsProcessorList([Changes(wait)])
    thread = threading.Thread(target=lambda: model.generate(IDS, max_new_tokens=1, logits_processor=waits), name="busy")
    thread.start()
    inside.wait(60)
    try:
        with pytest.raises(ModelInUseError, match="inside generate .* runs in thread 'busy': .* Wait for its end"):
            patch_model(model, "alibi")
        patch_model(tiny("llama"), "alibi")  # which is another model
    finally:
        done.set()
        thread.join()
    patch_model(model, "alibi")


def learned(**changes: Any) -> Any:
    model = tiny("gpt2")
    return patch_model(model, **changes) if changes else model


WORKS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "fit_rotation": (
        lambda: learned(scheme="rope", partial=0.5, max_length=96),
        lambda model: hf_posswap.fit_rotation(model, IDS),
    ),
    "fit_bias": (learned, lambda model: hf_posswap.fit_bias(model, "alibi", IDS)),
    "centre_table": (learned, hf_posswap.centre_table),
    "rank_pairs": (lambda: tiny("llama"), lambda model: hf_posswap.rank_pairs(model, IDS)),
    "search_longrope": (
        lambda: tiny("llama"),
        lambda model: hf_posswap.search_longrope(
            model, torch.arange(256).view(2, -1) % 32, 2.0, population=8, iterations=1, progress=False
        ),
    ),
    "fit_logit_scale": (
        lambda: learned(scheme=hf_posswap.NoPE(logit_scale=0.0)),
        lambda model: hf_posswap.fit_logit_scale(model, torch.arange(256).view(2, -1) % 32, 96),
    ),
    "set_logit_scale": (
        lambda: learned(scheme=hf_posswap.NoPE(logit_scale=0.0)),
        lambda model: hf_posswap.set_logit_scale(model, 0.2),
    ),
    "set_blend": (
        lambda: learned(scheme=Blend(new=hf_posswap.Rope())),
        lambda model: hf_posswap.set_blend(model, 0.5),
    ),
    "finish_blend": (lambda: learned(scheme=Blend(new=hf_posswap.Rope(), weight=1.0)), finish_blend),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_changes_a_model_is_refused_while_another_thread_changes_or_runs_it(name: str) -> None:
    make, work = WORKS[name]
    model = make()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with changing(model, "patch_model"):
        error = in_a_thread(lambda: work(model))
    assert isinstance(error, ModelInUseError), error
    assert str(error).startswith(
        f"{name} overlaps patch_model of the same {type(model).__name__} in thread 'MainThread'"
    )
    errors: list[Any] = []
    handle = model.register_forward_hook(lambda *_: errors.append(in_a_thread(lambda: work(model))))
    logits(model)
    handle.remove()
    assert [type(one) for one in errors] == [ModelInUseError]
    assert str(errors[0]).startswith(f"{name} inside a forward of the same {type(model).__name__}")
    after = model.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    work(model)


@pytest.mark.parametrize(
    "name", [name for name in WORKS if name not in ("finish_blend", "set_blend", "set_logit_scale")]
)
def test_forwards_of_other_threads_are_refused_as_long_as_a_model_is_fitted(name: str) -> None:
    """A forward would compute a mechanism that the fit tries, and that is soon taken back."""
    make, work = WORKS[name]
    model = make()
    expected, seen = logits(model), list[Any]()

    def look(module: Any, arguments: Any, output: Any) -> None:
        if threading.current_thread() is threading.main_thread() and len(seen) < 6:
            seen.append(in_a_thread(lambda: logits(model)))

    handle = model.base_model.register_forward_hook(look)
    work(model)
    handle.remove()
    assert seen
    assert all(isinstance(one, ModelInUseError) for one in seen), seen
    if name not in ("fit_rotation", "centre_table"):
        assert torch.equal(logits(model), expected)


def test_a_model_is_held_while_its_thread_changes_another_one() -> None:
    model, other = tiny("llama"), tiny("llama")
    with changing(model, "fit_rotation"), changing(other, "unpatch_model"):
        error = in_a_thread(lambda: patch_model(model, "alibi"))
    assert "patch_model overlaps fit_rotation of the same" in str(error)
    patch_model(model, "alibi")


def test_shares_and_scales_are_set_under_inference_mode() -> None:
    model = learned(scheme=Blend(new=hf_posswap.Rope()))
    other = learned(scheme=hf_posswap.NoPE(logit_scale=0.0))
    with torch.inference_mode():
        hf_posswap.set_blend(model, 0.5)
        hf_posswap.set_logit_scale(other, 0.3)
        hf_posswap.centre_table(tiny("gpt2"))
    assert model.config.posswap["scheme"]["weight"] == 0.5


@pytest.mark.parametrize("scheme", ["rope", "learned"])
@pytest.mark.parametrize("name", ["DistilBertForMaskedLM", "PegasusForConditionalGeneration"])
def test_a_swapped_model_does_not_give_itself_a_new_table(name: str, scheme: str, tmp_path: Path) -> None:
    """Their own `resize_position_embeddings` would add a table to RoPE, or leave the swap's record behind."""
    model = patch_model(tiny_model(name, meta=False), scheme, max_length=64)
    save(model, tmp_path / "model")
    for swapped in (model, copy.deepcopy(model), load(tmp_path / "model")):
        for inner in (swapped, *(part for part in swapped.modules() if "resize_position_embeddings" in vars(part))):
            with pytest.raises(UnsupportedSwapError, match=f"carries a swap to {scheme}.*What works: unpatch_model"):
                inner.resize_position_embeddings(96)
        verify_swap(swapped)
    unpatch_model(model).resize_position_embeddings(96)
    assert model.config.max_position_embeddings == 96
