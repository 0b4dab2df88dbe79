"""What was done to a model, as JSON in `config.posswap`: enough to do it again at loading, and checked before that.

A record comes from a file that anyone may have written. It holds plain JSON with bounds on every side, so that reading
one runs no code, opens no path and allocates nothing.

A change that an older hf_posswap could misread raises `RECORD_VERSION` by one and adds one entry to `MIGRATIONS`, and a
stored record of the version it leaves to the tests.
"""

from __future__ import annotations

import copy
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from hf_posswap.compat.transformers_attention import IMPLEMENTATION, attention_implementation
from hf_posswap.compat.transformers_models import give_config_class
from hf_posswap.errors import PosswapError, RecordError, UnknownNameError
from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.record.refusals import REFUSED_ATTENTION, REFUSED_IN_MEMORY, stock_name
from hf_posswap.schemes import Scheme, make_scheme
from hf_posswap.schemes.base import scheme_class
from hf_posswap.schemes.common.table import ROW_STRIDE
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LONGEST = 2**26
"""The most tokens that a swapped model may be meant for: buffers with one entry a position are made of this length."""
DEEPEST = 10
"""Objects and lists inside one another."""
MOST_VALUES = 2**16
"""Values in one record, in all: a frequency or a factor for each pair of a head, and there are hundreds of them."""
MOST_NESTED = 3
"""Schemes inside one another."""

