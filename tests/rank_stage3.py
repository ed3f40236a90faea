"""What torch ranks do in test_stage3.py: the same training at stage 2 and at stage 3, and what stage 3 must refuse."""

import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import io
import os
import threading
import time
import types
import warnings

import numpy
import torch
from torch import nn
from torch.func import functional_call

import zero_c
from models import batch, fill, mlp
from stage3_models import CASES, UNUSUAL, WIDTH, Block, Gpt, blocks_of, leaking, returning
from zero_c.torch import ShardedOptimizer, _stage3

STAGE = 3
ADAMW = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}


@functools.cache
def settle():
    """Each construction collects garbage. What torch keeps alive, most of it loaded with the first optimizer, is none
    of it, but looking through it took half of the time of these tests."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    gc.collect()
    gc.freeze()


def communicator():
    settle()
    return zero_c.init()


@contextlib.contextmanager
def memory_as(ring=None, fill=False):
    """What is read at construction: physical slots per ring, and whether discarded memory is filled with NaN."""
    ShardedOptimizer._ring_slots = ring
    if fill:
        os.environ["ZERO_C_STAGE3_FILL"] = "1"
    try:
        yield
    finally:
        ShardedOptimizer._ring_slots = None
        os.environ.pop("ZERO_C_STAGE3_FILL", None)


def make_optimizer(model, comm, stage, units=None, prefetch=1, ring=None, fill=False, params=None, **options):
    """An optimizer of either stage; stage 2 takes none of what only stage 3 knows."""
    if stage == 3:
        options |= {"units": units, "prefetch": prefetch}
    if params is not None:
        options["module"] = model
    with memory_as(ring, fill):
        return ShardedOptimizer(model if params is None else params, comm=comm, stage=stage, **ADAMW | options)


def two_groups(model):
    """Matrices with weight decay, all others without and with another learning rate."""
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def matrices_only(model):
    """The other parameters are the caller's."""
    return two_groups(model)[:1]


GROUPS = {"two": two_groups, "matrices only": matrices_only}


# ---- one training run, and all that must not depend on the stage ---------------------


class Run:
    """A model with its optimizer, and the trace of what was seen: (what, tensor) in order."""

    def __init__(self, case, stage, setting, dtype=None, groups=None, **options):
        self.case, self.comm = case, communicator()
        self.rank = self.comm.rank
        self.model = case.build(dtype and getattr(torch, dtype))
        self.opt = make_optimizer(self.model, self.comm, stage, case.unit_modules(self.model),
                                  params=GROUPS[groups](self.model) if groups else None, **setting, **options)
        listed = {id(p) for group in self.opt.param_groups for p in group["params"]}
        self.named = [(name, p) for name, p in self.model.named_parameters() if id(p) in listed]
        self.left_out = [(name, p) for name, p in self.model.named_parameters() if id(p) not in listed]
        self.trace, self.when = [], "before training"
        self.digest = hashlib.sha256()

    def saw(self, what, tensor):
        self.trace.append((f"{self.when}: {what}", None if tensor is None else tensor.detach().clone()))

    def loss(self, number=0):
        """The loss on batch `number` of this step."""
        torch.manual_seed(1000 * self.step + 10 * number + self.rank)  # for dropout and for random orders
        loss = self.case.loss(self.model, self.rank, 10 * self.step + number)
        self.saw(f"loss {number}", loss)
        return loss

    def backward(self, loss, **options):
        self.opt.scale(loss).backward(**options)

    def evaluate(self, number=5, what="output of evaluation"):
        """A forward in eval mode without a graph; not collective."""
        self.model.eval()
        with torch.no_grad():
            arguments, _ = self.case.batch(self.rank, 10 * self.step + number)
            torch.manual_seed(number)
            self.saw(what, self.case.output(self.model, arguments))
        self.model.train()

    def train(self, how, steps):
        for self.step in range(steps):
            self.when = f"step {self.step}"
            how(self, self.step)
            if how not in UNWATCHED:
                self.see_gradients()
            self.opt.step()
            self.opt.zero_grad()
            if self.opt.last_step.norm is not None:
                self.saw("norm", torch.tensor(self.opt.last_step.norm, dtype=torch.float64))
            for name, buffer in self.model.named_buffers():
                self.saw(f"buffer {name}", buffer)
            if how not in UNWATCHED or self.step == steps - 1:
                for name, parameter in self.named:
                    self.saw_everywhere(f"weight {name}", self.opt.full_param(parameter))
        self.when = "after training"
        self.evaluate()
        return self

    def see_gradients(self):
        for name, parameter in self.named:
            self.saw_everywhere(f"gradient of {name}", self.opt.grad(parameter))
        for name, parameter in self.left_out:
            self.saw(f"own gradient of {name}", parameter.grad)

    def saw_everywhere(self, what, tensor):
        self.saw(what, tensor)
        if tensor is not None:
            self.digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())

    def ranks_agree(self):
        """Whether all ranks have seen the same gradients and weights. Collective."""
        digests = self.comm.all_gather(numpy.frombuffer(self.digest.digest(), numpy.uint8))
        digests = digests.reshape(self.comm.world_size, -1)
        return bool((digests == digests[0]).all())


