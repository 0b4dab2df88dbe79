"""PEFT adapters that carry the swap of the base they were trained on.

An adapter's folder holds no base model. So each `adapter_config.json` gets a sidecar, `posswap.json`, with the base's
SwapRecord, also when PEFT itself saves (`watch`). Without it an adapter that was trained on a swapped base would load
onto the unswapped one silently. The weights carry the record too (`patching/record/adapter_marks.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from hf_posswap.compat.peft_wrappers import trained_copies_of, watch_adapters
from hf_posswap.compat.transformers_loading import auto_class_name, undoing_what_has_an_inverse
from hf_posswap.errors import (
    CheckpointError,
    MissingDependencyError,
    NotPatchedError,
    OptionError,
    UnsupportedSwapError,
)
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.edits.removed_table import holds
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.record.adapter_marks import SIDECAR, base_of, refuse_misfit
from hf_posswap.patching.record.training import NAME as TRAINING
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.embedding.table_edits import BlendTable, ReplaceTable, rows_name
from hf_posswap.patching.tools.centring import CENTRED
from hf_posswap.schemes.mechanism import building
from hf_posswap.utils.atomic_io import read_object, shown, write_json
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.sentence_models import inner_model, is_sentence_model
from hf_posswap.utils.threads import ignored_warnings
from hf_posswap.utils.untrusted import read_bounded_json
from hf_posswap.utils.weight_shapes import weight_files

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

SIDECAR_VERSION = 1
ADAPTER_CONFIG = "adapter_config.json"
_HINT = "{base} (positions swapped to {scheme}; load this adapter with hf_posswap.load)"


def add_adapter(model: PreTrainedModel, config: PeftConfig, adapter_name: str = "default") -> Any:
    """Return a PEFT model around the swapped `model` whose adapter trains the positions too, and carries the swap.

    It is `peft.get_peft_model` with `position_modules(model)` added to the `modules_to_save` of a copy of `config`.

    Args:
        model: a swapped transformers model.
        config: a PEFT config, for example a LoraConfig.
        adapter_name: for PEFT.

    Raises:
        NotPatchedError: the model carries no swap: use PEFT alone.
        OptionError: `config` is not a PEFT config, or has no modules_to_save.
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
    config, wanted = copy.deepcopy(config), position_modules(model)
    if not isinstance(config, peft.PeftConfig) or (wanted and not hasattr(config, "modules_to_save")):
        raise OptionError(f"give a PEFT config with modules_to_save, such as LoraConfig(), not {brief_repr(config)}.")
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


def _before_saving(model: PreTrainedModel, is_converted: bool) -> None:
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


def save_with_swap(model: PreTrainedModel, folder: Path) -> None:
    """Call the `save_pretrained` of `model`, and see to it that an adapter carries the swap of its base.

    A SentenceTransformer saves all its modules, without a model card, which `push` writes.

    Raises:
        CheckpointError: position parameters that were trained would be lost.
        UnsupportedSwapError: the base has other weights in memory than where it is loaded from; or, inside a
            SentenceTransformer, another mechanism.
    """
    inner = inner_model(model) if is_sentence_model(model) else model
    if getattr(inner, "peft_config", None) is not None:
        refuse_changed_base(inner)
        if inner is not model and is_swapped(inner) and not lies_on_disk(swapped_base(inner)):
            raise UnsupportedSwapError(
                f"sentence-transformers would not open an adapter of {type(swapped_base(inner)).__name__} again: it "
                "loads the base without the swap that was made in memory. What works: save the swapped "
                f"{type(model).__name__} with hf_posswap.save, open that, and put the adapter on it; or merge the "
                "adapter (merge_and_unload), and save the whole."
            )
    refuse_lost_positions(inner)
    with undoing_what_has_an_inverse(unwrap(inner)):
        if inner is model:
            model.save_pretrained(folder)
        else:
            model.save_pretrained(str(folder), create_model_card=False)
            settings = folder / "sentence_bert_config.json"
            if settings.is_file():  # else it is cut to max_position_embeddings, which "dynamic" keeps
                write_json(settings, read_object(settings) | {"max_seq_length": model.max_seq_length})
    write_sidecars(inner, folder)


