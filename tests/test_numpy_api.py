"""zero_c.ShardedOptimizer on arrays: values, layouts, agreement of ranks, and every wrong argument."""

import math

import numpy as np
import pytest

from ranks import RankGroup, rank_groups

import zero_c
from zero_c import _init

SHAPES = [(3, 5), (), (0, 4), (130,), (2, 3, 7)]
OPTIONS = {
    "adamw": {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "adam": {"lr": 1e-2, "weight_decay": 0.05, "amsgrad": True},
    "sgd": {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True},
}


def values(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in SHAPES]


def reference(kind, params, gradients, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, momentum=0.0, nesterov=False,
              maximize=False, amsgrad=False):
    """The textbook formulas in double, one list of gradients for each step."""
    params = [np.array(param, np.float64) for param in params]
    m, v, top = ([np.zeros_like(param) for param in params] for _ in range(3))
    for step, grads in enumerate(gradients, 1):
        for i, grad in enumerate(grads):
            grad = (-1 if maximize else 1) * np.array(grad, np.float64)
            if kind == "sgd":
                grad = grad + weight_decay * params[i]
                m[i] = grad if step == 1 else momentum * m[i] + grad
                params[i] = params[i] - lr * (grad + momentum * m[i] if nesterov else m[i])
                continue
            if kind == "adamw":
                params[i] = params[i] * (1 - lr * weight_decay)
            else:
                grad = grad + weight_decay * params[i]
            m[i] = betas[0] * m[i] + (1 - betas[0]) * grad
            v[i] = betas[1] * v[i] + (1 - betas[1]) * grad**2
            top[i] = np.maximum(top[i], v[i]) if amsgrad else v[i]
            params[i] = params[i] - lr / (1 - betas[0]**step) * m[i] / (np.sqrt(top[i] / (1 - betas[1]**step)) + eps)
    return params


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups()


@pytest.fixture
def alone():
    yield zero_c.init()
    _init.close_default()


# ---- on ranks ------------------------------------------------------------------


def train(kind, stage, dtype="float32", steps=3, rounds=1, **settings):
    """Steps with gradients of seed 1000 * step + 10 * round + rank; parameters, gradients and facts."""
    comm = zero_c.init()
    arrays = values(comm.rank, np.dtype(dtype))  # rank 0's are to win
    opt = zero_c.ShardedOptimizer(arrays, kind, stage=stage, **{**OPTIONS[kind], **settings})
    start = [array.copy() for array in arrays]
    seen = []
    for step in range(steps):
        for number in range(rounds):
            for i, gradient in reversed(list(enumerate(values(1000 * step + 10 * number + comm.rank, np.dtype(dtype))))):
                opt.add_grad(i, gradient)
            opt.end_backward()
        seen.append(opt.grad(0))
        opt.step()
        opt.zero_grad()
    same = [bool((array == opt.param(i)).all()) and array.shape == opt.param(i).shape for i, array in enumerate(arrays)]
    return {"start": start, "arrays": arrays, "same": same, "seen": seen, "state": opt.full_state(0), "last": opt.last_step.steps,
            "memory": opt.memory(), "traffic": opt.traffic()}


def mean_gradients(n, steps, rounds, dtype=np.float32):
    return [[sum(np.float64(values(1000 * step + 10 * number + rank, dtype)[i]) for number in range(rounds) for rank in range(n)) / n
             for i in range(len(SHAPES))] for step in range(steps)]


@pytest.mark.parametrize("kind", list(OPTIONS))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_training_is_the_formula_at_every_stage(groups, n, kind):
    wanted = reference(kind, values(0), mean_gradients(n, 3, 1), **OPTIONS[kind])
    first = None
    for stage in (0, 1, 2):
        results = groups(n).run(train, kind, stage)
        for result in results:
            assert all(result["same"])
            for got, start, want in zip(result["arrays"], result["start"], wanted):
                np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
            assert [start.tolist() for start in result["start"]] == [value.tolist() for value in values(0)]
            np.testing.assert_allclose(result["seen"][0], mean_gradients(n, 1, 1)[0][0], rtol=1e-6, atol=1e-7)
            first = first or result
            assert all(got.tobytes() == want.tobytes() for got, want in zip(result["arrays"], first["arrays"]))
            assert all(result["state"][key] is None or np.array_equal(result["state"][key], first["state"][key])
                       for key in first["state"])
            assert result["state"]["step"] == 3 and result["last"] == 3
            assert result["memory"]["total"] == sum(size for key, size in result["memory"].items() if key != "total")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_several_backwards_add_up(groups, stage):
    wanted = reference("sgd", values(0), mean_gradients(2, 2, 3), **OPTIONS["sgd"])
    for result in groups(2).run(train, "sgd", stage, steps=2, rounds=3):
        for got, want in zip(result["arrays"], wanted):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_double_precision(groups):
    wanted = reference("adamw", values(0, np.float64), mean_gradients(2, 3, 1, np.float64), **OPTIONS["adamw"])
    for result in groups(2).run(train, "adamw", 2, "float64"):
        for got, want in zip(result["arrays"], wanted):
            np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("settings", [{"bucket_mb": 1e-4}, {"shared_params": True}])
def test_settings_that_change_no_bit(groups, settings):
    plain, other = (groups(2).run(train, "adam", 2, **given)[1]["arrays"] for given in ({}, settings))
    assert all(one.tobytes() == two.tobytes() for one, two in zip(plain, other))


def facts_of_ranks():
    """Small things that need two ranks, in one call: clipping, scale, skipping, sum, unused parameters."""
    comm = zero_c.init()
    got = {}

    def one(**settings):
        return zero_c.ShardedOptimizer([np.full(4, 8.0, np.float32), np.full(2, 5.0, np.float32)], "sgd",
                                       **{"lr": 1.0, **settings})

    def gradient(opt, value):
        opt.add_grad(0, np.full(4, value, np.float32))

    opt = one(max_grad_norm=1.0)
    gradient(opt, 2.0 + 2 * comm.rank)  # mean 3, norm 6
    opt.step()
    got["clipped"], got["norm"], got["unused"] = opt.param(0).tolist(), opt.last_step.norm, opt.param(1).tolist()
    got["steps"] = [opt.state(0)["step"], opt.state(1)["step"]]
    opt = one()
    gradient(opt, 2.0 + 2 * comm.rank)
    got["measured"] = [opt.clip_grad_norm_(math.inf), opt.clip_grad_norm_(math.inf, norm_type=1), opt.clip_grad_norm_(3.0)]
    opt.step()
    got["clipped_by_call"] = opt.param(0).tolist()
    opt = one(loss_scale=4.0, reduce_op="sum")
    gradient(opt, 4.0)
    opt.step()
    got["summed"] = opt.param(0).tolist()
    gradient(opt, math.inf if comm.rank else 1.0)
    opt.step()
    got["skipped"] = [opt.param(0).tolist(), opt.last_step.skipped, opt.last_step.nonfinite, opt.last_step.steps]
    opt = one()
    gradient(opt, 1.0)
    opt.zero_grad()
    if comm.rank == 1:
        gradient(opt, 1.0)  # rank 0 joins with zeros
    opt.step()
    got["joined"] = opt.param(0).tolist()
    opt = one()
    gradient(opt, math.nan)
    try:
        opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except zero_c.Error as error:
        got["nonfinite"] = str(error)
    return got


def test_facts_of_ranks(groups):
    for got in groups(2).run(facts_of_ranks):
        np.testing.assert_allclose(got["clipped"], [7.5] * 4, rtol=1e-6)
        assert got["norm"] == 6 and got["unused"] == [5, 5] and got["steps"] == [1, 0]
        np.testing.assert_allclose(got["measured"], [6, 12, 6], rtol=1e-12)
        np.testing.assert_allclose(got["clipped_by_call"], [6.5] * 4, rtol=1e-6)
        assert got["summed"] == [6] * 4
        assert got["skipped"] == [[6] * 4, True, 1, 1]
        assert got["joined"] == [7.5] * 4
        assert "nan" in got["nonfinite"]


def unequal():
    comm = zero_c.init()
    try:
        zero_c.ShardedOptimizer([("w", np.zeros(3 + comm.rank, np.float32))])
    except zero_c.Mismatch as error:
        return str(error)
    return None


def test_ranks_that_differ_are_told(groups):
    with RankGroup(2) as group:
        for text in group.run(unequal, deadline=30):
            assert "w" in text and "3" in text and "4" in text


# ---- alone ---------------------------------------------------------------------


def test_layouts_of_arrays_and_gradients(alone):
    base = np.zeros((6, 4), np.float32)
    arrays = {"columns": base[:, ::2], "fortran": np.zeros((3, 2), np.float32, order="F"), "swapped": np.zeros(3, ">f4")}
    opt = zero_c.ShardedOptimizer(arrays, "sgd", lr=1.0)
    gradients = [np.arange(array.size, dtype=np.float32).reshape(array.shape) for array in arrays.values()]
    for i, gradient in enumerate(gradients):
        opt.add_grad(i, np.asfortranarray(gradient))
    opt.step()
    for array, gradient in zip(arrays.values(), gradients):
        assert array.tolist() == (-gradient).tolist()
    assert (base[:, 1::2] == 0).all()


def test_torch_tensors_are_updated_in_place(alone):
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float16).expand(2, 3).clone().t()]
    opt = zero_c.ShardedOptimizer(tensors, "sgd", lr=0.5)
    for i, tensor in enumerate(tensors):
        opt.add_grad(i, torch.ones_like(tensor))
    opt.step()
    for i, tensor in enumerate(tensors):
        assert (tensor == 0.5).all()
        assert torch.equal(torch.from_dlpack(opt.param_dlpack(i)), tensor)
    assert opt.param(1).dtype == np.uint16
    opt.add_grad(1, np.full(4, 0x3f80, np.uint16))
    opt.step()
    assert (tensors[1] == 0).all()


