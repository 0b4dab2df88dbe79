"""The models of a comparison: objects, folders, Hub ids, or one base with different schemes.

`tokenizer_for` gives their common tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from hf_posswap.checkpoints.load import load
from hf_posswap.comparison.names import candidate_names
from hf_posswap.compat.accelerate_state import hook_of
from hf_posswap.compat.peft_wrappers import adapters_at_work
from hf_posswap.compat.python_objects import packages_of
from hf_posswap.compat.torch_modules import IDENTIFIED, copy_module, foreign_code
from hf_posswap.compat.transformers_attention import attention_function, attention_implementation
from hf_posswap.compat.transformers_loading import unpack_4_bit_weights
from hf_posswap.compat.transformers_models import lasting_values
from hf_posswap.errors import DataError, OptionError, PosswapError
from hf_posswap.evaluation.cost import choose_prefill
from hf_posswap.evaluation.scoring import Reach, Scorer, reach_of
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.patching.apply.version_guard import package_digest
from hf_posswap.patching.inspect.describe import read_config
from hf_posswap.patching.plan.plan_swap import SchemeChoice, check_max_length, unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.schemes.base import make_scheme, names_one_scheme
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.devices import attended_dtype
from hf_posswap.utils.digests import code_digests, json_digest, plain_parts
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.scheme_text import SWAP_OPTIONS
from hf_posswap.utils.sentence_models import is_sentence_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_TOKENIZER_ADVICE = "give one by --tokenizer, or by tokenizer in Python"
_HASH_CHUNK = 1 << 26
_SAMPLE = (
    "The quick brown fox, aged 10.5 years, said: 'naïve café'.\n\tdef f(x): return [x ** 2, {1: \"two\"}]  # ok\n"
    "Привет, мир. Γειά σου. שלום مرحبا नमस्ते สวัสดี 你好，世界。こんにちは 안녕하세요 🙂\n"
)


@dataclass(frozen=True)
class Candidate:
    """One model of a comparison.

    Attributes:
        source: a transformers model, a folder, or a Hub id. A model object is never changed.
        scheme: the scheme to put in without training, as in `patch_model`; None: no swap.
        options: fields of a scheme given by name.
        max_length: tokens that the swap should support; None: the longest measured length, within the window as in
            `patch_model`.
        name: the label in results; None: derived from source and scheme, see `hf_posswap.comparison.names`.

    Example:
        >>> Candidate("org/llama", "yarn:factor=4").label
        'llama+yarn:factor=4'
    """

    source: str | Path | PreTrainedModel
    scheme: SchemeChoice | None = None
    options: dict[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """Its name without regard to other candidates; `candidate_names` makes the names of several unique."""
        return candidate_names([self])[0]

    def label_of(self, source: str) -> str:
        """Return its name in results for a source named `source`.

        Example:
            >>> Candidate("org/llama", "yarn", {"factor": 4.0}).label_of("llama")
            'llama+yarn:factor=4.0'
        """
        if self.name is not None or self.scheme is None:
            return source if self.name is None else self.name
        scheme = _scheme_label(self.scheme)
        fields = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{source}+{scheme}{(',' if ':' in scheme else ':') if fields else ''}{fields}"

    def check(self) -> None:
        """Check the source, the scheme and its length before a model is loaded.

        Raises:
            UnknownNameError, OptionError, SchemeError: as `make_scheme`, or an invalid length or source.
        """
        if not isinstance(self.source, str | Path | torch.nn.Module):
            raise OptionError(
                f"a model of a comparison is a transformers model, a folder or a Hub id, got {brief_repr(self.source)}."
                " A field of a scheme that is named like an argument goes into its name: 'kerple:seed=1'."
            )
        source = self.source
        if not isinstance(source, str | Path) and is_sentence_model(source):
            inner_path = next(path for path, module in source.named_modules() if module is unwrap(source))
            raise OptionError(
                f"a comparison pools vectors by the mean, whatever the pooling of this {type(source).__name__}: give "
                f"the model inside, model.get_submodule({inner_path!r}), and tokenizer=model.tokenizer."
            )
        check_max_length(self.max_length)
        if isinstance(self.scheme, str) or (isinstance(self.scheme, Mapping) and names_one_scheme(self.scheme)):
            make_scheme(
                self.scheme, **{name: value for name, value in self.options.items() if name not in SWAP_OPTIONS}
            )


def _scheme_label(scheme: SchemeChoice) -> str:
    """Return a scheme as it appears in a label: a text as it is, otherwise its name, or the names of its stacks.

    Example:
        >>> _scheme_label("yarn:factor=4"), _scheme_label({"rope_type": "yarn", "factor": 4.0})
        ('yarn:factor=4', 'yarn')
    """
    if isinstance(scheme, str):
        return scheme
    if isinstance(scheme, Mapping) and not names_one_scheme(scheme) and all(isinstance(key, str) for key in scheme):
        return "+".join(_scheme_label(each) for each in scheme.values())
    return make_scheme(scheme).name


@dataclass(frozen=True)
class Subject:
    """A loaded candidate, ready to be measured.

    Attributes:
        name: the label in results.
        model: the model in eval mode.
        scoring: its scorer, with chunked prefill if the longest length needs it; None for a model with an encoder.
        reach: the lengths that it can run.
        plan: its swap plan, or None.
        identity: what its losses and answers depend on, as JSON data. Its times and memory also depend on the
            machine, which `measure_length_cost` adds; losses on one differ from another's by the order of sums alone.
    """

    name: str
    model: PreTrainedModel
    scoring: Scorer | None
    reach: Reach
    plan: SwapPlan | None
    identity: dict[str, Any]

    @property
    def scorer(self) -> Scorer:
        """The scorer that computes the losses of a causal model.

        Raises:
            DataError: the model is not causal.
        """
        if self.scoring is None:
            how = "has an encoder" if self.model.config.is_encoder_decoder else "is bidirectional"
            raise DataError(f"{type(self.model).__name__} {how}: this metric is for causal models.")
        return self.scoring


@dataclass(frozen=True)
class ModelLoader:
    """Loads models, each source once; candidates with a scheme share the weights of their base.

    Attributes:
        loaded: models by source.
        device: device of loaded models; None: the CPU.
        dtype: dtype of loaded models; None: float32 on the CPU, elsewhere that of the checkpoint.
        trust_remote_code: run code that comes with a folder or Hub id if loading needs it.
    """

    loaded: dict[str | int, PreTrainedModel]
    device: torch.device | str | None = None
    dtype: torch.dtype | str | None = None
    trust_remote_code: bool = False

    def model(self, candidate: Candidate, length: int) -> PreTrainedModel:
        """Return the model of `candidate` with its scheme.

        Args:
            candidate: the candidate to load.
            length: the longest measured length, the default length of a swap if it is beyond the window.

        Raises:
            CheckpointError: the source cannot be loaded, or (RemoteCodeError) needs code without `trust_remote_code`.
            UnsupportedSwapError, UnsupportedModelError, SchemeError, OptionError: as `patch_model`.
        """
        key = str(candidate.source) if isinstance(candidate.source, str | Path) else id(candidate.source)
        if key not in self.loaded:
            self.loaded[key] = self._load(candidate.source)
        base = self.loaded[key]
        if candidate.scheme is None:
            return base
        swapped = shell_of(base)
        beyond = length if length > reach_of(base).window else None  # within it, the scheme says how far it reaches
        patch_model(swapped, candidate.scheme, max_length=candidate.max_length or beyond, **candidate.options)
        return swapped.eval()

    def _load(self, source: PreTrainedModel | str | Path) -> PreTrainedModel:
        """Return the model of a folder or Hub id on its device; a model object in eval mode unchanged."""
        if not isinstance(source, str | Path):  # eval() would change the user's model in place
            return shell_of(source).eval() if source.training else source
        on_cpu = self.device is None or torch.device(self.device).type == "cpu"
        dtype = self.dtype or (torch.float32 if on_cpu else "auto")
        model: Any = load(source, dtype=dtype, trust_remote_code=self.trust_remote_code)
        return (model if self.device is None else model.to(self.device)).eval()


def shell_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` that shares its parameters but not modules, buffers and config, so it can be patched.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> shell = shell_of(model)
        >>> shell.lm_head.weight is model.lm_head.weight, shell.transformer is model.transformer
        (True, False)
    """
    return copy_module(model, {id(parameter): parameter for parameter in model.parameters()})


