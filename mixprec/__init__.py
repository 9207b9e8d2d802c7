"""Mixed-precision training on PyTorch with almost nothing around the matrix products.

    model = mixprec.half_weights(model)
    opt = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = mixprec.GradScaler()

and the training loop that torch documents for autocast and GradScaler, unchanged.
"""

from . import _load  # noqa: F401  first: refuses a torch that the extension was not built for
from .autocast import autocast
from .find_nonfinite import find_nonfinite
from .grad_scaler import GradScaler
from .grad_stats import grad_stats
from .graphed import graphed
from .half_weights import full_precision_state_dict, half_weights
from .overflow import OverflowLog
from .prefetch import prefetch
from .sgd import SGD

__all__ = [
    "SGD",
    "GradScaler",
    "OverflowLog",
    "autocast",
    "find_nonfinite",
    "full_precision_state_dict",
    "grad_stats",
    "graphed",
    "half_weights",
    "prefetch",
]
__version__ = "0.1.0"
