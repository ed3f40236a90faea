"""Arrays of other libraries, in and out: right values or the right exception, memory freed once."""

import gc
import threading

import numpy as np
import pytest

from dlpack_producer import CPU, CUDA, CUDA_MANAGED, CUDA_PINNED, READ_ONLY, Producer, capsule_is_valid, capsule_name

import zero_c
from zero_c import _core


@pytest.fixture
def comm():
    (comm,) = zero_c.local_group(1)
    with comm:
        yield comm


@pytest.fixture
def engine(comm):
    values = np.arange(12, dtype=np.float32)
    return _core.Engine(comm, [("w", 12, "float32", 0, values)], [{"lr": 0.5}], rule="sgd")


# ---- in --------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [True, False])
def test_capsule_is_renamed_and_freed_once(versioned):
    producer = Producer(np.arange(6, dtype=np.float32).reshape(2, 3), versioned=versioned)
    array, dtype = _core.as_array(producer)
    assert dtype == "float32" and array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert capsule_name(producer.capsules[0]) == (b"used_dltensor_versioned" if versioned else b"used_dltensor")
    assert producer.deleted == 0
    del array
    gc.collect()
    assert producer.deleted == 1


def test_capsule_consumed_twice_is_refused():
    producer = Producer(np.ones(3, np.float32))
    capsule = producer.capsule()

    class Again:
        def __dlpack_device__(self):
            return (CPU, 0)

        def __dlpack__(self, max_version):
            return capsule

    array, _ = _core.as_array(Again())
    with pytest.raises(BufferError, match="consumed before"):
        _core.as_array(Again())
    del array
    assert producer.deleted == 1


def test_old_producer_is_asked_again_without_the_version():
    producer = Producer(np.ones(3, np.float32), versioned=False, accepts_version=False)
    _core.as_array(producer)
    assert producer.asked == [{"max_version": (1, 1)}, {}]


