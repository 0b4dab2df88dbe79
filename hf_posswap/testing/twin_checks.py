"""Properties of any model, swapped or not, with any weights, checked on a small one on the CPU.

Cached steps, padded rows and generate give the same outputs as a full forward, and every attention weight has a
gradient. Two more checks are for a mechanism: it depends on positions, and only as far as it declares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.transformers_calls import cache_argument, cache_in, forward_parameters

TOKENS, PADDING, DECODED, GENERATED = 12, 4, 6, 3
"""Tokens of a text, of them padding in the padded row, tokens of a decoder's text, and generated ones."""
CLOSE = 1e-3
"""The largest difference that is rounding, in parts of the largest output, or of 1."""
SHIFT, _SKIP = 7, 5


@dataclass(frozen=True)
class Expectations:
    """The expected properties of a model.

    Attributes:
        causal: whether its main stack is causal.
        attention: paths of its attention modules.
        unused: names of weights that need no gradient.
        cached_equals_full: whether cached steps and a full forward agree.
        takes_ids: whether it obeys position ids that it is given.
        first_position: what they call the first position.
        relative: whether shifting all positions must change nothing.
        sees_positions: whether its outputs must depend on positions.
    """

    causal: bool
    attention: Sequence[str] = ()
    unused: frozenset[str] = frozenset()
    cached_equals_full: bool = True
    takes_ids: bool = False
    first_position: int = 0
    relative: bool = False
    sees_positions: bool = False


