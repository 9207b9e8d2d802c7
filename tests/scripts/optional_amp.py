"""AMP by a flag, gradient accumulation, a validation loop, and a checkpoint."""

import argparse
import contextlib

import torch
from torch import nn


def step(loss, model, optimizer, scaler, clip):
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def accumulated(model, loader, optimizer, scheduler, scaler, args, writer):
    model.train()
    running = torch.zeros((), device="cuda")
    optimizer.zero_grad(set_to_none=True)
    for i, (x, y) in enumerate(loader):
        amp = torch.autocast("cuda") if args.amp else contextlib.nullcontext()
        with amp:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda()) / args.accumulate
        if args.amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        running += loss.detach()
        if (i + 1) % args.accumulate == 0:
            if args.amp:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not args.amp:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        if i % 50 == 0:
            writer.add_scalar("loss", running.item() / 50, i)
            print(f"{i}: {loss.item():.3f}")
            running.zero_()


@torch.no_grad()
def validate(model, loader):
    total = 0.0
    for x, y in loader:
        with torch.autocast("cuda", enabled=False):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        total += loss.item()
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--accumulate", type=int, default=4)
    args = parser.parse_args()
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    loader = [(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))]
    for epoch in range(10):
        accumulated(model, loader, optimizer, scheduler, scaler, args, None)
        print(epoch, validate(model, loader))
    state = {"model": model.state_dict(), "scaler": scaler and scaler.state_dict()}
    torch.save(state, "checkpoint.pt")
    model.half().eval()


if __name__ == "__main__":
    main()
