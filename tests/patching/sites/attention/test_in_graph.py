"""The ways inside of compiled graphs: chosen as in a call that is not compiled, and of the same numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import StaticCache

from hf_posswap import patch_model, set_backend
from hf_posswap.patching.sites.attention import backends, function
from hf_posswap.schemes.mechanism import Mechanism, numbered
from hf_posswap.testing.tiny import tiny_model
from tests.contract.pairs import words
from tests.patching.sites.attention.encoders import swapped_bert
from tests.patching.sites.attention.test_situations import (
    EXACT,
    IDS,
    LEFT,
    LENGTH,
    RIGHT,
    SITUATIONS,
    WAYS,
    by_formula,
    counted,
    llama,
    mistral,
    swapped,
    taken,
)
from tests.stock import with_cache

__all__ = ["taken"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("stock_compiles"),
    pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="before torch 2.7 graphs have the formula"),
]


def compiled(run: Callable[..., Any], backend: Any = "eager", **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend=backend, **options)


def real_of(arguments: dict[str, Any], ids: Tensor) -> Tensor:
    shown = arguments.get("attention_mask")
    return shown.bool() if shown is not None and shown.dim() == 2 else torch.ones_like(ids, dtype=torch.bool)


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("name", [*SITUATIONS])
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=lambda one: str(one))
def test_a_compiled_batch_equals_the_formula(
    scheme: str, options: dict[str, Any], way: str, name: str, make: Callable[[], Any], taken: list[str]
) -> None:
    arguments, model = SITUATIONS[name], swapped(make, scheme, options)
    ids = IDS if name != "packed" else IDS[:1]

    def run() -> Tensor:
        return model(ids, use_cache=False, **arguments).logits

    with torch.no_grad():
        expected = by_formula(model, run)
        set_backend(model, way)
        taken.clear()
        run()
        without, taken[:] = set(taken), []
        found = compiled(run)()
    assert set(taken) == without, "a graph takes the ways that a call takes"
    assert (found - expected)[real_of(arguments, ids)].abs().max() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS[::3], ids=lambda one: str(one))
def test_one_graph_of_a_padded_batch_takes_the_way(
    scheme: str, options: dict[str, Any], way: str, taken: list[str]
) -> None:
    model = swapped(llama, scheme, options)
    arguments = {"attention_mask": LEFT, "position_ids": counted(LEFT), "use_cache": False}
    with torch.no_grad():
        expected = by_formula(model, lambda: model(IDS, **arguments).logits)
        set_backend(model, way)
        taken.clear()
        found = compiled(lambda: model(IDS, **arguments).logits)()
    assert set(taken) == {way}
    assert (found - expected)[LEFT.bool()].abs().max() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["right, counted", "packed, block mask", "inside"])
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=lambda one: str(one))
def test_gradients_of_a_graph_are_the_formula_s(
    scheme: str, options: dict[str, Any], way: str, name: str, taken: list[str]
) -> None:
    arguments = SITUATIONS[name]
    model = swapped(llama, scheme, options).train()
    labels = IDS.masked_fill(~real_of(arguments, IDS) | ~real_of(arguments, IDS).roll(1, dims=1), -100)

    def gradients(run: Callable[..., Any]) -> dict[str, Tensor | None]:
        model.zero_grad()
        run(IDS, labels=labels, use_cache=False, **arguments).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = by_formula(model, lambda: gradients(model.forward))
    set_backend(model, way)
    taken.clear()
    found = gradients(compiled(model.forward, "aot_eager"))
    assert way in taken or name == "inside"
    for parameter, grad in expected.items():
        assert (found[parameter] is None) == (grad is None), parameter
        if grad is not None:
            scale = max(1.0, float(grad.abs().max()))
            assert (found[parameter] - grad).abs().max() < 1e-6 * scale, parameter


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["t5", "alibi", "alibi:learned=true"])
def test_gradients_are_those_of_the_model(scheme: str, taken: list[str]) -> None:
    """Of what is trained alone: a table that is frozen has none, and costs none."""
    model = swapped(llama, scheme, {}).train()
    set_backend(model, "hankel")
    for frozen in (False, True):
        for parameter in (p for m in model.modules() if isinstance(m, Mechanism) for p in m.parameters()):
            parameter.requires_grad_(not frozen)
        found = []
        for run in (model.forward, compiled(model.forward, "aot_eager")):
            model.zero_grad()
            run(IDS, labels=IDS, use_cache=False).loss.backward()
            found.append([p.grad for p in model.parameters()])
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours - theirs).abs().max() < EXACT
    assert set(taken) == {"hankel"}


@pytest.mark.slow
def test_a_graph_sees_learned_slopes_as_they_are_now(taken: list[str]) -> None:
    """Against calls that are not compiled, after steps of training, which write into the parameters."""
    model = swapped(llama, "alibi:learned=true", {}).train()
    optimizer = torch.optim.Adam((p for name, p in model.named_parameters() if "raw_slopes" in name), lr=0.5)
    trained = compiled(model.forward, "aot_eager")
    set_backend(model, "row")
    for _ in range(2):
        losses = [run(IDS, labels=IDS, use_cache=False).loss for run in (model.forward, trained)]
        assert abs(losses[0] - losses[1]) < EXACT
        optimizer.zero_grad()
        losses[1].backward()
        optimizer.step()
        with torch.no_grad():
            found, expected = (run(IDS, use_cache=False).logits for run in (trained, model.forward))
        assert (found - expected).abs().max() < EXACT
    assert "row" in taken


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["alibi", "self_extend"])
def test_two_graphs_are_for_all_lengths(scheme: str) -> None:
    """One for the first, one for all that follow, also where an eager call changes its way."""
    model, counter = swapped(llama, scheme, {}).float(), CompileCounter()
    run = compiled(lambda ids: model(ids, use_cache=False).logits, counter)
    with torch.no_grad():
        for length in (10, 40, 300, 700):
            ids = (torch.arange(length) % 61 + 3)[None]
            assert (run(ids) - model(ids, use_cache=False).logits).abs().max() < 1e-3
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "way"), [("alibi", "row"), ("self_extend", "merge")])
def test_chunks_upon_a_static_cache_equal_the_whole(scheme: str, way: str, taken: list[str]) -> None:
    model = swapped(llama, scheme, {})
    positions = counted(LEFT)
    with torch.no_grad():
        arguments = {"attention_mask": LEFT, "position_ids": positions}
        expected = by_formula(model, lambda: model(IDS, use_cache=False, **arguments).logits)
        set_backend(model, way)
        run = compiled(model.forward)
        cache, logits = StaticCache(config=model.config, max_cache_len=LENGTH + 6), []
        for start, stop in ((0, 13), (13, 14), (14, LENGTH)):
            taken.clear()
            logits.append(run(
                IDS[:, start:stop], attention_mask=LEFT[:, :stop], position_ids=positions[:, start:stop],
                **with_cache(model, cache), use_cache=True,
            ).logits)  # fmt: skip
            assert set(taken) == ({way} if stop - start > 1 else set())
    assert (torch.cat(logits, dim=1) - expected)[LEFT.bool()].abs().max() < EXACT


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_steps_of_generate_upon_a_static_cache_have_one_graph(scheme: str) -> None:
    """Each step brings another mask: a graph that knew its mask again would be made anew in each."""
    torch._dynamo.reset()
    model: Any = patch_model(tiny_model("llama", meta=False), scheme, max_length=64)
    ids, counter = words(2, 12), CompileCounter()
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **given)
    model.compile(backend=counter, fullgraph=True)
    assert torch.equal(model.generate(ids, cache_implementation="static", **given), expected)
    assert counter.frame_count == 2  # of the prompt, and of all steps


@pytest.mark.parametrize(
    ("scheme", "length", "held"),
    [("alibi", 2047, False), ("alibi", 2048, True), ("t5", 2048, True), ("self_extend", 511, False),
     ("self_extend", 512, True), ("fire", 2048, None)],
)  # fmt: skip
def test_a_graph_for_a_gpu_holds_it_where_another_way_gains(
    scheme: str, length: int, held: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter texts have a graph with the formula there, and so have those of a torch whose CUDA graphs take all in."""
    model, seen = swapped(llama, scheme, {}), list[Any]()
    real = function.attend_by_backend

    def attend(call: Any, request: Any) -> Tensor | None:
        seen.append(request)
        return real(call, request)

    monkeypatch.setattr(function, "attend_by_backend", attend)
    with torch.no_grad():
        model(torch.full((1, length), 5), use_cache=False)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    request = seen[0]
    assert function._is_held(request, "cuda") == bool(held)
    assert function._is_held(request, "cpu")
    for way in ("plain", "flex", "merge", "chunked"):
        if way in backends.backends_of(request.mechanism):
            set_backend(model, way)
            assert function._is_held(request, "cuda") == (held is not None and way in backends.ON_GPU)
    set_backend(model, "auto")
    monkeypatch.setattr(function, "UNCAPTURED", {})
    assert not function._is_held(request, "cuda")


