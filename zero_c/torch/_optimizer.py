"""ShardedOptimizer: the engine behind the face of a torch optimizer."""

import contextlib
import functools
import os
import warnings
import weakref

import numpy
import torch

import zero_c
from zero_c import _core, _gpu, _options, _profile, _saving, _weights_file
from zero_c._last_step import LastStep

from . import _agree, _arguments, _checkpoint, _foreign, _join, _meta, _overlap, _place, _stage3, _state, _state_loading, _units
from ._scale import LossScale, is_positive


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state, and from stage 2 on whose gradients, are shared out over the ranks.

    params      a module, or tensors, (name, tensor) pairs or group dicts, as in torch.optim
    module      with tensors or groups given: the module they belong to, for names, buffers and checks
    optimizer   "adamw", "adam" or "sgd"; its arguments (lr, betas, eps, weight_decay, momentum, dampening, nesterov,
                maximize, amsgrad) as in torch.optim
    stage       0: everything on every rank; 1: optimizer state sharded; 2: gradients too; 3: parameters too
    max_grad_norm   clip the averaged gradient to this 2-norm in step()
    loss_scale  None, a number, or "dynamic"; multiply losses with opt.scale(loss)
    skip_nonfinite  True: a step with an infinite or NaN gradient on any rank changes nothing; None: with a loss scale
    reduce_op   "mean" or "sum" of the ranks' gradients
    bucket_mb   size of a reduction window; by default 1/128 of the gradient, between 0.25 and 1; on GPUs 1/8, between 1 and 25
    units       stage 3: modules, or classes of modules, whose parameters are gathered together around their forward
                and their backward; by default the children of the longest ModuleList or Sequential. What is in no unit
                belongs to the root, which stays gathered until the step. With overlap_gather: whose are waited for together
    prefetch    stage 3: how many units to gather ahead of their use; each takes memory for one more unit
    weights     stage 3: path, or paths, of safetensors files with values for the module's parameters and buffers, under
                the module's names; rank 0 reads them. What they leave out is initialised, and what they have beyond is an error
    init        stage 3, of a module on the meta device: a function that initialises the parameters and buffers of one
                module (not of its children), called for each; by default their reset_parameters()
    shared_params   parameters live once per host
    overlap_gather  stages 1 and 2, of a module: step() returns before parameters are back from the other ranks; modules
                wait for their own when they are called. Who reads weights otherwise, or writes them, calls wait() before
    deterministic   on GPUs: gradients are summed in rank order; by default while all ranks are on one host
    comm        a Communicator; by default that of zero_c.init()

    All parameters and buffers are on the CPU, or each rank's on a GPU of its own. On a GPU without virtual memory
    management units cannot share memory: at stage 3 each rank then holds all parameters, which is said in a warning.

    The parameters' memory moves into the engine and stays there. After a backward `.grad` shows NaN: the engine
    has the gradient (`opt.grad(p)`), and step() consumes it. At stage 3 a parameter has its value during its unit's
    forward and backward and inside `opt.gathered()`; otherwise it keeps its shape and dtype and shows NaN.
    """

    _ring_slots = None  # stage 3: memory for units of one size and level; None: prefetch + 1. For tests of larger rings

    def __init__(self, params, *, module=None, optimizer="adamw", stage=2, max_grad_norm=None, loss_scale=None,
                 skip_nonfinite=None, reduce_op="mean", bucket_mb=None, units=None, prefetch=1, weights=None, init=None,
                 shared_params=False, overlap_gather=False, deterministic=None, comm=None, **options):
        self._built = False
        self._comm = comm if comm is not None else zero_c.init()
        if not isinstance(self._comm, zero_c.Communicator):
            raise TypeError(f"comm is a {type(self._comm).__name__}; needed: a zero_c.Communicator")

        def prepare():
            check_settings(stage, max_grad_norm, skip_nonfinite, reduce_op, bucket_mb)
            check_without_effect(stage, units, prefetch, weights, init, overlap_gather)
            defaults = _options.resolve(optimizer, options)
            whole = params if isinstance(params, torch.nn.Module) else module
            if module is not None and whole is params:
                raise ValueError("module= is for tensors or groups; the first argument is a module already")
            if whole is not None and not isinstance(whole, torch.nn.Module):
                raise TypeError(f"module is a {type(whole).__name__}; needed: a torch.nn.Module")
            scale = LossScale(loss_scale)
            groups = _arguments.read_groups(params)
            names = self._check(groups, defaults, optimizer, whole, meta=stage == 3)
            device = self._find_device(groups, names, whole, shared_params, deterministic)
            layout = plan_units(whole, units, groups, names, shared_params) if stage == 3 else None
            _overlap.check(overlap_gather, stage, whole, groups, names)
            called = _units.choose(whole, units) if overlap_gather else None
            if init is not None and not _meta.is_on_meta(whole):
                raise ValueError("init= initialises what is on the meta device, and nothing of this module is; leave it out")
            settings = {"stage": stage, "optimizer": optimizer, "max_grad_norm": max_grad_norm,
                        "loss_scale": loss_scale, "skip_nonfinite": skip_nonfinite, "reduce_op": reduce_op,
                        "bucket_mb": bucket_mb, "shared_params": bool(shared_params), "prefetch": prefetch,
                        "overlap_gather": overlap_gather, "weights given": weights is not None}
            lines = _agree.describe([{**defaults, **group} for group in groups], names, settings)
            if whole is not None:
                lines += [_agree.describe_tensor(f"buffer '{name}'", buffer) for name, buffer in whole.named_buffers()]
            if layout is not None:
                lines += [f"{unit!r}: " + ", ".join(name for name, _ in unit.members) for unit in layout]
            return lines, (defaults, groups, names, whole, scale, layout, called, device)

        defaults, groups, names, whole, self._scale, layout, called, device = _agree.checked(
            self._comm, "construction of ShardedOptimizer", prepare)
        files = _meta.open_files(self._comm, weights, whole) if weights is not None else None
        if device.type == "cuda":
            self._comm = _gpu.communicator(self._comm, device.index, deterministic)
        replaced = None
        if stage == 3 and _meta.is_on_meta(whole):
            replaced = _meta.Replacement(whole)
            groups, names = replaced.follow(groups, names, layout)
        try:
            self._set_up(groups, names, whole, layout, called, defaults, optimizer=optimizer, stage=stage,
                         reduce_op=reduce_op, max_grad_norm=max_grad_norm, skip_nonfinite=skip_nonfinite,
                         bucket_mb=bucket_mb, shared_params=shared_params, prefetch=prefetch,
                         filling={"replaced": replaced, "weights": weights, "files": files, "init": init})
        except BaseException:
            if replaced is not None:
                replaced.undo()
            raise

    def _set_up(self, groups, names, whole, layout, called, defaults, *, optimizer, stage, reduce_op, max_grad_norm,
                skip_nonfinite, bucket_mb, shared_params, prefetch, filling):
        """After all checks, with all ranks."""
        self._optimizer, self._stage, self._mean = optimizer, stage, reduce_op == "mean"
        self._max_grad_norm, self._skip_nonfinite = max_grad_norm, skip_nonfinite
        self._amp_scale = None      # inside a GradScaler's step: its scale
        self._unscaled_by = None    # after its unscale_
        self._clipped_norm = None   # after clip_grad_norm_: the norm it found
        super().__init__(groups, defaults)
        self._managed = []          # (name, parameter, its layout) by the engine's index
        self._index = {}            # id(parameter) -> index; the parameters are kept alive by _managed
        self._frozen = []           # (name, parameter, group)
        self._kinds = [_state.roles_of(optimizer, group) for group in self.param_groups]
        self._guards = _place.Guards()
        self._places = _arguments.places(whole) if whole is not None else {}
        self._buffers = {name: buffer for name, buffer in whole.named_buffers()} if whole is not None else {}
        self._windows = None        # stage 3: see _stage3.py
        self._whole = whole
        self._saving = None         # a save in the background
        self._joining = None        # inside join()
        self._waits = None          # overlap_gather: see _overlap.py
        self._stepped = False       # the last call was step(): .grad has nothing that another could use
        self._check_writes = os.environ.get("ZERO_C_CHECK_WRITES", "0") not in ("", "0")
        config = {"stage": stage, "shared_params": bool(shared_params), "mean": self._mean}
        if bucket_mb is not None:
            config["bucket_bytes"] = max(1, int(bucket_mb * 2**20))
        if layout is None:
            self._build(names, whole, config | {"overlap_gather": called is not None})
        else:
            slots = prefetch + 1 if self._ring_slots is None else self._ring_slots
            self._build_sharded(names, whole, layout, config | {"prefetch": prefetch, "unit_slots": slots}, filling)
        if called is not None:
            self._waits = _overlap.Waits(self._engine, whole, called)
            self._waits.watch(self._index)
            weakref.finalize(self, self._waits.close)
        self.last_step = LastStep(self._engine, self._scale.value, self._comm.deterministic,
                                  functools.partial(_place.follow_stream, self._engine))
        _foreign.watch(self)
        self._built = True

    # ---- construction --------------------------------------------------------

    def _find_device(self, groups, names, module, shared_params, deterministic):
        """Where parameters and buffers are, which must be one place that fits the other arguments."""
        named = [(names[id(tensor)], tensor) for group in groups for tensor in group["params"]]
        if module is not None:
            named += [*module.named_parameters(), *module.named_buffers()]
        device = _arguments.device_of(named)
        if device.type == "cuda" and shared_params:
            raise ValueError("shared_params=True is for the CPU; ranks on GPUs have a copy each")
        if device.type == "cuda" and any(tensor.is_meta for _, tensor in named):
            raise ValueError("a module that is partly on the meta device and partly on a GPU cannot be filled; build all of it "
                             "under torch.device('meta'), or all of it on the GPU")
        if device.type == "cpu" and self._comm.gpu >= 0:
            raise ValueError(f"the parameters are on the CPU and the communicator is one of GPUs (GPU {self._comm.gpu})")
        if device.type == "cpu" and deterministic is not None:
            raise ValueError(f"deterministic={deterministic!r} has an effect on NCCL only (on the CPU sums are always in rank "
                             f"order); leave it out")
        return device

    def _check(self, groups, defaults, optimizer, module, first_group=0, meta=False):
        """Names of all parameters of the groups, which are as they must be."""
        if module is not None:
            _arguments.refuse_wrapped(module)
        names = _arguments.name_all(groups, _arguments.named_tensors(module) if module is not None else {}, first_group)
        _arguments.check_once(groups, names)
        tensors = [tensor for group in groups for tensor in group["params"]]
        for tensor in tensors:
            _arguments.check_tensor(tensor, names[id(tensor)], is_active, meta)
        _arguments.check_apart(tensors, names)
        for name, buffer in module.named_buffers() if module is not None else ():
            if not (meta and buffer.is_meta):
                _place.check_plain(buffer, name, "buffer")
        for group in groups:
            _options.to_core(optimizer, {**defaults, **group})
        return names

    def _build(self, names, module, config):
        fresh = self._sort_in(names, enumerate(self.param_groups))
        self._engine = _core.Engine(self._comm, self._engine_params(fresh), self._core_groups(), rule=self._optimizer,
                                    **config)
        self._hooks = _place.new_hooks(self._engine, self._managed)
        self._take(fresh, 0)
        others = [tensor for _, tensor, _ in self._frozen]
        if module is not None:
            known = set(self._index) | {id(tensor) for tensor in others}
            others += [tensor for tensor in module.parameters() if id(tensor) not in known]
            others += list(module.buffers())
        _place.broadcast(self._comm, others)

    def _load_sharded(self, tensors, layout, replaced, weights, files, init):
        """Values of all parameters go to the shards; returns views, see _place.load_sharded."""
        views = _place.load_sharded(self._engine, tensors, replaced.strides if replaced is not None else {})
        if replaced is not None or weights is not None:
            index = {id(tensor): number for number, tensor in enumerate(tensors)}
            strides = {id(tensor): view.stride() for tensor, view in zip(tensors, views, strict=True)}
            _meta.Filler(self._engine, self._comm, layout, index, strides, replaced, weights, files, init).fill()
        _place.complete(self._engine)
        return views

    def _build_sharded(self, names, module, layout, config, filling):
        """Stage 3: all parameters of the module move into the shards; those that are not trained last."""
        fresh = self._sort_in(names, enumerate(self.param_groups))
        in_groups = {id(tensor) for _, tensor, _ in fresh + self._frozen}
        unit_of = {id(tensor): unit.index for unit in layout for _, tensor in unit.members}
        self._frozen = [entry for entry in self._frozen if id(entry[1]) in unit_of]
        kept = self._frozen + [(name, tensor, 0) for unit in layout for name, tensor in unit.members
                               if id(tensor) not in in_groups]
        described = [(name, tensor.numel(), _arguments.DTYPES[tensor.dtype], group, None, unit_of[id(tensor)], frozen)
                     for frozen, entries in ((False, fresh), (True, kept)) for name, tensor, group in entries]
        self._engine = _core.Engine(
            self._comm, described, self._core_groups(), rule=self._optimizer, units=[
                (unit.name or "root", unit.level, unit.resident) for unit in layout],
            fill_discarded=os.environ.get("ZERO_C_STAGE3_FILL", "0") not in ("", "0"), **config)
        if self._comm.rank == 0:
            _stage3.warn_of_own_memory(self._engine)
        self._hooks = _place.new_hooks(self._engine, self._managed, windowed=True)
        tensors = [tensor for _, tensor, _ in fresh + kept]
        views = self._load_sharded(tensors, layout, **filling)
        for index, (name, tensor, group) in enumerate(fresh):
            guard, tensor.data = tensor.data, views[index]
            self._enter(index, name, tensor, group, windowed=True)
            tensor.data = guard
        self._sharded = {id(tensor): index for index, tensor in enumerate(tensors)}
        _place.make_windows(self._engine, layout, dict(zip(map(id, tensors), views, strict=True)), self._places)
        shapes = {id(tensor): (view.shape, view.stride()) for tensor, view in zip(tensors, views, strict=True)}
        self._windows = _stage3.Runtime(self._engine, module, layout, self._index, shapes)
        _place.guard_state_dicts(self._windows)
        others = [tensor for tensor in module.parameters() if id(tensor) not in self._sharded]
        _place.broadcast(self._comm, others + list(module.buffers()))

    def _sort_in(self, names, numbered_groups):
        """Parameters of these groups, as (name, parameter, group): returns the trainable ones, keeps the frozen."""
        fresh = []
        for number, group in numbered_groups:
            for tensor in group["params"]:
                entry = (names[id(tensor)], tensor, number)
                (fresh if tensor.requires_grad else self._frozen).append(entry)
        return fresh

    def _engine_params(self, entries):
        return [(name, tensor.numel(), _arguments.DTYPES[tensor.dtype], group, None) for name, tensor, group in entries]

    def _core_groups(self):
        return [_options.to_core(self._optimizer, group) for group in self.param_groups]

    def _take(self, entries, first):
        """The engine has these parameters since now: moves them there."""
        _place.load(self._engine, first, [tensor for _, tensor, _ in entries])
        for index, (name, tensor, group) in enumerate(entries, first):
            self._enter(index, name, tensor, group)

    def _enter(self, index, name, tensor, group, windowed=False):
        """A trained parameter, where its gradients will look for it: it is parameter `index` from now on."""
        self._managed.append((name, tensor, _place.layout_of(tensor)))
        self._index[id(tensor)] = index
        _place.attach(self._hooks, self._guards, tensor, self._places.get(id(tensor)), windowed)
        self.state[tensor] = _state.ParamState(self._engine, index, self._views(index, group))

    def _views(self, index, group):
        return _state.views(self._engine, index, _state.roles_of(self._optimizer, self.param_groups[group]))

    def add_param_group(self, param_group):
        """One more group: a dict with "params" and options, as in torch. Collective.

        Mismatch if ranks add different ones; ValueError at stage 3, or for a parameter that is there already.
        """
        if not self._built:  # called by torch.optim.Optimizer.__init__
            return super().add_param_group(param_group)

        def prepare():
            if self._windows is not None:
                raise ValueError("at stage 3 parameters cannot be added: the units' memory is laid out once; give all of "
                                 "them at the start, or build a new ShardedOptimizer")
            group = _arguments.read_group(param_group)
            number = len(self.param_groups)
            names = self._check([group], self.defaults, self._optimizer, None, number)
            if self._waits is not None:
                _overlap.check_members(self._waits.module, [group], names)
            taken = {name for name, *_ in (*self._managed, *self._frozen)}
            for tensor in group["params"]:
                if any(tensor is other for old in self.param_groups for other in old["params"]):
                    raise ValueError(f"parameter '{names[id(tensor)]}' is in a group of this optimizer already")
                if names[id(tensor)] in taken:
                    raise ValueError(f"another parameter of this optimizer is named '{names[id(tensor)]}'; give (name, tensor) pairs "
                                     f"with names of their own")
            return _agree.describe([{**self.defaults, **group}], names, {"groups so far": number}), (group, names)

        group, names = _agree.checked(self._comm, "add_param_group", prepare)
        self._settle()
        number = len(self.param_groups)
        if self.param_groups and "param_names" in self.param_groups[0]:
            group.setdefault("param_names", [names[id(tensor)] for tensor in group["params"]])
        elif self.param_groups:
            group.pop("param_names", None)
        super().add_param_group(group)
        self._kinds.append(_state.roles_of(self._optimizer, group))
        fresh = self._sort_in(names, [(number, self.param_groups[number])])
        self._adopt(fresh)
        _place.broadcast(self._comm, [tensor for _, tensor, at in self._frozen if at == number])

    def _adopt(self, entries):
        first = len(self._managed)
        self._engine.add_params(self._engine_params(entries), self._core_groups())
        if entries:
            self._take(entries, first)
        if self._waits is not None:
            self._waits.watch(self._index)

    # ---- gradients -----------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards inside leave gradients in .grad, where autograd adds them up until one outside, or step().

        Nothing is sent inside; each rank holds its whole gradient meanwhile, in the parameters' dtype.
        """
        self._hooks.defer(True)
        try:
            yield
        finally:
            self._hooks.defer(False)

    @contextlib.contextmanager
    def join(self):
        """For ranks with different numbers of batches: a rank that is done early takes part in the others' steps.

            with opt.join():
                for x, y in batches_of_this_rank:
                    ...

        Such a rank counts as one without a gradient; the mean is still over all ranks, as in DDP's join. Inside, only
        step() and clip_grad_norm_() may be collective, and not a collective of yours. A schedule that advances with
        every batch must be advanced on such a rank too, afterwards.
        """
        if self._joining is not None:
            raise zero_c.Error("join() inside join()")
        if self._windows is not None and self._comm.gpu >= 0:
            raise ValueError("join() at stage 3 is for the CPU: on GPUs every rank takes part in gathering each unit, which a "
                             "rank without a batch does not; use stage 2, or give all ranks as many batches")
        self._joining = _join.Join(self)
        try:
            yield
            self._joining.follow()
        finally:
            self._joining = None

    def zero_grad(self, set_to_none=True):
        """Forgets all gradients: sums in the engine, and what is in .grad (which becomes None in either case)."""
        self._hooks.forget()
        self._guards.restore()
        self._stepped = False
        self._unscaled_by = self._clipped_norm = None
        for _, tensor, _ in self._frozen:
            if tensor.grad is None:
                continue
            if set_to_none:
                tensor.grad = None
            else:
                tensor.grad.zero_()

    def scale(self, loss):
        """The loss, a tensor of any shape, times the loss scale, for backward(). Without a loss scale: the loss itself."""
        return loss if self._scale.setting is None else loss * self._scale.value

    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False):
        """Scales the averaged gradient to a norm of at most max_norm; returns its norm before. Collective.

        max_norm            above 0; infinity: only measures
        norm_type           above 0, or infinity, which means the largest magnitude
        error_if_nonfinite  True: RuntimeError on all ranks if the norm is infinite or NaN, and nothing is scaled
        The result is a tensor of shape (), of fp32, or fp64 if any parameter is; loss scales are taken out of it.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if self._joining is not None:
            self._joining.announce("clip_grad_norm_", max_norm, norm_type, error_if_nonfinite)
        self._settle()
        scale = self._loss_scale()
        if error_if_nonfinite:
            norm = self._engine.clip(float("inf"), norm_type, scale)
            if not numpy.isfinite(norm):
                raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {norm}, so they cannot be "
                                   f"clipped; pass error_if_nonfinite=False to clip anyway")
        norm = self._engine.clip(max_norm, norm_type, scale)
        if norm_type == 2.0:
            self._clipped_norm = norm
        wide = any(tensor.dtype == torch.float64 for _, tensor, _ in self._managed)
        return torch.tensor(norm, dtype=torch.float64 if wide else torch.float32)

    def grad(self, p):
        """The averaged gradient of a parameter: a new tensor of its shape, fp32 (fp64), without loss scale. Collective.

        Zeros if no rank had one; None for a frozen parameter; ValueError for a tensor that is no parameter of the optimizer.
        """
        index = self._find(p)
        if index is None:
            return None
        self._settle()
        factor = (1 / self._comm.world_size if self._mean else 1.0) / self._loss_scale()
        return self._read(index, p, "grad", factor)

    def _loss_scale(self):
        if self._amp_scale is not None:
            return self._amp_scale
        return self._unscaled_by if self._unscaled_by is not None else self._scale.value

    def _find(self, p):
        """The engine's index of a parameter; None: frozen."""
        if id(p) in self._index:
            return self._index[id(p)]
        if any(p is tensor for _, tensor, _ in self._frozen):
            return None
        raise ValueError(f"this tensor of shape {tuple(p.shape)} is not a parameter of the optimizer")

    def _has(self, p):
        """Whether it trains this tensor, or at stage 3 keeps its values."""
        return id(p) in (self._index if self._windows is None else self._sharded)

    def _name_of(self, p):
        return self._managed[self._index[id(p)]][0] if id(p) in self._index else self._windows.name_of(p)

    def _read(self, index, parameter, role, factor=1.0):
        array = _place.as_tensor(self._engine.read(index, role, factor)).to(parameter.device)
        strides = self._managed[index][2][3]
        return array.as_strided(parameter.shape, strides) if parameter.numel() else array.view(parameter.shape)

    def _write(self, index, parameter, role, value):
        """A tensor of the parameter's shape; None: zeros."""
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        whole = torch.empty_strided(parameter.shape, self._managed[index][2][3], dtype=wide)
        if value is None:
            whole.zero_()
        else:
            whole.copy_(value.detach())
        self._engine.write(index, role, _place.flat(whole, whole.stride()).numpy())

    # ---- the step ------------------------------------------------------------

    def step(self, closure=None):
        """Updates all parameters that had a gradient on some rank, and consumes the gradients. Collective.

        closure     as in torch: calls backward() and returns the loss, which step() returns; without it None

        opt.last_step tells what was done: norm of the averaged gradient before clipping (None if nobody asked), scale of the
        loss, skipped, nonfinite (ranks with an infinity or NaN), steps (that were not skipped), deterministic.
        zero_c.Error if a parameter was moved, .grad was written in place, or the gradients were consumed already.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._unscaled_by is not None and self._amp_scale is None:
            raise zero_c.Error("gradients were unscaled by a GradScaler; call scaler.step(opt), not opt.step()")
        _place.follow_stream(self._engine)
        capturing = self._engine.capturing
        if capturing and (self._amp_scale is not None or self._scale.dynamic):
            raise zero_c.Error("a loss scale that adapts cannot be captured into a CUDA graph, because the host has to look at "
                               "every step; use loss_scale= with a number, or bfloat16 without one")
        if self._joining is not None:
            self._joining.announce("step")
        self._settle()
        amp = self._amp_scale is not None
        skip = self._skip_nonfinite
        if skip is None:
            skip = amp or self._scale.setting is not None
        scale = self._loss_scale()
        if self._windows is not None:
            self._windows.before_step()
        rounds = self._engine.step(self._core_groups(), loss_scale=scale, max_norm=self._max_grad_norm or 0.0,
                                   skip_nonfinite=bool(skip))
        if not rounds and self._stepped:
            raise zero_c.Error(f"rank {self._comm.rank}: step() without a gradient on any rank since the last step(), which "
                               f"consumed those there were; torch would use them again. Call backward() in between, or "
                               f"opt.zero_grad() where a step may be without gradients")
        self._stepped = True
        self._hooks.consume()
        if self._waits is not None:
            self._waits.steps += 1
        last = self.last_step
        last.follow(scale, bool(skip), bool(self._max_grad_norm), self._clipped_norm)
        self._unscaled_by = self._clipped_norm = None
        self._follow_options()
        if capturing:
            return loss
        if last.skipped and not amp and not self._scale.dynamic:
            warnings.warn(f"rank {self._comm.rank}: a step was skipped, because the gradient is infinite or NaN on "
                          f"{last.nonfinite} ranks", RuntimeWarning, stacklevel=2)
        if not amp and self._scale.after_step(last.skipped):
            raise zero_c.Error(f"{self._scale.floored} steps in a row were skipped at the lowest loss scale, "
                               f"{self._scale.FLOOR:g}: the gradients are infinite or NaN whatever the scale; the "
                               f"model diverged or its data are bad")
        return loss

    def before_replay(self):
        """After a change of options (by a schedule, say): replays of a captured step that are launched on torch's current
        stream from now on use them. Local.

        On one rank of a GPU, at stages 0 to 2, an iteration can be captured into a CUDA graph: forward, backward and step()
        inside torch.cuda.graph(), after some like it outside. Scale and clipping stay as captured; see docs/graphs.md.
        """
        _place.follow_stream(self._engine)
        self._engine.replay_options(self._core_groups())

    def wait(self):
        """With overlap_gather: all parameters are up to date, and may be read and written by anybody, until the next step.

        Collective, but a forward or another collective call on the other ranks will do. Without overlap_gather nothing
        is ever under way.
        """
        if self._waits is not None:
            self._waits.all()

    def _settle(self):
        """Before all that is collective: parameters are in place, nothing is left in .grad."""
        _place.follow_stream(self._engine)
        if self._windows is not None:
            self._windows.check()
        found = self._hooks.check()
        if found is not None:
            name, parameter, _ = self._managed[found[0]]
            raise zero_c.Error(_place.replaced(name) if found[1] == "replaced" else _place.moved(name, parameter))
        if self._guards.restore():
            raise zero_c.Error(f"rank {self._comm.rank}: a .grad was written in place after backward (by zero_grad("
                               f"set_to_none=False) of the module, torch's clipping, mul_() or the like), and the gradient is "
                               f"in the engine: use opt.zero_grad(), opt.clip_grad_norm_() or max_grad_norm=; opt.grad(p) has "
                               f"the value, and p.grad = ... replaces it")
        self._hooks.settle()
        self._adopt_unfrozen()
        self._refresh_written()
        if self._check_writes:
            self._compare_masters()

    def _refresh_written(self):
        """Masters follow 16-bit parameters that somebody wrote in place."""
        _place.follow_stream(self._engine)
        for index in self._hooks.written():
            self._engine.refresh(index)

    def _compare_masters(self):
        """For debugging: whether fp16 parameters were written behind torch's counter (through .data), which step() undoes.

        A bfloat16 parameter is a part of its master, and follows.
        """
        for index, (name, parameter, _) in enumerate(self._managed):
            if parameter.dtype != torch.float16 or self._windows is not None:
                continue
            master = self._read(index, parameter, "master").to(torch.float16)
            if not torch.allclose(master, parameter.detach(), rtol=0, atol=0, equal_nan=True):
                raise zero_c.Error(f"rank {self._comm.rank}: parameter '{name}' was written through .data or by another library, "
                                   f"which its fp32 master does not see; write under torch.no_grad() (p.copy_()), or inside "
                                   f"opt.gathered(write=True)")

    def _adopt_unfrozen(self):
        """Frozen parameters that have a gradient now, on any rank, are trained from here on."""
        if not self._frozen:
            return
        if self._windows is not None:
            return self._refuse_unfrozen()
        wanted = numpy.array([tensor.requires_grad and tensor.grad is not None for _, tensor, _ in self._frozen],
                             numpy.uint8)
        self._engine.sync("step")  # a rank may still be at the end of a backward that another took no part in
        wanted = self._comm.all_gather(wanted).any(axis=0)
        if not wanted.any():
            return
        entries = [entry for entry, take in zip(self._frozen, wanted, strict=True) if take]
        for name, tensor, _ in entries:
            if not tensor.requires_grad:
                raise zero_c.Mismatch(f"parameter '{name}' has a gradient on another rank, but on rank "
                                      f"{self._comm.rank} its requires_grad is False; freeze and unfreeze on all ranks")
        self._frozen = [entry for entry, take in zip(self._frozen, wanted, strict=True) if not take]
        self._adopt(entries)
        self._hooks.settle()  # their gradients make a round of their own

    def _refuse_unfrozen(self):
        for name, tensor, _ in self._frozen:
            if tensor.requires_grad and tensor.grad is not None:
                raise zero_c.Error(f"parameter '{name}' was frozen when the optimizer was built, and has a gradient now; "
                                   f"at stage 3 unfreeze it before, or build a new ShardedOptimizer")

    def _follow_options(self):
        """opt.state follows when the options of a group call for other state than before (amsgrad, momentum)."""
        kinds = [_state.roles_of(self._optimizer, group) for group in self.param_groups]
        if kinds != self._kinds:
            self._kinds = kinds
            for _, index, parameter, names in self._numbered():
                self.state[parameter] = _state.ParamState(self._engine, index,
                                                          _state.views(self._engine, index, names))

    def _numbered(self, options=None):
        """(number in torch's state dicts, engine's index, parameter, names of its state) of all trained parameters.

        options: those of each group, where the state that others call for is meant.
        """
        found, number = [], 0
        for group, own in zip(self.param_groups, options or self.param_groups, strict=True):
            names = _state.roles_of(self._optimizer, own)
            for tensor in group["params"]:
                if id(tensor) in self._index:
                    found.append((number, self._index[id(tensor)], tensor, names))
                number += 1
        return found

    @property
    def _step_supports_amp_scaling(self):
        # Asked by torch.amp.GradScaler.step, and by nobody else, before anything is done to the optimizer.
        raise TypeError("torch.amp.GradScaler cannot unscale gradients that the engine holds, nor see an overflow on "
                        "another rank: use zero_c.torch.GradScaler in its place, or loss_scale= of ShardedOptimizer")

    @contextlib.contextmanager
    def _scaled_by(self, scale):
        """For GradScaler: the gradients carry this factor."""
        if self._scale.setting is not None:
            raise ValueError(f"the optimizer has loss_scale={self._scale.setting!r} already; use it or a GradScaler, "
                             f"not both")
        self._amp_scale = float(scale)
        try:
            yield
        finally:
            self._amp_scale = None

    def _unscale(self, scale):
        """For GradScaler.unscale_: whether any rank has an infinite or NaN gradient."""
        if self._joining is not None:
            self._joining.announce("_unscale", scale)
        with self._scaled_by(scale):
            self._settle()
            norm = self._engine.clip(float("inf"), 2.0, float(scale))
        self._unscaled_by = float(scale)
        return not numpy.isfinite(norm)

    # ---- looking in ----------------------------------------------------------

    def full_param(self, p):
        """A copy of a parameter's value, of its shape, dtype and device. Collective. ValueError if it is none of ours."""
        if self._windows is not None:
            return self._fetch(p)
        self._find(p)
        self.wait()
        return p.detach().clone()

    def _fetch(self, p):
        if id(p) not in self._sharded:
            self._find(p)  # says that it is none of ours
        return _place.shaped(self._engine.fetch(self._sharded[id(p)]), self._windows.layout[id(p)], p.dtype).to(p.device)

    @contextlib.contextmanager
    def gathered(self, *params, write=False):
        """The parameters (none given: all) at full shape, as a list of tensors. With write, rank 0's changes reach all
        ranks. Collective. At stage 3 the parameters themselves have their values inside, in memory of their own.
        zero_c.Error at the end if something was written without write=True.
        """
        if self._windows is not None:
            with self._gathered(params, write) as tensors:
                yield tensors
            return
        params = params or [tensor for _, tensor, _ in self._managed]
        for p in params:
            self._find(p)
        self.wait()
        before = [p._version for p in params]
        yield [p.detach() for p in params]
        if write:
            _place.broadcast(self._comm, params)
            for p in params:
                if id(p) in self._index:
                    self._engine.refresh(self._index[id(p)])
            self._hooks.written()
        elif any(p._version != version for p, version in zip(params, before, strict=True)):
            raise zero_c.Error("parameters were written inside gathered(); pass write=True, so that the write reaches "
                               "all ranks")

    @contextlib.contextmanager
    def _gathered(self, params, write):
        params = params or [tensor for tensor in self._whole.parameters() if id(tensor) in self._sharded]
        own = {id(p): (p, self._fetch(p)) for p in params}
        with self._windows.holding(list(own.values())):
            versions = [p._version for p in params]
            yield [p.detach() for p in params]
            written = versions != [p._version for p in params]
        if not write:
            if written:
                raise zero_c.Error("parameters were written inside gathered(); pass write=True, so that the write "
                                   "reaches all ranks")
            return
        for identity, (p, copy) in own.items():
            self._engine.store(self._sharded[identity], _place.flat(copy, self._windows.layout[identity][1]).cpu())
        self._windows.changed()

    def sync_buffers(self):
        """The module's buffers become rank 0's. Collective."""
        _place.broadcast(self._comm, self._buffers.values())

    def memory(self):
        """Bytes that the engine holds on this rank: {kind: bytes} and their "total". Local. Activations are not in it."""
        return self._engine.memory()

    def traffic(self):
        """What this rank sent since the last call: {kind: calls and elements} and "bytes". Local."""
        _place.follow_stream(self._engine)
        return self._engine.traffic()

    def profile(self, capacity=_profile.CAPACITY):
        """Records when this rank reduces, gathers and updates: `with opt.profile() as profile:` around some steps. Local.

        capacity    how many pieces of work it has room for; 40 bytes each

        In these steps `with profile.span("forward"):` adds what the program does itself, and after them profile.save(path)
        writes a trace of all ranks for chrome://tracing or Perfetto. ValueError on entering it on a GPU.
        """
        names = [unit.name or "root" for unit in self._windows.units] if self._windows is not None else None
        return _profile.Profile(self._engine, self._comm, names, capacity)

    # ---- state dicts ---------------------------------------------------------

    def state_dict(self):
        """This rank's shards, masters included, for the same ranks, stage and bucket size; local.

        Load the module's weights before it: masters follow weights that are loaded later.
        """
        _place.follow_stream(self._engine)
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = _state.local_state(self)
        for hook in self._optimizer_state_dict_post_hooks.values():
            result = hook(self, state)
            state = state if result is None else result
        return state

    def full_state_dict(self, rank=None):
        """The whole state in torch.optim's form, on every rank, or on one (the others get an empty dict). Collective.

        The masters of 16-bit parameters are in it as "master"; torch.optim ignores them.
        """
        self._check_rank(rank)
        self._refresh_written()
        return _state.full_state(self, rank)

    def full_model_state_dict(self, rank=None):
        """The module's state dict with whole parameters at any stage, on the CPU: on every rank, or on one (the others get
        an empty dict). Collective.
        """
        self._check_rank(rank)
        if self._whole is None:
            raise ValueError("the optimizer was built from tensors and does not know their module; pass module= to it")
        self._engine.sync("full_model_state_dict")
        with torch.no_grad():
            return _state.full_model_state(self, rank)

    def _check_rank(self, rank):
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self._comm.world_size):
            raise ValueError(f"rank is {rank!r}; legal are None, for all, and 0 to {self._comm.world_size - 1}")

    def load_state_dict(self, state_dict):
        """Takes what state_dict() or full_state_dict() gave, or the state dict of a plain torch optimizer. Collective.

        Parameters go by their place in the groups, and options come with the state, as in torch. A whole state must be the
        same on all ranks; of parameters that are frozen here it is left out. zero_c.CheckpointError on all ranks, and nothing
        is changed, if on any of them something is missing or does not fit: groups, shapes, the optimizer, or, of a local
        state, ranks, stage or bucket size. zero_c.Mismatch if ranks load different states.
        """
        _state_loading.load(self, state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # ---- checkpoints -----------------------------------------------------------

    def save(self, path):
        """Writes parameters, buffers and all state to a folder that all ranks share. Collective.

        Any number of ranks at any stage loads it, and `weights-*.safetensors` in it any other program. Until the last
        moment the checkpoint that was there before stays whole. zero_c.CheckpointError on all ranks if it cannot be done.
        """
        self.wait_saved()
        self._refresh_written()
        _saving.save(self._engine, self._comm, path, self._describe_all)

    def save_weights(self, path):
        """Writes parameters and buffers, whole, to one safetensors file. Collective; ranks must share its folder.

        A file that was there before stays until the new one is complete. Of tied weights it has the first name.
        """
        self._refresh_written()
        _weights_file.save(self._engine, self._comm, path, lambda: _checkpoint.entries(self))

    def async_save(self, path):
        """As save(), but returns when every rank has copied its parts (its shards once more, in memory); collective.

        Writing goes on in a thread, also when the communicator is closed, and is finished before the process ends.
        wait_saved(), and the next save or load, return when it is done or raise its error; an error that none of them has
        met goes to sys.unraisablehook (standard error) at the end.
        """
        self.wait_saved()
        self._refresh_written()
        self._saving = _saving.Background(self._engine, self._comm, path, self._describe_all)

    def wait_saved(self):
        """Returns when the last async_save() is on the disk, or raises its zero_c.CheckpointError. Collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, path):
        """Takes everything from a checkpoint: parameters, buffers, state, options of the groups. Collective.

        The model and the groups must be those that were saved; ranks, stage, units and bucket sizes may be others. With as
        many ranks training goes on with the same bits. zero_c.CheckpointError on all ranks, and nothing is changed, if
        something is missing, damaged or does not fit.
        """
        self.wait_saved()
        _place.follow_stream(self._engine)
        _checkpoint.load(self, path)

    def _describe_all(self):
        return _checkpoint.entries(self), _checkpoint.about(self)

    def __reduce_ex__(self, protocol):
        raise TypeError("a ShardedOptimizer cannot be pickled or copied: it is tied to the processes of its "
                        "communicator; save opt.state_dict() or opt.full_state_dict()")

    def __deepcopy__(self, memo):
        return self.__reduce_ex__(4)


def is_active(hook):
    return isinstance(hook, _core.GradHook) and hook.active


def check_settings(stage, max_grad_norm, skip_nonfinite, reduce_op, bucket_mb):
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"stage is {stage!r}; legal: 0, 1, 2, 3")
    if max_grad_norm is not None and not is_positive(max_grad_norm):
        raise ValueError(f"max_grad_norm is {max_grad_norm!r}; legal: None, or a number above 0")
    if skip_nonfinite not in (None, True, False):
        raise ValueError(f"skip_nonfinite is {skip_nonfinite!r}; legal: None, True, False")
    if reduce_op not in ("mean", "sum"):
        raise ValueError(f"reduce_op is {reduce_op!r}; legal: 'mean', 'sum'")
    if bucket_mb is not None and not is_positive(bucket_mb):
        raise ValueError(f"bucket_mb is {bucket_mb!r}; legal: None, or a number above 0")


def plan_units(module, units, groups, names, shared_params):
    """The units of stage 3, after checks."""
    if module is None:
        raise ValueError("stage 3 gathers parameters around the forward of their modules: pass the module as the first "
                         "argument, or as module= beside groups")
    if shared_params:
        raise ValueError("stage 3 keeps every parameter once already; shared_params=True is for stages 0 to 2")
    layout = _units.assign(module, _units.choose(module, units))
    members = {id(tensor): name for unit in layout for name, tensor in unit.members}
    for group in groups:
        for tensor in group["params"]:
            if id(tensor) not in members and tensor.dtype in _arguments.DTYPES:
                raise ValueError(f"parameter '{names[id(tensor)]}' is not in the module; at stage 3 every parameter must be")
    given = {id(tensor) for group in groups for tensor in group["params"]}
    others = [(name, tensor) for unit in layout for name, tensor in unit.members if id(tensor) not in given]
    for name, tensor in others:
        _arguments.check_tensor(tensor, name, is_active, meta=True)
    _arguments.check_apart([tensor for unit in layout for _, tensor in unit.members], members)
    return layout


def check_without_effect(stage, units, prefetch, weights, init, overlap_gather):
    """Options that would do nothing here are refused."""
    if units is not None and stage != 3 and overlap_gather is not True:
        raise ValueError(f"units={units!r} has an effect at stage 3, and with overlap_gather=True, only; leave it out")
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(f"prefetch is {prefetch!r}; legal: 0 or a larger whole number")
    for name, value, plain in (("prefetch", prefetch, 1), ("weights", weights, None), ("init", init, None)):
        if value is not plain and value != plain and stage != 3:
            raise ValueError(f"{name}={value!r} has an effect at stage 3 only; leave it out")
