"""torch.autocast whose defaults fit the machine."""

import torch


class autocast(torch.autocast):
    """:class:`torch.autocast`, with the device and dtype that the machine is fast with.

    Args:
        device_type: default: ``"cuda"`` where there is one, else ``"cpu"``.
        dtype: default: float16 on CUDA, bfloat16 elsewhere. (A CPU without fp16 units runs fp16
            convolutions many times slower than fp32 ones; bfloat16 has fp32's range, so a loss
            scaler has nothing to do there, and does no harm.)
        enabled, cache_enabled: as in torch.

    Example::

        with mixprec.autocast():
            loss = F.cross_entropy(model(x), y)
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        device_type = device_type or default_device_type()
        if dtype is None:
            dtype = torch.float16 if device_type == "cuda" else torch.bfloat16
        super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
