"""Loading adapters: base, swap and adapter together, and never on a base with another mechanism."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.adapters import (
    ADAPTER_CONFIG,
    SIDECAR_VERSION,
    import_peft,
    without_peft_warning,
)
from hf_posswap.compat.peft_wrappers import read_adapter_weights
from hf_posswap.compat.transformers_files import file_of
from hf_posswap.errors import CheckpointError, PosswapError, RecordError, RemoteCodeError
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.record.adapter_marks import (
    ADAPTER_WEIGHTS,
    SIDECAR,
    kinds_in,
    kinds_in_file,
    record_in_file,
    refuse_integers,
    refuse_other_base,
)
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.utils.atomic_io import read_object
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.hub_session import hub_reading
from hf_posswap.utils.untrusted import read_bounded_json

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
MOST_ADAPTERS = 8
"""That may lie on top of one another."""
_loading: ContextVar[tuple[str, ...]] = ContextVar("posswap_adapters_loading", default=())
"""The adapters whose bases are being loaded, the outermost first."""


@dataclass(frozen=True)
class AdapterSource:
    """What an adapter's folder says of its base.

    Attributes:
        base: folder or Hub id of the base, or None where nothing names it.
        revision: of the base.
        base_is_swapped: whether the base's checkpoint carries the swap itself.
        record: of the base's swap: that of the sidecar, else of marked weights, else of the base's own folder; None
            where none of them has one.
        training: what the sidecar tells of the training, as JSON; None: nothing.
    """

    base: str | None
    revision: str | None
    base_is_swapped: bool
    record: SwapRecord | None
    training: dict[str, Any] | None = None


@hub_reading
def adapter_source(source: str | Path, **hub: Any) -> AdapterSource | None:
    """Return the base of the adapter at `source`; None where `source` is not an adapter.

    Args:
        source: a folder or a Hub id.
        hub: cache_dir, local_files_only, revision, subfolder, token, ... for a Hub id.

    Raises:
        CheckpointError: a file of the adapter cannot be read.
        RecordError: the sidecar is invalid, or of an unknown version.
    """
    source = checkpoint_of(source, **hub)
    config = _read(source, ADAPTER_CONFIG, hub, certain=False)
    if config is None:
        return None
    sidecar = _read(source, SIDECAR, hub, certain=True)
    named = config.get("base_model_name_or_path")
    if sidecar is None:
        return AdapterSource(named, config.get("revision"), False, _record_beside(source, named, hub))
    fields = {"version": int, "base": str | None, "base_is_swapped": bool, "record": dict}
    training = sidecar.pop("training", None)
    good = (
        set(sidecar) == set(fields)
        and isinstance(training, dict | None)
        and all(isinstance(sidecar[name], field_type) for name, field_type in fields.items())
    )
    if not good or sidecar["version"] != SIDECAR_VERSION:
        raise RecordError(
            f"{SIDECAR} of {str(source)!r} must hold {', '.join(fields)}, of version {SIDECAR_VERSION}: update "
            "hf_posswap, or check the file."
        )
    base = named if sidecar["base_is_swapped"] else sidecar["base"]
    record = SwapRecord.from_dict(sidecar["record"])
    return AdapterSource(base, config.get("revision"), sidecar["base_is_swapped"], record, training)


def load_adapter(
    model: Any, source: str | Path, *, trainable: bool = False, trust_unrecorded: bool = False, **hub: Any
) -> Any:
    """Return a PEFT model: `model` with the adapter at `source`, if it has the mechanism that it was trained on.

    Args:
        model: a transformers model, swapped as the adapter's base was.
        source: a folder or a Hub id.
        trainable: make the adapter trainable.
        trust_unrecorded: take an adapter without a sidecar as one that was trained with the swap of `model`.
        hub: cache_dir, local_files_only, revision, subfolder, token, ... for a Hub id.

    Raises:
        CheckpointError: no readable adapter is there, or its weights do not fit, or are integers.
        RecordError: it was trained on another mechanism: both are named.
        MissingDependencyError: peft is not installed.

    Example:
        >>> import copy, tempfile
        >>> from peft import LoraConfig
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import add_adapter, patch_model
        >>> base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> swapped = patch_model(base, "rope")
        >>> trained = add_adapter(
        ...     copy.deepcopy(swapped), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trained.save_pretrained(folder)
        ...     type(load_adapter(swapped, folder)).__name__
        'PeftModel'
    """
    adapter = adapter_source(source, **hub)
    if adapter is None:
        raise CheckpointError(f"{str(source)!r} holds no adapter ({ADAPTER_CONFIG}).")
    _refuse_other(unwrap(model), adapter, str(source), trust_unrecorded)
    return _with_adapter(model, source, trainable, hub)


def load_with_base(source: str | Path, adapter: AdapterSource, load: Any, **kwargs: Any) -> Any:
    """Return a PEFT model: the adapter at `source` on its base, swapped as it was.

    Args:
        source: a folder or a Hub id.
        adapter: what `adapter_source` says of it.
        load: `hf_posswap.load`.
        kwargs: for `load` of the base; those for the Hub are for the adapter as well, and `revision` for it alone.

    Raises:
        CheckpointError: nothing names the base, or it cannot be loaded, or the adapter does not fit.
        RecordError: the base carries another mechanism.
    """
    if not adapter.base:
        raise CheckpointError(
            f"the adapter {str(source)!r} does not say where its base is: load the base, swap it, and call "
            "hf_posswap.load_adapter(model, adapter)."
        )
    above = (*_loading.get(), _identity(source))
    if _identity(adapter.base) in above or len(above) > MOST_ADAPTERS:
        names = " -> ".join(map(repr, [*above, _identity(adapter.base)]))
        raise CheckpointError(
            f"the adapter {str(source)!r} names {adapter.base!r} as its base, and adapters name one another without an "
            f"end ({names}): name the model that it was trained on in base_model_name_or_path of its {ADAPTER_CONFIG}"
            f"{'' if adapter.record is None else f', and as base in its {SIDECAR}'}."
        )
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    passed = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
    if adapter.revision:
        passed["revision"] = adapter.revision
    token = _loading.set(above)
    try:
        model = load(adapter.base, **passed)
    except RemoteCodeError:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"the base of the adapter {str(source)!r}, {adapter.base!r}, cannot be loaded: {error}"
        ) from error
    finally:
        _loading.reset(token)
    if adapter.record is not None and not adapter.base_is_swapped and getattr(model, "_posswap", None) is None:
        record = adapter.record
        patch_model(model, record.choice(), **record.arguments)
    _refuse_other(unwrap(model), adapter, str(source), trust_unrecorded=True)  # it is the base that the adapter names
    _tell_training(unwrap(model), adapter)
    adapted = _with_adapter(model, source, False, hub)
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = adapter.base  # on disk it may be a hint in its place
    return adapted


def _identity(source: str | Path) -> str:
    """Return what identifies an adapter: its folder with links resolved, or its id."""
    path = Path(source)
    return str(path.resolve()) if path.is_dir() else str(source)


def _with_adapter(model: Any, source: str | Path, trainable: bool, hub: dict[str, Any]) -> Any:
    peft = import_peft()
    try:
        refuse_integers(unwrap(model), _dtypes(source, hub), str(source))
        with without_peft_warning():
            adapted = peft.PeftModel.from_pretrained(model, str(source), is_trainable=trainable, **hub)
    except PosswapError:
        raise
    except Exception as error:  # PEFT may raise anything, given a config that holds other types than it asks for
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the adapter {str(source)!r} cannot be loaded: {reason}") from error
    return adapted


def _dtypes(source: str | Path, hub: dict[str, Any]) -> dict[str, str]:
    """Return the dtypes of an adapter's weights, by name."""
    weights = file_of(source, ADAPTER_WEIGHTS, certain=False, **hub)
    return kinds_in(read_adapter_weights(source, **hub)[1]) if weights is None else kinds_in_file(weights)


def _tell_training(model: Any, adapter: AdapterSource) -> None:
    """Set the record of the adapter's training on its base, for its plan."""
    if adapter.training is None or adapter.record is None:
        return
    model.config.posswap_training = adapter.training
    model._posswap.plan = as_trained(model._posswap.plan, adapter.record, model.config)


def _refuse_other(model: Any, adapter: AdapterSource, source: str, trust_unrecorded: bool) -> None:
    """Refuse an adapter whose base had another mechanism than `model` has."""
    if adapter.record is not None:
        refuse_other_base(model, adapter.record, source)
    elif not trust_unrecorded and getattr(model, "_posswap", None) is not None:
        raise RecordError(
            f"the adapter {source!r} has no {SIDECAR}: it was trained on an unswapped model, or saved without "
            f"hf_posswap, and this {type(model).__name__} carries {model._posswap.plan.record.make_scheme()}. If it "
            "was trained with that, pass trust_unrecorded=True to hf_posswap.load_adapter."
        )


def _record_beside(source: str | Path, base: Any, hub: dict[str, Any]) -> SwapRecord | None:
    """Return the record in the weights of an adapter without a sidecar, or of the folder of its base; None: no swap."""
    weights = file_of(source, ADAPTER_WEIGHTS, certain=False, **hub)
    if weights is not None and (record := record_in_file(weights)) is not None:
        return record
    config = Path(base) / "config.json" if isinstance(base, str) and base else None
    carried = read_object(config).get("posswap") if config is not None and config.is_file() else None
    return None if carried is None else SwapRecord.from_dict(carried)


def _read(source: str | Path, name: str, hub: dict[str, Any], *, certain: bool) -> dict[str, Any] | None:
    """Return the JSON object in the file `name` of a folder or Hub id; None where there is no such file.

    Args:
        source: a folder or a Hub id.
        name: of the file.
        hub: arguments for the Hub.
        certain: raise where the Hub does not tell whether there is such a file; otherwise that counts as none.
    """
    try:
        path = file_of(source, name, certain=certain, **hub)
    except OSError as error:
        if not certain:
            return None
        raise CheckpointError(f"cannot tell whether {str(source)!r} has a {name}: {error}") from error
    if path is None:
        return None
    try:
        value = read_bounded_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {name} of {str(source)!r}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} of {str(source)!r} must hold an object, got {type(value).__name__}.")
    return value
