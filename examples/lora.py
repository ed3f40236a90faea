"""Fine-tunes a small GPT with LoRA: the model is frozen, and beside each of its wide matrices two narrow ones are trained.

    python -m zero_c.launch -n 2 examples/lora.py --stage 2

--ddp trains with DistributedDataParallel instead; the lines between the two are in main().
"""
import torch
import torch.nn as nn

from gpt import GPT, LibrarySource
from side_by_side import Ranks, arguments


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two narrow matrices, which begins as zero."""

    def __init__(self, base, width=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(width, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, width))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def adapted():
    model = GPT(layers=4, width=96, heads=4)
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up, block.down = LoRA(block.qkv), LoRA(block.up), LoRA(block.down)
    return model


def main():
    args = arguments(__doc__, steps=100)
    ranks = Ranks(args)
    torch.manual_seed(0)
    model = adapted()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if args.ddp:
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        parallel, held = nn.parallel.DistributedDataParallel(model), {}
    else:
        from zero_c.torch import ShardedOptimizer
        opt = ShardedOptimizer(model, lr=1e-2, stage=args.stage)     # frozen parameters are known by requires_grad
        parallel, held = model, {"held_bytes": opt.memory()["total"], "parameter_bytes": opt.memory()["parameters"]}

    data = LibrarySource(ranks.rank, ranks.count)
    for _ in range(args.steps):
        loss = parallel(*data.next())
        loss.backward()
        opt.step()
        opt.zero_grad()
        ranks.loss(loss.detach())
    ranks.finish(trained=trained, parameters=sum(p.numel() for p in model.parameters()), **held)


if __name__ == "__main__":
    main()
