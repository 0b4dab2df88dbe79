"""A tiny model of each kind of family, swapped step by step; and the code of transformers that an error leads to."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap import load, patch_model, plan_swap, save, unpatch_model, verify_swap
from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.compat.transformers_calls import cache_argument, cache_in
from hf_posswap.errors import PosswapError
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.utils.atomic_io import scratch_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 12
"""Tokens of the texts that the models read."""
CLOSE = 1e-4
"""The largest rounding difference in logits of the tiny models, whose magnitude is about 5."""
_TOUCHES = "Touches "
"""The start of the docstring paragraph that names a function's dependencies outside hf_posswap."""


@dataclass(frozen=True)
class FamilyKind:
    """One kind of family, a representative class, and its swap."""

    name: str
    model: str
    scheme: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, to {self.scheme}"


KINDS = (
    FamilyKind("learned table", "GPT2LMHeadModel", "rope"),
    FamilyKind("learned table", "GPT2LMHeadModel", "sinusoidal"),
    FamilyKind("rotary", "LlamaForCausalLM", "yarn", {"factor": 2.0}),
    FamilyKind("rotary", "LlamaForCausalLM", "alibi"),
    FamilyKind("encoder", "BertForMaskedLM", "rope"),
    FamilyKind("encoder-decoder", "BartForConditionalGeneration", "rope"),
    FamilyKind("T5 bias", "T5ForConditionalGeneration", "alibi"),
    FamilyKind("ALiBi", "BloomForCausalLM", "rope"),
    FamilyKind("images", "ViTForImageClassification", "rope_2d"),
)


RESTS_ON = {
    "plan": "the modules and config fields of the model class",
    "patch": "the attention interface and the modules of the model class",
    "verify_swap": "the positions that the model class hands to its attention",
    "cached steps": "Cache.get_query_offset, Cache.get_mask_sizes, and what the model class passes to its attention",
    "save and load": "save_pretrained, from_pretrained, and what they keep of a config",
    "unpatch": "the modules and config fields of the model class",
}
"""The transformers code to suspect if a step gives wrong numbers without an error."""


@dataclass(eq=False)
class Trial:
    """One tiny model and its swap.

    Attributes:
        kind: the kind of family.
    """

    kind: FamilyKind
    model: Any = field(default=None, init=False)
    before: Tensor = field(default_factory=partial(torch.empty, 0), init=False)
    after: Tensor = field(default_factory=partial(torch.empty, 0), init=False)

    def steps(self) -> dict[str, Callable[[], str]]:
        """Return the steps in order; each returns its outcome, or raises."""
        return {
            "plan": self.plan,
            "patch": self.patch,
            "verify_swap": self.verify,
            "cached steps": self.steps_with_cache,
            "save and load": self.reload,
            "unpatch": self.unpatch,
        }

    def plan(self) -> str:
        self.model = _model(self.kind.model)
        self.before = logits(self.model)
        return f"{plan_swap(self.model, self.kind.scheme, **self.kind.options).route} route"

    def patch(self) -> str:
        patch_model(self.model, self.kind.scheme, **self.kind.options)
        self.after = logits(self.model)
        difference = gap(self.after, self.before)
        if difference <= CLOSE:
            raise WrongAnswerError(f"the logits are those of the unswapped model, {difference:.1g} away")
        return f"logits moved by {difference:.2g}"

    def verify(self) -> str:
        return f"{len(verify_swap(self.model).checks)} proofs"

    def steps_with_cache(self) -> str:
        if not (self.model.can_generate() and self.model.config.use_cache):
            return "no cache in this class"
        return same(gap(stepwise(self.model), self.after), "steps with a cache and a full forward", CLOSE)

    def reload(self) -> str:
        with scratch_folder() as folder:
            save(self.model, folder / "model")
            again = logits(load(folder / "model"))
        return same(gap(again, self.after), "the model and what was saved and loaded", 1e-6)

    def unpatch(self) -> str:
        unpatch_model(self.model)
        return same(gap(logits(self.model), self.before), "the logits before the swap and after unpatch_model", 0.0)


