"""Recognises handwritten digits with NumPy alone, no torch: logistic regression, or with --hidden an MLP of one layer.

    python -m zero_c.launch -n 2 examples/numpy_digits.py --stage 2
    python -m zero_c.launch -n 2 examples/numpy_digits.py --stage 2 --hidden 32

Ranks share the rows of one batch, so that with -n 1 the same numbers come out, but for the order in which they are added.
"""
import argparse
import pathlib
import sys

import numpy

import zero_c


def start(hidden, dice):
    """Weights and a bias for each layer."""
    sizes = [64, hidden, 10] if hidden else [64, 10]
    arrays = {}
    for layer, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        arrays[f"w{layer}"] = (dice.standard_normal((inputs, outputs)) / inputs**0.5).astype(numpy.float32)
        arrays[f"b{layer}"] = numpy.zeros(outputs, numpy.float32)
    return arrays


def gradients(arrays, x, labels):
    """The mean cross-entropy, and the gradients in the order of arrays, last layer first computed."""
    *weights, = arrays.values()
    inputs = [x]
    for w, b in zip(weights[0:-2:2], weights[1:-2:2]):
        inputs.append(numpy.maximum(inputs[-1] @ w + b, 0))
    logits = inputs[-1] @ weights[-2] + weights[-1]
    logits -= logits.max(1, keepdims=True)
    chance = numpy.exp(logits)
    chance /= chance.sum(1, keepdims=True)
    rows = numpy.arange(len(x))
    loss = -numpy.log(chance[rows, labels]).mean()
    chance[rows, labels] -= 1
    upstream, found = chance / len(x), []
    for w, y in zip(weights[-2::-2], reversed(inputs)):
        found += [upstream.sum(0), y.T @ upstream]
        upstream = upstream @ w.T * (y > 0)
    return float(loss), found[::-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, help="0 shards nothing, 1 optimizer state, 2 gradients too")
    parser.add_argument("--hidden", type=int, default=0, help="width of the MLP's layer; 0: logistic regression")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    comm = zero_c.init()
    stored = numpy.load(pathlib.Path(__file__).with_name("digits.npz"))
    images, labels = stored["images"].reshape(-1, 64).astype(numpy.float32) / 8 - 1, stored["labels"]

    arrays = start(args.hidden, numpy.random.default_rng(0))
    opt = zero_c.ShardedOptimizer(arrays, "adamw", lr=1e-2, stage=args.stage)
    dice = numpy.random.default_rng(1)
    for step in range(1, args.steps + 1):
        mine = dice.integers(1500, size=64)[comm.rank::comm.world_size]
        loss, found = gradients(arrays, images[mine], labels[mine])
        for i, gradient in enumerate(found):
            opt.add_grad(i, gradient)
        opt.step()              # arrays have the new values
        if step % 20 == 0:
            loss = comm.all_reduce(numpy.array([loss]), "sum")[0] / comm.world_size
            if comm.rank == 0:
                print(f"step {step}  loss {loss:.6f}", flush=True)
    if comm.rank == 0:
        test = gradients(arrays, images[1500:], labels[1500:])[0]
        print(f"test loss {test:.6f}", "with torch" if "torch" in sys.modules else "without torch")


if __name__ == "__main__":
    main()
