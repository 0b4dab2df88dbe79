"""The input of an advice: the model, read only from its config, the length, the budget, the serving program.

How that program would handle the model after a swap is a matter of the table of claims of `posswap export`.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import TARGETS, judge
from hf_posswap.checkpoints.native import RUN_PLUGINS, stock_config
from hf_posswap.errors import (
    AlreadyPatchedError,
    CheckpointError,
    OptionError,
    SchemeError,
    UnknownNameError,
    UnsupportedModelError,
)
from hf_posswap.evaluation.scoring import reach_of
from hf_posswap.families.locating import locate
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.patching.inspect.describe import PositionReport, describe_positions, model_class_of, on_meta
from hf_posswap.schemes import Scheme
from hf_posswap.utils.gguf_reading import read_header
from hf_posswap.utils.gguf_source import gguf_file_of, read_gguf
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["learned", "rope", "encoder", "unlimited", "other"]
_PLACEHOLDER = "MODEL"
_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9]*(Model|Config|For[A-Z][A-Za-z0-9]*)")


@dataclass(frozen=True)
class Case:
    """One request for advice.

    Attributes:
        name: the model's name in commands.
        model: the model without weights, on meta.
        report: the report of its positions.
        kind: "learned": a causal model with a learned table; "rope": one with RoPE; "encoder": bidirectional, of
            limited length; "unlimited": its own mechanism runs at any length; "other": anything else.
        parameters: number of parameters.
        length: target length in tokens.
        budget: training budget in tokens; 0: no training.
        serve: the serving program; None: hf_posswap itself.
    """

    name: str
    model: PreTrainedModel
    report: PositionReport
    kind: Kind
    parameters: int
    length: int
    budget: int
    serve: str | None

    @property
    def window(self) -> int:
        """Its original length, in tokens; where a scaling in its config reaches the target, the length of that."""
        scaled = self.report.geometry.scaled_length or 0
        return scaled if scaled >= self.length else self.report.limit

    @property
    def windows(self) -> float:
        """Target length over the original window."""
        return self.length / self.window

    @property
    def factor(self) -> str:
        """`windows` as the value of a scheme's field."""
        return f"{math.ceil(1000 * self.windows) / 1000:g}"

    def fresh(self) -> PreTrainedModel:
        """Return a new copy of the model without weights, which may be changed."""
        return on_meta(copy.deepcopy(self.model.config))


def read_case(model: object, length: int, budget: float | None, serve: str | None) -> Case:
    """Return the validated request.

    Args:
        model: a model, its config, a class of transformers or its name, a folder with a config.json, or a Hub id.
        length: tokens.
        budget: tokens; None: 0.
        serve: a name in `TARGETS`, or None.

    Raises:
        OptionError: an invalid length or budget, or a class that is neither a model nor a config class.
        UnknownNameError: no such program.
        CheckpointError: `model` names no readable config.
        RemoteCodeError: it names a config that needs code, which is not run.
        UnsupportedModelError: no family describes the model, or it reads images.
        AlreadyPatchedError: it carries a swap.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise OptionError(f"max_length is a whole number of tokens of at least 2, got {length!r}.")
    is_number = isinstance(budget, Real) and not isinstance(budget, bool)
    if budget is not None and not (is_number and 0 <= budget <= sys.float_info.max):
        raise OptionError(f"budget is a number of tokens of at least 0, such as 1e6, got {brief_repr(budget)}.")
    if serve is not None and serve not in TARGETS:
        raise UnknownNameError("program", serve, TARGETS)
    name, source = named_source(model)
    skeleton = on_meta(source)
    report = describe_positions(skeleton)
    if report.swapped is not None:
        raise AlreadyPatchedError(
            f"{report.model} already carries {report.swapped}: ask about the model without that swap. posswap explain "
            "describes the swap, posswap compare measures it."
        )
    if locate(skeleton).main.inputs != "text":
        raise UnsupportedModelError(f"{report.model} reads images: advice is of texts and their lengths in tokens.")
    count = int(skeleton.num_parameters())
    return Case(name, skeleton, report, _kind_of(skeleton, report), count, length, int(budget or 0), serve)


def named_source(model: object) -> tuple[str, object]:
    """Return the model's name for commands, and the source to read it from; only code of transformers is run."""
    import transformers

    if isinstance(model, str) and "/" not in model and not expand_home(model).is_dir():
        model = getattr(transformers, model, model) if model[:1].isupper() else model
        if isinstance(model, str) and _CLASS_NAME.fullmatch(model):
            near = get_close_matches(model, filter(_CLASS_NAME.fullmatch, dir(transformers)), cutoff=0.8)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise CheckpointError(
                f"{model!r} is not a folder here, and transformers {transformers.__version__} has no class of that "
                f"name.{hint} Give a class of transformers, a folder with a config.json, or a Hub id."
            )
    if isinstance(model, str | Path):
        file = gguf_file_of(model)
        return str(model), model if file is None else read_header(file, read_gguf(file))
    if not isinstance(model, type):
        return str(getattr(getattr(model, "config", model), "name_or_path", "") or _PLACEHOLDER), model
    if issubclass(model, transformers.PreTrainedModel):
        config: Any = model.config_class
        model_config = config()
        model_config.architectures = [model.__name__]
        if model_class_of(model_config) is not model:
            raise OptionError(f"{model.__name__} is not a class of transformers that a config can name.")
        return _PLACEHOLDER, model_config
    if issubclass(model, transformers.PreTrainedConfig):
        return _PLACEHOLDER, model()
    raise OptionError(f"{model.__name__} is a class of neither a model nor a config of transformers.")