def test_in_place_false_leaves_the_arrays(alone):
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        zero_c.ShardedOptimizer([array])
    opt = zero_c.ShardedOptimizer([array], "sgd", lr=1.0, in_place=False)
    opt.add_grad(0, np.ones(3, np.float32))
    opt.step()
    assert array.tolist() == [0] * 3 and opt.param(0).tolist() == [-1] * 3


def test_groups_and_schedules(alone):
    one, two = np.zeros(2, np.float32), np.zeros(2, np.float32)
    opt = zero_c.ShardedOptimizer([{"params": [one]}, {"params": [("second", two)], "lr": 10.0}], "sgd", lr=1.0)
    assert [group["params"] for group in opt.param_groups] == [[0], [1]] and len(opt) == 2
    for lr in (1.0, np.float32(2.0), np.array([3.0])):
        opt.param_groups[0]["lr"] = lr
        for i in range(2):
            opt.add_grad(i, np.ones(2, np.float32))
        opt.step()
    assert one.tolist() == [-6, -6] and two.tolist() == [-30, -30]
    opt.param_groups[0]["lr"] = -1
    opt.add_grad(0, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="lr is -1"):
        opt.step()
    opt.param_groups[0]["lr"] = 1
    opt.step()
    assert one.tolist() == [-7, -7]


