"""Schemes from functions: a rotation of the pair, a bias of the distance, a query scale of the position.

The decorated function becomes a scheme class of its name, registered under it: its keyword-only parameters are the
fields, so that Python, the command, recipes, checkpoints and the contract suite know it as any other scheme.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from hf_posswap.errors import DuplicateNameError, SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.registry import Registry
from hf_posswap.schemes.base import (
    SCHEMES,
    TERMS,
    Kind,
    Scheme,
    Traits,
    known_schemes,
    registered_name,
    scheme_class,
)
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.bias import DistanceMechanism
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.rope import RotaryScheme

Function = Callable[..., Any]
S = TypeVar("S", bound="_FunctionScheme")

_SHAPE = ("heads", "head_dim", "original_length")
_GIVEN = {
    "rotation": ("pair", "pairs", "base", *_SHAPE),
    "bias": ("distance", "head", *_SHAPE),
    "query_scale": ("position", "head", *_SHAPE),
}
"""The parameters that a function of each kind may name: it is given those that it names."""


def rotation(
    name: str, *, summary: str | None = None, source: str = "", training_free: bool = False
) -> Callable[[Function], type[RotaryScheme]]:
    """Make a rotary scheme of a function that returns the angles of the pairs, in radians per position.

    The function may name `pair` (0 to R/2 - 1, [R/2]), `pairs` (R/2), `base` (theta), `heads`, `head_dim`,
    `original_length`, and returns [R/2] numbers >= 0, a pair of 0 being left unrotated; it is called in float64 for the
    rotation and in float32 for what stock transformers computes. Keyword-only parameters, each with a type (float, int,
    bool or Literal) and a default, become the fields of the scheme, besides `base`, `partial` and `layout`.

    Args:
        name: of the scheme, as in `patch_model(model, name)`.
        summary: one line; None takes the first line of the docstring.
        source: link to the paper.
        training_free: whether a rotary model works with it untrained.

    Raises:
        SchemeError: a parameter is none of these.
        DuplicateNameError: the name is taken.

    Example:
        >>> @rotation("clipped_rope_example", source="https://arxiv.org/abs/2602.05258")
        ... def clipped_rope_example(pair, pairs, base, original_length, *, share: float = 1.0):
        ...     '''RoPE whose pairs stand still where they do not turn once within a share of the window.'''
        ...     angles = base ** (-pair / pairs)
        ...     return angles * (angles * original_length * share >= 2 * torch.pi)
        >>> shape = Geometry(32, 4, 4, 8, 1, original_length=64, causal=True)
        >>> clipped_rope_example(share=0.5).resolve(shape, None).angles(shape).inv_freq
        tensor([1., 0., 0., 0.])
        >>> SCHEMES.remove("clipped_rope_example")
    """
    traits = Traits(training_free=training_free, shardable=True)
    return partial(_scheme_class_of, name, FunctionRotation, SCHEMES, summary, source, traits)


def bias(
    name: str, *, summary: str | None = None, source: str = "", relative: bool = True
) -> Callable[[Function], type[Scheme]]:
    """Make a scheme of a function that returns what is added to the scaled scores at a distance.

    The function may name `distance` (query position less key position, [N], float32, negative for keys that come
    later), `head` (0 to H - 1, [H, 1]), `heads`, `head_dim`, `original_length`, and returns what expands to [H, N].
    Keyword-only parameters become fields, as for `rotation`.

    Args:
        name: of the scheme.
        summary: one line; None takes the first line of the docstring.
        source: link to the paper.
        relative: whether only the distance matters, as it does where the function keeps to its arguments.

    Raises:
        SchemeError: a parameter is none of these.
        DuplicateNameError: the name is taken.

    Example:
        >>> @bias("window_bias_example")
        ... def window_bias_example(distance, head, heads, *, window: int = 4, toll: float = 2.0):
        ...     '''Keys outside a window cost a toll, less in every further head.'''
        ...     return -toll * (1 - head / heads) * (distance.abs() >= window)
        >>> shape = Geometry(8, 2, 2, 4, 1, original_length=64, causal=True)
        >>> window_bias_example(window=2).mechanism(shape).distance_bias(torch.tensor([0, 1, 2]))
        tensor([[-0., -0., -2.],
                [-0., -0., -1.]])
        >>> SCHEMES.remove("window_bias_example")
    """
    return partial(_scheme_class_of, name, FunctionBias, SCHEMES, summary, source, Traits(relative=relative))


def query_scale(
    name: str, *, summary: str | None = None, source: str = "", causal_only: bool = False
) -> Callable[[Function], type[Scheme]]:
    """Make a term, to add to a scheme, of a function that returns what multiplies the query at a position.

    The function may name `position` ([B or 1, 1, Q], float32, >= 0), `head` (0 to H - 1, [H, 1]), `heads`, `head_dim`,
    `original_length`, and returns what expands to [B or 1, H, Q]. Keyword-only parameters become fields, as
    for `rotation`. Add it by `native() + my_scale()`, or "native + my_scale".

    Args:
        name: of the term.
        summary: one line; None takes the first line of the docstring.
        source: link to the paper.
        causal_only: whether it is for models that see only the past.

    Raises:
        SchemeError: a parameter is none of these.
        DuplicateNameError: the name is taken.

    Example:
        >>> @query_scale("log_scale_example")
        ... def log_scale_example(position, original_length, *, c: float = 0.1):
        ...     '''1 + c ln(n / L) beyond the window L.'''
        ...     return 1 + c * ((position + 1) / original_length).clamp(min=1).log()
        >>> shape = Geometry(8, 2, 2, 4, 1, original_length=64, causal=True)
        >>> log_scale_example(c=1.0).mechanism(shape).scale(torch.tensor([[0, 63, 127]]))
        tensor([[[1.0000, 1.0000, 1.6931],
                 [1.0000, 1.0000, 1.6931]]])
        >>> TERMS.remove("log_scale_example")
    """
    traits = Traits(relative=False, causal_only=causal_only)
    return partial(_scheme_class_of, name, FunctionScale, TERMS, summary, source, traits)


@dataclasses.dataclass(frozen=True)
class _FunctionScheme(Scheme):
    """Base of the scheme classes that the decorators make."""

    decorator: ClassVar[str]
    """The decorator's name."""
    function: ClassVar[Function]
    argument_names: ClassVar[tuple[str, ...]]
    """The positional parameters of the function."""
    field_types: ClassVar[dict[str, object]]
    """The fields that come from the function, and their types."""
    declared_traits: ClassVar[Traits]

    def __post_init__(self) -> None:
        for field, field_type in self.field_types.items():
            object.__setattr__(self, field, _checked(self.name, field, field_type, getattr(self, field)))

    @property
    def traits(self) -> Traits:
        """What the decorator was told."""
        return self.declared_traits

    def value(self, geometry: Geometry, shape: tuple[int, ...], dtype: torch.dtype, **given: object) -> Tensor:
        """Return what the function gives for what it names of `given`, expanded to `shape`.

        Raises:
            SchemeError: it does not expand to `shape`.
        """
        known = {
            "heads": geometry.num_heads,
            "head_dim": geometry.head_dim,
            "original_length": geometry.original_length,
            **given,
        }
        fields = {field: getattr(self, field) for field in self.field_types}
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        # tensors that the function makes itself stand there too, whatever the default; a graph knows no such default
        with nullcontext() if torch.compiler.is_compiling() else device:
            result = type(self).function(**{name: known[name] for name in self.argument_names}, **fields)
        tensor = self._tensor(result, device, dtype)
        try:
            return tensor.expand(shape)
        except RuntimeError:
            raise SchemeError(
                f"{self.name}: {self.function.__name__} gives {list(tensor.shape)}, expected what expands to "
                f"{list(shape)}."
            ) from None

    def _tensor(self, result: object, device: torch.device, dtype: torch.dtype) -> Tensor:
        try:
            tensor = torch.as_tensor(result, device=device)
        except (RuntimeError, TypeError, ValueError):
            tensor = None
        if tensor is None or tensor.is_complex():
            returned = type(result).__name__ if tensor is None else str(tensor.dtype)
            raise SchemeError(
                f"{self.name}: {self.function.__name__} gives {returned}, expected a tensor of real numbers, or a "
                "number."
            )
        return tensor.to(dtype)


