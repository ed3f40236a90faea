"""Models for stage 3: every way a unit's weights, inputs and outputs can meet autograd, as small as it can be had.

A case is a model, the units whose parameters are gathered together, and what a
rank feeds it at a step.  Everything here is plain torch; `CASES` holds what must
train with the bits of stage 2, `UNUSUAL` what may be refused instead, `Returns`
and `Leaks` what must be.
"""

import collections
import dataclasses
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH, HEADS, ROWS = 31, 6, 16, 2, 2


def tokens(rank, step):
    """(arguments of the model, targets): rows of tokens."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return (rows[:, :-1],), rows[:, 1:]


def images(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(4, 3, 8, 8, generator=generator),), torch.randint(0, 5, (4,), generator=generator)


def vectors(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(4, WIDTH, generator=generator),), torch.randint(0, 5, (4,), generator=generator)


def routed_tokens(rank, step):
    """Tokens, and which experts take them: another choice, and another number of them, on each rank."""
    arguments, targets = tokens(rank, step)
    routes = ([0, 1, 1, 2], [3, 1], [2, 0, 3], [])
    return (*arguments, routes[(rank + step) % len(routes)]), targets


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable  # () -> the module; build() seeds it
    units: Callable | None  # module -> units=; None: left to the optimizer
    batch: Callable = tokens

    def build(self, dtype=None):
        """The module, with the same weights at every call and on every rank."""
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm
            torch.manual_seed(7)
            model = self.make()
        return model if dtype is None else model.to(dtype)

    def unit_modules(self, model):
        return self.units(model) if self.units is not None else None

    def loss(self, model, rank, step):
        arguments, targets = self.batch(rank, step)
        return functional.cross_entropy(self.output(model, arguments).flatten(0, -2), targets.flatten())

    def output(self, model, arguments):
        dtype = next(model.parameters()).dtype
        return model(*(a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments)).float()


def blocks_of(model):
    return list(model.blocks)


# ---- transformers ------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = functional.dropout(functional.gelu(self.up(self.norm2(x))), self.dropout, self.training)
        return x + self.down(y)


def in_turn(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Gpt(nn.Module):
    """Embeddings, blocks, a head; `body(blocks, x)` is how the blocks are run."""

    def __init__(self, make_block=Block, body=in_turn, count=4):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(count))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.body = body

    def forward(self, ids, *more):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.body(self.blocks, x, *more)))


def tied():
    model = Gpt()
    model.head.weight = model.embedding.weight
    return model


def frozen_embeddings():
    """Nothing that enters the first unit needs a gradient."""
    model = Gpt()
    model.embedding.requires_grad_(False)
    model.position.requires_grad_(False)
    return model


def mostly_frozen():
    """Units with a few trained parameters, one with none, one frozen weight beside its trained bias."""
    model = Gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name and not name.startswith("blocks.2"))
    model.blocks[3].up.weight.requires_grad_(False)
    return model


def mixed_dtypes():
    """bf16 layers and fp32 norms in each unit."""
    class Mixed(Block):
        def forward(self, x):
            x = x + self.attention(self.norm1(x.float()).bfloat16())
            return x + self.down(functional.gelu(self.up(self.norm2(x.float()).bfloat16())))

    model = Gpt(Mixed).bfloat16()
    for part in model.blocks.modules():
        if isinstance(part, nn.LayerNorm):
            part.float()
    return model


# ---- checkpointing -------------------------------------------------------------


def around(use_reentrant):
    def body(blocks, x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return body


def over_several(use_reentrant):
    """One checkpoint over three units, a second over two, a unit without."""
    def body(blocks, x):
        for part in (blocks[:3], blocks[3:5]):
            x = checkpoint(lambda y, part=part: in_turn(part, y), x, use_reentrant=use_reentrant)
        return blocks[5](x)

    return body


class Inside(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.last = Block(), nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


# ---- other layers ----------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, fan_in, fan_out, stride=1):
        super().__init__()
        self.first = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(fan_out), nn.BatchNorm2d(fan_out)
        self.shortcut = nn.Identity()
        if fan_in != fan_out or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Residual(4, 4), Residual(4, 6, 2), Residual(6, 6), Residual(6, 8, 2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(in_turn(self.blocks, self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """The layers are the units: LSTM and GRU keep lists of their Parameters of their own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([
            nn.LSTM(WIDTH, WIDTH, 1, batch_first=True), nn.LSTM(WIDTH, 9, 2, batch_first=True, bidirectional=True),
            nn.GRU(18, WIDTH, 1, batch_first=True)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class CrossBlock(nn.Module):
    """Attention to itself and to a memory, whose gradient comes from all blocks."""

    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=WIDTH + 3, vdim=WIDTH + 3)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, memory):
        x = x + self.own(x, x, x, need_weights=False)[0]
        return self.norm(x + self.cross(x, memory, memory)[0])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.widen = nn.Linear(WIDTH, WIDTH + 3)
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        memory = self.widen(self.encoder(x))
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x)