_LARGEST_WHOLE = 2**63
_TEXT = re.compile(r"[A-Za-z0-9_.,:+= -]{0,128}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OPTIONAL = {"stacks", "relative", "imports"}
RECORD_VERSION = 1
"""The version of the records that are written."""

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes a record, which may be hostile, and returns a new one of the next version; it need not set the version."""

MIGRATIONS: dict[int, Migration | str] = {}
"""For each version before today's, what makes the next one of it; or the last release that reads it, where nothing
can. Version 1 is the first."""


def check_record(values: dict[str, Any]) -> None:
    """Check every field of a record but its version.

    Args:
        values: `SwapRecord.to_dict()`, or the value in a file, with exactly the fields of a record.

    Raises:
        RecordError: names the field, its value, and what is expected.
    """
    _check_json(values)
    for name, (good, expected) in _FIELDS.items():
        _need(good(values[name]), name, values[name], expected)
    for name, value in values["original"].items():
        parent, _, leaf = name.rpartition(".")
        known = _ORIGINAL.get(leaf) if not parent or _PART.fullmatch(parent) else None
        if known is None:
            raise RecordError(
                f"config.posswap: original.{name} is not a config value that a swap changes; those are "
                f"{', '.join(_ORIGINAL)}."
            )
        _need(known[0](value), f"original.{name}", value, known[1])
    imports = values["imports"] or {}
    _check_scheme(values["scheme"], "scheme", 1, imports)
    for name, scheme in (values["stacks"] or {}).items():
        _check_scheme(scheme, f"stacks.{name}", 1, imports)


def _is_image_size(value: object) -> bool:
    sides = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    return all(type(side) is int and 1 <= side < ROW_STRIDE for side in sides)


def _is_stacks(value: Any) -> bool:
    named = isinstance(value, dict) and bool(value) and set(value) <= {"encoder", "decoder"}
    return named and all(isinstance(scheme, dict) for scheme in value.values())


_Rule = tuple[Callable[[Any], bool], str]
_LENGTH: _Rule = (
    lambda value: type(value) is int and 1 <= value <= LONGEST,
    f"a whole number of tokens from 1 to {LONGEST}",
)
_FIELDS: dict[str, _Rule] = {
    "scheme": (lambda value: isinstance(value, dict), "an object, as Scheme.to_dict writes it"),
    "route": (lambda value: value in ("native", "plugin"), "'native' or 'plugin'"),
    "base_type": (lambda value: isinstance(value, str) and bool(_NAME.fullmatch(value)), "a model type"),
    "max_length": _LENGTH,
    "site": (lambda value: value in ("auto", "attention"), "'auto' or 'attention'"),
    "original": (lambda value: isinstance(value, dict), "an object with the config values that the swap changed"),
    "stacks": (
        lambda value: value is None or _is_stacks(value),
        "an object with the schemes of encoder and decoder, or left out",
    ),
    "imports": (
        lambda value: value is None or (isinstance(value, dict) and all(isinstance(m, str) for m in value.values())),
        "an object with the module of each scheme of another package, or left out",
    ),
    "relative": (lambda value: value in (None, "keep", "drop"), "'keep' or 'drop', or left out"),
}
_PART = re.compile(r"[a-z]\w*(\.[a-z]\w*){0,3}")
"""The path of a config inside the config: text_config."""
_ORIGINAL: dict[str, _Rule] = {
    "max_position_embeddings": _LENGTH,
    "max_target_positions": _LENGTH,
    "max_encoder_position_embeddings": _LENGTH,
    "max_decoder_position_embeddings": _LENGTH,
    "max_seq_len": _LENGTH,
    "image_size": (_is_image_size, "a number of pixels, or height and width, each from 1 to 65535"),
    "relative_attention": (lambda value: isinstance(value, bool), "true or false"),
    "rope_parameters": (lambda value: value is None or isinstance(value, dict), "an object or null"),
}


def _need(good: bool, where: str, value: object, expected: str) -> None:
    if not good:
        raise RecordError(f"config.posswap: {where} must be {expected}, got {reprlib.repr(value)}.")


def _check_json(record: dict[str, object]) -> None:
    """Check that `record` is JSON within the bounds, without recursion, at any depth."""
    waiting: list[tuple[str, Any, int]] = [("", record, 1)]
    seen = 0
    while waiting:
        where, value, depth = waiting.pop()
        if depth > DEEPEST:
            raise RecordError(f"config.posswap: {where} lies deeper than {DEEPEST} objects or lists in one another.")
        seen += len(value)
        if seen > MOST_VALUES:
            raise RecordError(f"config.posswap: {where} brings it to more than {MOST_VALUES} values.")
        if isinstance(value, dict):
            _check_keys(where, value)
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if type(child) is float and math.isfinite(child):  # most values: the location is made only for the others
                continue
            location = f"{where}.{key}".lstrip(".") if isinstance(value, dict) else f"{where}[{key}]"
            if isinstance(child, dict | list | tuple):
                waiting.append((location, child, depth + 1))
            else:
                _check_leaf(location, child)


def _check_keys(where: str, value: dict[object, object]) -> None:
    for key in value:
        plain = isinstance(key, str) and _TEXT.fullmatch(key) and key and not key.startswith("_")
        _need(bool(plain), f"{where or 'the record'}: each key", key, "a plain name")


def _check_leaf(where: str, value: object) -> None:
    """Check a value that is neither object nor list."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        _need(-_LARGEST_WHOLE < value < _LARGEST_WHOLE, where, value, "a whole number of at most 63 bits")
    elif isinstance(value, float):
        _need(math.isfinite(value), where, value, "a finite number")
    else:
        plain = isinstance(value, str) and _TEXT.fullmatch(value) and ".." not in value
        _need(bool(plain), where, value, "a number, true, false, null, or a plain word (no path, at most 128 letters)")


def _check_scheme(value: object, where: str, depth: int, imports: dict[str, str]) -> None:
    """Check `value` and the schemes inside it, the innermost first: each is an object with a `name`."""
    if not isinstance(value, dict | list | tuple):
        return
    named = isinstance(value, dict) and "name" in value
    _need(named or depth > 1, where, value, "a scheme with its name under 'name'")
    if named and depth > MOST_NESTED:
        raise RecordError(f"config.posswap: {where} is a scheme inside more than {MOST_NESTED - 1} others.")
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        _check_scheme(child, f"{where}.{key}", depth + named, imports)
    if not isinstance(value, dict) or not named:
        return
    try:
        scheme_class(value["name"])
        make_scheme(value)
    except UnknownNameError as error:
        module = imports.get(value["name"])
        if module is None:
            advice = "Register a scheme of your own first: import its module, in Python or by posswap --import."
            problem = f"config.posswap: {where} holds a scheme that cannot be built: {error}"
            raise RecordError(problem, advice) from error
        raise RecordError(
            f"config.posswap: {where} is {value['name']!r}, a scheme that the module {module!r} registers.",
            f"Import that module first: `import {module}` in Python, or posswap --import {module} on the command line "
            "(a file by its path). Or, if you trust the code that was saved with the model, load it by "
            "AutoModel.from_pretrained(..., trust_remote_code=True), or the Auto class of its task, in a process that "
            "does not import hf_posswap: hf_posswap itself runs no scheme from a checkpoint.",
        ) from error
    except (PosswapError, TypeError, ValueError, KeyError, OverflowError) as error:  # another package's scheme: any
        raise RecordError(f"config.posswap: {where} holds a scheme that cannot be built: {error}") from error


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

    scheme: dict[str, object]
    route: Literal["native", "plugin"]
    base_type: str
    max_length: int
    site: Literal["auto", "attention"]
    original: dict[str, Any]
    version: int = RECORD_VERSION
    stacks: dict[str, dict[str, Any]] | None = None
    relative: Literal["keep", "drop"] | None = None
    imports: dict[str, str] | None = field(default=None, compare=False)

    def _repr_facts(self) -> dict[str, object]:
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

    def choice(self, of: Collection[str] | None = None) -> Scheme | dict[str, Scheme]:
        """Return what `plan_swap` takes to do it again: the scheme, or those of the stacks.

        Args:
            of: the names of the stacks of the model to swap, which may be one part of the recorded model, such as
                T5EncoderModel; None: all that are recorded.

        Raises:
            RecordError: as `make_scheme` does; or the swap changed none of the stacks in `of`.
        """
        if self.stacks is None:
            return self.make_scheme()
        names = [name for name in self.stacks if of is None or name in of]
        if not names:
            swapped, kept = " and ".join(self.stacks), " and ".join(name for name in of or () if name)
            raise RecordError(
                f"config.posswap records a swap of the {swapped}, and this class has only "
                f"{f'the {kept}, which keeps its positions' if kept else 'a stack without a name'}: nothing is swapped "
                "in it. What works: the whole model by hf_posswap.load, and its part from there, by "
                "model.get_encoder() or model.get_decoder()."
            )
        return {name: replace(self, scheme=self.stacks[name], stacks=None).make_scheme() for name in names}

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
            given = "nothing" if data is None else f"a {type(data).__name__}"
            raise RecordError(
                f"config.posswap must be an object, which says what the swap is, got {given}: use the config.json that "
                "was saved with the model."
            )
        data = migrate(data)
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - _OPTIONAL - set(data)), sorted(map(reprlib.repr, set(data) - names))
        if missing or unknown:
            raise RecordError(
                f"config.posswap: missing fields: {', '.join(missing) or 'none'}; unknown fields: "
                f"{', '.join(unknown[:8]) or 'none'}."
            )
        return cls(**data)


