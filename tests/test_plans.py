"""Plans: a second call like the first does what the first did, and a call that differs in anything makes a new one."""

import concurrent.futures
import contextlib
import ctypes
import os
import threading

import pytest
import torch
from cases import DEVICE, gpu, in_threads, randn, same

import qk
from qk import gemm, host, int8, plans


class Kernel:
    """A kernel that doubles a tensor on the CPU: what it is launched with is looked at, and counted."""

    arg_names = ["x_ptr", "out_ptr", "n", "EARLY"]

    def __init__(self):
        self.launches = []
        self.function, self.packed_metadata = 7, (4, 1, 0)
        self.run = self.launch_on_addresses

    def launch_on_addresses(self, *args):
        *grid, stream, function, metadata, nothing, enter, leave, x, out, n, early = args
        assert (function, metadata, nothing, enter, leave) == (7, (4, 1, 0), None, None, None)
        self.launches.append((tuple(grid), stream))
        at(out, n).copy_(2 * at(x, n))


def at(address, n):
    """The n float32 at an address."""
    return torch.frombuffer((ctypes.c_float * n).from_address(address), dtype=torch.float32)


@pytest.fixture
def doubled(monkeypatch):
    """-> a planned function on the CPU whose first calls are counted in `doubled.first`."""
    monkeypatch.setattr(plans, "_INTERPRETING", False)
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(plans, "_raw_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(
        plans, "_empty_strided", lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)
    )
    kernel, outside = Kernel(), []

    def double(x, n=None, *, more=None, copies=False):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"x is a {type(x).__name__}")
        out = torch.empty_like(x)
        source = x.clone() if copies else x
        out.copy_(2 * source)
        record = plans.recording()
        call.first.append((n, more))
        if record is not None:
            record.launches.append((kernel, kernel, (x.numel(),), (source, out, x.numel()), {"EARLY": False}))
        return out

    call = plans.planned(lambda: tuple(outside))(double)
    call.first, call.kernel, call.outside = [], kernel, outside
    yield call
    plans._all_plans.pop()


def test_the_second_call_launches_alone(doubled):
    for seed in range(4):
        x = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(doubled(x, 3), 2 * x)
    assert len(doubled.first) == 1 and doubled.kernel.launches == [((5, 1, 1), "stream of -1")] * 3


def different(x):
    """Calls that a plan of doubled(x, 3) must not serve."""
    yield "shape", (x[:4], 3), {}
    yield "stride", (torch.stack([x, x], 1)[:, 0], 3), {}
    yield "dtype", (x.half(), 3), {}
    yield "alignment", (torch.cat([x, x])[1:6], 3), {}
    yield "value", (x, 4), {}
    yield "True is not 1, 3.0 not 3", (x, 3.0), {}
    yield "zero", (x, 0.0), {}
    yield "minus zero", (x, -0.0), {}
    yield "one", (x, 1), {}
    yield "true", (x, True), {}
    yield "keyword", (x, 3), {"more": "x"}
    yield "name", (x,), {"n": 3}
    yield "negated view", (torch._neg_view(x), 3), {}


def test_a_call_that_differs_makes_a_plan_of_its_own(doubled):
    x = torch.arange(5.0)
    doubled(x, 3)
    for i, (name, args, kwargs) in enumerate(different(x), 2):
        doubled(*args, **kwargs)
        assert len(doubled.first) == i, name
    doubled.outside.append("QK_GEMM_PATH")
    doubled(x, 3)
    assert len(doubled.first) == i + 1
    doubled.outside.clear()
    doubled(x, 3)
    assert len(doubled.first) == i + 1


def test_parameters_share_the_plan_and_results_need_no_grad(doubled):
    x = torch.randn(5)
    doubled(x)
    out = doubled(torch.nn.Parameter(x))
    assert len(doubled.first) == 1 and not out.requires_grad and torch.equal(out, 2 * x)


def test_what_gets_no_plan(doubled):
    x = torch.randn(5)
    for _ in range(2):  # a copy: its memory is another each time
        doubled(x, copies=True)
    assert len(doubled.first) == 2
    for _ in range(2):  # a tensor given twice: the next time they may be two
        doubled(x, more=x)
    assert len(doubled.first) == 4
    for _ in range(2):  # no address
        doubled(x, more=torch.empty(0))
    assert len(doubled.first) == 6
    before = len(plans._all_plans[-1])

    class Subclass(torch.Tensor):
        pass

    for _ in range(2):
        doubled(x.as_subclass(Subclass))
    assert len(doubled.first) == 8 and len(plans._all_plans[-1]) == before
    for wrong in (None, [1.0], {}):
        with pytest.raises(ValueError, match="^x is a "):
            doubled(wrong)
        doubled(x, wrong)  # without a hash, as the second argument


