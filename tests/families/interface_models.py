"""Tiny models whose attention lacks the interface, and the classes that have it: what several tests go through."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.sites.attention.native import AttendThroughInterface
from hf_posswap.testing.tiny import tiny_model
from tests.stock import RELEASE


@dataclass(frozen=True)
class Case:
    """One kind of model.

    Attributes:
        kind: model class.
        file: in hf_posswap/families/interfaces.
        name: of the class there.
        config: what its config has.
        caches: whether it decodes with a cache.
        positions: whether its forward takes position ids.
        masks_2d: whether its masks say only which tokens are padding.
        implementation: under which the original computes what it should.
    """

    kind: str
    file: str
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    caches: bool = True
    positions: bool = True
    masks_2d: bool = False
    implementation: str = "eager"

    @property
    def interface(self) -> Any:
        """The attention class with the interface."""
        return getattr(importlib.import_module(f"hf_posswap.families.interfaces.{self.file}"), self.name)

    def build(self, **changes: Any) -> Any:
        """Return the model, the same each time, attending as `implementation` says."""
        model = tiny_model(self.kind, meta=False, **self.config | changes)
        set_implementation(model, self.implementation)
        return model

    def dressed(self, implementation: str | None = None, **changes: Any) -> Any:
        """Return the model, attending through the interface."""
        model = self.build(**changes)
        dress(model, self.interface)
        set_implementation(model, implementation or self.implementation)
        return model


_WINDOWS = {"attention_types": [[["global", "local"], 2]], "window_size": 5, "num_layers": 4}
_FALCON = ("FalconForCausalLM", "falcon", "FalconInterface")
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
_V3 = {"position_biased_input": False, "share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"}

CASES = {
    "gpt_neo": Case("GPTNeoForCausalLM", "gpt_neo", "GPTNeoInterface", _WINDOWS),
    "gptj": Case("GPTJForCausalLM", "gptj", "GPTJInterface"),
    "codegen": Case("CodeGenForCausalLM", "gptj", "CodeGenInterface"),
    "bloom": Case("BloomForCausalLM", "bloom", "BloomInterface", {"n_head": 6, "hidden_size": 48}, positions=False,
                  masks_2d=True),
    "mpt": Case("MptForCausalLM", "mpt", "MptInterface", {"n_heads": 6, "d_model": 48}, positions=False),
    "falcon": Case(*_FALCON, implementation="sdpa"),
    "falcon (eager)": Case(*_FALCON),
    "falcon (one key head)": Case(*_FALCON, {"new_decoder_architecture": False, "multi_query": True}),
    "falcon (groups)": Case(*_FALCON, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon (alibi)": Case(*_FALCON, {"alibi": True}, positions=False, masks_2d=True, implementation="sdpa"),
    "xglm": Case("XGLMForCausalLM", "bart_like", "XGLMInterface"),
    "trocr": Case("TrOCRForCausalLM", "bart_like", "TrOCRInterface", positions=False),
    "mvp": Case("MvpForCausalLM", "bart_like", "MvpInterface", positions=False),
    "openai-gpt": Case("OpenAIGPTLMHeadModel", "openai", "OpenAIGPTInterface", caches=False, masks_2d=True),
    "mpnet": Case("MPNetForMaskedLM", "mpnet", "MPNetInterface", caches=False),
    "roformer": Case("RoFormerForMaskedLM", "roformer", "RoFormerInterface", caches=False, positions=False),
    "roformer (values too)": Case("RoFormerForMaskedLM", "roformer", "RoFormerInterface", {"rotary_value": True},
                                  caches=False, positions=False),
    "roformer (is_decoder)": Case("RoFormerForCausalLM", "roformer", "RoFormerInterface", {"is_decoder": True},
                                  positions=False),
    "megatron-bert": Case("MegatronBertForMaskedLM", "bert_like", "MegatronBertInterface", caches=False),
    "megatron-bert (is_decoder)": Case("MegatronBertForCausalLM", "bert_like", "MegatronBertInterface"),
    "rembert": Case("RemBertForMaskedLM", "bert_like", "RemBertInterface", caches=False),
    "rembert (is_decoder)": Case("RemBertForCausalLM", "bert_like", "RemBertInterface"),
    "big_bird": Case("BigBirdForMaskedLM", "bert_like", "BigBirdInterface", caches=False, masks_2d=True),
    "big_bird (is_decoder)": Case("BigBirdForCausalLM", "bert_like", "BigBirdInterface", masks_2d=True),
    "squeezebert": Case("SqueezeBertForMaskedLM", "squeezebert", "SqueezeBertInterface", caches=False),
    "convbert": Case("ConvBertForMaskedLM", "convbert", "ConvBertInterface", caches=False),
    "deberta": Case("DebertaForMaskedLM", "deberta", "DebertaInterface", _RELATIVE, caches=False, masks_2d=True),
    "deberta (a table alone)": Case("DebertaForMaskedLM", "deberta", "DebertaInterface", caches=False, masks_2d=True),
    "deberta-v2": Case("DebertaV2ForMaskedLM", "deberta", "DebertaV2Interface", _RELATIVE, caches=False,
                       masks_2d=True),
    "deberta-v3": Case("DebertaV2ForMaskedLM", "deberta", "DebertaV2Interface", _RELATIVE | _V3, caches=False,
                       positions=False, masks_2d=True),
}  # fmt: skip

if RELEASE >= (5, 24):
    CASES = {name: case for name, case in CASES.items() if name not in ("gptj", "codegen")}  # they have the interface
if RELEASE < (5, 18):
    CASES = {name: case for name, case in CASES.items() if "is_decoder" not in name}  # they see their future


def dress(model: Any, interface: Any, *, native_positions: bool = True) -> list[tuple[Edit, Saved]]:
    """Give every attention module of `model` the class `interface`, and return the edits with what they saved."""
    native, done = interface.__bases__[-1], list[tuple[Edit, Saved]]()
    paths = [path for path, module in model.named_modules() if type(module) is native]
    assert paths
    for layer, path in enumerate(paths):
        edit = AttendThroughInterface(
            site="attention",
            path=path,
            before="",
            after="",
            module=interface.__module__,
            name=interface.__name__,
            layer=layer,
            native_positions=native_positions,
        )
        done.append((edit, {}))
        edit.apply(model, done[-1][1])
    return done


def set_implementation(model: Any, name: str) -> None:
    """Make `model` attend by the implementation called `name`, also where its class would not allow it."""
    model.config._attn_implementation = name


def words(rows: int, length: int, seed: int = 1) -> Tensor:
    """Return random token ids [rows, length] without special ones."""
    return torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(seed))
