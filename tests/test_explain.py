"""explain(): what it says is what the optimizer has."""

import pytest

torch = pytest.importorskip("torch")

import zero_c  # noqa: E402
from models import mlp  # noqa: E402
from ranks import RankGroup  # noqa: E402
from zero_c.torch import ShardedOptimizer, explain  # noqa: E402
from zero_c.torch._explain import lines, size  # noqa: E402


def explained(stage):
    model = mlp(sizes=(8, 16, 16, 4))
    model[0].bias.requires_grad_(False)
    options = {"units": [torch.nn.Linear]} if stage == 3 else {}
    opt = ShardedOptimizer(model, lr=0.25, stage=stage, comm=zero_c.init(), **options)
    assert sum(value for name, value in opt.memory().items() if name != "total") == opt.memory()["total"]
    return {"text": "\n".join(lines(opt)), "total": size(opt.memory()["total"]), "buckets": opt._engine.plan()["buckets"]}


@pytest.fixture(scope="module")
def pair():
    with RankGroup(2) as group:
        yield group


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_told(pair, stage):
    for rank, told in enumerate(pair.run(explained, stage)):
        text = told["text"]
        assert f"stage {stage}, rank {rank} of 2 on the CPU" in text
        assert "trained      5 parameters, 468 of float32" in text  # 8 * 16 + 16 * 16 + 16 + 16 * 4 + 4
        assert "frozen       1 parameter, 16 of float32" in text
        assert "group 0      6 parameters: lr 0.25" in text
        assert f"memory       {told['total']} on this rank" in text
        assert f"in {told['buckets']} bucket" in text
        assert ("units        3" in text) == (stage == 3)


def test_it_prints(capsys):
    with zero_c.init(0, 1, job="explain") as comm:
        explain(ShardedOptimizer(mlp(), comm=comm))
    assert capsys.readouterr().out.startswith("ShardedOptimizer: adamw, stage 2, rank 0 of 1")