def differences(ours, theirs):
    """Lines that say where two traces differ in a bit, the first one first."""
    if [what for what, _ in ours] != [what for what, _ in theirs]:
        first = next(pair for pair in zip([*ours, ("nothing", None)], [*theirs, ("nothing", None)], strict=False)
                     if pair[0][0] != pair[1][0])
        return [f"saw '{first[0][0]}' where '{first[1][0]}' was expected"]
    return [f"{what}: {found}" for (what, one), (_, other) in zip(ours, theirs, strict=True)
            if (found := difference(one, other))]


def difference(one, other):
    if one is None or other is None:
        return "" if one is other else f"{kind_of(one)}, wanted {kind_of(other)}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{kind_of(one)}, wanted {kind_of(other)}"
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    if torch.equal(*bits):
        return ""
    apart = (one.double() - other.double()).abs()
    unequal = int((apart > 0).sum() + apart.isnan().sum())
    largest = apart[~apart.isnan()].max().item() if not apart.isnan().all() else float("nan")
    return (f"{unequal} of {one.numel()} elements differ, by at most {largest:.3g}; {int(one.isnan().sum())} are NaN, "
            f"wanted {int(other.isnan().sum())}")


def kind_of(tensor):
    return "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def told(problems, shown=6):
    more = [f"... and {len(problems) - shown} more"] if len(problems) > shown else []
    return "\n".join([*problems[:shown], *more])


def check_meaning(trace, finite):
    """A comparison says something while the numbers are finite and there are gradients."""
    found = all(tensor.isfinite().all() for _, tensor in trace if tensor is not None)
    assert found == finite, f"stage 2: numbers are {'' if found else 'not '}finite"
    gradients = [tensor for what, tensor in trace if "gradient of" in what and tensor is not None]
    assert not gradients or any(tensor.any() for tensor in gradients), "no gradient at stage 2"


def agree(name, settings, how="plain", steps=3, finite=True, **options):
    """Trains a case at stage 2, then at stage 3 with each of the settings: all that is seen has the same bits."""
    case, train = CASES[name], WAYS[how]
    expected = Run(case, 2, {}, **options).train(train, steps).trace
    check_meaning(expected, finite)
    problems = []
    for setting in settings:
        try:
            sharded = Run(case, STAGE, setting, **options).train(train, steps)
        except Exception as error:
            raise AssertionError(f"{name}, {how}, {setting}: {type(error).__name__}: {error}") from error
        found = differences(sharded.trace, expected)
        if not sharded.ranks_agree():
            found.append("the ranks have seen different gradients or weights")
        if found:
            problems.append(f"{name}, {how}, {setting}: {len(found)} differences\n{told(found)}")
    # Raised at the end: what one rank does not see would make the other ranks wait for it.
    assert not problems, "\n".join(problems)


# ---- ways to train: each makes the gradients of one step ---------------------------

WAYS = {}
UNWATCHED = set()  # their gradients and weights are read at the end only: reading holds the ranks together


def way(function):
    WAYS[function.__name__] = function
    return function


@way
def plain(run, step):
    run.backward(run.loss())


@way
def accumulate(run, step):
    for number in range(3):
        run.backward(run.loss(number))
        run.evaluate(what=f"output after batch {number}")


@way
def accumulate_without_sync(run, step):
    """Two of three backwards deferred; in the second step all of them; in the third the last ones."""
    deferred = [(0, 1), (0, 1, 2), (1, 2)][step % 3]
    for number in range(3):
        with run.opt.no_sync() if number in deferred else contextlib.nullcontext():
            run.backward(run.loss(number))


@way
def autocast(run, step):
    with torch.autocast("cpu", torch.bfloat16):
        loss = run.loss()
    run.backward(loss)


@way
def evaluate_between(run, step):
    """Forwards without a graph while a graph waits for its backward, and after it."""
    loss = run.loss()
    run.evaluate(what="output between forward and backward")
    run.backward(loss)
    run.evaluate(what="output after backward")


@way
def evaluate_alone(run, step):
    """Only one rank looks at its loss; the ranks meet in backward and step() only."""
    loss = run.loss()
    for number in range(2 if run.rank == step % run.comm.world_size else 0):
        run.evaluate(number, f"output {number} between forward and backward")
    run.backward(loss)
    if run.rank == run.comm.world_size - 1:
        run.evaluate(what="output after backward")


@way
def at_own_pace(run, step):
    """Ranks apart in time: each still evaluates with the weights of before the step that its peers have entered."""
    def slowly(*_):
        time.sleep(0.003)

    slow = run.rank == step % run.comm.world_size
    handles = [block.down.register_forward_hook(slowly) for block in run.model.blocks if slow]
    loss = run.loss()
    if slow:
        run.evaluate(what="output before backward")
    run.backward(loss)
    if slow:
        run.evaluate(what="output after backward")
    for handle in handles:
        handle.remove()


UNWATCHED.add(at_own_pace)


@way
def one_rank_idle(run, step):
    """The last rank has no batch in the second step, as at the end of an epoch."""
    if step != 1 or run.rank < run.comm.world_size - 1 or run.comm.world_size == 1:
        run.backward(run.loss())


@way
def inference_first(run, step):
    with torch.inference_mode():
        run.loss(1)
    assert not any(p.is_inference() for _, p in run.named)
    run.backward(run.loss())
    with torch.inference_mode():
        run.loss(2)


@way
def backward_twice(run, step):
    loss = run.loss()
    run.backward(loss, retain_graph=True)
    run.backward(loss)


