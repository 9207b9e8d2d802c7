"""Half-precision weights with fp32 masters: the usual loop without the casts of autocast.

Use it wherever you train under autocast: forward and backward give the same bits as with fp32
weights, and weights and gradients of the Linear and convolution layers take half the memory.
"""

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16  # autocast's dtype
torch.manual_seed(0)

# Ten classes: an image is its class's pattern, under noise.
labels = torch.randint(10, (1024,), device=device)
images = torch.randn(10, 3, 8, 8, device=device)[labels]
images += torch.randn_like(images)

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),  # norms stay in fp32
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(576, 10),
)
model = mixprec.half_weights(model.to(device), half)  # before the optimizer is made
for dtype in (half, torch.float32):
    size = sum(p.nbytes for p in model.parameters() if p.dtype is dtype)
    print(f"weights in {dtype}: {size} bytes")

optimizer = mixprec.SGD(model.parameters(), lr=0.05, momentum=0.9)  # keeps the fp32 masters
scaler = mixprec.GradScaler()
losses = []
for _ in range(3):
    for x, y in zip(images.split(128), labels.split(128), strict=True):
        optimizer.zero_grad()
        with mixprec.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())  # loss.item() would wait for the GPU at each step
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
