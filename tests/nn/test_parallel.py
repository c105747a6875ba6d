"""Layers cut up among processes: what each computes, against the whole layer; what becomes of states and of errors."""

import argparse
import copy
import datetime
import faulthandler
import gc
import io
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import DEVICE, gpu, randn, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import qk
from qk.nn import Int4Linear, Int8Linear, int8_train_, parallel, quantize_
from qk.nn.parallel import ColwiseQuantized, RowwiseQuantized
from qk.nn.training import Int8FeedForward, Int8TrainLinear
from qk.tools import bench
from qk.tools.bench import model as bench_model
from qk.tools.bench import parallel as bench_parallel
from qk.tools.bench.__main__ import _parse, dump, main
from qk.tools.bench.decoder import Decoder, Shape, random_cache

RANKS = 3
KINDS = (Int8Linear, Int4Linear)
BF16 = torch.bfloat16


# Processes that wait for work


def on_the_cpu():
    if qk.device() != "cpu":
        pytest.skip("interpreted kernels: TRITON_INTERPRET=1")
    # what starts processes imports once, for all of them
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["qk.tools.bench.parallel", "torch.distributed.checkpoint", "torch._dynamo", "pytest"]
    )
    return context


def _serve(rank, file, pipe):
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=wait)
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in range(1, RANKS + 1)}
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        function, size, arguments = job
        failure = None
        try:
            if rank < size:
                function(meshes[size], *arguments)
        except BaseException:
            failure = traceback.format_exc()
        pipe.send(failure)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """ranks(size, function, *arguments): function(mesh, *arguments) in so many processes, whose assertions count."""
    context, file = on_the_cpu(), tmp_path_factory.mktemp("ranks") / "store"
    pipes, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe()
        processes.append(context.Process(target=_serve, args=(rank, file, there), daemon=True))
        processes[-1].start()
        pipes.append(here)

    def answers():
        failures = {}
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            if not pipe.poll(100):
                failures[rank] = f"no answer, exit code {process.exitcode}"
            elif failure := pipe.recv():
                failures[rank] = failure
        assert not failures, "\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items())

    def run(size, function, *arguments):
        for pipe in pipes:
            pipe.send((function, size, arguments))
        answers()

    answers()
    yield run
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(20)
        process.kill()


