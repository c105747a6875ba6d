"""The cases of `python -m qk aot`: for each module and compute capability, calls of its functions.

A case is a call as text, and the minimum count of each instruction that one of its kernels must have. The text is
evaluated with the module's names, with f16(8192, 2048), bf16, f32, i8, i32, i64 and u8 for tensors, and with the GEMMs'
Problem. The count "tile" is what the kernel's tile needs in one iteration of its loop. Of instructions separated by |,
one is enough. "spilled" is how many bytes a thread may spill, 0 by default. The cases cover every config of the
modules' tuning tables.
"""

import itertools

import triton

from qk.core import gluon
from qk.gemm import sm90 as gemm_sm90
from qk.gemm_int4 import sm75 as int4_sm75
from qk.gemm_int4 import sm90 as int4_sm90

# 16 bytes at a time: how contiguous, aligned tensors are read and written
_LOADS, _STORES = {"ld.global.128": 1}, {"st.global.128": 1}
_TRITON = ".".join(triton.__version__.split(".")[:2])  # some releases spill where others don't
_STOCHASTIC = "rounding='stochastic', seed=i64(1)"


def _int4_cases(arch):
    for x in "f16", "bf16", "f32":
        yield f"quantize_int4({x}(8192, 8192))", _LOADS
        yield f"quantize_int4({x}(8192, 2048), 128)", _LOADS
        yield f"quantize_int4({x}(64, 131072))", _LOADS
        yield f"dequantize_int4(u8(8192, 1024), {x}(8192, 16), 2048, 128, {x}.dtype)", _STORES
        yield f"dequantize_int4(u8(8192, 4096), {x}(8192, 1), 8192, None, {x}.dtype)", _STORES
    for columns in 32, 384, 1024, 2048, 4096, 16384, 28672:
        yield f"quantize_int4(f16(8192, {columns}))", _LOADS
    for columns in 32, 384, 2048:
        yield f"dequantize_int4(u8(8192, {columns // 2}), f16(8192, 1), {columns})", _STORES
    for group in 32, 64, 256:
        yield f"quantize_int4(f16(8192, 8192), {group})", _LOADS
        yield f"dequantize_int4(u8(8192, 4096), f16(8192, {8192 // group}), 8192, {group})", _STORES
    for x in "f16", "f32":
        yield f"quantize_int4({x}(8192, 2047))", {}
        yield f"quantize_int4({x}(8192, 2047), 128, 'int32')", {}
        yield f"quantize_int4({x}(64, 131071))", {}
        yield f"dequantize_int4(u8(8192, 1024), {x}(8192, 1), 2047, None, {x}.dtype)", {}
        yield f"dequantize_int4(i32(8192, 256), {x}(8192, 16), 2047, 128, {x}.dtype)", {}
    yield "quantize_int4(f16(8192, 2048), None, 'int32')", _LOADS
    yield "quantize_int4(f16(8192, 2048), 128, 'int32')", _LOADS
    yield "quantize_int4(f16(8192, 8192).t())", {}
    yield "dequantize_int4(i32(8192, 256), f16(8192, 16), 2048, 128)", _STORES
    yield "pack_int4(i8(8192, 2048))", _LOADS
    yield "pack_int4(i8(8192, 2047))", {}
    yield "pack_int4(i8(8192, 2047), 'int32')", {}
    yield "unpack_int4(u8(8192, 1024), 2048)", _STORES
    yield "unpack_int4(u8(8192, 1023), 2045)", {}
    yield "unpack_int4(i32(8192, 256), 2047)", {}


