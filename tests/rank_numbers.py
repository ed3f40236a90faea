"""What ranks do in test_equivalence.py, test_gpu_arrays.py and test_memory_traffic.py, with NumPy only: a rank starts
at once.
"""

import itertools
import os

import numpy
import zero_c
from scenarios import digest, gradient, initial_values, scenario
from zero_c import _core, _gpu, _options


class bfloat16(numpy.void):
    """Scalar type of arrays that hold bfloat16; libraries that add the type to NumPy name it so."""


BFLOAT16 = numpy.dtype((bfloat16, numpy.dtype("V2")))


def as_given(values, dtype):
    """Values as a caller hands them over as a parameter: uint16 bits become an array of bfloat16."""
    return values.view(BFLOAT16) if dtype == "bfloat16" else values


class Host:
    """Where arrays are: the CPU."""

    def give(self, values, dtype):
        return values

    def take(self, array):
        return array

    def finish(self, opt):
        pass


class Gpu:
    """The emulated GPU of this rank; `schedule` is (seed, eager), see emu_reset."""

    def __init__(self, rank, schedule):
        import cuda_arrays
        import cuda_build

        self.arrays, self.rank = cuda_arrays, rank
        _gpu.PLUGIN = cuda_build.build_plugin()
        cuda_arrays.reset(*schedule)

    def give(self, values, dtype):
        return self.arrays.to_gpu(as_given(values, dtype), self.rank)

    def take(self, array):
        values = self.arrays.to_host(array)
        return values.view(numpy.uint16) if values.dtype == BFLOAT16 else values

    def finish(self, opt):
        """Closes everything on the GPU, since the next run is on a new machine."""
        opt.comm.close()
        assert not self.arrays.findings(), self.arrays.findings()


def sharded(scenario, comm, place=None):
    """The optimizer that the scenario asks for, and its parameters in groups."""
    place = place or Host()
    arrays = [place.give(as_given(values, param["dtype"]), param["dtype"])
              for values, param in zip(initial_values(scenario), scenario["params"], strict=True)]
    groups = [{**options, "params": [array for array, param in zip(arrays, scenario["params"], strict=True)
                                     if param["group"] == number]}
              for number, options in enumerate(scenario["groups"])]
    how = {name: scenario[name] for name in ("stage", "bucket_mb", "shared_params", "reduce_op", "skip_nonfinite", "deterministic")
           if name in scenario}
    return zero_c.ShardedOptimizer(groups, scenario["optimizer"], comm=comm, **how), arrays


def play(scenario, schedule=None):
    """Runs a scenario, on a GPU with a schedule; what this rank holds afterwards, in the form of
    scenarios.reference_run().
    """
    comm = zero_c.init()
    place = Host() if schedule is None else Gpu(comm.rank, schedule)
    opt, arrays = sharded(scenario, comm, place)
    count = len(scenario["params"])
    steps = []
    for number, this in enumerate(scenario["steps"]):
        for group, changed in this.get("options", {}).items():
            opt.param_groups[int(group)].update(changed)
        opt.loss_scale, opt.max_grad_norm = this.get("loss_scale"), this.get("max_norm")
        for turn in range(len(this["rounds"])):
            last = turn + 1 == len(this["rounds"])
            gave = False
            for index in reversed(range(count)):
                part = gradient(scenario, number, turn, comm.rank, index)
                if part is not None:
                    opt.add_grad(index, place.give(part, scenario["params"][index]["dtype"]))
                    gave = True
            # step() ends the last round by itself, and joins it on a rank that had nothing to give
            if not last or (gave and comm.rank % 2):
                opt.end_backward()
        seen = {}
        if this.get("look"):
            seen["grads"] = [opt.grad(index) for index in range(count)]
        if "clip" in this:
            seen["clip"] = opt.clip_grad_norm_(this["clip"])
        opt.step()
        norm = opt.last_step.norm if this.get("max_norm") else None
        steps.append(seen | {"norm": norm, "skipped": bool(opt.last_step.skipped),
                             "nonfinite": bool(opt.last_step.nonfinite)})
    state = [opt.full_state(index) for index in range(count)]
    params = [place.take(opt.param(index)).copy() for index in range(count)]
    for array, param in zip(arrays, params, strict=True):  # the caller's arrays have followed
        assert place.take(array).tobytes() == param.tobytes()
    found = masters(opt, params)
    place.finish(opt)
    return {"steps": steps, "params": params, "masters": found,
            "counts": [each.pop("step") for each in state], "state": state}


