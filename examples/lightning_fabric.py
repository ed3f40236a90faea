"""Lightning's Fabric in an own loop with sharded training state: bf16, clipping, a checkpoint and training that goes on from it.
Made-up tokens: nothing is downloaded.

    python -m zero_c.launch -n 2 --no-torch-env examples/lightning_fabric.py --stage 2 --folder run
    python -m zero_c.launch -n 2 examples/lightning_fabric.py --ddp --folder run                 # Fabric's DDP, to compare with
"""
import os

import lightning
import torch

import zero_c
from zero_c.torch import ShardedOptimizer

from lightning_trainer import VOCABULARY, Model
from packages import made_up_tokens, report
from side_by_side import arguments

BATCH = 8


def main(argv=None):
    args = arguments(__doc__, steps=6, argv=argv, folder="for the checkpoint", resume="go on from this step's checkpoint")
    comm = zero_c.init()
    ranks = {"devices": comm.world_size, "strategy": "ddp"} if args.ddp else {"devices": 1, "strategy": "auto"}
    fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed", **ranks)
    fabric.launch()
    torch.manual_seed(0)
    model = Model()
    if args.ddp:
        opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    else:
        opt = ShardedOptimizer(model, lr=2e-3, stage=args.stage)
    module, optimizer = fabric.setup(model, opt)

    data = torch.utils.data.TensorDataset(made_up_tokens(args.steps * BATCH * comm.world_size, VOCABULARY))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=comm.world_size, rank=comm.rank, shuffle=False)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler),
                                      use_distributed_sampler=False)
    done = 0
    if args.resume:
        done = int(args.resume)
        opt.load(checkpoint(args, done))  # not fabric.load: this takes any number of ranks, at any stage

    losses, norms = [], []
    for step, (tokens,) in enumerate(loader, 1):
        if step <= done:
            continue
        loss = module(tokens)
        fabric.backward(loss)
        if args.ddp:
            norm = fabric.clip_gradients(module, optimizer, max_norm=0.5)
        else:
            norm = opt.clip_grad_norm_(0.5)  # not of `optimizer`: that is Fabric's wrapper, which is for step() and zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
        if not args.ddp and step == args.steps // 2:
            opt.save(checkpoint(args, step))
    return report(args, comm, losses, {"norms": norms})


def checkpoint(args, step):
    return os.path.join(args.folder, f"step-{step}")


if __name__ == "__main__":
    main()
