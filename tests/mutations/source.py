"""The modeling file of a family as a tree that mutations rewrite: which class calls which, and with what arguments."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

CACHES = ("cache", "past_key_values", "layer_past", "past_key_value")
"""What forwards of 5.14 to 5.24 call their cache, where no annotation says it."""
POSITIONS = "position_ids"


@dataclass
class Source:
    """The tree of one modeling file, and what its classes are.

    Attributes:
        name: of the family, as its folder is called.
        tree: of the file; it is changed in place.
        changes: how many places were changed.
    """

    name: str
    tree: ast.Module
    changes: int = 0
    _attributes: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @classmethod
    def parsed(cls, name: str, text: str) -> Source:
        """Return the source of the family `name` from the text of its file."""
        return cls(name, ast.parse(text))

    @property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """The functions of the file by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def text(self) -> str:
        """Return the file as it is now, with helpers of the mutations at hand as `_next`, and no docstrings made."""
        tree = copy.deepcopy(self.tree)
        body = tree.body
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):  # made from the arguments, in most of an import's time
                node.decorator_list = [
                    d for d in node.decorator_list if not ast.unparse(d).startswith("auto_docstring")
                ]
        last = max((i for i, node in enumerate(body) if _is_future(node)), default=-1)
        first = max(last + 1, 1 if _is_docstring(body[0]) else 0)
        body.insert(first, ast.parse("import tests.mutations.runtime as _next").body[0])
        return ast.unparse(ast.fix_missing_locations(tree))

    # what the classes are

    @property
    def attentions(self) -> list[str]:
        """Classes that attend: named so, and holding no other that is."""
        named = [n for n in self.classes if "Attention" in n and self.forward(n) is not None]
        return [n for n in named if not any("Attention" in other for other in self.held(n))]

    @property
    def entries(self) -> list[str]:
        """Classes that take input ids and attend, and hold none that do."""
        return [n for n in self.classes if n in self._reading and not self._reading & self.reached(n)]

    @property
    def heads(self) -> list[str]:
        """Classes that take input ids, and hold one that takes them and attends."""
        return [n for n in self.classes if "input_ids" in self.parameters(n) and self._reading & self.reached(n)]

    @property
    def _reading(self) -> set[str]:
        attentions = set(self.attentions)
        return {n for n in self.classes if "input_ids" in self.parameters(n) and attentions & self.reached(n)}

    @property
    def layers(self) -> list[str]:
        """Classes between those that take input ids and those that attend."""
        attentions, outer = set(self.attentions), {*self.entries, *self.heads}
        inner = [n for n in self.classes if n not in attentions | outer and attentions & self.reached(n)]
        return [n for n in inner if self.forward(n) is not None and "Wrapper" not in n]

    @property
    def rotaries(self) -> list[str]:
        """Classes that make rotary angles from positions."""
        return [n for n in self.classes if "RotaryEmbedding" in n and POSITIONS in self.parameters(n)]

    def forward(self, name: str) -> ast.FunctionDef | None:
        """Return the forward that the class `name` writes itself, or None."""
        return self.method(name, "forward")

    def method(self, name: str, method: str) -> ast.FunctionDef | None:
        """Return a method that the class `name` writes itself, or None."""
        found = (f for f in self.classes[name].body if isinstance(f, ast.FunctionDef) and f.name == method)
        return next(found, None)

    def parameters(self, name: str) -> list[str]:
        """Return the names of the arguments of a class's forward, without `self`."""
        forward = self.forward(name)
        return [] if forward is None else [a.arg for a in arguments(forward)][1:]

    def held(self, name: str) -> set[str]:
        """Return the classes of this file of which the class `name` makes parts of itself."""
        return {one for found in self.attributes(name).values() for one in found}

    def reached(self, name: str) -> set[str]:
        """Return the classes that are parts of the class `name`, or parts of its parts."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = self.held(waiting.pop()) - found
            found |= new
            waiting += new
        return found - {name}

    def attributes(self, name: str) -> dict[str, list[str]]:
        """Return which classes of this file the attributes of the class `name` are made of, in order."""
        if name in self._attributes:
            return self._attributes[name]
        made: dict[str, list[str]] = {}
        for base in self.classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                made |= self.attributes(base.id)
        constructor = self.method(name, "__init__")
        for node in _in_order(constructor) if constructor else ():
            if isinstance(node, ast.Assign) and _own_attribute(node.targets[0]):
                made.setdefault(node.targets[0].attr, []).extend(self._mentioned(node.value, constructor))
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
                if _own_attribute(call.func.value):
                    made.setdefault(call.func.value.attr, []).extend(self._mentioned(call.args[0], constructor))
        self._attributes[name] = made
        return made

    def _mentioned(self, value: ast.AST, constructor: ast.FunctionDef) -> list[str]:
        names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
        found: list[str] = []
        for one in names:
            if one in self.classes:
                found.append(one)
                continue
            for node in [*self.tree.body, *ast.walk(constructor)]:  # a mapping of names to classes, or a choice of one
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == one:
                    inside = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
                    found += [] if one in inside else self._mentioned(node.value, constructor)
        return found

    # who calls whom

    def calls(self, *targets: str, sure: bool = False) -> Iterator[tuple[ast.Call, str]]:
        """Return the calls of parts that are of the classes `targets`, each with the class that is called.

        Args:
            targets: names of classes.
            sure: whether calls are left out of what may be of classes that take other arguments than each other.
        """
        wanted = set(targets)
        for name, node in self.classes.items():
            known = self.attributes(name)
            for method in (f for f in node.body if isinstance(f, ast.FunctionDef)):
                loops = _loops(method)
                for call in [n for n in ast.walk(method) if isinstance(n, ast.Call)]:
                    found = self._called(call.func, known, loops)
                    hit = [one for one in found if one in wanted]
                    alike = len({tuple(self.parameters(one)) for one in hit}) == 1
                    if hit and (alike or not sure):
                        yield call, hit[0]

    def _called(self, func: ast.expr, known: dict[str, list[str]], loops: dict[str, str]) -> list[str]:
        """Return the classes that `func` may be of, in a method of a class with the attributes `known`."""
        if isinstance(func, ast.Attribute) and func.attr == "forward":
            func = func.value
        if isinstance(func, ast.Subscript) and _own_attribute(func.value):
            found = known.get(func.value.attr, [])  # type: ignore[attr-defined]
            try:
                index = ast.literal_eval(func.slice)
            except ValueError:
                return found
            return [found[index]] if isinstance(index, int) and -len(found) <= index < len(found) else found
        if isinstance(func, ast.Name) and func.id in loops:
            return known.get(loops[func.id], [])
        if not isinstance(func, ast.Attribute):
            return []
        if _own_attribute(func):
            return known.get(func.attr, [])
        return [
            one for owner in self._called(func.value, known, loops) for one in self.attributes(owner).get(func.attr, [])
        ]

    def certain(self, classes: list[str]) -> list[str]:
        """Return `classes`, or none where a call may be of one or of another, which takes other arguments."""
        sure = {id(call) for call, _ in self.calls(*classes, sure=True)}
        unsure = {one for call, one in self.calls(*classes) if id(call) not in sure}
        return [] if unsure else classes

    # what is done to them

    def rename(self, classes: list[str], old: str | Callable[[ast.FunctionDef], str | None], new: str) -> None:
        """Rename an argument of the forwards of `classes`, and in what calls them; inside it keeps its name.

        Args:
            classes: by name.
            old: the argument, or what finds it in a forward.
            new: its new name.
        """
        renamed: dict[str, str] = {}
        for name in classes:
            forward = self.forward(name)
            found = None if forward is None else (old if isinstance(old, str) else old(forward))
            argument = None if forward is None else next((a for a in arguments(forward) if a.arg == found), None)
            if forward is None or found is None or argument is None or found == new:
                continue
            argument.arg = new
            insert(forward, f"{found} = {new}")
            undecorate(forward, found)
            renamed[name] = found
            self.changes += 1
        for call, name in self.calls(*renamed):
            for keyword in call.keywords:
                if keyword.arg == renamed[name]:
                    keyword.arg = new

    def keep_old_name(self, classes: list[str], old: str, new: str) -> None:
        """Have the forwards of `classes` that take `new` take it as `old` too, as transformers deprecates names."""
        for name in classes:
            forward = self.forward(name)
            if forward is not None and new in self.parameters(name):
                decorate(forward, f"_next.deprecate_kwarg({old!r}, '9.0', new_name={new!r})")

    def by_place(self, classes: list[str]) -> None:
        """Have the forwards of `classes` called with arguments by their places, as far as decorators allow."""
        for call, name in self.calls(*classes, sure=True):
            forward = self.forward(name)
            assert forward is not None
            names, given = self.parameters(name), {k.arg: k for k in call.keywords}
            names = names[: names.index("use_cache")] if "use_cache" in names else names  # which has its default there
            if any(isinstance(a, ast.Starred) for a in call.args) or not set(names) & set(given):
                continue
            defaults = default_of(forward)
            last = max(i for i, n in enumerate(names) if n in given or i < len(call.args))
            placed = list(call.args)
            for argument in names[len(placed) : last + 1]:
                value = given[argument].value if argument in given else defaults.get(argument)
                if value is None:
                    break
                placed.append(copy.deepcopy(value))
            used = set(names[: len(placed)])
            call.args, call.keywords = placed, [k for k in call.keywords if k.arg not in used]
            self.changes += 1

    def by_keyword(self, classes: list[str]) -> None:
        """Have the forwards of `classes` called with arguments by their names alone."""
        for call, name in self.calls(*classes, sure=True):
            names = self.parameters(name)
            if call.args and not any(isinstance(a, ast.Starred) for a in call.args):
                named = [ast.keyword(arg=n, value=a) for n, a in zip(names, call.args, strict=False)]
                call.args, call.keywords = [], named + call.keywords
                self.changes += 1


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    """Return the arguments of a function that have names."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def default_of(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return the defaults of a function's arguments."""
    placed = [*function.args.posonlyargs, *function.args.args]
    found = dict(
        zip([a.arg for a in placed][len(placed) - len(function.args.defaults) :], function.args.defaults, strict=True)
    )
    return found | {a.arg: d for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d}


