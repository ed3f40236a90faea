"""The example scripts, on two ranks: at every stage the losses of plain data parallelism, which is the same script with
--ddp, or one process that is fed both ranks' batches.
"""

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import zero_c
from ranks import RankGroup, python_path
from test_c import BUILD, CC, compile_core, core_objects, link
from test_c import run as run_program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Two ranks' gradients have the same mean in the same bits here and there. The updates are rounded in another order: up to
# 4 ulp of 2^-24 a step, which the training then carries on, and doubles every few steps.
DDP_TOLERANCE = 2e-5
# Through float16 activations a last bit of a weight becomes a last bit of 11 in some of them, and batch normalisation and
# a learning rate of 1e-2 carry that on. DDP against itself, with every weight moved at random by up to 2 ulp after each
# step, differs in 30 trainings by at most 7e-5 in the first three losses, 7e-3 in the others, and 1.4e-4 in the average.
HALF_FIRST_TOLERANCE, HALF_TOLERANCE, HALF_AVERAGE_TOLERANCE = 3e-4, 3e-2, 6e-4
# A sum of as many numbers in another order: some ulp of 2^-24 a step. Losses are printed with six decimals.
ORDER_TOLERANCE = 2e-5


def run_here(name, arguments):
    """Runs a script on this rank as `python NAME` does, but in a process that has torch already."""
    import torch

    if "--ddp" in arguments and not torch.distributed.is_initialized():
        # Once, and never ended: a gloo group that is freed now and then waits, with the GIL, for its thread that wants it.
        torch.distributed.init_process_group("gloo")
    sys.argv = [name, *arguments]
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def launched(ranks, *command, check=True):
    """The output of a script that the launcher started."""
    done = subprocess.run([sys.executable, "-m", "zero_c.launch", "-n", str(ranks), *map(str, command)], text=True,
                          capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": python_path()})
    assert not check or done.returncode == 0, done.stderr
    return done.stdout if check else done.stderr


def losses_in(text):
    return [float(value) for value in re.findall(r"loss ([0-9.]+)", text)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pytest.importorskip("torch")
    cache = tmp_path_factory.mktemp("inductor")
    with RankGroup(2, leaks=False, env={"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1",
                                        "GLOO_SOCKET_IFNAME": "lo"}) as group:
        yield group


@pytest.fixture(scope="module")
def trained(pair, tmp_path_factory):
    """A function that runs a script one way, once; what each rank logged."""
    done = {}

    def train(name, how, steps):
        if (name, how) not in done:
            log = tmp_path_factory.mktemp("log") / "log"
            pair.run(run_here, name, [*how.split(), "--steps", str(steps), "--log", str(log)], deadline=240)
            done[name, how] = [json.loads(Path(f"{log}.{rank}.json").read_text()) for rank in range(2)]
        return done[name, how]

    return train


# The tolerance of each loss.
SCRIPTS = {"resnet_digits.py": [HALF_FIRST_TOLERANCE] * 3 + [HALF_TOLERANCE] * 9, "gan.py": [DDP_TOLERANCE] * 20,
           "lora.py": [DDP_TOLERANCE] * 10, "experts.py": [DDP_TOLERANCE] * 20, "compiled.py": [DDP_TOLERANCE] * 6}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_those_of_ddp(trained, name, stage):
    tolerances = SCRIPTS[name]
    plain, ours = (trained(name, how, len(tolerances)) for how in ("--ddp", f"--stage {stage}"))
    for rank in range(2):
        assert len(ours[rank]["losses"]) == len(plain[rank]["losses"]) == len(tolerances)
        assert ours[rank]["losses"] == [pytest.approx(loss, rel=tolerance)
                                        for loss, tolerance in zip(plain[rank]["losses"], tolerances)]
    assert ours[0]["losses"] != ours[1]["losses"], "ranks are to have batches of their own"


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "compiled.py"])  # it is cut at the units of stage 3
def test_losses_are_the_same_bits_at_every_stage(trained, name):
    runs = [[rank["losses"] for rank in trained(name, f"--stage {stage}", len(SCRIPTS[name]))] for stage in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]


def test_average_schedule_and_scale_of_the_resnet_are_those_of_ddp(trained):
    runs = [trained("resnet_digits.py", how, 12)[0] for how in ("--ddp", "--stage 1", "--stage 3")]
    assert len({run["scale"] for run in runs}) == len({run["lr"] for run in runs}) == 1
    assert runs[1]["average"] == runs[2]["average"]
    assert runs[1]["average"] == pytest.approx(runs[0]["average"], rel=HALF_AVERAGE_TOLERANCE)


def test_ranks_of_the_experts_call_different_ones(trained):
    """In the last step."""
    first, second = (set(rank["called"]) for rank in trained("experts.py", "--stage 3", 20))
    assert first - second and second - first


def test_frozen_parameters_of_lora_are_sharded_at_stage_3(trained):
    """With all of them on both ranks as at stage 2, and besides what the optimizer counts there."""
    two, three = (trained("lora.py", f"--stage {stage}", 10)[0] for stage in (2, 3))
    frozen_bytes = 4 * (two["parameters"] - two["trained"])
    assert two["held_bytes"] < frozen_bytes / 4
    assert frozen_bytes / 2 < three["parameter_bytes"] < frozen_bytes / 2 * 1.1


