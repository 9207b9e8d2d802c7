"""An exponential moving average of the weights, taken from the fp32 masters.

Use it to evaluate smoother weights than the last step's. Averaging the half weights themselves
would lose their small changes; `full_precision_state_dict` gives all weights in fp32.
"""

import copy

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(8192, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)
update_average = torch.optim.swa_utils.get_ema_multi_avg_fn(decay=0.98)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
average = copy.deepcopy(model).requires_grad_(False)  # before half_weights: fp32
model = mixprec.half_weights(model, half)
optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = mixprec.GradScaler()


def held_out_loss(tested: nn.Module) -> float:
    with torch.no_grad(), mixprec.autocast():
        return nn.functional.cross_entropy(tested(inputs[4096:]), labels[4096:]).item()


first = held_out_loss(average)
for _ in range(8):
    for x, y in zip(inputs[:4096].split(128), labels[:4096].split(128), strict=True):
        optimizer.zero_grad()
        with mixprec.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        full = mixprec.full_precision_state_dict(model, optimizer)
        update_average(list(average.state_dict().values()), list(full.values()), None)

print(f"held-out loss of the model: {held_out_loss(model):.3f}")
print(f"of the average: first loss {first:.3f}, last loss {held_out_loss(average):.3f}")
