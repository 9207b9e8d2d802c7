"""Gradient checkpointing: activations are computed again in backward instead of being kept.

Use it where activations do not fit into memory, for about a third more computation. Half weights
and gradients, and `torch.utils.checkpoint`, save different parts of the memory and go together.
The bytes are counted by saved_tensors_hooks, on a GPU its peak of memory is printed too.
"""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(2048, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(8))
        self.head = nn.Linear(64, 10)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:  # autocast is the same when a block is run again
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def train(checkpointed: bool) -> str:
    torch.manual_seed(1)
    model = mixprec.half_weights(Model(checkpointed).to(device), half)
    optimizer = mixprec.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = mixprec.GradScaler()
    weights = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}  # bytes that forward keeps for backward, by address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    losses = []
    for _ in range(15):
        saved.clear()
        optimizer.zero_grad()
        with mixprec.autocast(), saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    mebibytes = sum(saved.values()) / 2**20
    return f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}, {mebibytes:.1f} MiB saved"


for checkpointed in (False, True):
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print(f"checkpointed: {checkpointed}, {train(checkpointed)} for backward")
    if device == "cuda":  # what saved_tensors_hooks counts, and all the rest
        print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
