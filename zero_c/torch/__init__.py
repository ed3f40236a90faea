"""PyTorch adapter: `ShardedOptimizer` trains a module with the memory of ZeRO, `GradScaler` scales its losses, `explain`
tells what an optimizer has planned.

    from zero_c.torch import ShardedOptimizer

    opt = ShardedOptimizer(model, optimizer="adamw", lr=3e-4, stage=2)
    for x, y in data:
        model(x, y).backward()
        opt.step()
        opt.zero_grad()
"""

from ._explain import explain
from ._optimizer import ShardedOptimizer
from ._scale import GradScaler

__all__ = ["GradScaler", "ShardedOptimizer", "explain"]
