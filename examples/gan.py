"""Two optimizers under one scaler: a generative adversarial network on points of the plane.

Use it wherever losses with optimizers of their own share an iteration: scale each loss, step each
optimizer, update the scale once. An optimizer whose gradients overflow is skipped, the other one
steps. Here they are torch's Adam; `fused=True` lets the GPU decide on a skip, without a sync.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
shape = torch.tensor([[1.0, 0.8], [0.0, 0.3]], device=device)


def real_points(count: int) -> torch.Tensor:
    """An ellipse off the origin, Gaussian."""
    return torch.randn(count, 2, device=device) @ shape + 2


def mlp(size_in: int, size_out: int) -> nn.Sequential:
    layers = (
        nn.Linear(size_in, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, size_out),
    )
    return nn.Sequential(*layers).to(device)


@torch.no_grad()
def distance() -> float:
    """The energy distance (Szekely and Rizzo, 2013) of real and generated points."""
    real, fake = real_points(1000), generator(torch.randn(1000, 8, device=device))
    between, within = torch.cdist(real, fake), (torch.cdist(real, real) + torch.cdist(fake, fake))
    return (2 * between - within).mean().item()


generator, discriminator = mlp(8, 2), mlp(2, 1)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
scaler = mixprec.GradScaler()
real, fake = torch.ones(256, 1, device=device), torch.zeros(256, 1, device=device)

first = distance()
for _ in range(300):
    noise = torch.randn(256, 8, device=device)

    optimizer_d.zero_grad()  # also what the generator's loss has left there
    with mixprec.autocast():
        points = generator(noise)
        loss_d = loss_fn(discriminator(real_points(256)), real)
        loss_d += loss_fn(discriminator(points.detach()), fake)
    scaler.scale(loss_d).backward()
    scaler.step(optimizer_d)

    optimizer_g.zero_grad()
    with mixprec.autocast():
        loss_g = loss_fn(discriminator(points), real)
    scaler.scale(loss_g).backward()
    scaler.step(optimizer_g)

    scaler.update()  # once, after both
print(f"generated and real points: first distance {first:.3f}, last distance {distance():.3f}")
