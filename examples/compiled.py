"""Trains a small GPT whose forward and backward are compiled by torch.compile:

    python -m zero_c.launch -n 2 examples/compiled.py --stage 2

--ddp trains with DistributedDataParallel instead; the lines between the two are in main().
"""
import torch
import torch.nn as nn

from gpt import GPT, LibrarySource
from side_by_side import Ranks, arguments


def main():
    args = arguments(__doc__, steps=100)
    ranks = Ranks(args)
    torch.manual_seed(0)
    model = GPT(layers=1, width=64, heads=4)
    if args.ddp:
        opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
        compiled = torch.compile(nn.parallel.DistributedDataParallel(model))
    else:
        from zero_c.torch import ShardedOptimizer
        opt = ShardedOptimizer(model, lr=3e-3, stage=args.stage)
        compiled = torch.compile(model)

    data = LibrarySource(ranks.rank, ranks.count)
    for _ in range(args.steps):
        loss = compiled(*data.next())
        loss.backward()
        opt.step()
        opt.zero_grad()
        ranks.loss(loss.detach())
    ranks.finish()


if __name__ == "__main__":
    main()
