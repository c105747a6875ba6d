"""The decoder split among the GPUs of one machine, one process per GPU: what `--gpus` of the job `model` measures.

    torchrun --nproc-per-node 2 -m qk bench model --gpus 2

The fused matmul of q, k and v is split by heads, that of gate and up by blocks. The attention's output and `down` add
partial sums (qk/nn/parallel.py). Every GPU holds the norms and the embedding whole. Each process makes every full
matrix, one at a time, and keeps its part: the weights are those of the one-GPU model, and no process ever holds them
all.

In a decode step, all GPUs hold all tokens. In a prefill, each holds a share of them between the matmuls (sequence
parallelism, arXiv 2205.05198): it normalizes and quantizes its own tokens, their int8 codes are gathered, and the sums
are scattered back. Sums travel in bfloat16 in a prefill, and in float32 in a decode step. The bfloat16 model is split
in the same way, but gathers floats, and NCCL adds in bfloat16.

All processes go through the same rounds, by the clock of rank 0. `weights`, `bytes`, `peak_bytes` and `tops` are those
of one GPU. The operation "gather", of shape [tokens, width], quantizes and gathers tokens that are split among the
GPUs; "qk int8" quantizes first, and sends codes and scales.
"""

import datetime
import functools
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import qk
from qk.nn.parallel import ColwiseQuantized, RowwiseQuantized, gather, spans_of
from qk.tools.bench import Case, Pace
from qk.tools.bench.decoder import LLAMA_3_8B, Decoder
from qk.tools.bench.model import _DTYPE, _KINDS, _decoder_case, _empty, _quantized

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13


def start(gpus):
    """Return a mesh of the processes that torchrun started. Raises ValueError unless there is one for each GPU."""
    if int(os.environ.get("WORLD_SIZE", 0)) != gpus or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != gpus:
        how = f"torchrun --nproc-per-node {gpus} -m qk bench model --gpus {gpus}"
        raise ValueError(f"--gpus {gpus} takes as many processes, on one machine: {how}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # if one rank fails, say for lack of memory, the others don't wait the default ten minutes for it
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=3), device_id=device)
    return DeviceMesh("cuda", list(range(gpus)))


def pace_of(mesh):
    """Make the pace of processes that measure together: rank 0's clock, and a sum that no GPU can finish alone."""
    group, device = mesh.get_group(), qk.device()
    clocks = group if dist.get_backend(group) == "gloo" else dist.new_group(backend="gloo")

    def clock():
        now = torch.tensor(time.perf_counter(), dtype=torch.float64)
        dist.broadcast(now, group_src=0, group=clocks)
        return now.item()

    return Pace(clock, lambda: dist.all_reduce(torch.zeros(1, device=device), group=group))


class _ByTokens(Decoder):
    """A decoder that is split by tokens: `forward` takes this process's share, and the last one has the last token."""

    def end(self, x, update):
        last = gather((x + update)[:, -1:], 1, [1] * self.mesh.size(), self.mesh.get_group())
        return self.head(self.norm(last[:, -1]))


def _cuts(shape, by_tokens, dtype):
    """Return how each split matrix is split: what `ColwiseQuantized` or `RowwiseQuantized` needs for it."""
    heads, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    tokens = {"input_layouts": Shard(1)} if by_tokens else {}
    sums = {"output_layouts": Shard(1), "reduce_dtype": dtype} if by_tokens else {}
    return {
        "qkv": {"fused": (heads, kv, kv), "units": shape.kv_heads} | tokens,
        "gate_up": {"fused": (shape.inner, shape.inner)} | tokens,
        "head": {"output_layouts": Replicate()},
        "output": {"units": shape.kv_heads} | sums,
        "down": sums,
    }