class Normed(nn.Module):
    """A layer whose weight is computed from its parameters before each use."""

    KINDS = ("new", "old", "spectral", "orthogonal")

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        make = {"new": nn.utils.parametrizations.weight_norm, "old": nn.utils.weight_norm,
                "spectral": nn.utils.parametrizations.spectral_norm,
                "orthogonal": nn.utils.parametrizations.orthogonal}
        self.first = make[kind](self.first)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


# ---- what units give back -----------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor
    note: str = "no tensor"


Pair = collections.namedtuple("Pair", "hidden extra")


class Gives(nn.Module):
    """A unit that gives its output in one of many forms."""

    KINDS = ("tuple", "dict", "list", "dataclass", "view", "in place", "named tuple", "slice", "parts",
             "pass-through", "pass-through")

    def __init__(self, kind):
        super().__init__()
        self.block, self.gate = Block(), nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x, kept=None):
        y = self.block(x)
        extra = self.gate(y).square().mean()
        if self.kind == "dict":
            return {"hidden": y, "deep": [{"extra": extra}, None, 3]}
        if self.kind == "dataclass":
            return Result(y, extra)
        if self.kind == "view":
            return y.transpose(0, 1)
        if self.kind == "slice":
            return self.gate(torch.cat([y, y], 1))[:, :y.shape[1]]
        if self.kind == "parts":
            return self.gate(y).chunk(2, -1)
        if self.kind == "pass-through":
            return y, kept
        return {"tuple": (y, extra), "list": [y, extra], "named tuple": Pair(y, extra), "in place": y}[self.kind]


def one_of_each(kind_of_block):
    """Makes blocks of the class, one of each of its kinds in turn."""
    kinds = iter(kind_of_block.KINDS)
    return lambda: kind_of_block(next(kinds))


class GivesAll(Gpt):
    """What the caller does with each form: views and outputs are changed in place, one input passes through all."""

    def __init__(self):
        super().__init__(one_of_each(Gives), count=len(Gives.KINDS))

    def forward(self, ids):
        x = self.embedding(ids)
        extra, kept = 0.0, None
        for block in self.blocks:
            if block.kind in ("tuple", "list", "named tuple"):
                x, more = block(x)
                extra = extra + more
            elif block.kind == "dict":
                given = block(x)
                x, extra = given["hidden"], extra + given["deep"][0]["extra"]
            elif block.kind == "dataclass":
                given = block(x)
                x, extra = given.hidden, extra + given.extra
            elif block.kind == "view":
                x = block(x)
                x += 1
                x = x.transpose(0, 1)
            elif block.kind == "slice":
                x = functional.leaky_relu_(block(x), 0.3)
            elif block.kind == "in place":
                x = block(x)
                x.mul_(1.1)
                x = x + functional.relu(x.clone(), inplace=True)
            elif block.kind == "parts":
                x = torch.cat([part.sin() for part in block(x)], -1)
            else:
                kept = x * 1.0 if kept is None else kept
                x, kept = block(x, kept)
                x = x + kept
        return self.head(self.norm(x)) + extra


class WritesInput(nn.Module):
    """Gives nothing back: what it computes is in its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x += torch.tanh(self.layer(x.clone()))


def called_for_effect(blocks, x):
    x = x * 1.0
    for number, block in enumerate(blocks):
        if number % 2:
            block(x=x)
        else:
            block(x)
    return x


class WritesPart(nn.Module):
    """Writes a slice of its input and gives a view of the whole."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x[:, 1:] += torch.tanh(self.layer(x[:, 1:].clone()))
        return x[:, :]


