"""The loss of each token, from a forward pass that never materializes the logits of a whole sequence.

A vocabulary of 128256 at 131072 tokens is 67 GB of float32 logits; here the output head runs on a few hundred hidden
states at a time. If even the activations of one forward do not fit, the sequence is read in chunks with a key-value
cache, which gives the same losses for prefix-consistent models.

`reach_of` gives the lengths that a model can run, and whether one forward gives the loss of every prefix, from its
plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.compat.transformers_attention import attention_implementation
from hf_posswap.compat.transformers_calls import cache_argument, cache_in
from hf_posswap.compat.transformers_models import layer_configs
from hf_posswap.errors import DataError, NumericError, PositionRangeError, UnsupportedModelError
from hf_posswap.families.locating import causal_by_config, family_of
from hf_posswap.families.rope_config import rope_settings
from hf_posswap.patching.inspect.describe import describe_positions
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.utils.devices import evaluating
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


Head = Callable[[Tensor], Tensor]
_PROBE_TOLERANCE = 1e-4
_PROBED, _MOST_PROBED = 64, 4096  # tokens; the latter of a window that the probe passes
_APART, _APART_HALF = 1e-2, 0.1  # nats: of any token in float32; on average in half precision, by the order of sums
MOST_NATS = 700.0
"""A mean loss beyond has no perplexity that a float can hold."""
_BOUNDS = ("sliding_window", "attention_chunk_size", "index_topk")  # in tokens; layers read otherwise beyond them


@dataclass(frozen=True, repr=False)
class Reach(ResultView):
    """The lengths that a model can run.

    Attributes:
        limit: maximum number of tokens, beyond which it raises an error; None: any length.
        window: original window in tokens, before any swap.
        prefix_consistent: whether logits at t depend only on tokens up to t, not on the total length: then one forward
            gives the losses of every prefix, and a chunked prefill with a cache equals a full one.
        why: the reason for `prefix_consistent`.
        causal: whether tokens attend only to earlier tokens. False for an encoder-decoder: its encoder reads the text.
    """

    limit: int | None
    window: int
    prefix_consistent: bool
    why: str
    causal: bool = True


def reach_of(model: PreTrainedModel) -> Reach:
    """Return the lengths that `model` can run, and whether one forward serves every length.

    The plan of a swapped model declares it (`SwapPlan.cached_equals_full`), for an unswapped one the rope type does. A
    model without a family gets one forward per length.

    Args:
        model: a transformers model, patched or not.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
        >>> reach_of(model)
        Reach(limit=8, window=8, prefix_consistent=True, why='a learned table', causal=True)
    """
    model = unwrap(model)
    patch, decodes = getattr(model, "_posswap", None), not model.config.is_encoder_decoder
    if patch is not None:
        plan = patch.plan
        limit = None if plan.unbounded else plan.max_length
        g = plan.sites.geometry
        causal = decodes and g.causal and causal_by_config(model.config.get_text_config()) is not False
        return Reach(limit, g.original_length, plan.cached_equals_full and causal, "the plan of its swap", causal)
    try:
        report = describe_positions(model)
    except UnsupportedModelError:
        return Reach(
            None,
            int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0),
            False,
            "no family describes it",
            decodes and bool(model.can_generate()),
        )
    causal, stacks = decodes and report.geometry.causal, family_of(model.config).parts
    if report.sites["embedding"] != "-":
        modules = {name for name, _ in model.named_modules()}  # CTRL's rows are a buffer, which ends
        computed = all(stack.table is None or stack.table.computed for stack in stacks)
        grows = computed and all(path in modules for path in report.sites["embedding"].split(", "))
        limit, why = (None, "a computed table") if grows else (report.limit, "a learned table")
        return Reach(limit, report.limit, causal, why, causal)
    if any(stack.traits is not None and stack.traits.bounded for stack in stacks):
        return Reach(report.limit, report.limit, causal, report.native, causal)
    sets = rope_settings(model.config.get_text_config())  # some models have one for each type of layers
    length_dependent = {each.rope_type for each in sets if each.follows_length}
    types_text = ", ".join(sorted(length_dependent or {each.rope_type for each in sets})) or "default"
    return Reach(None, report.limit, causal and not length_dependent, f"rope type {types_text}", causal)


@dataclass
class PrefixStates:
    """The last hidden states of the prefixes of texts, kept while a scorer reads these texts for another measure.

    Attributes:
        texts: token ids [N, `reads`].
        length: tokens of a prefix.
        reads: tokens of the forward that gives its states; at least `length`.
        states: [length - 1, E] in the host's memory, by the key of the prefix.
    """

    texts: np.ndarray
    length: int
    reads: int
    states: dict[bytes, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = {self.key(text) for text in self.texts}

    def key(self, text: np.ndarray | Tensor) -> bytes:
        """Return the ids of the prefix of `text` [L], as bytes."""
        return np.asarray(text[: self.length], np.int64).tobytes()

    def wants(self, ids: Tensor, start: int) -> bool:
        """Return whether `ids` [B, L], which begin at position `start`, are a text whose states are not kept yet."""
        if start or ids.shape != (1, self.reads):
            return False
        key = self.key(ids[0].cpu())
        return key in self.keys and key not in self.states


class Scorer:
    """Computes the loss of each token of a causal model in eval mode, with a chunked output head.

    At construction the chunked head is compared with the model's own logits on a few tokens. A model that does more
    after its last hidden state than the known scalings is scored from its own logits, which takes more memory. The
    model is in eval mode for its forwards alone: each module has its own mode again afterwards.

    Args:
        model: a causal model with an output head, patched or not, with PEFT adapters or without.
        chunk: tokens whose logits are held at once, over all rows of a batch.
        prefill: tokens of one forward; longer sequences are read in chunks with a cache. None: always one forward.

    Raises:
        UnsupportedSwapError: it is not a transformers model, or has virtual tokens of PEFT's prompt learning.
        DataError: the model has no output head or is not causal, a number is below 1, or `prefill` is given for a
            model whose losses depend on the total length or, by `apart_in_chunks`, on the chunks.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> Scorer(model).nll(torch.tensor([[1, 2, 3, 4]])).shape
        torch.Size([1, 3])
    """

    def __init__(self, model: PreTrainedModel, chunk: int = 512, *, prefill: int | None = None) -> None:
        if chunk < 1 or (prefill is not None and prefill < 1):
            name, given = ("chunk", chunk) if chunk < 1 else ("prefill", prefill)
            raise DataError(f"{name} is a number of tokens, at least 1, got {given}.")
        model = unwrap(model)  # PEFT's base_model is not a decoder
        if model.get_output_embeddings() is None:
            raise DataError(f"{type(model).__name__} has no output head to score tokens with: load it as a causal LM.")
        reach = reach_of(model)
        if not reach.causal:
            raise DataError(
                f"{type(model).__name__} is bidirectional or has an encoder, so it has no next-token loss. Measure an "
                "encoder with masked_losses or retrieval_at_length."
            )
        if prefill is not None and not reach.prefix_consistent:
            raise DataError(
                f"{type(model).__name__} cannot be read in chunks: by {reach.why} its losses depend on the total "
                "length. Leave prefill out."
            )
        self.model, self.chunk, self.prefill, self.limit = model, chunk, prefill, reach.limit
        # if the total length matters, the forward also reads the last token, as for model.loss
        self.reads_last = not reach.prefix_consistent
        self.chunked = self._head_is_known()
        # states of a prefix are then those that it has alone, and the head makes its logits of them
        self.can_keep_states = self.chunked and not self.reads_last
        self.prefixes: PrefixStates | None = None
        if prefill is not None and (apart := apart_in_chunks(model, prefill)) is not None:
            raise DataError(
                f"{type(model).__name__} cannot be read in chunks: {apart}. Leave prefill out to read a text whole."
            )

    def nll(self, ids: Tensor, *, scored: int | None = None, start: int = 0, reads_last: bool | None = None) -> Tensor:
        """Return -ln p(token t + 1 | tokens 0 to t), float32 [B, L - 1] on the CPU, for `ids` [B, L].

        Args:
            ids: [B, L], L at least 2.
            scored: score only this many last tokens, [B, scored]; None: all but the first.
            start: the position of the first token.
            reads_last: as in `logits`.

        Raises:
            NumericError: a loss is not finite, or their mean too large for a perplexity.
            PositionRangeError: the model's position table ends before L.
            DataError: `scored` is not between 1 and L - 1.
        """
        count = ids.shape[1] - 1 if scored is None else scored
        if not 1 <= count < ids.shape[1]:
            raise DataError(f"of {ids.shape[1]} tokens between 1 and {ids.shape[1] - 1} can be scored, got {count}.")
        scored_ids = ids[:, -count:].to(self.model.device)
        chunks, done = [], 0
        for logits in self.logits(ids, count, start=start, reads_last=reads_last):
            targets = scored_ids[:, done : done + logits.shape[1]]  # [B, K]
            done += logits.shape[1]
            flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            chunks.append(flat.view_as(targets).cpu())
        losses = torch.cat(chunks, dim=1)  # [B, count]
        if not bool(losses.isfinite().all()):
            first = int((~losses.isfinite()).any(dim=0).nonzero()[0])
            raise NumericError(
                f"{type(self.model).__name__}: the loss of token {ids.shape[1] - count + first} is not finite; "
                f"{advice_if_not_finite(self.model)}."
            )
        if (mean := float(losses.mean())) > MOST_NATS:
            raise NumericError(
                f"{type(self.model).__name__}: the mean loss of {losses.shape[1]} tokens is {mean:.4g} nats, too large "
                "for a perplexity; look for weights that are too large."
            )
        return losses

    def last_logits(self, ids: Tensor, count: int) -> Tensor:
        """Return the logits that predict the last `count` tokens of `ids` [B, L], float32 [B, count, V].

        Raises:
            NumericError, PositionRangeError: as `nll`.
        """
        logits = torch.cat(list(self.logits(ids, count)), dim=1)
        if not bool(logits.isfinite().all()):
            raise NumericError(
                f"{type(self.model).__name__}: logits at length {ids.shape[1]} are not finite; "
                f"{advice_if_not_finite(self.model)}."
            )
        return logits

    @torch.inference_mode()  # unlike a with block, the decorator is inactive while a generator is suspended
    def logits(self, ids: Tensor, count: int, *, start: int = 0, reads_last: bool | None = None) -> Iterator[Tensor]:
        """Yield the logits that predict the last `count` tokens of `ids` [B, L], in chunks of float32 [B, K, V].

        Args:
            ids: token ids, [B, L].
            count: number of tokens to predict.
            start: the position of the first token.
            reads_last: whether the forward also reads the last token, which it only has to predict; None: only if the
                model's losses depend on the total length.
        """
        ids = ids.to(self.model.device)
        step, skip = max(1, self.chunk // len(ids)), ids.shape[1] - 1 - count
        if self.reads_last:
            # One token resets stock dynamic NTK, which keeps the longest text's frequencies until a short one.
            token = ids[:1, :1]
            with evaluating(self.model):
                self.model.base_model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)
        reads_last = self.reads_last if reads_last is None else reads_last
        end = start + ids.shape[1] - (not reads_last)
        if self.limit is not None and end > self.limit:
            raise PositionRangeError(
                f"{type(self.model).__name__} ends at {self.limit} tokens, and this text reaches {end}: give a shorter "
                "text, or swap its positions for some without a limit."
            )
        prefixes = self.prefixes if self.prefixes is not None and self.prefixes.wants(ids, start) else None
        missing, kept = 0 if prefixes is None else prefixes.length - 1, list[Tensor]()
        for states, head in self._states(ids if reads_last else ids[:, :-1], start):
            if missing:
                kept.append(states[0, :missing].to("cpu", copy=True))
                missing -= len(kept[-1])
            needed = states[:, max(0, skip) : skip + count]
            skip -= states.shape[1]
            for i in range(0, needed.shape[1], step):
                yield head(needed[:, i : i + step])
        if prefixes is not None:
            prefixes.states[prefixes.key(ids[0].cpu())] = torch.cat(kept)

    @torch.inference_mode()
    def prefix_logits(self, text: np.ndarray, length: int) -> Iterator[Tensor]:
        """Yield the logits that predict the first `length` tokens of a text but the first, in chunks [1, K, V].

        Chunks are alike for all models, whatever the tokens of their forwards.

        Args:
            text: token ids [L], L at least `length`.
            length: tokens of the prefix. Where `prefixes` are of this length and this text, its states are those of
                the forward of the whole text, which is read if it was not yet.

        Raises:
            PositionRangeError: as `nll`.
        """
        prefixes = self.prefixes
        if prefixes is not None and prefixes.length == length and (key := prefixes.key(text)) in prefixes.keys:
            if key not in prefixes.states:
                for _ in self.logits(torch.from_numpy(text[None, : prefixes.reads].astype(np.int64)), 1):
                    pass
            for states in prefixes.states[key].split(self.chunk):
                yield self._head(states[None].to(self.model.device))
            return
        rest: list[Tensor] = []  # a chunk of the head ends where one of the forward ends
        for logits in self.logits(torch.from_numpy(text[None, :length].astype(np.int64)), length - 1):
            *chunks, last = torch.cat([*rest, logits], dim=1).split(self.chunk, dim=1)
            rest = [last]
            yield from chunks
        yield from rest

    def _states(self, ids: Tensor, start: int) -> Iterator[tuple[Tensor, Head]]:
        """Yield the output of each forward, states [B, K, E] or logits [B, K, V], and its conversion to logits."""
        chunk_size = self.prefill or ids.shape[1]
        inputs: dict[str, object] = {"use_cache": ids.shape[1] > chunk_size}
        for begin in range(0, ids.shape[1], chunk_size):
            end = min(begin + chunk_size, ids.shape[1])
            inputs |= {"input_ids": ids[:, begin:end], "attention_mask": torch.ones_like(ids[:, :end])}
            if start:
                inputs["position_ids"] = torch.arange(start + begin, start + end, device=ids.device)[None]
            with evaluating(self.model):  # not while a caller has the states
                output = (self.model.base_model if self.chunked else self.model)(**inputs)
            yield (output.last_hidden_state, self._head) if self.chunked else (output.logits, Tensor.float)
            if inputs["use_cache"] and end < ids.shape[1]:
                if (cache := cache_in(output)) is None:
                    raise DataError(f"{type(self.model).__name__} gives no cache, so it cannot be read in chunks.")
                inputs[cache_argument(self.model)] = cache

    def _head(self, states: Tensor) -> Tensor:
        """Return float32 logits [B, K, V] of hidden states [B, K, E]."""
        config: PreTrainedConfig = self.model.config.get_text_config()
        embeddings = self.model.get_output_embeddings()
        with evaluating(embeddings):
            logits = embeddings(states).float()
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:  # Granite
            logits = logits / config.logits_scaling
        if getattr(config, "final_logit_softcapping", None) is not None:  # Gemma 2
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits

    @torch.inference_mode()
    def _head_is_known(self) -> bool:
        if self.model.base_model is self.model:
            return False
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        ids = torch.arange(4, device=self.model.device)[None] % weight.shape[0]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        with evaluating(self.model):
            expected = self.model(**inputs).logits.float()
            computed = self._head(self.model.base_model(**inputs).last_hidden_state)
        return expected.shape == computed.shape and torch.allclose(
            expected, computed, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE
        )


def advice_if_not_finite(model: PreTrainedModel) -> str:
    """Return what to do where `model` gives no finite loss.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
        >>> advice_if_not_finite(model.half()), advice_if_not_finite(model.float())
        ('use float32', 'it is in float32, so look for weights that are not finite, or too large')
    """
    if model.dtype.itemsize < 4:
        return "use float32"
    return f"it is in {str(model.dtype).removeprefix('torch.')}, so look for weights that are not finite, or too large"


def apart_in_chunks(model: PreTrainedModel, prefill: int, length: int | None = None) -> str | None:
    """Return why reading `model` in chunks with its cache gives other losses than reading it whole; None: it does not.

    Some models of transformers do not continue from their cache as they should, choose keys by scores with ties, or
    compress the keys of each chunk. A random text is read both ways, longer than the model's windows where that is at
    most 4,096 tokens.

    Args:
        model: a causal model.
        prefill: tokens of a chunk; the chunks that are tried are shorter, and multiples of 2, 4 and 8 only if it is.
        length: tokens of the longest text; None: any.

    Example:
        >>> from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel
        >>> model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=16, n_positions=64, n_embd=16, n_layer=1, n_head=2))
        >>> apart_in_chunks(model.eval(), 128)
        'OpenAIGPTLMHeadModel gives no cache'
    """
    model = unwrap(model)
    layers = layer_configs(model.config.get_text_config())
    bounds = [value for layer in layers for name in _BOUNDS if isinstance(value := getattr(layer, name, None), int)]
    limits = [limit for limit in (length, reach_of(model).limit) if limit is not None]
    passed = max((bound for bound in bounds if bound <= min([_MOST_PROBED, *limits])), default=0)
    count = min([_PROBED + passed, *limits])
    align = min(8, prefill & -prefill)
    step = align * (-(-count // (3 * align)) | 1)
    swap = None if (patch := getattr(model, "_posswap", None)) is None else (patch.plan.scheme, patch.plan.max_length)
    state = repr((swap, attention_implementation(model.config), model.dtype, model.device, count, step))
    known = _PROVED.get(model)
    if known is not None and known[0] == state:
        return known[1]
    config, scorer = model.config.get_text_config(), Scorer(model)
    shape = max(1, 8 * _PROBED // count), count
    ids = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    if (pad := getattr(config, "pad_token_id", None)) is not None:  # some models count no position for it
        ids = ids.where(ids != pad, (pad + 1) % config.vocab_size)
    try:
        whole = scorer.nll(ids)
        scorer.prefill = step
        apart = (scorer.nll(ids) - whole).abs()  # [B, L - 1]
        why = f"with its cache, losses are up to {float(apart.max()):.2g} nats from those of one forward"
        half = model.dtype.itemsize <= 2
        same = bool(apart.mean() <= _APART_HALF if half else apart.max() <= _APART)
    except (DataError, NumericError) as error:
        same, why = False, str(error).partition(",")[0]
    _PROVED[model] = state, None if same else why
    return None if same else why


_PROVED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, str | None]] = weakref.WeakKeyDictionary()


def token_nll(model: PreTrainedModel, ids: Tensor, chunk: int = 512) -> Tensor:
    """Return the loss of each token but the first, float32 [B, L - 1], for `ids` [B, L]; see `Scorer.nll`.

    The model is read in eval mode, whatever mode it is in.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> bool((token_nll(model, ids).mean() - model(ids, labels=ids).loss).abs() < 1e-5)
        True
    """
    return Scorer(model, chunk).nll(ids)