def cache_of(function: ast.FunctionDef) -> str | None:
    """Return what a forward calls its cache, by its annotation or its name, or None."""
    for argument in arguments(function):
        annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
        if argument.arg in CACHES or "Cache" in annotation:
            return argument.arg
    return None


def remove(function: ast.FunctionDef, name: str) -> None:
    """Take the argument `name` from a function."""
    args, defaults = function.args, default_of(function)
    args.args = [a for a in args.args if a.arg != name]
    args.kwonlyargs = [a for a in args.kwonlyargs if a.arg != name]
    args.defaults = [defaults[a.arg] for a in args.args if a.arg in defaults]
    args.kw_defaults = [defaults.get(a.arg) for a in args.kwonlyargs]
    undecorate(function, name)


def add(function: ast.FunctionDef, name: str, default: str | None = None) -> None:
    """Give a function one more argument: required, right behind the first, or optional, as the last."""
    if default is None:
        function.args.args.insert(2, ast.arg(arg=name))
        if len(function.args.defaults) > len(function.args.args) - 2:
            function.args.defaults.insert(0, ast.Constant(None))
    else:
        function.args.args.append(ast.arg(arg=name))
        function.args.defaults.append(ast.parse(default, mode="eval").body)


def take_any(function: ast.FunctionDef) -> str:
    """Have a function take any keyword argument, and return what it calls them."""
    if function.args.kwarg is None:
        function.args.kwarg = ast.arg(arg="kwargs")
    return function.args.kwarg.arg


