"""Trains a small ResNet on images of handwritten digits, with batch normalisation, a OneCycleLR schedule, a GradScaler
under float16 autocast, and an exponential moving average of the weights (EMA), which is what is tested at the end:

    python -m zero_c.launch -n 2 examples/resnet_digits.py --stage 2

--ddp trains with DistributedDataParallel instead; the lines between the two are in main().
"""
import contextlib
import pathlib

import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from side_by_side import Ranks, arguments


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                                  nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        return F.relu(x + self.body(x))


class ResNet(nn.Module):
    def __init__(self, width=16, blocks=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def digits():
    """Images in -1..1 and labels; the last 297 are for the test."""
    stored = numpy.load(pathlib.Path(__file__).with_name("digits.npz"))
    return torch.tensor(stored["images"]).float()[:, None] / 8 - 1, torch.tensor(stored["labels"]).long()


def train(model, average, opt, scaler, schedule, whole, ranks, steps):
    images, labels = digits()
    dice = torch.Generator().manual_seed(ranks.rank)
    for _ in range(steps):
        mine = torch.randint(1500 // ranks.count, (32,), generator=dice) * ranks.count + ranks.rank
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(images[mine]), labels[mine])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        schedule.step()
        with whole():           # the average reads every parameter
            average()
        ranks.loss(loss.detach())


def main():
    args = arguments(__doc__, steps=60)
    ranks = Ranks(args)
    torch.manual_seed(0)
    model = ResNet()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)   # copies the model: before opt
    if args.ddp:
        parallel = nn.parallel.DistributedDataParallel(model)
        opt, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
        whole = contextlib.nullcontext
    else:
        from zero_c.torch import GradScaler, ShardedOptimizer
        parallel = model
        opt, scaler = ShardedOptimizer(model, lr=1e-3, stage=args.stage), GradScaler(init_scale=1024.0)
        whole = opt.gathered
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=args.steps)
    train(parallel, lambda: ema.update_parameters(model), opt, scaler, schedule, whole, ranks, args.steps)

    images, labels = digits()
    with torch.no_grad():
        right = (ema.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        size = sum(p.square().sum() for p in ema.parameters()).sqrt().item()
    ranks.finish(accuracy=right, average=size, lr=schedule.get_last_lr()[0], scale=scaler.get_scale())


if __name__ == "__main__":
    main()
