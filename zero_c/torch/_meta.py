"""Stage 3 for models that no rank can hold: built on the meta device, filled unit by unit.

Parameters on the meta device have a shape and no values.  Each is replaced by one
that shows NaN, as sharded parameters do; then, one unit at a time, there is
memory for the unit's parameters, they get their values, the values go to the
shards, and the memory is given back.  Values come from safetensors files, from
the caller's function, or from the modules' own `reset_parameters()`.

Modules are initialised children first, in the order of registration, which is the
order in which constructors initialise them: where `reset_parameters()` is all
that a constructor does to its values, they are the same for the same seed as on
the CPU.  Every rank draws all values, so that generators stay alike; rank 0's
count.  The module's code, or the caller's function, may fail on one rank: after
each module the ranks tell one another, because the next thing that they do
together, loading its unit, would wait for that rank.
"""

from reprlib import repr as shown  # short, whatever a file holds

import torch

from zero_c._checkpoint import collective
from zero_c._core import CheckpointError

from . import _agree
from ._arguments import dense_strides
from ._guard import nan_guard
from ._place import flat


class Replacement:
    """The module's meta parameters and buffers give way to ones on the CPU; undo() puts them back."""

    def __init__(self, module):
        self.new, self.strides, self._old = {}, {}, []
        self.buffers = set()  # ids of the new ones
        for part in module.modules():
            for key, old in list(part._parameters.items()):
                if old is not None and old.is_meta:
                    self._old.append((part, key, old))
                    setattr(part, key, self._parameter(old))  # not _parameters[key]: recurrent layers keep lists of theirs
            for key, old in list(part._buffers.items()):
                if old is not None and old.is_meta:
                    self._old.append((part, key, old))
                    new = unset(torch.empty_strided(old.shape, old.stride(), dtype=old.dtype))
                    setattr(part, key, new)
                    self.buffers.add(id(new))

    def _parameter(self, old):
        if id(old) not in self.new:
            guard = nan_guard(old) if old.numel() else torch.empty(old.shape, dtype=old.dtype)
            new = torch.nn.Parameter(guard, old.requires_grad)
            new.__dict__.update(old.__dict__)
            self.new[id(old)] = new
            self.strides[id(new)] = tuple(dense_strides(old))
        return self.new[id(old)]

    def follow(self, groups, names, units):
        """Groups and names with the new parameters; the members of the units are exchanged in place."""
        for unit in units:
            unit.members = [(name, self.new.get(id(tensor), tensor)) for name, tensor in unit.members]
        groups = [{**group, "params": [self.new.get(id(tensor), tensor) for tensor in group["params"]]} for group in groups]
        return groups, {id(self.new[old]) if old in self.new else old: name for old, name in names.items()}

    def undo(self):
        for part, key, old in self._old:
            setattr(part, key, old)


