"""Uses every public name as users do; test_typing.py gives it to mypy --strict, and never runs it."""

import numpy
import torch

import zero_c
import zero_c.plan
import zero_c.torch


def communicate() -> int:
    version: str = zero_c.__version__
    errors: list[type[zero_c.Error]] = [zero_c.CommError, zero_c.PeerLost, zero_c.Timeout, zero_c.Mismatch, zero_c.CheckpointError]
    with zero_c.init(address="10.0.0.1:29501", backend="tcp", timeout=60.0) as comm:
        comm.barrier()
        total = comm.all_reduce(numpy.ones(3))
        print(version, errors, total, comm.backend, comm.local_rank)
    groups: list[zero_c.Communicator] = zero_c.local_group(2)
    return groups[0].rank + groups[0].world_size


def arrays() -> float | None:
    opt = zero_c.ShardedOptimizer([numpy.zeros(3, numpy.float32)], "sgd", lr=0.1, stage=1)
    opt.add_grad(0, numpy.ones(3, numpy.float32))
    opt.end_backward()
    norm: float = opt.clip_grad_norm_(1.0)
    opt.step()
    opt.zero_grad()
    opt.refresh(0)
    opt.save("folder")
    if zero_c.has_checkpoint("folder"):
        opt.load("folder")
    print(len(opt), norm, opt.grad(0).sum(), opt.param(0), opt.param_dlpack(0), opt.state(0), opt.full_state(0), opt.memory()["total"],
          opt.traffic()["bytes"])
    opt.use_stream(0)
    opt.before_replay()
    with opt.profile(capacity=100) as profile:
        opt.step()
    longest: int = max(span.end_ns - span.begin_ns for span in profile.spans)
    print(longest)
    return opt.last_step.norm


def modules(model: torch.nn.Module) -> None:
    opt = zero_c.torch.ShardedOptimizer(model, optimizer="adamw", lr=1e-3, stage=3, units=[torch.nn.Linear], prefetch=0,
                                        loss_scale="dynamic", max_grad_norm=1.0)
    weight = next(model.parameters())
    with opt.join():
        with opt.no_sync():
            opt.scale(model(torch.ones(1)).sum()).backward()  # type: ignore[no-untyped-call]  # torch's own
        norm: torch.Tensor = opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    gradient = opt.grad(weight)
    if gradient is not None:
        print(gradient.shape, norm)
    with opt.gathered(weight, write=True) as tensors:
        tensors[0].zero_()
    value: torch.Tensor = opt.full_param(weight)
    opt.wait()
    opt.sync_buffers()
    opt.add_param_group({"params": [value]})
    opt.load_state_dict(opt.state_dict())
    opt.load_state_dict(opt.full_state_dict(rank=0))
    weights: dict[str, torch.Tensor] = opt.full_model_state_dict()
    opt.save("folder")
    opt.async_save("folder")
    opt.wait_saved()
    opt.load("folder")
    opt.save_weights("model.safetensors")
    zero_c.torch.explain(opt)
    with opt.profile() as profile, profile.span("forward"):
        model(torch.ones(1))
    profile.save("trace.json")
    scaler = zero_c.torch.GradScaler(init_scale=2.0)
    scaler.unscale_(opt)
    scaler.step(opt)
    torch.optim.lr_scheduler.ExponentialLR(opt, 0.9).step()
    opt.before_replay()
    print(opt.memory()["total"], opt.traffic()["bytes"], opt.last_step.norm, weights)


def planned() -> int:
    model: zero_c.plan.Counted = zero_c.plan.counted(7.5e9, "bf16")
    found: zero_c.plan.Plan = zero_c.plan.plan(model, 64, bucket_mb=1.0)
    stage: zero_c.plan.StagePlan = found.stages[3]
    time: zero_c.plan.StepTime | None = stage.time
    listed = zero_c.plan.Listed((zero_c.plan.Param(10),), (zero_c.plan.Unit("root", 0, True),))
    machine = zero_c.plan.Machine(1e-6, 1e9, 1e9, 1e10)
    print(time, listed.elements, machine, zero_c.plan.Settings(), zero_c.plan.main)
    return stage.peak_bytes + zero_c.plan.largest_model(80e9, 8, 3)