def changed_between(blocks, x):
    x = x * 1.0
    for block in blocks:
        x = block(x)
        x.mul_(1.01)
    return x


class KeepsEarly(nn.Module):
    """A tensor leaves by an attribute; it is computed before the output, so the output's gradient comes first."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        self.kept = self.block.up(x).square().mean()
        return self.block(x)


def with_kept(blocks, x):
    total = 0.0
    for block in blocks:
        x = block(x)
        total = total + block.kept
    return x * (1 + total)


class GivesCopy(nn.Module):
    """A copy of a weight may leave the unit."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x), self.block.up.weight * 1.0


def with_weights(blocks, x):
    total = 0.0
    for block in blocks:
        x, weight = block(x)
        total = total + weight.square().sum()
    return x * (1 + 0.001 * total)


# ---- how units are called, and what they hold -----------------------------------------


def several_places(call):
    def body(blocks, x):
        for number in (0, 1, 2, 0, 1, 0):
            x = call(blocks[number], x)
        return x

    return body


def branches(blocks, x):
    made = [block(x) for block in blocks]
    return made[2] * made[0] + made[1] * made[3]


def random_order(blocks, x):
    """Another order at every call and on every rank, with repetitions and omissions."""
    for number in torch.randint(0, len(blocks), (6,)).tolist():
        x = blocks[number](x)
    return x


def one_without_gradient(blocks, x):
    x = blocks[0](x)
    with torch.no_grad():
        x = blocks[1](x)
    return in_turn(blocks[2:], x)


def to_experts(blocks, x, route):
    return x + sum((blocks[number](x) for number in route), torch.zeros(()))


class Solves(torch.autograd.Function):
    """Runs a unit without a graph and differentiates it in its own backward."""

    @staticmethod
    def forward(context, x, unit):
        context.unit = unit
        context.save_for_backward(x)
        return unit(x.detach())

    @staticmethod
    def backward(context, grad):
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = context.unit(x)
        return torch.autograd.grad(y, x, grad)[0], None


def some_solved(blocks, x):
    for number, block in enumerate(blocks):
        x = Solves.apply(x, block) if number in (1, 2) else block(x)
    return x


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=3):
        return self.layer(x if depth == 0 else torch.tanh(self(x, depth - 1)))


class Outer(nn.Module):
    """A unit with units in it, and with parameters that it uses before, between and after them."""

    def __init__(self, use_reentrant=None, shares=False):
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.use_reentrant = use_reentrant
        if shares:
            self.inner[1].attention.out.weight = self.layer.weight

    def forward(self, x):
        x = self.layer(x)
        for block in self.inner:
            y = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
            x = y * self.scale
        return self.layer(x)


def outer_and_inner(model):
    return [unit for block in model.blocks for unit in (block, *block.inner)]


def shared_weight():
    """One weight in two units, and one weight in two layers of a unit."""
    model = Gpt()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[1].norm2.weight = model.blocks[1].norm1.weight
    return model


class Odd(nn.Module):
    """0-d, empty, odd, unused and non-contiguous parameters; a list and a dict of them."""

    def __init__(self):
        super().__init__()
        self.scalar, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.wide, self.back = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.turned = nn.Parameter(torch.randn(WIDTH, 5).t())
        self.many = nn.ParameterList([torch.randn(WIDTH), torch.randn(1)])
        self.named = nn.ParameterDict({"one": torch.randn(WIDTH, 1)})

    def forward(self, x):
        y = self.back(torch.tanh(self.wide(x))) * self.scalar + self.empty.sum()
        y = y + functional.linear(x, self.turned).sum(-1, keepdim=True) * self.many[0] + self.many[1]
        return x + y * torch.sigmoid(x @ self.named["one"])


def hooked():
    """Hooks that the model brings along, at units and in them: they use weights and change inputs and outputs."""
    model = Gpt()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda unit, arguments: (arguments[0] + unit.up.bias.mean(),))
        block.register_forward_hook(lambda unit, arguments, output: output * (1 + unit.down.bias.square().mean()))
        block.attention.register_full_backward_hook(
            lambda layer, inputs, outputs: (inputs[0] * (1 + layer.out.bias.square().mean()),))
    return model