@way
def gradients_for_the_caller(run, step):
    """autograd.grad gives this rank's own gradients, whole; the optimizer's come from the backward after it."""
    parameters = [(name, p) for name, p in run.named if p.requires_grad]
    found = torch.autograd.grad(run.loss(), [p for _, p in parameters], allow_unused=True)
    for (name, _), gradient in zip(parameters, found, strict=True):
        run.saw(f"own gradient of {name}", gradient)
    run.backward(run.loss(1))


@way
def gradient_of_an_input(run, step):
    x = batch(run.rank, step, (2, 6, WIDTH)).requires_grad_()
    y = run.model.body(run.model.blocks, x)
    run.saw("gradient of the input", torch.autograd.grad(y.square().sum(), x)[0])
    run.backward(run.loss())


@way
def backward_to_some(run, step):
    blocks = run.model.blocks
    run.backward(run.loss(), inputs=[blocks[1].up.weight, blocks[3].norm1.bias])


class ToldToFail(Exception):
    pass


def fail(*_):
    raise ToldToFail


@way
def forward_fails_first(run, step):
    """An exception half-way through the forward, also of an evaluation; then everything again."""
    handle = run.model.blocks[2].down.register_forward_pre_hook(fail)
    for attempt in (run.loss, run.evaluate):
        with contextlib.suppress(ToldToFail):
            attempt()
            raise AssertionError("the hook did not run")
    handle.remove()
    run.model.train()
    run.backward(run.loss())


@way
def backward_fails_first(run, step):
    """An exception half-way through the backward; then the same graph again, or another one, with or without
    zero_grad() between."""
    handle = run.model.blocks[1].down.weight.register_hook(fail)
    loss = run.loss()
    with contextlib.suppress(ToldToFail):
        run.backward(loss, retain_graph=True)
        raise AssertionError("the hook did not run")
    handle.remove()
    if step:
        run.opt.zero_grad()
    run.backward(loss if step == 2 else run.loss(1))


@way
def functional(run, step):
    """functional_call with the model's own Parameters."""
    (ids,), targets = run.case.batch(run.rank, step)
    output = functional_call(run.model, dict(run.model.named_parameters()), (ids,))
    loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    run.saw("loss", loss)
    run.backward(loss)


@way
def two_graphs(run, step):
    """Two forwards, then the backwards in either order; a third forward without a graph between them."""
    losses = [run.loss(0), run.loss(1)]
    run.evaluate()
    for loss in losses if step % 2 else reversed(losses):
        run.backward(loss)


@way
def sum_of_graphs(run, step):
    run.backward(run.loss(0) + run.loss(1))


@way
def forward_in_backward(run, step):
    """A whole forward without a graph inside a hook of the backward."""
    def evaluate(gradient):
        run.evaluate(what="output inside the backward")

    def watch(module, arguments, output):
        output.register_hook(evaluate)

    handle = run.model.blocks[1].register_forward_hook(watch)
    loss = run.loss()
    handle.remove()
    run.backward(loss)


@way
def loss_of_an_inner_output(run, step):
    """The loss is of what the second unit gives; the units behind it and the root's output have no part in it."""
    kept = []
    handle = run.model.blocks[1].register_forward_hook(lambda module, arguments, output: kept.append(output))
    run.loss()
    handle.remove()
    run.backward(kept[0].square().mean())


@way
def freeze_and_unfreeze(run, step):
    run.model.blocks[0].requires_grad_(step != 0)
    run.model.blocks[2].requires_grad_(step != 1)
    run.backward(run.loss())


@way
def backward_hook_reads_a_weight(run, step):
    handle = run.model.blocks[1].register_full_backward_hook(
        lambda module, inputs, outputs: run.saw("weight inside the backward", module.up.weight))
    loss = run.loss()
    run.backward(loss)
    handle.remove()


@way
def parameter_hooks(run, step):
    """Hooks of the caller on parameters, which see a gradient while the weights are there."""
    handles = [p.register_hook(lambda gradient, p=p: gradient + 0.1 * p.detach().sign()) for _, p in run.named]
    run.backward(run.loss())
    for handle in handles:
        handle.remove()


@way
def in_two_parts(run, step):
    """The graph is cut in the middle of the units, and the backward of each part is called by hand."""
    blocks, body = run.model.blocks, run.model.body

    def halves(blocks, x):
        run.first = body(blocks[:2], x)
        run.second = run.first.detach().requires_grad_()
        return body(blocks[2:], run.second)

    run.model.body = halves
    loss = run.loss()
    run.model.body = body
    run.backward(loss)
    run.first.backward(run.second.grad)


@way
def overflow_on_one_rank(run, step):
    """With skip_nonfinite: the second step is skipped on all ranks."""
    loss = run.loss()
    run.backward(loss * float("inf") if step == 1 and run.rank == run.comm.world_size - 1 else loss)


@way
def saved_elsewhere(run, step):
    with torch.autograd.graph.save_on_cpu():
        loss = run.loss()
    run.backward(loss)


@way
def other_thread(run, step):
    """The backward in a thread that has built no graph."""
    loss, raised = run.loss(), []

    def work():
        try:
            run.backward(loss)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@way
