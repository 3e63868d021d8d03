"""Training loops as people write them and stranger ones: each takes ``begin``, which meters it or does not.

A loop returns its losses and what it ends with; a metered one must return the same bits.
"""

import copy
import io
import os
import pickle
import resource
import shutil
import threading
import warnings
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

STEPS = 9


class Unmetered:
    """Stands where a loop has no meter."""

    data = staticmethod(iter)
    directory = None

    def log(self, /, **facts):
        pass

    def phase(self, name):
        return nullcontext()


def net(*more):
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), *more, nn.Linear(16, 4))


def loss_of(output):
    return F.cross_entropy(output, torch.arange(len(output)) % 4)


def train(begin, model, *optimizers, x=None, call=None, loss=loss_of, each=None, clear=None, start=None):
    """The plain loop; ``each(step, meter)`` comes after the update, ``clear`` in the place of zero_grad."""
    optimizers = optimizers or (AdamW(model.parameters(), lr=1e-2),)
    if start is not None:
        start()
    meter = begin(model, list(optimizers))
    losses = []
    for step, batch in enumerate(meter.data(x if x is not None else torch.randn(STEPS, 6, 8))):
        value = loss((model if call is None else call)(batch))
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers if clear is None else ():
            optimizer.zero_grad()
        if clear is not None:
            clear(step, optimizers)
        if each is not None:
            each(step, meter)
        meter.log(loss=value)
        losses.append(value.detach().clone())
    return [*losses, *(each.detach().clone() for each in model.parameters())]


KINDS = {}
COMPILED = {}


def kind(function):
    KINDS[function.__name__] = function
    return function


def compiled(function):
    COMPILED[function.__name__] = function
    return function


# Gradients


@kind
def accumulation_over_updates(begin):
    model = net()
    return train(begin, model, clear=lambda step, them: step % 3 == 2 and them[0].zero_grad())


@kind
def gradients_set_before(begin):
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return train(begin, model)


@kind
def gradients_never_cleared(begin):
    return train(begin, net(), clear=lambda step, them: None)


@kind
def gradients_zeroed(begin):
    return train(begin, net(), clear=lambda step, them: them[0].zero_grad(set_to_none=False))


@kind
def frozen_parts(begin):
    model = net()
    model[0].requires_grad_(False)
    return train(begin, model, AdamW(model[2].parameters()))


@kind
def parts_without_gradients(begin):
    model = nn.ModuleDict({"used": net(), "unused": net()})
    return train(begin, model, call=lambda x: model["used"](x))


@kind
def dropout_and_random_numbers(begin):
    model = net(nn.Dropout(0.5))
    return train(begin, model, call=lambda x: model(x + torch.rand_like(x)))


@kind
def two_optimizers(begin):
    model = net()
    return train(begin, model, AdamW(model[0].parameters()), SGD(model[2].parameters(), lr=0.1))


@kind
def hooks_of_parameters(begin):
    model = net()
    model[0].weight.register_hook(lambda gradient: 2 * gradient)

    def tripled(parameter):
        parameter.grad.mul_(3)

    model[0].bias.register_post_accumulate_grad_hook(tripled)
    return train(begin, model)


@kind
def hooks_of_modules(begin):
    model = net()
    model.register_forward_pre_hook(lambda module, x: (x[0] + 1,))
    model.register_forward_hook(lambda module, x, output: 2 * output)
    model.register_full_backward_hook(lambda module, gradients, outer: (3 * gradients[0],))
    return train(begin, model, call=lambda x: model(x.requires_grad_()))


@kind
def optimizer_in_backward(begin):
    model = net()
    inside = {each: SGD([each], lr=0.1) for each in model.parameters()}

    def update(one):
        inside[one].step()
        inside[one].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return train(begin, model, SGD([nn.Parameter(torch.zeros(1))]))


@kind
def gradient_penalty(begin):
    model = net()

    def loss(output):
        first = torch.autograd.grad(output.sum(), model[2].weight, create_graph=True)[0]
        return loss_of(output) + first.square().mean()

    return train(begin, model, loss=loss)