def native_config_class(config: object) -> type:
    """Return the class that the config had before any swap."""
    return getattr(type(config), "posswap_native", type(config))


def without_record(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a swapped `config`, of its native class, without hf_posswap's record.

    Its values are those of the swapped model: of a native swap they are what stock code runs.
    """
    native = copy.deepcopy(config)
    give_config_class(native, native_config_class(config))
    del native.posswap
    for name in REFUSED_IN_MEMORY:
        vars(native).pop(name, None)  # see `plugin_config_class`
    return native


def native_config(config: PreTrainedConfig) -> PreTrainedConfig:
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


def migrate(
    data: dict[str, object],
    newest: int = RECORD_VERSION,
    migrations: Mapping[int, Migration | str] = MIGRATIONS,
) -> dict[str, object]:
    """Return the record `data` in version `newest`; only its version has been checked.

    Raises:
        RecordError: its version is missing, newer or no longer supported, or it is not a record of that version.

    Example:
        >>> migrate({"version": 1, "span": 64}, 2, {1: lambda old: {"max_length": old["span"]}})
        {'max_length': 64, 'version': 2}
    """
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= newest:
        known = "version 1" if newest == 1 else f"versions 1 to {newest}"
        raise RecordError(
            f"config.posswap has version {reprlib.repr(version)}; this hf_posswap reads {known}: "
            "update hf_posswap, or check the file."
        )
    for step in range(version, newest):
        migration = migrations[step]
        if isinstance(migration, str):
            raise RecordError(
                f"config.posswap has version {version}, which hf_posswap {migration} was the last to read: install "
                f"hf-posswap=={migration}, load the checkpoint there, unpatch it and save it; then swap it here."
            )
        try:
            data = migration(dict(data)) | {"version": step + 1}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"config.posswap says version {version} and is none of it ({type(error).__name__}: {error}): "
                "check the file."
            ) from error
    return data