def _int8_cases(arch):
    for x in "f16", "bf16", "f32":
        yield f"act_quant({x}(8192, 8192))", _LOADS
        yield f"act_dequant(i8(8192, 8192), f32(8192, 64), out_dtype={x}.dtype)", _STORES
        yield f"weight_quant({x}(8192, 8192))", _LOADS
        yield f"weight_dequant(i8(8192, 8192), f32(64, 64), out_dtype={x}.dtype)", _STORES
        yield f"quantize_per_token({x}(8192, 8192))", _LOADS
    for block in 32, 64, 256:
        yield f"act_quant(f16(8192, 8192), {block})", _LOADS
        yield f"act_dequant(i8(8192, 8192), f32(8192, {8192 // block}), {block}, f16.dtype)", _STORES
        yield f"weight_quant(f16(8192, 8192), {block})", _LOADS
        yield f"weight_dequant(i8(8192, 8192), f32({8192 // block}, {8192 // block}), {block}, f16.dtype)", _STORES
    for columns in 256, 1024, 2048, 18944, 65536:
        yield f"quantize_per_token(f16(8192, {columns}))", _LOADS
    for columns in 256, 1024:
        yield f"act_quant(f16(8192, {columns}))", _LOADS
    yield "act_quant(f16(4, 2048, 4096), scale_layout='column')", _LOADS
    yield "act_quant(f16(8192, 8191))", {}
    yield "act_quant(f16(8192, 8192).t())", {}
    yield "weight_quant(f16(8191, 8191))", {}
    yield "weight_quant(f16(8192, 8192).t())", {}
    yield "act_dequant(i8(8192, 8191), f32(8192, 64), out_dtype=f16.dtype)", {}
    yield "weight_dequant(i8(8191, 8191), f32(64, 64), out_dtype=f16.dtype)", {}
    yield "quantize_per_token(f16(8192, 8191))", {}
    # the codes and their transpose
    both = _LOADS | {"st.global.128": 2}
    for x in "f16", "bf16", "f32":
        yield f"square_quant({x}(8192, 8192))", both
    for block in 32, 64, 128, 256:
        yield f"square_quant(bf16(8192, 8192), {block}, {_STOCHASTIC})", both
    for x, block, rounding in ("bf16", 128, "nearest"), ("f32", 128, "stochastic"), ("f32", 256, "stochastic"):
        yield f"square_quant_sums({x}(8192, 8192), {block}, '{rounding}', i64(1))", both
    yield f"square_quant(bf16(8191, 8191), {_STOCHASTIC})", {}
    few = {"spilled": 24} if arch == 90 and _TRITON == "3.8" else {}
    yield "square_quant_sums(f32(8191, 8191), 256, 'stochastic', i64(1))", few
    if arch >= 89:
        yield "quantize_per_token(f16(8192, 8192), torch.float8_e4m3fn)", _LOADS
        yield "quantize_per_token(bf16(8192, 18944), torch.float8_e4m3fn)", _LOADS


