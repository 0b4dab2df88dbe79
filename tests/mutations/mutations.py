"""What the next release of transformers may change, each as one rewriting of the library that is installed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.mutations import runtime
from tests.mutations.cases import names_of_today
from tests.mutations.source import (
    CACHES,
    POSITIONS,
    Source,
    add,
    arguments,
    cache_of,
    decorate,
    expression,
    insert,
    is_own,
    remove,
    replace,
    take_any,
)

Rewrite = Callable[[Source], None]
CACHE_METHODS = ("get_query_offset", "get_mask_sizes")


@dataclass(frozen=True)
class Mutation:
    """One change of the library.

    Attributes:
        name: says what changes.
        rewrite: changes the modeling file of a family, or leaves it alone.
        core: changes what all families share, before any of them is imported.
        reaches: of what a stock model is asked, whether a change of `core` reaches it.
        spares: cases whose stock code the change would make wrong.
        names: what callers call arguments afterwards.
        fewest: swaps that it must reach at least.
        survivors: swaps that must survive it at least: what is found by behaviour, a new name does not hide.
    """

    name: str
    rewrite: Rewrite | None = None
    core: Callable[[], None] | None = None
    reaches: Callable[[Mapping[str, Any]], bool] = lambda asked: "left_padded" in asked
    spares: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    fewest: int = 12
    survivors: int = 0


MUTATIONS: dict[str, Mutation] = {}


def _add(name: str, rewrite: Rewrite | None = None, **rest: Any) -> None:
    assert name not in MUTATIONS
    MUTATIONS[name] = Mutation(name, rewrite, **rest)


def mutation(name: str, **rest: Any) -> Callable[[Rewrite], Rewrite]:
    """Register a rewriting as the mutation `name`."""

    def register(rewrite: Rewrite) -> Rewrite:
        _add(name, rewrite, **rest)
        return rewrite

    return register


def _all(source: Source) -> list[str]:
    return [*source.attentions, *source.layers, *source.entries, *source.heads]


def _names(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in arguments(function)]


def _own_bias(function: ast.FunctionDef) -> str | None:
    known = ("alibi", "position_bias", "sinusoidal_pos", "relative_pos")
    return next((name for name in known if name in _names(function)), None)


# --- arguments renamed


def _renamed(where: Callable[[Source], list[str]], old: Any, new: str, *, deprecated: bool = False) -> Rewrite:
    def rewrite(source: Source) -> None:
        names = {old} if isinstance(old, str) else {old(f) for c in where(source) if (f := source.forward(c))} - {None}
        source.rename(where(source), old, new)
        for name in sorted(names):
            called = where(source) if deprecated else [c for c in source.entries if "Encoder" in c]  # by generate
            source.keep_old_name(called, name, new)

    return rewrite


def _attentions(source: Source) -> list[str]:
    return source.attentions


def _inner(source: Source) -> list[str]:
    return [*source.attentions, *source.layers]


def _entries(source: Source) -> list[str]:
    return source.entries


def _below_heads(source: Source) -> list[str]:
    return [*source.attentions, *source.layers, *source.entries]


_add("the cache of an attention is renamed", _renamed(_attentions, cache_of, "kv_store"), survivors=24)
_add("the cache of an attention is renamed, deprecated", _renamed(_attentions, cache_of, "kv_store", deprecated=True))
_add("the cache of attentions and layers is renamed", _renamed(_inner, cache_of, "kv_store"))
_add("the cache of a model is renamed", _renamed(_entries, cache_of, "kv_store"))
_add("the cache of a model is renamed, deprecated", _renamed(_entries, cache_of, "kv_store", deprecated=True))
_add(
    "the cache is renamed everywhere, deprecated",
    _renamed(_all, cache_of, "kv_store", deprecated=True),
    names={"cache": "kv_store"},
    survivors=24,
)
_add("the mask of an attention is renamed", _renamed(_attentions, "attention_mask", "visible"))
_add(
    "the mask of an attention is renamed, deprecated",
    _renamed(_attentions, "attention_mask", "visible", deprecated=True),
)
_T5_KIND = ("t5", "mt5", "umt5")
_add("the mask of a model is renamed", _renamed(_entries, "attention_mask", "visible"), spares=_T5_KIND)
_add(
    "the input of an attention is renamed", lambda s: s.rename(_attentions(s), lambda f: arguments(f)[1].arg, "states")
)
_add(
    "the token ids of a model are renamed",
    _renamed(_entries, "input_ids", "tokens"),
    spares=(*_T5_KIND, "longt5", "bart"),  # `generate` names them to an encoder
)
_add("the embeddings given to a model are renamed", _renamed(_entries, "inputs_embeds", "embeddings"))
_add(
    "layer_past is renamed",
    _renamed(_all, lambda f: "layer_past" if "layer_past" in _names(f) else None, "state"),
    fewest=4,
)
_add("rotary angles are renamed", _renamed(_inner, "position_embeddings", "angles"), fewest=4)
_add("the bias of a model's own positions is renamed", _renamed(_inner, _own_bias, "own_bias"))


def _position_ids(where: Callable[[Source], list[str]], *, deprecated: bool = False) -> Rewrite:
    def rewrite(source: Source) -> None:
        source.rename(where(source), POSITIONS, "positions")
        if deprecated:
            source.keep_old_name(where(source), POSITIONS, "positions")
        for call, name in source.calls(*where(source)):  # those that hand on whatever they are given
            for keyword in call.keywords:
                forward = source.forward(name)
                if keyword.arg == POSITIONS and forward is not None and forward.args.kwarg is not None:
                    keyword.arg = "positions"
                    source.changes += 1

    return rewrite


_add("position ids are renamed in attentions and layers", _position_ids(_inner), fewest=6)
_add("position ids of a model are renamed", _position_ids(_entries))
_add("position ids of a model are renamed, deprecated", _position_ids(_entries, deprecated=True))
_add("position ids are renamed below the heads", _position_ids(_below_heads))

# --- arguments given by place, by keyword, in another order

_add("attentions are given arguments by place", lambda s: s.by_place(s.attentions))
_add("layers are given arguments by place", lambda s: s.by_place(s.layers), spares=("longt5",))  # two kinds of layers
_add("models are given arguments by place", lambda s: s.by_place(s.entries))
_add("attentions are given arguments by keyword", lambda s: s.by_keyword(s.attentions))
_add("models are given arguments by keyword", lambda s: s.by_keyword(s.entries))


def _reversed(where: Callable[[Source], list[str]]) -> Rewrite:
    def rewrite(source: Source) -> None:
        classes = source.certain(where(source))
        source.by_keyword(classes)
        for name in classes:
            forward = source.forward(name)
            if forward is not None:
                own, *others = forward.args.args
                forward.args.args = [own, *reversed(others)]
                forward.args.defaults = [ast.Constant(None) for _ in others]
                source.changes += 1

    return rewrite


_add("the order of an attention's arguments is reversed", _reversed(_attentions))
_add("the order of a model's arguments is reversed", _reversed(_entries))


@mutation("the arguments of an attention are keyword-only")
def _keyword_only(source: Source) -> None:
    source.by_keyword(source.certain(source.attentions))
    for name in source.certain(source.attentions):
        forward = source.forward(name)
        assert forward is not None
        placed, defaults = forward.args.args, forward.args.defaults
        forward.args.args, forward.args.defaults = placed[:1], []
        forward.args.kwonlyargs = placed[1:]
        forward.args.kw_defaults = [*[None] * (len(placed) - 1 - len(defaults)), *defaults]
        source.changes += 1


# --- arguments moved elsewhere


def _moved(find: Callable[[ast.FunctionDef], str | None], name: str) -> Rewrite:
    """Return what takes an argument from attentions and leaves it with the module for them to find."""

    def rewrite(source: Source) -> None:
        taken = {}
        for one in source.attentions:
            forward = source.forward(one)
            assert forward is not None
            found = find(forward)
            if found is not None:
                remove(forward, found)
                insert(forward, f"{found} = _next.taken(self, {name!r})")
                taken[one] = found
                source.changes += 1
        for call, one in source.calls(*taken):
            keyword = next((k for k in call.keywords if k.arg == taken[one]), None)
            if keyword is not None:
                call.keywords.remove(keyword)
                call.func = expression(f"_next.handed(F, {name!r}, V)", F=call.func, V=keyword.value)

    return rewrite


def _mask(function: ast.FunctionDef) -> str | None:
    return next((n for n in ("attention_mask", "mask") if n in _names(function)), None)


_add("the cache of an attention comes by a context", _moved(cache_of, "cache"))


def _keyworded(rewrite: Rewrite) -> Rewrite:
    """Return a rewriting of files in which attentions are called by keyword."""

    def both(source: Source) -> None:
        before = source.changes
        source.by_keyword(source.attentions)
        source.changes = before
        rewrite(source)

    return both


_add("the mask of an attention comes by a context", _keyworded(_moved(_mask, "mask")))


@mutation("the mask of an attention comes in its config", fewest=6)
def _mask_in_config(source: Source) -> None:
    source.by_keyword(source.attentions)
    known = {}
    for name in source.attentions:
        forward, constructor = source.forward(name), source.method(name, "__init__")
        found = None if forward is None else _mask(forward)
        if forward is not None and found is not None and constructor and "self.config" in ast.unparse(constructor):
            remove(forward, found)
            insert(forward, f"{found} = _next.unconfigured(self.config)")
            known[name] = found
    source.changes = len(known)
    for call, name in source.calls(*known):
        keyword = next((k for k in call.keywords if k.arg == known[name]), None)
        if keyword is not None:
            call.keywords.remove(keyword)
            call.func = expression("_next.configured(F, V)", F=call.func, V=keyword.value)


@mutation("the cache of an attention is one of any other arguments")
def _any_cache(source: Source) -> None:
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        found = cache_of(forward)
        if found is not None:
            remove(forward, found)
            insert(forward, f"{found} = {take_any(forward)}.pop({found!r}, None)")
            source.changes += 1


@mutation("mask and cache of an attention come in one argument")
def _bundled(source: Source) -> None:
    source.by_keyword(source.attentions)
    known: dict[str, tuple[str, ...]] = {}
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        mask, cache = _mask(forward), cache_of(forward)
        if mask is None:
            continue
        known[name] = tuple(one for one in (mask, cache) if one)
        for one, role in ((mask, "attention_mask"), (cache, "cache")):
            if one is not None:
                remove(forward, one)
                insert(forward, f"{one} = context.{role}")
        add(forward, "context", "_next.Context()")
        source.changes += 1
    for call, name in source.calls(*known):
        roles = dict(zip(known[name], ("attention_mask", "cache"), strict=False))
        given = [k for k in call.keywords if k.arg in roles]
        call.keywords = [k for k in call.keywords if k not in given]
        inner = [ast.keyword(arg=roles[k.arg], value=k.value) for k in given if k.arg]
        context = expression("_next.Context()")
        assert isinstance(context, ast.Call)
        context.keywords = inner
        call.keywords.append(ast.keyword(arg="context", value=context))


@mutation("position ids are no longer passed down", fewest=6)
def _not_passed(source: Source) -> None:
    for call, name in source.calls(*source.layers, *source.attentions):
        forward = source.forward(name)
        used = forward is not None and any(
            isinstance(n, ast.Name) and n.id == POSITIONS and isinstance(n.ctx, ast.Load) for n in _used(forward)
        )
        if name in source.attentions and used:
            continue
        if name in source.layers and _needs_positions(source, name):
            continue
        kept = [k for k in call.keywords if k.arg != POSITIONS]
        source.changes += len(kept) < len(call.keywords)
        call.keywords = kept


def _used(function: ast.FunctionDef) -> list[ast.AST]:
    return [node for statement in function.body for node in ast.walk(statement)]


def _needs_positions(source: Source, layer: str) -> bool:
    """Return whether the attention inside a layer works with position ids by itself."""
    inside = [source.forward(n) for n in source.reached(layer) if n in source.attentions]
    return any(isinstance(n, ast.Name) and n.id == POSITIONS for f in inside if f is not None for n in _used(f))


@mutation("position ids are passed down by their places only", fewest=4)
def _placed_positions(source: Source) -> None:
    wanted = [n for n in source.layers if POSITIONS in source.parameters(n)]
    source.by_place(wanted)


def _context_of(kind: str) -> Rewrite:
    def rewrite(source: Source) -> None:
        for name in source.attentions:
            for method in source.classes[name].body:
                if isinstance(method, ast.FunctionDef):
                    source.changes += replace(
                        method,
                        lambda n: ast.Attribute(n.value, kind, n.ctx) if is_own(n, "config") else None,  # type: ignore[attr-defined]
                    )
        for part in _about_attentions(source):
            replace(part, lambda n: _attribute_of("module", n, {"config": kind}))

    return rewrite


def _about_attentions(source: Source) -> list[ast.AST]:
    """Return functions outside of classes, and what is done where a module is found to be an attention."""
    found: list[ast.AST] = list(source.functions.values())
    for node in ast.walk(source.tree):
        if isinstance(node, ast.If) and any(name in ast.unparse(node.test) for name in source.attentions):
            found += node.body
    return found


def _attribute_of(owner: str, node: ast.AST, names: Mapping[str, str]) -> ast.AST | None:
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
        and node.attr in names
    ):
        return ast.Attribute(node.value, names[node.attr], node.ctx)
    return None


_add("an attention's config has another name", _context_of("settings"))


def _interface_calls(source: Source) -> list[ast.Call]:
    """Return the calls in attentions of what the AttentionInterface gave."""
    found = []
    for name in source.attentions:
        for node in ast.walk(source.classes[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attention_interface":
                found.append(node)
    return found


def _interface_choices(source: Source) -> list[tuple[str, ast.Call]]:
    """Return where attentions ask the AttentionInterface, with their classes."""
    return [
        (name, node)
        for name in source.attentions
        for node in ast.walk(source.classes[name])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_interface"
    ]


@mutation("attentions choose their implementation when they are built")
def _chosen_early(source: Source) -> None:
    for name, call in _interface_choices(source):
        constructor = source.method(name, "__init__")
        if constructor is None:
            continue
        chosen = ast.unparse(call)
        constructor.body += ast.parse(f"self.attend_function = {chosen}").body
        call.func, call.args, call.keywords = (
            expression("getattr"),
            [expression("self"), ast.Constant("attend_function")],
            [],
        )
        source.changes += 1


@mutation("layers choose the implementation for their attentions")
def _chosen_by_layers(source: Source) -> None:
    chosen = {name: ast.unparse(call) for name, call in _interface_choices(source)}
    for name, call in _interface_choices(source):
        forward = source.forward(name)
        assert forward is not None
        add(forward, "attend_function", "None")
        call.func, call.args, call.keywords = expression("_next.given"), [expression("attend_function")], []
        source.changes += 1
    for call, name in source.calls(*chosen):
        code = chosen[name].replace("self.config", "PART.config")
        call.keywords.append(ast.keyword(arg="attend_function", value=expression(code, PART=call.func)))


# --- forwards wrapped, signatures lost


def _decorated(where: Callable[[Source], list[str]], decorator: str) -> Rewrite:
    def rewrite(source: Source) -> None:
        for name in where(source):
            forward = source.forward(name)
            if forward is not None:
                decorate(forward, decorator, outermost=True)
                source.changes += 1

    return rewrite


_add("an attention's forward is wrapped", _decorated(_attentions, "_next.wrapped"))
_add("an attention's forward loses its signature", _decorated(_attentions, "_next.hidden"))
_add("a layer's forward loses its signature", _decorated(lambda s: s.layers, "_next.hidden"))
_add("a model's forward is wrapped", _decorated(_entries, "_next.wrapped"))
_add("a model's forward loses its signature", _decorated(_entries, "_next.hidden"))


@mutation("an attention's forward hands on to another method")
def _delegates(source: Source) -> None:
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        forward.name = "attend_to"
        code = "def forward(self, *args, **kwargs):\n    return self.attend_to(*args, **kwargs)"
        source.classes[name].body += ast.parse(code).body
        source.changes += 1


@mutation("attentions are called past their hooks")
def _past_hooks(source: Source) -> None:
    for call, _ in source.calls(*source.attentions):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "forward"):
            call.func = ast.Attribute(call.func, "forward", ast.Load())
            source.changes += 1


@mutation("an attention lies inside another module")
def _inside(source: Source) -> None:
    attentions = set(source.attentions)
    for name in source.layers:
        constructor = source.method(name, "__init__")
        for node in ast.walk(constructor) if constructor else ():
            if isinstance(node, ast.Assign) and any(a in attentions for a in _held_by(source, name, node)):
                node.value = expression("_next.Wrapped(V)", V=node.value)
                source.changes += 1


def _held_by(source: Source, name: str, node: ast.Assign) -> list[str]:
    target = node.targets[0]
    return source.attributes(name).get(target.attr, []) if isinstance(target, ast.Attribute) else []


# --- new arguments


def _scaled_input(source: Source, default: str | None) -> None:
    """Have callers give an attention half of its input, and a factor of two: it is what it was."""
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        first = arguments(forward)[1].arg
        add(forward, "input_scale", default)
        insert(forward, f"{first} = {first} * input_scale")
    for call, name in source.calls(*source.attentions):
        first = source.parameters(name)[0]
        given = next((k for k in call.keywords if k.arg == first), None)
        if given is not None:
            given.value = expression("V * 0.5", V=given.value)
        else:
            call.args[0] = expression("V * 0.5", V=call.args[0])
        call.keywords.append(ast.keyword(arg="input_scale", value=ast.Constant(2.0)))
        source.changes += 1


@mutation("an attention has a new required argument")
def _required(source: Source) -> None:
    source.by_keyword(source.attentions)
    _scaled_input(source, None)


_add("an attention has a new optional argument", lambda s: _scaled_input(s, "1.0"))


@mutation("a model has a new required argument")
def _required_entry(source: Source) -> None:
    source.by_keyword(source.entries)
    for name in source.entries:
        forward = source.forward(name)
        assert forward is not None
        add(forward, "layout")
    for call, _ in source.calls(*source.entries):
        call.keywords.append(ast.keyword(arg="layout", value=ast.Constant("dense")))
        source.changes += 1


@mutation("the mask given to an attention means the opposite")
def _opposite_mask(source: Source) -> None:
    source.by_keyword(source.attentions)
    known = {}
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        found = _mask(forward)
        if found is not None:
            known[name] = found
            insert(forward, f"{found} = _next.negated({found})")
    for call, name in source.calls(*known):
        for keyword in call.keywords:
            if keyword.arg == known[name]:
                keyword.value = expression("_next.negated(V)", V=keyword.value)
                source.changes += 1


@mutation("the mask given to an attention is a mapping")
def _mapped_mask(source: Source) -> None:
    source.by_keyword(source.attentions)
    known = {}
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        found = _mask(forward)
        if found is not None:
            known[name] = found
            insert(forward, f"{found} = {found}['full'] if isinstance({found}, dict) else {found}")
    for call, name in source.calls(*known):
        for keyword in call.keywords:
            if keyword.arg == known[name]:
                keyword.value = expression("{'full': V}", V=keyword.value)
                source.changes += 1


# --- modules, functions, classes and attributes moved


def _renamed_global(source: Source, old: str, new: str) -> None:
    """Rename a function, class or import of a file wherever the file uses it."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Name) and node.id == old:
            return ast.Name(new, node.ctx)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == old and node in source.tree.body:
            node.name = new
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == old:
                    alias.asname = new
        return None

    replace(source.tree, change)
    source.changes += 1


