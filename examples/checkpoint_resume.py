"""Saves a training halfway and resumes it, with the same bits as if it had never stopped.

Use it for every training that may be interrupted. Model, optimizer and scaler go into one file: the
optimizer holds the fp32 masters, the scaler its scale and counters.
"""

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(4096, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)
STEPS, SAVED_AT = 60, 30


class Training:
    def __init__(self) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
        self.model = mixprec.half_weights(model, half)  # before load_state_dict, as before training
        self.optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.scaler = mixprec.GradScaler(growth_interval=20)
        self.step = 0
        self.stateful = {
            name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler")
        }

    def run(self, until: int) -> list[float]:
        losses = []
        for step in range(self.step, until):
            # Batches by the number of the step, so that no random state has to be saved.
            torch.manual_seed(step)
            chosen = torch.randint(4096, (256,), device=device)
            self.optimizer.zero_grad()
            with mixprec.autocast():
                loss = nn.functional.cross_entropy(self.model(inputs[chosen]), labels[chosen])
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            losses.append(loss.detach())
        self.step = until
        return torch.stack(losses).tolist()

    def save(self, path: str) -> None:
        states = {name: part.state_dict() for name, part in self.stateful.items()}
        torch.save({**states, "step": self.step}, path)

    def load(self, path: str) -> None:
        states = torch.load(path, map_location=device, weights_only=True)
        self.step = states.pop("step")
        for name, state in states.items():
            self.stateful[name].load_state_dict(state)


training = Training()
losses = training.run(SAVED_AT)
training.save("checkpoint.pt")
losses += training.run(STEPS)

resumed = Training()
resumed.load("checkpoint.pt")
resumed_losses = resumed.run(STEPS)

assert resumed_losses == losses[SAVED_AT:]
for p, q in zip(training.model.parameters(), resumed.model.parameters(), strict=True):
    assert torch.equal(p, q)
print(f"first loss {losses[0]:.3f}, last loss {resumed_losses[-1]:.3f}, the same bits resumed")
