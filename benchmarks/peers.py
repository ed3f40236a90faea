"""The trainers that are compared. Each entry of PEERS takes a model and returns (module to call, optimizer)."""
import importlib.util

import torch
import torch.nn as nn

ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def apart(model):
    """No communication at all: each process trains its own copy. No trainer of both can expect to beat it in update."""
    return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def ddp(view):
    def build(model):
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
        return wrapped, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return build


def zero1_view(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True,
                                            fused=True, **ADAMW)


def fsdp2(model):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


class DeepSpeedOptimizer:
    """DeepSpeed's engine wants backward and step for itself; the loop gets them under torch's names."""

    def __init__(self, engine):
        self.engine, self.step = engine, engine.step

    def backward(self, loss):
        self.engine.backward(loss)

    def zero_grad(self):
        pass  # step() has done it


def deepspeed3(model):
    import deepspeed
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "steps_per_print": 1 << 30,
              "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": ADAMW}}
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    return engine, DeepSpeedOptimizer(engine)


def zero_c(stage, **options):
    def build(model):
        from zero_c.torch import ShardedOptimizer
        return model, ShardedOptimizer(model, optimizer="adamw", stage=stage, **options, **ADAMW)
    return build


PEERS = {
    "none2": apart,
    "ddp": ddp(view=False),
    "ddp_view": ddp(view=True),
    "zero1_view": zero1_view,
    "zero_c_0": zero_c(0),
    "zero_c_1": zero_c(1),
    "zero_c_2": zero_c(2),
    "zero_c_3": zero_c(3),
    "fsdp2": fsdp2,
    "deepspeed3": deepspeed3,
    "zero_c_2_clip": zero_c(2, max_grad_norm=1e9),      # what the norm costs; nothing is clipped
    "zero_c_0_shared": zero_c(0, shared_params=True),
    "zero_c_1_shared": zero_c(1, shared_params=True),
    "zero_c_2_shared": zero_c(2, shared_params=True),
}

DEFAULT = [name for name in PEERS if name not in ("ddp", "zero_c_2_clip")
           and (name != "deepspeed3" or importlib.util.find_spec("deepspeed"))]

# Peers that do not come to an end: FSDP2's first step over thousands of tensors takes minutes.
TOO_SLOW = {"many_small": {"fsdp2"}}