def layer_of(kind, inputs, outputs, block=32, bias=True, rotate=False, dtype=torch.float32):
    linear = nn.Linear(inputs, outputs, bias, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        linear.weight.copy_(randn(outputs, inputs) / inputs**0.5)
        if bias:
            linear.bias.copy_(randn(outputs, seed=1))
    return kind.from_linear(linear, block, rotate)


def cut(layer, mesh, style):
    """A part of a copy."""
    return parallelize_module(copy.deepcopy(layer), mesh, style)


def chunks_of(size, unit, mesh):
    """Where the parts begin and end, and this rank's: counted in blocks, the first as large as any."""
    blocks = list(torch.arange(-(-size // unit)).chunk(mesh.size()))
    ends = [min((int(chunk[-1]) + 1) * unit, size) for chunk in blocks] + [size] * (mesh.size() - len(blocks))
    return list(zip([0, *ends], ends, strict=False)), mesh.get_local_rank()


def here(x, dim, mesh, unit=1):
    spans, rank = chunks_of(x.shape[dim], unit, mesh)
    return x.narrow(dim, spans[rank][0], spans[rank][1] - spans[rank][0]).contiguous()


def refused(match, function, *arguments, **others):
    try:
        function(*arguments, **others)
    except ValueError as error:
        assert re.search(match, str(error)), error
    else:
        raise AssertionError(f"no error {match}")


# Column-parallel


def _columns(mesh, kind, outputs, dtype, rotate):
    whole = layer_of(kind, 96, outputs, rotate=rotate, bias=not rotate)
    part = cut(whole, mesh, ColwiseQuantized())
    assert type(part).__name__ == f"Colwise{kind.__name__}" and isinstance(part, kind)
    x = randn(2, 3, 96, dtype=dtype)
    expected = whole(x)
    assert same(part(x), here(expected, -1, mesh, 32))
    assert part(x[:0]).shape == (0, 3, part.out_features) and part.in_features == 96
    assert same(cut(whole, mesh, ColwiseQuantized(output_layouts=Replicate()))(x), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "outputs", "dtype", "rotate"), [(2, 160, BF16, False), (3, 160, torch.float32, True), (3, 40, BF16, False)]
)
def test_columns_are_the_whole_layer_s(ranks, kind, size, outputs, dtype, rotate):
    """Of 5 blocks on 3 ranks, and of 2 of which one is ragged: a rank has none."""
    ranks(size, _columns, kind, outputs, dtype, rotate)


def _gathered(mesh, kind, rotate, block, dims):
    """x lies cut: by tokens it travels as the product takes it, by columns too."""
    sent, gather = [], parallel._all_gather

    def spy(out, x, group):
        sent.append((x.dtype, tuple(x.shape)))
        return gather(out, x, group)

    whole, x = layer_of(kind, 160, 96, block, rotate=rotate), randn(3, 6, 160, dtype=BF16)
    expected = here(whole(x), -1, mesh, 32)
    for dim in dims:
        part, last = cut(whole, mesh, ColwiseQuantized(input_layouts=Shard(dim))), dim in (-1, 2)
        del sent[:]
        parallel._all_gather = spy
        try:
            out = part(here(x, dim, mesh, 32 if last else 1))
        finally:
            parallel._all_gather = gather
        assert same(out, expected), dim
        if kind is Int8Linear and not (last and (rotate or block is None)):
            scales = sent[1][1][-1]
            assert [dtype for dtype, _ in sent] == [torch.int8, torch.float32] and sent[0][1][-1] == scales * (
                block or 160
            )
        else:
            assert [dtype for dtype, _ in sent] == [BF16]
    # a DTensor says how it is cut, and may be uneven
    part, x = cut(whole, mesh, ColwiseQuantized()), randn(7, 160, dtype=BF16)
    assert same(part(distribute_tensor(x, mesh, [Shard(0)])), here(whole(x), -1, mesh, 32))
    refused(r"^input has shape \[7, 5\]; expected \[..., 160\]", part, x[:, :5])


@pytest.mark.parametrize(
    ("size", "kind", "rotate", "block", "dims"),
    [
        (2, Int8Linear, False, 32, (1, -1)),
        (3, Int8Linear, True, 32, (0, 2)),
        (3, Int8Linear, False, None, (0, 2)),
        (3, Int4Linear, False, 32, (0, -2, -1)),
    ],
)
def test_input_is_gathered_as_the_product_takes_it(ranks, size, kind, rotate, block, dims):
    ranks(size, _gathered, kind, rotate, block, dims)


def _sizes(mesh):
    part = cut(layer_of(Int8Linear, 160, 96), mesh, ColwiseQuantized(input_layouts=Shard(-1)))
    refused(r"^input has shape \[7, 160\]; expected \[..., (96|64)\]", part, randn(7, 160))


def test_columns_that_lie_elsewhere(ranks):
    ranks(2, _sizes)


def _fused(mesh, kind):
    n, rank, x = mesh.size(), mesh.get_local_rank(), randn(5, 64)
    # 3 heads of keys and of values, each of which 2 heads of queries share
    sizes = 6 * 32, 3 * 32, 3 * 32
    whole, style = layer_of(kind, 64, sum(sizes)), ColwiseQuantized(fused=sizes, units=3)
    part, expected = cut(whole, mesh, style), whole(x)
    heads = [part.view(5, 3, -1) for part in expected.split(sizes, -1)]
    mine = torch.cat([here(part, 1, mesh).flatten(1) for part in heads], -1)
    assert same(part(x), mine) and part.out_features == mine.shape[-1]
    assert f"rank {rank} of {n}" in repr(part) and "units=3" in repr(style)
    assert same(cut(whole, mesh, ColwiseQuantized(fused=sizes, units=3, output_layouts=Replicate()))(x), expected)
    by_blocks = cut(whole, mesh, ColwiseQuantized(fused=(64, 320)))
    assert same(by_blocks(x), torch.cat([here(part, -1, mesh, 32) for part in expected.split((64, 320), -1)], -1))
    if kind is Int8Linear:
        for style, at in ((ColwiseQuantized(units=2), 48), (ColwiseQuantized(fused=(40, 56)), 40)):
            refused(f"would be cut at {at}, inside a block of 32", cut, kind(64, 96, True, 32), mesh, style)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_parts_are_cut_each_on_its_own(ranks, kind):
    ranks(2, _fused, kind)


# Row-parallel


def sum_of_parts(layer, x, spans, dtype, reduce_dtype=torch.float32):
    """By the public functions, of the whole layer's codes and scales."""
    total, int8 = None, isinstance(layer, Int8Linear)
    taken = BF16 if x.dtype == torch.float32 else x.dtype
    if int8 and layer.block_size is not None:
        codes, scale = (qk.hadamard_quant if layer.rotate else qk.act_quant)(x, layer.block_size)
    elif not int8:
        x = qk.hadamard(x, taken) if layer.rotate else x.to(taken)
    for begin, end in spans:
        block = layer.block_size if int8 else layer.group_size
        blocks = slice(None) if block is None else slice(begin // block, -(-end // block))
        if int8:
            if block is None:
                quantized = qk.quantize_per_token(x[..., begin:end])
            else:
                quantized = codes[..., begin:end], scale[..., blocks]
            operands = *quantized, layer.codes[:, begin:end], layer.scale[:, blocks]
            part = qk.int8_gemm(*operands, block, torch.float32)
        else:
            operands = x[..., begin:end], layer.packed[:, begin // 2 : -(-end // 2)], layer.absmax[:, blocks]
            part = qk.int4_gemm(*operands, group_size=block, out_dtype=torch.float32)
        part = part.to(reduce_dtype).float()
        total = part if total is None else total + part
    return (total if layer.bias is None else total + layer.bias).to(dtype)


def _rows(mesh, kind, inputs, small, dtype, block):
    parallel._SMALL = small
    spans, rank = chunks_of(inputs, 32, mesh)
    begin, end = spans[rank]
    whole, x = layer_of(kind, inputs, 40, block, bias=dtype != BF16), randn(2, 5, inputs, dtype=dtype)
    part, expected = cut(whole, mesh, RowwiseQuantized()), sum_of_parts(whole, x, spans, dtype)
    out = part(x[..., begin:end])
    assert out.dtype == dtype and same(out, expected) and part(x[:0, :, begin:end]).shape == (0, 5, 40)
    assert part.in_features == end - begin and part.out_features == 40
    if dtype == torch.float32:
        apart = 0.01 if kind is Int8Linear and block is None else 1e-6  # scales of tokens are those of their parts
        assert torch.linalg.norm(out - whole(x)) < apart * torch.linalg.norm(out)
        assert same(cut(whole, mesh, RowwiseQuantized(input_layouts=Replicate()))(x), expected)
        short = cut(whole, mesh, RowwiseQuantized(reduce_dtype=BF16))
        assert same(short(x[..., begin:end]), sum_of_parts(whole, x, spans, dtype, BF16))


@pytest.mark.parametrize(
    ("size", "kind", "inputs", "small", "dtype", "block"),
    [
        (2, Int8Linear, 160, 2**18, torch.float32, 32),
        (3, Int8Linear, 150, 0, BF16, 32),
        (3, Int8Linear, 64, 2**18, torch.float16, 32),
        (3, Int8Linear, 150, 0, torch.float32, None),
        (2, Int4Linear, 150, 0, torch.float32, 32),
        (3, Int4Linear, 64, 0, BF16, 32),
        (3, Int4Linear, 150, 2**18, torch.float16, None),
    ],
)
def test_rows_are_added_in_the_order_of_ranks(ranks, size, kind, inputs, small, dtype, block):
    """By one collective, and by two; with a ragged part, and an empty one."""
    ranks(size, _rows, kind, inputs, small, dtype, block)


def _scattered(mesh, dims):
    (spans, rank), whole = chunks_of(160, 32, mesh), layer_of(Int8Linear, 160, 40)
    x = randn(4, 5, 160)
    expected = sum_of_parts(whole, x, spans, torch.float32)
    for dim in dims:
        part = cut(whole, mesh, RowwiseQuantized(output_layouts=Shard(dim)))
        assert same(part(x[..., slice(*spans[rank])]), here(expected, dim, mesh)), dim
    nothing, x = Int8Linear(160, 0, block_size=32), x[..., slice(*spans[rank])]
    rows = here(expected, 0, mesh).shape[0]
    for dim, tokens, outputs in ((0, (rows, 0), (rows, 5)), (1, (4, 0), None), (2, None, (4, 5))):
        style = RowwiseQuantized(output_layouts=Shard(dim))
        assert tokens is None or cut(whole, mesh, style)(x[:, :0]).shape == (*tokens, 40)
        assert outputs is None or cut(nothing, mesh, style)(x).shape == (*outputs, 0)


@pytest.mark.parametrize(("size", "dims"), [(2, (1, -1)), (3, (0, -2, 2))])
def test_a_sum_is_left_where_it_is_wanted(ranks, size, dims):
    ranks(size, _scattered, dims)


def _rotated(mesh, kind):
    """Of 448 columns, in blocks of 64: of the 4 and 3 blocks of a part, the first would be rotated as one of 256."""
    whole = layer_of(kind, 448, 40, rotate=True)
    part = cut(whole, mesh, RowwiseQuantized(units=7))
    spans, rank = [(0, 256), (256, 448)], mesh.get_local_rank()
    begin, end = spans[rank]
    for dtype in (torch.float32, BF16):
        x = randn(5, 448, dtype=dtype)
        assert same(part(x[:, begin:end]), sum_of_parts(whole, x, spans, dtype))
    assert same(part.dequantize(), whole.dequantize()[:, begin:end])
    layer = kind(192, 40, True, 32, rotate=True)
    refused(
        "is rotated in blocks of 64 columns, and would be cut at 96; units=3 cuts between them",
        parallelize_module, layer, mesh, RowwiseQuantized(),
    )  # fmt: skip
    assert type(layer) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_rotation_of_a_part_is_the_whole_s(ranks, kind):
    ranks(2, _rotated, kind)


# Models


class FeedForward(nn.Module):
    def __init__(self, inner=160):
        super().__init__()
        self.up, self.down = nn.Linear(64, inner), nn.Linear(inner, 64, bias=False)
        with torch.no_grad():
            for number, weight in enumerate(self.parameters()):
                weight.copy_(randn(*weight.shape, seed=number) / 8)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


def feed_forwards(to, inner=160):
    model = nn.Sequential(FeedForward(inner), FeedForward(inner)).to(DEVICE)
    quantize_(model, to, block_size=32, group_size=32)
    return model


PLAN = {"*.up": ColwiseQuantized(), "*.down": RowwiseQuantized()}
BY_TOKENS = {
    "*.up": ColwiseQuantized(input_layouts=Shard(0)),
    "*.down": RowwiseQuantized(output_layouts=Shard(0)),
}


def _model(mesh, to):
    whole = feed_forwards(to)
    model, x = cut(whole, mesh, PLAN), randn(6, 64)
    out = model(x)
    assert torch.linalg.norm(out - whole(x)) < (1e-6 if to == "int8" else 0.003) * torch.linalg.norm(out)
    if to == "int8":
        assert same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), out)
        torch._dynamo.reset()
    assert same(cut(whole, mesh, BY_TOKENS)(here(x, 0, mesh)), here(out, 0, mesh))


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_model(ranks, to):
    """Tokens may be cut between layers: the same bits."""
    ranks(2 if to == "int8" else 3, _model, to)


def _readme(mesh, block):
    known = {"model": feed_forwards("int8"), "torch": torch, "qk": qk}
    os.environ["WORLD_SIZE"] = str(mesh.size())  # as torchrun does
    exec(block.replace('"cuda"', repr(DEVICE)), known)
    x = randn(6, 64)
    assert same(known["model"](x), cut(feed_forwards("int8"), mesh, PLAN)(x))


def test_readme(ranks):
    """What it says of several GPUs, run."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n### On several GPUs\n")[2].partition("\n### ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    ranks(3, _readme, block)


def _dtensors(mesh):
    x, width = randn(6, 64), 64 * mesh.size()
    whole, down = layer_of(Int8Linear, 64, width), layer_of(Int8Linear, width, 40)
    out = cut(whole, mesh, ColwiseQuantized(use_local_output=False))(x)
    assert isinstance(out, DTensor) and out.placements == (Shard(1),) and same(out.full_tensor(), whole(x))
    part = cut(down, mesh, RowwiseQuantized(use_local_output=False))
    result = part(out)
    assert isinstance(result, DTensor) and result.placements == (Replicate(),) and result.shape == (6, 40)
    scattered = cut(down, mesh, RowwiseQuantized(use_local_output=False, output_layouts=Shard(0)))(out)
    assert same(scattered.full_tensor(), result.to_local())
    refused(r"expected Shard\(1\) or Replicate", part, distribute_tensor(x, mesh, [Shard(0)]))
    for size, fused in ((96, None), (64, (32, 32))):
        style = ColwiseQuantized(use_local_output=False, fused=fused)
        refused("^use_local_output is False", cut, Int8Linear(64, size, block_size=32), mesh, style)


def test_dtensors(ranks):
    ranks(2, _dtensors)


def _decoder(mesh, kind, shape):
    """A rank has two heads of three, or one of two."""
    whole = bench_model._quantized(Decoder(shape).random_(0), kind).requires_grad_(False)
    part = bench_parallel.random_part(shape, kind, mesh, torch.float32)
    tokens, heads = (
        torch.arange(6).view(2, 3) * 7,
        -(-shape.kv_heads // 2) - mesh.get_local_rank() * (shape.kv_heads % 2),
    )
    caches = random_cache(shape, 2, 4), random_cache(shape._replace(kv_heads=heads), 2, 4)
    for new in (slice(0, 2), slice(2, 3)) if kind == "bf16" else (slice(0, 3),):
        positions = torch.arange(3)[new]
        a, b = (model(tokens[:, new], positions, cache) for model, cache in zip((whole, part), caches, strict=True))
        assert bench.error_of(b, a) < {"bf16": 1e-6, "int8": 2e-3, "int4": 4e-3}[kind]
        assert bench.error_of(b.flip(0), a) > 0.1
    assert bench_model.nbytes(part.layers) < 0.8 * bench_model.nbytes(whole.layers)
    part = bench_parallel.random_part(shape, kind, mesh, torch.float32, by_tokens=True)
    tokens, positions = torch.arange(8).view(2, 4) * 7, torch.arange(4)
    a, b = whole(tokens, positions, caches[0]), part(here(tokens, 1, mesh), positions, caches[1])
    assert bench.error_of(b, a) < {"bf16": 1e-6, "int8": 2e-3, "int4": 4e-3}[kind]


@pytest.mark.parametrize(("kind", "kv_heads", "inner"), [("bf16", 3, 384), ("int8", 2, 256), ("int4", 2, 256)])
def test_the_decoder_of_the_benchmark(ranks, kind, kv_heads, inner):
    ranks(2, _decoder, kind, Shape(1, kv_heads * 128, inner, kv_heads, kv_heads, vocabulary=150))


def _benchmark(mesh):
    bench_parallel._KINDS, shape = ("bf16",), Shape(1, 256, 256, 2, 2, vocabulary=150)
    for case in bench_parallel.cases(mesh, shape, decode=(), prefill=((1, 6),)):
        call, truth = case.contenders["bf16 eager" if case.op == "prefill" else "qk int8"]
        inputs = case.inputs()
        assert bench.error_of(call(*inputs), truth(*inputs)) == 0 and case.options == {"gpus": 2}
    times = [None, None]
    case.pace.meet()
    dist.all_gather_object(times, case.pace.clock(), mesh.get_group())
    assert times[0] == times[1]
    one_head = shape._replace(kv_heads=1)
    refused("^the mesh has 2 processes; expected up to 1", bench_parallel.random_part, one_head, "bf16", mesh)


def test_processes_measure_together(ranks):
    ranks(2, _benchmark)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["model", "--gpus", "2"],
            "as many processes, on one machine: torchrun --nproc-per-node 2 -m qk bench model --gpus 2",
        ),
        (["int8", "--gpus", "2"], "--gpus takes a number of GPUs and the job model"),
        (["model", "--gpus", "0"], "--gpus takes a number of GPUs and the job model"),
    ],
)
def test_gpus_of_the_command(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments, here=lambda: {"gpu": "Tester"})
    assert says in capsys.readouterr().err


def test_the_first_process_records(tmp_path, monkeypatch):
    """And a file's results of several GPUs are left alone by --check."""
    file = tmp_path / "report.json"
    row = {"op": "decode", "shape": [1, 512], "dtype": "bfloat16", "options": {"gpus": 2}, "contender": "qk int8"}
    file.write_text(dump({"gpu": "Tester", "results": [row | {"job": job} for job in ("model --gpus 2", "model")]}))

    def parse(arguments):
        return _parse([*map(str, arguments)], argparse.ArgumentParser())

    assert [row["job"] for row in parse(["--check", file]).check["results"]] == ["model"]
    monkeypatch.setenv("RANK", "1")
    assert parse(["model", "--json", file]).json is None
    monkeypatch.setenv("RANK", "0")
    assert parse(["model", "--json", file]).json == file


# States


# States


def _checkpoints(mesh, folder, to):
    whole, x = feed_forwards(to, 128), randn(6, 64)
    full, model = whole.state_dict(), cut(whole, mesh, PLAN)
    state, expected = model.state_dict(), model(x)
    assert sum(isinstance(value, DTensor) for value in state.values()) == 2 * (3 + 2)
    assert all(same(value.full_tensor(), full[n]) for n, value in state.items() if isinstance(value, DTensor))
    dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())

    def blank():
        model = cut(whole, mesh, PLAN)
        for name, value in model.named_buffers():
            if not name.endswith("format"):
                value.zero_()
        return model

    # into parts, and into a whole model
    loaded = blank()
    into = loaded.state_dict()
    dcp.load(into, checkpoint_id=folder, process_group=mesh.get_group())
    loaded.load_state_dict(into)
    assert same(loaded(x), expected)
    into = {name: torch.zeros_like(value) for name, value in full.items()}
    dcp.load(into, checkpoint_id=folder, process_group=mesh.get_group())
    assert all(same(into[name], value) for name, value in full.items())
    if to == "int8":
        with pytest.raises(RuntimeError, match="0.up.codes is "):
            loaded.load_state_dict(state | {"0.up.codes": distribute_tensor(full["0.up.codes"], mesh, [Shard(1)])})
    # parts, and a whole model's state, as tensors
    for given in (state, full):
        loaded = blank()
        loaded.load_state_dict(given)
        assert all(same(a, b) for a, b in zip(loaded.buffers(), model.buffers(), strict=True))


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_checkpoints(ranks, tmp_path, to):
    ranks(2, _checkpoints, tmp_path, to)


def _no_state(mesh):
    whole = feed_forwards("int8", 96)
    model, x = cut(whole, mesh, PLAN), randn(3, 64)
    refused("^0.up has no state: its parts are uneven, or fused", model.state_dict)
    layer = layer_of(Int4Linear, 64, 128)
    fused = cut(layer, mesh, ColwiseQuantized(fused=(64, 64)))
    refused("^the layer has no state", fused.state_dict)
    # but they take a whole one; and a model without memory takes no more than it needs
    other = cut(Int4Linear(64, 128, group_size=32), mesh, ColwiseQuantized(fused=(64, 64)))
    other.load_state_dict(layer.state_dict())
    assert all(same(a, b) for a, b in zip(other.buffers(), fused.buffers(), strict=True)) and other.packed.any()
    meta = parallelize_module(feed_forwards("int8", 96).to("meta"), mesh, PLAN)
    meta.load_state_dict(whole.state_dict(), assign=True)
    assert same(meta(x), model(x)) and meta[0].up.codes.untyped_storage().nbytes() == meta[0].up.codes.numel()
    try:
        model.load_state_dict(feed_forwards("int4", 96).state_dict(), strict=False)
    except RuntimeError as error:
        assert "0.up (ColwiseInt8Linear) expects int8 codes in blocks of 32, but the state dict has int4" in str(error)
    else:
        raise AssertionError("int4 went into int8")


def test_uneven_parts_have_no_state(ranks):
    ranks(2, _no_state)


def _copies(mesh):
    """As every layer of torch can be copied and pickled, in the processes of its group."""
    for style in (ColwiseQuantized(output_layouts=Replicate()), RowwiseQuantized(input_layouts=Replicate())):
        part, x = cut(layer_of(Int8Linear, 96, 64), mesh, style), randn(3, 96)
        file = io.BytesIO()
        torch.save(part, file)
        file.seek(0)
        for other in (copy.deepcopy(part), torch.load(file, weights_only=False)):
            assert type(other) is type(part) and other.codes.data_ptr() != part.codes.data_ptr()
            assert same(other(x), part(x))


def test_parts_can_be_copied(ranks):
    ranks(2, _copies)


# Training


def _sharded(mesh):
    """Two steps of FSDP2, each rank with half of the batch, against one process."""
    batches = [randn(2, 64, 64, seed=seed) for seed in (5, 6)]  # blocks of 32 are one rank's
    models = [FeedForward(96).to(DEVICE) for _ in range(2)]
    for model in models:
        int8_train_(model, block_size=32, rounding="nearest")
    alone, sharded = models
    for layer in (sharded.up, sharded):
        fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for batch in batches:
        losses = [model(x).square().mean() for model, x in ((alone, batch), (sharded, batch[mesh.get_local_rank()]))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        dist.all_reduce(losses[1].detach(), group=mesh.get_group())
        assert torch.isclose(losses[0], losses[1] / 2, rtol=1e-5)
        for one, part in zip(alone.parameters(), sharded.parameters(), strict=True):
            assert isinstance(part, DTensor) and part.to_local().shape[0] == part.shape[0] // 2
            error = torch.linalg.norm(part.grad.full_tensor() - one.grad)
            assert error < 0.02 * torch.linalg.norm(one.grad), error / torch.linalg.norm(one.grad)
        for optimizer in optimizers:
            optimizer.step()


def test_fsdp_takes_layers_that_train_in_int8(ranks):
    if torch.__version__.startswith("2.7."):
        pytest.skip("torch 2.7's fully_shard adds gradients on the CPU, and doesn't average them, of nn.Linear too")
    ranks(2, _sharded)


def _sharded_weights_are_written(mesh):
    layers = [Int8TrainLinear(64, 64, False, DEVICE, block_size=32, rounding="nearest") for _ in range(2)]
    model, x = nn.Sequential(*layers), randn(4, 64)
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh)
    before = model(x)
    for _ in range(4):  # gathered weights are the same parameters, of the same version, and may lie in the same place
        with torch.no_grad():
            for layer in layers:
                layer.weight.mul_(-1.5)  # a shard
        out = model(x)
        whole = nn.Sequential(*(Int8TrainLinear(64, 64, False, DEVICE, None, 32, "nearest") for _ in layers))
        for new, layer in zip(whole, layers, strict=True):
            new.weight = nn.Parameter(layer.weight.full_tensor().detach())
        assert same(out, whole(x)) and not same(out, before)
        before = out
    before.sum().backward()


def test_fsdp_s_weights_that_no_optimizer_wrote(ranks):
    """Each forward pass quantizes what was just gathered."""
    ranks(2, _sharded_weights_are_written)


def _cut_by_torch(mesh):
    layer, x = Int8TrainLinear(64, 64, device=DEVICE, block_size=32), randn(4, 64)
    whole = Int8FeedForward(64, 64, device=DEVICE, block_size=32)
    refused("^(input|weight) is a DTensor; expected a plain tensor", cut(layer, mesh, ColwiseParallel()), x)
    replicated = distribute_tensor(x, mesh, [Replicate()])
    refused("^input is a DTensor; expected a plain tensor", layer, replicated)
    refused("^input is a DTensor; expected a plain tensor", whole, replicated)
    refused("^up has hooks", cut(whole, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}), x)


def test_layers_that_train_in_int8_can_t_be_cut_by_torch(ranks):
    ranks(2, _cut_by_torch)


# Errors


def test_bad_arguments():
    for style, argument, value in (
        (ColwiseQuantized, "units", 0),
        (RowwiseQuantized, "units", 1.5),
        (ColwiseQuantized, "use_local_output", 1),
        (ColwiseQuantized, "input_layouts", "replicate"),
        (ColwiseQuantized, "output_layouts", Shard(0)),
        (RowwiseQuantized, "input_layouts", Shard(0)),
        (RowwiseQuantized, "output_layouts", (Replicate(),)),
        (RowwiseQuantized, "reduce_dtype", torch.int8),
    ):
        with pytest.raises(ValueError, match=f"^{argument} is "):
            style(**{argument: value})
    for fused in (0, 5, "qkv", {64: 1}):
        with pytest.raises(ValueError, match=rf"^fused is {re.escape(repr(fused))}; expected a list of sizes, or None"):
            ColwiseQuantized(fused=fused)
    with pytest.raises(ValueError, match="^a size in fused is -1"):
        ColwiseQuantized(fused=(3, -1))


def _refused(mesh):
    layer = Int8Linear(96, 64, block_size=32)
    for match, style in (
        (r"^units is 3, and out_features is 64", ColwiseQuantized(units=3)),
        (r"^units is 3, and fused has 32", ColwiseQuantized(units=3, fused=(32, 32))),
        (r"^units is 5, and in_features is 96", RowwiseQuantized(units=5)),
        (r"^fused is \(32, 64\); expected sizes that make up out_features, 64", ColwiseQuantized(fused=(32, 64))),
        (r"would be cut at 48, inside a block of 32", RowwiseQuantized(units=2)),
    ):
        refused(match, parallelize_module, layer, mesh, style)
        assert type(layer) is Int8Linear and layer.codes.shape == (64, 96)
    refused(r"^module is a Linear; ColwiseQuantized takes an", cut, nn.Linear(4, 4), mesh, ColwiseQuantized())
    part = cut(layer, mesh, ColwiseQuantized())
    refused(r"^module is a ColwiseInt8Linear; RowwiseQuantized takes", RowwiseQuantized()._apply, part, mesh)
    x = randn(4, 96)
    for style, argument in ((ColwiseQuantized, "input_layouts"), (RowwiseQuantized, "output_layouts")):
        for dim in (2, -3, 5):
            part = cut(layer, mesh, style(**{argument: Shard(dim)}))
            match = rf"^{argument} is .*{dim}.*, and input has shape \[4, \d+\]; expected one of its dimensions"
            refused(match, part, x[:, : part.in_features])
        part = cut(layer, mesh, style(**{argument: Shard(0)}))
        refused(r"^input has shape \[\]; expected \[..., ", part, x[0, 0])
        refused("^input is a list; expected a tensor", part, [1.0])


def test_what_can_t_be_cut(ranks):
    ranks(2, _refused)


def _cut_elsewhere(mesh):
    """Of 64, 32 and no columns: as torch cuts x, it fits on the second rank, and only there."""
    part = cut(layer_of(Int8Linear, 96, 40, block=64), mesh, RowwiseQuantized())
    x = distribute_tensor(randn(4, 96), mesh, [Shard(1)])
    refused(r"^input has \[32, 32, 32\] columns on the ranks; expected \[64, 32, 0\]$", part, x)


def test_all_ranks_refuse_what_fits_on_one(ranks):
    ranks(3, _cut_elsewhere)


def _fails(rank, file):
    wait = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", f"file://{file}", wait, 2, rank)
    part = parallelize_module(Int8Linear(64, 64, block_size=32), DeviceMesh("cpu", [0, 1]), RowwiseQuantized())
    part(torch.zeros(3, 40 if rank == 1 else 32))


def test_a_rank_that_fails_ends_the_others(tmp_path):
    """With its error, long before a collective gives up."""
    on_the_cpu()
    start, failed = time.perf_counter(), torch.multiprocessing.ProcessRaisedException
    with pytest.raises(failed, match=r"input has shape \[3, 40\]; expected \[..., 32\]"):
        torch.multiprocessing.start_processes(_fails, (tmp_path / "store",), 2, start_method="forkserver")
    assert time.perf_counter() - start < 120


_SLEEPS = """
import datetime, time
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.5))

main()
"""


def test_torchrun_says_who_is_late(tmp_path):
    """A barrier names the rank that doesn't come, and torchrun ends that, too."""
    script = tmp_path / "script.py"
    script.write_text(_SLEEPS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, script], capture_output=True, text=True, timeout=120)
    assert done.returncode and "Rank 1 failed to pass monitoredBarrier" in done.stderr, done.stderr


