"""Whisper: its decoder is swapped, its encoder hears and keeps what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_posswap
from hf_posswap import patch_model, plan_swap, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import PositionRangeError, SchemeError
from hf_posswap.families import locate
from tests.contract.pairs import CHANGE, NOISE, gap
from tests.families.oracles import rotated
from tests.stock import cache_in, with_cache

LENGTH, HEARD = 24, 16
SHAPE: dict[str, Any] = {
    **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "decoder_attention_heads"), 2),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 3),
    **dict.fromkeys(("begin_suppress_tokens", "suppress_tokens", "eos_token_id"), None),
}
FEATURES = torch.randn(2, 8, 2 * HEARD, generator=torch.Generator().manual_seed(3))
TARGET = torch.randint(5, 90, (2, LENGTH + 6), generator=torch.Generator().manual_seed(4))
SCHEMES = ("rope", "alibi", "nope", "learned", "sinusoidal")


def build(name: str = "WhisperForConditionalGeneration") -> Any:
    torch.manual_seed(0)
    lengths = {"max_source_positions": HEARD, "max_target_positions": LENGTH, "num_mel_bins": 8, "vocab_size": 97}
    config = transformers.WhisperConfig(**SHAPE, **lengths, encoder_attention_heads=4)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def logits(model: Any, target: Tensor = TARGET, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_features=FEATURES, decoder_input_ids=target, **kwargs).logits


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_decoder_is_swapped_and_comes_back(scheme: str, tmp_path: Path) -> None:
    model = build()
    encoder = {name: id(p) for name, p in model.model.encoder.named_parameters()}
    short = TARGET[:, :LENGTH]
    before, config = logits(model, short), model.config.to_dict()
    plan = swap_plan(patch_model(model, scheme, max_length=2 * LENGTH))
    assert list(plan.schemes) == ["decoder"]
    assert model.config.max_target_positions == model.model.decoder.max_target_positions == 2 * LENGTH
    verify_swap(model)
    assert (gap(logits(model, short), before) > CHANGE) == (scheme != "learned")
    assert {name: id(p) for name, p in model.model.encoder.named_parameters()} == encoder
    expected = logits(model)
    hf_posswap.save(model, tmp_path / "model")
    loaded = hf_posswap.load(tmp_path / "model", model_class=transformers.WhisperForConditionalGeneration)
    assert gap(logits(loaded), expected) == 0
    verify_swap(loaded)
    unpatch_model(model)
    assert model.config.to_dict() == config
    assert gap(logits(model, short), before) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cached_equals_full_and_beams_find_the_same(scheme: str) -> None:
    model = build()
    patch_model(model, scheme, max_length=2 * LENGTH)
    with torch.no_grad():
        encoded, cache, parts = model.get_encoder()(FEATURES), None, []
        for start, stop in ((0, 7), (7, 8), (8, LENGTH + 6)):
            out = model(
                encoder_outputs=encoded,
                decoder_input_ids=TARGET[:, start:stop],
                **with_cache(model, cache),
                use_cache=True,
            )
            cache = cache_in(out)
            parts.append(out.logits)
    assert gap(torch.cat(parts, dim=1), logits(model)) < NOISE
    search = transformers.GenerationMixin.generate  # Whisper's own splits sound into segments first
    found = [search(model, FEATURES, max_new_tokens=6, num_beams=3, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*found)


def test_rope_is_a_rotation_in_the_decoder_at_the_positions_that_are_given() -> None:
    holes = torch.cat((torch.arange(4), torch.arange(9, 17)))
    model, oracle = build(), build()
    patch_model(model, "rope")
    with torch.no_grad():
        oracle.model.decoder.embed_positions.weight.zero_()
    rotated(oracle, locate(oracle).main, ("q_proj", "k_proj"), positions=holes)
    expected = logits(oracle, TARGET[:, :12], use_cache=False)
    assert gap(logits(model, TARGET[:, :12], decoder_position_ids=holes[None]), expected) < NOISE


def test_where_the_table_ends_it_is_said() -> None:
    model = build()
    patch_model(model, "learned", max_length=LENGTH + 2)
    with pytest.raises(PositionRangeError, match=f"ends at {LENGTH + 2}"):
        logits(model)


def test_the_encoder_is_no_stack_of_its_own_and_a_lone_decoder_is_one() -> None:
    with pytest.raises(SchemeError, match="given by stack, for encoder; this model has decoder"):
        plan_swap(build(), {"encoder": "rope"})
    assert plan_swap(build("WhisperForCausalLM"), "alibi").edits[0].path == "model.decoder.embed_positions"