@dataclasses.dataclass(frozen=True)
class FunctionRotation(_FunctionScheme, RotaryScheme):
    """Base of the schemes that `rotation` makes."""

    decorator: ClassVar[str] = "rotation"

    def __post_init__(self) -> None:
        RotaryScheme.__post_init__(self)
        _FunctionScheme.__post_init__(self)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        pairs = self.rotary_dim(geometry) // 2
        pair = torch.arange(pairs, dtype=dtype, device="cpu")
        angles = self.value(geometry, (pairs,), dtype, pair=pair, pairs=pairs, base=self.filled("base"))
        if not bool((angles.isfinite() & (angles >= 0)).all()):
            raise SchemeError(f"{self.name}: the angles of pairs must be finite numbers >= 0, got {angles.tolist()}.")
        return angles.clone()


@dataclasses.dataclass(frozen=True)
class FunctionBias(_FunctionScheme):
    """Base of the schemes that `bias` makes."""

    decorator: ClassVar[str] = "bias"
    kind: ClassVar[Kind] = "bias"

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return FunctionBiasMechanism(self, geometry)


class _FunctionMechanism(Mechanism):
    """What a function gives, at work in a model of a geometry."""

    def __init__(self, scheme: _FunctionScheme, geometry: Geometry) -> None:
        super().__init__()
        self.scheme, self.geometry = scheme, geometry


