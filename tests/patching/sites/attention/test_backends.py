"""Whole models under every backend: in float64 against the plain formula, and what is chosen when."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_posswap import Alibi, Blend, NoPE, PerLayer, patch_model, plan_swap, set_backend
from hf_posswap.errors import BackendWarning, NotPatchedError, OptionError, UnsupportedSwapError
from hf_posswap.kernels import fused
from hf_posswap.patching.sites.attention import backends
from hf_posswap.patching.sites.attention.backends import backends_of
from hf_posswap.schemes.dynamic import Dynamic
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import standing_for
from tests.contract.models import build
from tests.contract.pairs import NOISE, gap, logits, words
from tests.patching.sites.attention.encoders import swapped_bert
from tests.stock import cache_in, with_cache

LENGTH = 70
EXACT = 1e-11
"""Between logits of float64 models whose sums run in another order."""
WAYS = [
    *(("alibi", {}, way) for way in ("row", "row_windowed", "hankel", "chunked")),
    *(("alibi", {"learned": True}, way) for way in ("hankel", "chunked")),
    *(("t5", {"init_std": 1.0}, way) for way in ("hankel", "chunked")),
    *(("kerple", {"variant": variant}, way) for variant in ("log", "power") for way in ("hankel", "chunked")),
    ("fire", {}, "chunked"),
    *((name, {}, "merge") for name in ("self_extend", "rerope", "leaky_rerope", "dual_chunk")),
    ("rerope", {"log_scaling": True}, "merge"),
    ("string", {"original_length": 128}, "merge"),
    *((Blend(new=Alibi(), weight=0.5), {}, way) for way in ("row", "hankel", "chunked")),
    (PerLayer(layers={0: "alibi", 1: "self_extend"}), {}, "row"),
    (PerLayer(layers={0: "t5", 1: "dual_chunk"}), {}, "merge"),
    *(("dynamic", {"follow": "query", "factor": 4.0, "step": step}, "merge") for step in (None, 5)),
    (PerLayer(layers={n: Dynamic(follow="query", factor=4.0, step=5 + n) for n in (0, 1)}), {}, "merge"),
    (PerLayer(layers={0: "dual_chunk", 1: "self_extend"}), {}, "merge"),
]  # fmt: skip
IDS = torch.arange(2 * LENGTH).view(2, LENGTH).mul(7).remainder(61) + 3


class Spy:
    """Notes which backend each call took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[str] = []
        real = backends.choose

        def choose(request: Any) -> str:
            self.taken.append(real(request))
            return self.taken[-1]

        monkeypatch.setattr(backends, "choose", choose)

    def seen(self) -> set[str]:
        taken, self.taken = set(self.taken), []
        return taken


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def gpt2(positions: int = 32) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=positions, initializer_range=0.3, bos_token_id=0,
        eos_token_id=1, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().eval()


def swapped(scheme: Any, options: dict[str, Any]) -> Any:
    model = gpt2(128 if isinstance(scheme, Blend) else 32)  # a table that fades cannot be longer than it is
    patch_model(model, scheme, max_length=128, **options)
    for name, parameter in model.named_parameters():
        if "posswap" in name:  # float32, as it was made; seen in float64 the comparison is of the mathematics
            parameter.data = parameter.data.double()
    return model


def run(model: Any, backend: str, **arguments: Any) -> Tensor:
    set_backend(model, backend)
    with torch.no_grad():
        return model(IDS, **arguments).logits


@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=str)
def test_it_equals_the_formula(scheme: Any, options: dict[str, Any], way: str, spy: Spy) -> None:
    model = swapped(scheme, options)
    expected = run(model, "plain")
    assert spy.seen() == {"plain"}
    found = run(model, way)
    assert way in spy.seen()
    assert (found - expected).abs().max() < EXACT
    model.set_attn_implementation("eager")
    assert (run(model, way) - expected).abs().max() < EXACT
    assert spy.seen() == {"plain"}, "eager is the formula, whatever the backend"


@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=str)
def test_gradients_equal_the_formula_s(scheme: Any, options: dict[str, Any], way: str, spy: Spy) -> None:
    model = swapped(scheme, options).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    grads = []
    for backend in ("plain", way):
        set_backend(model, backend)
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert way in spy.seen()
    assert len(grads[0]) > 10
    for name, expected in grads[0].items():
        assert (grads[1][name] is None) == (expected is None), name
        if expected is not None:
            scale = max(1.0, float(expected.abs().max()))
            assert (grads[1][name] - expected).abs().max() < 1e-6 * scale, name  # c, M and the slopes are float32


