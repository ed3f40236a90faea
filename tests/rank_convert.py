"""What ranks do in test_convert.py: train here or elsewhere, and go on here with what was converted."""

import copy
import os

import torch
import torch.distributed
from torch import nn

import zero_c
from models import fill
from rank_torch import join_gloo
from zero_c.torch import ShardedOptimizer

ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}


class Net(nn.Module):
    """A tied head, a scalar, frozen parameters, buffers, sizes that no number of ranks divides."""

    def __init__(self, dtype=torch.float32, frozen=True):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.embedding = nn.Embedding(13, 7)
        self.back = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.fixed = nn.Linear(7, 5)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        fill(self)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        self.register_buffer("places", torch.arange(7))
        self.register_buffer("shift", torch.full((7,), 0.25))
        self.fixed.requires_grad_(not frozen)

    def forward(self, ids):
        x = torch.tanh(self.back(self.norm(self.embedding(ids)))) * self.scale.exp() + self.shift.to(self.scale.dtype)
        x = x + torch.tanh(self.fixed(x)).mean(-1, keepdim=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def tokens(rank, step):
    return torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def groups_of(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]


def ours(dtype, stage, frozen=True, **options):
    model = Net(getattr(torch, dtype), frozen)
    scaled = {"loss_scale": "dynamic"} if dtype == "float16" else {}
    return model, ShardedOptimizer(groups_of(model), module=model, stage=stage, **scaled, **options)


def record(model, opt):
    """Everything that a checkpoint must bring back."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    full = opt.full_state_dict()["state"]
    numbered = [parameter for group in opt.param_groups for parameter in group["params"]]
    with opt.gathered():
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"weights": weights, "state": {names[id(numbered[number])]: entry for number, entry in full.items()},
            "groups": [{key: value for key, value in group.items() if key not in ("params", "param_names")}
                       for group in opt.param_groups],
            "loss_scale": opt._scale.state_dict()}


def go_on(model, opt, rank, steps):
    losses = []
    for step in steps:
        loss = model(tokens(rank, step))
        opt.scale(loss).backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def train(dtype, amsgrad=False):
    """Three steps, the record, and the losses of three more."""
    with zero_c.init() as comm:
        model, opt = ours(dtype, 2, amsgrad=amsgrad, **ADAM)
        for group in opt.param_groups:
            group["initial_lr"] = 0.02
        go_on(model, opt, comm.rank, range(3))
        found = record(model, opt)
        return found | {"losses": go_on(model, opt, comm.rank, range(3, 6))}


def resume(folder, dtype, stage, steps=3, frozen=True):
    """The record and the losses after loading, in a model of other values."""
    with zero_c.init() as comm:
        model, opt = ours(dtype, stage, frozen, lr=0.7)
        with opt.gathered(write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.shift.zero_()
        opt.load(folder)
        found = record(model, opt)
        return found | {"losses": go_on(model, opt, comm.rank, range(3, 3 + steps))}


def fsdp2(folder):
    """FSDP2 and torch's AdamW, saved after three steps in every form; whole values, and the losses of five more."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_gloo()
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = Net()
    fully_shard(model.back, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(groups_of(model), **ADAM)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)

    def train(steps):
        losses = []
        for step in steps:
            loss = model(tokens(rank, step))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses

    train(range(3))
    schedule.step()
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "epoch": 3}, checkpoint_id=os.path.join(folder, "nested"))
    flat = get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"app": {"model": get_model_state_dict(model), "optim": flat}}, checkpoint_id=os.path.join(folder, "flattened"))
    dcp.save({"model": model_state, "optimizer": opt.state_dict()}, checkpoint_id=os.path.join(folder, "numbered"))
    dcp.save(model_state, checkpoint_id=os.path.join(folder, "model"))
    whole, state = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    found = copy.deepcopy({"weights": whole, "state": state["state"]})  # some of it is the optimizer's own
    return found | {"losses": train(range(3, 8))}


def deepspeed(folder, stage, dtype):
    """DeepSpeed itself, saved after three steps; the losses of five more. (It clips gradients to 1 unless told not to.)"""
    import deepspeed as other

    other.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    model = Net(frozen=True)
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, "steps_per_print": 1 << 30,
              "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    if dtype != "float32":
        config[{"bfloat16": "bf16", "float16": "fp16"}[dtype]] = {"enabled": True}
    engine = other.initialize(model=model, optimizer=torch.optim.AdamW(groups_of(model), **ADAM), config=config)[0]
    losses = []
    for step in range(8):
        if step == 3:
            engine.save_checkpoint(folder)
        loss = engine(tokens(rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return losses[3:]