class FunctionBiasMechanism(_FunctionMechanism, DistanceMechanism):
    """Adds what a function gives for each distance."""

    def distance_bias(self, distances: Tensor) -> Tensor:
        heads = self.geometry.num_heads
        given = {"distance": distances.float(), "head": _head_numbers(heads, distances.device)}
        return self.scheme.value(self.geometry, (heads, len(distances)), torch.float32, **given)


@dataclasses.dataclass(frozen=True)
class FunctionScale(_FunctionScheme):
    """Base of the terms that `query_scale` makes."""

    decorator: ClassVar[str] = "query_scale"
    kind: ClassVar[Kind] = "none"
    standalone: ClassVar[bool] = False

    @property
    def acts_inside(self) -> bool:
        return True

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return FunctionScaleMechanism(self, geometry)


class FunctionScaleMechanism(_FunctionMechanism):
    """Multiplies queries by what a function gives for their positions."""

    scales = True

    def scale(self, query_positions: Tensor) -> Tensor:
        (rows, queries), heads = query_positions.shape, self.geometry.num_heads
        given = {
            "position": query_positions.float().clamp(min=0)[:, None],
            "head": _head_numbers(heads, query_positions.device),
        }
        return self.scheme.value(self.geometry, (rows, heads, queries), torch.float32, **given)


def _head_numbers(heads: int, device: torch.device) -> Tensor:
    """Return 0 to H - 1, [H, 1], float32."""
    return torch.arange(heads, dtype=torch.float32, device=device)[:, None]


def _scheme_class_of(
    name: str,
    base: type[S],
    registry: Registry[type[Scheme]],
    summary: str | None,
    source: str,
    traits: Traits,
    function: Function,
) -> type[S]:
    """Return the scheme class of a function, registered."""
    if not inspect.isroutine(function) or inspect.isbuiltin(function):
        raise SchemeError(f"{name}: a scheme is made of a function that is written with def, got {function!r}.")
    _check_name(name, function)
    argument_names, fields = _parameters(name, function, base)
    doc = inspect.getdoc(function) or ""
    namespace = {
        "__doc__": doc or f"{name}, by the function {function.__name__}.",
        "name": name,
        "summary": summary or (doc.splitlines() or [f"by the function {function.__name__}"])[0].rstrip("."),
        "source": source,
        "function": staticmethod(function),
        "argument_names": argument_names,
        "field_types": {field: field_type for field, (field_type, _) in fields.items()},
        "declared_traits": traits,
    }
    defaults = [(field, of, dataclasses.field(default=default)) for field, (of, default) in fields.items()]
    cls = dataclasses.make_dataclass(function.__name__, defaults, bases=(base,), namespace=namespace, frozen=True)
    # make_dataclass itself names its caller's module since Python 3.12
    cls.__module__, cls.__qualname__ = function.__module__, function.__qualname__
    cls()  # the defaults are checked as any values
    registry.add(name, cls)
    return cls