# On two GPUs


def _on_gpus(rank, file):
    faulthandler.dump_traceback_later(280)
    torch.cuda.set_device(rank)
    how = {"timeout": datetime.timedelta(seconds=60), "world_size": 2, "rank": rank}
    dist.init_process_group("nccl", init_method=f"file://{file}", **how)
    mesh = DeviceMesh("cuda", [0, 1])
    for to in ("int8", "int4"):
        for tokens in (6, 4096):  # sums by one collective, and by two
            _compare_on_gpus(rank, mesh, to, tokens)
    gc.collect()  # NCCL waits for the end of graphs that hold its kernels
    dist.destroy_process_group()


def _compare_on_gpus(rank, mesh, to, tokens):
    whole = feed_forwards(to)
    x = randn(tokens, 64, dtype=BF16)
    expected, model = whole(x), cut(whole, mesh, PLAN)
    out = model(x)
    assert out.device.index == rank and same(model(x), out)
    assert torch.linalg.norm((out - expected).float()) < 0.02 * torch.linalg.norm(expected.float())
    assert same(cut(whole, mesh, BY_TOKENS)(here(x, 0, mesh)), here(out, 0, mesh))
    up = ColwiseQuantized(output_layouts=Replicate())
    assert same(cut(whole[0].up, mesh, up)(x), whole[0].up(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(x)
    x.copy_(x.flip(0))
    graph.replay()
    assert same(captured, model(x))
    compiled = torch.compile(model, fullgraph=True)(x)
    assert torch.linalg.norm((compiled - captured).float()) < 0.02 * torch.linalg.norm(captured.float())
    torch._dynamo.reset()


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    processes = torch.multiprocessing.start_processes(_on_gpus, (tmp_path / "store",), 2, False, start_method="spawn")
    end = time.monotonic() + 300
    try:
        while not processes.join(1):  # raises what one of them raised
            assert time.monotonic() < end, "they wait for each other: see what they were at"
    finally:
        for process in processes.processes:
            process.kill()