def gathered_between(run, step):
    """Weights are read while a graph waits for its backward, and after it."""
    loss = run.loss()
    with run.opt.gathered(*[p for _, p in run.named]) as tensors:
        for (name, parameter), tensor in zip(run.named, tensors, strict=True):
            run.saw(f"gathered {name}", tensor)
            run.saw(f"{name} while gathered", parameter)
    run.backward(loss)
    with run.opt.gathered(run.model.blocks[1].up.weight) as (weight,):
        run.saw("gathered after backward", weight)


@way
def written_between(run, step):
    """Rank 0's changes are everybody's; what the other ranks write is lost."""
    parameters = [run.model.blocks[1].up.weight, run.model.head.weight, run.model.blocks[3].norm1.bias]
    with run.opt.gathered(*parameters, write=True), torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5 if run.rank == 0 else 7.0)
    run.backward(run.loss())


@way
def loaded_between(run, step):
    """A state dict is taken, and loaded again after a step that is thereby undone."""
    if step == 1:
        with run.opt.gathered(*[p for _, p in run.named]):
            run.kept = copy.deepcopy(run.model.state_dict())
    if step == 2:
        with run.opt.gathered(*[p for _, p in run.named], write=True):
            if run.rank == 0:
                run.model.load_state_dict(run.kept)
    run.backward(run.loss())


# ---- optimizer state ------------------------------------------------------------------


def state_of(run):
    """The optimizer's whole state as a trace."""
    found = []
    for number, entry in run.opt.full_state_dict()["state"].items():
        found += [(f"{role} of parameter {number}", value.clone()) for role, value in sorted(entry.items())]
    return found


def optimizer_state(name, setting, **options):
    """Moments and masters are those of stage 2; training goes on with the same bits from either form of state dict."""
    case = CASES[name]
    plain, ours = (Run(case, stage, values, **options).train(WAYS["plain"], 2)
                   for stage, values in ((2, {}), (STAGE, setting)))
    assert not (found := differences(state_of(ours), state_of(plain))), told(found)
    states = {"whole state of stage 2": plain.opt.full_state_dict(), "whole state": ours.opt.full_state_dict(),
              "local state": copy.deepcopy(ours.opt.state_dict())}
    with ours.opt.gathered():
        weights = copy.deepcopy(ours.model.state_dict())
    plain.trace.clear()
    plain.train(WAYS["plain"], 2)
    for what, state in states.items():
        other = Run(case, STAGE, setting, **options)
        with other.opt.gathered(write=True):
            other.model.load_state_dict(weights)
        other.opt.load_state_dict(state)
        found = differences(other.train(WAYS["plain"], 2).trace, plain.trace)
        assert not found, f"{what}: {told(found)}"


def adversaries(settings):
    """Two sharded models on one communicator, and backwards of one through the other, which learns nothing from it."""
    comm = communicator()

    def train(stage, setting):
        models = [mlp(seed, (WIDTH, 9, 9, WIDTH)) for seed in (1, 2)]
        opts = [make_optimizer(model, comm, stage, list(model), **setting) for model in models]
        (maker, judge), trace = models, []
        for step in range(3):
            def made(step=step):
                return maker(batch(comm.rank, step, (4, WIDTH)))

            for number, loss_of in ((1, lambda: judge(made().detach()).square().mean() + judge(
                    batch(comm.rank, step, (4, WIDTH))).mean()), (0, lambda: -judge(made()).square().mean())):
                loss = loss_of()
                trace.append((f"step {step}: loss of model {number}", loss.detach()))
                loss.backward()
                opts[number].step()
                for opt in opts:
                    opt.zero_grad()
            trace += [(f"step {step}: parameter {index} of model {number}", opts[number].full_param(p))
                      for number, model in enumerate(models) for index, p in enumerate(model.parameters())]
        return trace

    plain = train(2, {})
    problems = []
    for setting in settings:
        if found := differences(train(STAGE, setting), plain):
            problems.append(f"{setting}: {told(found)}")
    assert not problems, "\n".join(problems)


# ---- what is seen outside the units -----------------------------------------------------


def trained(setting, stage=STAGE, name="GPT, tied", **options):
    return Run(CASES[name], stage, setting, **options).train(WAYS["plain"], 1)


def is_guard(parameter):
    """NaN in one element, however large it looks."""
    spread = any(stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True) if size > 1)
    return bool(parameter.isnan().all()) and (not spread or not parameter.numel())


def placeholders(setting):
    """Outside its unit a parameter keeps shape, dtype and identity, and shows NaN; nothing of it stays."""
    run = Run(CASES["odd parameters"], STAGE, setting)
    shapes = [(p.shape, p.dtype) for p in CASES["odd parameters"].build().parameters()]

    def check(when):
        for (name, p), (shape, dtype) in zip(run.named, shapes, strict=True):
            assert (p.shape, p.dtype) == (shape, dtype) and isinstance(p, nn.Parameter), f"{name} {when}"
            assert is_guard(p), f"{name} {when}: {p}"
        assert [id(p) for p in run.model.parameters()] == [id(p) for _, p in run.named], when

    check("after construction")
    run.step = 0
    seen = {}
    unit = run.model.blocks[1]
    handle = unit.wide.register_forward_hook(lambda *_: seen.update({name: is_guard(p) for name, p in run.named}))
    loss = run.loss()
    assert not seen["blocks.1.wide.weight"] and not seen["blocks.1.scalar"], "whole inside the unit's forward"
    assert seen["blocks.0.wide.weight"] and seen["blocks.3.wide.weight"], "units that do not run are not whole"
    handle.remove()
    check("after forward")
    loss.backward()
    check("after backward")
    run.opt.step()
    check("after step()")
    weight = unit.wide.weight
    with torch.no_grad():
        assert weight.square().sum().isnan() and (weight @ weight.T).isnan().all(), "reading is loud"
    assert weight.detach().isnan().all() and torch.zeros_like(weight).shape == weight.shape
    assert weight.grad is None and not weight.requires_grad_(True).is_shared()
    assert str(weight).startswith("Parameter containing"), str(weight)


