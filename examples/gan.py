"""Trains a generative adversarial network on images of handwritten digits: two models, each with its optimizer, in turn.

    python -m zero_c.launch -n 2 examples/gan.py --stage 2

--ddp trains with DistributedDataParallel instead; the lines between the two are in main().
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from resnet_digits import digits
from side_by_side import Ranks, arguments

NOISE = 16


def mlp(*sizes, last):
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1], last)


def train(generator, critic, opt_g, opt_c, ranks, steps):
    images = digits()[0].flatten(1)
    dice = torch.Generator().manual_seed(ranks.rank)
    real, made = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(steps):
        mine = torch.randint(1500 // ranks.count, (32,), generator=dice) * ranks.count + ranks.rank
        fakes = generator(torch.randn(32, NOISE, generator=dice))

        opt_c.zero_grad()       # also of what the generator's loss left there
        loss_c = (F.binary_cross_entropy_with_logits(critic(images[mine]), real)
                  + F.binary_cross_entropy_with_logits(critic(fakes.detach()), made))
        loss_c.backward()
        opt_c.step()

        opt_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(critic(fakes), real)
        loss_g.backward()       # through both models
        opt_g.step()
        ranks.loss((loss_c + loss_g).detach())


def main():
    args = arguments(__doc__, steps=200)
    ranks = Ranks(args)
    torch.manual_seed(0)
    generator = mlp(NOISE, 64, 64, 64, last=nn.Tanh())
    critic = mlp(64, 64, 64, 1, last=nn.Identity())
    options = {"lr": 1e-3, "betas": (0.5, 0.999)}
    if args.ddp:
        opt_g = torch.optim.Adam(generator.parameters(), **options)
        opt_c = torch.optim.Adam(critic.parameters(), **options)
        generator, critic = map(nn.parallel.DistributedDataParallel, (generator, critic))
    else:
        from zero_c.torch import ShardedOptimizer
        opt_g = ShardedOptimizer(generator, optimizer="adam", stage=args.stage, **options)
        opt_c = ShardedOptimizer(critic, optimizer="adam", stage=args.stage, **options)
    train(generator, critic, opt_g, opt_c, ranks, args.steps)
    ranks.finish()


if __name__ == "__main__":
    main()
