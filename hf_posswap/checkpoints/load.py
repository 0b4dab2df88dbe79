"""Loading base and swapped checkpoints in one call, strictly."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checkpoints.adapters_load import HUB_ARGUMENTS, adapter_source, load_with_base
from hf_posswap.checkpoints.record_check import checked_plan
from hf_posswap.compat.transformers_auto import auto_mapping
from hf_posswap.compat.transformers_files import file_of
from hf_posswap.compat.transformers_loading import ignored_on_load
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.patching.apply.applied import AppliedSwap
from hf_posswap.patching.apply.patch_model import apply_plan
from hf_posswap.patching.apply.submodel_guard import guard_saving
from hf_posswap.patching.apply.version_guard import guard_version
from hf_posswap.patching.inspect.bounds import Bounds, bounds_in, refuse_endless
from hf_posswap.patching.inspect.describe import model_class_of, read_config
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.patching.record.record import native_config, native_config_class
from hf_posswap.utils.atomic_io import settle
from hf_posswap.utils.auto_classes import refused_code
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.hub_session import hub_reading
from hf_posswap.utils.threads import PROCESS
from hf_posswap.utils.weight_shapes import FLOATS, INDEX, WEIGHTS, folder_kinds, refuse_outside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OTHER_WEIGHTS = {"state_dict", "subfolder", "variant"}
"""Arguments of `from_pretrained` that have it take other weights than those in the folder itself."""


@hub_reading
def load(
    source: str | Path,
    *,
    model_class: Any = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Return the model of a checkpoint, with its swap if it carries one.

    Unlike `from_pretrained` it is strict: a checkpoint whose weights do not fit the model that its config names is
    refused instead of being completed with random ones. Threads may call it at the same time: they load one after the
    other. `from_pretrained` itself, called in threads, leaves weights untied in transformers 5.14 to 5.24.

    Args:
        source: a folder or a Hub id; that of a PEFT adapter gives base, swap and adapter together. Or a GGUF file
            (extra `gguf`), on this machine or on the Hub as owner/name/file.gguf: it is converted once, into the cache.
        model_class: a class (or Auto class) of transformers to load instead of the one that config.json names; heads
            that the checkpoint lacks are then new.
        trust_remote_code: run code that the checkpoint (or the base that an adapter names) brings: its config class,
            its `generate`. A swapped checkpoint of this package needs none: what is installed here runs.
        gguf_file: the name of the GGUF file in `source`, where several lie there.
        kwargs: for `from_pretrained`: dtype, device_map, attn_implementation, revision, token, ...

    Raises:
        CheckpointError: nothing readable is there, or weights are missing or do not fit, are integers where the model
            has floating-point numbers, or lie outside the folder by its index, or config.json asks for a model far
            larger than they are: that is refused before any memory is taken. Of a GGUF file, also: transformers cannot
            express what it holds.
        MissingDependencyError: a GGUF file without the extra `gguf`.
        RemoteCodeError: it needs code, which was not asked for.
        RecordError: its swap cannot be read, or its config and weights are not what the swap leaves behind.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "rope", max_length=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     load(folder).config.posswap["scheme"]["name"]
        'rope'
    """
    hub = {k: kwargs[k] for k in HUB_ARGUMENTS if k in kwargs}
    settle(Path(source))
    source = checkpoint_of(source, gguf_file, **hub)
    adapter = adapter_source(source, **hub)
    if adapter is not None:
        return load_with_base(
            source, adapter, load, model_class=model_class, trust_remote_code=trust_remote_code, **kwargs
        )
    config = read_config(source, trust_remote_code=trust_remote_code, **hub)
    chosen = model_class or model_class_of(config)
    config_class: Any = type(config)
    if native_config_class(config) is not config_class and auto_mapping(chosen) is None:
        chosen = swapped_class(chosen)
    try:
        with refused_code(source, trust_remote_code):
            elsewhere = kwargs.keys() & _OTHER_WEIGHTS
            refuse_outside(Path(source) / str(kwargs.get("subfolder", "")))
            bounds = Bounds() if elsewhere else bounds_in(source, config)
            refuse_endless(chosen, config, bounds, trust_remote_code=trust_remote_code)
            with PROCESS:  # transformers changes functions and the default dtype of the process meanwhile
                model, info = chosen.from_pretrained(
                    str(source), config=config, output_loading_info=True, trust_remote_code=trust_remote_code, **kwargs
                )
    except PosswapError:
        raise
    except Exception as error:  # a model's own code may raise anything, given a config that fits no weights
        reason = error if str(error) else type(error).__name__
        raise CheckpointError(f"cannot load {str(source)!r}: {reason}") from error
    prefix = f"{model.base_model_prefix}."
    _refuse_misfits(source, info, None if model_class is None else _keys_held(config, prefix), prefix)
    if not elsewhere:
        _refuse_integers(source, model, info, hub)
    record = getattr(model.config, "posswap", None)
    if record is not None and getattr(model, "_posswap", None) is None:
        reapply_on_load(model, checked_plan(model))
    return model


