"""ShardedOptimizer for arrays of any library that speaks DLPack: the engine with names, shapes and checks.

    opt = zero_c.ShardedOptimizer([w, b], "adamw", lr=3e-4, stage=2)
    for x, y in data:
        for i, gradient in enumerate(gradients(w, b, x, y)):
            opt.add_grad(i, gradient)
        opt.step()                      # w and b have the new values
"""

import math
import numbers
import sys
from collections import Counter
from collections.abc import Mapping

import numpy

from zero_c import _checkpoint, _gpu, _init, _loading, _options, _profile, _saving
from zero_c._core import Communicator, Engine, Error, GpuArray, as_array
from zero_c._last_step import LastStep

FLOATS = ("float32", "float64", "bfloat16", "float16")
STAGES = (0, 1, 2)
REDUCE_OPS = ("mean", "sum")


class ShardedOptimizer:
    """Optimizer state and gradients of `arrays` sharded over the ranks of `comm`. Collective.

    arrays          arrays, (name, array) pairs, a dict name -> array, or a list of groups {"params": ..., "lr": ...};
                    NumPy or anything with __dlpack__; float32, float64, float16 or bfloat16. On the CPU, or each
                    rank's on a GPU of its own. All ranks continue from rank 0's values
    optimizer       "adamw", "adam" or "sgd", with torch.optim's options and defaults
    stage           0: nothing is sharded; 1: optimizer state; 2: and gradients
    max_grad_norm   step() clips to it
    loss_scale      factor that gradients carry; may be set again at any time
    skip_nonfinite  an infinity or NaN on any rank skips the step on all; by default with a loss scale
    reduce_op       "mean" or "sum" over ranks
    bucket_mb       size of a reduction window; by default 1/128 of the gradient, between 0.25 and 1; on GPUs 1/8, 1 to 25
    shared_params   parameters live once per host
    in_place        the caller's arrays get the new values; otherwise only param(i) does
    deterministic   on GPUs: gradients are summed in rank order; by default while all ranks are on one host

    On a GPU everything is enqueued on one stream, the legacy default one unless use_stream() names another, without waiting
    for it unless a step may be skipped, or last_step is asked what was found. An array that is given must not be used for
    something else by work on a stream that is not ordered after that one.

    On one rank of a GPU an iteration, all of it from the first add_grad() to step(), can be captured into a CUDA graph, on
    the stream of use_stream(): every replay does it again with what the gradients hold then. An iteration like it must have
    been made before. See before_replay(), and docs/graphs.md.
    """

    def __init__(self, arrays, optimizer="adamw", *, stage=2, max_grad_norm=None, loss_scale=None, skip_nonfinite=None,
                 reduce_op="mean", bucket_mb=None, shared_params=False, comm=None, in_place=True, deterministic=None, **options):
        defaults = _options.resolve(optimizer, options)
        _one_of("stage", stage, STAGES)
        _one_of("reduce_op", reduce_op, REDUCE_OPS)
        _positive("max_grad_norm", max_grad_norm, optional=True)
        _positive("bucket_mb", bucket_mb, optional=True)
        _flag("shared_params", shared_params)
        _flag("in_place", in_place)
        if deterministic is not None:
            _flag("deterministic", deterministic)
        if skip_nonfinite is not None:
            _flag("skip_nonfinite", skip_nonfinite)
        if comm is not None and not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}; it must be a zero_c.Communicator")
        self.loss_scale = loss_scale
        self.max_grad_norm = max_grad_norm
        self._skip_nonfinite = skip_nonfinite
        self._optimizer, self._stage = optimizer, stage
        self._stream = _gpu.LEGACY_STREAM
        groups, members = _read_groups(arrays, optimizer, defaults)
        self.param_groups = groups
        self._names = [name for name, _, _ in members]
        self._gpu = _gpu.common_device([(name, array) for name, array, _ in members])
        if self._gpu is not None and shared_params:
            raise ValueError("shared_params is for the CPU; ranks on GPUs have a copy each")
        views = [self._look(array, in_place, name) for name, array, _ in members]
        self._dtypes = [dtype for _, dtype in views]
        self._shapes = [view.shape for view, _ in views]
        for name, dtype in zip(self._names, self._dtypes):
            if dtype not in FLOATS:
                raise TypeError(f"{name} has dtype {dtype}; parameters must be one of {', '.join(FLOATS)}")
        if in_place:
            _check_apart(self._names, [self._span(view) for view, _ in views], None if self._gpu is not None else
                         [view for view, _ in views])
        self._in_place = [view for view, _ in views] if in_place else None
        self.comm = comm if comm is not None else _init.init()
        if self._gpu is not None:
            self.comm = _gpu.communicator(self.comm, self._gpu, deterministic)
        elif self.comm.gpu >= 0:
            raise ValueError(f"the communicator is one of GPUs (GPU {self.comm.gpu}) and {self._names[0]} is on the CPU")
        self._mean = reduce_op == "mean"
        params = [(name, view.size, dtype, group, None if self._gpu is not None else array)
                  for (name, array, group), (view, dtype) in zip(members, views)]
        config = {"bucket_bytes": max(1, int(bucket_mb * 2**20))} if bucket_mb is not None else {}
        self._engine = Engine(self.comm, params, self._core_groups(), rule=optimizer, stage=stage, mean=self._mean,
                              shared_params=shared_params, **config)
        if self._gpu is None:
            self._params = [self._engine.param(i).reshape(shape) for i, shape in enumerate(self._shapes)]
        else:
            for i, (view, _) in reversed(list(enumerate(views))):
                self._engine.load_from_device(i, view)
            self._engine.publish()
            self._params = [self.param_dlpack(i) for i in range(len(self._shapes))]
        self._clip_norm = None
        self.last_step = LastStep(self._engine, self._scale(), self.comm.deterministic)
        self._write_back()

    def __len__(self):
        return len(self._names)

    # ---- gradients -------------------------------------------------------

    def add_grad(self, i, gradient):
        """The gradient of parameter i in this backward: its dtype and shape, any strides. The memory is free afterwards."""
        i = self._index(i)
        name = f"gradient of {self._names[i]}"
        view, dtype = (gradient, "bfloat16") if _is_bits(gradient, self._dtypes[i]) else self._look(gradient, False, name)
        if dtype != self._dtypes[i]:
            raise TypeError(f"{name} has dtype {dtype}; it must be {self._dtypes[i]}")
        if view.shape != self._shapes[i]:
            raise ValueError(f"{name} has shape {view.shape}; it must be {self._shapes[i]}")
        self._engine.add_grad(i, view)

    def end_backward(self):
        """Ends a backward, so that another may be added before step(). Collective; step() implies it."""
        self._engine.end_round()

    def zero_grad(self, set_to_none=True):
        """Forgets gradients that no step() has used. All ranks must call it."""
        _flag("set_to_none", set_to_none)
        if self._engine.round_open:
            self._engine.abort_round()
        self._engine.discard()

    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False):
        """The norm of all averaged gradients, on every rank; step() scales them to max_norm if it is larger. Collective."""
        max_norm = _positive("max_norm", max_norm, infinite=True)
        norm_type = _positive("norm_type", norm_type, infinite=True)
        _flag("error_if_nonfinite", error_if_nonfinite)
        self._close_round()
        if error_if_nonfinite:
            norm = self._engine.clip(math.inf, norm_type, self._scale())
            if not math.isfinite(norm):
                raise Error(f"the gradient's norm of order {norm_type:g} is {norm}; nothing was clipped")
        self._clip_norm = self._engine.clip(max_norm, norm_type, self._scale())
        return self._clip_norm

    def grad(self, i):
        """The averaged, unscaled gradient of parameter i, a new array at full shape: float32 (float64). Collective."""
        i = self._index(i)
        self._close_round()
        factor = 1.0 / self._scale() / (self.comm.world_size if self._mean else 1)
        return self._engine.read(i, "grad", factor).reshape(self._shapes[i])

    # ---- the step --------------------------------------------------------

    def step(self):
        """Updates every parameter that had a gradient on some rank, and consumes the gradients. Collective."""
        scale = self._scale()
        skip = self._skip_nonfinite if self._skip_nonfinite is not None else self.loss_scale is not None
        max_norm = _positive("max_grad_norm", self.max_grad_norm, optional=True)
        groups = self._core_groups()
        self._close_round()
        self._engine.step(groups, loss_scale=scale, max_norm=max_norm or 0.0, skip_nonfinite=skip)
        self.last_step.follow(scale, skip, max_norm is not None, self._clip_norm)
        self._clip_norm = None
        if self._engine.capturing or not self.last_step.skipped:
            self._write_back()

    # ---- GPUs ------------------------------------------------------------

    def use_stream(self, stream):
        """On a GPU: from now on the optimizer works on this stream, a cudaStream_t as an integer (0: the legacy default one).

        It does so after what it has enqueued before. The stream must exist as long as the optimizer.
        """
        if self._gpu is None:
            raise ValueError("the parameters are on the CPU, where there are no streams")
        self._engine.use_stream(stream)
        self._stream = stream

    def before_replay(self):
        """After a change of options (lr, say): replays of a captured step that are launched from now on use them. Local.

        The launches must be ordered after the optimizer's stream.
        """
        self._engine.replay_options(self._core_groups())

    # ---- looking in ------------------------------------------------------

    def param(self, i):
        """The engine's own view of parameter i, as step() writes it (bfloat16: its bits, as uint16).

        On a GPU an object with __dlpack__.
        """
        return self._params[self._index(i)]

    def param_dlpack(self, i):
        """The same memory for other libraries: an object with __dlpack__."""
        i = self._index(i)
        return self._engine.param_dlpack(i, self._shapes[i], _row_major(self._shapes[i]))

    def refresh(self, i=None):
        """After param(i), or all of them, was written from outside: the exact values step() keeps follow."""
        self._engine.refresh(None if i is None else self._index(i))

    def state(self, i):
        """This rank's part of parameter i's state: its step count, and name -> flat view of the elements it owns (None: none)."""
        i = self._index(i)
        parts = {role: self._engine.state(i, role) for role in self._roles(i)}
        return {"step": self._engine.step_count(i), **parts}

    def full_state(self, i):
        """Parameter i's state at full shape, new arrays. Collective."""
        i = self._index(i)
        whole = {role: self._engine.read(i, role).reshape(self._shapes[i]) for role in self._roles(i)}
        return {"step": self._engine.step_count(i), **whole}

    def memory(self):
        """Bytes that this rank holds, by kind; memory shared by ranks of this host is counted 1/N."""
        return self._engine.memory()

    def traffic(self):
        """Calls, payload in elements and bytes of each collective since the last call."""
        return self._engine.traffic()

    def profile(self, capacity=_profile.CAPACITY):
        """Records when this rank reduces, gathers and updates, on the CPU: `with opt.profile() as profile:` around some steps,
        in them profile.span(name) around what else is to be seen, and after them profile.save(path).

        capacity    how many pieces of work it has room for; 40 bytes each
        """
        return _profile.Profile(self._engine, self.comm, None, capacity)

    # ---- checkpoints ------------------------------------------------------

    def save(self, path):
        """Writes parameters and state to a folder that all ranks share, for any number of ranks and any stage. Collective.

        Until the last moment the checkpoint that was there before stays whole; CheckpointError on all ranks if it cannot
        be written.
        """
        self._close_round()
        _saving.save(self._engine, self.comm, path, self._describe_all)

    def load(self, path):
        """Takes parameters, state and options from what save() wrote. Collective.

        Arrays and groups must be those that were saved. CheckpointError on all ranks, and nothing is changed, if something
        is missing, damaged or does not fit.
        """
        self._close_round()
        manifest = _loading.load(self._engine, self.comm, path, self._stage == 0, self.param_groups, self._optimizer,
                                 _checkpoint.like, self._entries, self._core_groups)
        if self.loss_scale is not None and manifest["loss_scale"]["dynamic"]:
            self.loss_scale = manifest["loss_scale"]["value"]
        self.last_step.steps = manifest["steps"]
        self._write_back()

    def _entries(self):
        group_of = {i: number for number, group in enumerate(self.param_groups) for i in group["params"]}
        return [_checkpoint.Entry(name, "parameter", dtype, shape, index=i, group=group_of[i], roles=self._kept(i))
                for i, (name, dtype, shape) in enumerate(zip(self._names, self._dtypes, self._shapes))]

    def _kept(self, i):
        """Names of all that is kept of a parameter, as a checkpoint orders them."""
        roles = self._roles(i) + (("master",) if self._dtypes[i] in ("bfloat16", "float16") else ())
        return tuple(sorted(roles, key=_checkpoint.ROLES.index))

    def _describe_all(self):
        groups = [({key: value for key, value in group.items() if key != "params"}, len(group["params"]))
                  for group in self.param_groups]
        # A number is one that the program may adapt as it trains.
        scale = {"dynamic": self.loss_scale is not None, "value": self._scale(), "good": 0, "floored": 0}
        return self._entries(), _checkpoint.about(self._optimizer, groups, scale, self.last_step.steps, self._stage, self.comm)

    # ---- helpers ---------------------------------------------------------

    def _index(self, i):
        if isinstance(i, bool) or not isinstance(i, numbers.Integral):
            raise TypeError(f"parameter index is {i!r}; it must be an integer")
        if not 0 <= i < len(self._names):
            raise IndexError(f"parameter index is {i}; legal are 0 to {len(self._names) - 1}")
        return int(i)

    def _scale(self):
        return _positive("loss_scale", self.loss_scale, optional=True) or 1.0

    def _core_groups(self):
        return [_options.to_core(self._optimizer, group) for group in self.param_groups]

    def _roles(self, i):
        group = next(group for group in self.param_groups if i in group["params"])
        if self._optimizer == "sgd":
            return ("momentum_buffer",) if group["momentum"] else ()
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _close_round(self):
        if self._engine.round_open:
            self._engine.end_round()

    def _write_back(self):
        if self._in_place is None:
            return
        for i, array in enumerate(self._in_place):
            if self._gpu is None:
                numpy.copyto(array, self._params[i])
            else:
                self._engine.copy_param(i, array)

    def _look(self, array, writable, name):
        """An array where the parameters are: (what the engine takes, its dtype)."""
        if self._gpu is None:
            return as_array(array, writable, name)
        if _gpu.device_of(array) is None:
            raise TypeError(f"{name} is not on GPU {self._gpu}, where the parameters are")
        view = GpuArray(array, self._stream, name)
        if writable and not view.writable:
            raise BufferError(f"{name} is read-only or not contiguous and would have to be written; pass a writable contiguous "
                              f"copy, or in_place=False")
        return view, view.dtype

    def _span(self, view):
        """(first, end) of an array's memory."""
        if self._gpu is None:
            return numpy.lib.array_utils.byte_bounds(view)
        return view.address, view.address + view.size * (8 if view.dtype == "float64" else 4 if view.dtype == "float32" else 2)


