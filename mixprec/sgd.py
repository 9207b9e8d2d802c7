"""SGD with momentum on fp32 master weights: torch.optim.SGD's rule, one launch for all parameters.

The rule is in csrc/arithmetic.h. It is that of torch.optim.SGD (https://pytorch.org/docs/stable/
generated/torch.optim.SGD.html), bit for bit, after Sutskever et al., "On the importance of
initialization and momentum in deep learning", 2013.
"""

import functools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import ParamsT

from . import _C
from ._mesh import local
from .half_weights import forget_exact, initial_master

__all__ = ["SGD"]

_HALF = (torch.float16, torch.bfloat16)
_MASTERS = ("master", "master_remainder")


class SGD(torch.optim.SGD):
    """:class:`torch.optim.SGD` with fp32 masters for fp16 and bf16 parameters, in one launch.

    fp32 parameters get the same bits as with ``torch.optim.SGD(foreach=False)`` and have the same
    state. A half parameter is rounded (to nearest even) from an fp32 master,
    ``state[p]["master"]``, and its momentum is fp32 too. **The weight is the truth**: where a
    weight no longer is the rounding of its master, somebody else wrote it (``load_state_dict``,
    ``.data``, weight averaging), and the step goes on from the weight.

    ``store_param_remainders=True`` keeps ``state[p]["master_remainder"]`` instead, the 16 bits that
    the weight lacks of its master: 2 bytes a parameter less to hold and 4 less to move at a step.
    Masters have the same bits in both modes, but for

    - float16 weights of 2^-17 (7.6e-6) and below: the master is rounded to a multiple of 2^-40;
    - float16 masters half-way between two weights up to 2^-16: off by up to 2^-40;
    - weights that somebody wrote: the old remainder, less than half a unit in the weight's last
      place, stays added. inf and NaN become the master.

    A bfloat16 weight half-way between two is rounded away from zero instead of to even.

    With a loss scaler (:class:`mixprec.GradScaler` or ``torch.amp.GradScaler``) unscaling happens
    inside the step, in fp32 registers, and an overflow skips it on the device, without a sync.

    Differences from torch:

    - After a step under a scaler, gradients are still scaled: the step does not write them.
    - Momentum that has not been written yet, because all steps so far were skipped, is not in
      ``state_dict()``; ``state[p]["momentum_buffer"]`` then holds NaN.
    - ``foreach`` and ``fused`` are accepted and change nothing.

    A CUDA graph captured by hand needs one step before the capture, which makes the state;
    :func:`mixprec.graphed` sees to it.

    Args:
        params: parameters, named parameters or groups, as in torch. Dense tensors on CPU or CUDA:
            float32, float16, bfloat16, on the CPU float64 too. Of DTensors (``fully_shard``) each
            process steps on what it has, and state is DTensors too.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch. A tensor ``lr`` is
            read at each step, which syncs if it is on the GPU.
        foreach, fused, differentiable: torch's; ``differentiable=True`` is refused.
        store_param_remainders: see above; an attribute of the optimizer that may be changed at any
            time, and is no part of ``state_dict()``. State of the other kind, from a checkpoint
            say, is converted by the first step: in either order of loading model and optimizer.

    Raises:
        ValueError, RuntimeError, TypeError: bad hyperparameters, a parameter twice, sparse or
            complex tensors, a gradient of another shape, device or placement. Nothing has been
            changed then.

    Example::

        optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = mixprec.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    _step_supports_amp_scaling = True
    store_param_remainders = False  # of an optimizer pickled before there was the choice
    # graphed's, during a capture: what the captured step reads in place of its param_groups.
    device_hyperparameters: _C.DeviceHyperparameters | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        store_param_remainders: bool = False,
    ) -> None:
        if differentiable:
            raise ValueError("mixprec.SGD is not differentiable; use torch.optim.SGD for that")
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self.store_param_remainders = store_param_remainders

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, but a parameter twice in the group, to be stepped twice, is an error."""
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        if len(params) != len(set(params)):
            del self.param_groups[-1]
            raise ValueError("a parameter is in its group twice; each may be there once")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Scalers leave these on an optimizer for the time of a step: torch's protocol, and
        # mixprec.GradScaler's grad_clip.
        clip = getattr(self, "grad_clip", None)
        _C.sgd_step(
            self.param_groups,
            self.state,
            initial_master,
            forget_exact,
            self.store_param_remainders,
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            clip.norm if clip else None,
            clip.max_norm if clip else 0.0,
            self.device_hyperparameters,
        )
        return loss

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch's wrapper around step, only where there is a hook or a profiler to serve.

        It takes the host a third as long as the step itself.
        """
        wrapped = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: SGD, *args: Any, **kwargs: Any) -> Any:
            hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            hooks = hooks or optimizer_module._global_optimizer_pre_hooks
            hooks = hooks or optimizer_module._global_optimizer_post_hooks
            if hooks or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                return wrapped(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Reads whether momentum was written yet, which syncs with the GPU.

        Half parameters have ``master`` and ``momentum_buffer`` in fp32; with
        ``store_param_remainders``, ``master_remainder`` in int16 in place of ``master``.
        """
        state = self.state
        written = {param: _written(values) for param, values in state.items()}
        self.state = {param: values for param, values in written.items() if values}  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, from this class's or torch's ``state_dict()``, and exact.

        torch would round ``master`` and ``momentum_buffer`` to a half parameter's dtype and share
        tensors with ``state_dict``; here they stay fp32, are copied, and move to the parameter's
        device. The kind of masters that this optimizer keeps wins over the kind in ``state_dict``.
        """
        # The hook runs after the user's, on the dict that is loaded in the end.
        hook = self.register_load_state_dict_pre_hook(_hide_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "store_param_remainders": self.store_param_remainders}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch loads state of keys that are no parameters as it is.
        owned = {
            key: _owned_state(hidden.values, key) if isinstance(key, Tensor) else hidden.values
            for key, hidden in state["state"].items()
            if isinstance(hidden, _Hidden)
        }
        state["state"].update(owned)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for key, values in self.state.items():
            if isinstance(key, Tensor) and any(name in values for name in _MASTERS):
                forget_exact(key)


class _Hidden:
    """A parameter's state while Optimizer.load_state_dict casts all tensors that it sees."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


def _hide_state(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    hidden = {key: _Hidden(values) for key, values in state_dict["state"].items()}
    return {**state_dict, "state": hidden}


def _owned_state(values: dict[str, Any], param: Tensor) -> dict[str, Any]:
    float_dtype = torch.float32 if param.dtype in _HALF else param.dtype

    def own(value: Tensor) -> Tensor:
        dtype = float_dtype if value.is_floating_point() else value.dtype
        return value.to(device=param.device, dtype=dtype, copy=True)

    return {
        key: own(value) if isinstance(value, Tensor) else value
        for key, value in values.items()
        if param.dtype in _HALF or key not in _MASTERS  # another parameter is its own
    }


def _written(values: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without momentum that is_unwritten (csrc/arithmetic.h).

    Of a DTensor it stays: a process with an empty shard could not tell, and all must have the same.
    """
    momentum = values.get("momentum_buffer")
    if momentum is not None and momentum.numel() > 0 and local(momentum) is momentum:
        first = momentum.detach().as_strided((1,), (1,))
        if first.view(torch.int64 if first.dtype is torch.float64 else torch.int32).item() == -1:
            return {key: value for key, value in values.items() if key != "momentum_buffer"}
    return values