def test_an_operator_that_does_other_things_is_called(doubled):
    """As a vendor's GEMM between two kernels."""
    called = []

    @plans.called_operator
    def negated(x, times):
        called.append(times)
        return -x * times

    operator = plans.planned_operator(doubled.__wrapped__, ())
    chain = plans.planned()(lambda x: operator(negated(operator(x), 3)).view(-1))
    kept = []
    for seed in range(4):
        x = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        kept.append(chain(x))
        assert torch.equal(kept[-1], -12 * x)
    assert len(doubled.first) == 2 and len(doubled.kernel.launches) == 6 and called == [3] * 4
    # where it takes a part, or gives the result, there is nothing to call it with, or to write to
    part = plans.planned()(lambda x: operator(negated(operator(x)[:3], 1)))
    own = plans.planned()(lambda x: negated(operator(x), 1))
    for _ in range(3):
        assert torch.equal(part(x), -4 * x[:3]) and torch.equal(own(x), -2 * x)
    assert len(called) == 10 and not any(plans._all_plans[-2:])
    del plans._all_plans[-4:]


def test_plans_are_bounded_and_hold_no_tensor(doubled, monkeypatch):
    monkeypatch.setattr(plans, "_MOST_PLANS", 10)
    kept = plans._all_plans[-1]
    for n in range(35):
        doubled(torch.ones(3), n)
        assert len(kept) <= 10
    assert kept
    doubled(torch.randn(7))
    steps = [step for plan in kept.values() for step in plan.steps]
    assert steps and not any(isinstance(arg, torch.Tensor) for step in steps for arg in step.args)
    plans.forget()
    assert not kept


def test_a_reused_address_is_a_new_tensor(doubled):
    for _ in range(20):  # freed each time, so that addresses come back
        x = torch.randn(5)
        assert torch.equal(doubled(x), 2 * x)
    assert len(doubled.first) == 1


def test_whoever_listens_hears(doubled):
    x = torch.randn(5)
    doubled(x)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class FunctionMode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    for mode in (Mode(), FunctionMode(), torch.autograd.profiler.profile(), torch.device("cpu")):
        before = len(doubled.first)
        with mode:
            doubled(x)
        assert len(doubled.first) == before + 1, mode
    before = len(doubled.first)
    torch.vmap(lambda y: y + doubled(x))(x[None])
    assert len(doubled.first) == before + 1
    torch.jit.trace(lambda y: y + doubled(x), x, check_trace=False)
    assert len(doubled.first) == before + 2
    hooks = plans._KNOBS.launch_enter_hook
    if hasattr(hooks, "add"):  # before Triton 3.5 it is one function

        def hear(metadata):
            pass

        hooks.add(hear)
        try:
            doubled(x)
        finally:
            hooks.remove(hear)
        assert len(doubled.first) == before + 3
    before = len(doubled.first)
    doubled(x)
    assert len(doubled.first) == before


def test_another_current_device(doubled, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield

    x = torch.randn(5)
    doubled(x)
    monkeypatch.setattr(plans, "_current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", device)
    assert torch.equal(doubled(x), 2 * x) and entered == [-1] and len(doubled.first) == 1


def test_an_operator_shows_its_launches_to_the_function_around_it(doubled):
    """Else the function would find nothing to plan once the operator has a plan."""
    inner = plans.planned_operator(doubled.__wrapped__, ())
    outer = plans.planned()(lambda x: inner(x))
    x = torch.randn(5)
    for count in (1, 2, 2, 2):  # alone; then in the function, which notes it; then the function's plan
        inner(x) if count == 1 else outer(x)
        assert len(doubled.first) == count
    del plans._all_plans[-2:]


def test_a_thread_does_not_see_what_another_notes(doubled):
    seen = []

    @plans.planned()
    def function(x):
        seen.append(plans.recording() is not None)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(plans.recording).result() is not None)
        return doubled.__wrapped__(x)

    function(torch.randn(5))
    assert seen == [True, False]
    plans._all_plans.pop()


