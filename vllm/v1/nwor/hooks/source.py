# SPDX-License-Identifier: Apache-2.0
"""The kinds of facts about vLLM, and how each is compared with vLLM's source.

Imports nothing of vLLM. Not covered: what functions do, and what is assigned to
attributes outside of their class. The integration tests cover that.
"""

from __future__ import annotations

import ast
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from importlib.util import resolve_name
from pathlib import Path

from .ledger import HookTarget

Found = tuple["Source", ast.AST]  # a module, class or function, and its module


class Mismatch(Exception):
    """A fact that does not hold, as a sentence."""


class Tree:
    """The source of a vLLM; each module is parsed once. read: path of a file, as
    "vllm/envs.py" -> its text, None if it does not exist."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self.read = read
        self.module = cache(partial(Source, self))


class Source:
    """A module of a Tree. Raises Mismatch if there is none of that name."""

    def __init__(self, tree: Tree, name: str) -> None:
        path = name.replace(".", "/")
        text = tree.read(f"{path}.py")
        self.package = name if text is None else name.rpartition(".")[0]
        if text is None and (text := tree.read(f"{path}/__init__.py")) is None:
            raise Mismatch(f"{name} does not exist")
        self.name, self.tree = name, tree
        self.code = ast.parse(text)
        # As ast.walk; goes through a node once.
        self.walk = cache(lambda node: list(ast.walk(node)))

    def find(self, qualname: str) -> Found:
        """The class or function of that name; the module for "". Follows imports and
        base classes within vLLM. Raises Mismatch."""
        module: Found = self, self.code
        try:
            return reduce(_member, filter(None, qualname.split(".")), module)
        except Mismatch:
            raise Mismatch(f"{self.name}.{qualname} does not exist") from None


def _member(found: Found, name: str) -> Found:
    for source, node in _with_bases(found):
        for statement in _flat(node.body):
            if getattr(statement, "name", None) == name:
                return source, statement
            if isinstance(statement, ast.ImportFrom):
                names = [a.name for a in statement.names if name in (a.asname, a.name)]
                origin = "." * statement.level + (statement.module or "")
                origin = resolve_name(origin, source.package)
                if names and origin.startswith("vllm."):
                    return source.tree.module(origin).find(names[0])
    raise Mismatch(name)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those inside of if, try and with."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, name, []))


def _with_bases(found: Found) -> Iterator[tuple[Source, ast.Module | ast.ClassDef]]:
    """A module, or a class and its base classes within vLLM. Raises Mismatch."""
    source, node = found
    if not isinstance(node, ast.Module | ast.ClassDef):
        raise Mismatch(f"{source.name}.{getattr(node, 'name', '?')} is not a class")
    yield source, node
    for base in getattr(node, "bases", ()):
        with contextlib.suppress(Mismatch):
            inherited = source.find(dotted(getattr(base, "value", base)) or ".")
            if isinstance(inherited[1], ast.ClassDef):
                yield from _with_bases(inherited)


def dotted(node: ast.AST | None) -> str:
    """`self.a.b` for such an expression, "" for any other."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return value and f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _bound(statement: ast.AST) -> Iterator[tuple[str, str, str]]:
    """What a statement assigns to, imports or defines: (name, declared type, function
    that is called for the value); "" for what it does not have."""
    called = dotted(getattr(getattr(statement, "value", None), "func", None))
    if isinstance(statement, ast.AnnAssign):
        declared = ast.unparse(statement.annotation).replace(" ", "").strip("'\"")
        yield dotted(statement.target), declared, called
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            for part in getattr(target, "elts", [target]):
                yield dotted(part), "", called
    else:  # imports have several names; a class or function has one
        for named in getattr(statement, "names", [statement]):
            name = getattr(named, "asname", None) or getattr(named, "name", None)
            yield str(name), "", ""


def _attributes(found: Found) -> dict[str, set[str]]:
    """Attributes of a module or class -> declared types; without any, the functions
    that are called for the values."""
    attributes: dict[str, set[str]] = {}
    for source, node in _with_bases(found):
        declared: dict[str, set[str]] = defaultdict(set)
        called: dict[str, set[str]] = defaultdict(set)
        own = (bound for one in _flat(node.body) for bound in _bound(one))
        inside = (bound for one in source.walk(node) for bound in _bound(one))
        of_self = ((n[5:], *how) for n, *how in inside if n.startswith("self."))
        for name, type_, call in (*own, *of_self):
            declared[name] |= {type_} - {""}
            called[name] |= {call} - {""}
        for name in called:
            attributes.setdefault(name, declared[name] or called[name])
    return attributes


def _parameters(name: str, found: Found) -> tuple[tuple[str, ...], int]:
    """A function's parameters, and how many have no default. Raises Mismatch."""
    if not isinstance(found[1], ast.FunctionDef | ast.AsyncFunctionDef):
        raise Mismatch(f"{name} is not a function")
    args = found[1].args
    names = tuple(n.arg for n in ast.iter_child_nodes(args) if isinstance(n, ast.arg))
    return names, len(names) - len([*args.defaults, *filter(None, args.kw_defaults)])


