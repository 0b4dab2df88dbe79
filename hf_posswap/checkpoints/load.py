"""Loading checkpoints in one call, strictly: base and swapped models, adapters with their base, and the example.

A swap record is checked against config and weights, and an adapter loads only on a base with the same mechanism.
"""

from __future__ import annotations

import copy
import re
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.adapters import (
    ADAPTER_CONFIG,
    SIDECAR_VERSION,
    import_peft,
    without_peft_warning,
)
from hf_posswap.compat.peft_wrappers import LEFT_OVER, MISSING, read_adapter_weights
from hf_posswap.compat.transformers_loading import auto_mapping, file_of, ignored_on_load
from hf_posswap.compat.transformers_models import building_on_meta
from hf_posswap.errors import CheckpointError, PosswapError, RecordError, RemoteCodeError
from hf_posswap.patching.apply.applied import AppliedSwap, applied_swap
from hf_posswap.patching.apply.guard import set_resizing
from hf_posswap.patching.apply.patch_model import apply_plan, patch_model
from hf_posswap.patching.apply.submodel_guard import guard_saving
from hf_posswap.patching.apply.version_guard import guard_version
from hf_posswap.patching.inspect.describe import model_class_of, read_config
from hf_posswap.patching.inspect.untrusted_config import (
    Bounds,
    bounds_in,
    config_problems,
    recorded_plan,
    refuse_endless,
    refuse_lie,
)
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.adapter_marks import (
    ADAPTER_WEIGHTS,
    SIDECAR,
    kinds_in,
    kinds_in_file,
    record_in_file,
    refuse_integers,
    refuse_other_base,
)
from hf_posswap.patching.record.config_class import refuse_other_values
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.patching.record.record import SwapRecord, native_config, native_config_class
from hf_posswap.patching.tools.scheme_values import set_blend, set_logit_scale
from hf_posswap.schemes import Blend, NoPE, RNoPE
from hf_posswap.utils.atomic_io import read_object, settle
from hf_posswap.utils.auto_classes import refused_code
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.hub_session import hub_reading
from hf_posswap.utils.threads import PROCESS
from hf_posswap.utils.untrusted import read_bounded_json
from hf_posswap.utils.weight_shapes import FLOATS, INDEX, WEIGHTS, folder_kinds, refuse_outside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
MOST_ADAPTERS = 8
"""That may lie on top of one another."""
_loading: ContextVar[tuple[str, ...]] = ContextVar("posswap_adapters_loading", default=())
"""The adapters whose bases are being loaded, the outermost first."""
_MODEL_VALUES = {"dtype", "torch_dtype", "attn_implementation", "experts_implementation", "quantization_config"}
"""Arguments of `from_pretrained` that configs know too, and that a model is made by."""
_OTHER_WEIGHTS = {"state_dict", "subfolder", "variant"}
"""Arguments of `from_pretrained` that have it take other weights than those in the folder itself."""
EXAMPLE = Path(__file__).resolve().parents[1] / "quickstart" / "model"
"""Its folder; the README there says how it was trained."""


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
        kwargs: for `from_pretrained`: dtype, device_map, attn_implementation, revision, token, ..., and values of the
            config, such as num_labels.

    Raises:
        CheckpointError: nothing readable is there, or weights are missing or do not fit, are integers where the model
            has floating-point numbers, or lie outside the folder by its index, or config.json asks for a model far
            larger than they are: that is refused before any memory is taken. Of a GGUF file, also: transformers cannot
            express what it holds.
        MissingDependencyError: a GGUF file without the extra `gguf`.
        RemoteCodeError: it needs code, which was not asked for.
        RecordError: its swap cannot be read, or its config and weights are not what the swap leaves behind; or a value
            of the config that the swap sets was given otherwise.

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
        return _load_with_base(source, adapter, model_class=model_class, trust_remote_code=trust_remote_code, **kwargs)
    config = read_config(source, trust_remote_code=trust_remote_code, **hub)
    chosen = model_class or model_class_of(config)
    config_class = type(config)
    swapped = getattr(config, "posswap", None)
    if isinstance(swapped, dict):
        refuse_other_values(config, swapped.get("original"), kwargs)
    for name in [name for name in kwargs if name not in _MODEL_VALUES and hasattr(config, name)]:
        setattr(config, name, kwargs.pop(name))  # as from_pretrained does that reads the config itself
    if native_config_class(config) is not config_class and auto_mapping(chosen) is None:
        chosen = swapped_class(chosen)
    try:
        with refused_code(source, trust_remote_code):
            elsewhere = kwargs.keys() & _OTHER_WEIGHTS
            refuse_outside(Path(source) / str(kwargs.get("subfolder", "")))
            bounds = Bounds() if elsewhere else bounds_in(source, config)
            refuse_endless(chosen, config, bounds, trust_remote_code=trust_remote_code)
            with PROCESS:  # transformers changes functions and the default dtype of the process meanwhile
                loaded: Any = chosen.from_pretrained(
                    str(source), config=config, output_loading_info=True, trust_remote_code=trust_remote_code, **kwargs
                )
                model, info = loaded
    except PosswapError:
        raise
    except Exception as error:  # a model's own code may raise anything, given a config that fits no weights
        reason = error if str(error) else type(error).__name__
        raise CheckpointError(f"cannot load {str(source)!r}: {reason}") from error
    prefix = f"{model.base_model_prefix}."
    named = "" if model_class is None else f"{model_class_of(config).base_model_prefix}."
    _refuse_misfits(source, info, None if model_class is None else _keys_held(config, named), prefix, named)
    if not elsewhere:
        _refuse_integers(source, model, info, hub)
    record = getattr(model.config, "posswap", None)
    if record is not None and getattr(model, "_posswap", None) is None:
        reapply_on_load(model, checked_plan(model))
    return model


