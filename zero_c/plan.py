"""What a model takes on each rank, and what a step sends, at each stage, before anything is started:

    python -m zero_c.plan --params 7.5e9 --ranks 64 --dtype bf16
    python -m zero_c.plan --model my_package.models:build --ranks 8
    python -m zero_c.plan --memory 80e9 --ranks 64 --dtype bf16         # the largest model

With --model memory and traffic are those of opt.memory() and opt.traffic(), to the byte; with --params alone those of a
model in equal units. With the speeds of a machine there is an estimate of a step's time beside them.

For programs the same is plan(), counted() and largest_model().
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass

from zero_c._plan_layout import lay_out
from zero_c._plan_memory import KINDS, backward_bytes, memory, outside_bytes, paper_bytes, traffic
from zero_c._plan_model import PARAM_BYTES, STATES, Counted, Listed, Param, Settings, Unit, one_of, positive, whole
from zero_c._plan_time import Machine, StepTime, compute_seconds, step_time

__all__ = ["Counted", "Listed", "Machine", "Param", "Plan", "Settings", "StagePlan", "StepTime", "Unit", "counted",
           "largest_model", "main", "plan"]

DTYPES = {name: name for name in PARAM_BYTES} | {
    "fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}
MAX_ELEMENTS = (1 << 64) // 16  # over ranks + 1: more cannot be addressed
MOST_RANKS = 65535  # 16 bits count the ranks on which a parameter was used
# A transformer has about 12 width^2 elements a layer, and published ones are 128 times as wide as they have layers.
LAYERS_CUBED = 12 * 128**2
NOT_COUNTED = ("Activations are not counted: they depend on the computation. Held in backward: the largest unit's gradients, "
               "while ranks keep pace.")


@dataclass(frozen=True)
class StagePlan:
    """One stage on one rank, in bytes.

    memory             what opt.memory() shows, see docs/design.md ("Memory")
    traffic            what opt.traffic() shows for one step
    backward_bytes     gradients of the largest unit, which autograd holds on their way to the engine: an estimate for
                       ranks that keep pace; the worst case, and no_sync(), is the gradient of the whole model
    outside_bytes      what torch keeps beside the engine: module buffers and, below stage 3, frozen parameters
    paper_bytes        what the ZeRO paper counts for a 16-bit model with Adam; None for others
    time               StepTime, or None
    """

    memory: dict
    traffic: dict
    backward_bytes: int
    outside_bytes: int
    paper_bytes: float | None = None
    time: StepTime | None = None

    @property
    def peak_bytes(self):
        """All of that together; activations come on top."""
        return self.memory["total"] + self.backward_bytes + self.outside_bytes


@dataclass(frozen=True)
class Plan:
    """What was asked, and stage -> StagePlan."""

    model: Counted | Listed
    ranks: int
    settings: Settings
    stages: dict


def plan(model, ranks, *, rank=0, machine=None, forward_seconds=None, backward_seconds=None, **settings):
    """The Plan of a model on N ranks; ValueError or TypeError says which argument is wrong and what is legal.

    model       Listed (exact), or Counted, which counted() makes of a number of elements
    rank        whose memory; others differ by 24 bytes for each piece that a slice cuts off a parameter
    machine     with forward_seconds and backward_seconds of one rank: estimates the time of a step of one backward
    settings    fields of Settings
    """
    settings = Settings(**settings)
    ranks, rank = _check(model, ranks, rank)
    if machine is not None:
        positive("forward_seconds", forward_seconds, zero=True)
        positive("backward_seconds", backward_seconds, zero=True)
    stages = {}
    for stage in settings.stages:
        layout = lay_out(model, stage, ranks, settings.bucket_bytes, rank, settings.device)
        stages[stage] = StagePlan(
            memory(layout, settings), traffic(layout, settings),
            backward_bytes(model), outside_bytes(model, stage),
            _paper_bytes(model, ranks, stage, settings),
            None if machine is None else step_time(layout, settings, machine, forward_seconds, backward_seconds))
    return Plan(model, ranks, settings, stages)


def counted(elements, dtype="float32", largest_unit=None, root=0):
    """A model of so many elements. largest_unit: elements of the largest unit of stage 3, by default the layer of a
    transformer of that size, whose width is 128 times its layers; root: elements that belong to no unit."""
    dtype = DTYPES[one_of("dtype", dtype, DTYPES)]
    elements, root = whole("params", elements, 1), whole("root", root, 0)
    rest = elements - root
    if rest < 0:
        raise ValueError(f"root is {root:,} elements and the model has {elements:,}; the root is a part of it")
    if largest_unit is None:
        layers = max(1.0, (rest / LAYERS_CUBED) ** (1 / 3))
        largest_unit = max(1, min(rest, math.ceil(rest / layers)))
    elif not 1 <= whole("largest_unit", largest_unit, 1) <= rest:
        raise ValueError(f"largest_unit is {int(largest_unit):,} elements and the model has {rest:,} outside its root; a unit "
                         f"is a part of them")
    return Counted(elements, dtype, int(largest_unit), root)


def largest_model(memory_bytes, ranks, stage, *, dtype="float32", largest_unit=None, root=0, **settings):
    """Elements of the largest counted() model whose peak_bytes fit into memory_bytes at a stage; 0: none does.

    Largest up to what padding does: 64 N elements for each unit, and a window's size.
    """
    memory_bytes, settings = whole("memory", memory_bytes, 1), Settings(**settings)
    one_of("stage", str(stage), [str(legal) for legal in settings.stages])
    ranks = whole("ranks", ranks, 1)

    def fits(elements):
        model = counted(elements, dtype, largest_unit, root)
        layout = lay_out(model, stage, ranks, settings.bucket_bytes, device=settings.device)
        return memory(layout, settings)["total"] + backward_bytes(model) <= memory_bytes

    low = max(ranks, whole("root", root, 0) + whole("largest_unit", largest_unit or 0, 0))
    if not fits(low):
        return 0
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check(model, ranks, rank):
    if not isinstance(model, (Counted, Listed)):
        raise TypeError(f"model is a {type(model).__name__}; it must be Listed or Counted, see counted()")
    if whole("ranks", ranks, 1) > MOST_RANKS:
        raise ValueError(f"ranks is {ranks}; it must be {MOST_RANKS} or less")
    if not whole("rank", rank, 0) < ranks:
        raise ValueError(f"rank is {rank}; of {ranks} ranks it must be 0 to {ranks - 1}")
    if model.elements < ranks:
        raise ValueError(f"there are {ranks} ranks and {model.elements} elements; every rank needs at least one to own")
    if model.elements > MAX_ELEMENTS // (ranks + 1):
        raise ValueError(f"params is {model.elements:.3g}; with {ranks} ranks at most "
                         f"{MAX_ELEMENTS // (ranks + 1):.3g} elements can be addressed")
    if isinstance(model, Listed):
        for param in model.params:
            one_of("dtype", param.dtype, PARAM_BYTES)
            whole("elements of a parameter", param.elements, 0)
            if not 0 <= param.unit < len(model.units):
                raise ValueError(f"a parameter is in unit {param.unit}; there are {len(model.units)} units")
    return int(ranks), int(rank)


def _paper_bytes(model, ranks, stage, settings):
    if isinstance(model, Listed) or PARAM_BYTES[model.dtype] != 2 or settings.states != 2:
        return None
    return paper_bytes(model.elements, ranks, stage)


# ---- the command line -------------------------------------------------------------


def _number(text):
    """A whole number, also as 7.5e9."""
    try:
        number = int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= number < math.inf or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a whole number, 0 or more, as in 64 or 7.5e9")
    return int(number)


def parser():
    made = argparse.ArgumentParser(
        prog="python -m zero_c.plan", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    model = made.add_argument_group("the model")
    model.add_argument("--params", type=_number, metavar="N", help="its parameters (elements), as in 7.5e9")
    model.add_argument("--model", metavar="MODULE:CALLABLE", help="what returns it, a torch.nn.Module, called on the meta device")
    model.add_argument("--memory", type=_number, metavar="BYTES",
                       help="the largest one that fits into so much memory on each rank")
    model.add_argument("--dtype", help=f"of its parameters: {', '.join(DTYPES)} (default float32; with --model its own)")
    model.add_argument("--largest-unit", type=_number, metavar="N",
                       help="with --params or --memory: elements of the largest unit (default a transformer's layer)")
    model.add_argument("--root", type=_number, metavar="N", help="elements that are in no unit, as embeddings (default 0)")
    model.add_argument("--units", metavar="CLASS,...", help="with --model: classes of the modules that are units")
    how = made.add_argument_group("how it is trained")
    how.add_argument("--ranks", type=_number, required=True, metavar="N")
    how.add_argument("--optimizer", default="adamw", help=f"{', '.join(STATES)} (default adamw)")
    how.add_argument("--amsgrad", action="store_true")
    how.add_argument("--momentum", action="store_true", help="sgd has momentum")
    how.add_argument("--bucket-mb", type=float, help="size of a reduction window (default 0.25 to 1, on GPUs 1 to 25, by size)")
    how.add_argument("--prefetch", type=_number, default=1, metavar="N", help="units gathered ahead (default 1)")
    how.add_argument("--shared-params", action="store_true", help="parameters live once per host (stages 0 to 2)")
    how.add_argument("--device", default="cpu", help="cpu, or cuda with all ranks on one host (default cpu)")
    how.add_argument("--backwards", type=_number, default=1, metavar="N", help="synchronised backwards for each step (default 1)")
    time = made.add_argument_group("the time of a step (all of these, or none)")
    time.add_argument("--link-bandwidth", type=float, metavar="B/S", help="bytes that a rank can send in a second")
    time.add_argument("--link-latency", type=float, metavar="S", help="seconds of one message")
    time.add_argument("--memory-bandwidth", type=float, metavar="B/S", help="of a rank's memory")
    time.add_argument("--flops", type=float, help="operations in a second that a rank reaches in forward and backward, and")
    time.add_argument("--tokens", type=_number, metavar="N", help="tokens of a rank in one step (6 operations a parameter); or")
    time.add_argument("--forward-seconds", type=float, metavar="S", help="of a rank without communication, and")
    time.add_argument("--backward-seconds", type=float, metavar="S")
    time.add_argument("--hops", default="ring", help="messages behind one another in a collective: ring (N - 1), tree (log2 N), "
                                                     "or one, where ranks read their peers' memory (default ring)")
    time.add_argument("--no-overlap", action="store_true", help="ranks communicate or compute, one at a time, as CPUs do")
    made.add_argument("--json", action="store_true", help="all of it, as one JSON object")
    return made


def _model(options):
    """The model that the options describe; None: --memory asks for one."""
    if (options.params is not None) + (options.model is not None) + (options.memory is not None) != 1:
        raise ValueError("give one of --params, --model and --memory")
    if options.model is None:
        if options.units is not None:
            raise ValueError("--units names classes of --model; with --params and --memory there is --largest-unit")
        if options.memory is not None:
            return None
        return counted(options.params, options.dtype or "float32", options.largest_unit, options.root or 0)
    if options.largest_unit is not None or options.root is not None:
        raise ValueError("--largest-unit and --root are for --params and --memory; the units of --model are read from it")
    if options.dtype is not None:
        one_of("dtype", options.dtype, DTYPES)
    try:
        from zero_c.torch import _plan
    except ImportError as error:
        raise ValueError(f"--model needs torch, which cannot be imported ({error}); pip install torch, or give "
                         f"--params") from None
    model = _plan.load(options.model, DTYPES.get(options.dtype))
    return _plan.listed(model, options.units.split(",") if options.units is not None else None)


def _speeds(options, elements):
    """Keyword arguments of plan() for the time, empty without speeds."""
    links = {"--link-bandwidth": options.link_bandwidth, "--link-latency": options.link_latency,
             "--memory-bandwidth": options.memory_bandwidth}
    by_flops = {"--flops": options.flops, "--tokens": options.tokens}
    by_clock = {"--forward-seconds": options.forward_seconds, "--backward-seconds": options.backward_seconds}
    given = [name for name, value in (links | by_flops | by_clock).items() if value is not None]
    if not given:
        if options.hops != "ring" or options.no_overlap:
            raise ValueError("--hops and --no-overlap are for the time of a step, which needs --link-bandwidth, --link-latency, "
                             "--memory-bandwidth and the compute time")
        return {}
    compute = by_clock if any(name in given for name in by_clock) else by_flops
    if compute is by_clock and any(name in given for name in by_flops):
        raise ValueError("give --flops and --tokens, or --forward-seconds and --backward-seconds, not both")
    missing = [name for name in links | compute if name not in given]
    if missing:
        raise ValueError(f"the time of a step also needs {', '.join(missing)}"
                         + (" (or --forward-seconds and --backward-seconds)" if set(missing) & set(by_flops) else ""))
    for name, value in links.items():
        positive(name, value, zero=name == "--link-latency")
    machine = Machine(options.link_latency, options.link_bandwidth, options.link_bandwidth, options.memory_bandwidth,
                      options.hops, not options.no_overlap)
    if compute is by_clock:
        return {"machine": machine, "forward_seconds": options.forward_seconds, "backward_seconds": options.backward_seconds}
    forward, backward = compute_seconds(elements, whole("--tokens", options.tokens, 1), positive("--flops", options.flops))
    return {"machine": machine, "forward_seconds": forward, "backward_seconds": backward}


def main(argv=None):
    """The command, with these arguments (None: those of the process)."""
    made = parser()
    options = made.parse_args(argv)
    settings = {name: getattr(options, name) for name in ("optimizer", "amsgrad", "momentum", "bucket_mb", "prefetch",
                                                          "shared_params", "device", "backwards")}
    try:
        model = _model(options)
        if model is None:
            if _speeds(options, 1):
                raise ValueError("the time of a step is for --params and --model; plan the model that --memory finds")
            print(_largest(options, settings))
            return 0
        found = plan(model, options.ranks, **_speeds(options, model.elements), **settings)
    except (TypeError, ValueError, OverflowError) as error:
        made.error(str(error))
    print(json.dumps(as_dict(found)) if options.json else table(found))
    return 0


# ---- what it prints ---------------------------------------------------------------


def as_dict(found):
    """A Plan as JSON values: bytes, elements and seconds."""
    settings = asdict(found.settings)
    model = asdict(found.model) if isinstance(found.model, Counted) else {
        "elements": found.model.elements, "tensors": len(found.model.params), "units": len(found.model.units)}
    stages = {}
    for stage, row in found.stages.items():
        stages[str(stage)] = asdict(row) | {"peak_bytes": row.peak_bytes}
        if row.time is not None:
            stages[str(stage)]["time"] = asdict(row.time) | {"total": row.time.total, "waiting": row.time.waiting}
    return {"model": model, "ranks": found.ranks, "settings": settings, "stages": stages}


def columns(rows):
    """Lines of a table, right-aligned but for the first column."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if k == 0 else cell.rjust(width) for k, (cell, width) in
                      enumerate(zip(row, widths))).rstrip() for row in rows]