@pytest.mark.parametrize("sizes", [range(1, 60), [50] * 200], ids=["first calls", "one plan"])
def test_threads_keep_apart(doubled, sizes):
    found = []

    def run(number):
        for n in sizes:
            x = torch.full((n,), float(number))
            if not torch.equal(doubled(x), 2 * x):
                found.append(number)

    in_threads(run)
    assert not found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_starts_without_plans(doubled):
    x = torch.randn(5)
    doubled(x)
    child = os.fork()
    if not child:
        os._exit(len(plans._all_plans[-1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and len(plans._all_plans[-1]) == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter's lock")
def test_a_child_process_finds_the_interpreter_free():
    import triton

    held, leave = threading.Event(), threading.Event()

    def hold():
        with triton.runtime.interpreter._qk_lock:
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        qk.quantize_per_token(torch.ones(2, 3))
        os._exit(0)
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert pid and os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter")
def test_what_numpy_breaks_is_said(monkeypatch):
    import triton

    def broken():
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: broken()

    monkeypatch.setattr(triton.runtime.interpreter.np, "__version__", "2.4.1")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    with pytest.raises(
        RuntimeError, match="numpy 2.4.1 breaks the interpreter of Triton 3.6.0: pip install 'numpy<2.4'"
    ):
        host.launch(torch.device("cpu"), Kernel(), (1,))
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    with pytest.raises(TypeError, match="0-dimensional"):
        host.launch(torch.device("cpu"), Kernel(), (1,))


# On a GPU (what every public function owes is in test_contract.py)


def kept():
    return sum(map(len, plans._all_plans))


@gpu
def test_qk_gemm_path_counts(monkeypatch):
    plans.forget()
    a, b = int8.act_quant(randn(4, 256)), int8.weight_quant(randn(96, 256))
    out = gemm.int8_gemm(*a, *b)
    for path in ("pointers", "portable", "sm75_float"):
        before = kept()
        monkeypatch.setenv("QK_GEMM_PATH", path)
        assert torch.allclose(gemm.int8_gemm(*a, *b), out, rtol=1e-3) and kept() > before
    monkeypatch.setenv("QK_GEMM_PATH", "fastest")
    with pytest.raises(ValueError, match="QK_GEMM_PATH"):
        gemm.int8_gemm(*a, *b)


@gpu
@pytest.mark.parametrize("M", [4, 300])
def test_tensor_maps_follow_their_addresses(M, monkeypatch):
    """Fresh operands at ever new addresses, more of them than maps are kept of, and addresses that come back."""
    monkeypatch.setattr(plans, "_MOST_MAPS", 8)
    plans.forget()
    b = [int8.weight_quant(randn(1024, 512, seed=seed)) for seed in range(3)]
    keep = []
    for turn in range(40):
        a = int8.act_quant(randn(M, 512, seed=turn), scale_layout="column" if turn % 2 else "row")
        out = gemm.int8_gemm(*a, *b[turn % 3], out_dtype=torch.float32)
        expected = gemm.int8_gemm_ref(*a, *b[turn % 3], out_dtype=torch.float32)
        assert (out - expected).norm() <= 1e-6 * expected.norm()
        if turn % 4:
            keep.append((a, out))
        if turn % 10 == 9:
            keep.clear()


@gpu
def test_other_threads_and_streams():
    x = randn(64, 384, dtype=torch.float16)
    expected = qk.act_quant(x)
    found = []

    def run():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                late = torch.zeros_like(x)
                torch.cuda._sleep(100_000)
                late.copy_(x)
                results = qk.act_quant(late)
                stream.synchronize()
                if not all(map(same, results, expected)):
                    found.append(results)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found


@gpu
def test_a_child_process_is_told_by_torch():
    x = randn(4, 70)
    qk.act_quant(x)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            qk.act_quant(x)
            message = "it went through"
        except Exception as error:
            message = str(error)
        os.write(writing, message.encode()[:500])
        os._exit(0)
    os.waitpid(child, 0)
    assert b"CUDA" in os.read(reading, 1000)  # it can't be initialized again, or found an initialization error


@gpu
@pytest.mark.parametrize("M", [4, 300])
def test_planned_in_a_graph(M):
    """The first call of a shape, and later ones, inside a capture."""
    plans.forget()
    b = int8.weight_quant(randn(1024, 512))
    xs = [randn(M, 512, seed=seed) for seed in range(3)]
    expected = [gemm.int8_gemm(*int8.act_quant(x), *b) for x in xs]
    for forgotten in (True, False):
        if forgotten:
            plans.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [gemm.int8_gemm(*int8.act_quant(x), *b) for x in xs]
        for out in captured:
            out.zero_()
        graph.replay()
        assert all(map(same, captured, expected))
