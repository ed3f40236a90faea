"""Stage 3: when a unit's parameters are there.

A unit's parameters have their values ("its window is open") during its forward
and during its backward.  Forward is plain: hooks around the module's call.
Backward is not, because autograd calls no module: what can be seen is that the
gradient of a tensor is about to be used.  So every tensor that a call of a unit
made gets a hook, which opens the unit before the first node of that call runs.

Which tensors.  Those in the outputs, at any depth, and in the inputs, which a
module may write in place; and the tensor that they are views of, since an
in-place write to a view takes the view's own node out of the graph.  Only those
that were made in this call: a tensor that was just passed through would open the
unit in the middle of an earlier one's backward.  Nodes carry the number of their
making, but a number of each thread, so in a forward that runs inside a backward
(a checkpoint) only the identity of the inputs' nodes says what was there before.

When a unit closes.  Within one run of the graph (a "graph task") nodes run in the
reverse order of their numbers as far as they depend on one another; when a node
of number s is about to run, every call that began after s has run all its nodes.
These calls' units close then; the others when the task ends.

A forward inside a backward, or a nested backward, may need the memory of a unit
whose backward is under way.  That unit is displaced: closed, and opened again when
the inner one is over.

A backward that raises never tells its end; its end callback is destroyed instead,
and the units it had open are closed at the next opportunity.
"""

import bisect
import contextlib
import warnings
import weakref

import torch

import zero_c

from . import _guard, _place, _units

graph_task = torch._C._current_graph_task_id
next_node_number = torch._C._autograd._get_sequence_nr
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
saved_tensors_hooks_now = torch._C._autograd._top_saved_tensors_default_hooks

NO_TASK = -1
LEAVES = (int, float, complex, str, bytes, bool, torch.dtype, torch.device, torch.nn.Module)


