"""What a function does to losses, scalers and optimizers, in the order of its source."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .syntax import (
    READS,
    arguments,
    called,
    condition,
    is_constant,
    keyword,
    names_assigned,
    viewed,
)

if TYPE_CHECKING:
    from .script import Script


@dataclass(frozen=True)
class Event:
    kind: str
    node: ast.expr
    who: str = ""  # what the method was called on, as in the source
    arg: str = ""  # its first argument
    branch: tuple[tuple[str, bool], ...] = ()  # the conditions that hold here, and whether true
    loops: tuple[ast.AST, ...] = ()
    autocast: bool = False
    is_conditional: bool = False  # within the innermost loop

    def excludes(self, other: "Event") -> bool:
        """Whether never both happen in one iteration."""
        return any((test, not value) in other.branch for test, value in self.branch)


def latest(events: list[Event], event: Event, kind: str) -> Event | None:
    """The last of `events` of this kind that may happen together with `event`."""
    return next((e for e in reversed(events) if e.kind == kind and not e.excludes(event)), None)


def between(events: list[Event], first: Event, last: Event) -> list[Event]:
    found = events[events.index(first) + 1 : events.index(last)]
    return [e for e in found if not e.excludes(first) and not e.excludes(last)]


class Walk(ast.NodeVisitor):
    """The events of one function, or of the module, without the functions inside."""

    def __init__(self, script: "Script", body: Sequence[ast.stmt]) -> None:
        self.script, self.events = script, list[Event]()
        self.branch: list[tuple[str, bool]] = []
        self.loops: list[ast.AST] = []
        self.autocasts: list[bool] = []
        self.loop_depth = 0  # conditions around the innermost loop
        self.scaled: set[str] = set()  # names of scaled losses
        self.block(body)

    def block(self, statements: Sequence[ast.stmt]) -> None:
        depth = len(self.branch)
        for statement in statements:
            self.visit(statement)
            if isinstance(statement, ast.If) and isinstance(
                statement.body[-1], (ast.Continue, ast.Break, ast.Return)
            ):
                self.branch.append(condition(statement.test, False))
        del self.branch[depth:]

    def visit_FunctionDef(self, node: ast.AST) -> None:
        pass

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        for arm, value in ((node.body, True), (node.orelse, False)):
            self.branch.append(condition(node.test, value))
            self.block(arm)
            self.branch.pop()

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        for arm, value in ((node.body, True), (node.orelse, False)):
            self.branch.append(condition(node.test, value))
            self.visit(arm)
            self.branch.pop()

    def visit_For(self, node: "ast.For | ast.AsyncFor | ast.While") -> None:
        self.visit(node.test if isinstance(node, ast.While) else node.iter)
        outer, self.loop_depth = self.loop_depth, len(self.branch)
        self.loops.append(node)
        self.block(node.body)
        self.loops.pop()
        self.loop_depth = outer
        self.block(node.orelse)

    visit_AsyncFor = visit_While = visit_For

    def visit_Try(self, node: ast.Try) -> None:
        for body in (node.body, *(h.body for h in node.handlers), node.orelse, node.finalbody):
            self.block(body)

    def visit_With(self, node: "ast.With | ast.AsyncWith") -> None:
        outside = list(self.autocasts)
        for item in node.items:
            self.visit(item.context_expr)
            call = item.context_expr
            if isinstance(call, ast.Call) and self.script.resolve(call.func).endswith("autocast"):
                self.add("autocast", call)
                self.autocasts.append(not is_constant(keyword(call, "enabled"), False))
        self.block(node.body)
        self.autocasts = outside

    visit_AsyncWith = visit_With

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        if self.is_scale(node.value):
            self.scaled.update(names_assigned(node))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        self.generic_visit(node)
        self.add("read", node.value, viewed(node.value))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        first = ast.unparse(node.args[0]) if node.args else ""
        if isinstance(node.func, ast.Attribute):
            self.method(node, node.func.value, node.func.attr, first)
        elif isinstance(node.func, ast.Name):
            if node.func.id in ("float", "print"):
                for argument in node.args:
                    self.add("read", argument, viewed(argument))
            elif node.func.id.startswith("clip_grad_"):
                self.add("clip", node)
            elif "unscale" in node.func.id or self.takes_scaler(node):
                self.add("unscale", node)

    def method(self, node: ast.Call, owner: ast.expr, name: str, first: str) -> None:
        who = ast.unparse(owner)
        if name == "backward" and not node.args:  # with one: engine.backward(loss)
            is_scaled = who in self.scaled or self.is_scale(owner)
            self.add("scaled backward" if is_scaled else "backward", node, who)
        elif name.startswith("clip_grad_") and who.endswith("utils"):
            self.add("clip", node)
        elif self.script.is_scaler(who) and name in ("scale", "step", "update"):
            kind = "scaler step" if name == "step" else name
            self.add(kind, node, who, first)
        elif "unscale" in name or self.takes_scaler(node):
            self.add("unscale", node, who, first)  # or something that may do it
        elif name == "step" and self.script.is_scheduler(who):
            self.add("schedule", node, who)
        elif name == "step" and self.script.is_optimizer(who):
            self.add("step", node, who)
        elif name in READS:
            self.add("read", node, viewed(owner))

    def is_scale(self, node: ast.expr) -> bool:
        if called(node) != "scale":
            return False
        assert isinstance(node, ast.Call)
        return isinstance(node.func, ast.Attribute) and self.script.is_scaler(
            ast.unparse(node.func.value)
        )

    def takes_scaler(self, node: ast.Call) -> bool:
        return any(self.script.is_scaler(ast.unparse(argument)) for argument in arguments(node))

    def add(self, kind: str, node: ast.expr, who: str = "", arg: str = "") -> None:
        conditional = len(self.branch) > self.loop_depth
        under_autocast = bool(self.autocasts) and self.autocasts[-1]
        place = tuple(self.branch), tuple(self.loops), under_autocast, conditional
        self.events.append(Event(kind, node, who, arg, *place))