def _refuse_misfits(
    source: str | Path, info: dict[str, Any], required: set[str] | None, prefix: str, named: str
) -> None:
    """Refuse weights that do not fit.

    Args:
        source: of the checkpoint.
        info: what transformers says of the load.
        required: the keys that it must have, less the prefix of its class; None: all of the model's.
        prefix: of the base model in the loaded class.
        named: that in the class that config.json names: a sibling may have another.
    """
    missing = sorted(key for key in info["missing_keys"] if required is None or key.removeprefix(prefix) in required)
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    unexpected = sorted(info["unexpected_keys"]) if required is None else []
    if not (missing or mismatched or unexpected):
        return
    saved = named or "".join(f"{key.partition('.')[0]}." for key in unexpected[:1])
    advice = f"key_mapping={{{'^' + re.escape(saved)!r}: {prefix!r}}}" if saved != prefix else ""
    if missing and required is not None:
        advice = (
            " The class that config.json names has them under other names (another prefix, or shared embeddings), and "
            f"transformers would leave these random. What works: {advice}{'; or ' * bool(advice)}load without "
            "model_class, and take the part that you need from there, by model.get_encoder() or model.get_decoder()."
        )
    elif missing and {saved + key.removeprefix(prefix) for key in missing} == set(unexpected):
        advice = f" A model saved after a load with key_mapping has the old names. What works: {advice}."
    else:
        advice = ""
    raise CheckpointError(
        f"the weights of {str(source)!r} do not fit its config: missing {missing[:8]}, of another shape "
        f"{mismatched[:8]}, unknown {unexpected[:8]}.{advice}"
    )


def _refuse_integers(source: str | Path, model: PreTrainedModel, info: dict[str, Any], hub: dict[str, object]) -> None:
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


def _keys_held(config: PreTrainedConfig, prefix: str) -> set[str]:
    """Return the keys, less the base model's prefix, of the model that the checkpoint's config names."""
    config_class = type(config)
    named = model_class_of(config)
    if native_config_class(config) is not config_class:
        named = swapped_class(named)
    with building_on_meta():
        return {key.removeprefix(prefix) for key in named(copy.deepcopy(config)).state_dict()}