def gathering(setting):
    """gathered() lends whole values, in the tensors it gives and in the parameters; an exception ends it well."""
    run, plain = trained(setting), trained({}, stage=2)
    expected = [p.detach() for p in plain.model.parameters()]
    pairs = list(zip(run.named, expected, strict=True))

    def check(found, what):
        for ((name, _), value), tensor in zip(pairs, found, strict=True):
            assert not difference(tensor.detach(), value), f"{what}: {name}"

    check([run.opt.full_param(p) for _, p in run.named], "full_param")
    with run.opt.gathered() as tensors:
        check(tensors, "all, as tensors")
        check([p for _, p in run.named], "all, in place")
    assert all(is_guard(p) for _, p in run.named), "guards are back"
    chosen = [run.named[5], run.named[0]]
    with run.opt.gathered(*[p for _, p in chosen]) as tensors:
        for (name, p), tensor in zip(chosen, tensors, strict=True):
            value = expected[[other for other, _ in run.named].index(name)]
            assert not difference(tensor.detach(), value) and not difference(p.detach(), value), name
    with contextlib.suppress(ToldToFail), run.opt.gathered():
        raise ToldToFail
    assert all(is_guard(p) for _, p in run.named), "guards are back after an exception"
    for other in (torch.zeros(3), nn.Parameter(torch.zeros(3))):
        try:
            with run.opt.gathered(other):
                raise AssertionError("a tensor of somebody else was gathered")
        except ValueError as error:
            assert "not a parameter" in str(error)
    for each in (run, plain):
        each.trace.clear()
        each.train(WAYS["plain"], 2)
    assert not (found := differences(run.trace, plain.trace)), told(found)


def writing(setting):
    """With write, and only with it, rank 0's values become everybody's."""
    run = trained(setting)
    weight = run.model.blocks[1].up.weight
    with run.opt.gathered(write=True), torch.no_grad():
        for number, (_, p) in enumerate(run.named):
            p.fill_(number + 100 * run.rank)
    for number, (name, p) in enumerate(run.named):
        assert (run.opt.full_param(p) == number).all(), name
    with run.opt.gathered(weight, write=True) as (tensor,):
        tensor.fill_(3.0 + run.rank)
    assert (run.opt.full_param(weight) == 3).all(), "through the tensor"
    try:
        with run.opt.gathered(weight), torch.no_grad():
            weight.add_(1)
    except zero_c.Error as error:
        return str(error)
    raise AssertionError("a write without write=True was not noticed")


def state_dicts(setting):
    """Inside gathered() a state dict is that of stage 2, can be saved and makes a plain model; outside it raises."""
    run, plain = trained(setting), trained({}, stage=2)
    with run.opt.gathered():
        state = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
    expected = plain.model.state_dict()
    assert list(state) == list(expected)
    size = sum(tensor.nbytes for tensor in state.values())
    assert file.tell() < 2 * size + 100_000, "a tensor is saved with its own memory, not with its unit's or the ring"
    file.seek(0)
    for source in (state, torch.load(file)):
        for name, tensor in source.items():
            assert not (found := difference(tensor, expected[name])), f"{name}: {found}"
    fresh = run.case.build()
    fresh.load_state_dict(state)
    arguments, _ = run.case.batch(0, 0)
    assert not difference(fresh(*arguments).detach(), plain.model(*arguments).detach())
    messages = []
    for part in (run.model, run.model.blocks, run.model.blocks[0]):
        try:
            part.state_dict()
        except zero_c.Error as error:
            messages.append(str(error))
        else:
            raise AssertionError("state_dict() outside gathered() gave placeholders")
    return messages


def loading_outside(setting):
    """load_state_dict() outside gathered() raises, and the sharded weights are what they were."""
    run = trained(setting)
    before = [run.opt.full_param(p) for _, p in run.named]
    try:
        run.model.load_state_dict(run.case.build().state_dict())
    except (zero_c.Error, RuntimeError) as error:
        message = str(error)
    else:
        raise AssertionError("load_state_dict() outside gathered() was not noticed")
    for (name, p), value in zip(run.named, before, strict=True):
        assert not difference(run.opt.full_param(p), value), name
    return message


# ---- right, or refused: never silently wrong ---------------------------------------------


def penalty_of_gathered_weights(run):
    loss = run.loss()
    with run.opt.gathered(*[p for _, p in run.named]):
        penalty = sum(block.up.weight.square().sum() + (block.down.weight @ block.down.weight.t()).square().sum()
                      for block in run.model.blocks)
    run.backward(loss + 0.01 * penalty)


def forward_while_gathered(run):
    with run.opt.gathered(*[p for _, p in run.named]):
        run.evaluate()
        loss = run.loss()
    run.backward(loss)


def trained_while_gathered(run):
    with run.opt.gathered(*[p for _, p in run.named]):
        run.backward(run.loss())