class TwinChecks:
    """The checks of one model.

    Args:
        model: a small one on the CPU, in float32 and eval mode. Its gradients are set to None.
        expected: what must hold of it.
        seed: of its input.
    """

    def __init__(self, model: Any, expected: Expectations, seed: int = 0) -> None:
        self.model, self.expected, self.config = model, expected, model.config
        self.generator = torch.Generator().manual_seed(seed)
        self.images = getattr(model, "main_input_name", "") == "pixel_values"
        self.two_stacks = bool(getattr(self.config, "is_encoder_decoder", False))
        self.names = {*forward_parameters(type(model))}

    def checks(self) -> dict[str, Callable[[], str | None]]:
        """Return the checks by name; each returns an error message or None, and may raise the model's errors."""
        if self.images:
            return {"a forward": self.finite, "a row alone": self.rows, "gradients": self.gradients}
        cached = (self.expected.causal or self.two_stacks) and self.expected.cached_equals_full
        checks: dict[str, Callable[[], str | None]] = {"a forward": self.finite}
        if cached:
            checks["cached steps"] = self.cached
        checks["padding"] = self.padded
        if cached and not self.two_stacks:
            checks["cached steps of a padded row"] = self.padded_steps
        if cached and self.model.can_generate():
            checks["generate"] = self.generated
        checks["gradients"] = self.gradients
        if self.expected.sees_positions:
            checks["order of tokens"] = self.order
        if self.expected.takes_ids and not self.two_stacks:
            if self.expected.relative:
                checks["shifted position ids"] = self.shifted
            if self.expected.sees_positions:
                checks["skipped position ids"] = self.skipped
            if cached:
                checks["cached steps at given position ids"] = self.cached_at_ids
        return checks

    @functools.cached_property
    def inputs(self) -> dict[str, Tensor]:
        """A text, or what else the model takes: of the encoder, where there is one, with a text for the decoder."""
        if self.images:
            size = self.config.image_size
            high, wide = (size, size) if isinstance(size, int) else size
            return {"pixel_values": self._noise(2, self.config.num_channels, high, wide)}
        if not self.two_stacks:
            return {"input_ids": self._ids(1, TOKENS)}
        given = {"decoder_input_ids": self._ids(1, DECODED)}
        if getattr(self.model, "main_input_name", "") == "input_features":
            frames = 2 * self.config.max_source_positions
            return {"input_features": self._noise(1, self.config.num_mel_bins, frames)} | given
        return {"input_ids": self._ids(1, TOKENS)} | given

    @functools.cached_property
    def full(self) -> Tensor:
        """The output of one forward of `inputs`."""
        return self._full.detach()

    @functools.cached_property
    def _full(self) -> Tensor:
        """`full` with its graph for `gradients`; without one where the model only runs without gradients."""
        try:
            return self._run(self.inputs, gradients=True)[0]
        except Exception:  # `gradients` raises it
            return self._run(self.inputs)[0]

    @functools.cached_property
    def left_padded(self) -> Tensor:
        """The output of one forward of the text and of its end behind padding."""
        return self._run(self._padded("left"))[0]

    @functools.cached_property
    def at_skipping(self) -> Tensor:
        """The output of one forward of the text at positions with a gap."""
        return self._run(self.inputs | {"position_ids": self._ids_at(self.skipping)})[0]

    def finite(self) -> str | None:
        return None if torch.isfinite(self.full).all() else "outputs are not finite"

    def rows(self) -> str | None:
        alone = self._run({name: value[1:] for name, value in self.inputs.items()})[0]
        return compare(alone, self.full[1:], "an image alone and in a batch")

    def cached(self) -> str | None:
        name = "decoder_input_ids" if self.two_stacks else "input_ids"
        length = self.inputs[name].shape[1]
        outputs = self._steps(self.inputs, name, (length // 2, length // 2 + 1, length))
        return compare(outputs, self.full, "cached steps and one full forward")

    def padded(self) -> str | None:
        if "input_ids" not in self.inputs:
            return None
        alone = self.inputs["input_ids"][:, PADDING:]
        expected = self._run(self.inputs | {"input_ids": alone})[0]
        sides = ("left",) if self.expected.causal and not self.two_stacks else ("left", "right")
        for side in sides:
            outputs = (self.left_padded if side == "left" else self._run(self._padded(side))[0])[1:]
            if not self.two_stacks:
                outputs = outputs[:, PADDING:] if side == "left" else outputs[:, :-PADDING]
            problem = compare(outputs, expected, f"a row padded on the {side} and that row alone")
            if problem is not None:
                return problem
        return None

    def padding_unattended(self) -> str | None:
        """Check that no token attends to padding, where outputs of padded rows differ for another reason.

        The model attends by eager code from then on, which hands out its weights.
        """
        side = "left" if self.expected.causal else "right"
        batch = self._padded(side)
        self.model.set_attn_implementation("eager")
        with torch.no_grad():
            out = self.model(**batch, output_attentions=True)
        padding = batch["attention_mask"][1] == 0
        for layer, weights in enumerate(out["attentions"]):
            paid = weights[1][:, ~padding][..., padding]  # [H, Q, P]; scores, in some classes
            if paid.max() > CLOSE:
                return f"tokens attend to padding on the {side} in layer {layer}, by {float(paid.max()):.2g}"
        return None

    def padded_steps(self) -> str | None:
        batch = self._padded("left")
        outputs = self._steps(batch, "input_ids", (TOKENS // 2 + 1, TOKENS // 2 + 2, TOKENS))
        wanted = batch["attention_mask"].bool()
        return compare(outputs[wanted], self.left_padded[wanted], "cached steps of a padded batch and its full forward")

    def generated(self) -> str | None:
        from transformers import GenerationConfig

        given = self.inputs if self.two_stacks else self._padded("left")
        self.model.generation_config = GenerationConfig(
            max_new_tokens=GENERATED,
            min_new_tokens=GENERATED,
            do_sample=False,
            use_cache=True,
            pad_token_id=self.padding_id,
            decoder_start_token_id=3 if self.two_stacks else None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        arguments = {name: value for name, value in given.items() if name != "position_ids"}
        with torch.no_grad():
            out = self.model.generate(**arguments)
        steps = torch.stack(out.logits, dim=1)
        if self.two_stacks:
            full = self._run(given | {"decoder_input_ids": out.sequences[:, :-1]})[0]
        else:
            read = self._masked(out.sequences[:, :-1], given["attention_mask"])
            if "position_ids" in read:
                read["position_ids"] -= self.expected.first_position  # `generate` counts from 0 in every model
            full = self._run(read)[0]
        return compare(steps, full[:, -GENERATED:], "generate with a cache and one full forward of its text")

    def gradients(self) -> str | None:
        out = self._full if self._full.requires_grad else self._run(self.inputs, gradients=True)[0]
        (out * self._noise(*out.shape)).sum().backward()
        self._full = out.detach()  # its graph is used up
        weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        grads = {name: weight.grad for name, weight in weights.items()}
        for weight in weights.values():
            weight.grad = None
        broken = [name for name, grad in grads.items() if grad is not None and not torch.isfinite(grad).all()]
        if broken:
            return f"the gradient of {broken[0]} is not finite"
        inside = tuple(f"{path}." for path in self.expected.attention)
        checked = [n for n in grads if n.startswith(inside) and weights[n].ndim > 1 and n not in self.expected.unused]
        missing = [name for name in checked if (grad := grads[name]) is None or not grad.any()]
        return f"{missing[0]} has no gradient" if missing else None

    def order(self) -> str | None:
        for name in ("input_ids", "decoder_input_ids"):
            if name in self.inputs:
                ids = self.inputs[name]
                other = torch.cat((ids[:, :-1].flip(1), ids[:, -1:]), dim=1)
                moved = self._run(self.inputs | {name: other})[0][:, -1]
                if compare(moved, self.full[:, -1], "") is None:
                    return f"reversing the order of {name} changes nothing"
        return None

    def shifted(self) -> str | None:
        outputs = self._run(self.inputs | {"position_ids": self._ids_at(self.positions + SHIFT)})[0]
        return compare(outputs, self.full, f"position ids that are all {SHIFT} larger and those that are not")

    def skipped(self) -> str | None:
        unmoved = compare(self.at_skipping, self.full, "") is None
        return f"position ids that skip {_SKIP} positions change nothing" if unmoved else None

    def cached_at_ids(self) -> str | None:
        given = self.inputs | {"position_ids": self._ids_at(self.skipping)}
        outputs = self._steps(given, "input_ids", (TOKENS // 2, TOKENS))
        return compare(outputs, self.at_skipping, "cached steps and a full forward at the same position ids")

    @property
    def padding_id(self) -> int:
        """The id of the tokens that are no input."""
        token_id = getattr(self.config.get_text_config(decoder=True), "pad_token_id", None)
        return token_id if isinstance(token_id, int) and token_id >= 0 else 0

    @property
    def positions(self) -> Tensor:
        """The positions of the text, [1, Q]."""
        return torch.arange(TOKENS)[None]

    @property
    def skipping(self) -> Tensor:
        """Positions [1, Q] with a gap in their middle."""
        return self.positions + _SKIP * (self.positions >= TOKENS // 2)

    def _ids_at(self, positions: Tensor) -> Tensor:
        return positions + self.expected.first_position

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _ids(self, *shape: int) -> Tensor:
        sizes = (
            getattr(config, "vocab_size", None) for config in (self.config, self.config.get_text_config(decoder=True))
        )
        return torch.randint(5, min(size for size in sizes if size), shape, generator=self.generator)

    def _padded(self, side: str) -> dict[str, Tensor]:
        """Return the text and, as a second row, its end behind or before padding."""
        ids = self.inputs["input_ids"]
        fill = torch.full((1, PADDING), self.padding_id)
        row = torch.cat((fill, ids[:, PADDING:]) if side == "left" else (ids[:, PADDING:], fill), dim=1)
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        mask[1, slice(0, PADDING) if side == "left" else slice(-PADDING, None)] = 0
        if self.two_stacks:
            decoded = self.inputs["decoder_input_ids"].repeat(2, 1)
            return {"input_ids": torch.cat((ids, row)), "attention_mask": mask, "decoder_input_ids": decoded}
        return self._masked(torch.cat((ids, row)), mask)

    def _masked(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return what `generate` passes for texts, which may be longer than their mask."""
        mask = torch.cat((mask, mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])), dim=1)
        given = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in self.names:
            given["position_ids"] = self._ids_at((mask.cumsum(1) - 1).clamp(min=0))
        return given

    def _run(self, given: dict[str, Any], gradients: bool = False) -> tuple[Tensor, object]:
        """Return logits, or the last states [B, Q, E] where there are none for each token, and the cache."""
        entry, length = self.model, None
        if not self.images:
            length = given["decoder_input_ids" if self.two_stacks else "input_ids"].shape[1]
        with torch.set_grad_enabled(gradients):
            out = entry(**given)
            if not self._is_by_token(out, length):
                entry = self.model.base_model
                out = entry(**given)
        output = out["logits"] if self._is_by_token(out, length) and "logits" in out else out[0]
        return output, cache_in(out)

    def _is_by_token(self, out: Any, length: int | None) -> bool:
        output = out.get("logits", out[0]) if hasattr(out, "get") else out[0]
        return length is None or (isinstance(output, Tensor) and output.ndim == 3 and output.shape[1] == length)

    def _steps(self, given: dict[str, Tensor], name: str, stops: Sequence[int]) -> Tensor:
        """Return the outputs of cached forwards that end at `stops` of the input `name`."""
        cache, chunks, start = None, [], 0
        argument = cache_argument(self.model)
        for stop in stops:
            chunk = given | {name: given[name][:, start:stop]}
            if not self.two_stacks and "attention_mask" in given:
                chunk["attention_mask"] = given["attention_mask"][:, :stop]
            if "position_ids" in given:
                chunk["position_ids"] = given["position_ids"][:, start:stop]
            out, cache = self._run(chunk | {"use_cache": True, argument: cache})
            if cache is None:
                raise TypeError(f"{type(self.model).__name__} returns no cache")
            chunks.append(out)
            start = stop
        return torch.cat(chunks, dim=1)


def compare(actual: Tensor, expected: Tensor, what: str) -> str | None:
    """Return how two outputs differ that should be equal, or None if they are equal up to rounding.

    Args:
        actual: the output to check.
        expected: the reference, whose magnitude scales the tolerance.
        what: names both, for the message.
    """
    if actual.shape != expected.shape:
        return f"{what} have shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    apart = float((actual - expected).abs().nan_to_num(nan=float("inf")).max())
    largest = max(1.0, float(expected.abs().max()))
    return None if apart <= CLOSE * largest else f"{what} differ by {apart:.2g}"
