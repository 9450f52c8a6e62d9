# SPDX-License-Identifier: Apache-2.0
"""Compares the source of a vLLM with the LEDGERs and FACTS; imports nothing of it.

Not covered: what its functions do, and what is assigned to attributes from outside
their class. The integration tests are for that.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path

from ..plugin import AUDIT_HOOKS, HOOKS
from ._wrap import HookTarget
from .facts import FACTS

# Our modules with a LEDGER by the names that FACTS has for them ("runner_v1",
# "audit.runner"); import_module's argument.
HOOKED = {
    hook.removeprefix(".hooks").removeprefix("."): hook
    for hook in (*HOOKS.values(), *AUDIT_HOOKS.values())
}

Found = tuple["Source", ast.AST]  # a module, class or function, and the module it is in
Fact = tuple[str, str, list[str]]  # place, kind, what


class Mismatch(Exception):
    """What does not hold, as a sentence."""


class Tree:
    """The source of a vLLM: its modules, each parsed once.

    read: the text of a file by its path ("vllm/envs.py"); None if there is none.
    """

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self.read = read
        self.module = cache(partial(Source, self))


class Source:
    """A module of a Tree. Raises Mismatch if there is none of that name.

    walk: gives what ast.walk does, and goes through a node once.
    """

    def __init__(self, tree: Tree, name: str) -> None:
        path = name.replace(".", "/")
        text = tree.read(f"{path}.py")
        self.is_package = text is None
        if text is None and (text := tree.read(f"{path}/__init__.py")) is None:
            raise Mismatch(f"{name} does not exist")
        self.name, self.tree = name, tree
        self.code = ast.parse(text)
        self.walk = cache(lambda node: list(ast.walk(node)))

    def find(self, qualname: str) -> Found:
        """The class or function of that name, "": the module. Imports and base classes
        are followed, within vLLM. Raises Mismatch."""
        module: Found = self, self.code
        return reduce(_member, filter(None, qualname.split(".")), module)

    def imported(self, statement: ast.ImportFrom) -> Source | None:
        """The module of vLLM that a statement imports from."""
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        name = resolve_name("." * statement.level + (statement.module or ""), package)
        return self.tree.module(name) if name.startswith("vllm.") else None


def _member(found: Found, name: str) -> Found:
    for source, node in _with_bases(found):
        for statement in _flat(node.body):
            if getattr(statement, "name", None) == name:
                return source, statement
            if isinstance(statement, ast.ImportFrom):
                names = [a.name for a in statement.names if name in (a.asname, a.name)]
                if names and (origin := source.imported(statement)) is not None:
                    return origin.find(names[0])
    raise Mismatch(f"{found[0].name} has no {name}")


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those inside of if, try and with."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, name, []))


def _with_bases(found: Found) -> Iterator[tuple[Source, ast.Module | ast.ClassDef]]:
    """A module, or a class and those it inherits from, as far as they are vLLM's.
    Raises Mismatch."""
    source, node = found
    if not isinstance(node, ast.Module | ast.ClassDef):
        raise Mismatch(f"{source.name}.{getattr(node, 'name', '?')} is no class")
    yield source, node
    for base in getattr(node, "bases", ()):
        with contextlib.suppress(Mismatch):
            inherited = source.find(dotted(getattr(base, "value", base)) or ".")
            if isinstance(inherited[1], ast.ClassDef):
                yield from _with_bases(inherited)


def dotted(node: ast.AST | None) -> str:
    """`self.a.b` of such an expression, "" of any other."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return value and f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _bound(statement: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Each (name or target, its declared type, what is called for the value) that a
    statement has; "" where there is no such."""
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
    """Attributes of a module or class -> the types they are declared with; of one that
    is not declared, what is called for its values."""
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


def _parameters(function: ast.AST) -> tuple[list[str], int]:
    """Names of a function's parameters, and how many of them have no default. Raises
    Mismatch."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        raise Mismatch(f"{getattr(function, 'name', '?')} is no function")
    args = function.args
    names = [one.arg for one in ast.iter_child_nodes(args) if isinstance(one, ast.arg)]
    return names, len(names) - len([*args.defaults, *filter(None, args.kw_defaults)])


def _place(tree: Tree, module: str, qualname: str) -> tuple[str, Found]:
    """What a function, class or module is called, and what it is. Raises Mismatch."""
    name, source = f"{module}.{qualname}".rstrip("."), tree.module(module)
    try:
        return name, source.find(qualname)
    except Mismatch:
        raise Mismatch(f"{name} does not exist") from None


def check_target(target: HookTarget, tree: Tree) -> None:
    """What `_wrap.check` does, on the source. Raises Mismatch."""
    _, (_, function) = _place(tree, target.module, target.qualname)
    if (mismatch := target.matches(tuple(_parameters(function)[0]))) is not None:
        raise Mismatch(mismatch)