def write_sidecars(model: PreTrainedModel, folder: Path, adapters: Collection[str] | None = None) -> None:
    """Write the sidecar next to the config of each adapter of `model` in `folder`, if its base is swapped.

    Where the base was swapped after it had been loaded, the adapter config no longer names it: whatever loads the
    adapter without hf_posswap would put it on the unswapped base. Its value is then an instruction and not a valid
    name, so that loading fails with it in the error.

    Args:
        model: a PEFT model, or a transformers model with adapters.
        folder: that they were saved to.
        adapters: names of those that were; None: all.
    """
    if not is_swapped(model):
        return
    base = swapped_base(model)
    on_disk = lies_on_disk(base)
    names = (getattr(model, "peft_config", None) or ()) if adapters is None else adapters
    above = [folder / ADAPTER_CONFIG] if adapters is None or "default" in adapters else []
    for path in [*above, *(folder / name / ADAPTER_CONFIG for name in names)]:  # others are not of this save
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
        if config.get("auto_mapping"):  # without a task type PEFT's Auto classes load the class that it names
            auto = {"base_model_class": auto_class_name(type(base).__name__), "parent_library": "transformers"}
            config["auto_mapping"] |= auto
        if config != read_object(path):
            write_json(path, config)
        write_json(path.parent / SIDECAR, sidecar)
    _correct_card(folder / "README.md", base.name_or_path)


def _correct_card(path: Path, base: str | None) -> None:
    """Tag PEFT's model card, and take a local path out of it: the Hub takes `base_model` for a repository."""
    from huggingface_hub import ModelCard

    if not path.is_file():
        return
    card = ModelCard.load(path)
    card.data.tags = sorted({*(card.data.tags or ()), "hf_posswap"})
    for tag in [tag for tag in card.data.tags if base and tag.startswith("base_model:") and Path(base).exists()]:
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


def is_swapped(model: PreTrainedModel) -> bool:
    """Return whether `model`, or the base inside a PEFT model, carries a swap."""
    return getattr(base_of(model), "_posswap", None) is not None


def swapped_base(model: PreTrainedModel) -> PreTrainedModel:
    """Return the swapped transformers model: `model`, or the base inside a PEFT model.

    Raises:
        NotPatchedError: it carries no swap.
    """
    base = base_of(model)
    if getattr(base, "_posswap", None) is None:
        raise NotPatchedError(f"{type(base).__name__} carries no swap: there are no positions to train or to record.")
    return base


def lies_on_disk(base: PreTrainedModel) -> bool:
    """Return whether the checkpoint that a swapped model was loaded from carries the swap itself.

    Raises:
        CheckpointError: its config.json cannot be read any more.
    """
    if not applied_swap(base).can_undo:
        return True
    path = Path(base.name_or_path or "/nowhere") / "config.json"  # a blend keeps its undo when it is loaded
    try:
        return path.is_file() and "posswap" in read_bounded_json(path)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"cannot read {shown(path)}, from whose folder the base of this adapter was loaded: {error}. Whether that "
            "checkpoint carries the swap is not known: restore the file, and save again."
        ) from error


def position_modules(model: PreTrainedModel) -> list[str]:
    """Return the names for PEFT's `modules_to_save` of the position modules that training changes; [] where none does.

    PEFT freezes the base, and what a scheme learns with it (the numbers of FIRE, Kerple or T5's bias, the rows of a
    learned table). Named in `modules_to_save` they are trained in full and saved with the adapter.

    Args:
        model: a swapped model.

    Raises:
        NotPatchedError: it carries no swap.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "kerple")
        >>> position_modules(model)
        ['posswap']
    """
    return sorted({path.rpartition(".")[2] for path, _ in _learned(swapped_base(model))})


