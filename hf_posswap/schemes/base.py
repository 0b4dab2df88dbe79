"""The base of all schemes: hyper-parameters, the mathematics, and the guarantees of a scheme.

Shape legend of the package: B batch, Q query length, K key length, H heads, G kv heads, D head dim, R rotary dim,
E hidden size. Schemes are pure torch: they never see a transformers model, only its `Geometry`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np

from hf_posswap.errors import OptionError, SchemeError, UnknownNameError
from hf_posswap.geometry import Geometry
from hf_posswap.registry import Registry
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.result_views import MOST_LETTERS, brief
from hf_posswap.utils.scheme_text import add_inherited_fields, respelled, scheme_and_fields, unknown_field
from hf_posswap.utils.untrusted import refuse_deep

Kind = Literal["rotary", "bias", "table", "none", "mixed"]

Input = Literal["text", "images"]

SCHEMES: Registry[type[Scheme]] = Registry("scheme", "hf_posswap.schemes")
"""Every scheme by its name; `Scheme.inputs` says which models each is for."""
TERMS: Registry[type[Scheme]] = Registry("term", "hf_posswap.schemes")
"""What can only be a term of a sum, by name: `native`, `ssmax`."""

_PLUS = re.compile(r"\s*\+\s*(?=[A-Za-z_])")
"""Between the terms of a sum: "rope+alibi", "yarn:factor=4 + ssmax"; numbers such as 1e+5 have a digit after theirs."""
_LAYER = re.compile(r"-?[0-9]+|True|False")
"""A layer, as a key of a mapping of layers to schemes: a number, or in JSON its text. PerLayer refuses wrong ones."""
_ROPE_TYPES = {name: name for name in ("linear", "dynamic", "yarn", "longrope", "llama3")} | {"default": "rope"}
"""Scheme for each `rope_type` of transformers."""
_ROPE_FIELDS = {
    "rope_theta": "base",
    "partial_rotary_factor": "partial",
    "original_max_position_embeddings": "original_length",
}
"""Scheme field for each key of `rope_parameters` that goes by another name in transformers."""


@dataclass(frozen=True)
class Traits:
    """The guarantees of a scheme; the contract suite tests each of them.

    Attributes:
        prefix_consistent: logits at t depend on tokens <= t only, whatever the total length; so a cached and a full
            forward agree, and one forward gives the loss of every prefix.
        causal_only: only meaningful in causal attention.
        relative: only differences of positions matter: shifting all positions changes nothing.
        training_free: meant to be used on its native kind of model without adapting the weights.
        unbounded: runs at any length; otherwise PositionRangeError is raised beyond a maximum length.
        shardable: each token needs only its own position, so a sequence may be split over devices (context parallelism)
            under any attention kernel.
    """

    prefix_consistent: bool = True
    causal_only: bool = False
    relative: bool = True
    training_free: bool = False
    unbounded: bool = True
    shardable: bool = False

    def letters(self) -> str:
        """Return the capitalized first letter of each guarantee, or a dot where it does not hold.

        Example:
            >>> Traits(causal_only=True).letters()
            'PCR.U.'
        """
        guarantees = dataclasses.asdict(self).items()
        return "".join(name[0].upper() if holds else "." for name, holds in guarantees)


@dataclass(frozen=True)
class Scheme:
    """Hyper-parameters of one position mechanism.

    A subclass is one file: a frozen dataclass under `@SCHEMES.register(name)` with `name`, `summary`, `source`, `kind`.
    A field that is None is filled from the model by `resolve`. `hf_posswap.schemes` has an example of a custom scheme.

    Example:
        >>> from hf_posswap.schemes import Yarn
        >>> scheme = Yarn(factor=4)
        >>> isinstance(scheme, Scheme), scheme.name, scheme.kind
        (True, 'yarn', 'rotary')
        >>> make_scheme(scheme.to_dict()) == scheme
        True
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    kind: ClassVar[Kind]
    inputs: ClassVar[tuple[Input, ...]] = ("text",)
    """The inputs of the models that it is for."""
    standalone: ClassVar[bool] = True
    """Whether it is a scheme by itself; False: it is only a term of a sum."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        kind = getattr(cls, "kind", None)  # a base of schemes may have none
        acts = cls.mechanism is not Scheme.mechanism
        if kind is not None and kind not in get_args(Kind):
            raise SchemeError(
                f"{cls.__name__}: kind is {kind!r}, expected one of {', '.join(map(repr, get_args(Kind)))}."
            )
        if acts and kind in ("none", "table") and cls.acts_inside is Scheme.acts_inside:
            raise SchemeError(
                f"{cls.__name__}: its mechanism would never be used, because kind {kind!r} does not act inside "
                "attention; expected kind 'bias' (adds to the scores), 'rotary' (rotates queries and keys), or a "
                "method acts_inside that says when it does."
            )
        if kind == "table" and cls.table_part is Scheme.table_part:
            raise SchemeError(f"{cls.__name__}: kind is 'table', but it has no table_part; derive it from TableScheme.")
        add_inherited_fields(cls)  # help() of a scheme lists all its parameters

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
        """Return example options for the scheme in such a model, for when only its name is known."""
        return {}

    @property
    def traits(self) -> Traits:
        """The guarantees of the scheme with these parameters."""
        return Traits()

    @property
    def acts_inside(self) -> bool:
        """Whether the scheme acts inside attention."""
        return self.kind in ("rotary", "bias", "mixed")

    @property
    def only_inside(self) -> bool:
        """Whether the scheme is nothing but a mechanism inside attention, the same in every layer, or none."""
        return self.kind in ("rotary", "bias", "none")

    @property
    def keeps_native(self) -> bool:
        """Whether the native mechanism of the model remains active together with the scheme."""
        return False

    @property
    def exact_below(self) -> int | None:
        """The distance, in tokens, below which a resolved scheme leaves a rotary model's own angles alone."""
        return None

    @property
    def table_part(self) -> Any:
        """The table scheme that defines the position table; None: there is no table."""
        return None

    def with_table(self, table: Scheme) -> Self:
        """Return a copy with another table scheme for `table_part`."""
        raise NotImplementedError(f"scheme {self.name!r} has no table.")

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        """Return a copy with every open parameter filled in for this model.

        Raises:
            SchemeError: the parameters are impossible for this geometry, or max_length is not a number of tokens.
        """
        if max_length is not None:
            checks.length(self.name, "max_length", max_length)
        return self

    def reach(self, geometry: Geometry) -> int | None:
        """Return the length, in tokens, that the resolved parameters were made for; None: no such length."""
        return None

    def notes(self) -> tuple[str, ...]:
        """Return the sentences that a plan prints about the resolved scheme."""
        return ()

    def mechanism(self, geometry: Geometry) -> Mechanism:
        """Return the module that acts inside attention; for kinds "rotary" and "bias"."""
        raise NotImplementedError(f"scheme {self.name!r} has kind {self.kind!r}: it does not act inside attention.")

    def filled(self, field: str) -> Any:
        """Return the value of `field`, which `resolve` must have filled in.

        Raises:
            SchemeError: it is still open.
        """
        value = getattr(self, field)
        if value is None:
            raise SchemeError(f"{self.name}: {field} is still open (None): call resolve(geometry, max_length) first.")
        return value

    def to_dict(self) -> dict[str, object]:
        """Return the scheme as JSON: its name and every field.

        Example:
            >>> from hf_posswap.schemes import Kerple
            >>> Kerple().to_dict()
            {'name': 'kerple', 'variant': 'log', 'seed': 0, 'r1': None, 'r2': None}
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"name": self.name} | {name: _plain(value) for name, value in fields.items()}

    def per_layer(self, layers: Mapping[int, Scheme | str]) -> Scheme:
        """Return a scheme that is this one except in the given `layers`, counted from 0.

        Example:
            >>> from hf_posswap.schemes import NoPE, Rope
            >>> str(Rope().per_layer({3: NoPE()}))
            'per_layer(3: nope, others: rope)'
        """
        return SCHEMES.get("per_layer")(layers=layers, default=self)  # type: ignore[call-arg]

    def __add__(self, other: Scheme | str | Mapping[object, object]) -> Scheme:
        """Return a scheme with both at work: inside attention, or a position table and what is inside attention.

        Raises:
            SchemeError: they cannot be at work together: two tables, two rotations, a bias on split attention.

        Example:
            >>> from hf_posswap.schemes import Alibi, Learned, Rope
            >>> (Learned() + Rope()).name, (Rope() + Alibi()).name
            ('together', 'sum')
        """
        first, second = self, make_scheme(other)
        if second.table_part is not None and first.table_part is None:
            first, second = second, first
        if first.table_part is None:
            return SCHEMES.get("sum")(terms=(first, second))  # type: ignore[call-arg]
        if first.name == "together":
            both = first.inside + second  # type: ignore[attr-defined]
            return SCHEMES.get("together")(table=first.table_part, inside=both)  # type: ignore[call-arg]
        return SCHEMES.get("together")(table=first, inside=second)  # type: ignore[call-arg]

    def __radd__(self, other: str | Mapping[object, object]) -> Scheme:
        """Return the sum of a scheme that is given by its name or dict, and this one."""
        return make_scheme(other) + self

    def short_repr(self) -> str:
        """Return the repr of a dataclass or, if it is long, one with the beginnings of its numbers.

        A scheme whose fields hold a number for each head or layer has it as its repr; `to_dict` has all of them.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        whole = f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"
        if len(whole) <= MOST_LETTERS:
            return whole
        given = {name: value for name, value in values.items() if value is not None}
        return f"{type(self).__name__}({', '.join(f'{name}={brief(value)}' for name, value in given.items())})"

    def __str__(self) -> str:
        shown = ", ".join(
            f"{field.name}={value if isinstance(value, Scheme) else repr(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        )
        return f"{self.name}({shown})" if shown else self.name


def _plain(value: object) -> object:
    """Return a field's value as JSON."""
    if isinstance(value, Scheme):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def make_scheme(scheme: Scheme | str | Mapping[Any, Any], /, **options: object) -> Scheme:
    """Return the scheme that `scheme` names, or `scheme` itself.

    Args:
        scheme: an object, a registered name, alone or with fields ("yarn:factor=4,base=500000"), a sum of such names
            ("rope + alibi", "native + ssmax", where native is what the model has), what `Scheme.to_dict` gave, the
            `rope_parameters` of a transformers config, or a mapping of layers to schemes. Names are found regardless of
            case, hyphens and underscores.
        options: fields of the scheme, where `scheme` is a name.

    Raises:
        UnknownNameError: no such scheme.
        OptionError: the scheme has no such field, fields are misspelt or given twice, or options were given with an
            object.
        SchemeError: a field's value is impossible, or `scheme` is none of the three.

    Example:
        >>> make_scheme("yarn", factor=4)
        Yarn(base=None, partial=None, layout=None, factor=4.0, original_length=None, beta_fast=32.0, beta_slow=1.0, \
truncate=True, ramp='index', mix='frequencies', attention_factor=None, mscale=None, mscale_all_dim=None)
    """
    if isinstance(scheme, Scheme):
        if options:
            raise OptionError(
                f"options {sorted(options)} were given with the scheme object {scheme}: "
                "set them on the object, or give the scheme by name."
            )
        return scheme
    if isinstance(scheme, Mapping) and scheme and all(_LAYER.fullmatch(str(key)) for key in scheme):
        scheme, options = "per_layer", {"layers": scheme, **options}
    if isinstance(scheme, dict):
        try:
            refuse_deep(scheme)
        except ValueError as error:
            raise SchemeError(f"this dict is not a scheme: {error}.") from error
        scheme, options = _from_dict(scheme, options)
    if isinstance(scheme, str) and _is_written_as_sum(scheme):
        return _sum_of(_PLUS.split(scheme.strip()), options)
    if not isinstance(scheme, str):
        raise SchemeError(
            f"a scheme is an object, a name or a dict, got {type(scheme).__name__}: {brief_repr(scheme)}."
        )
    scheme = registered_name(scheme)
    if scheme not in SCHEMES and scheme not in TERMS:
        scheme, options = _from_text(scheme, options)
    cls = scheme_class(scheme)
    fields = dataclasses.fields(cls)
    known = [field.name for field in fields]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise unknown_field(scheme, unknown, known)
    required = [f.name for f in fields if f.init and f.default is f.default_factory is dataclasses.MISSING]
    needed = [name for name in required if name not in options]
    if needed:
        raise OptionError(f"scheme {scheme!r} needs {', '.join(map(repr, needed))}: it has no default.")
    # numpy's numbers and arrays become Python's, which are saved with the model
    plain = {name: x.tolist() if isinstance(x, (np.generic, np.ndarray)) else x for name, x in options.items()}
    return cls(**plain)


def _is_written_as_sum(text: str) -> bool:
    if re.search(r"^\s*\+|\+\s*(\+|$)", text):
        raise SchemeError(f"a term of the sum {brief_repr(text)} is missing: write it as in native + ssmax.")
    return is_sum(text)


def _sum_of(terms: list[str], options: dict[str, object]) -> Scheme:
    """Return the sum of the schemes that each of `terms` writes."""
    if options:
        raise OptionError(
            f"options {sorted(options)} were given with the sum {' + '.join(terms)}: write them with their term, "
            'as in "yarn:factor=4 + ssmax".'
        )
    first, *others = map(make_scheme, terms)
    for other in others:
        first = first + other
    return first


def scheme_class(name: str) -> type[Scheme]:
    """Return the scheme that is registered under `name`.

    Args:
        name: as `list_schemes` has it.

    Raises:
        UnknownNameError: with near names and the list of all.

    Example:
        >>> scheme_class("rope").kind
        'rotary'
    """
    known = known_schemes()
    if name not in known:
        raise UnknownNameError("scheme", name, known)
    return known[name]


def known_schemes() -> dict[str, type[Scheme]]:
    """Return every scheme by its name, those too that can only be a term of a sum.

    Example:
        >>> known_schemes().keys() - dict(SCHEMES.items()).keys() == {"native", "ssmax"}
        True
    """
    return dict(sorted(SCHEMES.items() + TERMS.items()))


def class_of_text(text: str) -> type[Scheme]:
    """Return the scheme that `text` names as `make_scheme` reads it: in any spelling, alone, with fields, or a sum.

    Raises:
        UnknownNameError: as `scheme_class`.

    Example:
        >>> class_of_text("YaRN:factor=4").name
        'yarn'
    """
    return scheme_class("sum" if is_sum(text) else registered_name(text).partition(":")[0])


def is_sum(text: str) -> bool:
    """Return whether `text` writes a sum of schemes.

    Example:
        >>> is_sum("native + ssmax"), is_sum("rope:base=1e+5")
        (True, False)
    """
    return _PLUS.search(text) is not None


def schemes_for(inputs: Input) -> dict[str, type[Scheme]]:
    """Return the schemes for models that take such inputs, by their names.

    Args:
        inputs: "text" or "images".

    Example:
        >>> list(schemes_for("images"))
        ['alibi_2d', 'learned_2d', 'nope', 'rope_2d', 'sinusoidal_2d']
    """
    return {name: cls for name, cls in SCHEMES.items() if inputs in cls.inputs}


def names_one_scheme(scheme: Mapping[str, object]) -> bool:
    """Return whether a mapping is one scheme: of `Scheme.to_dict`, `rope_parameters` of transformers, or by layer."""
    by_layer = bool(scheme) and all(_LAYER.fullmatch(str(key)) for key in scheme)
    return by_layer or "name" in scheme or isinstance(scheme.get("rope_type", scheme.get("type")), str)


def _from_dict(scheme: dict[str, object], options: dict[str, object]) -> tuple[str, dict[str, object]]:
    """Return the name in `scheme`, and its fields joined with `options`."""
    if "name" not in scheme and names_one_scheme(scheme):
        scheme = _from_rope_parameters(scheme)
    name = scheme.get("name")
    if not isinstance(name, str):
        # a dict such as {"yarn": {"factor": 4}}
        right = respelled(repr(scheme), known_schemes()) or next((key for key in scheme if key in SCHEMES), None)
        raise SchemeError(
            "a scheme's dict needs its name under 'name', as Scheme.to_dict writes it, or under 'rope_type', as "
            f"transformers does; got {brief_repr(scheme)}." + ("" if right is None else f" Did you mean {right!r}?")
        )
    return name, _joined(name, "a dict", {key: value for key, value in scheme.items() if key != "name"}, options)


def _from_rope_parameters(parameters: dict[str, object]) -> dict[str, object]:
    """Return the dict of the scheme that transformers computes from these `rope_parameters`."""
    rope_type = str(parameters.get("rope_type", parameters.get("type")))
    name = _ROPE_TYPES.get(rope_type)
    if name is None:
        raise SchemeError(
            f"rope_type {rope_type!r} in {brief_repr(parameters)} is none of {', '.join(map(repr, _ROPE_TYPES))}: give "
            "the scheme by name (`posswap schemes` lists all names)."
        )
    given = {key: value for key, value in parameters.items() if key not in ("rope_type", "type") and value is not None}
    return {"name": name} | {_ROPE_FIELDS.get(key, key): value for key, value in given.items()}


def registered_name(text: str) -> str:
    """Return `text` with its leading name in registered spelling: "ALiBi" as "alibi", "NTK-by-parts:..." likewise."""
    name, colon, fields = text.partition(":")
    if name in SCHEMES or name in TERMS:
        return text
    plain = re.sub(r"[-_\s]", "", name).lower()
    matches = [known for known in known_schemes() if re.sub("[-_]", "", known).lower() == plain]
    return f"{matches[0]}{colon}{fields}" if len(matches) == 1 else text


def _from_text(text: str, options: dict[str, object]) -> tuple[str, dict[str, object]]:
    """Return the name in `text`, and its fields joined with `options`."""
    parsed = scheme_and_fields(text, known_schemes())
    if parsed is None:
        return text.partition(":")[0], options
    name, fields = parsed
    return name, _joined(name, "a text", fields, options)


def _joined(name: str, source: str, fields: dict[str, object], options: dict[str, object]) -> dict[str, object]:
    twice = sorted(set(fields) & set(options))
    if twice:
        raise OptionError(f"options {twice} were given twice, here and in {source} of scheme {name!r}: give them once.")
    return fields | options