def copies_after_construction():
    import torch
    from torch.optim.swa_utils import AveragedModel

    from zero_c.torch import ShardedOptimizer

    told = []
    for stage in (2, 3):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        opt = ShardedOptimizer(model, stage=stage, comm=zero_c.init())
        average = None
        try:
            average = AveragedModel(model)
            average.update_parameters(model)
            told.append("works")
        except zero_c.Error as error:
            told.append(str(error))
        del opt, average
    return told


def test_average_made_after_the_optimizer(pair):
    """At stage 3 the copy is refused, with what to do."""
    for rank, (two, three) in enumerate(pair.run(copies_after_construction)):
        assert two == "works"
        assert f"rank {rank}" in three and "0.weight" in three and "gathered" in three


def compiled_layers(stage):
    """The recipe for stage 3: each layer's forward is compiled, and the windows open around it."""
    import torch

    from zero_c.torch import ShardedOptimizer

    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)])
        opt = ShardedOptimizer(model, stage=stage, comm=zero_c.init())
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for layer in model if compiled else ():
            layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
        for _ in range(3):
            loss = model(torch.ones(4, 8, requires_grad=True)).square().sum()
            loss.backward()
            opt.step()
        found.append(loss.item())
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("stage", [2, 3])
def test_layers_may_be_compiled_one_by_one(pair, stage):
    for (plain, compiled), graphs in pair.run(compiled_layers, stage, deadline=120):
        assert plain == compiled
        assert graphs == 1, "all layers are to share one"


def whole_model_compiled():
    import torch

    from zero_c.torch import ShardedOptimizer

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    opt = ShardedOptimizer(model, stage=3, comm=zero_c.init())
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(torch.ones(4, 8)).square().sum().backward()
        opt.step()
    return sum(torch._dynamo.utils.counters["frames"].values()), str(dict(torch._dynamo.utils.counters["graph_break"]))


def test_hooks_of_stage_3_are_not_compiled(pair):
    """Without torch.compiler.disable their insides were: dozens of frames, and minutes for a small model."""
    for frames, breaks in pair.run(whole_model_compiled, deadline=120):
        assert frames < 40, breaks
        assert "_get_sequence_nr" not in breaks and "bisect" not in breaks


def test_a_script_under_the_launcher():
    pytest.importorskip("torch")
    text = launched(2, EXAMPLES / "gan.py", "--stage", 3, "--steps", 10)
    assert re.fullmatch(r"step 10  loss [0-9.]+\n\n?", text)


# ---- without torch -----------------------------------------------------------


@pytest.mark.parametrize("hidden", [0, 32])
def test_numpy(hidden):
    command = [EXAMPLES / "numpy_digits.py", "--hidden", hidden, "--steps", 60]
    alone = launched(1, *command, "--stage", 1)
    for stage in (1, 2):
        text = launched(2, *command, "--stage", stage)
        assert len(losses_in(text)) == 4
        assert losses_in(text) == pytest.approx(losses_in(alone), rel=ORDER_TOLERANCE, abs=1e-6)
        assert text.endswith("without torch\n")
    assert "legal are 0, 1, 2" in launched(2, *command, "--stage", 3, check=False)


@pytest.mark.parametrize("flavour", ["plain", "address"])
def test_c_processes(flavour):
    flags = {"plain": [], "address": ["-fsanitize=address,undefined"]}[flavour]
    binary = link(BUILD / flavour / "processes", [CC, *flags, "-pthread"],
                  [compile_core(EXAMPLES / "processes.c", flavour), *core_objects(flavour), "-lm"])
    outputs = {}
    for ranks, stage in ((1, 1), (2, 1), (2, 2), (2, 3)):
        status, outputs[ranks, stage] = run_program([binary, str(ranks), str(stage)], 60)
        assert status == 0, outputs[ranks, stage]
    alone = losses_in(outputs[1, 1])
    assert len(alone) == 4 and alone[-1] < alone[0] / 4
    for stage in (1, 2, 3):
        assert outputs[2, stage] == outputs[2, 1]
    assert losses_in(outputs[2, 1]) == pytest.approx(alone, rel=1e-3), "400 steps carry the order of additions far"


def test_c_as_documented(tmp_path):
    """The lines of docs/examples.md, where a reader would type them."""
    document = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    lines, = (block for block in re.findall(r"^```sh\n(.*?)^```$", document, re.S | re.M) if "gcc" in block)
    for folder in ("csrc", "examples"):
        (tmp_path / folder).symlink_to(EXAMPLES.parent / folder)
    done = subprocess.run(["bash", "-e", "-c", lines], cwd=tmp_path, text=True, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    losses = losses_in(done.stdout)
    assert len(losses) == 4 and losses[-1] < losses[0] / 4


def test_jax():
    with contextlib.suppress(ImportError):
        import jax  # noqa: F401
    if "jax" not in sys.modules:
        pytest.skip("jax is not installed")
    command = [EXAMPLES / "jax_digits.py", "--steps", 60]
    alone = launched(1, *command, "--stage", 1)
    for stage in (1, 2):
        assert losses_in(launched(2, *command, "--stage", stage)) == pytest.approx(losses_in(alone), rel=ORDER_TOLERANCE,
                                                                                   abs=1e-6)
    assert "legal are 0, 1, 2" in launched(2, *command, "--stage", 3, check=False)
