"""PyTorch Lightning with half weights, clipping inside the step, and a schedule that waits.

The plugin takes the place of Trainer(precision="16-mixed"); all else is Lightning's own. For a
training that is a LightningModule already.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

import mixprec.lightning


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        optimizer = mixprec.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):  # optional: wait where a step was skipped
        if not self.trainer.precision_plugin.scaler.last_step_skipped:
            scheduler.step()


torch.manual_seed(0)
x = torch.randn(1600, 64)
data = torch.utils.data.TensorDataset(x, (x @ torch.randn(64, 10)).argmax(1))
plugin = mixprec.lightning.MixedPrecision("16-mixed", half_weights=True)
trainer = pl.Trainer(plugins=plugin, gradient_clip_val=1.0, max_epochs=1, devices=1, logger=False)
model = Classifier()
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=32))
print(f"first loss {model.losses[0]:.3f}, last loss {model.losses[-1]:.3f}")
