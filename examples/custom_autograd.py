"""Your own backward under autocast, and layers whose sums stay in fp32.

Use `custom_fwd` and `custom_bwd` for each autograd.Function that runs under autocast, or its
backward computes in other dtypes than its forward. Switch autocast off around operations that lose
too much in half: autocast's own list of those differs between devices.
"""

import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(1024, 16, 32, device=device)  # batch, position, feature
labels = (inputs.mean(1) @ torch.randn(32, 10, device=device)).argmax(1)


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2, which in fp16 overflows from 256 on: `cast_inputs` runs it in fp32."""

    @staticmethod
    @custom_fwd(device_type=device, cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    @custom_bwd(device_type=device)
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x.relu() * grad  # autograd casts it to the dtype of the input


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(32))  # bare parameters stay fp32 in half_weights
        self.key_value = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = self.key_value(x).chunk(2, -1)  # in half
        with torch.autocast(device, enabled=False):  # in fp32, of tensors cast by hand
            attention = (key.float() @ self.query).softmax(-1)
            pooled = self.norm((attention[..., None] * value.float()).sum(-2))
        return self.head[1](SquaredReLU.apply(self.head[0](pooled)))


model = mixprec.half_weights(Model().to(device), half)
optimizer = mixprec.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = mixprec.GradScaler()
losses = []
for _ in range(10):
    for x, y in zip(inputs.split(128), labels.split(128), strict=True):
        optimizer.zero_grad()
        with mixprec.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # outside of autocast
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
