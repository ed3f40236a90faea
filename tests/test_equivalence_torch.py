"""The torch adapter beside DDP over gloo, torch's own optimizers and one process with the whole batch."""

import pytest
import rank_torch
from ranks import rank_groups

STAGES = (0, 1, 2)
OPTIMIZERS = {
    "adamw": ("adamw", {"lr": 0.01, "weight_decay": 0.1}),
    "adam": ("adam", {"lr": 0.01, "weight_decay": 0.05, "betas": [0.8, 0.95]}),
    "amsgrad": ("adam", {"lr": 0.01, "amsgrad": True}),
    "sgd": ("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
}


@pytest.fixture(scope="module")
def groups():
    """Torch ranks, one group for each size; torch.distributed stays open in them."""
    yield from rank_groups(leaks=False)


def sizes(*small):
    return [*small, pytest.param(7, marks=pytest.mark.long)]


@pytest.mark.parametrize("bucket_mb", [1e-6, 0.001, None])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_those_of_ddp(groups, stage, bucket_mb):
    groups(2).run(rank_torch.ddp_gradients, stage, bucket_mb, deadline=90)


@pytest.mark.parametrize("n", sizes(2, 3))
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_follows_ddp(groups, n, name, max_grad_norm):
    for stage in STAGES:
        groups(n).run(rank_torch.ddp_training, stage, *OPTIMIZERS[name], max_grad_norm, deadline=90)


@pytest.mark.parametrize("n", sizes(1, 2, 3, 4))
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_ranks_equal_one_process_with_the_whole_batch(groups, n, name):
    for stage in STAGES:
        groups(n).run(rank_torch.concatenated_batch, stage, *OPTIMIZERS[name], deadline=90)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("n", sizes(2, 3))
def test_every_way_of_running_gives_the_same_bits(groups, n, dtype):
    ways = [{"stage": stage, "bucket_mb": bucket_mb, "shared_params": shared}
            for stage in STAGES for bucket_mb in (1e-6, 0.001, None) for shared in (False, True)]
    values = groups(n).run(rank_torch.ways_agree, ways, dtype, deadline=120)
    for other in values[1:]:
        assert all((ours == first).all() for ours, first in zip(other, values[0], strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", sizes(2, 3))
def test_16_bit_follows_fp32_masters(groups, n, dtype):
    for stage in STAGES:
        groups(n).run(rank_torch.one_process_of_ranks, stage, dtype, deadline=60)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_within_4_ulp_of_torch(groups, name, dtype):
    rule, options = OPTIMIZERS[name]
    distances, = groups(1).run(rank_torch.torch_optimizer_steps, rule, options, dtype, 20, deadline=60)
    assert max(distances) <= 4, distances
