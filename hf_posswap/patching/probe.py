"""A small input for a swapped model, and its runs: plain, its positions shifted or spread, its tokens reordered.

Where a model takes position ids, they are given. Where it counts tokens by itself (the BART kind), tokens that no other
one may see are put in front: they shift the rest.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posswap.families.sites import Stack
from hf_posswap.patching.offloaded import device_of
from hf_posswap.patching.told import HandOn


@dataclass(frozen=True)
class Probe:
    """The input of all checks, and how the model takes it.

    Attributes:
        ids: random tokens [1, Q]; of both stacks, where a model has two.
        near: positions [1, Q] that count from the start.
        far: positions [1, Q] spread over the original length, so that slow angles show as well.
        position_argument: what the model calls its position ids; None: it takes none.
        handed_on: whether it takes them since it was swapped: its own code drops them.
        features: what a model that hears takes in place of tokens, or None.
    """

    ids: Tensor
    near: Tensor
    far: Tensor
    position_argument: str | None
    handed_on: bool
    features: Tensor | None

    def run(
        self, model: Any, positions: Tensor, ids: Tensor | None = None, encoder_ids: Tensor | None = None
    ) -> Tensor:
        """Return the logits at `positions`, of `ids` where they are given; of two stacks, the last hidden states."""
        ids = self.ids if ids is None else ids
        given = {} if self.position_argument is None else {self.position_argument: positions}
        return self._outputs(model, ids, encoder_ids, torch.ones_like(ids), given)

    def shifted(self, model: Any, by: int) -> Tensor:
        """Return what `run` does where every position is larger by `by`."""
        if self.position_argument is not None:
            return self.run(model, self.near + by)
        ids = torch.cat((self.ids[:, :1].expand(-1, by), self.ids), dim=1)  # [1, by + Q]
        mask = torch.ones_like(ids)
        mask[:, :by] = 0
        return self._outputs(model, ids, ids, mask, {})[:, by:]

    def _outputs(self, model: Any, ids: Tensor, other: Tensor | None, mask: Tensor, given: dict[str, Any]) -> Tensor:
        if not model.config.is_encoder_decoder:
            out = model(input_ids=ids, attention_mask=mask, **given)
            return (out.logits if "logits" in out else out[0]).float()
        first = {"input_ids": self.ids if other is None else other, "attention_mask": mask}
        if self.features is not None:
            first = {"input_features": self.features}
        given = first | {"decoder_input_ids": ids, "decoder_attention_mask": mask} | given
        out = model.base_model(**given)  # T5 has no base model: it is its own
        return (out.last_hidden_state if "last_hidden_state" in out else out.logits).float()

    def reordered(self) -> Tensor:
        """Return the tokens with all but the last one reversed, [1, Q]."""
        return torch.cat((self.ids[:, :-1].flip(1), self.ids[:, -1:]), dim=1)


def make_probe(model: Any, tokens: int, seed: int) -> Probe:
    """Return an input of `tokens` tokens, or as many as `model` was made for, of the seed `seed`."""
    generator = torch.Generator().manual_seed(seed)
    sites = model._posswap.plan.sites
    words = min(vocabulary for vocabulary in _vocabularies(model.config))
    longest = min(stack.geometry.original_length for stack in sites.stacks)
    tokens = min(tokens, longest)
    low = min(5, words - 2)  # leave special tokens (padding above all) out of the input
    device = device_of(model)
    ids = torch.randint(low, words, (1, tokens), generator=generator).to(device)
    near = torch.arange(tokens, device=device)[None]
    far = near * max(1, (longest - 1) // max(1, tokens - 1))
    first, argument = sites.first_position, _position_argument(model, sites.main)
    return Probe(
        ids=ids,
        near=near + first,
        far=near + first if argument is None else far + first,
        position_argument=argument,
        handed_on=_handing_on(model, sites.main) is not None,
        features=_features(model, generator),
    )


def _vocabularies(config: Any) -> list[int]:
    parts = (config, config.get_text_config(decoder=True))
    sizes = [getattr(part, name, None) for part in parts for name in ("vocab_size", "decoder_vocab_size")]
    return [size for size in sizes if size]


def _position_argument(model: Any, main: Stack) -> str | None:
    """Return what the forward of `model` calls the position ids that reach its main stack."""
    taken = inspect.signature(type(model.base_model if model.config.is_encoder_decoder else model).forward).parameters
    if model.config.is_encoder_decoder:
        return "decoder_position_ids" if "decoder_position_ids" in taken else None
    handing_on = _handing_on(model, main)
    if handing_on is not None and handing_on.refusal:
        return None
    if "position_ids" in taken or handing_on is not None:
        return "position_ids"
    passes = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    entry = inspect.signature(type(model.get_submodule(main.entry)).forward).parameters
    return "position_ids" if passes and "position_ids" in entry else None


def _handing_on(model: Any, main: Stack) -> HandOn | None:
    """Return what hands the position ids that `model` is given on to its main stack; None: its own code does."""
    actions = (edit.action for edit in model._posswap.plan.edits if edit.stack == main.name)
    return next((action for action in actions if isinstance(action, HandOn) and action.entry is not None), None)


def _features(model: Any, generator: torch.Generator) -> Tensor | None:
    """Return random features [1, M, F] as long as a model that hears wants them, or None."""
    config = model.config
    if not config.is_encoder_decoder or getattr(model, "main_input_name", "input_ids") != "input_features":
        return None
    features = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    return features.to(device_of(model), model.dtype)