def _kind_of(model: PreTrainedModel, report: PositionReport) -> Kind:
    several = len(locate(model).stacks) > 1
    if several or model.config.is_encoder_decoder:
        return "unlimited" if reach_of(model).limit is None and report.sites["rotary"] == "-" else "other"
    if report.sites["rotary"] != "-":
        return "rope" if report.geometry.causal else "encoder"
    if reach_of(model).limit is None:
        return "unlimited"
    if not report.native.startswith("learned"):
        return "other"
    return "learned" if report.geometry.causal else "encoder"


@dataclass(frozen=True, repr=False)
class Serving(ResultView):
    """How a program would handle the model.

    Attributes:
        target: the program.
        verdict: "exact", "approximate", "impossible", or "unknown" if the table has no entry.
        why: the reason.
        known: the program's version, and whether it was run or its code was read.
        converted: the stock class to which `posswap to-native` converts first, or "".
    """

    target: str
    verdict: str
    why: str
    known: str
    converted: str = ""

    def __str__(self) -> str:
        first = f"as a {self.converted} by posswap to-native: " if self.converted else ""
        known = f" ({self.known})" if self.known else ""
        return f"{self.target}: {first}{self.verdict}, {self.why}{known}"


def serving_of(
    case: Case, scheme: Scheme | str | None, *, target: str | None = None, how: dict[str, Any] | None = None
) -> Serving | None:
    """Return how a program handles the model with `scheme`, or None without a program.

    Args:
        case: the request.
        scheme: "yarn:factor=4", or an object; None: the unswapped model.
        target: the program; None: that of `case`.
        how: as in `plan_swap`; None: the length of the case, unless the scheme has a factor.
    """
    target = target or case.serve
    if target is None:
        return None
    if how is None:
        how = {} if "factor=" in str(scheme) else {"max_length": case.length}
    try:
        model = case.fresh()
        if scheme is not None:
            patch_model(model, scheme, **how)
        position_config = position_config_of(model.config)
    except (SchemeError, UnsupportedModelError) as error:  # it needs the weights' values, or is unknown here
        return Serving(target, "unknown", str(error), "")
    converted = stock_config(model) if position_config.kind == "plugin" and target not in RUN_PLUGINS else None
    return _judged(target, position_config, "") if converted is None else _judged(target, *converted)


def _judged(target: str, position_config: PositionConfig, converted: str) -> Serving:
    try:
        judgement = judge(target, position_config)
    except UnsupportedModelError as error:
        return Serving(target, "unknown", str(error), "", converted)
    return Serving(target, judgement.verdict, judgement.why, judgement.claim.source, converted)