@pytest.mark.slow
def test_a_compiled_encoder_sees_both_sides(taken: list[str]) -> None:
    model = swapped_bert("t5")
    with torch.no_grad():
        expected = by_formula(model, lambda: model(IDS, attention_mask=RIGHT).last_hidden_state)
        set_backend(model, "hankel")
        taken.clear()
        found = compiled(lambda: model(IDS, attention_mask=RIGHT).last_hidden_state)()
    assert set(taken) == {"hankel"}
    assert (found - expected)[RIGHT.bool()].abs().max() < EXACT


@pytest.mark.slow
def test_a_copy_is_found_by_a_number_of_its_own() -> None:
    """Else a graph that was compiled for one would compute the other with its table."""
    model = swapped(llama, "t5", {"init_std": 1.0})
    run = compiled(lambda model: model(IDS, use_cache=False).logits)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for number, one in enumerate(copies):
            mechanism = next(m for m in one.modules() if isinstance(m, Mechanism))
            assert numbered(mechanism.number) is mechanism
            for parameter in mechanism.parameters():
                parameter.mul_(number + 1)
        for one in copies:
            assert (run(one) - model_logits(one)).abs().max() < EXACT


def model_logits(model: Any) -> Tensor:
    return by_formula(model, lambda: model(IDS, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_a_functional_call_are_those_that_count(frozen: bool) -> None:
    """Also where the module's own are frozen: in a graph theirs had gradients of zeros then."""
    model = swapped(llama, "t5", {"init_std": 1.0}).train().requires_grad_(not frozen)
    other = {name: 2 * p.detach() for name, p in model.named_parameters() if "posswap" in name}
    for parameter in other.values():
        parameter.requires_grad_()

    def loss() -> Tensor:
        return torch.func.functional_call(model, other, (IDS,), {"use_cache": False}).logits.square().mean()

    expected = by_formula(model, lambda: torch.autograd.grad(loss(), [*other.values()]))
    found = torch.autograd.grad(compiled(loss, "aot_eager")(), [*other.values()])
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "way"), [("alibi", "row"), ("t5", "hankel"), ("self_extend", "merge")])
def test_mixed_precision_is_that_of_a_call(scheme: str, way: str) -> None:
    model = swapped(llama, scheme, {}).float()
    set_backend(model, way)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(IDS, attention_mask=LEFT, use_cache=False).logits

    with torch.no_grad():
        exact = model(IDS, attention_mask=LEFT, use_cache=False).logits
        ours, theirs = ((found - exact)[LEFT.bool()].abs().mean() for found in (compiled(run)(), run()))
    assert ours < 2 * theirs


