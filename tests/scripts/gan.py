"""Two optimizers and one scaler; a penalty in fp32; a third network without a scaler."""

import torch
from torch import nn, optim

import mixprec

G, D, E = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 8)
opt_g, opt_d = mixprec.SGD(G.parameters(), lr=0.1), mixprec.SGD(D.parameters(), lr=0.1)
opt_e = optim.Adam(E.parameters())
schedules = [optim.lr_scheduler.StepLR(o, 1) for o in (opt_g, opt_d, opt_e)]
scaler = mixprec.GradScaler()


def penalty(real):
    with torch.autocast("cuda"):
        score = D(real).sum()
    (gradient,) = torch.autograd.grad(scaler.scale(score), real, create_graph=True)
    gradient = gradient / scaler.get_scale()
    with torch.autocast("cuda"):
        return gradient.norm()


for step in range(100):
    real = torch.randn(4, 8, requires_grad=True)
    opt_d.zero_grad()
    with mixprec.autocast():
        d_loss = D(G(real).detach()).mean() - D(real).mean()
    scaled = scaler.scale(d_loss + penalty(real))
    scaled.backward()
    scaler.step(opt_d)

    opt_g.zero_grad()
    with mixprec.autocast():
        g_loss = -D(G(real)).mean()
    scaler.scale(g_loss).backward()
    norm = scaler.clip_grad_norm_(opt_g, 1.0)
    scaler.step(opt_g)
    scaler.update()

    opt_e.zero_grad()
    e_loss = E(real).square().mean()
    e_loss.backward()
    nn.utils.clip_grad_norm_(E.parameters(), 1.0)
    opt_e.step()
    for schedule in schedules:
        schedule.step()
    if step % 10 == 0:
        print(float(d_loss), float(g_loss), float(e_loss), norm)
