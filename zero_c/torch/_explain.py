"""explain(): what an optimizer has planned, in words."""

from ._arguments import options_of

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
SHOWN_UNITS = 12


def explain(opt):
    """Prints how a ShardedOptimizer lays out its model on this rank: parameters, groups, windows, units, memory. Local."""
    print("\n".join(lines(opt)))


def lines(opt):
    plan, memory = opt._engine.plan(), opt.memory()
    place = "the CPU" if opt._comm.gpu < 0 else f"GPU {opt._comm.gpu}"
    trained = [tensor for _, tensor, _ in opt._managed]
    yield (f"ShardedOptimizer: {opt._optimizer}, stage {opt._stage}, rank {opt._comm.rank} of {opt._comm.world_size} on {place}, "
           f"{'mean' if opt._mean else 'sum'} of gradients{'' if opt._comm.deterministic else ' (not in rank order)'}")
    yield f"trained      {count(len(trained), 'parameter')}, {elements(trained)}"
    if opt._frozen:
        yield f"frozen       {count(len(opt._frozen), 'parameter')}, {elements([tensor for _, tensor, _ in opt._frozen])}"
    for number, group in enumerate(opt.param_groups):
        options = ", ".join(f"{key} {value}" for key, value in options_of(group).items())
        yield f"group {number}      {count(len(group['params']), 'parameter')}: {options}"
    padding = plan["padded_elems"] - plan["elems"]
    yield (f"gradients    reduced in {count(plan['buckets'], 'bucket')} of {count(plan['spaces'], 'flat space')} (one for each dtype), "
           f"{padding:,} elements of padding")
    if opt._windows is not None:
        yield from unit_lines(opt)
    yield f"memory       {size(memory['total'])} on this rank: " + ", ".join(
        f"{name.replace('_', ' ')} {size(memory[name])}" for name in memory if name != "total" and memory[name])


def unit_lines(opt):
    units = [unit for unit in opt._windows.units if unit.members]
    yield f"units        {len(units)}, gathered for their forward and their backward"
    for unit in units[:SHOWN_UNITS]:
        name = "root" if unit.resident else unit.name
        how = "stays gathered until step()" if unit.resident else f"level {unit.level}"
        yield f"  {name}: {count(len(unit.members), 'parameter')}, {elements([p for _, p in unit.members])}, {how}"
    if len(units) > SHOWN_UNITS:
        yield f"  and {len(units) - SHOWN_UNITS} more"


def elements(tensors):
    """"1,024 elements of float32, 64 of bfloat16"."""
    by_dtype = {}
    for tensor in tensors:
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.numel()
    return ", ".join(f"{number:,} of {str(dtype).removeprefix('torch.')}" for dtype, number in by_dtype.items()) or "none"


def count(number, what):
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(byte_count):
    for name, unit in UNITS:
        if byte_count >= unit:
            return f"{byte_count / unit:.1f} {name}"
    return f"{byte_count} bytes"