@mutation("the eager function has another name")
def _eager(source: Source) -> None:
    if "eager_attention_forward" in source.functions:
        _renamed_global(source, "eager_attention_forward", "attend_eagerly")


@mutation("the attention functions are imported by another name")
def _interface_name(source: Source) -> None:
    if _interface_choices(source):
        _renamed_global(source, "ALL_ATTENTION_FUNCTIONS", "attention_functions")


@mutation("functions of modeling files have other names", fewest=20)
def _functions(source: Source) -> None:
    for name in source.functions:
        if name != "eager_attention_forward":
            _renamed_global(source, name, f"{name}_of_{source.name}")


def _moved_class(source: Source) -> None:
    for name in source.attentions:
        _renamed_global(source, name, f"{name}V2")
    source._attributes.clear()


_add("attention classes have other names", _moved_class)


@mutation("attention classes say that they are of another file")
def _elsewhere(source: Source) -> None:
    classes = ", ".join(source.attentions)
    source.tree.body += ast.parse(f"_next.elsewhere(__name__, {classes})").body
    source.changes += 1


def _own_names(source: Source, name: str, wanted: Callable[[ast.expr], bool]) -> set[str]:
    constructor = source.method(name, "__init__")
    found = set()
    for node in ast.walk(constructor) if constructor else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and wanted(node.value):
            found.add(node.targets[0].attr)
    return found


