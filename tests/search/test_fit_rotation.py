"""Rotations fitted to what a learned table does, against a model whose table does just what a rotation can."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import hf_posswap
from hf_posswap import Yarn, centre_table, fit_rotation, patch_model, unpatch_model, verify_swap
from hf_posswap.checkpoints.adapters import write_sidecars
from hf_posswap.errors import DataError, NotPatchedError, PosswapError, SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.training.distill import make_teacher
from hf_posswap.training.search.rotation import find_projections
from tests.search.test_fit_bias import attention, by_distance

WORDS, LENGTH, FAR, HEADS, WIDTH = 13, 24, 96, 2, 8
BASE, PARTIAL = 30.0, 0.5
THETA = [BASE ** (-2 * pair / (WIDTH * PARTIAL)) for pair in range(2)]
PLACES = 8  # dimensions of the states that hold positions, the last ones
FAINT = 0.01  # so small that the norms of states do not feel them


def waves(length: int) -> Tensor:
    """Return what a rotation's bias is made of, of each angle, and the negatives, so that rows sum to 0."""
    turns = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor(THETA, dtype=torch.float64)
    half = torch.cat([turns.cos(), turns.sin()], dim=1)
    return FAINT * torch.cat([half, -half], dim=1)


def exact_model(length: int = LENGTH, *, positions: float = 1.0) -> GPT2LMHeadModel:
    """Return a GPT-2 of one layer in which words meet words and places meet places.

    A head scores content in dimensions 0 to 3, and the distance in 4 to 7: sums of cos(theta (i - j) - phi), with other
    amplitudes and phases in each head. Nothing else reads the places.
    """
    source = torch.Generator().manual_seed(1)
    width = HEADS * WIDTH
    config = GPT2Config(
        n_layer=1, n_head=HEADS, n_embd=2 * width, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=1, eos_token_id=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = GPT2LMHeadModel(config).eval()
    size, head_dim = 2 * width, 2 * WIDTH
    words = size - PLACES
    signs = torch.stack([torch.randperm(words, generator=source) for _ in range(WORDS)])
    attention = model.transformer.h[0].attn
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wte.weight[:, :words] = torch.where(signs < words // 2, 1.0, -1.0)  # all of one norm, mean 0
        table = torch.zeros(length, size)
        table[:, words:] = positions * waves(length)
        model.transformer.wpe = torch.nn.Embedding.from_pretrained(table, freeze=False)
        config.n_positions = length
        weight = attention.c_attn.weight.view(size, 3, HEADS, head_dim)
        weight.normal_(std=0.1, generator=source)
        weight[words:] = 0.0
        weight[:, :2, :, 4:] = 0.0
        for head in range(HEADS):
            for pair in range(2):
                cos, sin, first = words + pair, words + 2 + pair, 4 + 2 * pair
                amplitude, phase = (
                    torch.tensor((2.0 + head + pair) / FAINT**2),
                    torch.tensor(0.7 * (1 + head + 2 * pair)),
                )
                weight[cos, 0, head, first], weight[sin, 0, head, first + 1] = (amplitude.sqrt(),) * 2
                for column, (on_cos, on_sin) in enumerate(((phase.cos(), -phase.sin()), (phase.sin(), phase.cos()))):
                    weight[cos, 1, head, first + column] = amplitude.sqrt() * on_cos
                    weight[sin, 1, head, first + column] = amplitude.sqrt() * on_sin
        model.transformer.h[0].mlp.c_fc.weight[words:] = 0.0
    return model


def texts(rows: int = 6, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(5))


def swapped(model: Any, **options: Any) -> Any:
    return patch_model(model, "rope", base=BASE, **({"partial": PARTIAL, "max_length": FAR} | options))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.log_softmax(dim=-1)


def test_a_table_that_does_what_a_rotation_can_is_replaced_by_one() -> None:
    base, model = exact_model(), swapped(exact_model(), max_length=LENGTH)
    ids = texts(2)
    plain = (logits(model, ids) - logits(base, ids)).abs().max()
    longer = texts(1, FAR)
    unfitted = logits(model, longer)
    fit = fit_rotation(model, texts())
    assert torch.tensor(fit.explained).min() > 0.9999
    assert torch.tensor(fit.dropped).max() < 1e-6
    assert (logits(model, ids) - logits(base, ids)).abs().max() < 0.03 * plain
    extended = logits(exact_model(FAR), longer)  # what the base would be with more of the same table
    assert (logits(model, longer) - extended).abs().max() < 0.25 * (unfitted - extended).abs().max()
    verify_swap(model)


def test_each_block_reads_a_text_once_with_the_table_and_once_while_layers_are_fitted() -> None:
    model, rows, count = random_model("gpt2"), 6, [0, 0]
    for layer, block in enumerate(model.transformer.h):

        def note(module: Any, args: tuple[Tensor, ...], layer: int = layer) -> None:
            count[layer] += args[0].shape[1] == LENGTH

        block.mlp.register_forward_pre_hook(note)
    fit_rotation(swapped(model), texts(rows))
    assert count == [2 * rows, rows], "a read of the last layer ends at its attention"


def test_without_a_table_to_speak_of_content_is_matched_as_it_was() -> None:
    base, model = exact_model(positions=0.0), swapped(exact_model(positions=0.0))
    fit_rotation(model, texts())
    longer = texts(1, FAR)
    torch.testing.assert_close(
        logits(model, longer), logits(exact_model(FAR, positions=0.0), longer), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(logits(model, texts()), logits(base, texts()), atol=1e-3, rtol=0)


@torch.no_grad()
def test_what_is_explained_is_the_share_of_the_variance_and_no_constant() -> None:
    base = random_model("gpt2").double()
    base.set_attn_implementation("eager")
    model = copy.deepcopy(base)
    fit = fit_rotation(swapped(model, max_length=4 * LENGTH), texts())
    rows, distances = [text.numpy() for text in texts()], np.arange(LENGTH)
    width, scaling = 8, 8**-0.5
    bias = model.transformer.h[0].attn.c_attn.bias.view(3, 4, width)
    theta = torch.tensor([BASE ** (-2 * pair / 4) for pair in range(2)], dtype=torch.float64)
    turns = -torch.tensor(distances, dtype=torch.float64)[:, None] * theta  # [N, 2]
    for head in range(4):
        (q1, q2), (k1, k2) = (bias[part, head, :4].view(2, 2) for part in (0, 1))
        cos, sin = turns.cos(), turns.sin()
        found = (scaling * (q1 * (cos * k1 - sin * k2) + q2 * (sin * k1 + cos * k2))).sum(dim=1).numpy()  # [N]
        differences, paid = [], np.zeros(LENGTH)
        for row in rows:
            with np.errstate(divide="ignore", invalid="ignore"):
                seen, now = attention(base, row, 0)[head], attention(model, row, 0)[head]
                away = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
                differences.append(seen - (now - found[np.maximum(away, 0)]))
            for i, j in zip(*np.tril_indices(LENGTH), strict=True):
                paid[i - j] += np.exp(seen[i, j])
        weights = 0.95 * paid / paid.sum() + 0.05 / LENGTH
        wanted = by_distance(differences, distances)

        def variance(values: np.ndarray, weights: np.ndarray = weights) -> float:
            return float(np.average((values - np.average(values, weights=weights)) ** 2, weights=weights))

        assert fit.explained[0][head] == pytest.approx(1 - variance(wanted - found) / variance(wanted), abs=1e-6)


def random_model(kind: str) -> Any:
    """Return a model of `kind` with an untrained table large enough to matter."""
    size: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "gpt2":
            shape = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "initializer_range": 0.2}
            model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, scale_attn_by_inverse_layer_idx=True, **shape))
        elif kind == "opt":
            config = OPTConfig(
                vocab_size=WORDS,
                ffn_dim=32,
                max_position_embeddings=LENGTH,
                word_embed_proj_dim=32,
                init_std=0.3,
                **size,
            )
            model = OPTForCausalLM(config)
        else:
            config = BertConfig(
                vocab_size=WORDS, intermediate_size=32, max_position_embeddings=LENGTH, initializer_range=0.3, **size
            )
            model = BertForMaskedLM(config)
    for path in locate(model).main.attention:  # half of each head's dimensions are of no use, as they mostly are
        query, _ = find_projections(model.get_submodule(path), 4, 8)
        weight, bias = query.read()
        weight[:, ::2], bias[:, ::2] = 0.0, 0.0
        query.write(weight, bias)
    rows = model.get_submodule(locate(model).main.table.path).weight
    with torch.no_grad():
        at = torch.arange(len(rows))[:, None]
        rows += (at * torch.logspace(0, -1.5, 32) + torch.arange(32)).sin()
    return model.eval()