def _check_name(name: object, function: Function) -> None:
    """Refuse a name that commands could not write, or that is another scheme's in any spelling.

    A function that is defined anew, in a cell of a notebook or by a reload of its module, takes its own place.

    Raises:
        SchemeError: it could not be written.
        DuplicateNameError: it is taken.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise SchemeError(
            f"the name of a scheme is a letter, and then letters, digits, hyphens, underscores and dots, got {name!r}."
        )
    existing = registered_name(name)
    if existing not in known_schemes():
        return
    if existing == name and _is_redefinition(scheme_class(name), function):
        SCHEMES.remove(name)
        TERMS.remove(name)
    else:
        raise DuplicateNameError(
            f"scheme {existing!r} is already registered as {scheme_class(existing)!r}; choose another name "
            f"than {name!r}."
        )


def _is_redefinition(registered: type, function: Function) -> bool:
    """Return whether a registered scheme was made of an earlier definition of `function`."""
    if not issubclass(registered, _FunctionScheme) or "<" in function.__qualname__:  # a function inside another
        return False
    return (registered.__module__, registered.__qualname__) == (function.__module__, function.__qualname__)


def _parameters(
    name: str, function: Function, base: type[_FunctionScheme]
) -> tuple[tuple[str, ...], dict[str, tuple[object, object]]]:
    """Return the positional parameters of a function, and type and default of its keyword-only ones."""
    decorator, argument_names, fields = base.decorator, [], {}
    hints = _hints(name, function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            field_type = hints.get(parameter.name)
            if field_type not in (float, int, bool) and get_origin(field_type) is not Literal:
                raise SchemeError(
                    f"{name}: {parameter.name} of {function.__name__} becomes a field of the scheme, so it needs a "
                    f"type, float, int, bool or Literal[...], got {'none' if field_type is None else field_type}."
                )
            if hasattr(base, parameter.name):
                before = ", or give it before the *" if parameter.name in _GIVEN[decorator] else ""
                raise SchemeError(
                    f"{name}: a scheme has its own {parameter.name}: call this field of {function.__name__} otherwise"
                    f"{before}."
                )
            if parameter.default is parameter.empty:
                raise SchemeError(f"{name}: {parameter.name} of {function.__name__} needs a default.")
            fields[parameter.name] = field_type, parameter.default
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in _GIVEN[decorator]:
            argument_names.append(parameter.name)
        else:
            raise SchemeError(
                f"{name}: {function.__name__} names {parameter.name!r}; a {decorator} is given "
                f"{', '.join(_GIVEN[decorator])} by name, and its fields are keyword-only, behind a *."
            )
    return tuple(argument_names), fields


def _hints(name: str, function: Function) -> dict[str, object]:
    """Return the types of the keyword-only parameters of a function, by name."""
    fields = [each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    annotations = {name: text for name, text in function.__annotations__.items() if name in fields}
    try:
        return get_type_hints(SimpleNamespace(__annotations__=annotations), globalns=function.__globals__)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise SchemeError(f"{name}: the types of the fields of {function.__name__} cannot be read: {error}.") from error


def _checked(owner: str, field: str, field_type: object, value: object) -> object:
    if field_type is float:
        return checks.number(owner, field, value)
    if field_type is int:
        return checks.whole(owner, field, value, minimum=-(2**31), maximum=2**31)
    if field_type is bool:
        if not isinstance(value, bool):
            raise SchemeError(f"{owner}: {field} must be True or False, got {value!r}.")
        return value
    checks.choice(owner, field, value, get_args(field_type))
    return value
