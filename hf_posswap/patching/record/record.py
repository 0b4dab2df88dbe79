"""What was done to a model, as JSON in `config.posswap`: enough to do it again at loading."""

from __future__ import annotations

import copy
import reprlib
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from hf_posswap.compat.transformers_attention import IMPLEMENTATION, attention_implementation
from hf_posswap.compat.transformers_models import give_config_class
from hf_posswap.errors import PosswapError, RecordError
from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.record.migrations import RECORD_VERSION, migrate
from hf_posswap.patching.record.refusals import REFUSED_ATTENTION, REFUSED_IN_MEMORY, stock_name
from hf_posswap.patching.record.schema import check_record
from hf_posswap.schemes import Scheme, make_scheme
from hf_posswap.utils.result_views import ResultView

_OPTIONAL = {"stacks", "relative", "imports"}


@dataclass(frozen=True, repr=False)
class SwapRecord(ResultView):
    """One swap, as `config.posswap` of a swapped model holds it: enough to do it again when a checkpoint is loaded.

    Attributes:
        scheme: `Scheme.to_dict` of the resolved scheme.
        route: "native": stock transformers runs the checkpoint; "plugin": only hf_posswap does.
        base_type: the model type of its native config (not called model_type: transformers would take the record for
            a nested config of that type).
        max_length: positions the swapped model is meant for, in tokens.
        site: "auto" or "attention", as asked of `patch_model`.
        original: config values that the swap changed, as they were.
        version: of this format.
        stacks: `Scheme.to_dict` of every swapped stack's scheme, by its name; None for a model of one stack, and then
            left out of the JSON.
        relative: what became of positions inside attention that are no scheme, "keep" or "drop", as asked of
            `patch_model`; None, for a model that has none, is left out of the JSON.
        imports: the module that registers each scheme which is not of this package, by its name; None, where there is
            none, is left out of the JSON.

    Example:
        >>> from hf_posswap import patch_model, swap_plan
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> record = swap_plan(patch_model(model, "rope")).record
        >>> record.to_dict() == model.config.posswap, record.scheme["name"], record.max_length
        (True, 'rope', 16)
    """

    scheme: dict[str, Any]
    route: Literal["native", "plugin"]
    base_type: str
    max_length: int
    site: Literal["auto", "attention"]
    original: dict[str, Any]
    version: int = RECORD_VERSION
    stacks: dict[str, dict[str, Any]] | None = None
    relative: Literal["keep", "drop"] | None = None
    imports: dict[str, str] | None = field(default=None, compare=False)

    def _repr_facts(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme.get("name"),
            "route": self.route,
            "base_type": self.base_type,
            "max_length": self.max_length,
            "site": self.site,
        }

    def _html_rows(self) -> list[tuple[str, str]]:
        return [(name, str(value)) for name, value in self.to_dict().items()]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `plan_swap`, without the scheme, that plan the swap again."""
        return {"max_length": self.max_length, "site": self.site, "relative": self.relative}

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {name: value for name, value in asdict(self).items() if name not in _OPTIONAL or value is not None}

    def make_scheme(self) -> Scheme:
        """Return the resolved scheme.

        Raises:
            RecordError: it names an unknown scheme, or impossible parameters.
        """
        try:
            return make_scheme(self.scheme)
        except PosswapError as error:
            raise RecordError(f"config.posswap holds a scheme that cannot be built: {error}") from error

    def is_same_mechanism(self, other: SwapRecord) -> bool:
        """Return whether two records say the same mechanism for the same kind of model; a table's length is part."""
        equal = (self.scheme, self.stacks, self.base_type) == (other.scheme, other.stacks, other.base_type)
        return equal and (self.make_scheme().kind != "table" or self.max_length == other.max_length)

    def choice(self) -> Scheme | dict[str, Scheme]:
        """Return what `plan_swap` takes to do it again: the scheme, or those of the stacks.

        Raises:
            RecordError: as `make_scheme` does.
        """
        if self.stacks is None:
            return self.make_scheme()
        return {name: replace(self, scheme=values, stacks=None).make_scheme() for name, values in self.stacks.items()}

    def __post_init__(self) -> None:
        # here, so that a record which could not be read again is not written either
        check_record({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_dict(cls, data: Any) -> SwapRecord:
        """Read a record, which may come from anywhere: nothing is built before all of it has been checked.

        Raises:
            RecordError: not a record, a version that is not read, a missing or unknown field, a wrong or hostile value.

        Example:
            >>> SwapRecord.from_dict({"version": 2})
            Traceback (most recent call last):
            ...
            hf_posswap.errors.RecordError: config.posswap has version 2; this hf_posswap reads version 1: update \
hf_posswap, or check the file.
        """
        if not isinstance(data, dict):
            raise RecordError(f"config.posswap must be an object, got {type(data).__name__}.")
        data = migrate(data)
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - _OPTIONAL - set(data)), sorted(map(reprlib.repr, set(data) - names))
        if missing or unknown:
            raise RecordError(
                f"config.posswap: missing fields: {', '.join(missing) or 'none'}; unknown fields: "
                f"{', '.join(unknown[:8]) or 'none'}."
            )
        return cls(**data)


def native_config_class(config: Any) -> type:
    """Return the class that the config had before any swap."""
    return getattr(type(config), "posswap_native", type(config))


def without_record(config: Any) -> Any:
    """Return a copy of a swapped `config`, of its native class, without hf_posswap's record.

    Its values are those of the swapped model: of a native swap they are what stock code runs.
    """
    native = copy.deepcopy(config)
    give_config_class(native, native_config_class(config))
    del native.posswap
    for name in REFUSED_IN_MEMORY:
        vars(native).pop(name, None)  # see `plugin_config_class`
    return native


def native_config(config: Any) -> Any:
    """Return a copy of a swapped `config` as it was before the swap, of its native class."""
    record = SwapRecord.from_dict(config.posswap)
    native = without_record(config)
    if attention_implementation(native) == REFUSED_ATTENTION:  # a stock config, built from `to_dict()`
        setattr(native, IMPLEMENTATION, None)
    native.architectures = native.architectures and [stock_name(name) for name in native.architectures]
    for name, value in record.original.items():
        parent, _, leaf = name.rpartition(".")
        setattr(config_at(native, parent), leaf, value)
    return native