def test_error_inside_a_producer_comes_out():
    with pytest.raises(TypeError, match="boom"):
        _core.as_array(Producer(np.ones(3, np.float32), error=TypeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        _core.as_array(Producer(np.ones(3, np.float32), error=RuntimeError("boom")))


def test_unknown_major_version_is_given_back():
    producer = Producer(np.ones(3, np.float32), major=2)
    with pytest.raises(BufferError, match="2.0"):
        _core.as_array(producer)
    assert producer.deleted == 1


def test_newer_minor_version_is_fine():
    assert _core.as_array(Producer(np.ones(3, np.float32), minor=9))[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", [CPU, CUDA_PINNED, CUDA_MANAGED])
def test_memory_of_the_cpu_is_accepted(device):
    assert _core.as_array(Producer(np.ones(2, np.float32), device=(device, 0)))[0].tolist() == [1, 1]


@pytest.mark.parametrize("device", [CUDA, 4, 10, 99, -1])
def test_other_memory_is_refused_before_it_is_asked_for(device):
    producer = Producer(np.ones(2, np.float32), device=(device, 0), data=0xdead0000)
    with pytest.raises(BufferError, match=f"device type {device}"):
        _core.as_array(producer)
    assert producer.asked == []


def test_device_that_lies_is_found_in_the_tensor():
    producer = Producer(np.ones(2, np.float32), device=(CUDA, 0), reported=(CPU, 0), data=0xdead0000)
    with pytest.raises(BufferError, match="CUDA"):
        _core.as_array(producer)
    assert producer.deleted == 1


@pytest.mark.parametrize("reported", [7, (1,), "cpu"])
def test_device_that_is_no_pair_is_refused(reported):
    with pytest.raises(BufferError, match="__dlpack_device__"):
        _core.as_array(Producer(np.ones(2, np.float32), reported=reported))


@pytest.mark.parametrize("what", [{"code": 6, "bits": 8}, {"code": 4, "bits": 32}, {"code": 2, "bits": 8}, {"lanes": 2},
                                  {"code": 5, "bits": 64}, {"code": 10, "bits": 8}, {"code": 2, "bits": 4},
                                  {"code": 1, "bits": 16}, {"code": 200, "bits": 32}, {"lanes": 0}])
def test_other_types_are_refused(what):
    producer = Producer(np.ones(4, np.float32), **what)
    with pytest.raises(BufferError, match="code"):
        _core.as_array(producer)
    assert producer.deleted == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8])
def test_all_dtypes(dtype):
    array, name = _core.as_array(Producer(np.array([1, 2], dtype)))
    assert array.dtype == dtype and name == np.dtype(dtype).name and array.tolist() == [1, 2]


def test_bfloat16_is_shown_as_its_bits():
    array, name = _core.as_array(Producer(np.array([0x3f80, 0x4000], np.uint16), code=4))
    assert name == "bfloat16" and array.tolist() == [0x3f80, 0x4000]


@pytest.mark.parametrize("layout", [
    {"shape": (-1,)}, {"shape": (2**62, 4)}, {"shape": (2, 2), "strides": (2**62, 1)}, {"shape": (1,) * 33, "strides": None},
    {"data": None},
])
def test_impossible_layouts_are_refused(layout):
    producer = Producer(np.ones(4, np.float32), **layout)
    with pytest.raises(BufferError):
        _core.as_array(producer)
    assert producer.deleted == 1


def test_absent_strides_mean_row_major():
    array, _ = _core.as_array(Producer(np.arange(6, dtype=np.float32).reshape(2, 3), strides=None))
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_empty_arrays_need_no_memory():
    array, _ = _core.as_array(Producer(np.ones((0, 3), np.float32), data=None))
    assert array.shape == (0, 3)


def test_no_capsule_is_refused():
    class Strange:
        def __dlpack_device__(self):
            return (CPU, 0)

        def __dlpack__(self, max_version):
            return 5

    with pytest.raises(BufferError, match="not a DLPack capsule"):
        _core.as_array(Strange())
    with pytest.raises(TypeError, match="list"):
        _core.as_array([1.0])


def test_read_only_arrays_are_not_written(comm):
    array = np.arange(4.0)
    array.flags.writeable = False
    for source in (array, Producer(array, flags=READ_ONLY)):
        with pytest.raises(BufferError, match="read-only"):
            comm.all_reduce(source)
        with pytest.raises(BufferError, match="read-only"):
            _core.as_array(source, True)
        assert _core.as_array(source)[0].flags.writeable is False
    assert array.tolist() == [0, 1, 2, 3]


def test_arrays_that_cannot_be_written_in_place_are_refused(comm):
    plain = np.zeros(8, np.float32)
    for array, why in ((plain[::2], "contiguous"), (plain.astype(">f4"), "byte order"),
                       (np.zeros(9, np.uint8)[1:].view(np.float32), "aligned"),
                       (np.lib.stride_tricks.as_strided(plain, (4,), (0,)), "expanded")):
        with pytest.raises(BufferError, match=why):
            comm.all_reduce(array)


def test_strange_layouts_are_read_right(engine):
    wanted = np.arange(12, dtype=np.float32) + 1
    packed = np.zeros(12, np.dtype([("a", "u1"), ("f", "<f4")]))
    packed["f"] = wanted
    bytes_ = np.zeros(49, np.uint8)
    bytes_[1:] = wanted.view(np.uint8)
    cube = np.zeros((12, 5, 5), np.float32)
    cube[:, 1, 2] = wanted
    for source in (wanted.astype(">f4"), packed["f"], bytes_[1:].view(np.float32), cube[:, 1, 2], wanted[::-1][::-1],
                   Producer(cube[:, 1, 2]), np.concatenate([np.zeros(3, np.float32), wanted])[3:]):
        engine.add_grad(0, source)
        engine.end_round()
        assert engine.read(0, "grad").tolist() == wanted.tolist()
        engine.discard()


def test_unusable_dtypes_of_numpy_are_refused(comm):
    for array in (np.zeros(2, bool), np.zeros(2, np.int8), np.zeros(2, np.complex64), np.zeros(2, "U3"),
                  np.zeros(2, np.uint16)):
        with pytest.raises(BufferError, match="dtype"):
            comm.all_reduce(array)


def test_torch_tensors(comm):
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert comm.all_reduce(tensor) is tensor
    assert _core.as_array(tensor)[1] == "bfloat16"
    with pytest.raises(BufferError, match="gradient"):
        comm.all_reduce(torch.ones(3, requires_grad=True))
    with pytest.raises(BufferError, match="code"):
        comm.all_reduce(torch.ones(3, dtype=torch.bool))


# ---- out -------------------------------------------------------------------


def test_export_is_the_memory_itself(engine):
    export = engine.param_dlpack(0, (3, 4), (4, 1))
    seen = np.from_dlpack(export)
    assert seen.shape == (3, 4) and seen.flags.writeable
    seen[0, 0] = 7
    assert engine.param(0)[0] == 7
    transposed = np.from_dlpack(engine.param_dlpack(0, (4, 3), (1, 4)))
    assert (transposed == seen.T).all()
    assert export.__dlpack_device__() == (CPU, 0)


def test_export_to_torch_has_exact_storage(engine):
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(engine.param_dlpack(0, (2, 6), (6, 1)))
    assert tensor.data_ptr() == engine.param(0).ctypes.data
    assert tensor.untyped_storage().nbytes() == 48 and tensor.storage_offset() == 0


def test_both_capsule_kinds_by_version(engine):
    export = engine.param_dlpack(0, (12,), (1,))
    assert capsule_is_valid(export.__dlpack__(), b"dltensor")
    assert capsule_is_valid(export.__dlpack__(max_version=(0, 8)), b"dltensor")
    assert capsule_is_valid(export.__dlpack__(max_version=(1, 0)), b"dltensor_versioned")
    assert capsule_is_valid(export.__dlpack__(max_version=(2, 0), dl_device=(1, 0), copy=False), b"dltensor_versioned")


@pytest.mark.parametrize("keywords", [{"stream": 0}, {"stream": -1}, {"dl_device": (2, 0)}, {"copy": True}])
def test_what_an_export_cannot_do_is_a_buffer_error(engine, keywords):
    with pytest.raises(BufferError):
        engine.param_dlpack(0, (12,), (1,)).__dlpack__(**keywords)


@pytest.mark.parametrize(("shape", "strides"), [((12,), (2,)), ((3, 4), (4,)), ((13,), (1,)), ((-12,), (1,)), ((3, 4), (5, 1)),
                                                ((2**33, 2**33), (1, 1)), ((12,), (2**63 - 1,))])
def test_layouts_outside_the_parameter_are_refused(engine, shape, strides):
    with pytest.raises(ValueError):
        engine.param_dlpack(0, shape, strides)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_unconsumed_capsules_give_their_memory_back(comm, version):
    def cycle():
        engine = _core.Engine(comm, [("w", 12, "float32", 0, np.zeros(12, np.float32))], [{"lr": 0.5}], rule="sgd")
        freed = threading.Event()
        capsules = [engine.param_dlpack(0, (12,), (1,)).__dlpack__(max_version=version) for _ in range(1000)]
        import weakref
        weakref.finalize(engine, freed.set)
        del engine
        assert not freed.is_set()
        capsules.clear()
        assert freed.is_set()

    cycle()


def test_views_keep_the_engine_and_its_memory(comm):
    engine = _core.Engine(comm, [("w", 12, "float32", 0, np.arange(12, dtype=np.float32))], [{"lr": 0.5}], rule="sgd")
    views = [engine.param(0), np.from_dlpack(engine.param_dlpack(0, (12,), (1,))),
             np.from_dlpack(engine.param_dlpack(0, (12,), (1,)))]
    del engine
    gc.collect()
    comm.close()
    del views[1]
    gc.collect()
    for view in views:
        assert view.tolist() == list(range(12))


def test_deleter_from_another_thread(comm):
    torch = pytest.importorskip("torch")
    engine = _core.Engine(comm, [("w", 12, "float32", 0, np.zeros(12, np.float32))], [{"lr": 0.5}], rule="sgd")
    tensors = [torch.from_dlpack(engine.param_dlpack(0, (12,), (1,)))]
    del engine
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()


def test_a_view_may_outlive_the_interpreter(tmp_path):
    import subprocess
    import sys

    script = ("import numpy as np, zero_c, builtins, torch\n"
              "from zero_c import _core\n"
              "(comm,) = zero_c.local_group(1)\n"
              "e = _core.Engine(comm, [('w', 3, 'float32', 0, np.zeros(3, np.float32))], [{'lr': 1}], rule='sgd')\n"
              "builtins.kept = [torch.from_dlpack(e.param_dlpack(0, (3,), (1,))), e.param(0)]\n"
              "builtins.loop = [builtins.kept]; builtins.loop.append(builtins.loop)\n")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=tmp_path)