def test_writes_between_steps(alone):
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, dtype=torch.bfloat16)
    opt = zero_c.ShardedOptimizer([tensor], "sgd", lr=2.0**-10)
    opt.param(0)[:] = 0x4000  # 2
    opt.refresh(0)
    opt.add_grad(0, torch.zeros(3, dtype=torch.bfloat16))
    opt.step()
    assert (tensor == 2).all()


ARRAY = np.zeros(4, np.float32)


@pytest.mark.parametrize(("arrays", "settings", "error", "message"), [
    ([], {}, ValueError, "empty"),
    (ARRAY, {}, TypeError, "ndarray"),
    ([3.0], {}, TypeError, r"arrays\[0\] is a float"),
    ([np.zeros(2, np.int32)], {}, TypeError, "int32"),
    ([np.zeros(2, np.complex64)], {}, BufferError, "complex64"),
    ([ARRAY, ARRAY[1:]], {}, ValueError, "share memory"),
    ([("a", ARRAY), ("a", np.zeros(2))], {}, ValueError, "'a'"),
    ([(1, ARRAY)], {}, TypeError, "name of parameter 0"),
    ([{"params": [ARRAY]}, np.zeros(2)], {}, TypeError, "mixes"),
    ([{"lr": 1.0}], {}, ValueError, "group 0"),
    ([{"params": [ARRAY], "momentum": 0.5}], {}, TypeError, "momentum.*no effect"),
    ([{"params": [ARRAY], "lr": -0.5}], {}, ValueError, "lr is -0.5"),
    ([ARRAY], {"optimizer": "lion"}, ValueError, "'lion'"),
    ([ARRAY], {"stage": 3}, ValueError, "stage is 3"),
    ([ARRAY], {"stage": True}, ValueError, "stage is True"),
    ([ARRAY], {"lr": "1"}, TypeError, "lr is '1'"),
    ([ARRAY], {"lr": math.nan}, ValueError, "lr is nan"),
    ([ARRAY], {"lr": np.array([1.0, 2.0])}, TypeError, "lr is"),
    ([ARRAY], {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] is 1"),
    ([ARRAY], {"betas": 0.9}, TypeError, "betas"),
    ([ARRAY], {"eps": -1e-8}, ValueError, "eps"),
    ([ARRAY], {"weight_decay": math.inf}, ValueError, "weight_decay"),
    ([ARRAY], {"amsgrad": 1}, TypeError, "amsgrad"),
    ([ARRAY], {"optimizer": "sgd", "betas": (0.9, 0.99)}, TypeError, "betas.*no effect.*sgd"),
    ([ARRAY], {"optimizer": "sgd", "nesterov": True}, ValueError, "nesterov"),
    ([ARRAY], {"learning_rate": 1.0}, TypeError, "unknown option 'learning_rate'"),
    ([ARRAY], {"foreach": True}, TypeError, "unknown option 'foreach'"),
    ([ARRAY], {"max_grad_norm": 0}, ValueError, "max_grad_norm is 0"),
    ([ARRAY], {"loss_scale": "dynamic"}, TypeError, "loss_scale is 'dynamic'"),
    ([ARRAY], {"skip_nonfinite": "no"}, TypeError, "skip_nonfinite"),
    ([ARRAY], {"reduce_op": "max"}, ValueError, "reduce_op is 'max'"),
    ([ARRAY], {"bucket_mb": 0}, ValueError, "bucket_mb is 0"),
    ([ARRAY], {"shared_params": 1}, TypeError, "shared_params"),
    ([ARRAY], {"in_place": None}, TypeError, "in_place"),
    ([ARRAY], {"comm": 3}, TypeError, "comm is a int"),
])
def test_wrong_construction(alone, arrays, settings, error, message):
    with pytest.raises(error, match=message):
        zero_c.ShardedOptimizer(arrays, **settings)


def test_wrong_calls_change_nothing(alone):
    array = np.zeros((2, 3), np.float32)
    opt = zero_c.ShardedOptimizer([array], "sgd", lr=1.0)
    good = np.ones((2, 3), np.float32)
    for call, error in [
        (lambda: opt.add_grad(1, good), IndexError), (lambda: opt.add_grad(-1, good), IndexError),
        (lambda: opt.add_grad("w", good), TypeError), (lambda: opt.add_grad(0, good.T), ValueError),
        (lambda: opt.add_grad(0, good.astype(np.float64)), TypeError), (lambda: opt.add_grad(0, [1.0]), TypeError),
        (lambda: opt.clip_grad_norm_(0), ValueError), (lambda: opt.clip_grad_norm_("1"), TypeError),
        (lambda: opt.clip_grad_norm_(1, norm_type=-1), ValueError), (lambda: opt.param(7), IndexError),
    ]:
        with pytest.raises(error):
            call()
    opt.add_grad(0, good)
    with pytest.raises(zero_c.Error):
        opt.add_grad(0, good)  # a second one of one backward
    opt.loss_scale = 0.0
    with pytest.raises(ValueError, match="loss_scale is 0"):
        opt.step()
    opt.loss_scale = None
    opt.step()
    assert array.tolist() == [[-1] * 3] * 2


def test_loss_scale_of_a_checkpoint(alone, tmp_path):
    """A number comes back, as the program may have adapted it; that there was none changes nothing."""
    plain, scaled, adapted = (zero_c.ShardedOptimizer([np.zeros(3, np.float32)], loss_scale=scale) for scale in (None, 8.0, 16.0))
    plain.save(tmp_path / "plain")
    scaled.load(tmp_path / "plain")
    assert scaled.loss_scale == 8.0
    adapted.loss_scale = 2.0
    adapted.save(tmp_path / "adapted")
    scaled.load(tmp_path / "adapted")
    plain.load(tmp_path / "adapted")
    assert scaled.loss_scale == 2.0 and plain.loss_scale is None


def test_communicator_closed_too_early(alone):
    array = np.zeros(3, np.float32)
    opt = zero_c.ShardedOptimizer([array])
    alone.close()
    with pytest.raises(zero_c.Error, match="closed"):
        opt.step()
    assert opt.param(0).tolist() == [0] * 3 and opt.memory()["total"] > 0