def gathered_in_gathered(run):
    first, second = run.model.blocks[0].up.weight, run.model.blocks[1].up.weight
    with run.opt.gathered(first):
        with run.opt.gathered(second, first) as tensors:
            for tensor in tensors:
                run.saw("weight inside both", tensor)
        run.saw("weight after the inner one", first)
    run.backward(run.loss())


def functional_call_with_copies(run):
    (ids,), targets = run.case.batch(run.rank, 0)
    copies = {name: value.requires_grad_() for name, value in run.case.build().named_parameters()}
    output = functional_call(run.model, copies, (ids,))
    loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    run.saw("loss", loss)
    run.saw("gradient", torch.autograd.grad(loss, copies["blocks.1.up.weight"])[0])
    run.backward(run.loss())


def forward_hook_reads_weights(run):
    """Hooks that were added after construction run outside the optimizer's."""
    handles = [run.model.blocks[1].register_forward_hook(lambda module, *_: run.saw("after", module.up.weight)),
               run.model.blocks[1].register_forward_pre_hook(lambda module, *_: run.saw("before", module.up.weight))]
    run.backward(run.loss())
    for handle in handles:
        handle.remove()


def method_other_than_forward(run):
    """A unit whose layers are called without the unit itself."""
    block = run.model.blocks[1]
    block.forward_of_a_friend = lambda x: x + block.down(block.up(x))
    run.model.body = lambda blocks, x: blocks[2](blocks[1].forward_of_a_friend(blocks[0](x)))
    run.backward(run.loss())


def backward_pre_hook_reads_weights(run):
    handle = run.model.blocks[1].register_full_backward_pre_hook(
        lambda module, gradients: run.saw("weight before its backward", module.up.weight))
    run.backward(run.loss())
    handle.remove()


RIGHT_OR_REFUSED = {
    **{function.__name__: (function, CASES["GPT"]) for function in (
        penalty_of_gathered_weights, forward_while_gathered, trained_while_gathered, gathered_in_gathered,
        functional_call_with_copies, forward_hook_reads_weights, backward_pre_hook_reads_weights,
        method_other_than_forward)},
    **{name: (lambda run: run.backward(run.loss()), case) for name, case in UNUSUAL.items()},
}


def right_or_refused(name, setting):
    """What stage 3 may not be able to do: it gives the bits of stage 2, or raises, or shows NaN; says which."""
    use, case = RIGHT_OR_REFUSED[name]
    plain, ours = Run(case, 2, {}), Run(case, STAGE, setting)
    plain.step = ours.step = 0
    use(plain)
    try:
        use(ours)
    except (zero_c.Error, ValueError, RuntimeError) as error:
        return f"refused: {error}"
    for run in (plain, ours):
        run.see_gradients()
    if any(tensor.isnan().any() for _, tensor in ours.trace):
        return "NaN"
    assert not (found := differences(ours.trace, plain.trace)), f"silently wrong: {told(found)}"
    return "right"


# ---- what must be refused ------------------------------------------------------------------

MISUSES = {}


def misuse(function):
    MISUSES[function.__name__] = function
    return function


@misuse
def create_graph(run):
    weight = run.model.blocks[0].up.weight
    gradient, = torch.autograd.grad(run.loss(), weight, create_graph=True)
    gradient.square().sum().backward()


@misuse
def backward_with_create_graph(run):
    run.loss().backward(create_graph=True)


@misuse
def step_between_forward_and_backward(run):
    first, second = run.loss(0), run.loss(1)
    first.backward()
    run.opt.step()
    second.backward()


@misuse
def write_between_forward_and_backward(run):
    loss = run.loss()
    with run.opt.gathered(run.model.blocks[1].up.weight, write=True) as (weight,):
        weight.mul_(2)
    loss.backward()


def use(run):
    """A whole training step: wherever a misuse is noticed in it, it is noticed before it does harm."""
    run.loss().backward()
    run.opt.step()


@misuse
def another_optimizer(run):
    other = torch.optim.SGD(run.model.blocks[1].parameters(), lr=0.1)
    run.loss().backward()
    other.step()


@misuse
def another_optimizer_before_backward(run):
    torch.optim.Adam(run.model.parameters()).step()


@misuse
def step_inside_gathered(run):
    run.loss().backward()
    with run.opt.gathered(run.model.blocks[1].up.weight):
        run.opt.step()


@misuse
def replaced_unit(run):
    run.model.blocks[1] = Block()
    use(run)


def autocast_warnings():
    """What is said, and how often, of autocast over parameters of float32, and of bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        run = Run(CASES["GPT"], STAGE, {"prefetch": 1}, dtype=str(dtype).removeprefix("torch."))
        run.step = 0
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", torch.bfloat16):
                warnings.simplefilter("always")
                loss = run.loss()
            loss.backward()
            found += [str(warning.message) for warning in caught if "autocast" in str(warning.message)]
    return found


def weights_of_other_dtypes():
    """Integer weights are not sharded: every rank has rank 0's, and they are saved like buffers."""
    comm = zero_c.init()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].codes = nn.Parameter(torch.full((3,), comm.rank + 1, dtype=torch.int8), requires_grad=False)
    quantized = nn.Module()
    quantized.codes = nn.Parameter(torch.tensor([comm.rank], dtype=torch.int8), requires_grad=False)
    model.append(quantized)
    opt = make_optimizer(model, comm, STAGE, list(model)[:2])
    assert model[0].codes.tolist() == [1, 1, 1] and quantized.state_dict()["codes"].tolist() == [0]
    message = error_of(lambda: model[0].state_dict())
    with opt.gathered():
        assert model.state_dict()["0.codes"].tolist() == [1, 1, 1]
    return message