def attention_by_distance(model: Any) -> Tensor:
    """Return what each head of the first layer pays to each distance, summed over texts, [H, 2 L - 1]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        paid = model(texts(24), output_attentions=True).attentions[0].sum(dim=0)  # [H, L, L]
    return torch.stack([paid.diagonal(away, dim1=1, dim2=2).sum(dim=1) for away in range(1 - LENGTH, LENGTH)], dim=1)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bert"])
def test_attention_by_distance_is_nearer_to_what_it_was(kind: str) -> None:
    base, plain = random_model(kind), random_model(kind)
    centre_table(plain)
    fitted = copy.deepcopy(plain)
    for model in (plain, fitted):
        swapped(model)
    fit = fit_rotation(fitted, texts(24))
    before = attention_by_distance(base)
    missed = [(attention_by_distance(model) - before).norm() for model in (plain, fitted)]
    assert missed[1] < 0.95 * missed[0]
    assert [len(row) for row in fit.explained] == [4, 4]
    assert torch.tensor(fit.explained).max() <= 1
    assert str(fit).startswith("rotation fitted to the table in 8 heads: it explains ")
    verify_swap(fitted)


def test_layouts_and_factors_give_the_same_model() -> None:
    hotter = Yarn(factor=1.0, base=BASE, partial=PARTIAL, attention_factor=1.3)
    models = [
        swapped(random_model("gpt2"), max_length=None),
        swapped(random_model("gpt2"), max_length=None, layout="interleaved"),
        patch_model(random_model("gpt2"), hotter),
    ]
    for model in models:
        fit_rotation(model, texts())
    expected = logits(models[0], texts())
    for model in models[1:]:
        torch.testing.assert_close(logits(model, texts()), expected, atol=2e-3, rtol=0)


def test_saved_and_loaded_it_is_the_same(tmp_path: Any) -> None:
    model = swapped(random_model("gpt2"))
    fit_rotation(model, texts())
    hf_posswap.save(model, tmp_path / "fitted")
    torch.testing.assert_close(logits(hf_posswap.load(tmp_path / "fitted"), texts()), logits(model, texts()))


def alibi() -> Any:
    return patch_model(random_model("gpt2"), "alibi")


def whole_heads() -> Any:
    return patch_model(random_model("gpt2"), "rope")


def one_key_head() -> Any:
    shape = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": LENGTH}
    return swapped(GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=WORDS, **shape)))


def no_biases() -> Any:
    shape = {"hidden_size": 32, "num_heads": 4, "num_layers": 1, "attention_types": [[["global"], 1]]}
    return swapped(GPTNeoForCausalLM(GPTNeoConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **shape)))


def rotary() -> Any:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    return swapped(LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **shape)))


def half_precision() -> Any:
    return swapped(random_model("gpt2").to(torch.bfloat16))


class Packed(Tensor):
    """A weight of another class, as torchao's are."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone()