def _attributes_renamed(source: Source, names: Callable[[str], set[str]], suffix: str) -> None:
    for name in source.attentions:
        old = names(name)
        if not old:
            continue
        new = {one: f"{one}{suffix}" for one in old}
        source.changes += replace(source.classes[name], lambda n: _attribute_of("self", n, new))  # noqa: B023
        for part in _about_attentions(source):
            replace(part, lambda n: _attribute_of("module", n, new))  # noqa: B023


def _is_layer(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in (
        "nn.Linear",
        "Conv1D",
        "nn.Conv1d",
        "MatMulWrapper",
    )


@mutation("projections of an attention have other names", spares=("gpt2",))  # whose MLP is filled in the same line
def _projections(source: Source) -> None:
    _attributes_renamed(source, lambda n: _own_names(source, n, _is_layer), "_weights")


_PROMISED = {"config", "layer_idx", "is_causal", "num_key_value_groups", "training"}


@mutation("sizes that an attention keeps have other names")
def _sizes(source: Source) -> None:
    def plain(name: str) -> set[str]:
        kept = _own_names(source, name, lambda v: not (isinstance(v, ast.Call) and "nn." in ast.unparse(v.func)))
        return {
            one for one in kept if any(word in one for word in ("head", "dim", "scal", "dropout", "size"))
        } - _PROMISED

    _attributes_renamed(source, plain, "_here")


@mutation("layer_idx of an attention is gone")
def _layer_idx(source: Source) -> None:
    _attributes_renamed(source, lambda n: {"layer_idx"}, "_in_stack")


@mutation("is_causal of an attention is given in the call", fewest=4)
def _is_causal(source: Source) -> None:
    for name in source.attentions:
        constructor = source.method(name, "__init__")
        forward = source.forward(name)
        calls = [n for n in ast.walk(source.classes[name]) if isinstance(n, ast.Call) and n in _interface_calls(source)]
        found = [
            s
            for s in (constructor.body if constructor else [])
            if isinstance(s, ast.Assign) and is_own(s.targets[0], "is_causal")
        ]
        if not (found and calls and forward):
            continue
        uses = [n for n in _used(forward) if is_own(n, "is_causal")]
        if uses:
            continue
        found[0].targets = [ast.Attribute(ast.Name("self", ast.Load()), "sees_the_past_alone", ast.Store())]
        for call in calls:
            call.keywords.append(ast.keyword(arg="is_causal", value=expression("self.sees_the_past_alone")))
            source.changes += 1


@mutation("the list of layers has another name")
def _containers(source: Source) -> None:
    for name in [*source.entries, *source.layers]:
        layers = [attribute for attribute, held in source.attributes(name).items() if set(held) & set(source.layers)]
        if name in source.layers and not any(
            "List" in ast.unparse(n) for n in ast.walk(source.classes[name]) if isinstance(n, ast.Call)
        ):
            continue
        for one in layers:
            source.changes += replace(source.classes[name], lambda n: _attribute_of("self", n, {one: f"{one}_stack"}))  # noqa: B023


@mutation("the position table has another name")
def _table(source: Source) -> None:
    tables = {"wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding"}
    found = {
        node.targets[0].attr: "slots"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr in tables
    }

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Attribute) and node.attr in found:
            return ast.Attribute(node.value, found[node.attr], node.ctx)
        return None

    source.changes += replace(source.tree, change)


