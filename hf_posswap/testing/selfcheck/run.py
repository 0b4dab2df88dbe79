"""The self-check: what a swap depends on in transformers, against known results; then a swap of each kind; a report.

A release that changes one of these parts breaks swaps; its check names it before any model is built. Each check returns
an error message, or None.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.compat.transformers_attention import register_attention_function, rope_function
from hf_posswap.compat.transformers_calls import keys_of_call, tokens_before
from hf_posswap.testing.selfcheck.trial import KINDS, RESTS_ON, FamilyKind, Trial, touch_of, words_of
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "posswap_selfcheck"
"""Name of an observing attention function, which stays registered with transformers until the process ends."""
ROPE_TYPES: dict[str, dict[str, object]] = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def cache_offsets() -> str | None:
    """Caches report the position of the next token, and the number of keys that it sees."""
    import transformers

    config = _llama()
    keys = torch.zeros(1, 2, 3, 16)
    growing, fixed = transformers.DynamicCache(config=config), transformers.StaticCache(config, max_cache_len=8)
    for cache, expected in ((growing, (5, 0)), (fixed, (8, 0))):
        cache.update(keys, keys, 0)
        before = int(tokens_before(cache, 0))
        if before != 3:
            return f"{type(cache).__name__}.get_query_offset says {before} after 3 tokens"
        sizes = tuple(map(int, keys_of_call(cache, 2, 0)))
        if sizes != expected:
            return f"{type(cache).__name__}.get_mask_sizes says {sizes} for 2 tokens after 3, not {expected}"
    return None


def attention_interface() -> str | None:
    """A registered attention function runs, with its own mask and the layer's q, k and v."""
    from hf_posswap.testing.tiny import tiny_model

    seen: list[tuple[object, ...]] = []

    def watching(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: object
    ) -> tuple[Tensor, Tensor | None]:
        seen.append((query.shape, key.shape, value.shape, None if attention_mask is None else attention_mask.shape))
        return query.transpose(1, 2), None

    register_attention_function(NAME, watching)
    model = tiny_model("LlamaForCausalLM", meta=False)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1, 1]]))
    if len(seen) != model.config.num_hidden_layers:
        return f"a registered attention function ran {len(seen)} times in {model.config.num_hidden_layers} layers"
    query, key, value, mask = seen[0]
    expected = ((1, 4, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16), (1, 1, 4, 4))
    return None if (query, key, value, mask) == expected else f"q, k, v and mask have shapes {seen[0]}, not {expected}"


def rope_functions() -> str | None:
    """Each rope type computes the angles of its definition."""
    from hf_posswap.geometry import Geometry
    from hf_posswap.schemes import make_scheme

    shape = Geometry(64, 4, 2, head_dim=16, num_layers=4, original_length=32, causal=True)
    for name, options in ROPE_TYPES.items():
        settings = {"rope_type": name, "rope_theta": 1e4, **options}
        config = _llama(rope_parameters=settings, max_position_embeddings=64)
        inv_freq, factor = rope_function(name)(config, torch.device("cpu"))
        fields = {key: value for key, value in options.items() if key != "original_max_position_embeddings"}
        ours = make_scheme(name, **fields).resolve(shape, None).angles(shape)  # type: ignore[attr-defined]
        if not torch.allclose(inv_freq, ours.inv_freq, rtol=1e-5, atol=0) or abs(factor - ours.attention_factor) > 1e-6:
            return f"rope type {name!r} gives other angles than its definition"
    return None


