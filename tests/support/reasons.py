"""Finds the reasons that the code can write into conditions, events and rejections, by following the values in its syntax.

A reason is a word in CamelCase that reaches a parameter or field named `reason` (or `because` of a termination), or an
alternative of a Literal type whose name ends in Reason. Values are followed through names, branches, dictionaries and
functions; a value that cannot be followed is reported, so that no reason is missed in silence.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import syntax

# The packages that write conditions, events and rejections.
PACKAGES = ("schemas", "store", "models", "reconciler", "nodeagent", "dashboard", "insight/doctor")
_REASON = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)*")
# Parameters and fields that hold a reason. `over` is an epoch's reason, `because` a termination's.
_FIELDS = frozenset({"reason", "because", "over"})
# Expressions that are sentences for people, or are made of reasons that were found elsewhere.
_SENTENCES = {
    "nodeagent/hardware/system_text.py: error.strerror",
    "reconciler/deployments/demand/scraper.py: dict(named[:_GATEWAYS])",
    "reconciler/nodes/reconcile.py: now.type",
    "reconciler/deployments/reconcile.py: self._state.demand.demand(name)",
    "reconciler/deployments/plan.py: epoch.message",
    "store/events.py: ', '.join(reasons)",
}
# Functions that return a reason of a document that was written before.
_READERS = frozenset({"_reason_of"})
# The table itself, and the sentences of forecasts, are no reasons.
_SKIPPED = ("schemas/reasons/", "reconciler/deployments/forecast.py")
# Reasons that are put together from a word and a state.
_FORMATTED = {
    "f'Engine{engine.state}'": ("EngineDraining", "EngineFailed"),
    "f'{way}Impossible'": ("TensorImpossible", "PipelineImpossible"),
}


@dataclass(kw_only=True)
class _Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef
    path: str
    owner: str
    """Name of its class; empty for a function of the module."""

    @property
    def name(self) -> str:
        """Return the name by which it is called."""
        return self.owner if self.node.name == "__init__" else self.node.name

    @property
    def returns_words(self) -> bool:
        """Return whether its annotation allows a reason."""
        returns = self.node.returns
        return (
            returns is not None and re.search(r"\bstr\b|Reason", ast.unparse(returns)) is not None
        )

    @property
    def parameters(self) -> list[str]:
        arguments = self.node.args
        names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
        return names[1:] if self.owner and names[:1] in (["self"], ["cls"]) else names


@dataclass(kw_only=True)
class FoundReasons:
    """Reasons with the places that write them, and the expressions that could not be followed."""

    reasons: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unresolved: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class _Code:
    """The parsed packages: functions, classes with their fields, and constants by name."""

    trees: dict[str, ast.Module] = field(default_factory=dict)
    functions: dict[str, list[_Function]] = field(default_factory=lambda: defaultdict(list))
    constants: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    sinks: dict[str, dict[str, int | None]] = field(default_factory=lambda: defaultdict(dict))
    """Callables by name, with the parameters that take a reason and their positions."""


def find_reasons(root: Path) -> FoundReasons:
    """Return every reason that the packages below the folder can write."""
    code = _parse(root)
    found_reasons = FoundReasons()
    done: set[tuple[str, str]] = set()
    while pending := {(name, p) for name, ps in code.sinks.items() for p in ps} - done:
        done |= pending
        for path, tree in code.trees.items():
            for scope in _scopes(tree):
                _follow_calls(code, found_reasons, path, scope, {name for name, _ in pending}, done)
    for path, tree in code.trees.items():
        for node in ast.walk(tree):
            _add_literals(found_reasons, path, node)
    found_reasons.unresolved = sorted(set(found_reasons.unresolved) - _SENTENCES)
    return found_reasons


def _parse(root: Path) -> _Code:
    code = _Code()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            path = str(file.relative_to(root))
            if not path.endswith("_pb2.py") and not path.startswith(_SKIPPED):
                code.trees[path] = syntax.tree(file)
    for path, tree in code.trees.items():
        for statement in tree.body:
            _collect_constant(code, statement)
        owners = {
            inner: node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for inner in node.body
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                _collect_class(code, node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                _collect_function(code, _Function(node=node, path=path, owner=owners.get(node, "")))
    return code


def _collect_constant(code: _Code, statement: ast.stmt) -> None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        code.constants[statement.targets[0].id].append(statement.value)
    if not isinstance(statement, ast.AnnAssign) or statement.value is None:
        return
    if isinstance(statement.target, ast.Name):
        code.constants[statement.target.id].append(statement.value)


def _collect_class(code: _Code, node: ast.ClassDef) -> None:
    names = [
        stmt.target.id
        for stmt in node.body
        if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name)
    ]
    for name in _FIELDS.intersection(names):
        code.sinks[node.name][name] = names.index(name)


def _collect_function(code: _Code, function: _Function) -> None:
    node = function.node
    code.functions[node.name].append(function)
    positional = function.parameters
    keywords = [kwonlyarg.arg for kwonlyarg in node.args.kwonlyargs]
    for parameter in ("reason", "because"):
        if parameter in positional:
            code.sinks[function.name][parameter] = positional.index(parameter)
        elif parameter in keywords:
            code.sinks[function.name][parameter] = None


_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def _scopes(tree: ast.Module) -> Iterator[_Scope]:
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _own_nodes(scope: _Scope) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of the functions inside it."""
    pending: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend(ast.iter_child_nodes(node))


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _follow_calls(
    code: _Code,
    found: FoundReasons,
    path: str,
    scope: _Scope,
    names: set[str],
    done: set[tuple[str, str]],
) -> None:
    tracer = _Tracer(code, found, path, scope)
    for node in _own_nodes(scope):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "reason":
                    tracer.trace(value, lenient=True)
        elif isinstance(node, ast.Call) and _called(node) in names:
            for parameter, position in dict(code.sinks[_called(node)]).items():
                if (_called(node), parameter) in done and _accepts(code, path, node, parameter):
                    for value, index in _given(node, parameter, position):
                        tracer.trace(value, index=index)