def reapply_on_load(model: Any, plan: SwapPlan) -> None:
    """Give a natively loaded model what its checkpoint cannot hold: the plan, the guard, frozen tables, kept angles.

    Raises:
        UnsupportedSwapError: this version of transformers or torch is untested, and the swap could not be proved.
    """
    guard_version(model, plan, apply_plan, config=native_config(model.config))
    for edit in plan.edits:
        edit.reload(model)
    set_resizing(model, plan.named)
    model._posswap = AppliedSwap(plan, model.config, guard=guard_saving(model))


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
    training: dict[str, object] | None = None


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
    config = _read_object(source, ADAPTER_CONFIG, hub, certain=False)
    if config is None:
        return None
    sidecar = _read_object(source, SIDECAR, hub, certain=True)
    named = config.get("base_model_name_or_path")
    if sidecar is None:
        return AdapterSource(named, config.get("revision"), False, _record_beside(source, named, hub))
    fields = {"version": int, "base": str | None, "base_is_swapped": bool, "record": dict}
    training = sidecar.pop("training", None)
    good = set(sidecar) == set(fields) and isinstance(training, dict | None)
    good = good and all(isinstance(sidecar[name], field_type) for name, field_type in fields.items())
    if not good or sidecar["version"] != SIDECAR_VERSION:
        raise RecordError(
            f"{SIDECAR} of {str(source)!r} must hold {', '.join(fields)}, of version {SIDECAR_VERSION}: update "
            "hf_posswap, or check the file."
        )
    base = named if sidecar["base_is_swapped"] else sidecar["base"]
    record = SwapRecord.from_dict(sidecar["record"])
    return AdapterSource(base, config.get("revision"), sidecar["base_is_swapped"], record, training)


def load_adapter(
    model: PreTrainedModel,
    source: str | Path,
    *,
    is_trainable: bool = False,
    trust_unrecorded: bool = False,
    **hub: object,
) -> PeftModel:
    """Return a PEFT model: `model` with the adapter at `source`, if it has the mechanism that it was trained on.

    Args:
        model: a transformers model, swapped as the adapter's base was.
        source: a folder or a Hub id.
        is_trainable: make the adapter trainable.
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
    return _with_adapter(model, source, is_trainable, hub)


def _load_with_base(source: str | Path, adapter: AdapterSource, **kwargs: Any) -> Any:
    """Return a PEFT model: the adapter at `source` on its base, swapped as it was.

    Args:
        source: a folder or a Hub id.
        adapter: what `adapter_source` says of it.
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
    base = unwrap(model)
    if adapter.record is not None and getattr(base, "_posswap", None) is not None:
        set_as_trained(base, adapter.record)
    _refuse_other(base, adapter, str(source), trust_unrecorded=True)  # it is the base that the adapter names
    if adapter.training is not None and adapter.record is not None:
        base.config.posswap_training = adapter.training
        applied_swap(base).plan = as_trained(applied_swap(base).plan, adapter.record, base.config)
    adapted = _with_adapter(model, source, False, hub)
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = adapter.base  # on disk it may be a hint in its place
    return adapted


def set_as_trained(base: PreTrainedModel, record: SwapRecord) -> None:
    """Set the weight of a blend and a logit scale, which are not parameters, to the values in `record`."""
    chosen = record.choice()
    schemes = list(chosen.values()) if isinstance(chosen, dict) else [chosen]
    carried = list(applied_swap(base).plan.schemes.values())
    weights = {scheme.weight for scheme in schemes if isinstance(scheme, Blend)}
    if len(weights) == 1 and any(isinstance(scheme, Blend) for scheme in carried):
        set_blend(base, weights.pop())
    main, now = schemes[-1], carried[-1]
    if (
        isinstance(main, NoPE | RNoPE)
        and isinstance(now, NoPE | RNoPE)
        and None not in (main.logit_scale, now.logit_scale)
    ):
        set_logit_scale(base, main.logit_scale)  # type: ignore[arg-type]


def _identity(source: str | Path) -> str:
    """Return what identifies an adapter: its folder with links resolved, or its id."""
    path = Path(source)
    return str(path.resolve()) if path.is_dir() else str(source)


