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
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from hf_posswap.errors import DuplicateNameError, SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.registry import Registry
from hf_posswap.schemes.base import (
    PARTS,
    SCHEMES,
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

    def decorate(function: Function) -> type[RotaryScheme]:
        traits = Traits(training_free=training_free, shardable=True)
        return _made(name, function, FunctionRotation, SCHEMES, summary, source, traits)

    return decorate


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

    def decorate(function: Function) -> type[Scheme]:
        return _made(name, function, FunctionBias, SCHEMES, summary, source, Traits(relative=relative))

    return decorate


def query_scale(
    name: str, *, summary: str | None = None, source: str = "", causal_only: bool = False
) -> Callable[[Function], type[Scheme]]:
    """Make a part, to add to a scheme, of a function that returns what multiplies the query at a position.

    The function may name `position` ([B or 1, 1, Q], float32, >= 0), `head` (0 to H - 1, [H, 1]), `heads`, `head_dim`,
    `original_length`, and returns what expands to [B or 1, H, Q]. Keyword-only parameters become fields, as
    for `rotation`. Add it by `native() + my_scale()`, or "native + my_scale".

    Args:
        name: of the part.
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
        >>> PARTS.remove("log_scale_example")
    """

    def decorate(function: Function) -> type[Scheme]:
        traits = Traits(relative=False, causal_only=causal_only)
        return _made(name, function, FunctionScale, PARTS, summary, source, traits)

    return decorate


class _OfFunction:
    """What the scheme classes made of functions share."""

    takes: ClassVar[str]
    """The decorator's name."""
    function: ClassVar[Function]
    named: ClassVar[tuple[str, ...]]
    """The positional parameters of the function."""
    kinds: ClassVar[dict[str, Any]]
    """The fields that come from the function, and their types."""
    promised: ClassVar[Traits]

    def __post_init__(self) -> None:
        for field, kind in self.kinds.items():
            object.__setattr__(self, field, _checked(self.name, field, kind, getattr(self, field)))  # type: ignore[attr-defined]

    @property
    def traits(self) -> Traits:
        """What the decorator was told."""
        return self.promised

    def value(self, geometry: Geometry, shape: tuple[int, ...], dtype: torch.dtype, **given: Any) -> Tensor:
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
        fields = {field: getattr(self, field) for field in self.kinds}
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        # tensors that the function makes itself stand there too, whatever the default; a graph knows no such default
        with nullcontext() if torch.compiler.is_compiling() else device:
            made = type(self).function(**{name: known[name] for name in self.named}, **fields)
        found = self._tensor(made, device, dtype)
        try:
            return found.expand(shape)
        except RuntimeError:
            raise SchemeError(
                f"{self.name}: {self.function.__name__} gives {list(found.shape)}, expected what expands to "  # type: ignore[attr-defined]
                f"{list(shape)}."
            ) from None

    def _tensor(self, made: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
        try:
            found = torch.as_tensor(made, device=device)
        except (RuntimeError, TypeError, ValueError):
            found = None
        if found is None or found.is_complex():
            what = type(made).__name__ if found is None else str(found.dtype)
            raise SchemeError(
                f"{self.name}: {self.function.__name__} gives {what}, expected a tensor of real numbers, or a number."  # type: ignore[attr-defined]
            )
        return found.to(dtype)


@dataclasses.dataclass(frozen=True)
class FunctionRotation(_OfFunction, RotaryScheme):
    """Base of the schemes that `rotation` makes."""

    takes: ClassVar[str] = "rotation"

    def __post_init__(self) -> None:
        RotaryScheme.__post_init__(self)
        _OfFunction.__post_init__(self)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        pairs = self.rotary_dim(geometry) // 2
        pair = torch.arange(pairs, dtype=dtype, device="cpu")
        angles = self.value(geometry, (pairs,), dtype, pair=pair, pairs=pairs, base=self.filled("base"))
        if not bool((angles.isfinite() & (angles >= 0)).all()):
            raise SchemeError(f"{self.name}: the angles of pairs must be finite numbers >= 0, got {angles.tolist()}.")
        return angles.clone()


@dataclasses.dataclass(frozen=True)
class FunctionBias(_OfFunction, Scheme):
    """Base of the schemes that `bias` makes."""

    takes: ClassVar[str] = "bias"
    kind: ClassVar[Kind] = "bias"

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return FunctionBiasMechanism(self, geometry)


class FunctionBiasMechanism(DistanceMechanism):
    """Adds what a function gives for each distance."""

    def __init__(self, scheme: FunctionBias, geometry: Geometry) -> None:
        super().__init__()
        self.scheme, self.geometry = scheme, geometry

    def distance_bias(self, distances: Tensor) -> Tensor:
        heads = self.geometry.num_heads
        given = {"distance": distances.float(), "head": _numbers(heads, distances.device)}
        return self.scheme.value(self.geometry, (heads, len(distances)), torch.float32, **given)


@dataclasses.dataclass(frozen=True)
class FunctionScale(_OfFunction, Scheme):
    """Base of the parts that `query_scale` makes."""

    takes: ClassVar[str] = "query_scale"
    kind: ClassVar[Kind] = "none"
    alone: ClassVar[bool] = False

    @property
    def acts_inside(self) -> bool:
        return True

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return FunctionScaleMechanism(self, geometry)


class FunctionScaleMechanism(Mechanism):
    """Multiplies queries by what a function gives for their positions."""

    scales = True

    def __init__(self, scheme: FunctionScale, geometry: Geometry) -> None:
        super().__init__()
        self.scheme, self.geometry = scheme, geometry

    def scale(self, query_positions: Tensor) -> Tensor:
        (rows, queries), heads = query_positions.shape, self.geometry.num_heads
        given = {
            "position": query_positions.float().clamp(min=0)[:, None],
            "head": _numbers(heads, query_positions.device),
        }
        return self.scheme.value(self.geometry, (rows, heads, queries), torch.float32, **given)


def _numbers(heads: int, device: torch.device) -> Tensor:
    """Return 0 to H - 1, [H, 1], float32."""
    return torch.arange(heads, dtype=torch.float32, device=device)[:, None]


def _made(
    name: str,
    function: Function,
    base: type,
    registry: Registry[type[Scheme]],
    summary: str | None,
    source: str,
    traits: Traits,
) -> Any:
    """Return the scheme class of a function, registered."""
    if not inspect.isroutine(function) or inspect.isbuiltin(function):
        raise SchemeError(f"{name}: a scheme is made of a function that is written with def, got {function!r}.")
    _check_name(name, function)
    named, fields = _parameters(name, function, base)
    doc = inspect.getdoc(function) or ""
    namespace = {
        "__doc__": doc or f"{name}, by the function {function.__name__}.",
        "__module__": function.__module__,
        "name": name,
        "summary": summary or (doc.splitlines() or [f"by the function {function.__name__}"])[0].rstrip("."),
        "source": source,
        "function": staticmethod(function),
        "named": named,
        "kinds": {field: kind for field, (kind, _) in fields.items()},
        "promised": traits,
    }
    listed = [(field, kind, dataclasses.field(default=default)) for field, (kind, default) in fields.items()]
    made = dataclasses.make_dataclass(function.__name__, listed, bases=(base,), namespace=namespace, frozen=True)
    made.__qualname__ = function.__qualname__
    made()  # the defaults are checked as any values
    return registry.add(name, made)


def _check_name(name: Any, function: Function) -> None:
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
    taken = registered_name(name)
    if taken not in known_schemes():
        return
    if taken == name and _is_anew(scheme_class(name), function):
        SCHEMES.remove(name)
        PARTS.remove(name)
    else:
        raise DuplicateNameError(
            f"scheme {taken!r} is already registered as {scheme_class(taken)!r}; choose another name than {name!r}."
        )


def _is_anew(registered: type, function: Function) -> bool:
    """Return whether a registered scheme was made of an earlier definition of `function`."""
    place, named = (registered.__module__, registered.__qualname__), "<" not in function.__qualname__
    return issubclass(registered, _OfFunction) and named and place == (function.__module__, function.__qualname__)


def _parameters(name: str, function: Function, base: Any) -> tuple[tuple[str, ...], dict[str, tuple[Any, Any]]]:
    """Return the positional parameters of a function, and type and default of its keyword-only ones."""
    takes, named, fields = base.takes, [], {}
    hints = _hints(name, function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind = hints.get(parameter.name)
            if kind not in (float, int, bool) and get_origin(kind) is not Literal:
                raise SchemeError(
                    f"{name}: {parameter.name} of {function.__name__} becomes a field of the scheme, so it needs a "
                    f"type, float, int, bool or Literal[...], got {'none' if kind is None else kind}."
                )
            if hasattr(base, parameter.name):
                before = ", or give it before the *" if parameter.name in _GIVEN[takes] else ""
                raise SchemeError(
                    f"{name}: a scheme has its own {parameter.name}: call this field of {function.__name__} otherwise"
                    f"{before}."
                )
            if parameter.default is parameter.empty:
                raise SchemeError(f"{name}: {parameter.name} of {function.__name__} needs a default.")
            fields[parameter.name] = kind, parameter.default
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in _GIVEN[takes]:
            named.append(parameter.name)
        else:
            raise SchemeError(
                f"{name}: {function.__name__} names {parameter.name!r}; a {takes} is given "
                f"{', '.join(_GIVEN[takes])} by name, and its fields are keyword-only, behind a *."
            )
    return tuple(named), fields


def _hints(name: str, function: Function) -> dict[str, Any]:
    """Return the types of the keyword-only parameters of a function, by name."""
    fields = [each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    written = {field: kind for field, kind in function.__annotations__.items() if field in fields}
    try:
        return get_type_hints(SimpleNamespace(__annotations__=written), globalns=function.__globals__)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise SchemeError(f"{name}: the types of the fields of {function.__name__} cannot be read: {error}.") from error


def _checked(owner: str, field: str, kind: Any, value: Any) -> Any:
    if kind is float:
        return checks.number(owner, field, value)
    if kind is int:
        return checks.whole(owner, field, value, minimum=-(2**31), maximum=2**31)
    if kind is bool:
        if not isinstance(value, bool):
            raise SchemeError(f"{owner}: {field} must be True or False, got {value!r}.")
        return value
    checks.choice(owner, field, value, get_args(kind))
    return value