@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=str)
def test_padding_packing_and_a_cache_are_exact_too(scheme: Any, options: dict[str, Any], way: str, spy: Spy) -> None:
    model = swapped(scheme, options)
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    packed = torch.cat([torch.arange(30), torch.arange(LENGTH - 30)])[None]
    holes = torch.arange(LENGTH)[None] + 20 * (torch.arange(LENGTH) >= 40)
    for arguments, taken in (
        ({"attention_mask": mask}, way),
        ({"position_ids": packed, "use_cache": False}, way),
        # positions that jump where nothing is masked are for the formula
        ({"position_ids": holes, "attention_mask": torch.ones_like(IDS)}, "chunked" if way == "chunked" else "plain"),
    ):
        expected = run(model, "plain", **arguments)
        spy.seen()
        found = run(model, way, **arguments)
        assert taken in spy.seen()
        seen = arguments.get("attention_mask", mask).bool()
        assert (found - expected)[seen].abs().max() < EXACT
    whole = run(model, way)
    with torch.no_grad():
        first = model(IDS[:, :40], use_cache=True)
        spy.seen()
        second = model(IDS[:, 40:69], **with_cache(model, cache_in(first)))
        assert way in spy.seen()
        last = model(IDS[:, 69:], **with_cache(model, cache_in(second)))
    steps = torch.cat([first.logits, second.logits, last.logits], dim=1)
    assert (steps - whole).abs().max() < EXACT


@pytest.mark.parametrize("scheme", ["alibi", "t5", "kerple", "fire"])
def test_an_encoder_sees_both_sides(scheme: str, spy: Spy) -> None:
    model = swapped_bert(scheme)
    with torch.no_grad():
        set_backend(model, "plain")
        expected = model(IDS).last_hidden_state
        for way in ("hankel", "chunked") if scheme != "fire" else ("chunked",):
            set_backend(model, way)
            spy.seen()
            assert (model(IDS).last_hidden_state - expected).abs().max() < EXACT
            assert spy.seen() == {way}


def test_grouped_heads_equal_the_plain_formula(spy: Spy) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    for scheme, way in (("alibi", "row"), ("alibi", "hankel"), ("fire", "chunked"), ("dual_chunk", "merge")):
        model = LlamaForCausalLM(config).eval()
        patch_model(model, scheme, max_length=128)
        expected = run(model, "plain")
        spy.seen()
        assert (run(model, way) - expected).abs().max() < 5e-5  # its norms are float32
        assert spy.seen() == {way}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("scheme", "options", "way"), [one for one in WAYS if isinstance(one[0], str)], ids=str)