def _gemm_operands(M, block_size, N=4096, K=4096, square=False):
    """Return a, a_scale, b and b_scale of a GEMM, as text. square: a has a scale for each square block."""
    if block_size is None:
        return f"i8({M}, {K}), f32({M}, 1), i8({N}, {K}), f32({N}, 1)"
    blocks = K // block_size
    rows = -(-M // block_size) if square else M
    return f"i8({M}, {K}), f32({rows}, {blocks}), i8({N}, {K}), f32({N // block_size}, {blocks})"


def _gemm_cases(arch):
    path = "sm75_float" if arch == 75 else "portable"
    for M in 16, 128, 4096:
        large = {75: "fma", 90: "wgmma", 100: "tcgen05|mma"}.get(arch, "mma")
        least = {large if M > 16 or arch == 75 else "mma": "tile"}
        for block in 32, 64, 128, 256, None:
            yield f"int8_gemm({_gemm_operands(M, block)}, {block}, path='{path}')", least
        # each block up to 128, and each out_block wider than the table's tile, has its own tile
        for block in 32, 64, 128:
            for out_block, activation in (64, "silu"), (128, "gelu"), (256, "gelu_tanh"):
                if M == 16 or out_block > 64:
                    call = f"{_gemm_operands(M, block)}, bf16(4096), {out_block}, '{activation}', {block}"
                    yield f"int8_addmm_quant({call}, path='{path}')", least
        square = _gemm_operands(M, 128, square=True)
        yield f"int8_gemm({square}, path='{path}')", least
        for out_block in 32, 64, 128:
            call = f"{square}, bf16(4096), {out_block}, 'gelu', out_square=True, path='{path}'"
            yield f"int8_addmm_quant({call})", least
        if arch >= 90:  # elsewhere "portable" uses no descriptors either
            yield f"int8_gemm({_gemm_operands(M, 128)}, path='pointers')", least
    for out in "bf16", "f32":
        yield f"int8_addmm({_gemm_operands(4096, 128)}, {out}(4096), out_dtype={out}.dtype, path='{path}')", least
    for block in 32, None:
        call = f"{_gemm_operands(4096, block, square=True)}, bf16(4096), 128, 'gelu', {block}"
        yield f"int8_addmm_quant({call}, out_square=True, path='{path}')", least
    for block, out_block in (256, 32), (None, 32), (None, 256):
        yield f"int8_gemm_quant({_gemm_operands(4096, block)}, {out_block}, {block}, path='{path}')", least


def _gemm_sm75_cases(arch):
    for M, products in (16, 8), (4096, 32):
        # eight instructions for each 8 x 8 outputs and 128 columns of K
        least = {"mma": 8 * products}
        operands = _gemm_operands(M, 128)
        yield f"int8_gemm_sm75(Problem({operands}, None, f16({M}, 4096)))", least
        if arch != 75:
            return  # elsewhere only tests run it
        square = _gemm_operands(M, 128, square=True)
        yield f"int8_gemm_sm75(Problem({square}, None, f16({M}, 4096)))", least
        for out_block in 32, 64, 128, 256:
            out = f"i8({M}, 4096), f32({M}, {4096 // out_block}), 128, {out_block}, 'gelu'"
            yield f"int8_gemm_sm75(Problem({operands}, f16(4096), {out}))", least
        yield f"int8_gemm_sm75(Problem({operands}, bf16(4096), bf16({M}, 4096)))", least
        # with a float32 output and bias, the smaller tile at any M
        yield f"int8_gemm_sm75(Problem({operands}, f32(4096), f32({M}, 4096)))", {"mma": 64}


def _gemm_sm90_cases(arch):
    if arch != 90 or not gemm_sm90.AVAILABLE:
        return
    for config, products in ("wide", 4), ("narrow", 2):

        def call(block, bias, out, options="", square=False, config=config):
            operands = _gemm_operands(4096, block, square=square)
            return f"int8_gemm_sm90(Problem({operands}, {bias}, {out}{options}), '{config}')"

        # for each of two warpgroups, four instructions for each 64 x 128 outputs and 128 columns of K
        least = {"wgmma": 8 * products, "cp.async.bulk": 4}
        for block in 128, None:
            yield call(block, None, "f16(4096, 4096)", f", block_size={block}"), least
            yield call(block, "f16(4096)", "f32(4096, 4096)", f", block_size={block}, activation='gelu'"), least
        for bias, out, activation in (None, "f16", None), ("f16(4096)", "bf16", None), ("f32(4096)", "f32", "'silu'"):
            yield call(128, bias, f"{out}(4096, 4096)", f", activation={activation}, exact=False"), least
        for out_block in 32, 64, 128, 256:
            out = f"i8(4096, 4096), f32(4096, {4096 // out_block})"
            for block, exact in (128, True), (128, False), (None, True):
                common = out_block == 128 or (block, exact) == (128, True)
                if common and (out_block < 256 or config == "wide"):
                    yield call(block, "f16(4096)", out, f", {block}, {out_block}, 'gelu', {exact}"), least
        # square blocks of a, of out, and of both
        squares = "i8(4096, 4096), f32(32, 32)"
        for exact in True, False:
            yield call(128, None, "f32(4096, 4096)", f", exact={exact}", True), least
            yield call(128, "f16(4096)", squares, f", 128, 128, 'gelu', {exact}", True), least
        yield call(None, "f16(4096)", squares, ", None, 128, 'gelu'"), least
        if config == "narrow":  # the wide tile, its scales and those of a's rows don't fit in shared memory
            yield call(128, "f16(4096)", squares, ", 128, 128, 'gelu'"), least


def _gemm_sm90_decode_cases(arch):
    if arch != 90 or not gluon.AVAILABLE:
        return
    for config, M, N in ("32", 32, 4096), ("64", 64, 4096), ("128", 128, 4096), ("128 rows", 128, 28672):
        for block, bias, out in (128, "f16(4096)" if N == 4096 else None, "bf16"), (None, None, "f32"):
            problem = f"Problem({_gemm_operands(M, block, N)}, {bias}, {out}({M}, {N}), block_size={block})"
            # each consumer needs four instructions for 128 columns of K
            yield f"int8_gemm_sm90_decode({problem}, '{config}')", {"wgmma": 8, "cp.async.bulk": 4}
            if config == "128":  # for small weights
                yield f"int8_gemm_sm90_decode({problem}, _CONFIGS['128']._replace(block_m=32))", {"wgmma": 8}


def _int4_operands(M, x="bf16", group=128, N=8192, K=8192, packed="u8"):
    """Return x, packed and absmax of an int4 GEMM, as text."""
    groups = 1 if group is None else -(-K // group)
    return f"{x}({M}, {K}), {packed}({N}, {-(-K // (8 if packed == 'i32' else 2))}), {x}({N}, {groups})"


def _int8_problem(M, group, block, zero=False, evens_first=False, out="bf16"):
    """An Int4Problem with int8 x [M, 8192], as text."""
    zeros = f"i8(8192, {1 if group is None else 8192 // group})" if zero else None
    scale = f"f32({M}, {1 if block is None else 8192 // block})"
    operands = _int4_operands(M, "i8", group, packed="i32").replace(", i8(8192", ", f16(8192")
    return f"Int4Problem({operands}, None, {out}({M}, 8192), {group}, {scale}, {block}, {zeros}, {evens_first})"


def _gemm_int4_portable_cases(arch):
    # the instruction depends on the tile's rows; below capability 8.0 dots are of float32
    large = {75: "fma", 90: "wgmma", 100: "tcgen05|mma"}.get(arch, "mma")
    least = {large: 1} | ({} if arch == 75 else {"cp.async|cp.async.bulk": 1})
    for M in 1, 64, 256, 4096:
        for x, group in ("bf16", 128), ("f16", 32), ("bf16", 64), ("f16", None):
            # on Hopper the public function uses another kernel
            operands = _int4_operands(M, x, group, packed="i32")
            problem = f"Int4Problem({operands}, None, {x}({M}, 8192), {group})"
            yield f"int4_gemm_portable({problem})", least if group != 32 else {}
        for group, block in (128, None), (32, 256), (None, None):
            few = {"spilled": 48} if arch == 90 else {}
            yield f"int4_gemm_portable({_int8_problem(M, group, block)})", least | few
        yield f"int4_gemm_portable({_int8_problem(M, 128, 128, zero=True)})", few


def _gemm_int4_cases(arch):
    for M in 1, 4096:
        operands = _int4_operands(M, "f16", 128, 4096, 4096, "i32")
        yield f"int4_gemm({operands}, f16(4096), 128, f32.dtype)", {"mma": 1} if arch == 75 else {}  # the T4's own
        few = {"spilled": 8} if (M, arch, _TRITON) == (4096, 90, "3.6") else {}  # outside the main loop
        yield f"int4_gemm({_int4_operands(M, 'bf16', 32, 1000, 1000)}, None, 32)", few


def _gemm_int4_sm75_cases(arch):
    if arch != 75:
        return  # elsewhere only tests run it
    for config, group, K, out in (
        ("decode", None, 8200, "f32"), ("small", 64, 8200, "f16"),
        ("large", 128, 8192, "f16"), ("large", 32, 8200, "f32"),
    ):  # fmt: skip
        tile, groups = int4_sm75._CONFIGS[config], 1 if group is None else -(-K // group)
        operands = f"f16(100, {K}), i32(8192, {-(-K // 32) * 4}), f16(8192, {groups}), bf16(8192), {out}(100, 8192)"
        # one for each 16 rows, 8 tokens and 8 columns of an iteration
        products = tile.mt * tile.nt * min(group or 64, 64) // 8
        yield f"int4_gemm_sm75(Int4Problem({operands}, {group}), '{config}')", {"mma": products}
    for config, group, block, zeros in (
        ("decode", None, None, False), ("small", 64, None, True), ("large", 128, None, False), ("large", 32, 128, True),
        ("large", None, None, False), ("decode", 128, 128, False),
    ):  # fmt: skip
        tile, groups = int4_sm75._CONFIGS[config], 1 if group is None else 8192 // group
        operands = f"i8(100, 8192), i32(8192, 1024), f16(8192, {groups}), None, f16(100, 8192), {group}"
        x = f"f32(100, {1 if block is None else 8192 // block}), {block}"
        zero_point = f"i8(8192, {groups})" if zeros else "None"
        products = tile.mt * 2 * tile.nt * min(group or 64, 64) // 16  # 8 rows, 8 tokens and 16 columns each
        yield f"int4_gemm_sm75(Int4Problem({operands}, {x}, {zero_point}), '{config}')", {"mma": products}


def _gemm_int4_sm90_cases(arch):
    if arch != 90 or not gluon.AVAILABLE:
        return
    # for each stage and consumer, one product for each 16 columns
    for (config, tokens), group, columns in (
        *itertools.product((("16", 8), ("16 long", 8), ("16", 16)), (128, None), (256,)),
        *itertools.product((("16 ordered", 8), ("16 ordered long", 8), ("16 ordered", 16)), (32, 128), (256,)),
        *itertools.product((("32", 32),), (32, 64, 128), (256,)),
        *itertools.product((("64", 64), ("128", 128), ("large", 128)), (32, 64, 128, None), (128,)),
        (("32", 16), 128, 256), (("64", 32), 128, 128), (("128", 64), 128, 128), (("large", 64), 128, 128),
    ):  # fmt: skip
        M, x = min(tokens, 100), "f16" if group is None else "bf16"
        groups = 1 if group is None else 8192 // group
        columns = min(columns, 4 * min(group or 128, 128))
        call = f"{x}({M}, 8192), i32(8192, 1024), {x}({8192}, {groups}), {x}(8192), {x}({M}, 8192), {group}"
        least = {"wgmma": columns // 16 * int4_sm90._CONFIGS[config].wgs, "cp.async.bulk": 2}
        few = {"spilled": 40} if tokens == 128 and group == 32 else {}  # faster than smaller tiles
        yield f"int4_gemm_sm90(Int4Problem({call}), _CONFIGS['{config}']._replace(block_m={tokens}))", least | few
    for config, tokens in (
        ("16 ordered", 8), ("16 ordered", 16), ("32", 32), ("64 int8", 32), ("64 int8", 64), ("128 int8", 64),
        ("128 int8", 128),
    ):  # fmt: skip
        M = min(tokens, 100)
        for group, block, zero in (128, None, False), (128, 128, False), (None, None, False), (64, 32, True):
            problem = _int8_problem(M, group, block, zero, evens_first=True)
            few = {"spilled": {32: 32, 128: 128}.get(tokens, 0)} if group == 64 else {}
            call = f"int4_gemm_sm90({problem}, _CONFIGS['{config}']._replace(block_m={tokens}))"
            yield call, {"wgmma": 4, "cp.async.bulk": 2} | few
    for zero in False, True:
        yield f"int4_gemm_sm90({_int8_problem(64, 32, None, zero, evens_first=True)}, '64')", {"wgmma": 12}


def _gemm_int4_sm90_int8_cases(arch):
    if arch != 90 or not gluon.AVAILABLE:
        return
    for group, block, zero in (128, None, False), (128, 128, False), (None, None, False), (64, 32, True):
        for M, out in (1000, "bf16"), (300, "f32"):
            products = {"wgmma": 8 if block == 32 else 16}  # a step has 128 columns, or twice as many sums or columns
            yield f"int4_gemm_sm90_int8({_int8_problem(M, group, block, zero, True, out)})", products
    for config, group, block in ("groups of 128", 128, None), ("groups of 128", 128, 128), ("small groups", 64, 32):
        problem, products = _int8_problem(200, group, block, block == 32, True), {"wgmma": 8 if block == 32 else 16}
        yield f"int4_gemm_sm90_int8({problem}, '{config}')", products
        yield f"int4_gemm_sm90_int8({problem}, _CONFIGS['{config}']._replace(block_m=64))", products
        if block != 32:
            yield f"int4_gemm_sm90_int8({problem}, 'three consumers')", {"wgmma": 24}
            yield f"int4_gemm_sm90_int8({problem}, _CONFIGS['three consumers']._replace(block_m=64))", {"wgmma": 12}


def _hadamard_cases(arch):
    # blocks of 4096, which take the most registers; tiles of many blocks; tiles that a row's end cuts off
    yield "hadamard_quant(bf16(8192, 4096), 256)", _LOADS
    yield "hadamard(bf16(8192, 11008), f16.dtype)", _LOADS | _STORES
    yield "hadamard_quant(f16(8192, 1000)[:, :900])", {}


def _norm_cases(arch):
    for x in "f16", "bf16", "f32":
        row = f"{x}(8192, 4096), {x}(4096)"
        yield f"rms_norm({row}, 1e-6, {x}(8192, 4096))", _LOADS | _STORES
        yield f"rms_norm_quant({row}, 1e-6, {x}(8192, 4096))", _LOADS
        yield f"swiglu({x}(8192, 28672))", _LOADS | _STORES
        yield f"swiglu_quant({x}(8192, 28672))", _LOADS
    # rows of every length: several in a tile, one, the longest that a program holds, and one that is read again
    for K in 384, 2048, 8192, 16384, 28672:
        yield f"rms_norm(bf16(8192, {K}), bf16({K}))", _LOADS | _STORES
        for block in 32, 256, None:
            operands = f"bf16(8192, {K}), f32({K}), 1e-6, bf16(8192, {K}), {block}"
            yield f"rms_norm_quant({operands}, evens_first=True)", _LOADS
        yield f"rms_norm_quant(f32(8192, {K}), f32({K}), 1e-6, f32(8192, {K}), None)", _LOADS
        for x in "bf16", "f32":
            yield f"swiglu_quant({x}(8192, {2 * K}), None, None, evens_first=True)", _LOADS
    for block in 32, 256:
        yield f"swiglu_quant(bf16(8192, 28672), None, {block}, scale_layout='column')", _LOADS
    for M in 1, 16:  # fewer rows than multiprocessors
        for K in 4096, 16384:
            yield f"rms_norm_quant(bf16({M}, {K}), bf16({K}), 1e-6, bf16({M}, {K}), None, evens_first=True)", _LOADS
        yield f"swiglu_quant(bf16({M}, 28672), None, None)", _LOADS
    yield "rms_norm_quant(f32(8191, 8191), f32(8191), 1e-6, f32(8191, 8191), None)", {}
    yield "rms_norm_quant(bf16(8191, 8191), f32(8191), 1e-6, bf16(8191, 8191))", {}
    yield "swiglu_quant(f32(8191, 8191), f32(8191, 8191), None)", {}
    yield "swiglu_quant(bf16(8191, 8191), bf16(8191, 8191))", {}


def _kv_cache_cases(arch):
    products = {} if arch == 75 else {"mma": 1, "cp.async": 1}
    formats = ("u8", 2, True), ("i8", 1, True), ("bf16", 1, False)
    for (codes, pack, scaled), D in itertools.product(formats, (64, 128)):
        for x in ("bf16", "f16") if scaled else ("bf16",):
            rows = f"8, 8, 4096, {D // pack}"
            cache = f"{codes}({rows}), {codes}({rows}), {f'{x}(8, 8, 4096, 2)' if scaled else None}, i32(8)"
            # float32 products hold whole rows
            few = {"spilled": 208} if (arch, D) == (75, 128) else {}
            yield f"decode_attention({x}(8, 32, {D}), {cache})", products | few
            for tokens in 1, 1000:
                new = f"{x}(8, {tokens}, 8, {D}).transpose(1, 2)"
                yield f"write_kv({new}, {new}, {cache}, i32(8))", {}
    # one split; two tiles of query heads; float32 out
    cache = "u8(64, 8, 4096, 64), u8(64, 8, 4096, 64), bf16(64, 8, 4096, 2), i32(64)"
    yield f"decode_attention(bf16(64, 72, 128), {cache}, out_dtype=f32.dtype)", products | few


def _gelu_cases(arch):
    for block in 32, 128:
        yield f"int8_gelu(i8(8192, 8192), f32(8192, {8192 // block}), {block})", _LOADS | _STORES
    # K-major scales in and out
    yield "int8_gelu(i8(8192, 8192), f32(32, 8192).t(), 256, scale_layout='column')", _LOADS | _STORES
    for activation in "gelu_tanh", "silu":
        yield f"int8_gelu(i8(8192, 8192), f32(8192, 64), activation='{activation}')", _LOADS | _STORES
    yield "int8_gelu(i8(8192, 8191), f32(8192, 64))", {}
    # square blocks: of dx in both orientations, and of out_t
    three = _LOADS | {"st.global.128": 3}
    few = {"spilled": 320}
    for block in 32, 128, 256:
        x = f"i8(8192, 8192), f32({8192 // block}, {8192 // block})"
        yield f"int8_gelu({x}, {block})", _LOADS | _STORES
        yield f"int8_gelu_backward({x}, {x}, {block}, {_STOCHASTIC})", three | (few if block == 128 else {})
    x = "i8(8192, 8192), f32(64, 64)"
    yield f"int8_gelu_backward({x}, {x})", three | few
    for grad, activation in ("bf16", "gelu"), ("f32", "gelu"), ("bf16", "gelu_tanh"), ("bf16", "silu"):
        yield f"int8_gelu_backward({grad}(8192, 8192), None, {x}, activation='{activation}', {_STOCHASTIC})", three
    for block in 128, 256:
        x = f"i8(8191, 8191), f32({8192 // block}, {8192 // block})"
        yield f"int8_gelu({x}, {block})", {}
        yield f"int8_gelu_backward(f32(8191, 8191), None, {x}, {block}, {_STOCHASTIC})", {}


def _dequant_cases(arch):
    # few elements per thread, in words of 8 bytes, or 16 for 32-bit dtypes; the last has offsets beyond int32
    least = {"st.global.64": 1}
    for M, N, inputs in (1, 2560, "bf16"), (64, 3840, "bf16 f32"), (512, 2560, "bf16 f32"), (131072, 16384, "bf16"):
        for g in inputs.split():
            yield f"dequant_bias({g}({M}, {N}), f32({M}, 1), f32(1, {N}), f32({N}))", least if M > 1 else {}
    for g in "bf16", "f16", "f32", "i32":
        yield f"dequant_bias({g}(16384, 13824), f32(16384, 1), f32(1, 13824), f32(13824))", least
    operands = "f32(4096, 1), f32(1, 4096), bf16(4096)"
    for out in "f16", "f32":
        yield f"dequant_bias(i32(4096, 4096), {operands}, {out}.dtype)", least
        yield f"dequant_bias(bf16(4096, 4096), {operands}, {out}.dtype)", least
    yield "dequant_bias(bf16(4096, 4096), 0.5, 0.5)", least
    yield "dequant_bias(bf16(4096, 4096), f32(1), f32(1))", least
    yield "dequant_bias(bf16(4096, 4096), bf16(4096), f16(4096, 1), f16(4096))", least
    yield "dequant_bias(bf16(4096, 4096).t(), f32(4096), f32(4096))", _LOADS | _STORES
    yield "dequant_bias(f32(4096, 8192)[:, ::2], f32(4096), f32(4096))", {}
    yield "dequant_bias(bf16(4095, 4095), f32(4095), f32(4095), f32(4095))", {}
    yield "dequant_bias(bf16(1000000, 3), f32(1000000), f32(3), f32(3))", {}


def _sparsity_cases(arch):
    # L = 8 stores 24 words of a warp's 32 side by side; the others whole units, which are narrower than 16 bytes
    for L, least in (4, _LOADS | {"st.global.64": 1}), (6, {"st.global.64": 1}), (8, _LOADS), (10, _STORES):
        yield f"quant_slide(f16(16384, 18944), {L})", least
        yield f"quant_slide(bf16(16384, 3584), {L}, row_multiple=16)", least
    for columns in 32, 384, 8192, 65536:
        yield f"quant_slide(f16(8192, {columns}))", _LOADS
    yield "quant_slide(f32(16384, 18944))", _LOADS
    for L in 4, 6, 8, 10:
        yield f"quant_slide(f16(8191, 8191), {L})", {}
    yield "quant_slide(f16(8192, 8192).t())", {}
    if arch >= 89:
        yield "quant_slide(f16(16384, 18944), 8, torch.float8_e4m3fn)", _LOADS
        yield "quant_slide(bf16(16384, 3584), 10, torch.float8_e4m3fn)", _STORES


# for each module, the function that yields its cases for a capability
CASES = {
    "int4": _int4_cases,
    "int8": _int8_cases,
    "gemm": _gemm_cases,
    "gemm.sm75": _gemm_sm75_cases,
    "gemm.sm90": _gemm_sm90_cases,
    "gemm.sm90_decode": _gemm_sm90_decode_cases,
    "gemm_int4": _gemm_int4_cases,
    "gemm_int4.sm75": _gemm_int4_sm75_cases,
    "gemm_int4.portable": _gemm_int4_portable_cases,
    "gemm_int4.sm90": _gemm_int4_sm90_cases,
    "gemm_int4.sm90_int8": _gemm_int4_sm90_int8_cases,
    "hadamard": _hadamard_cases,
    "kv_cache": _kv_cache_cases,
    "gelu": _gelu_cases,
    "norm": _norm_cases,
    "linear.dequant": _dequant_cases,
    "linear.sparsity": _sparsity_cases,
}
