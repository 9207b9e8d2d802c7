"""torch.compile for the model and mixprec.graphed for the step around it.

Use it for the shortest iteration on a GPU: the compiler fuses what lies between the matrix
products, the graph removes the launches. Compilation takes seconds to minutes, once; on a CPU it
needs a C++ compiler.
"""

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(4096, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
model = mixprec.half_weights(model.to(device), half)
# Not mode="reduce-overhead", which makes graphs of its own inside the step's.
compiled = torch.compile(model)  # its parameters are those of model
optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = mixprec.GradScaler()


@mixprec.graphed
def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with mixprec.autocast():
        loss = nn.functional.cross_entropy(compiled(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


losses = []
for _ in range(5):
    for x, y in zip(inputs.split(256), labels.split(256), strict=True):
        losses.append(train_step(x, y).detach())
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
