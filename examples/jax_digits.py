"""Recognises handwritten digits with JAX: the gradients are JAX arrays, which are read where they are and never written.

    python -m zero_c.launch -n 2 examples/jax_digits.py --stage 2

JAX arrays cannot change, so the optimizer keeps the parameters (in_place=False), and each step copies them out. Ranks share
the rows of one batch, so that with -n 1 the same numbers come out, but for the order in which they are added.
"""
import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy

import zero_c


def start(dice, sizes=(64, 32, 10)):
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [jnp.asarray(dice.standard_normal((inputs, outputs)) / inputs**0.5, jnp.float32), jnp.zeros(outputs)]
    return layers


def loss(params, x, labels):
    w0, b0, w1, b1 = params
    logits = jax.nn.relu(x @ w0 + b0) @ w1 + b1
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), labels].mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, help="0 shards nothing, 1 optimizer state, 2 gradients too")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    comm = zero_c.init()
    stored = numpy.load(pathlib.Path(__file__).with_name("digits.npz"))
    images, labels = stored["images"].reshape(-1, 64).astype(numpy.float32) / 8 - 1, stored["labels"].astype(numpy.int32)

    params = start(numpy.random.default_rng(0))
    opt = zero_c.ShardedOptimizer(params, "adamw", lr=1e-2, stage=args.stage, in_place=False)
    loss_and_gradients = jax.jit(jax.value_and_grad(loss))
    dice = numpy.random.default_rng(1)
    for step in range(1, args.steps + 1):
        mine = dice.integers(1500, size=64)[comm.rank::comm.world_size]
        value, gradients = loss_and_gradients(params, images[mine], labels[mine])
        for i, gradient in enumerate(gradients):
            opt.add_grad(i, gradient)
        opt.step()
        params = [jnp.array(opt.param(i)) for i in range(len(opt))]     # copies: step() writes param(i)
        if step % 20 == 0:
            value = comm.all_reduce(numpy.array([float(value)]), "sum")[0] / comm.world_size
            if comm.rank == 0:
                print(f"step {step}  loss {value:.6f}", flush=True)
    if comm.rank == 0:
        print(f"test loss {loss(params, images[1500:], labels[1500:]):.6f}")


if __name__ == "__main__":
    main()