def _given(
    call: ast.Call, parameter: str, position: int | None
) -> list[tuple[ast.expr, int | None]]:
    """Return what a call passes as the parameter, with the index to follow in it: one expression, or none."""
    named = [(keyword.value, None) for keyword in call.keywords if keyword.arg == parameter]
    if named or position is None:
        return list(named)
    for at, expr in enumerate(call.args[: position + 1]):
        if isinstance(expr, ast.Starred):
            return [(expr.value, position - at)]
        if at == position:
            return [(expr, None)]
    return []


def _alternatives(value: ast.expr, index: int | None) -> list[tuple[ast.expr, int | None]]:
    """Return the expressions of which a compound one is one, each with the index to follow in it."""
    match value:
        case ast.IfExp(body=one, orelse=other):
            return [(one, index), (other, index)]
        case ast.BoolOp(values=values):
            return [(expr, index) for expr in values]
        case ast.Tuple(elts=elements) if index is not None and index < len(elements):
            return [(elements[index], None)]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [(element, index) for element in elements]
        case ast.Await(value=inner):
            return [(inner, index)]
        case ast.Dict(values=values):
            return [(expr, None) for expr in values]
        case ast.Subscript(value=inner):
            return [(inner, None)]
        case _:
            return []


def _accepts(code: _Code, path: str, call: ast.Call, parameter: str) -> bool:
    """Return whether a plain call can mean a function with this parameter, not another one of the same module."""
    own = [function for function in code.functions.get(_called(call), ()) if function.path == path]
    if not own or not isinstance(call.func, ast.Name):
        return True
    return any(
        parameter in (*function.parameters, *(k.arg for k in function.node.args.kwonlyargs))
        for function in own
    )