def packed() -> Any:
    model = random_model("opt")
    projection = model.model.decoder.layers[0].self_attn.k_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().as_subclass(Packed))
    return patch_model(model, "rope", partial=PARTIAL)


def integers() -> Any:
    model = random_model("gpt2")
    projection = model.transformer.h[0].attn.c_attn
    projection.weight = torch.nn.Parameter(projection.weight.detach().to(torch.int8), requires_grad=False)
    return patch_model(model, "rope", partial=PARTIAL)


def two_stacks() -> Any:
    shape = {
        "d_model": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    config = BartConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **shape)
    return patch_model(BartModel(config), "rope", partial=PARTIAL)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: random_model("gpt2"), NotPatchedError, "carries no swap"),
        (alibi, SchemeError, "fits schemes that rotate by fixed angles"),
        (whole_heads, SchemeError, "rotates whole heads"),
        (one_key_head, UnsupportedSwapError, "4 query heads of GPTBigCodeForCausalLM share 1 key heads"),
        (no_biases, UnsupportedSwapError, "its Linear has no bias"),
        (half_precision, UnsupportedSwapError, "which torch.bfloat16 cannot hold: load GPT2LMHeadModel with"),
        (packed, UnsupportedSwapError, "its Linear is quantized \\(Packed of torch.float32\\), .*without quantization"),
        (integers, UnsupportedSwapError, "its Conv1D is quantized \\(Parameter of torch.int8\\)"),
        (rotary, UnsupportedSwapError, "LlamaForCausalLM has no table: it rotates queries and keys itself"),
        (two_stacks, UnsupportedSwapError, "an encoder and a decoder"),
    ],
)
def test_others_are_refused_and_stay(make: Any, error: type[PosswapError], said: str) -> None:
    model = make().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=said):
        fit_rotation(model, texts())
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_loaded_swap_and_bad_tokens_are_refused(tmp_path: Any) -> None:
    model = swapped(random_model("gpt2"))
    with pytest.raises(DataError, match="has 25 tokens, and the model's positions end at 24"):
        fit_rotation(model, texts(1, LENGTH + 1))
    hf_posswap.save(model, tmp_path / "saved")
    with pytest.raises(NotPatchedError, match="was loaded with its swap, so the table's effect is unknown"):
        fit_rotation(hf_posswap.load(tmp_path / "saved"), texts())