def test_an_exported_graph_runs_without_this_package() -> None:
    model = swapped(llama, "alibi", {})
    exported = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    assert function.OPERATOR not in str(exported.graph).replace(".", "::")
    with torch.no_grad():
        found = exported.module()(input_ids=IDS, use_cache=False).logits
        assert (found - model(IDS, use_cache=False).logits).abs().max() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "strict"),
    [("self_extend", False), ("rerope", False), ("rerope", True), ("leaky_rerope", False), ("dual_chunk", False)],
)
def test_an_exported_graph_of_split_scores_is_for_every_length(scheme: str, strict: bool) -> None:
    model = swapped(llama, scheme, {})
    arguments = {"input_ids": IDS, "attention_mask": LEFT, "use_cache": False}
    length = torch.export.Dim("length")
    shapes: dict[str, Any] = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    sizes = (2, LENGTH - 1, LENGTH, 300)  # of which the last is more than a block of queries
    texts = [IDS.repeat(1, 300 // LENGTH + 1)[:, :size] for size in sizes]
    masks = [(torch.arange(ids.shape[1]) > 0).long().expand(len(ids), -1) for ids in texts]
    with torch.no_grad():
        expected = [
            model(ids, attention_mask=shown, use_cache=False).logits for ids, shown in zip(texts, masks, strict=True)
        ]
        program = torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict).module()
        for ids, shown, logits in zip(texts, masks, expected, strict=True):
            found = program(input_ids=ids, attention_mask=shown, use_cache=False).logits
            assert (found - logits)[:, 1:].abs().max() < EXACT
            assert torch.equal(model(ids, attention_mask=shown, use_cache=False).logits, logits)


@pytest.mark.parametrize("scheme", ["rope", "yarn", "xpos", "dual_chunk", "alibi"])
def test_a_model_that_was_exported_is_as_it_was(scheme: str) -> None:
    """torch.export takes the attributes of a model apart, and puts them together again."""
    model = swapped(llama, scheme, {})
    positions = torch.arange(LENGTH)[None] + (2**14 if scheme == "xpos" else 2**20)
    with torch.no_grad():
        expected = model(IDS, position_ids=positions, use_cache=False).logits
        torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
        assert torch.equal(model(IDS, position_ids=positions, use_cache=False).logits, expected)


@pytest.mark.slow
def test_another_implementation_has_the_formula() -> None:
    model = swapped(llama, "alibi", {})
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(IDS, use_cache=False).logits
        found = compiled(lambda: model(IDS, use_cache=False).logits)()
    assert (found - expected).abs().max() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["alibi", "self_extend"])