def bypassed_unit():
    """A layer whose weights its parent reads without calling it cannot be a unit."""
    comm = zero_c.init()
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 1))
    opt = make_optimizer(model, comm, STAGE, [nn.Linear], prefetch=1)
    message = error_of(lambda: model(torch.ones(1, 3, 8)).sum().backward())
    del opt
    return message


class Scale(torch.autograd.Function):
    """Reads a weight where torch's functions are not asked, as code in C++ might."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return None, (grad * x).sum(0, keepdim=True)


class Bypass(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return Scale.apply(x, self.layer.weight)


def bypassed_unseen():
    comm = zero_c.init()
    model = Bypass()
    opt = make_optimizer(model, comm, STAGE, [model.layer], prefetch=1)
    message = error_of(lambda: model(torch.ones(2, 3)).sum().backward())
    del opt
    return message


@misuse
def replaced_layer(run):
    run.model.blocks[1].up = nn.Linear(WIDTH, 2 * WIDTH)
    use(run)


@misuse
def replaced_parameter(run):
    run.model.blocks[1].up.weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH))
    use(run)


@misuse
def loaded_by_assignment(run):
    run.model.load_state_dict(run.case.build().state_dict(), assign=True)
    use(run)


@misuse
def half(run):
    run.model.half()
    use(run)


@misuse
def one_unit_in_another_dtype(run):
    run.model.blocks[1].to(torch.float64)
    use(run)


@misuse
def replaced_memory(run):
    run.model.blocks[1].up.weight.data = torch.ones(2 * WIDTH, WIDTH)
    use(run)


@misuse
def copied_model(run):
    run.model = copy.deepcopy(run.model)
    use(run)


@misuse
def penalty_on_weights(run):
    loss = run.loss() + sum(p.square().sum() for p in run.model.blocks[1].parameters())
    loss.backward()


@misuse
def weight_used_by_another_module(run):
    embedding, up = run.model.embedding, run.model.blocks[1].up
    run.model.embedding.register_forward_hook(lambda *_: embedding.weight[:3] @ torch.cat([up.weight, up.weight]).T)
    use(run)


@misuse
def copied_parameter(run):
    with torch.no_grad():
        run.kept = [p.clone() for p in run.model.blocks[1].parameters()]


@misuse
def saved_parameter(run):
    torch.save(list(run.model.blocks[1].parameters()), io.BytesIO())


@misuse
def written_by_a_list_function(run):
    with torch.no_grad():
        torch._foreach_add_(list(run.model.blocks[1].up.parameters()), 1.0)


@misuse
def written_as_a_result(run):
    weight = run.model.blocks[1].up.weight
    with torch.no_grad():
        torch.zeros(weight.shape, out=weight)


@misuse
def guard_overwritten_behind_its_class(run):
    run.model.blocks[1].up.weight.data.zero_()
    use(run)


@misuse
def guard_overwritten(run):
    with torch.no_grad():
        run.model.blocks[1].up.weight.zero_()
    use(run)


@misuse
def guard_initialised(run):
    nn.init.zeros_(run.model.blocks[1].up.bias)
    use(run)


@misuse
def guard_of_the_root_overwritten(run):
    with torch.no_grad():
        run.model.head.weight.fill_(0.5)
    use(run)


@misuse
def unfrozen_later(run):
    run.model.embedding.weight.requires_grad_(True)
    use(run)


@misuse
def parameters_added(run):
    run.opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


# After these errors nothing has changed, and training goes on.
HARMLESS = ("create_graph", "backward_with_create_graph", "copied_model", "parameters_added")


def refused(name, setting):
    """What the user is told of a misuse."""
    run = Run(CASES["GPT, frozen embeddings" if name == "unfrozen_later" else "GPT"], STAGE, setting)
    run.step = 0
    return error_of(lambda: MISUSES[name](run))


def recovers(name, setting):
    """After the error training goes on as if nothing had been."""
    plain, ours = Run(CASES["GPT"], 2, {}), Run(CASES["GPT"], STAGE, setting)
    ours.step, model = 0, ours.model
    error_of(lambda: MISUSES[name](ours))
    ours.model = model
    ours.opt.zero_grad()
    ours.trace.clear()
    found = differences(ours.train(WAYS["plain"], 2).trace, plain.train(WAYS["plain"], 2).trace)
    assert not found, told(found)


def refused_model(kind, setting):
    """What is told of a unit that gives away its weights: in the first training step, whatever comes first of it."""
    case = returning(kind) if kind in ("weight", "row", "transposed", "detached") else leaking(kind)
    run = Run(case, STAGE, setting)
    run.step = 0
    return error_of(lambda: use(run))


def forget_failed_backward():
    """torch keeps the rest of a graph whose backward raised until the thread's next backward."""
    torch.zeros(1, requires_grad=True).sum().backward()