def test_an_error_half_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posswap.training.search import rotation

    model, own, layers = swapped(random_model("gpt2")), rotation._fit_layer, []
    before = copy.deepcopy(model.state_dict())

    def failing(*arguments: Any) -> Any:
        layers.append(arguments)
        if len(layers) == 2:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(rotation, "_fit_layer", failing)
    with pytest.raises(KeyboardInterrupt):
        fit_rotation(model, texts())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    ids = texts(2)
    torch.testing.assert_close(logits(unpatch_model(model), ids), logits(random_model("gpt2"), ids), rtol=0, atol=0)


def test_what_needs_the_unswapped_model_is_refused_after_a_fit(tmp_path: Any) -> None:
    model = swapped(random_model("gpt2"))
    fit_rotation(model, texts())
    for ask in (unpatch_model, make_teacher, lambda fitted: fit_rotation(fitted, texts())):
        with pytest.raises(PosswapError, match="fitted|before the fit"):
            ask(model)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedSwapError, match="which an adapter does not hold"):
        write_sidecars(model, tmp_path)
    verify_swap(model)
    hf_posswap.save(model, tmp_path / "fitted")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_model_inside_an_adapter_is_refused_with_the_reason() -> None:
    peft = pytest.importorskip("peft")
    model = swapped(random_model("gpt2"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    with pytest.raises(UnsupportedSwapError, match="an adapter wraps its queries or keys.*before adding an adapter"):
        fit_rotation(adapted, texts())
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.state_dict().items())


def test_an_error_half_way_gives_back_float64_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posswap.training.search import rotation

    model = swapped(random_model("gpt2").double())
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(rotation, "_prove_bases", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_rotation(model, texts())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_model_without_a_table_is_refused_by_what_it_lacks_and_nothing_is_logged() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=WORDS
    )
    heard: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("transformers")
    handler.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        model = patch_model(LlamaForCausalLM(config).eval(), "rope", partial=0.5)
        with pytest.raises(
            UnsupportedSwapError,
            match="^fit_rotation fits a rotation to a learned position table, and LlamaForCausalLM has no table",
        ):
            fit_rotation(model, texts())
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in heard] == []
