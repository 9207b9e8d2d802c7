"""Out of memory anywhere: weights, states and the scaler are as before, and the same call goes on.

Any op that torch runs for a call may be the one that fails. FailAt fails them one by one, on every
device; on a GPU the allocator itself is held short too.
"""

import contextlib

import pytest
import torch
from helpers import assert_same_bits, needs_cuda, on_devices, params_of, random_tensor
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mixprec

MIB = 1 << 20


class FailAt(TorchDispatchMode):
    """Raises in place of the op with this number."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError(f"no memory for {op}")
        return op(*args, **(kwargs or {}))


class Training:
    """Parameters of all kinds, in two groups, of which a gradient has another layout."""

    def __init__(self, device, steps=0, remainders=False, clip=False):
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        for param in self.model.parameters():
            param.data = random_tensor(generator, param.shape)
        mixprec.half_weights(self.model.to(device))
        *first, last = self.model.parameters()
        self.optimizer = mixprec.SGD(
            [{"params": first}, {"params": [last], "momentum": 0.0}], lr=0.1, momentum=0.9
        )
        self.scaler = mixprec.GradScaler(device, 256.0, growth_interval=2)
        self.loss = torch.ones((), device=device)
        self.clip = clip
        for param in params_of(self.optimizer):
            param.grad = random_tensor(generator, param.shape, param.dtype, device, scale=256.0)
            if param.dim() == 2:
                param.grad = param.grad.t().contiguous().t()
        for _ in range(steps):
            for call in self.calls():
                call()
        self.optimizer.store_param_remainders = remainders

    def calls(self):
        """An iteration, as calls each of which may be made again after it failed."""
        calls = [
            lambda: self.scaler.scale(self.loss),
            lambda: self.scaler.step(self.optimizer),
            self.scaler.update,
        ]
        if self.clip:
            calls.insert(1, lambda: self.scaler.clip_grad_norm_(self.optimizer, 0.5))
        return calls

    def tensors(self):
        """All that counts, by name. Reading it must not change it."""
        named = {}
        for i, param in enumerate(params_of(self.optimizer)):
            named |= {f"weight {i}": param, f"gradient {i}": param.grad}
            named |= {f"{k} {i}": v for k, v in self.optimizer.state.get(param, {}).items()}
        named |= mixprec.full_precision_state_dict(self.model, self.optimizer)
        named |= {f"scaler {k}": torch.tensor(v) for k, v in self.scaler.state_dict().items()}
        return {name: tensor.detach().clone() for name, tensor in named.items()}


def assert_all_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)


def fail_everywhere(training, call):
    """Runs the call, failing at its first op, its second, and so on; returns how often."""
    for number in range(1000):
        before = training.tensors()
        attributes = set(vars(training.optimizer))
        try:
            with FailAt(number):
                call()
        except torch.OutOfMemoryError:
            assert_all_same(training.tensors(), before)
            assert set(vars(training.optimizer)) == attributes
        else:
            return number
    raise AssertionError("it never succeeds")


@on_devices
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("steps, remainders", [(0, False), (0, True), (2, False), (2, True)])
def test_in_any_op_of_a_step(device, steps, remainders, clip):
    """The first step makes state; with remainders after two steps it converts all masters."""
    training, expected = (Training(device, steps, remainders, clip) for _ in range(2))
    failures = sum([fail_everywhere(training, call) for call in training.calls()])
    assert failures > (10 if steps == 0 or remainders else 3)
    for call in expected.calls():
        call()
    for _ in range(3):
        assert_all_same(training.tensors(), expected.tensors())
        for call in [*training.calls(), *expected.calls()]:
            call()


@on_devices
def test_in_half_weights(device):
    """All weights are half in the end, or none."""
    for number in range(100):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).to(device)
        weights = [(param, param.detach().clone()) for param in model.parameters()]
        try:
            with FailAt(number):
                mixprec.half_weights(model)
        except torch.OutOfMemoryError:
            for param, before in weights:
                assert_same_bits(param.detach(), before)
                assert not hasattr(param, "_mixprec_exact")
        else:
            assert all(param.dtype is torch.float16 for param, _ in weights)
            assert number >= 8
            return


@on_devices
def test_in_load_state_dict(device):
    source, training = Training(device, steps=3), Training(device, steps=1)
    saved = source.optimizer.state_dict()
    failures = fail_everywhere(training, lambda: training.optimizer.load_state_dict(saved))
    assert failures >= 5
    for param, other in zip(*map(params_of, (training.optimizer, source.optimizer)), strict=True):
        for name, value in source.optimizer.state[other].items():
            assert_same_bits(training.optimizer.state[param][name], value, name)


@contextlib.contextmanager
def gpu_memory(spare):
    """torch gets so many bytes more from the GPU, and no more."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + spare + MIB // 2) / total
        )
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Wide:
    """A model each of whose tensors is an allocation of its own, and its step as a method."""

    def __init__(self):
        torch.manual_seed(0)
        layers = [nn.Linear(2048, 2048) for _ in range(4)]
        self.model = mixprec.half_weights(nn.Sequential(*layers).cuda())
        self.optimizer = mixprec.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = mixprec.GradScaler("cuda", 1024.0, growth_interval=5)
        self.x = torch.randn(4096, 2048, device="cuda")
        self.y = torch.randint(2048, (4096,), device="cuda")

    def plain_step(self):
        self.optimizer.zero_grad()
        with mixprec.autocast():
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    step = mixprec.graphed(plain_step)

    def tensors(self):
        named = dict(self.model.state_dict())
        for i, param in enumerate(self.model.parameters()):
            named |= {f"{name} {i}": t for name, t in self.optimizer.state.get(param, {}).items()}
        named |= {f"scaler {k}": torch.tensor(v) for k, v in self.scaler.state_dict().items()}
        return {name: tensor.cpu().clone() for name, tensor in named.items()}


