"""The mutants of `mutate_rules`: each one small change of the syntax tree of a file."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LEFT_ALONE = {  # keywords that are no formulas
    "strict",  # of zip: says that two lists are of one length, and they are
    "device",  # noticed on a machine with an accelerator only: tests/verify/test_device.py
}
_SWAPPED_BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}
_SWAPPED_COMPARISON: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
# A call of one of these on a value is replaced by the value: clamps, copies, reductions, changes of shape or of number
# format.
_DROPPED_METHODS = {"clamp", "clamp_", "sub_", "clone", "to", "double", "squeeze", "unsqueeze", "cumsum", "values"}
_DROPPED_FUNCTIONS = {"max", "min", "sorted", "reversed", "or_target"}
_SWAPPED_NAMES = {
    "amax": "amin",
    "amin": "amax",
    "argmax": "argmin",
    "argmin": "argmax",
    "any": "all",
    "all": "any",
    "max": "min",
    "min": "max",
}
_SWAPPED_NAMES |= {"zeros_like": "ones_like", "ones_like": "zeros_like", "append": "remove"}


@dataclass(frozen=True)
class Mutant:
    """One change: in which file and function, what stood there and what stands there now; `source` is the whole changed
    file.
    """

    file: str
    where: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """Identifies the changed file."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Identifies the change in the report."""
        return self.file, self.where, _one_line(self.before), _one_line(self.after)


def _one_line(code: str) -> str:
    flat = " ".join(code.split())
    return flat if len(flat) <= 110 else f"{flat[:70]} ... {flat[-35:]}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file, without duplicates."""
    tree = ast.parse(path.read_text())
    seen = {ast.unparse(tree)}
    places = [(node, where) for node, where in _walk(tree, "module")]
    for index, (node, where) in enumerate(places):
        for change in range(len(_changes(node))):
            mutated = copy.deepcopy(tree)
            twin = [found for found, _ in _walk(mutated, "module")][index]
            before, after = _apply(mutated, twin, change)
            source = ast.unparse(mutated)
            if source not in seen:
                seen.add(source)
                yield Mutant(path.name, where, before, after, source)


def _walk(node: ast.AST, where: str) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that may change, with the function they stand in; annotations, docstrings and type aliases are left out."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Import | ast.ImportFrom) or _is_text(child):
                continue
            if isinstance(child, ast.keyword) and child.arg in _LEFT_ALONE:
                continue
            inner = where
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = child.name if where == "module" else f"{where}.{child.name}"
            yield child, inner
            yield from _walk(child, inner)


