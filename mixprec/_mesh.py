"""What one process finds in its shards of DTensor gradients (FSDP2), told to all of their mesh."""

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

# found_inf and norm (() float32), and the DTensor whose placements they belong to; None: of plain
# tensors, which all processes of the mesh have alike.
Checked = tuple[Tensor, Tensor | None, Any]


def reduced(checked: list[Checked], norm_type: float | None) -> Checked:
    """found_inf and norm of all shards, by one all-reduce for each mesh dimension that shards.

    Replicas have equal gradients: of those only the first one's count in the norm. The sum of an
    L2 norm carries found_inf along, which is 0 or 1 again at the end.
    """
    mesh = next(dtensor for *_, dtensor in checked if dtensor is not None).device_mesh
    shards = [_sharded_dims(dtensor) for *_, dtensor in checked]
    dims = sorted(set().union(*shards))
    place = mesh.get_coordinate()
    device = checked[0][0].device
    values = [_stacked([found_inf for found_inf, *_ in checked], device).amax()]
    if norm_type is not None:
        norms = [
            norm
            for (_, norm, _), sharded in zip(checked, shards, strict=True)
            if norm is not None and all(place[dim] == 0 for dim in dims if dim not in sharded)
        ]
        local = _stacked(norms or [torch.zeros(())], device)
        values.append(local.square().sum() if norm_type == 2 else local.amax())
    both = torch.stack(values).to(mesh.device_type)
    for dim in dims:
        operation = dist.ReduceOp.SUM if norm_type == 2 else dist.ReduceOp.MAX
        dist.all_reduce(both, operation, group=mesh.get_group(dim))
    found_inf, *rest = both.to(device)
    found_inf = found_inf > 0
    if not rest:
        return found_inf.float(), None, None
    # A sum keeps a NaN, a maximum may have lost it.
    norm = rest[0].sqrt() if norm_type == 2 else torch.where(found_inf, math.nan, rest[0])
    return found_inf.float(), norm.float(), None


def local(tensor: Any) -> Any:
    """What this process has of a DTensor; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sharded_dims(dtensor: Any) -> set[int]:
    placements = () if dtensor is None else dtensor.placements
    return {dim for dim, placement in enumerate(placements) if not placement.is_replicate()}


def _stacked(scalars: list[Tensor], device: torch.device) -> Tensor:
    """In float64, where the square of no float32 norm overflows."""
    return torch.stack([scalar.to(device) for scalar in scalars]).double()