def giga(number):
    """In units of 10^9, with at least three digits that count."""
    number /= 1e9
    return f"{number:,.0f}" if number >= 1000 else f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}" if number else "0"


def table(found):
    """A Plan for people."""
    model, outside = found.model, any(row.outside_bytes for row in found.stages.values())
    paper = any(row.paper_bytes is not None for row in found.stages.values())
    lines = [_headline(found), ""]
    rows = [["GB of a rank (10^9 bytes)", "parameters", "gradients", "master", "optimizer", "buffers", "total", "B/param",
             *(["ZeRO paper"] if paper else []), "held in backward", *(["beside it"] if outside else []), "peak"]]
    for stage, row in found.stages.items():
        rows.append([f"stage {stage}", *(giga(row.memory[kind]) for kind in KINDS), giga(row.memory["total"]),
                     f"{row.memory['total'] / model.elements:.3f}", *([giga(row.paper_bytes)] if paper else []),
                     giga(row.backward_bytes), *([giga(row.outside_bytes)] if outside else []), giga(row.peak_bytes)])
    lines += columns(rows) + [""]
    rows = [["sent by a rank in a step", "reduce-scatter GB", "calls", "all-gather GB", "calls", "GB", "elements of all ranks"]]
    for stage, row in found.stages.items():
        reduced, gathered = row.traffic["reduce_scatter"], row.traffic["all_gather"]
        rows.append([f"stage {stage}", giga(reduced["bytes"]), f"{reduced['calls']:,}", giga(gathered["bytes"]),
                     f"{gathered['calls']:,}", giga(row.traffic["bytes"]),
                     f"{(reduced['payload'] + gathered['payload']) / model.elements:.2f} per parameter"])
    lines += columns(rows)
    if found.stages[0].time is not None:
        rows = [["ms of a step, estimated", "forward", "backward", "step", "total", "of it waiting", "compute", "reduce",
                 "gather", "update"]]
        for stage, row in found.stages.items():
            time = row.time
            rows.append([f"stage {stage}", *(f"{1e3 * part:,.1f}" for part in (
                time.forward, time.backward, time.step, time.total, time.waiting, time.compute, time.reduce, time.gather,
                time.update))])
        lines += [""] + columns(rows)
    return "\n".join([*lines, "", NOT_COUNTED])


