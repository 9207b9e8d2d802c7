"""Small questions about Python's syntax trees."""

import ast
import re
from collections.abc import Iterable, Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
READS = ("item", "cpu", "numpy", "tolist")  # of a tensor on a GPU: the host waits for it
_VIEWS = ("detach", "data", "mean", "sum", "clone", "float", *READS)


def imports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Each name that is imported, and what it is."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def in_order(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes in the order of the source, without the functions inside."""
    for node in body:
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from in_order(ast.iter_child_nodes(node))


def condition(test: ast.expr, value: bool) -> tuple[str, bool]:
    """`not a` is the other arm of `a`, and `a is not b` of `a is b`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return condition(test.operand, not value)
    text = ast.unparse(test)
    return text.replace(" is not ", " is "), value != (" is not " in text)


def viewed(node: ast.expr) -> str:
    """`loss` of loss.detach().mean(); nothing where another function was called."""
    if isinstance(node, ast.Call):
        is_view = isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS
        return viewed(node.func) if is_view else ""
    if isinstance(node, ast.Attribute) and node.attr in _VIEWS:
        return viewed(node.value)
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) else ""


def names_assigned(node: "ast.Assign | ast.AnnAssign") -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    leaves = [t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t] for t in targets]
    return [ast.unparse(leaf) for elements in leaves for leaf in elements]


def called(node: ast.AST) -> str:
    """The last part of the name of what is called."""
    func = node.func if isinstance(node, ast.Call) else None
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def owner(node: ast.AST) -> str:
    """`model` of model.parameters() and of model.cuda().half()."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return ast.unparse(node)


def arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def is_halved(node: ast.AST) -> bool:
    """Whether a chain of methods, such as Net().cuda().half(), has a cast to float16."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, given = node.func.attr, [ast.unparse(a) for a in arguments(node)]
        if name == "half" or (name == "to" and {"torch.float16", "torch.half"} & {*given}):
            return True
        node = node.func.value
    return False


def is_guard(node: ast.AST) -> bool:
    """Whether it tells an old torch from a new one."""
    if isinstance(node, ast.Try):
        caught = " ".join(ast.unparse(handler.type or node) for handler in node.handlers)
        return bool(re.search("ImportError|ModuleNotFound|AttributeError", caught))
    return isinstance(node, ast.If) and bool(re.search("hasattr|version", ast.unparse(node.test)))
