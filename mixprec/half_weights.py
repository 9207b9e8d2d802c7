"""Half-precision storage for the weights that autocast would cast at every use."""

import gc
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import _C
from ._mesh import local

Module = TypeVar("Module", bound=nn.Module)

# What autocast runs in half precision and has a weight: F.linear, F.conv*, F.conv_transpose*.
_CAST_MODULES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
# On a parameter, from half_weights until the optimizer takes it as the first master.
_EXACT = "_mixprec_exact"


def half_weights(
    model: Module, dtype: torch.dtype = torch.float16, *, grad_dtype: torch.dtype | None = None
) -> Module:
    """Stores weights and biases of Linear and convolution layers in half precision, in place.

    They are what autocast casts at every use. Norms, embeddings, bare parameters, buffers and
    weights that another kind of module shares (a tied embedding) stay as they are. Under autocast
    of the same dtype, forward and backward then give the same bits as with fp32 weights, without
    the casts, and weights and gradients take half the memory. :class:`mixprec.SGD` keeps the fp32
    masters, which begin with the exact values from before this call.

    Args:
        model: changed in place, its parameters stay the same objects.
        dtype: ``torch.float16`` or ``torch.bfloat16``; the one that autocast is used with.
        grad_dtype: ``torch.float32`` accumulates gradients over several backward passes in fp32
            (``Tensor.grad_dtype``, which torch has from 2.10 on); default: ``dtype``. A deepcopy
            of the model loses it: set it again.

    Returns:
        ``model``.

    Raises:
        ValueError: a weight is beyond the range of ``dtype`` (65504 for float16); the message names
            it, and nothing has been changed.
        RuntimeError: the model is in ``DistributedDataParallel`` already, or sharded by
            ``fully_shard``; nothing has been changed.

    Example::

        model = mixprec.half_weights(resnet18().cuda())
        optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}")
    if grad_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"grad_dtype must be {dtype} or torch.float32, got {grad_dtype}")
    if grad_dtype is torch.float32 and not hasattr(Tensor, "grad_dtype"):
        raise RuntimeError(
            f"grad_dtype needs Tensor.grad_dtype, which torch {torch.__version__} does not have; "
            "leave it out, or install torch >= 2.10"
        )
    _check_not_distributed(model)
    chosen = _castable(model)
    exact = {name: param.detach() for name, param in chosen.items()}
    halves = {name: value.to(dtype) for name, value in exact.items()}
    for name, value in exact.items():
        if not torch.isfinite(halves[name]).all():
            raise ValueError(
                f"{name} has an element that {dtype} can't hold (largest magnitude "
                f"{value.abs().max().item():g}, limit {torch.finfo(dtype).max:g}); keep "
                "this module in float32, or scale its weight down"
            )
    for name, param in chosen.items():  # nothing is allocated from here on, so all or none
        setattr(param, _EXACT, exact[name])
        param.grad = None  # of the old dtype
        param.data = halves[name]
        if grad_dtype is not None and hasattr(param, "grad_dtype"):
            param.grad_dtype = grad_dtype
    return model


def _check_not_distributed(model: nn.Module) -> None:
    if _is_in_ddp(set(model.parameters())):
        raise RuntimeError(
            "DistributedDataParallel has these weights, and its buckets keep their old dtype; call "
            "half_weights first: DistributedDataParallel(half_weights(model))"
        )
    if any(hasattr(param, "device_mesh") for param in model.parameters()):
        raise RuntimeError(
            "fully_shard keeps fp32 masters and casts what it gathers: leave half_weights out, and "
            "give it mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)"
        )


def _is_in_ddp(params: set[nn.Parameter]) -> bool:
    """Nothing on a wrapped module or its parameters tells of the wrapper."""
    if not _is_distributed():
        return False
    gc.collect()  # a wrapper that was dropped
    return any(
        not params.isdisjoint(wrapper.parameters())
        for wrapper in gc.get_objects()
        if issubclass(type(wrapper), nn.parallel.DistributedDataParallel)
    )


def _castable(model: nn.Module) -> dict[str, nn.Parameter]:
    """float32 weights and biases that only modules of _CAST_MODULES own, by name."""
    chosen: dict[str, nn.Parameter] = {}
    others: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(prefix, recurse=False):
            attribute = name.rpartition(".")[2]
            if isinstance(module, _CAST_MODULES) and attribute in ("weight", "bias"):
                if param.dtype is torch.float32:
                    chosen[name] = param
            else:
                others.add(param)
    return {name: param for name, param in chosen.items() if param not in others}


def initial_master(param: Tensor) -> Tensor:
    """The first fp32 value of a half parameter, dense in the parameter's order in memory.

    Replicas of one model must begin with equal masters, and a broadcast of the weights does not
    reach the values kept by half_weights: with several processes the weights themselves count.
    """
    exact = None if _is_distributed() else getattr(param, _EXACT, None)
    if exact is None or exact.shape != param.shape:
        exact = param.detach()
    master = torch.empty_like(param, dtype=torch.float32).copy_(exact)
    if hasattr(param, _EXACT) and not _is_capturing(param):
        setattr(param, _EXACT, master)  # so that there are not two for all parameters at once
    return master


def forget_exact(param: Tensor) -> None:
    """The optimizer has a master now."""
    if hasattr(param, _EXACT) and not _is_capturing(param):
        delattr(param, _EXACT)


def _is_capturing(param: Tensor) -> bool:
    """A capture computes nothing yet, and may be thrown away."""
    return param.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_distributed() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def full_precision_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``model.state_dict()`` with every half weight in fp32, as exact as its master is.

    For weight averaging, export and checkpoints that fp32 models load. A weight that somebody
    changed after the last step counts as it is now, as in :class:`mixprec.SGD`.

    Args:
        model: a model that went through :func:`half_weights`, or any other.
        optimizer: the :class:`mixprec.SGD` that holds its masters.

    Returns:
        A new dict; the fp32 values of half weights are new tensors, all others are those of
        ``model.state_dict()``.
    """
    full = model.state_dict()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.dtype in (torch.float16, torch.bfloat16):
            weight, state = value.detach(), optimizer.state.get(value, {})
            if "master_remainder" in state:
                master = torch.empty_like(weight, dtype=torch.float32)  # a DTensor, where weight is
                remainder = state["master_remainder"]
                local(master).copy_(_C.to_master(local(weight), local(remainder)))
                full[name] = master
            else:
                full[name] = _refined(weight, state.get("master", getattr(value, _EXACT, None)))
    return full


def _refined(weight: Tensor, master: Tensor | None) -> Tensor:
    if master is None:
        return weight.float()
    master = master.to(weight.device)
    return torch.where(master.to(weight.dtype) == weight, master, weight.float())