@dataclass
class _Tracer:
    """Follows one expression to the words that it can be."""

    code: _Code
    found: FoundReasons
    path: str
    scope: _Scope
    depth: int = 0

    def trace(self, value: ast.expr, *, index: int | None = None, lenient: bool = False) -> None:
        """Record the reasons that the expression, or its element of that index, can be."""
        match value:
            case ast.Constant(value=text):
                if isinstance(text, str) and _REASON.fullmatch(text):
                    self.found.reasons[text].add(f"{self.path}:{value.lineno}")
            case ast.Attribute(attr=name):
                self._attribute(name, value)
            case ast.Name(id=name):
                self._name(name, value, index)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int() as at)):
                self._name(name, value, at)
            case ast.Call():
                self._call(value, index)
            case ast.JoinedStr(values=values):
                self._formatted(values, value)
            case _:
                parts = _alternatives(value, index)
                for part, place in parts:
                    self.trace(part, index=place)
                if not parts and not lenient:
                    self._give_up(value)

    def _attribute(self, name: str, value: ast.Attribute) -> None:
        if name in _FIELDS or name == "attr":
            return  # a reason that was recorded where it was made
        if name in self.code.constants:
            for constant in self.code.constants[name]:
                self.trace(constant)
            return
        if name == "value":
            return
        self._give_up(value)

    def _name(self, name: str, value: ast.expr, index: int | None) -> None:
        if self.depth > 6:
            return
        bound = list(_bindings(self.scope, name))
        inner = _Tracer(self.code, self.found, self.path, self.scope, self.depth + 1)
        for expr, at in bound:
            inner.trace(expr, index=at if at is not None else index)
        if bound or _is_captured(self.scope, name):
            return
        if not isinstance(self.scope, ast.Module):
            arguments = self.scope.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if name in [arg.arg for arg in every]:
                self._become_sink(self.scope, name)
                return
        if name in self.code.constants:
            for expr in self.code.constants[name]:
                inner.trace(expr)
            return
        self._give_up(value)

    def _become_sink(self, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        """Record that callers of the function pass a reason as this parameter, and follow its default."""
        function = next(one for one in self.code.functions[node.name] if one.node is node)
        names = function.parameters
        position = names.index(name) if name in names else None
        self.code.sinks[function.name].setdefault(name, position)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if argument.arg == name and default is not None:
                self.trace(default)

    def _call(self, value: ast.Call, index: int | None) -> None:
        name = _called(value)
        if name in _READERS or self.depth > 6:
            return
        if name == "get" and isinstance(value.func, ast.Attribute):
            self.trace(value.func.value)
            for one in value.args[1:]:
                self.trace(one)
            return
        if name in ("str", "next"):
            for one in value.args[:1]:
                self.trace(one, lenient=True)
            return
        functions = [one for one in self.code.functions.get(name, ()) if one.returns_words]
        for function in functions:
            inner = _Tracer(self.code, self.found, function.path, function.node, self.depth + 1)
            for node in _own_nodes(function.node):
                if isinstance(node, ast.Return) and node.value is not None:
                    inner.trace(node.value, index=index)
        if not functions:
            self._give_up(value)

    def _formatted(self, values: list[ast.expr], value: ast.JoinedStr) -> None:
        """Record the words that a formatted string can be."""
        texts = [str(expr.value) for expr in values if isinstance(expr, ast.Constant)]
        if " " in "".join(texts):
            return  # a sentence
        known = _FORMATTED.get(ast.unparse(value), ())
        for one in known:
            self.found.reasons[one].add(f"{self.path}:{value.lineno}")
        if not known:
            self._give_up(value)

    def _give_up(self, value: ast.expr) -> None:
        self.found.unresolved.append(f"{self.path}: {ast.unparse(value)}")


def _bindings(scope: _Scope, name: str) -> Iterator[tuple[ast.expr, int | None]]:
    """Yield the expressions that a local name is bound to, with the index of a tuple's element."""
    for node in _own_nodes(scope):
        match node:
            case ast.Assign(targets=[target], value=value):
                yield from _bound(target, value, name)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _bound(target, value, name)
            case ast.NamedExpr(target=target, value=value):
                yield from _bound(target, value, name)
            case ast.For(target=target, iter=ast.Tuple(elts=rows)):
                for row in rows:
                    yield from _bound(target, row, name)
            case ast.For(target=ast.Tuple() as target, iter=ast.Call() as rows):
                yield from _bound(target, rows, name)
            case ast.For(target=ast.Name(id=one), iter=ast.Name() as rows) if one == name:
                yield rows, None


def _bound(target: ast.expr, value: ast.expr, name: str) -> Iterator[tuple[ast.expr, int | None]]:
    if isinstance(target, ast.Name):
        if target.id == name:
            yield value, None
    elif isinstance(target, ast.Tuple):
        for at, expr in enumerate(target.elts):
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                yield from _bound(expr, value.elts[at], name)
            elif isinstance(expr, ast.Name) and expr.id == name:
                yield value, at


def _is_captured(scope: _Scope, name: str) -> bool:
    """Return whether a pattern or a loop binds the name to a field of an object that was made elsewhere."""
    return any(
        (isinstance(node, ast.MatchAs) and node.name == name)
        or (isinstance(node, ast.For) and name in ast.unparse(node.target))
        or (isinstance(node, ast.comprehension) and name in ast.unparse(node.target))
        for node in _own_nodes(scope)
    )


def _add_literals(found: FoundReasons, path: str, node: ast.AST) -> None:
    """Record the alternatives of a Literal type whose name ends in Reason."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Subscript(slice=inner)) if (
            name.endswith("Reason")
        ):
            for one in ast.walk(inner):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    found.reasons[one.value].add(f"{path}:{one.lineno}")