def tensors_in(value):
    """Every tensor in a value: in tuples, lists, sets, dicts, dataclasses and other objects with attributes."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        item = waiting.pop()
        if item is None or isinstance(item, LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(item)
        elif hasattr(item, "__dict__"):
            waiting.extend(vars(item).values())
    return found


def made_by(tensor):
    """The nodes that made a tensor and the one that it is a view of."""
    base = tensor._base if tensor._is_view() else None
    return [node for node in (tensor.grad_fn, base.grad_fn if base is not None else None) if node is not None]


class without_grad:  # noqa: N801
    """As torch.no_grad(), for a moment: assigning to .data is faster in it."""

    __slots__ = ("before",)

    def __enter__(self):
        self.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_):
        torch._C._set_grad_enabled(self.before)


class Call:
    """One call of a unit's forward: its module's, or that of a layer of the root when the root itself is not running."""

    __slots__ = ("unit", "module", "start", "before", "checking")

    def __init__(self, unit, module, inputs):
        self.unit, self.module = unit, module
        self.start = next_node_number()
        self.before = {node for tensor in tensors_in(inputs) for node in made_by(tensor)}
        self.checking = None


class Trigger:
    """Hook of a tensor that a call made: node number `node` is about to run.

    It lives in the graph, which the garbage collector cannot look into and which the model may keep: it must not keep
    the model in turn.
    """

    __slots__ = ("runtime", "unit", "start", "node", "step", "around")

    def __init__(self, runtime, call, node, around):
        self.runtime, self.unit, self.start, self.node = weakref.ref(runtime), call.unit.index, call.start, node
        self.step, self.around = runtime.steps, around

    def __call__(self, _):
        runtime = self.runtime()
        if runtime is None:
            raise zero_c.Error("backward through a model whose ShardedOptimizer, and with it the parameters, is gone")
        runtime.before_backward(self)


def warn_of_own_memory(engine):
    """Stage 3 saves less than it is chosen for where memory can have one address only."""
    if not engine.units_share:
        warnings.warn(f"GPU {engine.gpu}, or its virtualisation, has no virtual memory management, so at stage 3 every "
                      f"unit has memory of its own: each rank holds all parameters, as at stage 2, besides its shards; "
                      f"stage 2 needs less memory here", stacklevel=5)


class FirstCheck:
    """Looks, in the first step, at every tensor that autograd saves and that lies in a unit's memory.

    Such a tensor is right whenever its unit is gathered, and only then; a view that left its unit by another way than
    the outputs would be read, silently wrong, after another unit has taken the memory.  Also lives in the graph.
    """

    def __init__(self, runtime):
        self.runtime = weakref.ref(runtime)

    def pack(self, tensor):
        runtime = self.runtime()
        unit = runtime.unit_of(tensor)
        if unit is None:
            return tensor.detach()  # a saved output itself would make a circle with the node that saved it
        if not unit.running and not unit.resident:
            raise zero_c.Error(f"rank {runtime.rank}: a view of a parameter of {unit} is used outside its forward; use it "
                               f"inside, or a copy (clone())")
        return unit.index, tensor.detach()

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        number, tensor = packed
        runtime = self.runtime()
        unit = runtime.units[number] if runtime is not None else None
        if unit is not None and not unit.backwards and not unit.resident:
            raise zero_c.Error(f"rank {runtime.rank}: backward needs parameters of {unit} before it reached any of its "
                               f"outputs: a tensor computed in its forward left it by another way, for example as an "
                               f"attribute; return it")
        return tensor


class TaskEnd:
    """Called at the end of a graph task; destroyed uncalled when it raised."""

    def __init__(self, runtime, task):
        self.runtime, self.task = runtime, task

    def __call__(self):
        runtime, self.runtime = self.runtime, None
        runtime.after_backward(self.task)

    def __del__(self):
        if self.runtime is not None:
            self.runtime.dead.append(self.task)


class Runtime:
    """The windows of all units of one optimizer, opened and closed as training goes."""

    def __init__(self, engine, module, units, trained, layout):
        self.engine, self.units, self.rank = engine, units, engine.comm.rank
        self.device = torch.device("cpu") if engine.gpu < 0 else torch.device("cuda", engine.gpu)
        self.trained = trained  # id(parameter) -> the engine's index, of those that are not frozen
        self.tree = _units.tree(module)
        self.steps = 0  # how often the parameters changed
        self.active = []  # calls of forward that are running, innermost last
        self.tasks = {}  # graph task -> {unit: start of its call}
        self.dead = []  # tasks that raised
        self.displaced = []
        self.held = set()  # ids of parameters that have values of their own
        self.layout = layout  # id(parameter) -> (shape, strides) of its values
        # The root also without parameters: its calls are where an order of units begins.
        self.used = [unit for unit in units if unit.members or unit.resident]
        self.warned = False
        ranges = sorted((unit.first_address, unit.last_address, unit.index) for unit in self.used if unit.last_address)
        self.range_starts, self.ranges = [first for first, _, _ in ranges], ranges
        self.handles = []
        _guard.runtimes.add(self)
        for unit in self.used:
            self._watch(unit, unit.module)
        # A method of the model other than forward calls its layers directly; those of units have hooks anyway.
        for layer in _units.layers_of(units[0]):
            self._watch(units[0], layer)

    def _watch(self, unit, module):
        inner = unit.module is not module

        def before(called, arguments, keywords):
            if not (inner and unit.running):
                self.before_forward(unit, module, called, arguments, keywords)

        def after(called, arguments, keywords, output):
            self.after_forward(called, arguments, keywords, output)

        # Under torch.compile they run as they are, between compiled pieces: there is nothing to compile in them.
        before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        self.handles += [module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                         module.register_forward_hook(after, always_call=True, with_kwargs=True)]

    # ---- opening and closing -------------------------------------------------

    def open(self, unit, backward=False):
        """Gathers a unit and shows its parameters."""
        if unit.is_open:
            return
        user = self.engine.unit_user(unit.index)
        if user is not None and user != unit.index:
            self._displace(self.units[user], unit, backward)
        _place.follow_stream(self.engine)
        # A recomputed forward belongs to the order of the backward that it is a part of.
        self.engine.acquire(unit.index, backward or graph_task() != NO_TASK)
        try:
            with without_grad():
                fault = unit.window.open(not backward)  # what happens between forward and backward is seen at the step
            if fault is not None:
                raise zero_c.Error(self._say_fault(unit, *fault))
        except BaseException:
            self.engine.release(unit.index)
            raise
        unit.is_open = True

    def _displace(self, owner, unit, backward):
        if owner.running:
            raise zero_c.Error(f"rank {self.rank}: {owner} is still running its forward, and shares memory with {unit}; "
                               f"a unit that calls another one must contain it. Make one unit of them (units=)")
        if backward and graph_task() in owner.backwards:
            raise zero_c.Error(f"rank {self.rank}: {owner} and {unit} share memory and are both in the middle of their "
                               f"backward; make one unit of them (units=)")
        if owner.backwards and owner not in self.displaced:
            self.displaced.append(owner)
        self.close(owner)

    def close(self, unit):
        if not unit.is_open:
            return
        unit.is_open = False
        try:
            with without_grad():
                unit.window.close()
        finally:
            self.engine.release(unit.index)

    def _close_if_unused(self, unit):
        if not unit.running and not unit.backwards:
            self.close(unit)

    def _restore(self):
        """What an inner forward or backward displaced comes back, if its backward goes on."""
        if not self.displaced or self.active:
            return
        displaced, self.displaced = self.displaced, []
        for unit in displaced:
            if unit.backwards:
                self.open(unit, True)

    def _bury(self):
        """Closes what backwards that raised had open."""
        while self.dead:
            task = self.dead.pop()
            for unit in self.tasks.pop(task, {}):
                unit.backwards.pop(task, None)
                self._close_if_unused(unit)

    def _say_fault(self, unit, position, reason):
        name, parameter = unit.members[position]
        what = {
            "replaced": "is not the Parameter that the optimizer was built with: the module has another one in its place "
                        "(an assignment, or load_state_dict(assign=True)); copy values inside opt.gathered(write=True)",
            "moved": f"does not show its guard any more: it is now {tuple(parameter.shape)}, {parameter.dtype}, on "
                     f"{parameter.device}. Something replaced its memory (.to(), .half(), .data = ...); change the module "
                     f"before building the optimizer, and write inside opt.gathered(write=True)",
            "written": "was written while its values were not there (outside its unit's forward and backward), so the "
                       "write is lost; write inside opt.gathered(write=True)",
        }[reason]
        return f"rank {self.rank}: parameter '{name}' {what}"

    # ---- forward -------------------------------------------------------------

    def before_forward(self, unit, watched, module, arguments, keywords):
        call = Call(unit, module, (arguments, keywords))
        self.active.append(call)
        unit.running += 1
        unit.has_run = True
        self._bury()
        if module is not watched:
            raise zero_c.Error(f"rank {self.rank}: this {type(module).__name__} is a copy of {unit}, whose parameters are "
                               f"sharded; build a new ShardedOptimizer for a copy, from weights that are saved inside "
                               f"opt.gathered(), or copy the model before building the first one")
        self.open(unit)
        if len(self.active) == 1 and torch.is_grad_enabled() and graph_task() == NO_TASK:
            self._begin_outermost(call)

    def _begin_outermost(self, call):
        if not self.warned and torch.is_autocast_enabled(self.device.type) and any(
                parameter.dtype == torch.float32 for unit in self.used for _, parameter in unit.members):
            self.warned = True
            warnings.warn("autocast keeps a 16-bit copy of every float32 weight until backward, which stage 3 cannot "
                          "discard; a model in bfloat16 (model.to(torch.bfloat16) before building the optimizer) keeps "
                          "float32 masters in the shards and gathers in 16 bits", stacklevel=4)
        # Under other hooks, a checkpoint's for example, it would take their tensors away.
        if self.steps == 0 and saved_tensors_hooks_now(False) is None:
            check = FirstCheck(self)
            call.checking = torch.autograd.graph.saved_tensors_hooks(torch.compiler.disable(check.pack),
                                                                     torch.compiler.disable(check.unpack))
            call.checking.__enter__()

    def after_forward(self, module, arguments, keywords, output):
        if not self.active or self.active[-1].module is not module:
            return  # it was not this call that began one
        call = self.active.pop()
        unit = call.unit
        unit.running -= 1
        if call.checking is not None:
            call.checking.__exit__(None, None, None)
        try:
            outputs = tensors_in(output)
            self._refuse(unit, outputs)
            if torch.is_grad_enabled() and unit.is_open:
                self._hook_tensors(call, outputs + tensors_in((arguments, keywords)))
        finally:
            self._close_if_unused(unit)
            self._restore()

    def _refuse(self, unit, outputs):
        for tensor in outputs:
            if is_transformed(tensor):
                raise zero_c.Error(f"rank {self.rank}: {unit} runs inside a torch.func transform, which stage 3 cannot "
                                   f"follow; use stage 2")
            if self.unit_of(tensor) is unit:
                raise zero_c.Error(f"rank {self.rank}: {unit} returned its own parameter or a view of it, whose memory is "
                                   f"used for other units afterwards; return a copy (clone())")

    def _hook_tensors(self, call, candidates):
        inside = graph_task() != NO_TASK
        around = tuple((other.unit.index, other.start) for other in self.active)
        done = set()
        for tensor in candidates:
            for made in (tensor, tensor._base if tensor._is_view() else None):
                if made is None or id(made) in done or not made.requires_grad or made.grad_fn is None:
                    continue
                done.add(id(made))
                number = made.grad_fn._sequence_nr()
                if made.grad_fn not in call.before and (inside or number >= call.start):
                    made.register_hook(Trigger(self, call, number, around))

    # ---- backward ------------------------------------------------------------

    def before_backward(self, trigger):
        unit, task = self.units[trigger.unit], graph_task()
        if torch.is_grad_enabled():
            raise zero_c.Error(f"rank {self.rank}: create_graph=True runs a backward of {unit} whose own graph would need "
                               f"its parameters later; higher-order gradients do not work at stage 3, use stage 2")
        if trigger.step != self.steps:
            raise zero_c.Error(f"rank {self.rank}: the parameters of {unit} changed between its forward and its backward "
                               f"(a step, or a write); run the forward again")
        self._bury()
        if task not in self.tasks:
            queue_callback(TaskEnd(self, task))
            self.tasks[task] = {}
        begun = self.tasks[task]
        done = [other for other, start in begun.items() if start > trigger.node and other is not unit]
        for other in done:
            self._finish(other, task)
        if done:  # their gradients should be gone before this unit makes its own
            self.engine.drain()
        for number, start in trigger.around:  # a loss may bypass the outputs of the units around
            if self.units[number] not in begun:
                self._begin(self.units[number], task, start)
        self._begin(unit, task, trigger.start)

    def _begin(self, unit, task, start):
        self.tasks[task][unit] = unit.backwards[task] = start
        self.open(unit, True)

    def _finish(self, unit, task):
        del self.tasks[task][unit]
        unit.backwards.pop(task, None)
        self._close_if_unused(unit)

    def after_backward(self, task):
        for unit in list(self.tasks.get(task, ())):
            self._finish(unit, task)
        self.tasks.pop(task, None)
        self._restore()
        for unit in self.used:
            if not unit.has_run:
                self._refuse_bypassed(unit)

    def _refuse_bypassed(self, unit):
        """A unit that never ran, and yet has a gradient: it showed NaN to whoever used its parameters."""
        for name, parameter in unit.members:
            index = self.trained.get(id(parameter))
            if index is not None and self.engine.has_grad(index):
                raise zero_c.Error(f"rank {self.rank}: parameter '{name}' was used, but {unit}, to which it belongs, was never "
                                   f"called: the module around reads it directly. Make that module the unit (units=), and "
                                   f"not this one")

    # ---- whose memory -----------------------------------------------------------

    def unit_of(self, tensor):
        """The unit in whose memory a tensor lies, or None."""
        if tensor.layout != torch.strided or tensor.device.type != self.device.type or not tensor.numel():
            return None
        address = tensor.data_ptr()
        position = bisect.bisect_right(self.range_starts, address) - 1
        if position < 0 or address >= self.ranges[position][1]:
            return None
        return self.units[self.ranges[position][2]]

    # ---- between steps ---------------------------------------------------------

    def check(self):
        """Before a step: nothing is in use, and every parameter is as it was left."""
        self._bury()
        for holder, key, module, name in self.tree:
            if holder.get(key) is not module:
                raise zero_c.Error(f"rank {self.rank}: module '{name}' is not the one that the optimizer was built with; "
                                   f"it was replaced. Change the model before, or build a new ShardedOptimizer")
        for unit in self.used:
            if unit.is_open:
                raise zero_c.Error(f"rank {self.rank}: the optimizer was called while {unit} is in use; call it after "
                                   f"backward() has returned")
            fault = unit.window.check()
            if fault is not None:
                raise zero_c.Error(self._say_fault(unit, *fault))

    def before_step(self):
        if self.held:
            raise zero_c.Error(f"rank {self.rank}: step() inside gathered(), whose copies would be of before the step; call it "
                               f"outside")
        self.changed()

    def changed(self):
        """The parameters have new values."""
        self.steps += 1

    @contextlib.contextmanager
    def holding(self, pairs):
        """Parameters show these tensors instead, and nobody touches them: pairs of (parameter, tensor)."""
        self.check()
        at = {id(parameter): (unit, position) for unit in self.used for position, (_, parameter) in enumerate(unit.members)}
        guards = [parameter.data for parameter, _ in pairs]
        own = {id(parameter) for parameter, _ in pairs}
        if own & self.held:
            raise zero_c.Error(f"rank {self.rank}: gathered() inside gathered() of the same parameters")
        # A saved Parameter would follow .data to its guard; the copy it shows now is what was used.
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.detach() if id(tensor) in own else tensor, lambda tensor: tensor)
        try:
            for parameter, tensor in pairs:
                unit, position = at[id(parameter)]
                unit.window.hold(position, True)
                parameter.data = tensor
                self.held.add(id(parameter))
            with keep:
                yield
        finally:
            for (parameter, _), guard in zip(pairs, guards, strict=True):
                unit, position = at[id(parameter)]
                parameter.data = guard
                unit.window.hold(position, False)
                self.held.discard(id(parameter))

    def name_of(self, parameter):
        return next(name for unit in self.used for name, member in unit.members if member is parameter)

    def unit_around(self, parameter):
        return next(unit for unit in self.used if any(member is parameter for _, member in unit.members))

    def is_held(self, parameter):
        """Whether a parameter has values of its own just now."""
        return id(parameter) in self.held