def one_block_thrice():
    model = Gpt()
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], model.blocks[0], model.blocks[0]])
    return model


def inner_from_outside(blocks, x):
    """A unit within a unit, also called by the model itself, before and after the unit around it."""
    x = blocks[0].inner[1](x)
    x = in_turn(blocks, x)
    return blocks[1].inner[0](blocks[0].inner[1](x))


class Forwards(nn.Module):
    """A wrapper that hands what it does not have on to what is inside."""

    def __init__(self):
        super().__init__()
        self.inside = Block()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x):
        return self.inside(x) + self.up.bias.sum()


def layers(count):
    """A Sequential of layers with and without parameters, as most models of a tutorial are."""
    parts = []
    for _ in range(count):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 5))


CASES = {
    "GPT": Case(Gpt, blocks_of),
    "GPT, units by default": Case(Gpt, None),
    "GPT, units by class": Case(Gpt, lambda model: [Block]),
    "GPT, embeddings and head are units": Case(
        Gpt, lambda model: [model.embedding, model.position, *model.blocks, model.norm, model.head]),
    "GPT, the model among the units": Case(Gpt, lambda model: [model, *model.blocks]),
    "GPT, tied": Case(tied, blocks_of),
    "GPT, tied units": Case(tied, lambda model: [model.embedding, *model.blocks, model.head]),
    "GPT, frozen embeddings": Case(frozen_embeddings, blocks_of),
    "GPT, mostly frozen": Case(mostly_frozen, blocks_of),
    "GPT, two dtypes": Case(mixed_dtypes, blocks_of),
    "GPT, one unit": Case(lambda: Gpt(count=1), blocks_of),
    "Sequential": Case(lambda: layers(3), None, vectors),
    "Sequential, units without parameters": Case(lambda: layers(3), list, vectors),
    "sixteen units": Case(lambda: layers(16), lambda model: [nn.Linear], vectors),
    "checkpoint around, reentrant": Case(lambda: Gpt(body=around(True)), blocks_of),
    "checkpoint around": Case(lambda: Gpt(body=around(False)), blocks_of),
    "checkpoint around, dropout, reentrant": Case(lambda: Gpt(lambda: Block(0.2), around(True)), blocks_of),
    "checkpoint around, dropout": Case(lambda: Gpt(lambda: Block(0.2), around(False)), blocks_of),
    "checkpoint inside, reentrant": Case(lambda: Gpt(lambda: Inside(True)), blocks_of),
    "checkpoint inside": Case(lambda: Gpt(lambda: Inside(False)), blocks_of),
    "checkpoint over several, reentrant": Case(lambda: Gpt(body=over_several(True), count=6), blocks_of),
    "checkpoint over several": Case(lambda: Gpt(body=over_several(False), count=6), blocks_of),
    "checkpoint in checkpoint, reentrant": Case(lambda: Gpt(lambda: Inside(True), around(True), 3), blocks_of),
    "checkpoint in checkpoint": Case(lambda: Gpt(lambda: Inside(False), around(False), 3), blocks_of),
    "ResNet": Case(ResNet, lambda model: [model.stem, *model.blocks], images),
    "ResNet, channels last": Case(lambda: ResNet().to(memory_format=torch.channels_last),
                                  lambda model: [model.stem, *model.blocks], images),
    "LSTM and GRU": Case(Recurrent, lambda model: [model.embedding, *model.layers, model.head]),
    "attention layers": Case(Transformer, lambda model: [*model.blocks, model.encoder]),
    "weight norms": Case(lambda: Gpt(one_of_each(Normed)), blocks_of),
    "outputs of all kinds": Case(GivesAll, blocks_of),
    "no output": Case(lambda: Gpt(WritesInput, called_for_effect), blocks_of),
    "input written in part": Case(lambda: Gpt(WritesPart, changed_between), blocks_of),
    "an attribute computed early": Case(lambda: Gpt(KeepsEarly, with_kept), blocks_of),
    "a copy of a weight": Case(lambda: Gpt(GivesCopy, with_weights), blocks_of),
    "several places": Case(lambda: Gpt(body=several_places(lambda block, x: block(x)), count=3), blocks_of),
    "several places, reentrant": Case(lambda: Gpt(body=several_places(
        lambda block, x: checkpoint(block, x, use_reentrant=True)), count=3), blocks_of),
    "several places, checkpoint": Case(lambda: Gpt(body=several_places(
        lambda block, x: checkpoint(block, x, use_reentrant=False)), count=3), blocks_of),
    "parallel branches": Case(lambda: Gpt(body=branches), blocks_of),
    "random order": Case(lambda: Gpt(body=random_order), blocks_of),
    "one unit without gradient": Case(lambda: Gpt(body=one_without_gradient), blocks_of),
    "experts": Case(lambda: Gpt(body=to_experts), blocks_of, routed_tokens),
    "solved in backward": Case(lambda: Gpt(body=some_solved), blocks_of),
    "a unit that calls itself": Case(lambda: Gpt(CallsItself), blocks_of),
    "nested": Case(lambda: Gpt(Outer, count=2), outer_and_inner),
    "nested, reentrant": Case(lambda: Gpt(lambda: Outer(True), count=2), outer_and_inner),
    "nested, checkpoint": Case(lambda: Gpt(lambda: Outer(False), count=2), outer_and_inner),
    "nested, weight of the outer one in the inner": Case(lambda: Gpt(lambda: Outer(shares=True), count=2),
                                                         outer_and_inner),
    "nested, inner unit called from outside": Case(lambda: Gpt(Outer, inner_from_outside, 2), outer_and_inner),
    "one block thrice": Case(one_block_thrice, lambda model: [model.blocks[0], model.blocks[1]]),
    "hooks of the model's own": Case(hooked, blocks_of),
    "shared weight": Case(shared_weight, blocks_of),
    "odd parameters": Case(lambda: Gpt(Odd), blocks_of),
    "forwarded attributes": Case(lambda: Gpt(Forwards), blocks_of),
}