def _with_adapter(model: PreTrainedModel, source: str | Path, trainable: bool, hub: Mapping[str, object]) -> PeftModel:
    peft = import_peft()
    try:
        weights = file_of(source, ADAPTER_WEIGHTS, certain=False, **hub)
        dtypes = kinds_in(read_adapter_weights(source, **hub)[1]) if weights is None else kinds_in_file(weights)
        refuse_integers(unwrap(model), dtypes, str(source))
        with without_peft_warning():
            adapted = peft.PeftModel.from_pretrained(model, str(source), is_trainable=trainable, **hub)
    except PosswapError:
        raise
    except Exception as error:  # PEFT may raise anything, given a config that holds other types than it asks for
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the adapter {str(source)!r} cannot be loaded: {reason}") from error
    left_over, missing = vars(adapted).pop(LEFT_OVER, ()), vars(adapted).pop(MISSING, ())
    if left_over or missing:
        name, task = type(unwrap(model)).__name__, getattr(adapted.active_peft_config, "task_type", None)
        if hasattr(adapted.base_model, "unload"):  # the model is the caller's; an active copy would take its place
            adapted.delete_adapter(adapted.active_adapter)
            adapted.base_model.unload()
        names = ", ".join((left_over or missing)[:4]) + (" and more" if len(left_over or missing) > 4 else "")
        raise CheckpointError(
            f"the adapter {str(source)!r} holds weights that {name} has no place for: {names}. It was trained on "
            f"another class{f', for the task {task}' if task else ''}. What works: its base as that class, by "
            "model_class of hf_posswap.load, such as AutoModelForSequenceClassification, with num_labels as it was."
            if left_over
            else f"the adapter {str(source)!r} lacks weights that its config asks for: {names}. PEFT would leave them "
            "as it made them. Take its weights and its config from the same save."
        )
    return adapted


def _refuse_other(model: PreTrainedModel, adapter: AdapterSource, source: str, trust_unrecorded: bool) -> None:
    """Refuse an adapter whose base had another mechanism than `model` has."""
    if adapter.record is not None:
        refuse_other_base(model, adapter.record, source)
    elif not trust_unrecorded and getattr(model, "_posswap", None) is not None:
        raise RecordError(
            f"the adapter {source!r} has no {SIDECAR}: it was trained on an unswapped model, or saved without "
            f"hf_posswap, and this {type(model).__name__} carries "
            f"{applied_swap(model).plan.record.make_scheme()}. If it "
            "was trained with that, pass trust_unrecorded=True to hf_posswap.load_adapter."
        )


def _record_beside(source: str | Path, base: object, hub: Mapping[str, object]) -> SwapRecord | None:
    """Return the record in the weights of an adapter without a sidecar, or of the folder of its base; None: no swap."""
    weights = file_of(source, ADAPTER_WEIGHTS, certain=False, **hub)
    if weights is not None and (record := record_in_file(weights)) is not None:
        return record
    config = Path(base) / "config.json" if isinstance(base, str) and base else None
    carried = read_object(config).get("posswap") if config is not None and config.is_file() else None
    return None if carried is None else SwapRecord.from_dict(carried)


def _read_object(source: str | Path, name: str, hub: Mapping[str, object], *, certain: bool) -> dict[str, Any] | None:
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


def checked_plan(model: PreTrainedModel) -> SwapPlan:
    """Return the plan of the swap that a stock `model`, read from a native checkpoint, records in its config.

    What the record says must be what config and weights say: the route, the type, the lengths, the frequencies that
    the rope parameters make, settings of modules, zeros where a table was taken away, the formula's rows where a table
    is frozen. What it says of the model before the swap goes into the plan and nowhere else.

    Args:
        model: as `from_pretrained` of its stock class returns it; it is not changed.

    Raises:
        RecordError: it says something else, or nothing that can be carried out: what differs, by name.
    """
    skeleton, plan = recorded_plan(model.config, type(model))
    weights = [(edit.path, edit.check_loaded(model)) for edit in plan.edits]  # those on meta cannot be read
    weight_problems = [f"{path} {problem}" for path, problem in weights if problem is not None]
    refuse_lie(plan, [*config_problems(model, skeleton, plan), *weight_problems])
    return plan


def load_example() -> PreTrainedModel:
    """Load a GPT-2 of 0.9 million parameters and 128 learned positions, trained on Python's source code.

    It is part of the package, so nothing is downloaded. Its tokenizer is in the folder `model.name_or_path`.

    Returns:
        A stock `GPT2LMHeadModel` in eval mode on the CPU, in float32.

    Example:
        >>> from hf_posswap import load_example
        >>> model = load_example()
        >>> type(model).__name__, model.config.max_position_embeddings
        ('GPT2LMHeadModel', 128)
    """
    import torch

    return load(EXAMPLE, dtype=torch.float32).eval()