def check_fact(fact: Fact, tree: Tree) -> None:
    """Raises Mismatch."""
    place, kind, what = fact
    module, _, qualname = place.partition(":")
    name, found = _place(tree, f"vllm.{module}", qualname)
    KINDS[kind](name, what, found)


def _check_has(name: str, what: list[str], found: Found) -> None:
    attributes = _attributes(found)
    for word in what:
        either, _, wanted = word.partition(":")
        there = [one for one in either.split("|") if one in attributes]
        if not there:
            raise Mismatch(f"{name} has no attribute {either.replace('|', ' or ')}")
        types = attributes[there[0]]
        fitting = {t for t in types if t.startswith((f"{wanted}[", f"{wanted}|"))}
        if wanted and (not types or types - fitting - {wanted}):
            text = ", ".join(sorted(types)) or "without a type"
            raise Mismatch(f"{name}.{there[0]} is {text}; expected {wanted}")


def _check_takes(name: str, what: list[str], found: Found) -> None:
    names, num_required = _parameters(found[1])
    wanted = [word for word in what if word != "..."]
    others_allowed = wanted != what and num_required <= len(wanted)
    if names[: len(wanted)] != wanted or (names != wanted and not others_allowed):
        found_, expected = ", ".join(names), ", ".join(what)
        raise Mismatch(f"{name} has parameters ({found_}); expected ({expected})")


def _check_returns(name: str, what: list[str], found: Found) -> None:
    """All tuples that are returned have these parts."""
    shapes = []
    for statement in ast.walk(found[1]):
        value = statement.value if isinstance(statement, ast.Return) else None
        if value is not None and (isinstance(value, ast.Tuple) or len(what) == 1):
            parts = [getattr(p, "func", p) for p in getattr(value, "elts", [value])]
            shapes.append([dotted(part).rpartition(".")[2] or "?" for part in parts])
    if not shapes or any(shape != what for shape in shapes):
        text = "; ".join(", ".join(shape) for shape in shapes) or "no tuple"
        raise Mismatch(f"{name} returns {text}; expected {', '.join(what)}")


def _check_does(name: str, what: list[str], found: Found) -> None:
    source, node = found
    above, line = "", (0, 0)
    for text in what:
        places = _places(text, source, node)
        if not places:
            raise Mismatch(f"{name} does not have {text.rstrip('!')}")
        if text.endswith("!") and places != _places(text, source, source.code):
            raise Mismatch(f"{source.name} has {text[:-1]} outside {name}, too")
        if places[0] < line:
            raise Mismatch(f"{name} has {text} before {above}; expected it behind")
        above, line = text, places[0]


def _places(text: str, source: Source, node: ast.AST) -> list[tuple[int, int]]:
    """(line, column) of each occurrence of an expression; with () behind it: of its
    calls. In order."""
    expression, is_call, _ = text.partition("()")
    nodes: Iterator[ast.AST] = iter(source.walk(node))
    if is_call:
        nodes = (call.func for call in nodes if isinstance(call, ast.Call))
    found = (n for n in nodes if isinstance(n, ast.expr) and dotted(n) == expression)
    return sorted((expr.lineno, expr.col_offset) for expr in found)


# How each kind of fact is checked.
KINDS = {
    "has": _check_has,
    "does": _check_does,
    "returns": _check_returns,
    "takes": _check_takes,
}


def files_of(folder: Path) -> Callable[[str], str | None]:
    """`read` of a Tree, of the files in a folder that has vllm/ in it."""

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


def facts(module: str) -> list[Fact]:
    """Those of a module of ours (a key of FACTS)."""
    found: list[Fact] = []
    above = ""
    for entry in re.split(r"\n(?=\S)", FACTS[module].strip()):
        name, *words = entry.split()
        place, above = (above + name, above) if name[0] == "." else (name, name)
        for word in words:
            if word in KINDS:
                found.append((place, word, []))
            else:
                found[-1][2].append(word)
    return found


def ledger(module: str) -> tuple[HookTarget, ...]:
    """A module's LEDGER, if it has one; the module is imported for it."""
    if module not in HOOKED:
        return ()
    package = __package__.rpartition(".")[0]
    return tuple(import_module(HOOKED[module], package).LEDGER)


def mismatches(module: str, tree: Tree) -> list[str]:
    """What of the LEDGER and the FACTS of a module of ours does not hold, a sentence
    each."""
    found: dict[str, None] = {}
    checks = [partial(check_target, target) for target in ledger(module)]
    checks += [partial(check_fact, fact) for fact in facts(module)]
    for check in checks:
        try:
            check(tree)
        except Mismatch as mismatch:
            found[str(mismatch)] = None
    return list(found)
