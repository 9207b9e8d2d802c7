"""SGD's recurrence in float64, with a bound on what fp32 arithmetic may make of it.

Running error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", 2002,
section 3.3): each quantity carries |computed - value| <= error, and each operation adds what it
inherits and what it rounds. Multiplication and addition round separately here; a fused one rounds
less.
"""

from dataclasses import dataclass

import numpy as np

# Half a unit in the last place of fp32, and a thousandth for float64's own rounding, which happens
# at the same places and is 2^29 times smaller.
UNIT = 2.0**-24 * 1.001
UNDERFLOW = 2.0**-150  # half of the smallest fp32 number
# The same two for rounding to a half type.
HALF_ROUNDING = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


@dataclass
class Bounded:
    value: np.ndarray
    error: np.ndarray

    def __neg__(self):
        return Bounded(-self.value, self.error)

    def __add__(self, other):
        value = self.value + other.value
        inherited = self.error + other.error
        return Bounded(value, inherited + UNIT * (np.abs(value) + inherited))

    def __mul__(self, other):
        value = self.value * other.value
        inherited = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        inherited = inherited + self.error * other.error
        return Bounded(value, inherited + UNIT * (np.abs(value) + inherited) + UNDERFLOW)

    def rounded_to(self, dtype):
        unit, underflow = HALF_ROUNDING[dtype]
        error = self.error + unit * (np.abs(self.value) + self.error) + underflow
        return Bounded(self.value, error)

    def holds(self, computed):
        """Whether `computed` (a tensor) is everywhere within the bound."""
        distance = np.abs(computed.detach().cpu().double().numpy() - self.value)
        return bool((distance <= self.error).all())


def exact(value):
    value = np.asarray(value, dtype=np.float64)
    return Bounded(value, np.zeros_like(value))


def constant(value):
    """A hyperparameter, which is rounded to fp32 before it is used."""
    return Bounded(np.float64(value), np.abs(np.float64(np.float32(value)) - np.float64(value)))


def sgd(
    weight, steps, *, lr, momentum, dampening, nesterov, weight_decay, maximize, scale, clip=1.0
):
    """(weight, momentum buffer or None) after `steps`, a list of (scaled gradient, lr factor)."""
    weight, buffer = exact(weight), None
    for scaled, factor in steps:
        if not np.isfinite(scaled).all():
            continue
        grad = exact(scaled) * constant(1 / scale) * constant(clip)
        if maximize:
            grad = -grad
        grad = grad + constant(weight_decay) * weight
        if momentum:
            first = buffer is None
            buffer = grad if first else constant(momentum) * buffer + constant(1 - dampening) * grad
            grad = grad + constant(momentum) * buffer if nesterov else buffer
        weight = weight + constant(-lr * factor) * grad
    return weight, buffer