def _refuse_misfits(source: str | Path, info: dict[str, Any], required: set[str] | None, prefix: str) -> None:
    """Refuse weights that do not fit; `required` are the keys that it must have, None: all of the model's."""
    missing = sorted(key for key in info["missing_keys"] if required is None or key.removeprefix(prefix) in required)
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    unexpected = sorted(info["unexpected_keys"]) if required is None else []
    if missing or mismatched or unexpected:
        raise CheckpointError(
            f"the weights of {str(source)!r} do not fit its config: missing {missing[:8]}, of another shape "
            f"{mismatched[:8]}, unknown {unexpected[:8]}."
        )


def _refuse_integers(source: str | Path, model: Any, info: dict[str, Any], hub: dict[str, Any]) -> None:
    """Refuse integers in the files where `model` has floating-point weights: transformers takes them for those.

    The config of a quantized checkpoint of transformers says how they are read.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return
    known = {} if Path(source).is_dir() else hub | {"local_files_only": True}
    weight_paths = [file_of(source, name, certain=False, **known) for name in (WEIGHTS, INDEX)]
    folder = next((path.parent for path in weight_paths if path is not None), None)
    dtypes = {} if folder is None else folder_kinds(folder)
    integers = {name: dtype for name, dtype in dtypes.items() if not dtype.startswith(FLOATS)}
    prefix, state = f"{model.base_model_prefix}.", model.state_dict()
    dropped = set(info["unexpected_keys"])
    ignored = [re.compile(pattern) for pattern in ignored_on_load(model)]

    def lands(name: str) -> bool:
        names = {name, f"{prefix}{name}", name.removeprefix(prefix)}
        if names & state.keys():
            return any(state[each].is_floating_point() for each in names & state.keys())
        converted = not names & dropped and not any(pattern.search(name) for pattern in ignored)
        return converted and name.endswith(("weight", "bias"))  # as experts, which become one tensor

    wrong = sorted(name for name in integers if lands(name))
    if wrong:
        examples = ", ".join(f"{name} ({integers[name]})" for name in wrong[:4])
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"the weights of {str(source)!r} hold integers where {type(model).__name__} has floating-point numbers: "
            f"{examples}{more}. If it is a quantized checkpoint, its config.json lacks quantization_config, by which "
            "they are read: take both from where it was made."
        )


def _keys_held(config: Any, prefix: str) -> set[str]:
    """Return the keys, less the base model's prefix, of the model that the checkpoint's config names."""
    config_class: Any = type(config)
    named = model_class_of(config)
    if native_config_class(config) is not config_class:
        named = swapped_class(named)
    with torch.device("meta"):
        return {key.removeprefix(prefix) for key in named(copy.deepcopy(config)).state_dict()}


def reapply_on_load(model: Any, plan: SwapPlan) -> None:
    """Give a natively loaded model what its checkpoint cannot hold: the plan, the guard, frozen tables, kept angles.

    Raises:
        UnsupportedSwapError: this version of transformers or torch is untested, and the swap could not be proved.
    """
    guard_version(model, plan, apply_plan, config=native_config(model.config))
    for edit in plan.edits:
        edit.reload(model)
    model._posswap = AppliedSwap(plan, model.config, guard=guard_saving(model))