# Models


@kind
def checkpointed(begin):
    model = net()

    def call(x):
        once = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        return model(x) + checkpoint(model[2], once, use_reentrant=False)

    return train(begin, model, call=call)


@kind
def attention_and_recurrence(begin):
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), nn.LSTM(8, 4)])
    return train(begin, model, call=lambda x: model[1](model[0](x[None]))[0][0], loss=lambda y: y.square().mean())


@kind
def normalized(begin):
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.BatchNorm1d(16), nn.GroupNorm(2, 16),
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)),
    )  # fmt: skip
    return [*train(begin, model), *model.buffers()]


@kind
def many_losses(begin):
    def loss(y):
        p, target = y.sigmoid(), torch.ones_like(y) / 3
        parts = [F.binary_cross_entropy(p, target), y.std(), y.norm(), y.var(), torch.cdist(y, target).mean()]
        parts += [y.logsumexp(0).sum(), p.prod(), y.cumsum(0).mean(), torch.linalg.det(y[:4] @ y[:4].T + torch.eye(4))]
        return sum(parts) + F.kl_div(y.log_softmax(-1), target) + y[y > 0].sum() + y.sort()[0][:, 0].sum()

    return train(begin, net(), loss=loss)


class Returns(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.net, self.give = net(), give

    def forward(self, x):
        return self.give(self, self.net(x))


@kind
def returns_a_parameter(begin):
    model = Returns(lambda self, y: self.net[0].weight)
    return train(begin, model, loss=lambda y: y.square().sum(), each=lambda step, meter: not_hooked(model))


def not_hooked(model):
    assert not any(each._backward_hooks for each in model.parameters())


@kind
def returns_odd_things(begin):
    model = Returns(lambda self, y: {"y": y, "more": (None, [y[0], self.net], "text"), "set": {1}, "made": iter([y])})
    return train(begin, model, loss=lambda output: loss_of(next(output["made"])))


@kind
def output_changed_in_place(begin):
    return train(begin, net(), loss=lambda y: loss_of(y.mul_(2).relu_()))


@kind
def output_is_saved(begin):
    def loss(y):
        torch.save(y, io.BytesIO())  # which warns of hooks of a tensor
        return loss_of(y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(begin, net(), loss=loss)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@kind
def own_function(begin):
    return train(begin, Returns(lambda self, y: Doubled.apply(y)))


class OwnCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def __call__(self, x):
        return self.net(x)


@kind
def own_call(begin):
    return train(begin, OwnCall())


@kind
def scripted(begin):
    with warnings.catch_warnings(action="ignore"):
        return train(begin, torch.jit.script(net()))


@kind
def symbolic(begin):
    return train(begin, torch.fx.symbolic_trace(net()))


@kind
def lazy(begin):
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyLinear(4))
    return train(begin, model)


@kind
def functional(begin):
    model = net()

    def call(x):
        ensemble = {name: torch.stack([each, 2 * each]) for name, each in model.named_parameters()}
        return torch.vmap(lambda own: torch.func.functional_call(model, own, (x,)))(ensemble).sum(0)

    return train(begin, model, call=call)


@kind
def gradients_by_function(begin):
    model = net()

    def call(x):
        def loss(own):
            return loss_of(torch.func.functional_call(model, own, (x,)))

        penalty = torch.func.grad(loss)(dict(model.named_parameters()))
        return model(x) + sum(each.square().sum() for each in penalty.values())

    return train(begin, model, call=call)


@kind
def sparse_gradients(begin):
    model = nn.Embedding(32, 4, sparse=True)
    x = torch.randint(0, 32, (STEPS, 6))
    return train(begin, model, torch.optim.SparseAdam(model.parameters()), x=x, clear=lambda step, them: None)


@kind
def sparse_inputs(begin):
    model = net()
    with warnings.catch_warnings(action="ignore"):
        return train(begin, model, call=lambda x: model(x.relu().to_sparse().to_dense() + x.to_sparse_csr().to_dense()))


class SparseProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("graph", torch.eye(6).to_sparse())
        self.register_buffer("rows", torch.eye(6).to_sparse_csr())

    def forward(self, x):
        return self.net(self.rows @ torch.sparse.mm(self.graph, x))


@kind
def sparse_buffers(begin):
    with warnings.catch_warnings(action="ignore"):
        return train(begin, SparseProduct())


@kind
def sparse_parameters(begin):
    model = nn.Linear(8, 4)
    model.weight = nn.Parameter(model.weight.detach().to_sparse())
    return train(begin, model, SGD([model.bias], lr=0.1), call=lambda x: torch.sparse.mm(model.weight, x.T).T)


@kind
def nested(begin):
    model = net()

    def call(x):
        rows = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        return model(rows).values()

    return train(begin, model, call=call)


@kind
def complex_numbers(begin):
    model = nn.Linear(8, 4, dtype=torch.complex64)
    return train(begin, model, call=lambda x: model(x.to(torch.complex64)).abs())


@kind
def half_precision(begin):
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = AdamW(model.parameters())
    meter, found = begin(model, optimizer), []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss_of(model(torch.randn(6, 8)))
        scaler.scale(value * (torch.inf if step == 4 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        meter.log(loss=value)
        found.append(value.detach())
    return [*found, *model.parameters()]


# Optimizers


@kind
def closure(begin):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    begin(model, optimizer)

    def evaluate():
        optimizer.zero_grad()
        value = loss_of(model(torch.ones(6, 8)))
        value.backward()
        return value

    return [*(optimizer.step(evaluate).detach() for _ in range(STEPS)), *model.parameters()]


class Above(SGD):
    def step(self, closure=None):
        return super().step(closure)


@kind
def step_of_the_class_above(begin):
    model = net()
    SGD(model.parameters(), lr=0.1)  # from now on the class above has hooks too
    return train(begin, model, Above(model.parameters(), lr=0.1))


class Raising(Above):
    times = 0

    def step(self, closure=None):
        self.times += 1
        super().step(closure)
        if self.times % 2:
            raise ArithmeticError


@kind
def step_that_raises(begin):
    model = net()
    optimizer = Raising(model.parameters(), lr=0.1)
    meter, found = begin(model, optimizer), []
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        value = loss_of(model(torch.ones(6, 8)))
        value.backward()
        with suppress(ArithmeticError):
            optimizer.step()
        meter.log(loss=value)
        found.append(value.detach())
    return [*found, *model.parameters()]


@kind
def scheduled(begin):
    model = net()
    optimizer = AdamW(model.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def start():
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))

    return train(begin, model, optimizer, start=start, each=lambda step, meter: schedules[step % 2].step())


# What is done with the model


@kind
def copied_and_stored(begin):
    model, found = net(), []
    average = []

    def each(step, meter):
        if not average:
            average.append(AveragedModel(model))
        average[0].update_parameters(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
        copies.append(torch.load(file, weights_only=False))
        found.extend(one(torch.ones(1, 8)).detach() for one in copies)
        assert b"trainledger" not in file.getvalue()

    return [*train(begin, model, each=each), *found, *average[0].parameters()]


@kind
def evaluated(begin):
    model, found = net(nn.Dropout(0.5)), []

    def each(step, meter):
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            found.append(model(torch.ones(1, 8)).clone())
        model.train()

    return [*train(begin, model, each=each), *found]


@kind
def under_modes_of_its_own(begin):
    model, counts, found = net(), [], []
    optimizer = AdamW(model.parameters())
    begin(model, optimizer)
    for _ in range(STEPS):
        with FlopCounterMode(display=False) as counter:
            value = loss_of(model(torch.ones(6, 8)))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(torch.tensor(counter.get_total_flops()))
        found.append(value.detach())
    model(torch.ones(6, 8))
    return [*found, *counts, torch.tensor(counter.get_total_flops()), *model.parameters()]


@kind
def in_a_thread(begin):
    found = []
    thread = threading.Thread(target=lambda: found.extend(train(begin, net())))
    thread.start()
    thread.join()
    return found


@kind
def metered_twice(begin):
    model = net()
    return train(begin, model, start=lambda: begin(model, AdamW(model.parameters())))


# Around the run


@kind
def logs_odd_values(begin):
    values = [[1], "text", {}, object(), 1j, torch.ones(3), np.ones(2), torch.ones((), dtype=torch.complex64)]
    values += [torch.ones((), device="meta"), Fraction(1, 2), np.float32(1), np.ones(1), float("nan"), None, 10**400]

    def each(step, meter):
        meter.log(**{f"value{at}": value for at, value in enumerate(values)})
        meter.log(step=1, tokens=0, event="x", seconds=None, time=0, phase_seconds=3, mfu=2.0, self=1)

    return train(begin, net(), each=each)


@kind
def deletes_the_run(begin):
    def each(step, meter):
        if step == 3 and meter.directory is not None:
            shutil.rmtree(meter.directory.path)

    return train(begin, net(), each=each)


@contextmanager
def full_disk():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@kind
def fills_the_disk(begin):
    with full_disk():
        return train(begin, net())


@kind
def fills_the_disk_later(begin):
    model = net()
    found = train(begin, model)
    with full_disk():
        return [*found, *train(begin, model)]


@kind
def forks(begin):
    def each(step, meter):
        child = os.fork() if step == 4 else 1
        if child == 0:
            try:
                train(lambda *them: meter, net())
                meter.log(loss=0.0)
            finally:
                os._exit(0)
        elif step == 4:
            assert os.waitpid(child, 0)[1] == 0

    return train(begin, net(), each=each)


# What torch.compile makes


class Whole(nn.Module):  # Dynamo skips the frames of torch's own modules
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x).sin()


def failing(graph, inputs):
    raise NotImplementedError("no backend")


@compiled
def compiled_in_place(begin):
    model = Whole()
    model.compile(backend="aot_eager", fullgraph=True)
    return train(begin, model)


@compiled
def compiled_by_inductor(begin):
    model = Whole()
    model.compile()
    return train(begin, model)


@compiled
def compiled_later(begin):
    model = Whole()

    def start():
        model.compile(backend="aot_eager", fullgraph=True)

    return train(begin, model, each=lambda step, meter: step == 0 and start())


@compiled
def compiled_around(begin):
    return train(begin, torch.compile(Whole(), backend="aot_eager", fullgraph=True))


@compiled
def compiled_outside_of_the_metered(begin):
    model = Whole()
    return train(begin, model, call=torch.compile(model, backend="aot_eager", fullgraph=True))


@compiled
def compiled_with_its_loss(begin):
    model = Whole()
    whole = torch.compile(lambda x: loss_of(model(x)), backend="aot_eager", fullgraph=True)
    return train(begin, model, call=whole, loss=lambda value: value)


@compiled
def compiled_update(begin):
    model = Whole()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2))
    begin(model, optimizer)
    step, found = torch.compile(optimizer.step, backend="aot_eager"), []
    for _ in range(STEPS):
        value = loss_of(model(torch.ones(6, 8)))
        value.backward()
        step()
        optimizer.zero_grad()
        found.append(value.detach())
    return [*found, *model.parameters()]


@compiled
def compiler_that_fails(begin):
    model, told = Whole(), []
    broken = torch.compile(model, backend=failing)

    def call(x):
        try:
            return broken(x)
        except Exception as error:
            told.append(torch.tensor(len(type(error).__name__)))
            return 2 * model(x)

    return [*train(begin, model, call=call), *told]


@compiled
def compiler_that_fails_in_place(begin):
    model, told = Whole(), []

    def call(x):
        try:
            return model(x)
        except Exception as error:
            told.append(torch.tensor(len(type(error).__name__)))
            return 2 * model.forward(x)

    model.compile(backend=failing)
    return [*train(begin, model, call=call), *told]