def _cut_plain(linear, name, mesh, fused=(), units=None, input_layouts=None, output_layouts=None, reduce_dtype=None):
    """Replace a torch.nn.Linear by this process's part of it, split as the styles split layers."""
    dim, n = int(name in ("output", "down")), mesh.size()
    sizes, rank = fused or (linear.weight.shape[dim],), mesh.get_local_rank()
    own, begin, group = [], 0, mesh.get_group()
    for size in sizes:
        a, b = spans_of(size, size // units if units else 128, mesh.size())[rank]
        own.append(linear.weight.detach().narrow(dim, begin + a, b - a))
        begin += size
    linear.weight = torch.nn.Parameter(torch.cat(own, dim), requires_grad=False)
    if input_layouts is not None:
        linear.register_forward_pre_hook(lambda _, inputs: gather(inputs[0], 1, [inputs[0].shape[1]] * n, group))
    if dim and output_layouts is None:

        def reduced(_, inputs, out):
            dist.all_reduce(out, group=group)
            return out

        linear.register_forward_hook(reduced)
    elif dim:

        def scattered(_, inputs, out):
            tokens = out.transpose(0, 1).contiguous()
            own = tokens.new_empty((tokens.shape[0] // n, *tokens.shape[1:]))
            _reduce_scatter(own, tokens, group=group)
            return own.transpose(0, 1)

        linear.register_forward_hook(scattered)
    elif output_layouts is not None:
        columns = [b - a for a, b in spans_of(begin, 128, n)]
        linear.register_forward_hook(lambda _, inputs, out: gather(out, out.ndim - 1, columns, group))


@torch.no_grad()
def random_part(shape, kind, mesh, dtype=_DTYPE, by_tokens=False):
    """Make this process's part of the decoder that `random_decoder` makes.

    by_tokens: each process passes an equal share of the tokens, and all positions. Raises ValueError if there are too
    few heads to split.
    """
    if mesh.size() > shape.kv_heads:
        raise ValueError(f"the mesh has {mesh.size()} processes; expected up to {shape.kv_heads}, one for each kv_head")
    model, device = _empty(shape, "bf16").to(dtype), qk.device()
    generator, cuts = torch.Generator(device).manual_seed(0), _cuts(shape, by_tokens, dtype)
    if by_tokens:
        model.__class__, model.mesh = _ByTokens, mesh
    for name in [name for name, _ in model.named_parameters()]:
        path = name.removesuffix(".weight")
        layer = model.get_submodule(path)
        layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight, device=device), requires_grad=False)
        model.fill_(name, layer.weight, generator)
        above, _, key = path.rpartition(".")
        if kind != "bf16" and layer.weight.ndim > 1:
            layer = _quantized(torch.nn.ModuleList([layer]), kind)[0]
            if key in cuts:
                style = RowwiseQuantized if key in ("output", "down") else ColwiseQuantized
                parallelize_module(layer, mesh, style(**cuts[key]))
            setattr(model.get_submodule(above), key, layer)
        elif key in cuts:
            _cut_plain(layer, key, mesh, **cuts[key])
    return model


def _gather_case(mesh, tokens, width, pace):
    n = mesh.size()
    sizes = [tokens // n] * n

    def everywhere(x):
        return gather(x, 0, sizes, mesh.get_group())

    def quantized_first(x):
        codes, scale = qk.act_quant(x)
        return everywhere(codes), everywhere(scale)

    def truth(x):
        return qk.act_quant_ref(everywhere(x))

    return Case(
        "gather", (tokens, width), _DTYPE, {"gpus": n},
        lambda: (torch.randn(sizes[0], width, dtype=_DTYPE, device=qk.device()),),
        {"qk int8": (quantized_first, truth), "bf16": (lambda x: qk.act_quant(everywhere(x)), truth)},
        limit=0, pace=pace,
    )  # fmt: skip


def cases(mesh, shape=LLAMA_3_8B, decode=((1, 512), (8, 512), (64, 512)), prefill=((1, 2048),)):
    """Yield the cases of `decoder_cases` on the GPUs of a mesh, and those of the traffic between them."""
    models = functools.cache(
        lambda by_tokens: {kind: (random_part(shape, kind, mesh, by_tokens=by_tokens), {}) for kind in _KINDS}
    )
    n, pace = mesh.size(), pace_of(mesh)
    first, last = spans_of(shape.kv_heads, 1, n)[mesh.get_local_rank()]

    def alike(inputs, by_tokens):
        """Give all GPUs rank 0's tokens, whole or a share. They drew different ones, as their caches differ in size."""
        tokens, *others = inputs()
        dist.broadcast(tokens, group_src=0, group=mesh.get_group())
        return (tokens.chunk(n, 1)[mesh.get_local_rank()].contiguous() if by_tokens else tokens), *others

    for op, steps in (("decode", decode), ("prefill", prefill)):
        by_tokens = op == "prefill"
        for sequences, context in steps:
            context -= context % n if by_tokens else 0  # shares are equal
            whose = functools.partial(models, by_tokens)
            case = _decoder_case(whose, shape, op, sequences, context, last - first, pace)
            yield case._replace(
                inputs=functools.partial(alike, case.inputs, by_tokens),
                options={"gpus": n},
                bytes=case.bytes // n,
                flops=case.flops // n,
            )
    for _, tokens in prefill if n > 1 else ():
        yield _gather_case(mesh, tokens, shape.width, pace)
