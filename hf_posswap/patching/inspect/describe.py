"""The position mechanism of a model, and the swaps that it supports."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.compat.transformers_loading import auto_mapping
from hf_posswap.compat.transformers_models import building_on_meta
from hf_posswap.errors import (
    AlreadyPatchedError,
    CheckpointError,
    PosswapError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.families.base import FAMILIES
from hf_posswap.families.locating import locate
from hf_posswap.families.rope_config import config_at, parameters_of
from hf_posswap.families.sites import Sites, TokenTable
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.applied import AppliedSwap, applied_swap
from hf_posswap.patching.inspect.untrusted_config import (
    Bounds,
    architectures_of,
    bounds_in,
    building_from,
    config_problems,
    recorded_plan,
    refuse_lie,
    within,
)
from hf_posswap.patching.plan.plan_swap import SchemeChoice, plan_swap, unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.refusals import stock_name
from hf_posswap.patching.record.training import training_of
from hf_posswap.patching.sites.attention.native import native_scheme
from hf_posswap.schemes.base import SCHEMES, class_of_text, is_sum, schemes_for
from hf_posswap.utils import html_tables
from hf_posswap.utils.auto_classes import auto_config
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.hub_session import hub_reading, why_not_found
from hf_posswap.utils.printable import in_lines, printable
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.scheme_text import read_fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, repr=False)
class PositionReport(ResultView):
    """The current mechanism of a model. `print(report)` shows it.

    Attributes:
        model: class name.
        family: of the model.
        native: its native mechanism.
        swapped: the scheme that replaces it, or None.
        geometry: its shape.
        sites: paths of its position sites.
        limit: the length that it supports or was made for, in tokens.
        trained: the training recorded in the checkpoint; None: there is none.
    """

    model: str
    family: str
    native: str
    swapped: str | None
    geometry: Geometry
    sites: dict[str, str]
    limit: int
    trained: str | None = None

    def __str__(self) -> str:
        return in_lines(f"{name:<11} {value}" for name, value in self.rows())

    def _repr_facts(self) -> dict[str, object]:
        return {"model": self.model, "native": self.native, "swapped": self.swapped, "limit": self.limit}

    def _html_rows(self) -> list[tuple[str, str]]:
        return self.rows()

    @property
    def title(self) -> str:
        """Model and mechanism, as text."""
        return f"{self.model}: {self.swapped or self.native}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the report as names and values."""
        g = self.geometry
        shape = (
            f"{g.num_layers} layers, {g.num_heads} heads ({g.num_kv_heads} kv) of {g.head_dim}, hidden {g.hidden_size}"
        )
        scaled = f", {g.scaled_length} by the scaling in its config" if g.scaled_length and not self.swapped else ""
        return [
            ("model", f"{self.model} (family {self.family})"),
            ("shape", f"{shape}, {'causal' if g.causal else 'bidirectional'}"),
            ("native", self.native),
            ("swapped to", self.swapped or "-"),
            ("length", f"{self.limit} positions{scaled}"),
            *([("trained", self.trained)] if self.trained else []),
            *self.sites.items(),
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {**self.__dict__, "geometry": dict(self.geometry.__dict__), "sites": dict(self.sites)}


def describe_positions(model: PreTrainedModel) -> PositionReport:
    """Return the current position mechanism of `model`: native, or swapped. `print(report)` shows it.

    Args:
        model: a transformers model, patched or not, or a PEFT model around one.

    Raises:
        UnsupportedModelError: no family describes the model.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> describe_positions(model).native
        'learned table, 16 positions'
    """
    target = unwrap(model)
    patch = getattr(target, "_posswap", None)
    sites = locate(target)
    if patch is None:
        return _report(target, sites, sites.geometry.original_length, swapped=None)
    return _report(target, sites, patch.plan.max_length, swapped=patch.plan.named)


def _report(model: PreTrainedModel, sites: Sites, limit: int, swapped: str | None) -> PositionReport:
    g = sites.geometry
    table = sites.main.table
    native = f"{table.kind if isinstance(table, TokenTable) else 'no'} table, {g.original_length} positions"
    if sites.rotary:
        native = f"rope, theta {g.base:g}, {g.rotary_dim} of {g.head_dim} dims a head, {g.layout or 'unknown'} layout"
        if not swapped:
            rope = parameters_of(config_at(model.config, sites.main.config), sites.main.full_attention_types[0])
            native += f", type {rope.get('rope_type', 'default')}"
            native += "".join(f", in layers of type {name}" for name in sites.main.full_attention_types if name)
    if sites.main.inside is not None:
        native = str(native_scheme(sites.main.inside, g)) + (f", {native}" if table else "")
    if sites.main.inputs == "images":
        (rows, columns), (high, wide) = g.grid(), g.patch_size or (0, 0)
        patches = f"{rows} x {columns} patches of {high} x {wide} pixels after {g.prefix_tokens} other tokens"
        native = f"learned table, {patches}"
    if len(sites.stacks) > 1:
        native += f", in {' and '.join(stack.name for stack in sites.stacks)}; the shape is the {sites.main.name}'s"
    paths = {
        "embedding": ", ".join(path for stack in sites.stacks if (path := stack.table_path)) or "-",
        "rotary": ", ".join(sites.rotary) or "-",
        "attention": ", ".join(f"{stack.attention[0]} ... {stack.attention[-1]}" for stack in sites.stacks),
    }
    return PositionReport(type(model).__name__, sites.family.name, native, swapped, g, paths, limit, _trained(model))


def _trained(model: PreTrainedModel) -> str | None:
    """Return the training recorded in the config as text; None: there is none."""
    training = training_of(model.config)
    if training is None:
        return None
    plan, values = getattr(getattr(model, "_posswap", None), "plan", None), getattr(model.config, "posswap", None)
    record = plan.record if plan is not None else None if values is None else SwapRecord.from_dict(values)
    if training.is_of(record):
        return str(training)
    return f"{training}; {'before this swap' if record else 'under a swap that it no longer has'}"


@dataclass(frozen=True, repr=False)
class Explanation(ResultView):
    """The result of `explain`: the mechanism of a model and, for a requested scheme, the plan or the refusal.

    Attributes:
        report: the mechanism of the model.
        plan: of the swap; None if no scheme was requested, or it is refused.
        refusal: why the swap is refused, or None.
        schemes: if no scheme was requested: every scheme by name, with its route or the reason against it.
    """

    report: PositionReport
    plan: SwapPlan | None
    refusal: str | None
    schemes: dict[str, str]

    def _repr_facts(self) -> dict[str, object]:
        plan = None if self.plan is None else self.plan.title
        return {"report": self.report.title, "plan": plan, "refusal": self.refusal, "schemes": len(self.schemes)}

    def _repr_html_(self) -> str:
        blocks = [html_tables.title(self.report.title), html_tables.table(self.report.rows())]
        if self.schemes:
            blocks.append(html_tables.table(self.schemes.items(), ("scheme", "in this model")))
        if self.refusal is not None:
            blocks.append(html_tables.paragraph(f"refused: {self.refusal}"))
        plan = [] if self.plan is None else [self.plan._repr_html_()]
        return html_tables.together([*blocks, *plan])

    def __str__(self) -> str:
        sections = [str(self.report)]
        if self.schemes:
            width = max(map(len, self.schemes))
            sections.append(in_lines(f"{name:<{width}}  {outcome}" for name, outcome in self.schemes.items()))
        if self.plan is not None:
            sections.append(str(self.plan))
        if self.refusal is not None:
            sections.append(f"refused: {printable(self.refusal)}")
        return "\n\n".join(sections)

    def to_dict(self) -> dict[str, object]:
        """Return the explanation as JSON."""
        plan = None if self.plan is None else self.plan.to_dict()
        return {"model": self.report.to_dict(), "plan": plan, "refusal": self.refusal, "schemes": self.schemes}


def explain(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    scheme: SchemeChoice | None = None,
    *,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Explanation:
    """Explain the mechanism of a model, and what a swap would do. No weights are read.

    Args:
        model: a model, its config, a folder with a config.json, or a Hub id.
        scheme: the swap to plan, as in `patch_model`; None lists the outcome for every scheme.
        max_length: as in `plan_swap`.
        trust_remote_code: run custom code of a folder or Hub id if its config needs it.
        options: as in `plan_swap`.

    Raises:
        CheckpointError: `model` names no readable config.
        RemoteCodeError: its config needs custom code, which was not allowed.
        UnsupportedModelError: no family describes the model.
        AlreadyPatchedError: a scheme was requested, and the model already carries a swap.

    Example:
        >>> from transformers import GPT2Config
        >>> explain(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11), "rope", max_length=2048).plan.route
        'plugin'
    """
    skeleton = on_meta(model, trust_remote_code=trust_remote_code)
    report = describe_positions(skeleton)
    if report.swapped is not None and scheme is not None:
        raise AlreadyPatchedError(
            f"{report.model} already carries {report.swapped}: take the model without that swap instead."
        )
    if report.swapped is not None:
        return Explanation(report, applied_swap(skeleton).plan, None, {})
    if scheme is None:
        suited = schemes_for(locate(skeleton).main.inputs)
        return Explanation(report, None, None, {name: _outcome(skeleton, name, report) for name in suited})
    try:
        return Explanation(report, plan_swap(skeleton, scheme, max_length=max_length, **options), None, {})
    except UnsupportedSwapError as error:
        return Explanation(report, None, str(error), {})


def supports(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    scheme: SchemeChoice,
    *,
    trust_remote_code: bool = False,
    **options: object,
) -> bool:
    """Return whether `model` supports `scheme`. No weights are read.

    Args:
        model: as in `explain`.
        scheme: as in `patch_model`.
        trust_remote_code: as in `explain`.
        options: fields of the scheme; those that only a real swap needs (a factor, factors a pair) may be left out.

    Raises:
        UnknownNameError, OptionError, SchemeError: the scheme or its parameters are invalid for any model.

    Example:
        >>> from transformers import BertConfig
        >>> supports(BertConfig(), "alibi"), supports(BertConfig(), "nope")
        (True, False)
    """
    try:
        skeleton = on_meta(model, trust_remote_code=trust_remote_code)
        geometry = locate(skeleton).geometry
        plan_swap(skeleton, scheme, **(stand_ins(scheme, geometry) | options))
    except (UnsupportedSwapError, UnsupportedModelError):
        return False
    return True


def list_schemes() -> dict[str, str]:
    """Return every registered scheme: its name and a one-line summary.

    Example:
        >>> list_schemes()["nope"]
        'no positions; the causal mask is all that orders tokens'
    """
    return {name: cls.summary for name, cls in SCHEMES.items()}


def list_families() -> dict[str, str]:
    """Return every registered family: its name and its position mechanism.

    Example:
        >>> "gpt2" in list_families()
        True
    """
    return {name: family.summary for name, family in FAMILIES.items()}


def on_meta(model: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return `model`, or a model without weights for a config, a folder or a Hub id.

    For a config with a recorded swap, the model is the original one with the plan attached: enough to describe, not to
    run. `trust_remote_code` is as in `explain`.
    """
    if isinstance(model, torch.nn.Module):
        return unwrap(model)
    is_named = isinstance(model, (str, Path))
    model = checkpoint_of(model) if is_named else model
    config = read_config(model, trust_remote_code=trust_remote_code) if is_named else model
    model_class = model_class_of(config)
    bounds = bounds_in(model, config) if is_named else Bounds()
    if getattr(config, "posswap", None) is None:
        with building_from(config), within(bounds, config), building_on_meta():
            return model_class(config)
    skeleton, plan = recorded_plan(config, model_class, bounds)
    if plan.route == "native":
        with building_from(config), within(bounds, config), building_on_meta():
            stock = model_class(copy.deepcopy(config))
        refuse_lie(plan, list(config_problems(stock, skeleton, plan)))
    skeleton.__dict__["_posswap"] = AppliedSwap(plan, skeleton.config)
    return skeleton


@hub_reading
def read_config(source: str | Path, *, trust_remote_code: bool = False, **kwargs: object) -> PreTrainedConfig:
    """Return the config of a folder or Hub id.

    Args:
        source: the folder, Hub id or GGUF file.
        trust_remote_code: run its custom code if its config needs it.
        kwargs: as of `AutoConfig.from_pretrained`: revision, token, ...

    Raises:
        CheckpointError: there is none, or it is unreadable.
        RemoteCodeError: it needs custom code, which was not allowed.
    """
    source = checkpoint_of(source)
    try:
        return auto_config(source, trust_remote_code=trust_remote_code, **kwargs)
    except PosswapError:
        raise
    except Exception as error:  # config classes, validators and custom code may raise anything
        if (Path(source) / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{str(source)!r} holds an adapter and no model. Merge it, and save the model to another folder: "
                f"hf_posswap.save(hf_posswap.load({str(source)!r}).merge_and_unload(), FOLDER)."
            ) from error
        raise CheckpointError(
            f"{str(source)!r} holds no readable model config (config.json): {why_not_found(source, error)}"
        ) from error


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that the config's checkpoint names, or the first Auto class that has one.

    Raises:
        CheckpointError: `architectures` is not a list of names.
        UnsupportedModelError: there is none.
    """
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    for name in architectures_of(config):
        model_class = getattr(transformers, stock_name(name), None)
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class
    whole = (AutoModelForSeq2SeqLM,) if getattr(config, "is_encoder_decoder", False) else ()
    for auto in (*whole, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel):
        mapping = auto_mapping(auto)
        if mapping is not None and type(config) in mapping:
            classes = mapping[type(config)]
            return native_class(classes[0] if isinstance(classes, tuple) else classes)
    raise UnsupportedModelError(f"no model class of transformers goes with config {type(config).__name__}.")


def stand_ins(scheme: SchemeChoice, geometry: Geometry) -> dict[str, Any]:
    """Return example options for a scheme given by name, without fields that follow the name; none for an object."""
    if not isinstance(scheme, str) or is_sum(scheme):
        return {}
    cls, fields = class_of_text(scheme), scheme.partition(":")[2]
    given = read_fields(cls.name, cls, fields) if fields else {}
    return {name: value for name, value in cls.stand_ins(geometry).items() if name not in given}


def _outcome(model: PreTrainedModel, name: str, report: PositionReport) -> str:
    try:
        plan = plan_swap(model, name, **stand_ins(name, report.geometry))
    except PosswapError as error:
        return f"no: {error}"
    return plan.route
