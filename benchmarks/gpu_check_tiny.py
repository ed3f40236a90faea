"""A training of a few elements, for tools under which everything is slow: gpu_check_tiny.py [3]

Arrays of every dtype at stages 0 to 2, so that no library's kernels but those that fill memory run; with 3 a module at
stage 3.
"""
import sys

import torch
import zero_c
from zero_c.torch import ShardedOptimizer

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def arrays(stage, optimizer, **options):
    values = [torch.full((size,), 0.5, dtype=dtype, device="cuda") for dtype in DTYPES for size in (7, 4096, 5001)]
    opt = zero_c.ShardedOptimizer(values, optimizer, stage=stage, lr=0.01, **options)
    for _ in range(2):
        for i, value in enumerate(values):
            opt.add_grad(i, torch.full_like(value, 0.25))
        opt.step()
    if not all(bool((value < 0.5).all()) for value in values):
        sys.exit(f"stage {stage}, {optimizer}: a step has changed nothing")


def module():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).cuda()
    opt = ShardedOptimizer(model, stage=3, lr=0.01, max_grad_norm=1.0)
    for _ in range(2):
        model(torch.full((4, 32), 0.5, device="cuda")).square().mean().backward()
        opt.step()
        opt.zero_grad()


if sys.argv[1:] == ["3"]:
    module()
else:
    for stage in (0, 1, 2):
        arrays(stage, "adamw", max_grad_norm=1.0)
        arrays(stage, "sgd", momentum=0.9)
torch.cuda.synchronize()