@needs_cuda
@pytest.mark.parametrize("steps, remainders", [(0, False), (1, True)])
def test_gpu_memory_in_a_step(steps, remainders):
    """With 8 MiB more each time: masters and momentum of a weight take 32."""
    training, expected = Wide(), Wide()
    for each in (training, expected):
        for _ in range(steps):
            each.plain_step()
        each.optimizer.store_param_remainders = remainders
        for param in each.model.parameters():
            param.grad = torch.full_like(param, 2.0)
        each.scaler.scale(torch.zeros((), device="cuda"))
    failures, done = 0, False
    while not done:
        before = training.tensors()
        with gpu_memory(failures * 8 * MIB):
            try:
                training.scaler.step(training.optimizer)
                done = True
            except torch.OutOfMemoryError:
                failures += 1
        if not done:
            assert_all_same(training.tensors(), before)
    assert failures >= 5
    expected.scaler.step(expected.optimizer)
    for each in (training, expected):
        each.scaler.update()
    for _ in range(3):
        assert_all_same(training.tensors(), expected.tensors())
        assert_same_bits(training.plain_step(), expected.plain_step())


@needs_cuda
def test_gpu_memory_in_a_capture():
    """A capture that finds no memory is no step; later, with memory, the same call captures."""
    training, expected = Wide(), Wide()
    for _ in range(3):
        assert_same_bits(training.step(), expected.plain_step())
    failures, done = 0, False
    while not done:
        before, random_state = training.tensors(), torch.cuda.get_rng_state()
        with gpu_memory(failures * 16 * MIB):
            try:
                loss = training.step()
                done = True
            except torch.OutOfMemoryError:
                failures += 1
        if not done:
            assert_all_same(training.tensors(), before)
            assert torch.equal(torch.cuda.get_rng_state(), random_state)
            assert training.optimizer.device_hyperparameters is None
    assert failures >= 3
    assert_same_bits(loss, expected.plain_step())
    for _ in range(3):
        assert_same_bits(training.step(), expected.plain_step())
        assert_all_same(training.tensors(), expected.tensors())
    assert any(vars(training)["_graphed_plain_step"].graphs.values())


@needs_cuda
def test_in_any_op_of_a_capture():
    """As above, with the failure in each op that the capture runs."""
    training, expected = Wide(), Wide()
    for _ in range(3):
        assert_same_bits(training.step(), expected.plain_step())
    for number in range(0, 1000, 7):
        before = training.tensors()
        try:
            with FailAt(number):
                loss = training.step()
        except torch.OutOfMemoryError:
            assert_all_same(training.tensors(), before)
            assert training.optimizer.device_hyperparameters is None
        else:
            break
    assert number > 50
    assert_same_bits(loss, expected.plain_step())
    for _ in range(3):
        assert_same_bits(training.step(), expected.plain_step())
        assert_all_same(training.tensors(), expected.tensors())