# ---- arguments ---------------------------------------------------------------


def _read_groups(arrays, optimizer, defaults):
    """Groups with defaults filled in, and all parameters as (name, array, group number)."""
    if isinstance(arrays, Mapping):
        arrays = list(arrays.items())
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(f"arrays is a {type(arrays).__name__}; it must be a list of arrays, (name, array) pairs or groups, "
                        f"or a dict")
    if not arrays:
        raise ValueError("arrays is empty; there is nothing to optimize")
    are_groups = [isinstance(entry, Mapping) for entry in arrays]
    if any(are_groups) and not all(are_groups):
        raise TypeError("arrays mixes groups and arrays; put the arrays into groups {'params': [...]}")
    groups, members = [], []
    for number, given in enumerate(arrays if all(are_groups) else [{"params": arrays}]):
        if "params" not in given:
            raise ValueError(f"group {number} has no 'params'")
        options = {name: value for name, value in given.items() if name != "params"}
        _options.check_names(optimizer, options)
        group = {**defaults, **options}
        _options.to_core(optimizer, group)
        entries = given["params"].items() if isinstance(given["params"], Mapping) else given["params"]
        first = len(members)
        for entry in entries:
            name, array = entry if isinstance(entry, tuple) and len(entry) == 2 else (f"arrays[{len(members)}]", entry)
            if not isinstance(name, str):
                raise TypeError(f"the name of parameter {len(members)} is {name!r}; it must be a string")
            members.append((name, array, number))
        groups.append({"params": list(range(first, len(members))), **group})
    for name, count in Counter(name for name, _, _ in members).items():
        if count > 1:
            raise ValueError(f"{count} parameters are named {name!r}; names must differ")
    return groups, members