def insert(function: ast.FunctionDef, code: str) -> None:
    """Put statements at the beginning of a function."""
    first = 1 if _is_docstring(function.body[0]) else 0
    function.body[first:first] = ast.parse(code).body


def decorate(function: ast.FunctionDef, code: str, *, outermost: bool = False) -> None:
    """Give a function one more decorator, the innermost one by default."""
    decorator = ast.parse(code, mode="eval").body
    function.decorator_list.insert(0 if outermost else len(function.decorator_list), decorator)


def undecorate(function: ast.FunctionDef, name: str) -> None:
    """Take the decorators from a function that deprecate older names of its argument `name`."""
    function.decorator_list = [
        d
        for d in function.decorator_list
        if not ("deprecate_kwarg" in ast.unparse(d) and f"'{name}'" in ast.unparse(d))
    ]


def replace(node: ast.AST, change: Callable[[ast.AST], ast.AST | None]) -> int:
    """Put what `change` returns in the place of each node below `node`, innermost first; return how many there were."""
    count = 0

    class Changing(ast.NodeTransformer):
        def generic_visit(self, one: ast.AST) -> ast.AST:
            nonlocal count
            super().generic_visit(one)
            new = None if one is node else change(one)
            count += new is not None
            return one if new is None else new

    Changing().visit(node)
    return count


def expression(code: str, **parts: ast.AST) -> ast.expr:
    """Return `code` as an expression, with `parts` in the place of the names that they are given by."""
    tree = ast.parse(code, mode="eval")
    replace(tree, lambda n: copy.deepcopy(parts[n.id]) if isinstance(n, ast.Name) and n.id in parts else None)
    return tree.body


def is_own(node: ast.AST, name: str) -> bool:
    """Return whether `node` is `self.name`."""
    return _own_attribute(node) and node.attr == name  # type: ignore[attr-defined]


def _own_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _in_order(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements of a function, inner ones too, as they are written."""
    return sorted((n for n in ast.walk(function) if isinstance(n, ast.stmt)), key=lambda n: n.lineno)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_future(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _loops(method: ast.FunctionDef) -> dict[str, str]:
    """Return the attribute of `self` that each loop variable of a method comes from."""
    found = {}
    for node in ast.walk(method):
        if not isinstance(node, ast.For):
            continue
        attributes = [n.attr for n in ast.walk(node.iter) if _own_attribute(n)]  # type: ignore[attr-defined]
        names = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
        if attributes and names:
            found[names[-1]] = attributes[0]
    return found
