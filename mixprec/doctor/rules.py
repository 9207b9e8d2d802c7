"""The mistakes that the doctor knows, a function each: where a script makes it, and of what.

A rule reports what is wrong however the script's conditions and other files turn out. Where a
helper or another branch may have done the right thing, it is silent.
"""

import ast
import re
from collections.abc import Iterator

from .events import between, latest
from .script import Script, is_optimizer_class
from .syntax import (
    arguments,
    called,
    in_order,
    is_guard,
    is_halved,
    names_assigned,
    owner,
)

Found = Iterator[tuple[ast.AST, str]]


def half_model(script: Script) -> Found:
    for body in script.bodies:
        halved: dict[str, ast.AST] = {}
        for node in in_order(body):
            if isinstance(node, ast.Assign) and is_halved(node.value):
                halved |= dict.fromkeys(names_assigned(node), node)
            elif isinstance(node, ast.Expr) and is_halved(node.value):
                halved[owner(node.value)] = node
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and node.func.attr == "float":
                    halved.clear()  # norms go back, say
                if is_optimizer_class(script.resolve(node.func)):
                    for part in ast.walk(node):
                        if called(part).endswith("parameters") and owner(part) in halved:
                            yield halved.pop(owner(part)), owner(part)


def no_scaler(script: Script) -> Found:
    if re.search(r"scaler|accelerat|deepspeed|fabric|lightning|set_autocast", script.text, re.I):
        return
    for events in script.scopes:
        steps = [event for event in events if event.kind in ("backward", "step")]
        if {event.kind for event in steps} == {"backward", "step"}:
            for event in events:
                if event.kind == "autocast" and script.is_float16(event.node):
                    yield event.node, ast.unparse(event.node)


def unscaled_backward(script: Script) -> Found:
    scales, scaled = script.events("scale"), script.events("scaled backward")
    if len(scales) > len(scaled):  # a loss may arrive scaled
        return
    for events in script.scopes:
        for i, step in enumerate(events):
            if step.kind == "scaler step" and not latest(events, step, "scale"):
                loss = latest(events[:i], step, "backward")
                if loss:
                    yield loss.node, loss.who


def backward_in_autocast(script: Script) -> Found:
    for event in script.events("backward", "scaled backward"):
        if event.autocast:
            yield event.node, event.who


def clip_scaled(script: Script) -> Found:
    for events in script.scopes:
        for i, clip in enumerate(events):
            scaled = clip.kind == "clip" and latest(events[:i], clip, "scaled backward")
            if scaled:
                kinds = {e.kind for e in between(events, scaled, clip)}
                if not {"unscale", "scaler step", "backward"} & kinds:
                    yield clip.node, ast.unparse(clip.node)


def step_without_scaler(script: Script) -> Found:
    for events in script.scopes:
        for i, step in enumerate(events):
            scaled = step.kind == "step" and latest(events[:i], step, "scaled backward")
            if not scaled or latest(events, step, "backward"):
                continue
            stepped = [e for e in between(events, scaled, step) if e.kind == "scaler step"]
            # "%": every few iterations
            holds = all(c in scaled.branch or "%" in c[0] for c in step.branch)
            if holds and all(e.arg == step.who for e in stepped):
                yield step.node, step.who


def update_before_step(script: Script) -> Found:
    for events in script.scopes:
        for update in events:
            if update.kind != "update" or update.arg:
                continue
            same = [e for e in events if e.loops == update.loops and not e.excludes(update)]
            at = same.index(update)
            before = [e.kind for e in same[:at] if e.kind in ("scale", "scaler step", "update")]
            after = [e.kind for e in same[at + 1 :] if e.kind in ("scale", "scaler step")]
            if before[-1:] == ["scale"] and after[:1] == ["scaler step"]:
                yield update.node, update.who


def no_update(script: Script) -> Found:
    steps = script.events("scaler step")
    made = any(m.endswith("GradScaler") for makers in script.made.values() for m in makers)
    if not made or not steps or script.events("update"):
        return
    # what was made in another file may update a scaler that it gets
    if not any(
        script.is_scaler(ast.unparse(argument))
        for node in script.nodes
        if isinstance(node, ast.Call) and _callee(node) not in script.defined
        for argument in arguments(node)
    ):
        yield steps[0].node, steps[0].who


def no_zero_grad(script: Script) -> Found:
    if re.search(r"zero_grad|\.grad\s*=|grad\.zero_|foreach_zero_", script.text):
        return
    for events in script.scopes:
        for backward in events:
            if backward.kind not in ("backward", "scaled backward"):
                continue
            for step in events:
                optimizer = step.who if step.kind == "step" else step.arg
                loops = [loop for loop in step.loops if loop in backward.loops]
                if step.kind in ("step", "scaler step") and loops:
                    if _keeps(script, loops[-1], optimizer):
                        yield backward.node, optimizer
                    break


def scheduler_first(script: Script) -> Found:
    for events in script.scopes:
        for i, schedule in enumerate(events):
            if schedule.kind != "schedule" or not schedule.loops or schedule.is_conditional:
                continue
            depth = len(schedule.loops)
            stepped = [
                e in events[i:]
                for e in events
                if e.kind in ("step", "scaler step") and e.loops[:depth] == schedule.loops
            ]
            if stepped and all(stepped):
                yield schedule.node, schedule.who


def read_every_iteration(script: Script) -> Found:
    if not re.search("cuda|autocast|GradScaler|mixprec", script.text):  # nothing to wait for
        return
    for events in script.scopes:
        for backward in events:
            if backward.kind in ("backward", "scaled backward") and backward.loops:
                losses = {backward.who, *(e.arg for e in events if e.kind == "scale")}
                losses |= {re.split(r"[^\w.]", loss.lstrip("("))[0] for loss in losses} - {""}
                for read in events:
                    in_loop = read.kind == "read" and read.loops == backward.loops
                    if in_loop and not read.is_conditional and read.who in losses:
                        yield read.node, read.who


def deprecated_name(script: Script) -> Found:
    old = ("torch.cuda.amp", "torch.cpu.amp")
    names = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
    guarded = {inner for node in script.nodes if is_guard(node) for inner in ast.walk(node)}
    for node in script.nodes:
        if node in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module in old:
            yield from ((node, alias.name) for alias in node.names if alias.name in names)
        elif isinstance(node, ast.Attribute) and node.attr in names:
            yield from [(node, node.attr)] * (script.resolve(node.value) in old)


def _callee(call: ast.Call) -> str:
    return ast.unparse(call.func).removeprefix("self.")


_HARMLESS = ("step", "unscale_", "clip_grad_norm_")


def _keeps(script: Script, loop: ast.AST, optimizer: str) -> bool:
    """Whether a loop steps one optimizer again and again, and no other file may zero it."""
    for node in ast.walk(loop):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and optimizer in names_assigned(node):
            return False
        if isinstance(node, ast.Call) and called(node) not in _HARMLESS:
            given = {ast.unparse(argument) for argument in arguments(node)}
            if optimizer in given and _callee(node) not in script.defined:
                return False
    return True