def make_subject(name: str, model: PreTrainedModel, longest: int) -> Subject:
    """Prepare `model` to be measured up to `longest` tokens.

    Raises:
        DataError: the model is causal and has no output head.
    """
    from transformers import __version__ as transformers_version

    target = unwrap(model)
    reach = reach_of(target)
    most = longest if reach.limit is None else min(longest, reach.limit)
    prefill = choose_prefill(target, most, reach)
    scoring = Scorer(target, prefill=prefill) if reach.causal else None
    patch, attention = getattr(target, "_posswap", None), attention_implementation(target.config)
    classes = {cls for module in target.modules() for cls in type(module).__mro__ if issubclass(cls, torch.nn.Module)}
    code = [package_digest(), *code_digests({cls.__module__ for cls in classes}).values()]
    identity = {
        "versions": {
            "hf_posswap": sys.modules[__name__.partition(".")[0]].__version__,
            "torch": torch.__version__,
            "transformers": transformers_version,
        },
        "code": json_digest(sorted(code)),  # a checkout changes under one version
        "fingerprint": fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": attention,
        "device": target.device.type,
        "attended": str(attended_dtype(torch.empty(0, dtype=target.dtype, device=target.device))),  # under autocast
        "float32_matmul": torch.get_float32_matmul_precision(),
        "prefill": prefill,
    }
    # accelerate's hooks wrap the forward of the class
    put = any("forward" in vars(module) and hook_of(module) is None for module in target.modules())
    if put or foreign_code(target) or packages_of(attention_function(attention, None)) - IDENTIFIED:
        identity["code put in at run time, of this run alone"] = uuid4().hex
    return Subject(name, target, scoring, reach, patch.plan if patch else None, identity)


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of 32 hex digits over the weights, config and numbers of `model`, its swap, and own schemes' code.

    Of a model with PEFT adapters, it also covers which of them are at work.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> before = fingerprint(model)
        >>> model = patch_model(model, "rope")
        >>> fingerprint(model) == before
        False
    """
    config, record = lasting_values(model.config), getattr(model.config, "posswap", None) or {}
    own, adapters = code_digests(sorted({*(record.get("imports") or {}).values()})), adapters_at_work(model)
    total = hashlib.sha256(json.dumps([config, own, adapters], sort_keys=True, default=str).encode())
    unpack_4_bit_weights(model)
    reach = reach_of(model)
    steady = reach.prefix_consistent or not reach.causal  # else the last text's length sets frequencies, and more
    for path, module in model.named_modules():  # a scale of the scores, say, which neither weights nor config show
        total.update(f"{path} {type(module).__module__}.{type(module).__qualname__}".encode())  # such as an activation
        for name, value in sorted(vars(module).items()):
            number = isinstance(value, float) or (steady and isinstance(value, int))
            if number and not name.startswith("_") and name != "training":
                total.update(f"{path}.{name} {value}".encode())
    unsaved = dict(model.named_buffers()) if steady else {}  # which are not saved: frequencies
    for name, value in sorted((unsaved | model.state_dict()).items()):
        total.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        for part in plain_parts(value):
            flat = part.detach().contiguous().flatten().view(torch.uint8)
            for start in range(0, len(flat), _HASH_CHUNK):
                total.update(flat[start : start + _HASH_CHUNK].cpu().numpy().tobytes())
    return total.hexdigest()[:32]


def tokenizer_for(
    candidates: Sequence[Candidate], given: Any = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer for all candidates.

    Args:
        candidates: their folders and Hub ids, and those that model objects were loaded from, may contain tokenizers.
        given: a tokenizer, a folder or a Hub id; None: as in `hf_posswap.compare`.
        trust_remote_code: run code that comes with a tokenizer.

    Raises:
        DataError: there is no tokenizer, one cannot be read, or two candidates have different tokenizers.
        RemoteCodeError: a tokenizer needs code without `trust_remote_code`.
    """
    if given is not None and not isinstance(given, str | Path):
        return given
    named = [str(c.source) for c in candidates if isinstance(c.source, str | Path)] if given is None else [str(given)]
    loaded = [str(getattr(getattr(c.source, "config", None), "name_or_path", None) or "") for c in candidates]
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    for source in dict.fromkeys([*named, *(filter(None, loaded) if given is None else [])]):
        try:
            tokenizers[source] = load_tokenizer(source, trust_remote_code=trust_remote_code)
        except PosswapError:  # what a model object was loaded from may be gone
            if given is None and source in named and not Path(source).exists():
                read_config(source, trust_remote_code=trust_remote_code)  # without one, that is the larger problem
            if source in named or not named:
                raise
    if not tokenizers:
        raise DataError(f"a model object has no tokenizer: {_TOKENIZER_ADVICE}.")
    (first, tokenizer), *others = tokenizers.items()
    for source, other in others:
        if _content(other) != _content(tokenizer):
            why = "have different tokenizers: their losses per token cannot be compared"
            raise DataError(f"{first} and {source} {why}. If they cut your texts alike, {_TOKENIZER_ADVICE}.")
    return tokenizer


def _content(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """Return what decides the ids of any text: not how many of them a caller last wanted, or with what padding."""
    ids = tokenizer(_SAMPLE, verbose=False)["input_ids"]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ids, tokenizer.get_vocab(), tokenizer.get_added_vocab()
    return ids, json.loads(backend.to_str()) | {"truncation": None, "padding": None}