# ---- what may be refused -----------------------------------------------------------


class CallsNeighbour(Block):
    """Calls a unit that is not in it."""

    def forward(self, x):
        y = super().forward(x)
        return y + self.neighbour[0](y) if self.neighbour else y


def neighbours():
    model = Gpt(CallsNeighbour)
    for block, other in zip(model.blocks, model.blocks[1:], strict=False):
        block.neighbour = [other]
    model.blocks[-1].neighbour = []
    return model


def output_layers(model):
    """These modules only hold weights: the attention around them never calls them."""
    return [attention.out_proj for block in model.blocks for attention in (block.own, block.cross)]


UNUSUAL = {
    "units call their neighbours": Case(neighbours, blocks_of),
    "units that are never called": Case(Transformer, output_layers),
}


# ---- what must be refused ----------------------------------------------------------


class Returns(nn.Module):
    """A unit whose own weight leaves it: its memory is another unit's soon."""

    KINDS = ("weight", "row", "transposed", "detached")

    def __init__(self, kind):
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x):
        weight = self.block.up.weight
        leaving = {"weight": weight, "row": weight[3], "transposed": weight.t(), "detached": weight.detach()}
        return self.block(x), leaving[self.kind]


class Leaks(nn.Module):
    """A unit that hands on, by an attribute, what needs its weights after its output's gradient was computed."""

    KINDS = ("computed after", "leaf used after", "view")

    def __init__(self, kind):
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x):
        y = self.block(x)
        if self.kind == "computed after":
            self.kept = self.block.up(y).square().mean()
        elif self.kind == "leaf used after":
            self.kept = (self.block.norm1.weight * y).square().mean()
        else:
            self.kept = self.block.up.weight.t()
        return y


def with_leaked(blocks, x):
    total = 0.0
    for block in blocks:
        x = block(x)
        total = total + block.kept.square().sum()
    return x * (1 + 0.001 * total)


def returning(kind):
    return Case(lambda: Gpt(lambda: Returns(kind), with_weights), blocks_of)


def leaking(kind):
    return Case(lambda: Gpt(lambda: Leaks(kind), with_leaked), blocks_of)
