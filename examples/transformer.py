"""A small transformer: half weights, clipping, a graphed step, and a cosine schedule.

Use it as a start for language models. The schedule waits where the scaler skipped a step, as in the
first few of a training in fp16; reading `last_step_skipped` waits for the GPU, once a step.
"""

import torch
from torch import nn
from torch.nn import functional as F

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
VOCABULARY, LENGTH, WIDTH, HEADS, STEPS = 16, 15, 64, 4, 120


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, head, position, feature
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)  # embeddings and norms stay fp32
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.position)))


model = mixprec.half_weights(Transformer().to(device), half)
optimizer = mixprec.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
scaler = mixprec.GradScaler()


@mixprec.graphed
def train_step(tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with mixprec.autocast():
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss


losses = []
for _ in range(STEPS):
    # Four random tokens over and over: from the fifth on, attention can tell the next one.
    tokens = torch.randint(VOCABULARY, (32, 4), device=device).repeat(1, 4)
    losses.append(train_step(tokens).detach())
    if not scaler.last_step_skipped:
        scheduler.step()
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}, skipped {scaler.steps_skipped}")
