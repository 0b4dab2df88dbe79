"""Loading base and swapped checkpoints in one call, strictly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from hf_posswap.checkpoints.adapters_load import HUB_ARGUMENTS, adapter_source, load_with_base
from hf_posswap.checkpoints.auto import plugin_model_class
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.files import settle
from hf_posswap.patching.apply import Patch
from hf_posswap.patching.config_class import native_config_class
from hf_posswap.patching.describe import model_class_of, read_config
from hf_posswap.patching.interface import AttendThroughInterface
from hf_posswap.patching.plan import plan_swap
from hf_posswap.patching.record import SwapRecord, native_config
from hf_posswap.patching.rotary import KeepAngles
from hf_posswap.patching.rotary_actions import RebuildRotary
from hf_posswap.patching.table_actions import GuardLength, RemoveTable, ReplaceTable, SaveKeys

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(source: str | Path, *, model_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """Return the model of a checkpoint, with its swap if it carries one.

    Unlike `from_pretrained` it is strict: a checkpoint whose weights do not fit the model that its config names is
    refused instead of being completed with random ones.

    Args:
        source: a folder or a Hub id; that of a PEFT adapter gives base, swap and adapter together.
        model_class: a class (or Auto class) of transformers to load instead of the one that config.json names; heads
            that the checkpoint lacks are then new.
        kwargs: for `from_pretrained`: dtype, device_map, attn_implementation, revision, token, ...

    Raises:
        CheckpointError: nothing readable is there, or weights are missing or do not fit.
        RecordError: its swap cannot be read.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> _ = patch_model(model, "rope", max_length=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     load(folder).config.posswap["scheme"]["name"]
        'rope'
    """
    settle(Path(source))
    hub = {k: kwargs[k] for k in HUB_ARGUMENTS if k in kwargs}
    adapter = adapter_source(source, **hub)
    if adapter is not None:
        return load_with_base(source, adapter, load, model_class=model_class, **kwargs)
    config = read_config(source, **hub)
    chosen = model_class or model_class_of(config)
    config_class: Any = type(config)
    if native_config_class(config) is not config_class and not hasattr(chosen, "_model_mapping"):
        chosen = plugin_model_class(chosen, config_class)
    try:
        model, info = chosen.from_pretrained(str(source), config=config, output_loading_info=True, **kwargs)
    except PosswapError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"cannot load {str(source)!r}: {error}") from error
    prefix = f"{model.base_model_prefix}."
    _refuse_misfits(source, info, None if model_class is None else _keys_held(config, prefix), prefix)
    record = getattr(model.config, "posswap", None)
    if record is not None and getattr(model, "_posswap", None) is None:
        _dress(model, SwapRecord.from_dict(record))
    return model


def _refuse_misfits(source: str | Path, info: dict[str, Any], held: set[str] | None, prefix: str) -> None:
    """Refuse weights that do not fit; `held` are the keys that the checkpoint must hold, None: all of the model's."""
    missing = sorted(key for key in info["missing_keys"] if held is None or key.removeprefix(prefix) in held)
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    unexpected = sorted(info["unexpected_keys"]) if held is None else []
    if missing or mismatched or unexpected:
        raise CheckpointError(
            f"the weights of {str(source)!r} do not fit its config: missing {missing[:8]}, of another shape "
            f"{mismatched[:8]}, unknown {unexpected[:8]}."
        )


def _keys_held(config: Any, prefix: str) -> set[str]:
    """Return the keys, less the base model's prefix, of the model that the checkpoint's config names."""
    config_class: Any = type(config)
    named = model_class_of(config)
    if native_config_class(config) is not config_class:
        named = plugin_model_class(named, config_class)
    with torch.device("meta"):
        return {key.removeprefix(prefix) for key in named(copy.deepcopy(config)).state_dict()}


def _dress(model: Any, record: SwapRecord) -> None:
    """Give a natively loaded model what its checkpoint cannot hold: the plan, the guard, frozen tables, kept angles."""
    with torch.device("meta"):
        skeleton = type(model)(native_config(model.config))
    plan = plan_swap(skeleton, record.choice(), **record.arguments)
    for edit in plan.edits:
        if hasattr(edit.action, "dress"):
            edit.action.dress(model)
        elif isinstance(edit.action, GuardLength | RemoveTable | SaveKeys | AttendThroughInterface):
            edit.action.apply(model, [])
        elif isinstance(edit.action, RebuildRotary):
            rotary = model.get_submodule(edit.path)
            rotary.register_forward_pre_hook(KeepAngles(rotary))
        elif isinstance(edit.action, ReplaceTable):
            model.get_submodule(edit.path).weight.requires_grad_(edit.action.scheme.trainable)
    model._posswap = Patch(plan, [], model.config)