def _row_major(shape):
    """Strides, in elements, of a contiguous array."""
    return [math.prod(shape[dim + 1:]) for dim in range(len(shape))]


def _check_apart(names, spans, views):
    """Arrays that are written may not share memory; spans: (first, end) of each; views: NumPy's, which may interleave."""
    spans = sorted((first, end, number) for number, (first, end) in enumerate(spans) if end > first)
    for (_, end, one), (begin, _, other) in zip(spans, spans[1:]):
        if begin < end and (views is None or numpy.shares_memory(views[one], views[other])):
            raise ValueError(f"{names[one]} and {names[other]} share memory; give each array once")


def _is_bits(array, dtype):
    """uint16, in which NumPy holds bfloat16."""
    return dtype == "bfloat16" and isinstance(array, numpy.ndarray) and array.dtype == numpy.uint16


def _one_of(name, value, legal):
    if isinstance(value, bool) or value not in legal:
        raise ValueError(f"{name} is {value!r}; legal are {', '.join(map(repr, legal))}")


def _flag(name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False")


def _positive(name, value, optional=False, infinite=False):
    if optional and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a number{' or None' if optional else ''}")
    if not value > 0 or (value > sys.float_info.max and not (infinite and value == math.inf)):
        raise ValueError(f"{name} is {value}; it must be {'' if infinite else 'finite and '}above 0")
    return float(value)