def refuse_lost_positions(model: PreTrainedModel) -> None:
    """Refuse to save an adapter without the position parameters that were, or are being, trained.

    Raises:
        CheckpointError: names them, and what to do.
    """
    if getattr(model, "peft_config", None) is None or not is_swapped(model):
        return
    base = swapped_base(model)
    unsaved = [(path, module) for path, module in _learned(base) if not trained_copies_of(module)]
    lost = [path for path, module in unsaved if _is_trained(base, path, module)]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)}: trained position parameters that are not part of the adapter would be lost. Wrap the "
            f"model with modules_to_save={position_modules(base)} (hf_posswap.add_adapter does), or save the swapped "
            "base first, and put the adapter on what hf_posswap.load returns; what is trained already is kept by "
            "merge_and_unload(), and saving the whole model."
        )


def refuse_changed_base(model: PreTrainedModel) -> None:
    """Refuse to save an adapter whose base has, in memory, other weights than the checkpoint that it would be put on.

    Args:
        model: a PEFT model, or the base inside it.

    Raises:
        UnsupportedSwapError: names the function of this package that changed them, and what to do.
    """
    if not is_swapped(model):
        return
    base = swapped_base(model)
    changed = {
        "fit_rotation has changed queries and keys": applied_swap(base).fitted,
        "centre_table has changed the token embeddings": getattr(base, CENTRED, False),
    }
    for change in (change for change, was in changed.items() if was):
        raise UnsupportedSwapError(
            f"{change} of {type(base).__name__}, which an adapter does not hold: save the model with hf_posswap.save "
            "before an adapter is put on it, load it again, and train adapters on that."
        )


def _learned(base: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the modules of a swapped model with parameters of its scheme: path and module."""
    learned = []
    for edit in applied_swap(base).plan.edits:
        is_table = isinstance(edit, ReplaceTable | BlendTable) and edit.scheme is not None and edit.scheme.trainable
        if is_table or isinstance(edit, AddMechanism):
            module = base.get_submodule(edit.path)
            learned += [(edit.path, module)] if any(True for _ in module.parameters()) else []
    return learned


def _is_trained(base: PreTrainedModel, path: str, module: nn.Module) -> bool:
    """Return whether `module` has, or may get, other values than the swap alone put there."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    if lies_on_disk(base):  # as it was loaded, or trained since and then frozen
        trained = False
        whole = {f"{path}.{n}": p for n, p in module.named_parameters() if not (p.is_meta or hasattr(p, "placements"))}
        for file in weight_files(Path(base.name_or_path or "/nowhere")) or ():
            with safe_open(file, framework="pt") as weights:
                stored = {name: weights.get_tensor(name) for name in whole.keys() & set(weights.keys())}
            same_shape = {name: rows for name, rows in stored.items() if rows.shape == whole[name].shape}  # not sharded
            trained |= not all(holds(whole[name], rows) for name, rows in same_shape.items())
        return trained
    learned_edits, swap = (AddMechanism, ReplaceTable, BlendTable), applied_swap(base)
    edit, saved = next(
        (edit, saved) for edit, saved in swap.done() if isinstance(edit, learned_edits) and edit.path == path
    )
    if isinstance(edit, AddMechanism):
        with building():
            fresh = dict(edit.scheme.mechanism(edit.geometry).named_parameters())
        return any(
            not torch.equal(p.detach().cpu(), fresh[n].detach().to(p.dtype)) for n, p in module.named_parameters()
        )
    rows: Any = getattr(module, rows_name(module)).detach()
    if isinstance(edit, BlendTable):
        return not torch.equal(module.new, edit.new_rows(rows))  # type: ignore[arg-type]
    expected = edit.scheme.table(saved["weight"].detach()[edit.offset :], edit.rows, edit.geometry)
    return not torch.equal(rows[edit.offset :].cpu(), expected.to(rows.dtype))