def test_mixed_precision_takes_the_same_way(
    scheme: str, options: dict[str, Any], way: str, half: torch.dtype, spy: Spy
) -> None:
    """There a rotation widens queries and keys, the values stay narrow where no cache widens them too."""
    stock, model = build("llama"), build("llama")
    patch_model(model, scheme, max_length=128, **options)
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    for arguments in ({}, {"use_cache": False}, {"use_cache": False, "attention_mask": mask}):
        usual = rounding_of(stock, half, arguments)
        exact = run(model, "plain", **arguments)
        spy.seen()
        with torch.autocast("cpu", half):
            found, plain = run(model, way, **arguments), run(model, "plain", **arguments)
        assert spy.taken[: len(spy.taken) // 2] == [way] * (len(spy.taken) // 2)
        seen = arguments.get("attention_mask", torch.ones_like(IDS)).bool()
        assert found.dtype == plain.dtype == half
        assert torch.isfinite(found).all()
        assert torch.isfinite(plain).all()
        for one in (found, plain):
            assert (one.float() - exact)[seen].abs().max() < 3 * usual + 0.02


def rounding_of(model: Any, half: torch.dtype, arguments: dict[str, Any]) -> float:
    """Return by how much the logits of `model` differ in mixed precision."""
    with torch.no_grad():
        exact = model(IDS, **arguments).logits
        with torch.autocast("cpu", half):
            found = model(IDS, **arguments).logits.float()
    seen = arguments.get("attention_mask", torch.ones_like(IDS)).bool()
    return float((found - exact)[seen].abs().max())


@pytest.mark.parametrize(("scheme", "way"), [("t5", "hankel"), ("fire", "chunked"), ("self_extend", "merge")])
def test_a_backward_inside_autocast_is_that_outside(scheme: str, way: str, spy: Spy) -> None:
    model = build("llama")
    patch_model(model, scheme, max_length=128)
    set_backend(model, way)
    grads = []
    for inside in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(IDS, labels=IDS, use_cache=False).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert spy.seen() == {way}
    assert len(grads[0]) > 10
    for name, expected in grads[0].items():
        assert torch.equal(grads[1][name], expected), name


def test_auto_takes_the_fastest_from_a_length_on(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"alibi": "row", "t5": "hankel", "kerple": "hankel", "fire": "chunked", "rerope": "merge"}
    for scheme, way in wanted.items():
        model = swapped(scheme, {})
        expected = run(model, "auto")
        assert spy.seen() == {"plain"}
        monkeypatch.setattr(backends, "MIN_QK_PAIRS", LENGTH**2)
        assert (run(model, "auto") - expected).abs().max() < EXACT
        assert spy.seen() == {way}
        run(model, "auto", attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0))
        assert spy.seen() == {way}
        run(model, "auto", attention_mask=torch.ones_like(IDS).index_fill(1, torch.arange(9, 12), 0))
        assert spy.seen() == ({"chunked"} if scheme == "fire" else {"plain"}), "padding inside leaves gaps"
        monkeypatch.undo()
        spy.__init__(monkeypatch)  # type: ignore[misc]


def test_two_lists_of_longrope_merge_by_query(spy: Spy) -> None:
    model = swapped("longrope", {"follow": "query", "long_factor": [2.0, 3.0, 4.0, 5.0]})
    for mask in (None, torch.ones_like(IDS).index_fill(1, torch.arange(9), 0)):
        expected = run(model, "plain", attention_mask=mask)
        spy.seen()
        assert (run(model, "merge", attention_mask=mask) - expected)[:, 9:].abs().max() < EXACT  # pads see nothing
        assert spy.seen() == {"merge"}


def test_dropout_is_honoured_by_the_plain_way(spy: Spy) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=32, n_layer=1, n_head=4, n_positions=32, attn_pdrop=0.9))
    patch_model(model, "alibi", max_length=128)
    model.train()
    set_backend(model, "row")
    assert (model(IDS).logits - model(IDS).logits).abs().max() > 1e-3
    assert spy.seen() == {"plain"}