def test_a_transform_of_torch_func_has_the_formula(scheme: str) -> None:
    model = swapped(llama, scheme, {})
    embedded = model.get_input_embeddings()(IDS).detach()

    def loss(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, use_cache=False).logits.square().mean()

    expected = torch.func.grad(loss)(embedded)
    assert (compiled(torch.func.grad(loss))(embedded) - expected).abs().max() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["alibi", "self_extend"])
def test_layers_that_are_compiled_one_by_one_share_their_graphs(scheme: str) -> None:
    """One of the first length, one of all others: as many layers as a model may have would pass dynamo's limit."""
    model, counter = swapped(llama, scheme, {}), CompileCounter()
    expected = model_logits(model)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    with torch.no_grad():
        model(IDS[:, :30], use_cache=False)
        assert (model(IDS, use_cache=False).logits - expected).abs().max() < EXACT
    assert counter.frame_count == 2


@pytest.mark.slow
def test_a_layer_that_runs_again_in_the_backward_has_the_same_gradients() -> None:
    model = swapped(llama, "t5", {"init_std": 1.0}).train()
    set_backend(model, "hankel")

    def gradients(run: Callable[..., Any]) -> list[Tensor | None]:
        model.zero_grad()
        run(IDS, labels=IDS, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(model.forward)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    torch._dynamo.reset()
    found = gradients(torch.compile(model.forward, backend="aot_eager"))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours - theirs).abs().max() < 1e-6 * max(1.0, float(theirs.abs().max()))
