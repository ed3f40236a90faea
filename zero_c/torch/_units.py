"""Stage 3: which modules are units, and which unit each parameter belongs to."""

import torch
from torch.nn.utils.parametrize import ParametrizationList

from ._arguments import DTYPES


class Unit:
    """Parameters that are gathered together, around the forward and the backward of one module."""

    def __init__(self, index, name, module, level):
        self.index, self.name, self.module, self.level = index, name, module, level
        self.members = []  # (name, parameter), in the order of registration
        self.window = None  # see Windows
        self.first_address = self.last_address = 0
        # How it is used just now; see _stage3.py.
        self.running = 0  # calls of forward
        self.backwards = {}  # graph task -> number of the first node of the call whose backward is under way
        self.is_open = False
        self.has_run = False  # ever

    @property
    def resident(self):
        """It has memory of its own, and stays gathered from one step to the next."""
        return self.level == 0

    def __repr__(self):
        return f"unit '{self.name}'" if self.level else "the root unit"


def choose(model, units):
    """The modules of `units` (modules or classes; None: by default) as [(name, module)], in the order of registration."""
    named = list(model.named_modules())
    if units is None:
        wanted = {id(module) for module in default_units(model)}
    else:
        wanted = set()
        known = {id(module) for _, module in named}
        if isinstance(units, (torch.nn.Module, type)):
            units = [units]
        elif not hasattr(units, "__iter__"):
            raise TypeError(f"units is a {type(units).__name__}; needed: a list of modules of the model, or of classes")
        for unit in units:
            if isinstance(unit, type) and issubclass(unit, torch.nn.Module):
                found = [module for _, module in named if isinstance(module, unit)]
                if not found:
                    raise ValueError(f"units: the model has no module of class {unit.__name__}")
                wanted |= {id(module) for module in found}
            elif isinstance(unit, torch.nn.Module):
                if id(unit) not in known:
                    raise ValueError(f"units: this {type(unit).__name__} is not a part of the model")
                wanted.add(id(unit))
            else:
                raise TypeError(f"units must be modules of the model or classes of them, got {type(unit).__name__}")
    return [(name, module) for name, module in named if id(module) in wanted and module is not model]


def default_units(model):
    """Children of the longest list of layers; without one, the model's own children."""
    best = []
    for module in model.modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and not isinstance(module, ParametrizationList):
            layers = [child for child in module.children() if has_parameters(child)]
            if len(layers) > len(best):
                best = layers
    return best or called_children(model)


def called_children(module):
    """A module's children that have parameters; a list or dict of modules is never called, its entries are."""
    found = []
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            found += called_children(child)
        elif has_parameters(child):
            found.append(child)
    return found


def has_parameters(module):
    return next(module.parameters(), None) is not None


def assign(model, chosen):
    """The units with their members; the first is the root, which has what no other unit has.

    A parameter belongs to the innermost unit around it; one that several units
    reach belongs to the innermost unit around all of these, so that it is there
    whenever one of them runs.
    """
    by_module = {id(module): number for number, (_, module) in enumerate(chosen, 1)}
    chains = {}  # id(parameter) -> the numbers of all units around every place of it, outermost first
    found = {}   # id(parameter) -> (name, parameter)
    depth = {0: 0}
    seen = set()

    def visit(module, name, chain):
        number = by_module.get(id(module))
        if number is not None:
            if number in chain:
                raise ValueError(f"module '{name}' contains itself")
            chain = (*chain, number)
            depth[number] = max(depth.get(number, 0), len(chain) - 1)
        if (id(module), chain) in seen:
            return
        seen.add((id(module), chain))
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.dtype not in DTYPES:
                continue  # quantized weights stay where they are
            found.setdefault(id(parameter), (f"{name}.{key}" if name else key, parameter))
            around = chains.get(id(parameter))
            chains[id(parameter)] = chain if around is None else common(around, chain)
        for key, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{key}" if name else key, chain)

    visit(model, "", (0,))
    units = [Unit(0, "", model, 0)] + [Unit(number, name, module, depth[number])
                                       for number, (name, module) in enumerate(chosen, 1)]
    for identity, chain in chains.items():
        units[chain[-1]].members.append(found[identity])
    return units


def common(first, second):
    """The part in which two chains agree, from the root on."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]


def layers_of(unit):
    """The modules below a unit's that hold parameters of it."""
    own = {id(parameter) for _, parameter in unit.members}
    return [module for module in unit.module.modules() if module is not unit.module
            and any(id(parameter) in own for parameter in module._parameters.values())]


def tree(model):
    """Where every module below the model is kept: [(dict that holds it, key, module, name)]."""
    return [(module._modules, key, child, f"{name}.{key}" if name else key)
            for name, module in model.named_modules() for key, child in module._modules.items() if child is not None]
