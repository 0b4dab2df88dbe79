"""PEFT adapters that carry the swap of the base they were trained on.

An adapter's folder holds no base model. So each `adapter_config.json` gets a sidecar, `posswap.json`, with the base's
SwapRecord, also when PEFT itself saves (`watch`). Without it an adapter that was trained on a swapped base would load
onto the unswapped one silently. The weights carry the record too (`patching/record/adapter_marks.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_posswap.checkpoints.adapters_positions import (
    is_swapped,
    lies_on_disk,
    position_modules,
    refuse_changed_base,
    refuse_lost_positions,
    swapped_base,
)
from hf_posswap.compat.peft_wrappers import watch_adapters
from hf_posswap.errors import MissingDependencyError, UnsupportedSwapError
from hf_posswap.patching.record.adapter_marks import SIDECAR, refuse_misfit
from hf_posswap.patching.record.training import NAME as TRAINING
from hf_posswap.utils.atomic_io import read_object, write_json
from hf_posswap.utils.sentence_models import inner_model, is_sentence_model
from hf_posswap.utils.threads import ignored_warnings

SIDECAR_VERSION = 1
ADAPTER_CONFIG = "adapter_config.json"
_HINT = "{base} (positions swapped to {scheme}; load this adapter with hf_posswap.load)"


def add_adapter(model: Any, config: Any, adapter_name: str = "default") -> Any:
    """Return a PEFT model around the swapped `model` whose adapter trains the positions too, and carries the swap.

    It is `peft.get_peft_model` with `position_modules(model)` added to the config's `modules_to_save`. `config` itself
    is not changed.

    Args:
        model: a swapped transformers model.
        config: a PEFT config, for example a LoraConfig.
        adapter_name: for PEFT.

    Raises:
        NotPatchedError: the model carries no swap: use PEFT alone.
        MissingDependencyError: peft is not installed.

    Example:
        >>> from peft import LoraConfig
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "kerple")
        >>> config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        >>> sorted(add_adapter(model, config).peft_config["default"].modules_to_save)
        ['posswap']
    """
    peft = import_peft()
    config = copy.deepcopy(config)
    wanted = position_modules(model)
    if wanted:
        config.modules_to_save = sorted({*(config.modules_to_save or ()), *wanted})
    with without_peft_warning():
        return peft.get_peft_model(model, config, adapter_name=adapter_name)


def watch(peft_model: ModuleType) -> None:
    """Have PEFT's own models carry the swap of their base when they save themselves, and refuse another base's adapter.

    Args:
        peft_model: the module `peft.peft_model`.
    """
    watch_adapters(peft_model, _before_saving, write_sidecars, refuse_misfit)


def _before_saving(model: Any, is_converted: bool) -> None:
    """Refuse to save an adapter that could not be loaded onto the same base again.

    Raises:
        UnsupportedSwapError: PEFT is to convert weights, and those of this base are saved in other shapes; or the base
            has other weights in memory than where it is loaded from.
        CheckpointError: position parameters that were trained would be lost; or the config that the base was loaded
            from cannot be read any more.
    """
    refuse_changed_base(model)
    refuse_lost_positions(model)
    if not is_swapped(model):
        return
    lies_on_disk(swapped_base(model))
    if is_converted and swapped_base(model).config.posswap["route"] == "plugin":
        raise UnsupportedSwapError(
            "path_initial_model_for_weight_conversion is not supported for an adapter of a model that only hf_posswap "
            "runs: PEFT computes with weights that are saved in other shapes. Save the adapter without it, next to its "
            "initial base, or merge it (merge_and_unload) and save the model."
        )


def save_with_swap(model: Any, folder: Path) -> None:
    """Call the `save_pretrained` of `model`, and see to it that an adapter carries the swap of its base.

    A SentenceTransformer saves all its modules, without a model card, which `push` writes.

    Raises:
        CheckpointError: position parameters that were trained would be lost.
        UnsupportedSwapError: the base has other weights in memory than where it is loaded from.
    """
    inner = inner_model(model) if is_sentence_model(model) else model
    if getattr(inner, "peft_config", None) is not None:
        refuse_changed_base(inner)
    refuse_lost_positions(inner)
    if inner is model:
        model.save_pretrained(folder)
    else:
        model.save_pretrained(str(folder), create_model_card=False)
    write_sidecars(inner, folder)


def write_sidecars(model: Any, folder: Path) -> None:
    """Write the sidecar next to the config of each adapter of `model` in `folder`, if its base is swapped.

    Where the base was swapped after it had been loaded, the adapter config no longer names it: whatever loads the
    adapter without hf_posswap would put it on the unswapped base. Its value is then an instruction and not a valid
    name, so that loading fails with it in the error.
    """
    if not is_swapped(model):
        return
    base = swapped_base(model)
    on_disk = lies_on_disk(base)
    names = getattr(model, "peft_config", None) or ()  # any other folder below is not of this save
    for path in [folder / ADAPTER_CONFIG, *(folder / name / ADAPTER_CONFIG for name in names)]:
        if not path.is_file():
            continue
        refuse_changed_base(base)
        config = read_object(path)
        name = base.name_or_path or None
        sidecar = {"version": SIDECAR_VERSION, "base": name, "base_is_swapped": on_disk, "record": base.config.posswap}
        if (trained := getattr(base.config, TRAINING, None)) is not None:
            sidecar["training"] = trained
        if not on_disk:
            shown = _HINT.format(base=name or type(base).__name__, scheme=base.config.posswap["scheme"]["name"])
            config["base_model_name_or_path"] = shown
            write_json(path, config)
        write_json(path.parent / SIDECAR, sidecar)
    _correct_card(folder / "README.md", base.name_or_path)


def _correct_card(path: Path, base: str) -> None:
    """Tag PEFT's model card, and take a local path out of it: the Hub takes `base_model` for a repository."""
    from huggingface_hub import ModelCard

    if not path.is_file():
        return
    card = ModelCard.load(path)
    card.data.tags = sorted({*(card.data.tags or ()), "hf_posswap"})
    for tag in [tag for tag in card.data.tags if tag.startswith("base_model:") and Path(base).exists()]:
        card.data.tags.remove(tag)
    if base and Path(base).exists():
        card.data.base_model = None
    card.save(path)


def import_peft() -> Any:
    """Return the module peft.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError("peft", "train") from error
    return peft


@contextmanager
def without_peft_warning() -> Iterator[None]:
    """Inside the block, what PEFT asks of transformers by a deprecated name is not reported to the user."""
    with ignored_warnings("`is_gradient_checkpointing` is deprecated", FutureWarning):
        yield