def sums_in_rank_order(asked):
    """What an optimizer on a GPU says of the order of its sums, before and after a step."""
    comm = zero_c.init()
    place = Gpu(comm.rank, (1, 0))
    opt = zero_c.ShardedOptimizer([place.give(numpy.zeros(3, numpy.float32), "float32")], "sgd", lr=1.0, comm=comm,
                                  deterministic=asked)
    told = [opt.last_step.deterministic]
    opt.add_grad(0, place.give(numpy.full(3, comm.rank + 1, numpy.float32), "float32"))
    opt.step()
    assert (place.take(opt.param(0)) == -1.5).all()
    told.append(opt.last_step.deterministic)
    place.finish(opt)
    return told


def without_virtual_memory(scenarios, schedules):
    """digests(), on GPUs that can give memory one address only."""
    import cuda_arrays

    cuda_arrays.offer_virtual_memory(False)
    try:
        return digests(scenarios, schedules)
    finally:
        cuda_arrays.offer_virtual_memory(True)


WARM_STEPS = 2  # before a capture


def replayed(scenario, schedule, graph):
    """A scenario of one round a step on a stream of its own, on one rank; with `graph` all steps but the first are replays.

    What the caller's arrays hold, and what is told of the steps.
    """
    comm = zero_c.init()
    place = Gpu(comm.rank, schedule)
    stream, made = place.arrays.new_stream(comm.rank), None
    opt, arrays = sharded(scenario, comm, place)
    opt.use_stream(stream)
    opt.max_grad_norm = scenario["steps"][0]["max_norm"]
    gradients = [place.arrays.to_gpu(as_given(values, param["dtype"]), comm.rank, stream)
                 for values, param in zip(initial_values(scenario), scenario["params"], strict=True)]

    def iteration():
        for index in reversed(range(len(gradients))):
            opt.add_grad(index, gradients[index])
        opt.step()

    told = []
    for number, this in enumerate(scenario["steps"]):
        for group, changed in this.get("options", {}).items():
            opt.param_groups[int(group)].update(changed)
        if made is not None and "options" in this:
            opt.before_replay()
        for index, array in enumerate(gradients):
            array.write(as_given(gradient(scenario, number, 0, comm.rank, index), scenario["params"][index]["dtype"]))
        if graph and number == WARM_STEPS:
            with place.arrays.Graph(stream) as made:
                iteration()
                told_in_capture(opt)
        if made is not None:
            made.launch()
        else:
            iteration()
        if number % 2:
            told.append((opt.last_step.norm, opt.last_step.skipped, opt.last_step.nonfinite, opt.last_step.steps))
    counts = [opt.full_state(index)["step"] for index in range(len(arrays))]
    found = [place.arrays.to_host(array, stream).tobytes().hex() for array in arrays]
    traffic = opt.traffic()
    if made is not None:
        made.close()
    del opt, arrays, gradients
    comm.close()
    assert not place.arrays.findings(), place.arrays.findings()
    return found, told, counts, traffic


def told_in_capture(opt):
    """Nothing can be told while a stream is captured, and asking does no harm."""
    for ask in (lambda: opt.last_step.norm, lambda: opt.last_step.steps, opt.traffic, lambda: opt.state(0), opt.before_replay):
        try:
            ask()
        except zero_c.Error as error:
            assert "captured" in str(error), error
        else:
            raise AssertionError("an answer in the middle of a capture")


def refused_capture(scenario, schedule):
    """What several ranks hear that begin to capture an iteration; they go on without."""
    comm = zero_c.init()
    place = Gpu(comm.rank, schedule)
    stream = place.arrays.new_stream(comm.rank)
    opt, arrays = sharded(scenario, comm, place)
    opt.use_stream(stream)
    gradients = [place.arrays.to_gpu(as_given(values, param["dtype"]), comm.rank, stream)
                 for values, param in zip(initial_values(scenario), scenario["params"], strict=True)]
    said = ""
    for number in range(2):
        if number == 1:
            try:
                with place.arrays.Graph(stream):
                    opt.add_grad(0, gradients[0])
            except ValueError as error:
                said = str(error)
        for index in reversed(range(len(gradients))):
            opt.add_grad(index, gradients[index])
        opt.step()
    assert opt.last_step.steps == 2
    del opt, arrays, gradients
    comm.close()
    assert not place.arrays.findings(), place.arrays.findings()
    return said