def _headline(found):
    model, settings = found.model, found.settings
    what = [f"{model.elements:,} parameters"]
    if isinstance(model, Counted):
        what[0] += f" of {model.dtype}"
        units = sum(count for _, count in model.unit_sizes())
        what.append(f"{units} unit{'s' * (units != 1)} of up to {model.largest_unit:,}"
                    + (f" and a root of {model.root:,}" if model.root else ""))
    else:
        what[0] += " of " + ", ".join(sorted({param.dtype for param in model.params}))
        what.append(f"{len(model.params)} tensors in {len(model.units) - 1} units and the root")
    what.append(settings.optimizer + " with amsgrad" * settings.amsgrad + " with momentum" * settings.momentum)
    what.append(f"{found.ranks} rank{'s' * (found.ranks != 1)}")
    what += [text for text, so in (("parameters once per host", settings.shared_params), ("GPUs", settings.device == "cuda"),
                                   (f"{settings.backwards} backwards a step", settings.backwards > 1)) if so]
    return "; ".join(what)


def _largest(options, settings):
    """What --memory prints."""
    dtype = options.dtype or "float32"
    found = {stage: largest_model(options.memory, options.ranks, stage, dtype=dtype, largest_unit=options.largest_unit,
                                  root=options.root or 0, **settings) for stage in Settings(**settings).stages}
    if options.json:
        return json.dumps({"memory_bytes": options.memory, "ranks": options.ranks, "dtype": DTYPES[dtype],
                           "settings": asdict(Settings(**settings)),
                           "largest_elements": {str(stage): elements for stage, elements in found.items()}})
    rows = [["largest model", "parameters"], *([f"stage {stage}", f"{elements:,}" if elements else "none"]
                                               for stage, elements in found.items())]
    return "\n".join([f"{giga(options.memory)} GB on each of {options.ranks} ranks; {DTYPES[dtype]}, {settings['optimizer']}",
                      "", *columns(rows), "", NOT_COUNTED])


if __name__ == "__main__":
    sys.exit(main())