# --- caches

_CACHES_IN_PAIRS = ("t5", "mt5", "umt5", "longt5", "bart", "megatron-bert (is_decoder)", "roformer (is_decoder)")
"""Cases whose stock code asks of which class a cache is."""


def _cache_updates(source: Source) -> list[ast.Call]:
    """Return the calls by which attentions write to a cache."""
    return [
        node
        for name in source.attentions
        for node in ast.walk(source.classes[name])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and len(node.args) >= 2
    ]


@mutation("an attention is given its own layer of the cache", spares=_CACHES_IN_PAIRS)
def _one_layer(source: Source) -> None:
    known = {n: cache_of(f) for n in source.attentions if (f := source.forward(n)) is not None and cache_of(f)}
    for call, name in source.calls(*known):
        for keyword in call.keywords:
            if keyword.arg == known[name]:
                keyword.value = expression("_next.one_layer(V, P)", V=keyword.value, P=call.func)
                source.changes += 1


def _duck_caches() -> None:
    import transformers
    import transformers.cache_utils as utils
    import transformers.generation.utils as generation

    native = utils.DynamicCache

    class Store:
        """A cache that is not a Cache."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._native = native(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            if name == "_native":
                raise AttributeError(name)
            return getattr(self._native, name)

    for module in (transformers, utils, generation):
        module.DynamicCache = Store  # type: ignore[misc, assignment]


_add("caches are of a class that is not a Cache", core=_duck_caches, spares=_CACHES_IN_PAIRS)


def _by_keyword_core() -> None:
    from transformers.cache_utils import Cache, EncoderDecoderCache

    for cls in (Cache, EncoderDecoderCache):
        native = cls.__dict__.get("update")
        if native is not None:
            cls.update = _renamed_update(native)


def _renamed_update(native: Any) -> Any:
    def update(self: Any, *, keys: Any, values: Any, layer: int, **kwargs: Any) -> Any:
        return native(self, keys, values, layer, **kwargs)

    return update


@mutation("the arguments of a cache's update are renamed", core=_by_keyword_core)
def _update_by_keyword(source: Source) -> None:
    for call in _cache_updates(source):
        names = ("keys", "values", "layer")
        call.keywords = [ast.keyword(arg=n, value=v) for n, v in zip(names, call.args, strict=False)] + call.keywords
        call.args = []
        source.changes += 1


def _append_core() -> None:
    from transformers.cache_utils import Cache, EncoderDecoderCache

    Cache.append = Cache.update  # type: ignore[attr-defined]
    del Cache.update
    for cls in (EncoderDecoderCache,):
        if "update" in vars(cls):
            cls.append = cls.update  # type: ignore[attr-defined]
            del cls.update


@mutation("a cache is written by another method", core=_append_core)
def _append(source: Source) -> None:
    for call in _cache_updates(source):
        call.func.attr = "append"  # type: ignore[attr-defined]
        source.changes += 1


def _layer_core() -> None:
    from transformers.cache_utils import Cache, EncoderDecoderCache

    def layer(self: Any, index: int) -> Any:
        while len(self.layers) <= index:
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[index]

    Cache.layer = layer  # type: ignore[attr-defined]
    EncoderDecoderCache.layer = lambda self, index: self.self_attention_cache.layer(index)  # type: ignore[attr-defined]


@mutation("attentions write to the layer of a cache", core=_layer_core, reaches=lambda asked: False)
def _layer_updates(source: Source) -> None:
    for call in _cache_updates(source):
        if len(call.args) < 3:
            continue
        owner = call.func.value  # type: ignore[attr-defined]
        call.func = ast.Attribute(expression("C.layer(I)", C=owner, I=call.args[2]), "update", ast.Load())
        del call.args[2:]
        call.keywords = []
        source.changes += 1


def _more_core() -> None:
    from transformers.cache_utils import Cache, EncoderDecoderCache

    for cls in (Cache, EncoderDecoderCache):
        native = cls.__dict__.get("update")
        if native is not None:
            cls.update = _longer_update(native)


def _longer_update(native: Any) -> Any:
    return lambda self, *args, **kwargs: (*native(self, *args, **kwargs), "where they are stored")


@mutation("a cache's update returns three values", core=_more_core)
def _three_values(source: Source) -> None:
    updates = {id(call) for call in _cache_updates(source)}
    source.changes += replace(source.tree, lambda n: expression("V[:2]", V=n) if id(n) in updates else None)


_ASKED = "get_mask_sizes(q_length, layer_idx)"


def _sizes_swapped() -> None:
    from transformers.cache_utils import Cache

    native = Cache.get_mask_sizes
    Cache.get_mask_sizes = lambda self, *a, **k: tuple(reversed(native(self, *a, **k)))  # type: ignore[method-assign]
    runtime.run_again("transformers.masking_utils", (_ASKED, f"{_ASKED}[::-1]"))


def _offset_from_one() -> None:
    from transformers.cache_utils import Cache

    native = Cache.get_query_offset
    Cache.get_query_offset = lambda self, *a, **k: native(self, *a, **k) + 1  # type: ignore[method-assign]
    runtime.run_again(
        "transformers.masking_utils", (".get_query_offset(layer_idx)", ".get_query_offset(layer_idx) - 1")
    )


def _offset_renamed() -> None:
    from transformers.cache_utils import Cache

    Cache.first_query = Cache.get_query_offset  # type: ignore[attr-defined]
    del Cache.get_query_offset
    runtime.run_again("transformers.masking_utils", (".get_query_offset(", ".first_query("))


def _sizes_renamed() -> None:
    from transformers.cache_utils import Cache, EncoderDecoderCache

    Cache.keys_seen = Cache.get_mask_sizes  # type: ignore[attr-defined]
    EncoderDecoderCache.keys_seen = lambda self, *a: self.self_attention_cache.keys_seen(*a)  # type: ignore[attr-defined]
    del Cache.get_mask_sizes, EncoderDecoderCache.get_mask_sizes
    runtime.run_again("transformers.masking_utils", (".get_mask_sizes(", ".keys_seen("))


def _sizes_of_positions() -> None:
    from transformers.cache_utils import Cache

    native = Cache.get_mask_sizes

    def get_mask_sizes(self: Any, query_positions: Any, layer_idx: int) -> Any:
        return native(self, len(query_positions), layer_idx)

    Cache.get_mask_sizes = get_mask_sizes  # type: ignore[method-assign]
    runtime.run_again("transformers.masking_utils", (_ASKED, _ASKED.replace("q_length", "range(q_length)")))


def _tensor_offset() -> None:
    import torch
    from transformers.cache_utils import Cache

    native = Cache.get_query_offset
    Cache.get_query_offset = lambda self, *a, **k: torch.tensor(int(native(self, *a, **k)))  # type: ignore[method-assign]


def _layers_renamed() -> None:
    import transformers
    import transformers.cache_utils as utils
    import transformers.generation.utils as generation

    runtime.run_again(utils.__name__, (".layers", ".stores"))

    for module in (transformers, generation):
        for name in ("Cache", "DynamicCache", "EncoderDecoderCache", "StaticCache"):
            if hasattr(module, name):
                setattr(module, name, getattr(utils, name))


_add("a cache's mask sizes come in another order", core=_sizes_swapped)
_add("a cache's query offset counts from one", core=_offset_from_one)
_add("a cache's query offset is a tensor", core=_tensor_offset)
_add("a cache's query offset has another name", core=_offset_renamed)
_add("a cache's mask sizes have another name", core=_sizes_renamed)
_add("a cache's mask sizes are asked with positions", core=_sizes_of_positions)


def _layers_of_caches(source: Source) -> None:
    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Attribute) and node.attr == "layers" and ast.unparse(node.value).endswith(CACHES):
            return ast.Attribute(node.value, "stores", node.ctx)
        return None

    source.changes += replace(source.tree, change)


_add("the layers of a cache have another name", _layers_of_caches, core=_layers_renamed)

# --- attention functions


@mutation("attentions call a kernel in the place of their function")
def _direct(source: Source) -> None:
    for call in _interface_calls(source):
        call.func = expression("_next.sdpa")
        source.changes += 1


@mutation("the implementation's name is another attribute of a config")
def _backend_name(source: Source) -> None:
    for _, call in _interface_choices(source):

        def change(node: ast.AST) -> ast.AST | None:
            if isinstance(node, ast.Attribute) and node.attr == "_attn_implementation":
                return ast.Attribute(node.value, "attention_backend", node.ctx)
            return None

        source.changes += replace(call, change)


def _backend_core() -> None:
    from transformers import PreTrainedConfig

    PreTrainedConfig.attention_backend = property(lambda self: self._attn_implementation)  # type: ignore[attr-defined]


MUTATIONS["the implementation's name is another attribute of a config"] = Mutation(
    "the implementation's name is another attribute of a config", _backend_name, _backend_core, lambda asked: False
)


@mutation("attention functions are found by their names")
def _indexed(source: Source) -> None:
    for _, call in _interface_choices(source):
        name, eager = call.args
        mapping = call.func.value  # type: ignore[attr-defined]
        chosen = expression("(E if N == 'eager' else M[N])", N=name, E=eager, M=mapping)
        call.func, call.args, call.keywords = expression("_next.given"), [chosen], []
        source.changes += 1


@mutation("attention functions are given q, k and v by keyword")
def _qkv_by_keyword(source: Source) -> None:
    for call in _interface_calls(source):
        names = ("query", "key", "value", "attention_mask")
        named = [ast.keyword(arg=n, value=v) for n, v in zip(names, call.args[1:5], strict=True)]
        call.args, call.keywords = call.args[:1], named + call.keywords
        source.changes += 1


@mutation(
    "attention functions call q, k and v otherwise",
    core=lambda: runtime.change_attention_functions(runtime.by_other_names),
    reaches=lambda asked: False,
)
def _qkv_renamed(source: Source) -> None:
    for call in _interface_calls(source):
        named = [ast.keyword(arg=n, value=v) for n, v in zip(("q", "k", "v", "mask"), call.args[1:5], strict=True)]
        call.args, call.keywords = call.args[:1], named + call.keywords
        source.changes += 1
    _wrap_eager(source, "_next.by_other_names")


def _wrap_eager(source: Source, wrapper: str) -> None:
    if "eager_attention_forward" in source.functions and _interface_calls(source):
        decorate(source.functions["eager_attention_forward"], wrapper, outermost=True)
        source.changes += 1


@mutation(
    "attention functions take heads behind tokens",
    core=lambda: runtime.change_attention_functions(runtime.turned_in),
    reaches=lambda asked: False,
)
def _other_layout(source: Source) -> None:
    for call in _interface_calls(source):
        call.args[1:4] = [expression("V.transpose(1, 2)", V=v) for v in call.args[1:4]]
        source.changes += 1
    _wrap_eager(source, "_next.turned_in")


@mutation(
    "attention functions return the output alone",
    core=lambda: runtime.change_attention_functions(runtime.first_alone),
    reaches=lambda asked: False,
)
def _output_alone(source: Source) -> None:
    calls = {id(call) for call in _interface_calls(source)}
    source.changes += replace(source.tree, lambda n: expression("(V, None)", V=n) if id(n) in calls else None)
    _wrap_eager(source, "_next.first_alone")


# --- rotary modules


def _rotary_calls(source: Source) -> list[ast.Call]:
    return [call for call, _ in source.calls(*source.rotaries)]


@mutation("a rotary module takes positions first", fewest=4)
def _rotary_order(source: Source) -> None:
    source.by_keyword(source.rotaries)
    for name in source.rotaries:
        forward = source.forward(name)
        assert forward is not None
        own, first, second, *rest = forward.args.args
        forward.args.args = [own, second, first, *rest]
        forward.decorator_list = []
    source.by_place(source.rotaries)


@mutation("a rotary module takes no hidden states", fewest=4)
def _rotary_signature(source: Source) -> None:
    source.by_keyword(source.rotaries)
    for name in source.rotaries:
        forward = source.forward(name)
        assert forward is not None
        first = arguments(forward)[1].arg
        remove(forward, first)
        add(forward, "dtype", "None")
        insert(forward, f"{first} = _next.torch.empty(0, dtype=dtype)")
        forward.decorator_list = []
        source.changes += 1
    for call in _rotary_calls(source):
        keyword = next(k for k in call.keywords if k.arg != POSITIONS)
        call.keywords.remove(keyword)
        call.keywords.append(ast.keyword(arg="dtype", value=expression("V.dtype", V=keyword.value)))


@mutation("a rotary module returns one tensor", fewest=4)
def _rotary_stacked(source: Source) -> None:
    for name in source.rotaries:
        forward = source.forward(name)
        assert forward is not None
        for node in ast.walk(forward):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                node.value = expression("_next.torch.stack(V)", V=node.value)
                source.changes += 1


@mutation("the frequencies of a rotary module have another name", fewest=3)
def _rotary_buffer(source: Source) -> None:
    names = {"inv_freq": "frequencies", "original_inv_freq": "first_frequencies"}
    for name in source.rotaries:
        source.changes += replace(source.classes[name], lambda n: _attribute_of("self", n, names))
        forward = source.forward(name)
        assert forward is not None
        forward.decorator_list = []


@mutation("rotary classes have other names", fewest=4)
def _rotary_class(source: Source) -> None:
    for name in source.rotaries:
        _renamed_global(source, name, name.replace("RotaryEmbedding", "Angles"))
    source._attributes.clear()


def _rotations(source: Source) -> list[tuple[str, ast.Assign]]:
    """Return where attentions unpack the angles that they are given, with their classes."""
    return [
        (name, node)
        for name in source.attentions
        for node in ast.walk(source.classes[name])
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == "position_embeddings"
    ]


@mutation("a kernel makes rotary angles from position ids", fewest=4)
def _rotary_kernel(source: Source) -> None:
    if not source.rotaries:
        return
    for name, node in _rotations(source):
        forward, constructor = source.forward(name), source.method(name, "__init__")
        assert forward is not None
        assert constructor is not None
        constructor.body += ast.parse(f"vars(self)['own_angles'] = {source.rotaries[0]}(config)").body
        typed = "layer_type" in source.parameters(source.rotaries[0])
        first = arguments(forward)[1].arg
        given = POSITIONS if POSITIONS in _names(forward) else f"{take_any(forward)}.get('{POSITIONS}')"
        hint = "self.config.layer_types[self.layer_idx]" if typed else "None"
        node.value = expression(f"_next.kernel(self, {first}, {given}, {hint})")
        source.changes += 1


@mutation("each attention has a rotary module of its own", fewest=4)
def _rotary_inside(source: Source) -> None:
    if not source.rotaries or "layer_type" in source.parameters(source.rotaries[0]):
        return
    for name, node in _rotations(source):
        forward, constructor = source.forward(name), source.method(name, "__init__")
        assert forward is not None
        assert constructor is not None
        first = arguments(forward)[1].arg
        given = POSITIONS if POSITIONS in _names(forward) else f"{take_any(forward)}.get('{POSITIONS}')"
        constructor.body += ast.parse(f"self.rotary_emb = {source.rotaries[0]}(config)").body
        node.value = expression(f"self.rotary_emb({first}, {given})")
        source.changes += 1
    if source.changes:
        for name in source.entries:
            constructor = source.method(name, "__init__")
            assert constructor is not None
            constructor.body = [
                s for s in constructor.body if not (isinstance(s, ast.Assign) and is_own(s.targets[0], "rotary_emb"))
            ]
        calls = {
            id(call)
            for name in source.entries
            for call in ast.walk(source.classes[name])
            if isinstance(call, ast.Call) and is_own(call.func, "rotary_emb")
        }
        replace(source.tree, lambda n: ast.Constant(None) if id(n) in calls else None)


# --- configs and outputs


@mutation("each layer has a config of its own")
def _layer_configs(source: Source) -> None:
    layers, seen = set(source.layers), set()
    for name in [*source.entries, *source.layers]:
        constructor = source.method(name, "__init__")
        for node in ast.walk(constructor) if constructor else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in layers
                and id(node) not in seen
            ):
                listed = (
                    any(isinstance(n, ast.ListComp) and node in ast.walk(n) for n in ast.walk(constructor))
                    if constructor
                    else False
                )
                if listed and node.args:
                    node.args[0] = expression("_next.own_config(V)", V=node.args[0])
                    source.changes += 1
                    seen.add(id(node))


@mutation("an attention returns the output alone")
def _attention_alone(source: Source) -> None:
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        returns = [n for n in ast.walk(forward) if isinstance(n, ast.Return)]
        if any(not (isinstance(r.value, ast.Tuple) and len(r.value.elts) == 2) for r in returns):
            return
    calls = {id(call) for call, _ in source.calls(*source.attentions)}
    if len({id(c) for c, _ in source.calls(*source.attentions)}) != len(calls):
        return
    for name in source.attentions:
        for node in ast.walk(source.classes[name]):
            if (
                isinstance(node, ast.Return)
                and isinstance(node.value, ast.Tuple)
                and node in ast.walk(source.forward(name) or node)
            ):
                node.value = node.value.elts[0]
                source.changes += 1
    replace(source.tree, lambda n: expression("_next.with_none(V)", V=n) if id(n) in calls else None)


@mutation("an attention returns one value more")
def _attention_more(source: Source) -> None:
    for name in source.attentions:
        forward = source.forward(name)
        assert forward is not None
        if any(
            not (isinstance(n.value, ast.Tuple) and len(n.value.elts) == 2)
            for n in ast.walk(forward)
            if isinstance(n, ast.Return)
        ):
            return
    calls = {id(call) for call, _ in source.calls(*source.attentions)}
    for name in source.attentions:
        for node in ast.walk(source.forward(name) or source.tree):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                node.value.elts.append(ast.Constant(None))
                source.changes += 1
    replace(source.tree, lambda n: expression("_next.without_third(V)", V=n) if id(n) in calls else None)


def _outputs_core() -> None:
    import transformers.modeling_outputs as outputs

    runtime.run_again(outputs.__name__, ("    last_hidden_state:", "    final_states:"))


def _final_states(source: Source) -> None:
    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Attribute) and node.attr == "last_hidden_state":
            return ast.Attribute(node.value, "final_states", node.ctx)
        if isinstance(node, ast.keyword) and node.arg == "last_hidden_state":
            node.arg = "final_states"
            return node
        return None

    source.changes += replace(source.tree, change)


_add("the output of a model is renamed", _final_states, core=_outputs_core, reaches=lambda asked: False)


def _cache_output_core() -> None:
    import transformers.modeling_outputs as outputs
    from transformers import GenerationMixin

    runtime.run_again(outputs.__name__, ("    past_key_values:", "    kv_store:"), ("    cache:", "    kv_store:"))
    native, name = GenerationMixin._update_model_kwargs_for_generation, names_of_today()["cache"]

    def update(self: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        found = native(self, outputs, model_kwargs, *args, **kwargs)
        return found | ({name: outputs.kv_store} if "kv_store" in outputs else {})

    GenerationMixin._update_model_kwargs_for_generation = update


def _cache_output(source: Source) -> None:
    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Attribute) and node.attr in ("cache", "past_key_values"):
            return ast.Attribute(node.value, "kv_store", node.ctx) if "output" in ast.unparse(node.value) else None
        if isinstance(node, ast.Call) and "Output" in ast.unparse(node.func):
            for keyword in node.keywords:
                if keyword.arg in ("cache", "past_key_values"):
                    keyword.arg = "kv_store"
                    source.changes += 1
        return None

    source.changes += replace(source.tree, change)


_add("the cache in an output is renamed", _cache_output, core=_cache_output_core, reaches=lambda asked: False)
