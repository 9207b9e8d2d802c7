"""What the doctor says of each mistake."""

from collections.abc import Callable
from typing import Any, NamedTuple

from . import rules
from .rules import Found
from .script import Script


class Rule(NamedTuple):
    name: str
    find: Callable[[Script], Found]
    what: str  # {}: what find() gave
    why: str
    remedy: str


RULES = (
    Rule(
        "half-model",
        rules.half_model,
        "the whole model `{}` is stored in float16",
        "an update below 1/4096 of a weight is rounded away, and norms overflow",
        "model = mixprec.half_weights(model) and mixprec.SGD, or fp32 weights under autocast",
    ),
    Rule(
        "no-scaler",
        rules.no_scaler,
        "`{}` in float16 without a GradScaler",
        "gradients below 3e-8 become 0, and training stalls",
        "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(); or bfloat16",
    ),
    Rule(
        "unscaled-backward",
        rules.unscaled_backward,
        "`{}.backward()`, but scaler.step()",
        "the step divides gradients by a scale that they were never multiplied with",
        "scaler.scale(loss).backward()",
    ),
    Rule(
        "backward-in-autocast",
        rules.backward_in_autocast,
        "`{}.backward()` inside autocast",
        "backward runs in its forward's dtypes by itself; inside, torch may choose others",
        "end the `with` block before backward",
    ),
    Rule(
        "clip-scaled",
        rules.clip_scaled,
        "`{}` while gradients are scaled",
        "the limit is compared with gradients up to 65536 times too large: nearly all is clipped",
        "scaler.unscale_(optimizer) before it, or mixprec's scaler.clip_grad_norm_(optimizer, max)",
    ),
    Rule(
        "step-without-scaler",
        rules.step_without_scaler,
        "`{}.step()` after a scaled backward",
        "gradients may still be scaled, and inf or NaN get into the weights",
        "scaler.step(optimizer) in its place",
    ),
    Rule(
        "update-before-step",
        rules.update_before_step,
        "`{}.update()` before the step",
        "the step then divides by another scale than the loss was multiplied with, or raises",
        "scaler.step(optimizer), then scaler.update()",
    ),
    Rule(
        "no-update",
        rules.no_update,
        "`{}.step()`, but update() nowhere",
        "the scale never changes after an overflow, and torch refuses the second step",
        "scaler.update() once an iteration, after all steps",
    ),
    Rule(
        "no-zero-grad",
        rules.no_zero_grad,
        "gradients for `{}` are never set to zero",
        "every step adds the gradients of all iterations before it",
        "optimizer.zero_grad() in each iteration, before backward",
    ),
    Rule(
        "scheduler-first",
        rules.scheduler_first,
        "`{}.step()` before the optimizer's step",
        "the first learning rate of the schedule is never used",
        "scheduler.step() after the optimizer's step",
    ),
    Rule(
        "read-every-iteration",
        rules.read_every_iteration,
        "`{}` is read by the host in every iteration",
        "the host waits until the GPU is done, and the GPU then waits for the host",
        "keep loss.detach() and read it every N iterations; graphed refuses to capture it",
    ),
    Rule(
        "deprecated-name",
        rules.deprecated_name,
        "torch.cuda.amp's or torch.cpu.amp's `{}` is deprecated",
        "each use warns, and a later torch may drop it",
        'torch.amp\'s with "cuda" or "cpu" as first argument (device_type of custom_fwd)',
    ),
)


def diagnose(source: bytes) -> list[dict[str, Any]]:
    """Every mistake in a script, by line."""
    script = Script(source)
    found = {
        (node.lineno, rule.name): {  # type: ignore[attr-defined]
            "line": node.lineno,  # type: ignore[attr-defined]
            "rule": rule.name,
            "what": rule.what.format(subject),
            "why": rule.why,
            "remedy": rule.remedy,
        }
        for rule in RULES
        for node, subject in rule.find(script)
    }
    return [found[key] for key in sorted(found)]