def _is_text(node: ast.AST) -> bool:
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _changes(node: ast.AST) -> list[ast.AST | None]:
    """What may stand in place of `node`; None removes the statement."""
    match node:
        case ast.BinOp():
            found: list[ast.AST | None] = [node.left, node.right]
            if type(node.op) in _SWAPPED_BINARY:
                found.append(ast.BinOp(node.left, _SWAPPED_BINARY[type(node.op)](), node.right))
            return found
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return [ast.Compare(left, [other()], [right]) for other in _SWAPPED_COMPARISON[type(op)]]
        case ast.BoolOp():
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return [ast.BoolOp(other_op, node.values), *node.values]
        case (
            ast.UnaryOp(op=ast.Not()) | ast.UnaryOp(op=ast.USub(), operand=ast.Name())
        ):  # -1 is changed as the constant in it
            return [node.operand]
        case ast.Constant(value=bool()):
            return [ast.Constant(not node.value)]
        case ast.Constant(value=int() | float()):
            wanted = {0: [1, -1], 1: [0, 2]}.get(node.value, [node.value + 1, 0])
            return [ast.Constant(type(node.value)(value)) for value in wanted]
        case ast.IfExp():
            return [node.body, node.orelse, ast.IfExp(node.test, node.orelse, node.body)]
        case ast.If():
            tests = (ast.UnaryOp(ast.Not(), node.test), ast.Constant(True), ast.Constant(False))
            return [ast.If(test, node.body, node.orelse) for test in tests]
        case ast.Call():
            return _changed_calls(node)
        case ast.Subscript(slice=ast.Name() | ast.Attribute() | ast.Subscript() | ast.BinOp(), ctx=ast.Load()):
            return [
                ast.Subscript(node.value, ast.BinOp(node.slice, op, ast.Constant(1)), node.ctx)
                for op in (ast.Add(), ast.Sub())
            ]
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=step)):
            lowers = [
                ast.Slice(ast.BinOp(lower, op, ast.Constant(1)), upper, step)
                for op in (ast.Add(), ast.Sub())
                if lower is not None
            ]
            uppers = [
                ast.Slice(lower, ast.BinOp(upper, op, ast.Constant(1)), step)
                for op in (ast.Add(), ast.Sub())
                if upper is not None
            ]
            return [ast.Subscript(node.value, part, node.ctx) for part in (*lowers, *uppers)]
        case ast.AugAssign():
            swapped = (
                [ast.AugAssign(node.target, _SWAPPED_BINARY[type(node.op)](), node.value)]
                if type(node.op) in _SWAPPED_BINARY
                else []
            )
            return [*swapped, ast.Assign([node.target], node.value), None]
        case ast.comprehension(ifs=[_, *_]):
            return [ast.comprehension(node.target, node.iter, [], 0)]
        case ast.Tuple(elts=[first, second], ctx=ast.Load()):
            return [ast.Tuple([second, first], node.ctx)]
        case ast.Starred():
            return []
        case ast.Assert(test=ast.Compare(ops=[ast.IsNot()])):  # for the type checker
            return []
        case ast.Assign() | ast.Expr() | ast.Continue() | ast.Break() | ast.Assert():
            return [None, *([ast.Break()] if isinstance(node, ast.Continue) else [])]
        case ast.Return(value=ast.AST()):
            return [ast.Return(ast.Constant(None))]
        case ast.Attribute(attr=attr) if attr in _SWAPPED_NAMES:
            return [ast.Attribute(node.value, _SWAPPED_NAMES[attr], node.ctx)]
        case ast.Name(id=name, ctx=ast.Load()) if name in _SWAPPED_NAMES:
            return [ast.Name(_SWAPPED_NAMES[name], node.ctx)]
    return []


def _changed_calls(node: ast.Call) -> list[ast.AST | None]:
    """Calls without one keyword, or replaced by what they were made on or given."""
    words = [word for word in node.keywords if word.arg not in {None, *_LEFT_ALONE}]
    found: list[ast.AST | None] = [
        ast.Call(node.func, node.args, [other for other in node.keywords if other is not word]) for word in words
    ]
    if isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPED_METHODS:
        found.append(node.func.value)
    if isinstance(node.func, ast.Name) and node.func.id in _DROPPED_FUNCTIONS:
        found += node.args
    return found


def _apply(tree: ast.AST, node: ast.AST, change: int) -> tuple[str, str]:
    """Make one change in place; the code of the smallest whole piece around it before and after."""
    new = _changes(node)[change]
    parent, field, at = next(place for place in _places(tree) if _child(*place) is node)
    # An expression is shown with what it stands in, and a comprehension's condition, an operand or an index would say
    # nothing alone.
    shown = parent if isinstance(parent, ast.expr | ast.keyword) or isinstance(node, ast.comprehension) else None
    before = _code(shown or node)
    if at is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[at] = ast.Pass() if new is None else new
    ast.fix_missing_locations(tree)
    return before, "(removed)" if new is None else _code(shown or new)


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            yield from (
                ((parent, field, at) for at in range(len(value)))
                if isinstance(value, list)
                else [(parent, field, None)]
            )


def _child(parent: ast.AST, field: str, at: int | None) -> object:
    return getattr(parent, field) if at is None else getattr(parent, field)[at]


def _code(node: ast.AST) -> str:
    return f"if {ast.unparse(node.test)}: ..." if isinstance(node, ast.If) else ast.unparse(node)
