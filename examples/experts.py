"""Trains a mixture of experts on images of handwritten digits. Each rank sees digits of its own, so that its router sends
them to other experts: in a step a rank does not call some of the experts that others train.

    python -m zero_c.launch -n 2 examples/experts.py --stage 2

--ddp trains with DistributedDataParallel instead; the lines between the two are in main().
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from resnet_digits import digits
from side_by_side import Ranks, arguments


class Experts(nn.Module):
    """Each input goes to the one expert that the router prefers."""

    def __init__(self, width=32, experts=8):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                     for _ in range(experts))
        self.called = []        # numbers of the experts that were, for each forward

    def forward(self, x):
        weight, choice = self.router(x).softmax(-1).max(-1)
        outputs = torch.zeros_like(x)
        self.called.append(choice.unique().tolist())
        for number, expert in enumerate(self.experts):
            mine, = torch.where(choice == number)
            if len(mine):
                outputs = outputs.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return x + outputs


def main():
    args = arguments(__doc__, steps=100)
    ranks = Ranks(args)
    torch.manual_seed(0)
    experts = Experts()
    model = nn.Sequential(nn.Linear(64, 32), experts, nn.Linear(32, 10))
    if args.ddp:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    else:
        from zero_c.torch import ShardedOptimizer
        opt, parallel = ShardedOptimizer(model, lr=1e-2, stage=args.stage), model

    images, labels = digits()
    mine, = torch.where(labels % ranks.count == ranks.rank)
    dice = torch.Generator().manual_seed(ranks.rank)
    for _ in range(args.steps):
        batch = mine[torch.randint(len(mine), (8,), generator=dice)]
        loss = F.cross_entropy(parallel(images[batch].flatten(1)), labels[batch])
        loss.backward()
        opt.step()
        opt.zero_grad()
        ranks.loss(loss.detach())
    ranks.finish(called=experts.called[-1])


if __name__ == "__main__":
    main()
