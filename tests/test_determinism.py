"""The same seed gives the same bits: in another process, and with any number of CPU threads."""

import hashlib
import os
import subprocess
import sys

import torch
from helpers import assert_same_bits, bits, on_devices
from test_load import trained
from torch import nn
from torch.nn import functional as F

import mixprec


def train_from_seed(device):
    """Whole steps with clipping and an overflow, on a GPU most of them as replays of a graph."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    half = torch.float16 if device == "cuda" else torch.bfloat16
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))
    model = nn.Sequential(*model, nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)
    model = mixprec.half_weights(model, half)
    optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = mixprec.GradScaler(device)

    @mixprec.graphed
    def train_step(x, y):
        optimizer.zero_grad()
        with mixprec.autocast(device):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    for i in range(20):
        x, y = torch.randn(32, 3, 8, 8), torch.randint(10, (32,))
        x[0] *= torch.inf if i == 7 else 1.0
        train_step(x.to(device), y.to(device))
    assert scaler.steps_skipped == 1
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [*model.state_dict().values(), *state, scaler._scale]


@on_devices
def test_another_process(device):
    digests = []
    for seed in ("1", "2"):  # of str's hashes: the order in sets
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, __file__, device]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
    assert digests[0] == digests[1]


def test_any_number_of_threads():
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (threads, 1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(trained("cpu", 5, steps=12))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert_same_bits(one, other)


if __name__ == "__main__":
    digest = hashlib.sha256()
    for tensor in train_from_seed(*sys.argv[1:]):
        digest.update(bits(tensor).numpy().tobytes())
    print(digest.hexdigest())