@pytest.mark.slow
@pytest.mark.usefixtures("stock_compiles")
def test_a_compiled_model_is_one_graph_still() -> None:
    model = swapped("alibi", {})
    set_backend(model, "row")
    torch._dynamo.reset()
    forward = torch.compile(lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert (forward(IDS) - model(IDS).logits).abs().max() < EXACT


@pytest.mark.parametrize("way", ["plain", "row", "row_windowed", "hankel", "chunked"])
def test_learned_slopes_are_seen_as_they_are_now(way: str, spy: Spy) -> None:
    """Against ALiBi of the same numbers, before and after steps of training, which write into the parameters."""
    model = swapped("alibi", {"learned": True})
    mechanism = next(module for module in model.modules() if isinstance(module, Mechanism))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    outputs = []
    for _ in range(3):
        constant = Alibi(slopes=tuple(mechanism.slopes.tolist()))
        twin = gpt2()
        patch_model(twin, constant, max_length=128)
        twin.load_state_dict({name: x for name, x in model.state_dict().items() if "posswap" not in name})
        spy.seen()
        outputs.append(run(model, way))
        assert spy.seen() == {way}
        assert torch.equal(outputs[-1], run(twin, way))
        spy.seen()
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        assert spy.seen() == {"plain" if "row" in way else way}, "the calls of rows give slopes no gradient"
        assert mechanism.raw_slopes.grad.abs().min() > 0
        optimizer.step()
    assert min((a - b).abs().max() for a, b in zip(outputs, outputs[1:], strict=False)) > 1e-3


def test_learned_slopes_that_are_frozen_take_the_way_of_constants(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "MIN_QK_PAIRS", LENGTH**2)
    model = swapped("alibi", {"learned": True})
    for frozen, way in ((False, "hankel"), (True, "row")):
        for mechanism in (module for module in model.modules() if isinstance(module, Mechanism)):
            mechanism.requires_grad_(not frozen)
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        assert spy.seen() == {way}
        with torch.no_grad():
            model(IDS)
        assert spy.seen() == {"row"}


def test_an_unknown_torch_takes_the_plain_way_with_one_warning(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = swapped("alibi", {})
    expected = run(model, "plain")
    monkeypatch.setattr(fused, "forward", lambda *args, **kwargs: 1 / 0)
    fused.available.cache_clear()
    spy.seen()
    try:
        with pytest.warns(BackendWarning, match=r"fused attention does not work on torch .*ZeroDivisionError") as told:
            found = [run(model, "row") for _ in range(2)]
    finally:
        fused.available.cache_clear()
    assert len(told) == 1
    assert spy.seen() == {"plain"}
    assert all(torch.equal(one, expected) for one in found)


def test_a_kernel_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fused.backward
    monkeypatch.setattr(fused, "backward", lambda *args, **kwargs: tuple(1.01 * x for x in real(*args, **kwargs)))
    fused.available.cache_clear()
    try:
        with pytest.warns(BackendWarning, match="its results differ from the formula by .*The plain paths are used"):
            assert not fused.available()
    finally:
        monkeypatch.undo()
        fused.available.cache_clear()
    assert fused.available()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_a_kernel_is_tried_rightly_by_a_first_call_in_mixed_precision(half: torch.dtype) -> None:
    fused.available.cache_clear()
    with torch.autocast("cpu", half):
        assert fused.available()


def test_the_choice_goes_with_copies() -> None:
    model = swapped("alibi", {})
    set_backend(model, "row")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {m.backend for m in twin.modules() if isinstance(m, Mechanism)} == {"row"}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(NotPatchedError, match=r"GPT2LMHeadModel carries no scheme inside attention.*patch_model first"):
        set_backend(gpt2(), "plain")
    model = swapped("t5", {})
    with pytest.raises(OptionError, match=r"no backend .quick.. There are: auto, row, row_windowed, hankel, flex"):
        set_backend(model, "quick")
    with pytest.raises(UnsupportedSwapError, match=r"cannot be computed by 'row'.*auto, hankel, flex, chunked, plain"):
        set_backend(model, "row")
    assert {m.backend for m in model.modules() if isinstance(m, Mechanism)} == {"auto"}


def test_what_each_scheme_has() -> None:
    ways = {}
    for scheme in ("rope", "fire", "dual_chunk", "t5"):
        model = gpt2()
        patch_model(model, scheme, max_length=64)
        (mechanism,) = (m for m in model.modules() if isinstance(m, Mechanism))
        ways[scheme] = backends_of(mechanism)
    t5 = ("hankel", "flex", "chunked", "plain")
    assert ways == {
        "rope": (), "fire": ("chunked", "plain"), "dual_chunk": ("merge", "flex", "plain"), "t5": t5,
    }  # fmt: skip
    assert backends_of(NoPE(logit_scale=0.1, original_length=8).mechanism(None)) == ()  # type: ignore[arg-type]


def test_a_plan_says_how_attention_will_be_computed() -> None:
    def said(scheme: Any) -> str:
        lines = str(plan_swap(gpt2(), scheme, max_length=64)).splitlines()
        return "\n".join(line.split(None, 1)[1] for line in lines if line.startswith("backend "))

    assert said("rope") == said("nope") == said("learned") == "", "the model's own attention"
    assert said("alibi").startswith("row: the bias as one number a key, in a fused kernel (sdpa on a CPU, 512 tokens")
    assert "512 tokens and more, padded, packed or upon a cache too, unless masks have gaps or positions jump)" in said(
        "rerope"
    )
    assert said("fire").endswith("; else plain; see set_backend")
    assert said("t5").startswith("hankel: ")
    assert "; flex on a GPU, 2048 tokens and more; else chunked or plain" in said("t5")
    mixed = said(PerLayer(layers={0: "alibi", 1: "rerope"}))
    assert [line.split(":")[0] for line in mixed.splitlines()] == ["row", "merge"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "self_extend"])
def test_two_graphs_serve_all_lengths_as_of_the_stock_model(scheme: str | None) -> None:
    """One for the first length, one for all that follow."""
    torch._dynamo.reset()
    model, counter = build("llama", num_hidden_layers=1), CompileCounter()
    if scheme is not None:
        patch_model(model, scheme, max_length=64)
    run = torch.compile(model, backend=counter, fullgraph=True)
    for length in (10, 17, 23):
        ids = words(1, length)
        assert gap(logits(run, ids, use_cache=False), logits(model, ids, use_cache=False)) < NOISE
    assert counter.frame_count == 2


def test_a_settled_bias_is_attended_apart_in_one_whole_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, for which the tensors of a CPU stand here; its call is replaced by the formula."""
    taken: list[int] = []

    def by_formula(query: Tensor, key: Tensor, value: Tensor, line: Tensor, *, scaling: float) -> Tensor:
        taken.append(line.shape[1])
        keys, values = (x.repeat_interleave(2, dim=1) for x in (key, value))
        apart = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
        scores = query @ keys.mT * scaling + line[:, apart.clamp(0, line.shape[1] - 1)]
        return scores.masked_fill(apart < 0, -torch.inf).softmax(-1) @ values

    def read(query: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        taken.append(0)
        return torch.zeros_like(query)

    monkeypatch.setattr(backends, "attend_settled", by_formula)
    monkeypatch.setattr(backends, "attend_read", read)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    patch_model(model, "t5", num_buckets=8, max_distance=8, init_std=1.0)
    ids = torch.arange(160).view(2, 80).mul(7).remainder(61) + 3
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        set_backend(model, "flex")
        with standing_for("cuda"):
            for start in (0, 5):
                at = torch.arange(start, start + 80)[None]
                found = model(ids, position_ids=at, use_cache=False).logits
                assert taken == [9, 9]
                assert (found - expected).abs().max() < 1e-4
                taken.clear()
            packed = torch.arange(80).remainder(40)[None]
            for given in ({"position_ids": packed}, {"position_ids": torch.arange(80)[None] * 2}):
                model(ids, use_cache=False, **given)
            assert 9 not in taken
            model(ids[:, :63], use_cache=False)  # fewer than eight times 8
            assert 9 not in taken
            mask = torch.ones_like(ids)
            mask[0, :5] = 0
            model(ids, attention_mask=mask, use_cache=False)
            assert 9 not in taken


@pytest.mark.parametrize("scheme", ["kerple", "t5", "fire"])
def test_layers_that_need_gradients_share_nothing_with_layers_that_run_without(scheme: str) -> None:
    """Reentrant checkpointing runs a layer without gradients first, and other layers of the model may need them."""
    gradients = []
    for checkpointed in (False, True):
        model = patch_model(build("llama"), scheme).train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        if checkpointed:
            enable({"use_reentrant": True})
            model.enable_input_require_grads()
            model.model.layers[1].gradient_checkpointing = False
        model(input_ids=IDS[:, :20], labels=IDS[:, :20], use_cache=False).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.model.posswap.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_gradients_of_far_keys_are_exact_whatever_the_size_of_the_loss(learned: bool, scale: float) -> None:
    """Their weights are subnormal numbers in float32, and some are computed larger; the oracle is float64."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=1, max_position_embeddings=2048, initializer_range=0.2, **shape
    )
    model = patch_model(LlamaForCausalLM(config), Alibi(learned=learned))
    ids, mask = torch.randint(0, 64, (2, 1200)), torch.ones(2, 1200, dtype=torch.long)
    mask[0, :200] = 0
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)  # what a pad predicts counts nowhere

    def gradients(model: Any, backend: str) -> Tensor:
        set_backend(model, backend)
        loss = model(ids, attention_mask=mask, labels=labels).loss * scale
        grads = torch.autograd.grad(loss, [*model.parameters()])
        return torch.cat([grad.double().flatten() / scale for grad in grads])

    exact = gradients(copy.deepcopy(model).double(), "plain")
    error, allowed = ((gradients(model, backend) - exact).norm() for backend in ("auto", "plain"))
    rounded = 0.0 if learned else 2**-15 * exact.norm()  # m j of steep heads, which reaches 256 within a block
    assert error <= 4 * allowed + rounded