def unset(tensor):
    """Fills a tensor with what tells that nobody has given it values."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def is_unset(tensor):
    """Whether some element still is as unset() left it; never of bool tensors, where that cannot be told."""
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor).any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


class Files:
    """Tensors by name in safetensors files."""

    def __init__(self, paths):
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("weights= reads safetensors files: pip install safetensors") from error
        self._where = {}
        for path in paths:
            file = safe_open(str(path), framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118
                if name in self._where:
                    raise CheckpointError(f"'{name}' is in two of the files; give those of one model")
                self._where[name] = file

    def __contains__(self, name):
        return name in self._where

    def check(self, module):
        """The files hold the module or a part of it, and nothing else, in its shapes."""
        tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
        strange = next((name for name in self._where if name not in tensors), None)
        if strange is not None or not self._where:
            fault = f"{shown(strange)} of the files is not in the model" if self._where else "the files have no tensor"
            ours, theirs = (", ".join(list(names)[:3]) or "none" for names in (tensors, self._where))
            raise CheckpointError(f"{fault}. Names of the files begin with: {theirs}; those of the model with: {ours}. Write a file with the "
                                  f"model's names (without a prefix such as 'module.', and without tensors that it has not); what the "
                                  f"file leaves out is initialised")
        for name, file in self._where.items():
            tensor, found = tensors[name], file.get_slice(name)
            if tuple(found.get_shape()) != tuple(tensor.shape):
                raise CheckpointError(f"'{name}' is {tuple(found.get_shape())} in the file and {tuple(tensor.shape)} in the model")
            if tensor.is_floating_point() and not found.get_dtype().startswith(("F", "BF")):
                raise CheckpointError(f"'{name}' is {found.get_dtype()} in the file and {str(tensor.dtype).removeprefix('torch.')} in the "
                                      f"model; whole numbers (of a quantised model?) are no weights as they are")

    def read(self, name, like):
        """The tensor, in the dtype of `like`."""
        return self._where[name].get_tensor(name).to(like.dtype)


def open_files(comm, weights, module):
    """The files of `weights`, a path or several, checked against the module: on rank 0, whose error all raise. Collective."""
    return collective(comm, "weights=", lambda: open_here(weights, module) if comm.rank == 0 else None)


def open_here(weights, module):
    if isinstance(weights, (str, bytes)) or hasattr(weights, "__fspath__"):
        weights = [weights]
    files = Files([path.decode() if isinstance(path, bytes) else path for path in weights])
    files.check(module)
    return files


def is_on_meta(module):
    """Whether some parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class Filler:
    """Gives the parameters of a module their values, and these to the engine.

    index: id(parameter) -> the engine's index; strides: id(parameter) -> strides of its values; replaced: what was on
    the meta device, or None.
    """

    def __init__(self, engine, comm, units, index, strides, replaced, weights, files, init):
        self.engine, self.comm, self.units, self.index, self.strides = engine, comm, units, index, strides
        self.replaced, self.init = replaced is not None, init
        self.empty = set(replaced.strides) | replaced.buffers if replaced is not None else set()
        self.names = {}  # id(parameter or buffer) -> all its names in the model
        for module_name, part in units[0].module.named_modules(remove_duplicate=False):
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    self.names.setdefault(id(tensor), []).append(f"{module_name}.{key}" if module_name else key)
        self.files = files  # on rank 0
        self.saved = self._agree_on_saved() if weights is not None else {}
        # Units inside units get their values with the outer one, whose reset_parameters() may give them some.
        self.by_module = {id(unit.module): unit for unit in units[1:] if unit.level == 1}
        self.rooted = {id(parameter) for _, parameter in units[0].members}
        self.loaded = set()  # ids of parameters whose values are in the shards
        self.done = set()  # modules that are initialised
        self.initialised = set()  # ids of their parameters and buffers

    def _agree_on_saved(self):
        """id -> the name under which the files have it; rank 0 looks."""
        found = {identity: next((name for name in names if self.files is not None and name in self.files), None)
                 for identity, names in self.names.items()}
        flags = torch.tensor([name is not None for name in found.values()], dtype=torch.uint8)
        self.comm.broadcast(flags, 0)
        return {identity: name for (identity, name), there in zip(found.items(), flags.tolist(), strict=True) if there}

    def fill(self):
        with torch.no_grad():
            self._unit(self.units[0])
            self._together("the model", self._check_all)

    def _together(self, of, call):
        """call() on every rank. Where it raises on some, these raise that and the others Mismatch. Collective."""
        return _agree.checked(self.comm, f"initialisation of {of}", lambda: (["no error"], call()), "model, init= and memory for it")

    def _check_all(self):
        """After all units: nothing was written where nobody looked, and nothing was left out."""
        for unit in self.units:
            for name, parameter in unit.members:
                if id(parameter) in self.empty and parameter.numel() and not torch.isnan(parameter.data).all():
                    raise ValueError(f"parameter '{name}' was written by the initialisation of another module, after its "
                                     f"values had gone to the shards: pass init=, a function that initialises the "
                                     f"parameters and buffers of one module")
        for buffer in self.units[0].module.buffers():
            if id(buffer) in self.empty and id(buffer) not in self.saved and is_unset(buffer):
                raise ValueError(f"buffer '{self._name(buffer)}' was on the meta device and has no values: nothing "
                                 f"initialises it; register it outside torch.device('meta'), or set it in init=")

    def _check_set(self, parameters):
        for parameter in parameters:
            if is_unset(parameter.data):
                raise ValueError(f"parameter '{self._name(parameter)}' has no values after initialisation: "
                                 f"{'init=' if self.init else 'reset_parameters()'} left it out, or made NaN")

    def _name(self, tensor):
        return self.names[id(tensor)][0]

    def _unit(self, unit):
        """Memory for a unit's parameters, values, and away with it."""
        members = [parameter for _, parameter in unit.members] if unit.resident else [
            parameter for parameter in unit.module.parameters() if id(parameter) not in self.rooted]
        missing = [parameter for parameter in members if id(parameter) in self.empty
                   and id(parameter) not in self.saved and id(parameter) not in self.loaded and parameter.numel()]
        guards = [parameter.data for parameter in missing]
        if missing:
            self._together(f"'{self._name(missing[0])}' and its unit", lambda: self._make_room(missing))
        self._module(unit.module, inside=unit)
        if missing:
            self._together(f"'{self._name(missing[0])}' and its unit", lambda: self._check_set(missing))
        for parameter, guard in zip(missing, guards, strict=True):
            self.engine.load_param(self.index[id(parameter)], flat(parameter.data, self.strides[id(parameter)]))
            parameter.data = guard
        for parameter in members:
            if id(parameter) in self.saved and id(parameter) not in self.loaded:
                self._load(parameter)
        self.loaded |= {id(parameter) for parameter in members}

    def _make_room(self, parameters):
        for parameter in parameters:
            parameter.data = unset(torch.empty_strided(parameter.shape, self.strides[id(parameter)], dtype=parameter.dtype))

    def _load(self, parameter):
        values = self._read(parameter)
        self.engine.load_param(self.index[id(parameter)], None if values is None else flat(values, self.strides[id(parameter)]))

    def _read(self, tensor):
        """What the files have of it, on rank 0; None on the others. An error of the files is that of all. Collective."""
        def read():
            return self.files.read(self.saved[id(tensor)], tensor) if self.comm.rank == 0 else None

        gone = "" if self.replaced else " (the module's own values are gone: build it anew)"
        return collective(self.comm, f"weights=, '{self._name(tensor)}'{gone}", read)

    def _module(self, module, inside=None):
        """Initialises a module and what is below it, children first."""
        if id(module) in self.done:
            return
        unit = self.by_module.get(id(module))
        if unit is not None and unit is not inside:
            return self._unit(unit)
        self.done.add(id(module))
        for child in module.children():
            self._module(child)
        own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) in self.saved:
                values = self._read(buffer)
                if values is not None:
                    buffer.copy_(values)
        fresh = [tensor for tensor in own if id(tensor) in self.empty and id(tensor) not in self.saved]
        if fresh:
            self._together(f"'{self._name(fresh[0])}' and its module", lambda: self._initialise(module, own, fresh[0]))
            self.initialised |= {id(tensor) for tensor in fresh}

    def _initialise(self, module, own, tensor):
        """Values for the module's `own` tensors; `tensor` is one of those that have none."""
        # What the files have is not this module's to draw, nor a weight that an earlier module has initialised and that
        # is tied to it now, as a constructor ties it afterwards: these are drawn, and lost.
        tied = [tensor for tensor in own if id(tensor) in self.initialised
                or (id(tensor) in self.saved and id(tensor) in self.strides)]
        kept = [tensor.data for tensor in tied]
        for other in tied:
            other.data = torch.empty_strided(other.shape, self.strides[id(other)], dtype=other.dtype)
        with torch.device("cpu"):
            self._draw(module, tensor)
        for other, values in zip(tied, kept, strict=True):
            other.data = values

    def _draw(self, module, tensor):
        if self.init is not None:
            return self.init(module)
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            raise ValueError(f"'{self._name(tensor)}' was on the meta device and {type(module).__name__} has no "
                             f"reset_parameters(): pass init=, a function that initialises the parameters and buffers "
                             f"of one module, or weights=, safetensors files that have it")
        reset()