def _model(name: str) -> PreTrainedModel:
    import transformers

    images = name.endswith("ImageClassification")
    size = {"image_size": 32, "patch_size": 8} if images else {}
    return tiny_model(getattr(transformers, name), meta=False, **size)


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return random inputs for `model`: two images, or two texts of `LENGTH` tokens, and two for any decoder."""
    config = model.config
    with PrivateRandomness(0):
        if model.main_input_name == "pixel_values":
            return {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
        ids = torch.randint(3, config.vocab_size, (2, LENGTH))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return given | ({"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {})


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Return the logits of `model` for its inputs."""
    return model.eval()(**inputs_of(model)).logits


@torch.no_grad()
def stepwise(model: PreTrainedModel) -> Tensor:
    """Return the logits of the same inputs, read in three chunks with a cache: the last two tokens one by one."""
    inputs, cache, chunks = inputs_of(model), None, []
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    for start, stop in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
        chunk = inputs | {name: inputs[name][:, start:stop]}
        if not model.config.is_encoder_decoder:
            chunk["attention_mask"] = inputs["attention_mask"][:, :stop]
        out = model.eval()(**chunk, **{cache_argument(model): cache}, use_cache=True)
        cache = cache_in(out)
        chunks.append(out.logits)
    return torch.cat(chunks, dim=1)


def gap(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors of equal shape; infinity if there is a NaN.

    Raises:
        WrongAnswerError: the shapes differ.

    Example:
        >>> gap(torch.zeros(2), torch.tensor([0.0, 0.5]))
        0.5
    """
    if actual.shape != expected.shape:
        raise WrongAnswerError(f"logits of shape {tuple(actual.shape)} where {tuple(expected.shape)} should be")
    return float((actual.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max())


def same(difference: float, subject: str, allowed: float) -> str:
    """Return as text that two results are equal.

    Raises:
        WrongAnswerError: they differ by more than `allowed`.

    Example:
        >>> same(0.0, "one and the other", allowed=0.0)
        'equal'
    """
    if difference > allowed:
        raise WrongAnswerError(f"{subject} are {difference:.2g} apart, and no more than {allowed:g} would be rounding")
    return "equal" if difference == 0 else f"equal, {difference:.1g} apart"


class WrongAnswerError(Exception):
    """Two results differ that should be equal, or are equal and should differ."""


def words_of(error: Exception) -> str:
    """Return the message of an error in one line.

    Example:
        >>> words_of(AttributeError("no\\nsuch thing"))
        'AttributeError: no such thing'
    """
    text = " ".join(str(error).split())
    return text if isinstance(error, PosswapError | WrongAnswerError) else f"{type(error).__name__}: {text or '-'}"


def touch_of(error: Exception, otherwise: str) -> str:
    """Return where hf_posswap met an error, its dependencies there, and where transformers raised it.

    Args:
        error: the caught error.
        otherwise: the return value for errors of the self-check itself, such as different results.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [where for where in frames if _is_of(where[0], "hf_posswap") and not _is_of(where[0], __package__ or "")]
    if not ours:
        return otherwise
    lines = [_location(*ours[-1]), *_touched(ours[-1][0])]
    beyond = [where for where in frames[frames.index(ours[-1]) :] if _is_of(where[0], "transformers")]
    return "; ".join(lines + [f"raised in {_location(*where)}" for where in beyond[-1:]])


def _is_of(frame: FrameType, package: str) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name == package or name.startswith(f"{package}.")


def _location(frame: FrameType, line: int) -> str:
    """Return module, function, line number and line of a frame."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    return f"{frame.f_globals['__name__']}.{code.co_qualname}, line {line}: {text}"


def _touched(frame: FrameType) -> Iterator[str]:
    """Yield the dependencies that the docstring of a frame's function names."""
    function = frame.f_globals.get(frame.f_code.co_name)
    for paragraph in (getattr(function, "__doc__", None) or "").split("\n\n"):
        if (sentence := " ".join(paragraph.split())).startswith(_TOUCHES):
            yield sentence[0].lower() + sentence[1:].split(". ")[0].rstrip(".")
