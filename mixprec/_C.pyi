from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

def check(
    param_groups: list[dict[str, Any]],
    grad_scale: Tensor | None,
    unscale: bool,
    norm_type: float | None,
    workspaces: dict[torch.device, Tensor],
    records: dict[torch.device, Tensor] | None,
) -> list[tuple[Tensor, Tensor | None, Any]]: ...
def sgd_step(
    param_groups: list[dict[str, Any]],
    state: dict[Tensor, dict[str, Any]],
    initial_master: Callable[[Tensor], Tensor],
    forget_exact: Callable[[Tensor], None],
    store_param_remainders: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    norm: Tensor | None,
    max_norm: float,
    device_hyperparameters: DeviceHyperparameters | None,
) -> None: ...
def to_remainder(weight: Tensor, master: Tensor) -> Tensor: ...
def to_master(weight: Tensor, remainder: Tensor) -> Tensor: ...
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    history: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
) -> None: ...

class DeviceHyperparameters:
    def __init__(self, param_groups: list[dict[str, Any]]) -> None: ...
    def store(self, param_groups: list[dict[str, Any]]) -> None: ...

def fingerprint(watched: list[tuple[Any, ...]]) -> tuple[int, int]: ...
def signature(tensor: Tensor) -> bytes: ...

class Gradients:
    def __init__(self, params: list[Tensor]) -> None: ...
    def captured(self, written: list[Tensor]) -> None: ...
    def undo(self) -> None: ...
    def match(self) -> bool: ...
    def restore(self) -> None: ...

# With CUDA alone:

def replace_memsets(graph: int) -> None: ...

class Copies:
    def __init__(self, inputs: list[Any]) -> None: ...
    def capture(self, outputs: list[Any]) -> None: ...
    def before(self, inputs: list[Any], outputs: list[Any]) -> list[Any]: ...
    def after(self, results: list[Any]) -> None: ...
