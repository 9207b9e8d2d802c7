"""A walk through fp16, bf16 and tf32: what they do to gradients, and what loss scaling changes.

Read it beside its output to learn why mixed precision is done as it is. The cells (`# %%`) run one
by one in VS Code, Spyder and Jupyter (with jupytext); as a script it saves two pictures to the
folder given, by default `runs/`.
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"))
folder = parser.parse_known_args()[0].folder  # a notebook's kernel has arguments of its own
folder.mkdir(parents=True, exist_ok=True)

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# %% [markdown]
# ## Range and precision
# A floating-point number is a sign, an exponent, which gives the range, and a fraction, which gives
# the precision. fp16 spends 5 of its 16 bits on the exponent and 10 on the fraction; bf16 8 and 7.
# tf32 is how tensor cores read fp32: 8 and 10. Nothing is stored in it.


# %%
def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to 10 bits of fraction: half of the last place is added, the rest cut off."""
    return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


FORMATS = {
    "fp32": lambda x: x,
    "tf32": to_tf32,
    "fp16": lambda x: x.half().float(),
    "bf16": lambda x: x.bfloat16().float(),
}
FINFO = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

print("format   largest  smallest normal  smallest       eps")
for name, dtype in FINFO.items():
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    print(f"{name:6} {info.max:9.3g} {info.smallest_normal:16.3g} {smallest:9.3g} {info.eps:9.3g}")
print("tf32: the range of fp32, the eps of fp16")

for name, rounded in FORMATS.items():
    print(f"pi in {name}: {rounded(torch.tensor(torch.pi)).item():.9f}")

# %% [markdown]
# ## The error of rounding, by magnitude
# The relative error is flat where numbers are normal. Below, it grows as the fraction runs out of
# bits (subnormals), up to 1, where the number has become 0: *underflow*. Above the largest number
# comes inf.

# %%
exact = torch.logspace(-45, 38, 200_000, dtype=torch.float64).float()
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name in ("tf32", "bf16", "fp16"):
    rounded = FORMATS[name](exact)
    error = ((rounded.double() - exact.double()) / exact.double()).abs()
    largest = error.view(-1, 500).amax(1)  # of 500 neighbours
    largest[largest.isinf()] = torch.nan
    axes.loglog(exact.view(-1, 500)[:, 0], largest, label=name)
axes.set(xlabel="number", ylabel="relative error, at most", title="The error of rounding")
axes.legend()
figure.savefig(folder / "rounding.png")

# %% [markdown]
# ## A small trained network
# in fp32, so that its gradients are true ones. A gradient of a *mean* over a batch has the batch's
# size in its denominator, and falls further as the loss does.

# %%
inputs = torch.randn(2048, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
losses = []
for _ in range(150):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")


# %% [markdown]
# ## Its gradients
# of the activations, which backward hands from layer to layer, and of the weights.


# %%
def gradients(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the scaled loss, by activations and by weights, in fp64 and unscaled."""
    activations = []
    hooks = [
        layer.register_forward_hook(lambda *args: activations.append(args[-1]))
        for layer in model
        if isinstance(layer, nn.Linear)
    ]
    with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    weights = list(model.parameters())
    found = torch.autograd.grad(loss * scale, [*activations, *weights])
    for hook in hooks:
        hook.remove()
    flat = [grad.double().flatten() / scale for grad in found]
    return torch.cat(flat[: len(activations)]), torch.cat(flat[len(activations) :])


true_activations, true_weights = gradients(1.0, torch.float32)
nonzero = true_activations[true_activations != 0].abs()
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for scale in (1, 2**16):
    exponents = (nonzero * scale).log2().floor().cpu()
    axes.hist(exponents, bins=range(-50, 17), alpha=0.6, label=f"loss times {scale}")
axes.axvspan(-50, -25, color="red", alpha=0.15, label="0 in fp16")
axes.axvspan(-25, -14, color="orange", alpha=0.15, label="subnormal in fp16")
axes.axvline(16, color="black", label="inf in fp16")
axes.set(xlabel="exponent (base 2)", ylabel="gradients", title="Gradients of the activations")
axes.legend(loc="upper left")
figure.savefig(folder / "gradients.png")

# %% [markdown]
# ## What loss scaling does
# The loss times a constant is a gradient times that constant: the histogram moves to the right, out
# of what fp16 rounds to 0. Too far, and it meets inf: the scaler then skips the step and halves the
# scale. A power of two changes no other bit. bf16 has the range of fp32 and gains nothing. The
# error that no scale removes is that of the forward pass.

# %%
print("dtype  scale  activations' gradients lost  error of the weights' gradient")
for dtype, exponent in [
    *((torch.float16, exponent) for exponent in (0, 4, 8, 16, 32)),
    *((torch.bfloat16, exponent) for exponent in (0, 16)),
]:
    activations, weights = gradients(2.0**exponent, dtype)
    lost = ((activations == 0) & (true_activations != 0)).sum() / len(nonzero)
    error = (weights - true_weights).norm() / true_weights.norm()
    verdict = f"{error:.2%}" if weights.isfinite().all() else "inf: the step would be skipped"
    print(f"{str(dtype)[6:]:8} 2^{exponent:<2} {lost:8.2%}  {verdict}")
print(f"pictures: {folder / 'rounding.png'}, {folder / 'gradients.png'}")
