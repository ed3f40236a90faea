"""Training runs as data: what every rank is given, step by step.

A scenario is a dict of JSON values, so that it can be handed to rank processes
and printed when it fails.  Values and gradients are not in it: they follow from
its seed and from (step, round, rank, parameter), so that a rank and the
reference draw the same bits on their own.

    params     [{"shape", "dtype", "group"}]
    groups     [options], as in torch.optim; "optimizer" names the rule
    steps      [{"rounds": [round], "options": {group: changed options}, "loss_scale",
                 "clip": by clip_grad_norm_(), "max_norm": inside step(), "look": read the gradients before it}]
    round      {"micro": m,          m backwards, of which the first m - 1 are in no_sync()
                "unused": {rank: [parameter]},
                "bad": [[rank, parameter, value]]}    puts inf or nan into a gradient
    stage, bucket_mb, shared_params, reduce_op, skip_nonfinite    how the engine runs it

bfloat16 arrays are their bits in uint16 throughout.
"""

import hashlib

import numpy
from reference import ReferenceOptimizer, f32_to_bf16, same_bits, sum_type, to_sum_type

SHAPES = [[3], [], [0], [5, 7], [64], [65], [1, 129], [2, 3, 4], [1000]]
DTYPES = ["float32", "float64", "bfloat16", "float16"]
OPTIMIZERS = {
    "adamw": ("adamw", {"lr": 0.01, "weight_decay": 0.1}),
    "adam": ("adam", {"lr": 0.02, "weight_decay": 0.05, "betas": [0.8, 0.95], "eps": 1e-6}),
    "amsgrad": ("adamw", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "sgd": ("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.8, "nesterov": True, "maximize": True}),
}


def narrow(values, dtype):
    values = numpy.asarray(values)
    return f32_to_bf16(values).reshape(values.shape) if dtype == "bfloat16" else values.astype(dtype)


def widen(values, dtype):
    """As the type in which gradients of `dtype` are added up."""
    return to_sum_type(values, dtype)


def _draw(key, shape, dtype, spread):
    """Values of many magnitudes, negative, zero and subnormal ones among them."""
    rng = numpy.random.default_rng(key)
    exact = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, 3, shape)
    exact = numpy.where(rng.random(shape) < 0.05, 0.0, exact)
    if dtype in ("float32", "bfloat16"):
        exact = numpy.where(rng.random(shape) < 0.01, exact * 2.0**-130, exact)
    return numpy.asarray(narrow(exact, dtype))


def initial_values(scenario):
    return [_draw([scenario["seed"], 0, index], param["shape"], param["dtype"], 4)
            for index, param in enumerate(scenario["params"])]


def gradient(scenario, step, turn, rank, index):
    """What one rank hands over for a parameter in a round; None: nothing.

    The backwards of a round that are in no_sync() add up in the parameter's own
    dtype, as autograd does in .grad.
    """
    param, this = scenario["params"][index], scenario["steps"][step]["rounds"][turn]
    if index in this.get("unused", {}).get(str(rank), []):
        return None
    scale = scenario["steps"][step].get("loss_scale", 1.0)
    total = None
    for micro in range(this.get("micro", 1)):
        part = _draw([scenario["seed"], 1, step, turn, micro, rank, index], param["shape"], param["dtype"], 12)
        part = narrow(widen(part, param["dtype"]) * scale, param["dtype"])
        total = part if total is None else narrow(
            widen(total, param["dtype"]) + widen(part, param["dtype"]), param["dtype"])
    for bad_rank, bad_index, value in this.get("bad", []):
        if (bad_rank, bad_index) == (rank, index) and total.size:
            total = total.copy()
            total.reshape(-1)[total.size // 2] = narrow(numpy.float32([float(value)]), param["dtype"])[0]
    return total


def scenario(seed=0, optimizer="adamw", shapes=SHAPES, dtypes=("float32",), steps=None, **how):
    """A scenario over all `shapes`, dtypes taken in turn, the last quarter in a second group; `how`: how it runs."""
    rule, options = OPTIMIZERS[optimizer]
    other = {"lr": options["lr"] / 3, "weight_decay": 0.0}
    params = [{"shape": list(shape), "dtype": dtypes[index % len(dtypes)], "group": int(4 * index >= 3 * len(shapes))}
              for index, shape in enumerate(shapes)]
    return {"seed": seed, "optimizer": rule, "groups": [options, options | other], "params": params,
            "steps": steps or plain_steps(3)} | how


def plain_steps(count, **options):
    return [{"rounds": [{}]} | options for _ in range(count)]


def reference_run(scenario, ranks):
    """What every rank must hold afterwards, from reference.py; the same form as rank_numbers.play() gives."""
    by_group = [{**options, "params": [i for i, param in enumerate(scenario["params"]) if param["group"] == number]}
                for number, options in enumerate(scenario["groups"])]
    opt = ReferenceOptimizer(initial_values(scenario), ranks, scenario["optimizer"], by_group,
                             skip_nonfinite=scenario.get("skip_nonfinite", False),
                             reduce_op=scenario.get("reduce_op", "mean"))
    def shaped(arrays):  # the reference may turn a 0-d array into one of one element
        return [numpy.reshape(array, param["shape"])
                for array, param in zip(arrays, scenario["params"], strict=True)]

    steps = []
    with numpy.errstate(all="ignore"):
        for number, this in enumerate(scenario["steps"]):
            for group, changed in this.get("options", {}).items():
                opt.groups[int(group)].update(changed)
            opt.loss_scale, opt.max_grad_norm = this.get("loss_scale", 1.0), this.get("max_norm")
            for turn in range(len(this["rounds"])):
                opt.accumulate([[gradient(scenario, number, turn, rank, index)
                                 for index in range(len(scenario["params"]))] for rank in range(ranks)])
            seen = {}
            if this.get("look"):
                seen["grads"] = shaped([opt.averaged(index) for index in range(len(scenario["params"]))])
            if "clip" in this:
                seen["clip"] = opt.clip_grad_norm(this["clip"])
            opt.step()
            steps.append(seen | {"norm": opt.norm if this.get("max_norm") else None, "skipped": opt.skipped,
                                 "nonfinite": bool(opt.nonfinite)})

    return {"steps": steps, "params": shaped(opt.params), "masters": shaped(opt.masters),
            "state": [_whole_state(scenario, index, state) for index, state in enumerate(opt.state)],
            "counts": [state["step"] for state in opt.state]}


def _whole_state(scenario, index, state):
    """What the optimizer keeps for a parameter; zeros before its first step."""
    param = scenario["params"][index]
    options = scenario["groups"][param["group"]]
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(options.get("amsgrad"))
    if scenario["optimizer"] == "sgd":
        names = ["momentum_buffer"] * bool(options.get("momentum"))
    zeros = numpy.zeros(param["shape"], sum_type(param["dtype"]))
    return {name: numpy.reshape(state.get(name, zeros), param["shape"]) for name in names}


def digest(value):
    """A text that two results share exactly when difference() finds none."""
    sha = hashlib.sha256()

    def add(item):
        if isinstance(item, dict):
            for name in sorted(item):
                sha.update(name.encode())
                add(item[name])
        elif isinstance(item, (list, tuple)):
            sha.update(b"[")
            for each in item:
                add(each)
        elif isinstance(item, (numpy.ndarray, numpy.generic, float)):
            array = numpy.array(item)
            sha.update(f"{array.dtype}{array.shape}".encode())
            if array.dtype.kind == "f":
                array[numpy.isnan(array)] = numpy.nan
            sha.update(array.tobytes())
        else:
            sha.update(repr(item).encode())

    add(value)
    return sha.hexdigest()


def difference(actual, expected):
    """None, or the first thing in which two results differ."""
    for number, (ours, theirs) in enumerate(zip(actual["steps"], expected["steps"], strict=True)):
        for name, value in theirs.items():
            if name == "grads":
                for index, (a, b) in enumerate(zip(ours["grads"], value, strict=True)):
                    if not same_bits(a, b):
                        return f"step {number}: gradient of parameter {index}: {_first(a, b)}"
            elif value is not None and not (ours[name] == value or (ours[name] != ours[name] and value != value)):
                return f"step {number}: {name} is {ours[name]!r}, reference {value!r}"
    if actual["counts"] != expected["counts"]:
        return f"step counts are {actual['counts']}, reference {expected['counts']}"
    for what in ("params", "masters"):
        for index, (a, b) in enumerate(zip(actual[what], expected[what], strict=True)):
            if not same_bits(a, b):
                return f"{what}[{index}]: {_first(a, b)}"
    for index, (ours, theirs) in enumerate(zip(actual["state"], expected["state"], strict=True)):
        for name, value in theirs.items():
            if not same_bits(ours[name], value):
                return f"{name} of parameter {index}: {_first(ours[name], value)}"
    return None


def _first(a, b):
    a, b = numpy.asarray(a), numpy.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{list(a.shape)}, reference {b.dtype}{list(b.shape)}"
    where = [i for i in range(a.size) if not same_bits(a.reshape(-1)[i:i + 1], b.reshape(-1)[i:i + 1])]
    at = where[0]
    return f"{len(where)} of {a.size} elements, first [{at}]: {a.reshape(-1)[at]!r}, reference {b.reshape(-1)[at]!r}"
