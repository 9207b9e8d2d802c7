"""mixprec.graphed on a GPU: replays have the bits of plain calls, whatever changes between them."""

import copy
import ctypes
import gc
import threading
import weakref

import pytest
import torch
from helpers import assert_same_bits, needs_cuda
from torch import nn

import mixprec

pytestmark = needs_cuda
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(8 * 36, 10),
    ).cuda()  # fmt: skip


class Trainer:
    """A model, its optimizer and scaler, and the step of the tutorials as a method."""

    def __init__(self, half=True, optimizer=mixprec.SGD, scaler=mixprec.GradScaler, clip=None):
        self.model = mixprec.half_weights(network()) if half else network()
        self.optimizer = optimizer(self.model.parameters(), **OPTIONS)
        self.scaler = scaler("cuda", 1024.0, growth_interval=5)
        self.clip = clip

    def loss(self, x, y):
        with mixprec.autocast():
            return nn.functional.cross_entropy(self.model(x), y)

    def plain_step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.clip_grad_norm_(self.optimizer, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    step = mixprec.graphed(plain_step)

    def tensors(self):
        named = dict(self.model.state_dict())
        for i, param in enumerate(self.model.parameters()):
            named |= {f"{name} {i}": t for name, t in self.optimizer.state[param].items()}
            named[f"gradient {i}"] = param.grad
        return named


def batches(count, size=16, overflow=()):
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        x = torch.randn(size, 3, 8, 8, generator=generator)
        if i in overflow:
            x[0, 0, 0, 0] = torch.inf
        yield x.cuda(), torch.randint(10, (size,), generator=generator).cuda()


def graphs_of(trainer):
    return sum(map(len, vars(trainer)["_graphed_plain_step"].graphs.values()))


def assert_same(ours, plain):
    for (name, actual), expected in zip(
        ours.tensors().items(), plain.tensors().values(), strict=True
    ):
        assert (actual is None) == (expected is None), name
        if actual is not None:
            assert_same_bits(actual, expected, name)
    assert ours.scaler.state_dict() == plain.scaler.state_dict()


def run_both(data, *args, before_call=lambda trainer, i: None, graphs=1, **kwargs):
    """The same calls with and without graphs: same losses, weights, statistics and scale."""
    ours, plain = Trainer(*args, **kwargs), Trainer(*args, **kwargs)
    losses = []
    for trainer, step in ((ours, ours.step), (plain, plain.plain_step)):
        torch.manual_seed(3)
        results = []
        for i, batch in enumerate(data):
            before_call(trainer, i)
            results.append(step(*batch))
        losses.append(torch.stack(results))
    assert_same_bits(losses[0], losses[1], "losses")
    assert_same(ours, plain)
    if graphs is not None:
        assert graphs_of(ours) == graphs
    return ours


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("half", [False, True])
def test_500_steps_with_schedule_and_overflows(half, clip):
    data = list(batches(500, overflow={1, 4, 5, 77, 300, 301}))

    def schedule(trainer, i):
        if i == 0:
            trainer.schedule = torch.optim.lr_scheduler.OneCycleLR(
                trainer.optimizer, 0.1, total_steps=501
            )
        elif i < 500:
            trainer.schedule.step()

    ours = run_both(data, half, clip=clip, before_call=schedule)
    assert ours.scaler.steps_skipped > 6  # the scale grows until steps overflow, too


@pytest.mark.parametrize("fused", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_fused_optimizers(fused):
    def optimizer(params, lr, **kwargs):
        options = {"capturable": True} if fused is torch.optim.AdamW else {}
        return fused(params, lr=lr, fused=True, **options)

    def change_lr(trainer, i):
        trainer.optimizer.param_groups[0]["lr"] = 0.0625 / (1 + i // 6)

    data = list(batches(20, overflow={8}))
    for scaler in (mixprec.GradScaler, torch.amp.GradScaler):
        run_both(data, False, optimizer, scaler)
        ours, plain = Trainer(False, optimizer, scaler), Trainer(False, optimizer, scaler)
        for trainer, step in ((ours, ours.step), (plain, plain.plain_step)):
            torch.manual_seed(3)
            for i, batch in enumerate(data):
                change_lr(trainer, i)
                step(*batch)
        assert graphs_of(ours) == 1
        for actual, expected in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(actual, expected)


def test_torchs_other_optimizers_have_a_graph_for_each_learning_rate():
    def plain_sgd(params, **options):
        return torch.optim.SGD(params, foreach=True, **options)

    def change_lr(trainer, i):
        trainer.scaler._enabled = False  # its step would ask the host
        trainer.optimizer.param_groups[0]["lr"] = 0.05 if i < 8 else 0.025

    run_both(list(batches(20)), False, plain_sgd, before_call=change_lr, graphs=2)


def test_every_call_is_one_update():
    trainer = Trainer()
    for i, batch in enumerate(batches(10), 1):
        trainer.step(*batch)
        assert trainer.model[1].num_batches_tracked == i


def test_other_shapes_dtypes_and_modes():
    data = []
    for i, (x, y) in enumerate(batches(48)):
        if i % 4 == 3:
            x, y = x[:7], y[:7]
        if i % 4 == 2:
            x = x.half()
        data.append((x, y))

    def change(trainer, i):
        trainer.model.train(i % 2 == 0 or i < 24)
        trainer.model[0].weight.requires_grad_(i % 12 != 6)

    run_both(data, before_call=change, graphs=None)


def test_bounded_number_of_graphs():
    ours = Trainer()
    with pytest.warns(RuntimeWarning, match="max_graphs=8"):
        for size in range(2, 12):
            for batch in batches(6, size):
                ours.step(*batch)
    assert graphs_of(ours) == 8


CHANGES = {
    "weights loaded": lambda t: t.model.load_state_dict(
        {name: value * 0.5 for name, value in t.model.state_dict().items()}
    ),
    "weights replaced": lambda t: setattr(t.model[5].weight, "data", t.model[5].weight.data * 0.5),
    "statistics replaced": lambda t: setattr(t.model[1], "running_mean", torch.ones(8).cuda()),
    "module replaced": lambda t: t.model.__setitem__(1, nn.BatchNorm2d(8).cuda()),
    "optimizer loaded": lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()),
    "optimizer replaced": lambda t: setattr(
        t, "optimizer", mixprec.SGD(t.model.parameters(), lr=0.2, momentum=0.5)
    ),
    "scaler loaded": lambda t: t.scaler.load_state_dict({**t.scaler.state_dict(), "scale": 8.0}),
    "scaler replaced": lambda t: setattr(t, "scaler", mixprec.GradScaler("cuda", 64.0)),
    "growth": lambda t: t.scaler.set_growth_factor(4.0),
    "group": lambda t: t.optimizer.param_groups[0].update(nesterov=True, maximize=True),
    "momentum off": lambda t: t.optimizer.param_groups[0].update(momentum=0.0),
    "momentum": lambda t: t.optimizer.param_groups[0].update(momentum=0.3),
    "weight decay off": lambda t: t.optimizer.param_groups[0].update(weight_decay=0.0),
    "remainders": lambda t: setattr(t.optimizer, "store_param_remainders", True),
    "gradients dropped": lambda t: t.optimizer.zero_grad(),
    "layout": lambda t: t.model.to(memory_format=torch.channels_last),
    "moved": lambda t: (t.model.cpu(), t.model.cuda()),
    "evaluated": lambda t: t.model(torch.randn(4, 3, 8, 8).cuda()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls(change):
    def once(trainer, i):
        if i == 9:
            with mixprec.autocast():
                CHANGES[change](trainer)

    # Values of the host have a graph each; where memory changed, the graph before is stale.
    graphs = 2 if change in ("growth", "group", "momentum off") else 1
    run_both(list(batches(18, overflow={13})), before_call=once, graphs=graphs)


def test_masters_to_remainders_and_back():
    def change(trainer, i):
        trainer.optimizer.store_param_remainders = 9 <= i < 13

    run_both(list(batches(24, overflow={13})), before_call=change)


def test_first_gradient_of_a_parameter():
    """Its state is not made in a capture, though the call's inputs have been seen before."""

    class StepOnly(Trainer):
        def plain_step(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()

        step = mixprec.graphed(plain_step)

    ours, plain = StepOnly(), StepOnly()
    for trainer, step in ((ours, ours.step), (plain, plain.plain_step)):
        torch.manual_seed(3)
        for i, batch in enumerate(batches(20)):
            trainer.optimizer.zero_grad(set_to_none=False)
            trainer.scaler.scale(trainer.loss(*batch)).backward()
            if i < 8:
                trainer.model[0].weight.grad = None
            step()
    assert_same(ours, plain)
    assert graphs_of(ours) == 1


def test_gradients_dropped_outside():
    class Outside(Trainer):
        def plain_step(self, x, y):
            loss = self.loss(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.detach()

        step = mixprec.graphed(plain_step)

    ours, plain = Outside(), Outside()
    for trainer, step in ((ours, ours.step), (plain, plain.plain_step)):
        torch.manual_seed(3)
        for i, batch in enumerate(batches(30)):
            if i % 3:  # else they add up
                trainer.optimizer.zero_grad()
            step(*batch)
    assert_same(ours, plain)
    # Without gradients, and adding to those of a plain call or of a graph.
    assert graphs_of(ours) == 3


def test_accumulation():
    """Inside the function, and by calls without a step."""

    class Accumulating(Trainer):
        def plain_backward(self, x, y):
            loss = self.loss(x, y)
            self.scaler.scale(loss).backward()
            return loss.detach()

        backward = mixprec.graphed(plain_backward)

        def plain_step(self, x, y):
            self.optimizer.zero_grad()
            losses = [
                self.plain_backward(*half) for half in zip(x.chunk(2), y.chunk(2), strict=True)
            ]
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return losses

        step = mixprec.graphed(plain_step)

    ours, plain = Accumulating(), Accumulating()
    for trainer, graphed in ((ours, True), (plain, False)):
        torch.manual_seed(3)
        for batch in batches(10):
            (trainer.step if graphed else trainer.plain_step)(*batch)
        for batch in batches(10):
            trainer.optimizer.zero_grad()
            for _ in range(3):
                (trainer.backward if graphed else trainer.plain_backward)(*batch)
            trainer.scaler.step(trainer.optimizer)
            trainer.scaler.update()
    assert_same(ours, plain)


def test_two_optimizers_unused_parameters_and_closure():
    def run(graph):
        torch.manual_seed(0)
        nets = [nn.Linear(8, 8).cuda() for _ in range(3)]
        first = mixprec.SGD(nets[0].parameters(), lr=0.1, momentum=0.9)
        rest = [p for net in nets[1:] for p in net.parameters()]
        second = torch.optim.SGD(rest, lr=0.1, momentum=0.9, fused=True)
        scaler = mixprec.GradScaler("cuda", 64.0)
        factor = torch.full((), 0.5, device="cuda")

        @mixprec.graphed(enabled=graph)
        def step(x, *, use, options):
            first.zero_grad()
            second.zero_grad()
            loss = (nets[1 + use](nets[0](x)) * factor * options["scale"]).square().mean()
            scaler.scale(loss).backward()
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            return {"loss": loss, "none": None, "x": (x, options["scale"])}

        generator = torch.Generator().manual_seed(1)
        kept = []
        for i in range(24):
            x = torch.randn(4, 8, generator=generator).cuda()
            if i == 12:
                factor.fill_(0.25)
            if i == 16:
                factor = torch.full((), 2.0, device="cuda")
            kept.append(step(x, use=i % 2, options={"scale": 2.0}))
        grads = [p.grad for net in nets for p in net.parameters()]
        return kept, [p.detach() for net in nets for p in net.parameters()], grads

    (kept, params, grads), (plain_kept, plain_params, plain_grads) = run(True), run(False)
    for one, other in zip(kept, plain_kept, strict=True):
        assert one["none"] is None and one["x"][1] == 2.0
        assert not one["loss"].requires_grad
        assert_same_bits(one["loss"], other["loss"].detach())
        assert_same_bits(one["x"][0], other["x"][0])
    for one, other in zip(params + grads, plain_params + plain_grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same_bits(one, other)


def test_compiled_module():
    ours, plain = Trainer(), Trainer()
    for trainer in (ours, plain):
        trainer.model = torch.compile(trainer.model)
        torch.manual_seed(3)
        for batch in batches(12):
            (trainer.step if trainer is ours else trainer.plain_step)(*batch)
    assert_same(ours, plain)
    assert graphs_of(ours) == 1


def test_autocast_around_the_call():
    """Its cache of weights cast in plain calls is not what a graph reads."""
    ours, plain = Trainer(False), Trainer(False)
    for trainer, step in ((ours, ours.step), (plain, plain.plain_step)):
        torch.manual_seed(3)
        for batch in batches(12):
            with mixprec.autocast():
                trainer.model(batch[0])
                step(*batch)
    assert_same(ours, plain)


def test_cpu_batches_are_moved():
    data = list(batches(10))
    ours, plain = Trainer(), Trainer()
    for x, y in data:
        torch.manual_seed(3)
        plain.plain_step(x, y)
        torch.manual_seed(3)
        ours.step(x.cpu().pin_memory(), y.cpu())
    assert_same(ours, plain)


def sync_on_a_value(trainer, x, y):
    loss = trainer.plain_step(x, y)
    return loss.item()  # here


def host_decides(trainer, x, y):
    trainer.optimizer.zero_grad()
    trainer.scaler.scale(trainer.loss(x, y)).backward()
    trainer.scaler.step(trainer.optimizer)  # here
    trainer.scaler.update()


def unpinned_copy(trainer, x, y):
    return trainer.plain_step(x + torch.ones(8).cuda(), y)  # here


def in_backward(trainer, x, y):
    loss = trainer.loss(x, y)
    loss.register_hook(lambda grad: grad * grad.item())
    trainer.scaler.scale(loss).backward()  # here


def value_error(trainer, x, y):
    trainer.plain_step(x, y)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (sync_on_a_value, "return the tensor"),
        (host_decides, "fused=True"),
        (unpinned_copy, "unpinned"),
        (in_backward, "return the tensor"),
        (value_error, "mine"),
    ],
)
def test_what_a_graph_cannot_hold(function, message):
    options = {}
    if function is host_decides:
        options = {"half": False, "optimizer": torch.optim.SGD}
    ours, plain = Trainer(**options), Trainer(**options)
    step = mixprec.graphed(function)
    torch.manual_seed(3)
    data = list(batches(8, overflow={2}))
    for batch in data[:3]:
        step(ours, *batch)
    for _ in range(2):  # in the call that captures, and again
        with pytest.raises((RuntimeError, ValueError), match=message) as caught:
            step(ours, *data[3])
        if function is not value_error:
            assert "test_graphed.py, line " in str(caught.value)
            assert "# here" in str(caught.value)
    for batch in data[3:]:  # the process, random numbers and the trainer go on
        function(ours, *batch)
    gc.collect()
    torch.manual_seed(3)
    for batch in data:
        function(plain, *batch)
    assert_same(ours, plain)
    run_both(list(batches(8)))


def test_function_that_writes_its_input():
    trainer = Trainer()

    @mixprec.graphed
    def step(x, y):
        x.mul_(2)
        return trainer.plain_step(x, y)

    with pytest.warns(RuntimeWarning, match="writes to its inputs"):
        for x, y in batches(8):
            before = x.clone()
            step(x, y)
            assert_same_bits(x, before * 2)
    assert trainer.model[1].num_batches_tracked == 8


def test_scheduler_inside_goes_on():
    trainer = Trainer()
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)

    @mixprec.graphed
    def step(x, y):
        trainer.plain_step(x, y)
        schedule.step()

    with pytest.warns(RuntimeWarning, match="step the scheduler outside"):
        for batch in batches(6):
            step(*batch)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05 * 0.5**6


def test_update_left_to_the_caller():
    trainer = Trainer()

    @mixprec.graphed
    def step(x, y):
        trainer.optimizer.zero_grad()
        trainer.scaler.scale(trainer.loss(x, y)).backward()
        trainer.scaler.step(trainer.optimizer)

    with pytest.warns(RuntimeWarning, match="update"):
        for batch in batches(8):
            step(*batch)
            trainer.scaler.update()
    assert trainer.model[1].num_batches_tracked == 8


def test_outputs_and_inputs_are_the_callers():
    trainer = Trainer()
    kept = []
    for x, y in batches(12):
        kept.append((trainer.step(x, y), x.clone(), x))
    losses = [loss for loss, _, _ in kept]
    assert len({loss.data_ptr() for loss in losses}) == len(losses)
    assert len(set(torch.stack(losses).tolist())) == len(losses)
    assert all(torch.equal(x, copied) for _, copied, x in kept)


def test_outputs_of_every_kind():
    class Marked(torch.Tensor):
        pass

    def plain(x):
        y = x * 2
        views = y.t(), y[:, ::2], y[0].expand(4, -1), y.conj()
        return {"views": views, "marked": y.as_subclass(Marked), "others": [None, 3, "text"]}

    graphed = mixprec.graphed(plain)
    for i in range(8):
        x = torch.full((3, 4), 1j * i, device="cuda")
        ours, expected = graphed(x), plain(x)
        assert ours["others"] == expected["others"]
        assert type(ours["marked"]) is Marked
        for actual, wanted in zip(ours["views"], expected["views"], strict=True):
            assert torch.equal(actual, wanted)
    assert len(graphed._runner.graphs) == 1


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_inputs_of_every_size(offset):
    """More of them than one launch copies; aligned to 16 bytes, to an element, and to a byte."""
    dtypes = [torch.uint8, torch.bool, torch.half, torch.float, torch.int64, torch.complex128]
    sizes = [0, 1, 3, 1000, 4096, 20_000]

    def plain(tensors):
        return [t + 1 for t in tensors]

    graphed = mixprec.graphed(plain)
    for i in range(8):
        torch.manual_seed(i)
        tensors = [
            torch.randint(0, 2, (size + offset,), device="cuda").to(dtype)[offset:]
            for dtype in dtypes
            for size in sizes
        ]
        ours, expected = graphed(tensors), plain(tensors)
        for actual, wanted in zip(ours, expected, strict=True):
            assert actual.dtype == wanted.dtype and torch.equal(actual, wanted)
    assert len(graphed._runner.graphs) == 1


def test_memsets():
    """Libraries use them; in a graph, small ones become kernels."""
    driver = ctypes.CDLL("libcuda.so.1")
    kinds = (
        (driver.cuMemsetD8Async, torch.uint8, 0xA5),
        (driver.cuMemsetD16Async, torch.int16, 0x5BA5),
        (driver.cuMemsetD32Async, torch.int32, 0x12345678),
    )
    sets = [
        (memset, value, torch.zeros(count, dtype=dtype, device="cuda"))
        for memset, dtype, value in kinds
        for count in (1, 3, 1000, 5000)
    ]

    @mixprec.graphed
    def step(x):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for memset, value, buffer in sets:
            address, count = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel())
            assert memset(address, value, count, stream) == 0
            buffer.add_(x)

    for i in range(8):
        step(torch.tensor(i, dtype=torch.uint8, device="cuda"))
        for _, value, buffer in sets:
            assert torch.equal(buffer, torch.full_like(buffer, value) + i)
    assert len(step._runner.graphs) == 1


def test_backward_runs_in_the_calling_thread():
    """Another one would have cuBLAS workspaces of its own, 32 MiB on Hopper."""
    weight, threads = torch.ones(8, device="cuda", requires_grad=True), []
    weight.register_hook(lambda _: threads.append(threading.get_ident()))

    @mixprec.graphed
    def step(x):
        weight.grad = None
        (weight * x).sum().backward()

    for _ in range(6):
        step(torch.ones(8, device="cuda"))
    assert threads == [threading.get_ident()] * 4  # three calls and the capture


def test_capture_frees_the_gradients_that_the_function_drops():
    trainer, gradients, freed = Trainer(), [], []
    trainer.model.register_forward_pre_hook(
        lambda *_: freed.append(all(gradient() is None for gradient in gradients))
    )
    for batch in batches(6):
        trainer.step(*batch)
        gradients[:] = [weakref.ref(param.grad) for param in trainer.model.parameters()]
    assert freed == [True] * 4  # three calls and the capture
    assert graphs_of(trainer) == 1


def test_versions_are_bumped():
    trainer = Trainer()
    for batch in batches(8):
        weight = trainer.model[5].weight
        before = weight._version, trainer.model[1].num_batches_tracked._version
        trainer.step(*batch)
        assert weight._version > before[0]
        assert trainer.model[1].num_batches_tracked._version > before[1]


def test_memory_does_not_grow():
    def used():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    Trainer().step(*next(batches(1)))  # cuBLAS's workspaces stay until the process ends
    start = used()
    trainer = Trainer()
    data = list(batches(8))
    for batch in data:
        trainer.step(*batch)
    before = used()
    for _ in range(10_000):
        trainer.step(*data[0])
    assert used() == before
    sizes = []
    for _ in range(6):  # captures anew
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
        for batch in data:
            trainer.step(*batch)
        sizes.append(used())
    assert sizes[-1] <= sizes[0]
    copy.deepcopy(trainer).step(*data[0])
    del trainer, data, batch
    assert used() - start < 1 << 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_devices():
    """One graphed function each, called while the first device is current."""
    results = []
    for graph in (True, False):
        losses = []
        for device in ("cuda:0", "cuda:1"):
            torch.manual_seed(0)
            model = nn.Linear(8, 8).to(device)
            optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scaler = mixprec.GradScaler()

            @mixprec.graphed(enabled=graph)
            def step(x, model=model, optimizer=optimizer, scaler=scaler):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                return loss

            losses += [step(torch.ones(4, 8, device=device)).cpu() for _ in range(8)]
        results.append(torch.stack(losses))
    assert_same_bits(*results)
