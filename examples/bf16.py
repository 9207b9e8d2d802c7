"""bf16 without a loss scaler: the fp32 masters of mixprec.SGD, and clipping all the same.

Use it where bf16 is as fast as fp16 and its 8 bits of precision are enough: it has the range of
fp32, so there is nothing to scale. The masters matter more than with fp16, since an update below
1/512 of its weight is lost in bf16: the second training, by torch.optim.SGD, shows what then comes.
"""

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
inputs = torch.randn(4096, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)


def train(optimizer_class: type[torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = mixprec.half_weights(model, torch.bfloat16)
    optimizer = optimizer_class(model.parameters(), lr=2e-3, momentum=0.9)
    scaler = mixprec.GradScaler(enabled=False)  # for clip_grad_norm_; step is optimizer.step
    losses = []
    for _ in range(20):
        for x, y in zip(inputs.split(256), labels.split(256), strict=True):
            optimizer.zero_grad()
            with mixprec.autocast(dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            losses.append(loss.detach())
    return torch.stack(losses).tolist()


losses = train(mixprec.SGD)
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
print(f"without masters, torch.optim.SGD: {train(torch.optim.SGD)[-1]:.3f}")
