"""Checks of arrays from several libraries, through DLPack, and of work on streams other than the default one."""
import importlib
from contextlib import nullcontext

import numpy
import torch
import zero_c
from gpu_check_child import Failed, Skip
from gpu_check_models import LR, OPTIONS, Transformer, built, check_near, same_operations_same_bits, train

DEVICE = "cuda"
SHAPES = (3000, 7), (64, 64), (1,), (129,)
STEPS = 3
HEAD_START_CYCLES = 5_000_000       # of a stream's work before the host goes on: some milliseconds


def numbers(seed):
    generator = numpy.random.default_rng(seed)
    return [generator.standard_normal(shape, dtype=numpy.float32) for shape in SHAPES]


# ---- libraries ----------------------------------------------------------------------


def torchs_values():
    params = [torch.from_numpy(values).to(DEVICE).requires_grad_() for values in numbers(0)]
    optimizer = torch.optim.AdamW(params, lr=LR["adamw"], **OPTIONS["adamw"])
    for step in range(STEPS):
        for param, gradient in zip(params, numbers(1 + step), strict=True):
            param.grad = torch.from_numpy(gradient).to(DEVICE)
        optimizer.step()
    return [param.detach() for param in params]


def compare_arrays(made, read, in_place=True, taken=None):
    """A training at each stage with arrays that made(values) gives, against torch's; read(array) is NumPy's again.

    taken   for arrays that cannot be written: makes one of what the optimizer holds
    """
    wanted, worst = torchs_values(), 0.0
    for stage in (0, 1, 2):
        arrays = [made(values) for values in numbers(0)]
        opt = zero_c.ShardedOptimizer(arrays, "adamw", stage=stage, lr=LR["adamw"], in_place=in_place,
                                      **OPTIONS["adamw"])
        for step in range(STEPS):
            for i, gradient in enumerate(numbers(1 + step)):
                opt.add_grad(i, made(gradient))
            opt.step()
        if not in_place:
            arrays = [taken(opt.param(i)) for i in range(len(opt))]
        values = [torch.from_numpy(numpy.array(read(array))).to(DEVICE) for array in arrays]
        worst = max(worst, check_near(values, wanted, torch.float32, "adamw", STEPS, f"stage {stage}"))
    return f"stages 0 to 2, largest distance from torch.optim {worst:.2f} of the tolerance"


def module(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"{name} cannot be imported: {error}") from None


def dlpack(folder, package):
    return f"torch {torch.__version__}: " + compare_arrays(lambda values: torch.from_numpy(values).to(DEVICE),
                                                           lambda array: array.cpu().numpy())


def cupy(folder, package):
    library = module("cupy")
    return f"CuPy {library.__version__}: " + compare_arrays(library.asarray, library.asnumpy)


def jax(folder, package):
    library = module("jax")
    try:
        gpu = library.devices("gpu")[0]
    except RuntimeError as error:
        raise Skip(f"JAX {library.__version__} has no GPU: {str(error).splitlines()[0]}") from None
    # Nothing may write JAX's arrays.
    found = compare_arrays(lambda values: library.device_put(values, gpu), numpy.asarray, in_place=False,
                           taken=module("jax.dlpack").from_dlpack)
    return f"JAX {library.__version__}: {found}"


# ---- streams ------------------------------------------------------------------------


def train_on(stream, stage):
    """A training whose stream is always behind the host, so that what is not ordered after it comes too early."""
    model = built(lambda: Transformer(3), torch.float32, DEVICE)
    model.register_forward_pre_hook(lambda *_: torch.cuda._sleep(HEAD_START_CYCLES))
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream())
        record = train(model, stage=stage, lr=LR["adamw"])
    torch.cuda.synchronize()
    return record


def arrays_on(stream):
    """Gradients are made on a stream that is behind, and given while it is torch's current one."""
    params = [torch.from_numpy(values).to(DEVICE) for values in numbers(0)]
    opt = zero_c.ShardedOptimizer(params, "adamw", stage=2, lr=LR["adamw"], **OPTIONS["adamw"])
    torch.cuda.synchronize()
    for step in range(STEPS):
        sources = [torch.from_numpy(gradient).to(DEVICE) for gradient in numbers(1 + step)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            gradients = [torch.zeros_like(source) for source in sources]
            torch.cuda._sleep(HEAD_START_CYCLES)
            for i, (gradient, source) in enumerate(zip(gradients, sources, strict=True)):
                opt.add_grad(i, gradient.copy_(source))
        opt.step()
        torch.cuda.synchronize()    # before the gradients' memory goes back to the side stream's pool
    return params


def streams(folder, package):
    same_operations_same_bits()
    for stage in (0, 1, 2, 3):
        difference = train_on(torch.cuda.Stream(), stage).first_difference(train_on(None, stage))
        if difference is not None:
            raise Failed(f"stage {stage} on a side stream, against the default stream: {difference}")
    check_near(arrays_on(torch.cuda.Stream()), torchs_values(), torch.float32, "adamw", STEPS,
               "gradients from a side stream")
    return "modules at stages 0 to 3 have the same bits on a side stream; gradients from a side stream arrive whole"