def error_of(call):
    try:
        call()
    except (zero_c.Error, ValueError, RuntimeError) as error:
        forget_failed_backward()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def bad_construction(name):
    """What is told of arguments that cannot be meant; the model is as it was."""
    comm, model = communicator(), Gpt()
    torch.manual_seed(0)
    before = [p.detach().clone() for p in fill(model).parameters()]
    blocks = list(model.blocks)
    parameters = list(model.parameters())
    values = {
        "units: a name": {"units": ["blocks.0"]},
        "units: a number": {"units": 3},
        "units: a parameter": {"units": [blocks[0].up.weight]},
        "units: a foreign module": {"units": [*blocks, Block()]},
        "units: a class of no module": {"units": [nn.Conv2d]},
        "init: nothing is on the meta device": {"units": blocks, "init": print},
        "prefetch: negative": {"units": blocks, "prefetch": -1},
        "prefetch: a fraction": {"units": blocks, "prefetch": 1.5},
        "prefetch: a bool": {"units": blocks, "prefetch": True},
        "no module": {"params": parameters},
        "no module, groups": {"params": [{"params": parameters[:3]}, {"params": parameters[3:]}]},
        "stage": {"stage": 4},
        "units at stage 2": {"stage": 2, "units": blocks},
        "prefetch at stage 2": {"stage": 2, "prefetch": 2},
        "shared parameters": {"units": blocks, "shared_params": True},
        "a parameter of another module": {"params": [*parameters, nn.Parameter(torch.zeros(2))], "module": model},
        "units differ": {"units": blocks if comm.rank == 0 else blocks[:-1]},
    }[name]
    values = {"params": model, "stage": STAGE, "optimizer": "sgd", "lr": 0.1, "comm": comm} | values
    params = values.pop("params")
    try:
        ShardedOptimizer(params, **values)
    except (TypeError, ValueError, zero_c.Mismatch) as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("nothing was raised")
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)), "the model was changed"
    return message


def second_optimizer(setting):
    """What is told of a second optimizer for a model that has one."""
    run = trained(setting)
    return error_of(lambda: make_optimizer(run.model, run.comm, STAGE, blocks_of(run.model), **setting))


def warnings_of_own_memory(setting):
    """What this rank warns of where units cannot share memory, as an engine on such a GPU says."""
    warn = _stage3.warn_of_own_memory
    without = types.SimpleNamespace(units_share=False, gpu=0)
    _stage3.warn_of_own_memory = lambda engine: warn(engine) or warn(without)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trained(setting)
    finally:
        _stage3.warn_of_own_memory = warn
    return [str(warning.message) for warning in seen if "memory" in str(warning.message)]


# ---- what is left behind ---------------------------------------------------------------------


def graph_in_an_attribute(run):
    """The model keeps tensors with their graph, as many keep an auxiliary loss."""
    run.loss().backward()
    run.opt.step()


def forward_failed(run):
    run.model.blocks[1].block.down.register_forward_pre_hook(fail)
    with contextlib.suppress(ToldToFail):
        run.loss()


def backward_failed(run):
    run.model.blocks[1].block.down.weight.register_hook(fail)
    with contextlib.suppress(ToldToFail):
        run.backward(run.loss())


ENDS = {
    "after training": lambda run: run.train(WAYS["plain"], 2),
    "before training": lambda run: None,
    "forward only": lambda run: run.loss(),
    "backward to some": lambda run: run.backward(run.loss(), inputs=[run.model.blocks[1].block.up.weight]),
    "forward failed": forward_failed,
    "backward failed": backward_failed,
    "graph in an attribute": graph_in_an_attribute,
    "refused": lambda run: error_of(lambda: run.loss().backward(create_graph=True)),
}


def memory_returns(end, setting):
    """How many memory files an optimizer leaves when the last reference to it and to its model is gone."""
    def files():
        forget_failed_backward()
        gc.collect()
        found = 0
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{entry}").startswith("/memfd:")
        return found

    def work():
        run = Run(CASES["an attribute computed early"], STAGE, setting)
        run.step = 0
        ENDS[end](run)

    communicator()
    before = files()
    work()
    return files() - before


# ---- controls: these comparisons can fail ----------------------------------------------------


def one_bit(setting):
    """What the comparison says when one bit of one weight is another one from the start."""
    case = CASES["GPT"]

    def flipped():
        model = Gpt()
        with torch.no_grad():
            bits = model.blocks[1].up.bias.view(torch.int32)
            bits[3] ^= 1
        return model

    plain, ours = Run(case, 2, {}), Run(dataclasses.replace(case, make=flipped), STAGE, setting)
    return differences(ours.train(WAYS["plain"], 1).trace, plain.train(WAYS["plain"], 1).trace)


def without_triggers(name, setting):
    """Training in which no unit is told of its backward, because its outputs have lost their hooks.

    Returns how many hooks were taken away, and what came of it.
    """
    case = CASES[name]
    plain, ours = Run(case, 2, {}), Run(case, STAGE, setting)
    taken = []

    def silence(module, arguments, output):
        for tensor in output if isinstance(output, tuple) else (output,):
            hooks = getattr(tensor, "_backward_hooks", None) or {}
            taken.append(len(hooks))
            hooks.clear()

    for unit in case.unit_modules(ours.model):
        unit.register_forward_hook(silence)
    plain.train(WAYS["plain"], 1)
    try:
        found = differences(ours.train(WAYS["plain"], 1).trace, plain.trace)
    except (zero_c.Error, RuntimeError) as error:
        forget_failed_backward()
        return sum(taken), f"raised {type(error).__name__}: {error}"
    return sum(taken), f"differs: {told(found)}" if found else "the same bits"