def _places(text: str, source: Source, node: ast.AST) -> list[tuple[int, int]]:
    """(line, column) of each occurrence of an expression, or of a call "f()"."""
    nodes = iter(source.walk(node))
    if text.endswith("()"):
        nodes = (call.func for call in nodes if isinstance(call, ast.Call))
    expression = text.removesuffix("()")
    found = (n for n in nodes if isinstance(n, ast.expr) and dotted(n) == expression)
    return sorted((expr.lineno, expr.col_offset) for expr in found)


class Fact:
    """What a place has: "module", "module:Class.function". `check` raises Mismatch."""

    def __init__(self, place: str, *what: str, **types: str) -> None:
        self.place, self.what, self.types = place, what, types

    def check(self, name: str, found: Found) -> None:
        raise NotImplementedError


class Has(Fact):
    """It has these attributes. types: attribute -> its declared type; if none is
    declared, the function whose results are assigned to it."""

    def check(self, name: str, found: Found) -> None:
        attributes = _attributes(found)
        for attribute in (*self.what, *self.types):
            if attribute not in attributes:
                raise Mismatch(f"{name} has no attribute {attribute}")
        for attribute, wanted in self.types.items():
            types = attributes[attribute]
            fits = (f"{t}|".startswith((f"{wanted}|", f"{wanted}[")) for t in types)
            if not types or not all(fits):
                text = ", ".join(sorted(types)) or "without a type"
                raise Mismatch(f"{name}.{attribute} is {text}; expected {wanted}")


class HasOneOf(Fact):
    """It has at least one of these attributes."""

    def check(self, name: str, found: Found) -> None:
        if _attributes(found).keys().isdisjoint(self.what):
            raise Mismatch(f"{name} has no attribute {' or '.join(self.what)}")


class Does(Fact):
    """Its code has these expressions, the first occurrence of each in this order; "f()"
    is any call of f."""

    def check(self, name: str, found: Found) -> None:
        before, position = "", (0, 0)
        for text in self.what:
            if not (places := _places(text, *found)):
                raise Mismatch(f"{name} does not have {text}")
            if places[0] < position:
                raise Mismatch(f"{name} has {text} before {before}; expected it after")
            before, position = text, places[0]


class DoesIfThere(Does):
    """The same, where its module exists. It is no package."""


class DoesAlone(Does):
    """Its code has this expression, and no other code of the module has it."""

    def check(self, name: str, found: Found) -> None:
        super().check(name, found)
        (text,), (source, node) = self.what, found
        if _places(text, source, node) != _places(text, source, source.code):
            raise Mismatch(f"{source.name} has {text} outside {name}, too")


class Returns(Fact):
    """Each tuple that it returns has parts of these names (the last part of a dotted
    one); with one name: each value that it returns."""

    def check(self, name: str, found: Found) -> None:
        shapes = []
        for one in ast.walk(found[1]):
            value = one.value if isinstance(one, ast.Return) else None
            if isinstance(value, ast.Tuple) or (value and len(self.what) == 1):
                parts = (getattr(p, "func", p) for p in getattr(value, "elts", [value]))
                shapes.append(tuple(dotted(p).rpartition(".")[2] or "?" for p in parts))
        if not shapes or any(shape != self.what for shape in shapes):
            text = "; ".join(", ".join(shape) for shape in shapes) or "no tuple"
            raise Mismatch(f"{name} returns {text}; expected {', '.join(self.what)}")


class Takes(Fact):
    """It is a function with these parameters; others follow only with defaults."""

    def check(self, name: str, found: Found) -> None:
        params, num_required = _parameters(name, found)
        num_wanted = len(self.what)
        if params[:num_wanted] != self.what or num_required > num_wanted:
            has, expected = ", ".join(params), ", ".join(self.what)
            raise Mismatch(f"{name} has parameters ({has}); expected ({expected})")


def mismatch(fact: HookTarget | Fact, tree: Tree) -> str | None:
    """None if a fact holds in a source, or a sentence that says what is different."""
    place = fact.place if isinstance(fact, Fact) else f"{fact.module}:{fact.qualname}"
    name, (module, _, qualname) = place.replace(":", "."), place.partition(":")
    path = f"{module.replace('.', '/')}.py"
    if isinstance(fact, DoesIfThere) and tree.read(path) is None:
        return None
    try:
        found = tree.module(module).find(qualname)
        if isinstance(fact, HookTarget):
            return fact.matches(_parameters(name, found)[0])
        fact.check(name, found)
    except Mismatch as different:
        return str(different)
    return None


def files_of(folder: Path) -> Callable[[str], str | None]:
    """`read` of a Tree, for a folder that has vllm/ in it."""

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read