def sharded_parameters(scenario, schedule, share):
    """The parameters after a scenario of one round a step at stage 3 on a GPU, each parameter a unit of its own.

    share: the GPU lets units share memory.
    """
    comm = zero_c.init()
    place = Gpu(comm.rank, schedule)
    place.arrays.offer_virtual_memory(share)
    on_gpu = _gpu.communicator(comm, comm.rank)
    values = initial_values(scenario)
    params = [(f"p{index}", array.size, param["dtype"], param["group"], array, index, False)
              for index, (array, param) in enumerate(zip(values, scenario["params"], strict=True))]
    rule = scenario["optimizer"]
    groups = [_options.to_core(rule, _options.resolve(rule, options)) for options in scenario["groups"]]
    engine = _core.Engine(on_gpu, params, groups, rule=rule, stage=3, units=[(None, 1, False) for _ in params],
                          bucket_bytes=1024)
    assert engine.units_share == share
    for number in range(len(scenario["steps"])):
        for index in range(len(params)):
            engine.acquire(index, False)
            engine.release(index)
        for index in reversed(range(len(params))):
            engine.acquire(index, True)
            given = place.give(gradient(scenario, number, 0, comm.rank, index), params[index][2])
            engine.add_grad(index, _core.GpuArray(given, _gpu.LEGACY_STREAM, "gradient"))
            engine.release(index)
        engine.end_round()
        engine.step(groups)
    found = [engine.fetch(index).reshape(array.shape) for index, array in enumerate(values)]
    del engine, given
    on_gpu.close()
    place.arrays.offer_virtual_memory(True)
    assert not place.arrays.findings(), place.arrays.findings()
    return found


def masters(opt, params):
    """The exact value of each parameter, as fp32 (fp64); only the engine itself tells that of 16-bit ones."""
    return [param.copy() if param.dtype in (numpy.float32, numpy.float64)
            else opt._engine.read(index, "master").reshape(param.shape) for index, param in enumerate(params)]


def digests(scenarios, schedules=(None,)):
    """The digest of each scenario's result: the results themselves are many arrays."""
    if "ZERO_C_TEST_CORES" in os.environ:
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[:int(os.environ["ZERO_C_TEST_CORES"])])
    return [digest(play(each, schedule)) for each, schedule in zip(scenarios, itertools.cycle(schedules))]


def machine_has(isa):
    """Whether ZERO_C_ISA=<isa>, which this rank was started with, can be honoured."""
    assert os.environ["ZERO_C_ISA"] == isa
    try:
        opt = zero_c.ShardedOptimizer([numpy.zeros(1, numpy.float32)], "sgd", lr=1.0, comm=zero_c.init())
        opt.add_grad(0, numpy.ones(1, numpy.float32))
        opt.step()
    except (zero_c.Error, ImportError, ValueError) as error:
        assert "ZERO_C_ISA" in str(error), error
        return False
    return True


def memory_and_traffic(stage, optimizer, dtype, shapes, bucket_mb, shared, round_counts, micro=1):
    """memory() before, and traffic() of, a step after each number of synchronised backwards."""
    run = scenario(optimizer=optimizer, shapes=shapes, dtypes=[dtype], stage=stage, bucket_mb=bucket_mb,
                   shared_params=shared, steps=[{"rounds": [{"micro": micro}] * rounds} for rounds in round_counts])
    comm = zero_c.init()
    opt, _ = sharded(run, comm)
    found = {"start": opt.traffic(), "memory": [], "traffic": []}
    for number, rounds in enumerate(round_counts):
        for turn in range(rounds):
            for index in reversed(range(len(shapes))):
                opt.add_grad(index, gradient(run, number, turn, comm.rank, index))
            opt.end_backward()
        found["memory"].append(opt.memory())
        opt.step()
        found["traffic"].append(opt.traffic())
    return found