def rope_settings() -> str | None:
    """A config keeps its rope parameters, its own keys among them, and a rotary module is built from them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "a_key_of_the_model": [1, 2]}
    config = _llama(rope_parameters={key: given[key] for key in ("rope_type", "rope_theta", "factor")})
    config.rope_parameters["a_key_of_the_model"] = [1, 2]  # afterwards: a config that is built warns of it
    kept = config.to_dict()["rope_parameters"]
    if {key: kept.get(key) for key in given} != given:
        return f"rope_parameters {given} come back as {kept}"
    first = float(LlamaRotaryEmbedding(config).inv_freq[0])
    return None if first == 0.25 else f"a linear factor of 4 makes the first angle {first:g}, not 0.25"


def _llama(**changes: object) -> Any:
    from transformers import LlamaConfig

    from hf_posswap.testing.tiny import tiny_config

    return tiny_config(LlamaConfig, **changes)


UPSTREAM: dict[str, Callable[[], str | None]] = {
    "Cache.get_query_offset, Cache.get_mask_sizes": cache_offsets,
    "AttentionInterface, AttentionMaskInterface": attention_interface,
    "modeling_rope_utils.ROPE_INIT_FUNCTIONS": rope_functions,
    "config.rope_parameters, *RotaryEmbedding": rope_settings,
}
"""The checks, by the API that they test."""


PACKAGES = ("hf-posswap", "transformers", "torch", "safetensors", "accelerate", "peft")


def selfcheck() -> Report:
    """Check that this installation of hf_posswap works, in less than a minute and without the network.

    First, the parts of transformers that a swap depends on are checked against known results. Then, for one tiny model
    of each kind of family: the swap is planned, applied and verified; steps with a cache equal a full forward; saving
    and loading preserves the logits; and `unpatch_model` restores the exact logits. Nothing is raised: failures are in
    the report, with the transformers code that they depend on.

    Example:
        >>> report = selfcheck()
        >>> report.ok, report.checks[0].subject
        (True, 'transformers')
    """
    started = time.monotonic()
    checks = [*_of_upstream(), *(check for family in KINDS for check in _check_family(family))]
    return Report(versions(), tuple(checks), time.monotonic() - started)


def _of_upstream() -> Iterator[Check]:
    for name, check in UPSTREAM.items():
        try:
            wrong = check()
        except Exception as error:  # a missing API may raise anything
            wrong = words_of(error)
        yield Check("transformers", name, wrong is None, wrong or "as known", None if wrong is None else name)


def _check_family(family: FamilyKind) -> Iterator[Check]:
    broken = False
    for name, step in Trial(family).steps().items():
        if broken:
            yield Check(str(family), name, None, "not tried")
            continue
        try:
            yield Check(str(family), name, True, step())
        except Exception as error:  # a changed release may raise anything
            broken = True
            yield Check(str(family), name, False, words_of(error), touch_of(error, RESTS_ON[name]))


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        subject: "transformers", or a kind of family with its swap.
        step: the step that is checked.
        ok: whether it passed; None: skipped, because an earlier step failed.
        said: the outcome as text.
        touch: if it failed, the transformers code that it depends on, and the place in hf_posswap; otherwise None.
    """

    subject: str
    step: str
    ok: bool | None
    said: str
    touch: str | None = None


@dataclass(frozen=True, repr=False)
class Report(ResultView):
    """The report of `selfcheck`.

    Attributes:
        versions: versions of Python and of the packages that a swap depends on.
        checks: all checks, in order.
        seconds: duration in seconds.
    """

    versions: dict[str, str]
    checks: tuple[Check, ...]
    seconds: float

    def _repr_facts(self) -> dict[str, object]:
        seconds = round(self.seconds, 1)
        return {"ok": self.ok, "checks": len(self.checks), "failed": len(self.failed), "seconds": seconds}

    def _html_rows(self) -> list[tuple[str, str]]:
        outcome = {True: "ok", False: "FAILED", None: "skipped"}
        rows = [(f"{check.subject}: {check.step}", f"{outcome[check.ok]}: {check.said}") for check in self.checks]
        return [*self.versions.items(), *rows]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The failed checks, without skipped ones."""
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON data."""
        checks = [dict(vars(check)) for check in self.checks]
        return {"ok": self.ok, "versions": self.versions, "seconds": round(self.seconds, 1), "checks": checks}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a swap depends on, or "not installed".

    Example:
        >>> list(versions())[:3]
        ['python', 'hf-posswap', 'transformers']
    """
    return {"python": platform.python_version()} | {name: _installed(name) for name in PACKAGES}


def _installed(package: str) -> str:
    if package == "hf-posswap":  # the running code, installed or not
        from hf_posswap import __version__

        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
