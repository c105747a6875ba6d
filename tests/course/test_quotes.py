"""Measurements that the README and the notebooks quote in their prose are those of the records in qk/data.

Each row is a text and what must stand in its groups, or what must hold where it has none. A row whose text is gone must
go too.
"""

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "qk" / "data" / "bench_h200.json").read_text(encoding="utf-8"))
H100 = json.loads((ROOT / "qk" / "data" / "bench_h100.json").read_text(encoding="utf-8"))
CHARACTERS = json.loads((ROOT / "qk" / "data" / "characters_h200.json").read_text(encoding="utf-8"))
AUSTEN = json.loads((ROOT / "qk" / "data" / "austen.json").read_text(encoding="utf-8"))
LARGE = 2**26  # elements


def times(op, field="us", dtype=None, record=RECORD, **options):
    """{shape: {contender: its time}} in a record, the H200's, of the cases with just these options."""
    found = {}
    for result in record["results"]:
        case = record["cases"][result["case"]]
        if case["op"] == op and case["options"] == options and dtype in (None, case["dtype"]) and result.get(field):
            found.setdefault(tuple(case["shape"]), {})[result["contender"]] = result[field]
    return found


def ratios(op, a, b, **options):
    """How many times as long `a` takes as `b`: {shape: ratio}."""
    return {shape: t[a] / t[b] for shape, t in times(op, **options).items() if a in t and b in t}


def extremes(values):
    values = list(values)
    return min(values), max(values)


def training():
    step = times("block step")[8192, 4096]
    return step["bf16"] / step["qk linears"], step["bf16"] / step["qk"]


def two_gpus(op, shape):
    one, two = times(op)[shape], times(op, gpus=2)[shape]
    return {name: one[name] / two[name] for name in ("bf16", "qk int8", "qk int4")}


def overtaken(op="int4_gemm"):
    """For each weight, the fewest recorded tokens at which bfloat16 is faster.

    Weights recorded only for many tokens are left out.
    """
    found = ratios(op, "qk", "bf16", group_size=128)
    slower = [shape for shape, ratio in found.items() if ratio > 1 and (1, *shape[1:]) in found]
    return [min(m for m, *weight in slower if weight == list(each)) for each in {shape[1:] for shape in slower}]


def crossing(name, *weight):
    """Two recorded numbers of tokens: the last before `name` is first faster than int4, and that one."""
    found = {shape[0]: r for shape, r in ratios("int4_gemm", "qk", name, group_size=128).items() if shape[1:] == weight}
    after = min(tokens for tokens, ratio in found.items() if ratio > 1)
    return max(tokens for tokens in found if tokens < after), after


def matmuls_ms(op, kernel):
    """How long a kernel takes altogether when int4 generates one token after 512 others."""
    found = [each for each in RECORD["results"] if each["contender"] == "qk int4" and "kernels" in each]
    cases = [(each, RECORD["cases"][each["case"]]) for each in found]
    result = next(e for e, case in cases if (case["op"], case["shape"], case["options"]) == (op, [1, 512], {}))
    return dict(result["kernels"])[kernel] / 1000


def losses(kind):
    runs = [run["validation"][-1] for run in CHARACTERS["runs"] if run["kind"] == kind and run["rate"] == 0.001]
    return sum(runs) / len(runs)


def dearer(*formats):
    """How much each format raises the language model's perplexity, in percent."""
    found = AUSTEN["formats"]
    return [100 * (found[name]["perplexity"] / found["float16"]["perplexity"] - 1) for name in formats]


def behind(last):
    """By how many nats training the language model in int8 is behind bfloat16, at each of the last validations."""
    runs = [AUSTEN["training"][kind]["validation"] for kind in ("int8", "bf16")]
    return [int8 - bf16 for int8, bf16 in zip(*runs, strict=True)][-last:]


def fusing():
    """What share of the FFN's time around each matmul all fusing saves, in percent: least and most."""
    found = [times("ffn", activation=name)[8192, 4096, 16384] for name in ("gelu", "gelu_tanh")]
    return extremes(100 * (1 - each["qk"] / each["around"]) for each in found)


def dequant(tokens, field="us", N=2560):
    """The times of dequantizing bfloat16 sums."""
    return times("dequant_bias", field, dtype="bfloat16")[tokens, N]


def tiles():
    """{rows x columns of a program: its time in µs}, on an H100, for 65536 x 2560."""
    return times("versions of dequant_bias", record=H100)[65536, 2560]


def back_to_back(tokens):
    """How many times as long an eager call takes as qk's, if each takes the longer of GPU time and CPU time."""
    eager, ours = (max(dequant(tokens, field)[name] for field in ("us", "wall_us")) for name in ("eager", "qk"))
    return eager / ours


LAYER = 8192, 16384, 4096  # the FFN's first GEMM
CODES = 1 + 4 / 128  # bytes of a code and its share of a scale


def moving(size):
    """The time of moving `size` bytes for each output of a large layer, at the speed of a copy, in µs."""
    copy = max(result["gb_per_s"] for result in RECORD["results"] if result["contender"] == "copy")
    return LAYER[0] * LAYER[1] * size / copy / 1e3


def epilogues(activation="gelu"):
    """What the steps after the first GEMM add to its time, in percent.

    Returns what a separate GELU adds, by its bytes and measured, and what all fused and around each matmul in bfloat16
    add.
    """
    took = times("int8_addmm_quant", activation=activation)[LAYER]
    added = {name: 100 * (us / took["int8_gemm"] - 1) for name, us in took.items()}
    # a 16-bit output's two bytes are part of int8_gemm
    by_bytes = 100 * moving(3 * CODES - 2) / took["int8_gemm"]
    return [by_bytes, added["qk separate"], added["qk"], added["unfused bf16"]]


def output_bytes():
    """The times of moving its output with nothing fused, around each matmul, and all fused, and of its GEMM."""
    took = times("int8_addmm_quant", activation="gelu")[LAYER]
    return [*map(moving, (12 + CODES, 8 + CODES, CODES)), took["int8_gemm"]]


def predicted():
    """What share of the FFN's time around each matmul all fusing saves by its bytes, in percent."""
    _, before, after, _ = output_bytes()
    return [100 * (before - after) / times("ffn", activation="gelu")[8192, 4096, 16384]["around"]]


def peaks():
    """How much less memory a separate GELU and all fused need than torch.compile, in percent."""
    peak = times("ffn", "peak_bytes", activation="gelu")[8192, 4096, 16384]
    return [100 * (1 - peak[name] / peak["compile"]) for name in ("qk separate", "qk")]


def rotations(a, b, but=()):
    """How many times as long `a` takes as `b` to rotate 8192 bfloat16 tokens: least and most, without some widths."""
    found = times("hadamard", dtype="bfloat16")
    return extremes(t[a] / t[b] for (tokens, width), t in found.items() if tokens == 8192 and width not in but)


def split_sum_us():
    """How long torch takes to add up the parts of split K: `split 1` is `magic` and this sum, on an H100."""
    found = times("versions of int4_gemm", record=H100, group_size=128)[1, 8192, 8192]
    return found["split 1"] - found["magic"]


def climbed(a, b, tokens=256):
    """How many times as long step `a` of int4 x int8 takes as `b`, on an H100."""
    return [ratios("versions of int4_gemm int8", a, b, record=H100, group_size=128)[tokens, 8192, 8192]]


def int4(contender):
    """How many times as long as `qk` it takes to quantize a large float16 matrix, one scale per row: least and most."""
    found = ratios("quantize_int4", contender, "qk", dtype="float16", group_size=None, packing="uint8")
    return extremes(ratio for (rows, columns), ratio in found.items() if rows * columns >= 2**24)


def int4_caches():
    """The speedup of `decode_attention` with an int4 cache over torch's faster kernel, on an H100: {shape: ratio}."""
    found = times("decode_attention", record=H100)
    return {shape: min(t["cudnn"], t["flash"]) / t["qk"] for shape, t in found.items()}


def caches_of_16_bits():
    """How much less and how much more time than cuDNN's `decode_attention` takes with a 16-bit cache, in percent."""
    least, most = extremes(t["qk 16 bits"] / t["cudnn"] for t in times("decode_attention", record=H100).values())
    return 100 - 100 * least, 100 * most - 100


def fp8():
    return ratios("int8_gemm", "cublas fp8", "qk")


def sparse(baseline, L):
    """How many times as long a baseline takes as the sparse chain, over all layers: least and most."""
    return extremes(ratios("sparse_linear", baseline, "qk", L=L).values())


def wins():
    """How much faster the 2:4 chain is than int8_addmm, in percent: least and most."""
    return [100 * (ratio - 1) for ratio in sparse("int8_addmm", 4)]


def again():
    """By how much two recordings of int8_addmm at the same shape differ at most, in percent."""
    eight, four = (times("sparse_linear", L=L) for L in (8, 4))
    ratio = [eight[shape]["int8_addmm"] / four[shape]["int8_addmm"] for shape in eight]
    return [100 * (max(max(each, 1 / each) for each in ratio) - 1)]


def per_column(L):
    """The sparse GEMM's speedup over the one in int8_addmm, with equal columns: {shape: speedup}.

    A GEMM's time is the chain's, less that of moving x, the codes, the bfloat16 sums and the output at a copy's speed.
    """
    copy = max(result["gb_per_s"] for result in RECORD["results"] if result["contender"] == "copy")
    wide = (2 * L - 4) / L
    return {
        (M, N, K): (t["int8_addmm"] - M * 3 * K / copy / 1e3)
        / ((t["qk"] - M * ((2 + wide) * K + 4 * N) / copy / 1e3) / wide)
        for (M, N, K), t in times("sparse_linear", L=L).items()
    }


NUMBERS = [
    ("README", r"is about ([\d.]+) times as fast as in bfloat16 \(([\d.]+) times", training),
    (
        "README",
        r"For a prompt of 2048 tokens, two H200s are ([\d.]+) to ([\d.]+) times as fast as one",
        lambda: extremes(two_gpus("prefill", (1, 2048)).values()),
    ),
    ("README", r"bfloat16 overtakes it at (\d+) to (\d+) tokens", lambda: extremes(overtaken())),
    (
        "01_int4_packing",
        r"version 2 is ([\d.]+) times as fast as version 1",
        lambda: ratios("versions of quantize_int4", "naive", "joined").values(),
    ),
    (
        "01_int4_packing",
        r"makes version 4 take (\d+)% longer",
        lambda: [100 * ratio - 100 for ratio in ratios("versions of quantize_int4", "careful", "tile").values()],
    ),
    ("01_int4_packing", r"`torch.compile` takes ([\d.]+) to ([\d.]+) times as long as `qk`", lambda: int4("compile")),
    ("01_int4_packing", r"Eager torch takes about (\d+) to (\d+) times as long", lambda: int4("eager")),
    (
        "03_scaled_int8_gemm",
        r"([\d.]+)x bf16's speed",
        lambda: [1 / ratios("ladder", "4 warps", "bf16")[8192, 8192, 8192]],
    ),
    (
        "03_scaled_int8_gemm",
        r"bf16 takes ([\d.]+) to ([\d.]+) times as long as `qk`",
        lambda: extremes(ratios("int8_gemm", "bf16", "qk")[m, 8192, 8192] for m in (1, 16)),
    ),
    (
        "03_scaled_int8_gemm",
        r"`qk` takes only (\d+) to (\d+)% longer than a copy that moves as many bytes",
        lambda: extremes(100 * ratios("int8_gemm", "qk", "copy")[m, 8192, 8192] - 100 for m in (1, 16)),
    ),
    (
        "03_scaled_int8_gemm",
        r"is ([\d.]+) to ([\d.]+) times as fast as `qk`",
        lambda: extremes(t for (m, *_), t in ratios("int8_gemm", "qk", "qk per-token").items() if m > 16),
    ),
    (
        "03_scaled_int8_gemm",
        r"At (\d+) tokens, FP8 is ([\d.]+)x as fast",
        lambda: [128, 1 / fp8()[128, 14336, 4096]],
    ),
    (
        "03_scaled_int8_gemm",
        r"each call spends (\d+) to (\d+) µs on the CPU",
        lambda: extremes(times("chain", "wall_us")[1, 8192, 8192][name] for name in ("compile", "qk compile")),
    ),
    (
        "04_fused_epilogues",
        r"They do: (\d+)% of the GEMM's time with \*nothing fused\*, and (\d+)% with \*all fused\*",
        lambda: [100 * output_bytes()[i] / output_bytes()[-1] for i in (0, 2)],
    ),
    (
        "04_fused_epilogues",
        r"that's about `(\d+) / share`: at K = 4096",
        lambda: [4096 * (output_bytes()[0] - output_bytes()[2]) / output_bytes()[-1]],
    ),
    (
        "04_fused_epilogues",
        r"output takes (\d+) µs of that, but only (\d+) µs with \*all fused\*",
        lambda: output_bytes()[1:3],
    ),
    ("04_fused_epilogues", r"The bytes predict (\d+)%", predicted),
    ("04_fused_epilogues", r"\*GELU separate\* saves (\d+)% and \*all fused\* (\d+)%", peaks),
    (
        "04_fused_epilogues",
        r"Depending on the activation, \*all fused\* saves (\d+) to (\d+)%",
        fusing,
    ),
    (
        "04_fused_epilogues",
        r"\*bias fused\* runs the larger FFN in (\d+) µs",
        lambda: [times("ffn", activation="gelu")[8192, 4096, 16384]["around"]],
    ),
    (
        "04_fused_epilogues",
        r"bytes take (\d+) µs\. The plain GEMM's time includes (\d+) µs for its own write",
        lambda: [moving(3 * CODES), moving(2)],
    ),
    (
        "04_fused_epilogues",
        r"should add (\d+)%\. .* adds (\d+)%\. Even \*all .* takes (\d+)% longer.* adds (\d+)% with torch",
        epilogues,
    ),
    (
        "04_fused_epilogues",
        r"but only (\d+)% with `gelu_tanh`, which moves",
        lambda: [epilogues("gelu_tanh")[-1]],
    ),
    (
        "05_dequant_bias_memory",
        r"starts about ([\d.]+) per nanosecond, whether they handle 128 columns or 256",
        lambda: [sum(65536 * 2560 / n / tiles()[f"1 x {n}"] for n in (128, 256)) / 2e3],
    ),
    (
        "05_dequant_bias_memory",
        r"with 256 columns, so holding four rows saves (\d+)%",
        lambda: [100 * (1 - tiles()["4 x 256"] / tiles()["1 x 256"])],
    ),
    (
        "05_dequant_bias_memory",
        r"eager's five launches take (\d+) times as long as .* With 65,536 tokens, the speedup is ([\d.]+)x",
        lambda: [dequant(tokens)["eager"] / dequant(tokens)["qk"] for tokens in (1, 65536)],
    ),
    ("05_dequant_bias_memory", r"`qk` is only about (\d)x as fast as eager", lambda: [back_to_back(1)]),
    (
        "05_dequant_bias_memory",
        r"CPU time falls from (\d+) µs to about (\d+) \(`qk`'s call really takes (\d+)\); a graph would leave (\d+) µs",
        lambda: [
            *(dequant(1, "wall_us")["eager"] / n for n in (1, 5)),
            dequant(1, "wall_us")["qk"],
            dequant(1)["eager"],
        ],
    ),
    (
        "05_dequant_bias_memory",
        r"with one token, its call takes (\d+) µs on the CPU, and eager's (\d+) µs",
        lambda: [dequant(1, "wall_us")[name] for name in ("compile", "eager")],
    ),
    (
        "05_dequant_bias_memory",
        r"eager's five launches take (\d) times as long",
        lambda: [dequant(1)["eager"] / dequant(1)["qk"]],
    ),
    ("06_sparse_chain", r"differ by up to (\d+)%, so call", again),
    ("06_sparse_chain", r"At 2:4, the sparse chain wins by (\d+) to (\d+)%", wins),
    ("06_sparse_chain", r"2:4 is (\d+) to (\d+)% faster than our best dense layer", wins),
    ("06_sparse_chain", r"Our ([\d.]+)x to ([\d.]+)x over the dense chain", lambda: sparse("dense chain", 8)),
    (
        "06_sparse_chain",
        r"is ([\d.]+) to ([\d.]+) times as fast as the one in `int8_addmm`",
        lambda: extremes(speedup for L in (8, 4) for speedup in per_column(L).values()),
    ),
    ("06_sparse_chain", r"the recorded ([\d.]+) brings a tie", lambda: [per_column(8)[16384, 3584, 18944]]),
    (
        "07_int4_gemm",
        r"int4 is ([\d.]+)x as fast as bf16, though its bytes",
        lambda: [ratios("decode", "bf16", "qk int4")[1, 512]],
    ),
    (
        "07_int4_gemm",
        r"With int4, a token takes ([\d.]+) ms. Its int4 matmuls take ([\d.]+) ms",
        lambda: [times("decode")[1, 512]["qk int4"] / 1000, matmuls_ms("decode", "_int4_gemm_sm90_kernel")],
    ),
    (
        "07_int4_gemm",
        r"int8 overtakes int4 between (\d+) and (\d+) tokens",
        lambda: crossing("qk int8", 8192, 8192),
    ),
    (
        "07_int4_gemm",
        r"bf16 overtakes int4 between (\d+) and (\d+). For 4096 x 4096, bf16 beats int4 from (\d+) tokens on",
        lambda: [*crossing("bf16", 8192, 8192), crossing("bf16", 4096, 4096)[1]],
    ),
    (
        "07_int4_gemm",
        r"its speedup over bf16 is ([\d.]+)x",
        lambda: [ratios("int4_gemm", "bf16", "qk", group_size=128)[1, 8192, 8192]],
    ),
    (
        "07_int4_gemm",
        r"explain `naive`'s (\d+) µs",
        lambda: [times("versions of int4_gemm", group_size=128)[1, 8192, 8192]["naive"]],
    ),
    (
        "07_int4_gemm",
        r"`split 4` is ([\d.]+)x as fast as bf16. The package's Hopper kernel, `qk`, reaches ([\d.]+)x",
        lambda: [
            ratios("versions of int4_gemm", "bf16", name, record=H100, group_size=128)[1, 8192, 8192]
            for name in ("split 4", "qk")
        ],
    ),
    (
        "07_int4_gemm",
        r"torch's sum over the parts takes about (\d+) µs",
        lambda: [split_sum_us()],
    ),
    (
        "07_int8_activations",
        r"`sixteenfold` is only ([\d.]+)x as fast as `shifted`",
        lambda: climbed("shifted", "sixteenfold"),
    ),
    (
        "07_int8_activations",
        r"`staged` takes ([\d.]+)x as long as `sixteenfold`",
        lambda: climbed("staged", "sixteenfold"),
    ),
    (
        "07_int8_activations",
        r"`qk` is ([\d.]+)x as fast as `tiled`",
        lambda: climbed("tiled", "qk"),
    ),
    (
        "07_int8_activations",
        r"with 1024, it's (\d+)% faster",
        lambda: [100 * climbed("qk", "qk int8", 1024)[0] - 100],
    ),
    (
        "08_your_model",
        r"\*One sequence:\* it decodes ([\d.]+)x as fast",
        lambda: [ratios("decode", "bf16", "qk int4")[1, 512]],
    ),
    (
        "08_your_model",
        r"so smaller weights gain only (\d+) to (\d+)%",
        lambda: extremes(
            100 * (ratios("decode", "bf16", name)[64, 8192] - 1)
            for name in ("qk int8", "qk int4", "qk int4 int8 activations")
        ),
    ),
    (
        "08_your_model",
        r"Decoding is (\d+)% faster in bf16 and (\d+)% faster in int8. In int4, it's (\d+)% slower",
        lambda: [100 * abs(gain - 1) for gain in two_gpus("decode", (1, 512)).values()],
    ),
    (
        "09_outliers",
        r"rotating 8192 tokens takes ([\d.]+) to ([\d.]+) times as long as a copy",
        lambda: rotations("qk", "copy"),
    ),
    (
        "09_outliers",
        r"a matmul with H takes ([\d.]+) to ([\d.]+) times as long as the kernel",
        lambda: rotations("matmul", "qk", but=(11008,)),
    ),
    (
        "11_language_model",
        r"larger groups: from ([\d.]+)% with groups of 32 to ([\d.]+)% with one scale",
        lambda: dearer(*(f"int4, {groups}, rounded" for groups in ("groups of 32", "per row"))),
    ),
    (
        "11_language_model",
        r"int4 in groups of 128 raises it by ([\d.]+)%, or ([\d.]+)% once calibrated",
        lambda: dearer("int4, groups of 128, rounded", "int4, groups of 128, calibrated"),
    ),
    ("11_language_model", r"perplexity rises by (\d+)%", lambda: dearer("int2, groups of 128, rounded (simulated)")),
    ("11_language_model", r"is ([\d.]+) to ([\d.]+) nats higher", lambda: extremes(behind(11))),
    (
        "12_kv_cache",
        r"single sequence of 1,024 tokens, int4 is only ([\d.]+)x as fast as the baseline",
        lambda: [int4_caches()[1, 1024]],
    ),
    (
        "12_kv_cache",
        r"From 32,768 tokens on, int4 is at least ([\d.]+)x as fast",
        lambda: [min(ratio for shape, ratio in int4_caches().items() if math.prod(shape) >= 32768)],
    ),
    (
        "12_kv_cache",
        r"largest cache gains the most: ([\d.]+)x of a possible ([\d.]+)x",
        lambda: [int4_caches()[32, 8192], 2 * 128 / (128 / 2 + 2)],
    ),
    ("12_kv_cache", r"takes between (\d+)% less and (\d+)% more time than cuDNN", caches_of_16_bits),
    ("13_checkpoints", r"at ([\d.]+) to ([\d.]+) times the speed of cuBLAS FP8", lambda: extremes(fp8().values())),
]
CLAIMS = [
    (
        "cuBLAS's block-scaled FP8 is about as fast as `int8_gemm` on large matrices, and faster at 128 tokens",
        lambda: (
            all(0.9 < ratio < 1.1 for (m, *_), ratio in fp8().items() if m >= 4096)
            and all(ratio < 0.9 for (m, *_), ratio in fp8().items() if m == 128)
        ),
    ),
    (
        "Small layers (1536 x 384) don't gain from int8 at any number of tokens",
        lambda: all(
            ratio > 1
            for (_, *weight), ratio in ratios("int4_gemm", "qk int8", "bf16", group_size=128).items()
            if weight == [1536, 384]
        ),
    ),
    (
        "A call of `int8_gemm` takes more CPU time than a bfloat16 matmul in cuBLAS",
        lambda: min(ratios("int8_gemm", "qk", "bf16", field="wall_us").values()) > 1,
    ),
    (
        "On large tensors, `torch.compile` is as fast as `act_quant` and `dequant_bias`",
        lambda: all(
            0.95 < ratio < 1.1
            for op in ("act_quant", "dequant_bias")
            for dtype in ("float16", "bfloat16", "float32", "int32")
            for (rows, columns), ratio in ratios(op, "compile", "qk", dtype=dtype).items()
            if rows * columns >= LARGE
        ),
    ),
    (
        "is faster than the same steps around cuBLASLt's dense int8 GEMM, but not faster than our own fused int8 GEMM",
        lambda: (
            max(ratios("sparse_linear", "qk", "dense chain", L=8).values()) < 1
            and min(ratios("sparse_linear", "qk", "int8_addmm", L=8).values()) > 0.99
        ),
    ),
    (
        "For a single sequence of 1,024 tokens, it is only about 1.2 times as fast as cuDNN with a 16-bit cache",
        lambda: all(
            1.15 < each["cudnn"] / each[kind] < 1.3 if shape == (1, 1024) else each["cudnn"] > 1.3 * each[kind]
            for shape, each in times("decode_attention", record=H100).items()
            for kind in ("qk", "qk int8")
        ),
    ),
    (
        'For long prompts, int4 needs `activations="int8"` to be faster than bfloat16',
        lambda: (
            ratios("prefill", "bf16", "qk int4")[1, 2048]
            < 1
            < ratios("prefill", "bf16", "qk int4 int8 activations")[1, 2048]
        ),
    ),
    (
        "For a single token, its speedup is far from fourfold",
        lambda: (
            1
            < ratios("decode", "bf16", "qk int4")[1, 512]
            < ratios("decode", "bf16", "qk int4 int8 activations fused")[1, 512]
            < 2.5
        ),
    ),
    (
        "For a single token, a second GPU gains next to nothing",
        lambda: all(abs(gain - 1) < 0.1 for name, gain in two_gpus("decode", (1, 512)).items() if name != "bf16"),
    ),
    (
        "a small model's mean held-out loss ends within one percent of bfloat16's",
        lambda: abs(losses("int8") / losses("bf16") - 1) < 0.01,
    ),
]


def prose(name):
    """The text of the README, or of a notebook's Markdown cells, on one line."""
    if name == "README":
        text = (ROOT / "README.md").read_text(encoding="utf-8")
    else:
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return " ".join(text.split())


def wrong(quoted, measured):
    """Pairs of a number as text and what it should be: the measured value, rounded in the same way."""
    rounded = [f"{value:.{len(text.partition('.')[2])}f}" for text, value in zip(quoted, measured, strict=True)]
    return [pair for pair in zip(quoted, rounded, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize(("name", "pattern", "measured"), NUMBERS, ids=lambda it: it if isinstance(it, str) else "")
def test_a_quoted_number_is_that_of_the_record(name, pattern, measured):
    found = list(re.finditer(pattern, prose(name)))
    assert found, f"{name} no longer says so: change this row, or take it away"
    assert [wrong(each.groups(), measured()) for each in found] == [[]] * len(found)


@pytest.mark.parametrize(("claim", "holds"), CLAIMS, ids=lambda it: it if isinstance(it, str) else "")
def test_a_claim_of_the_readme_holds_in_the_record(claim, holds):
    assert claim in prose("README"), "the README no longer says so: change this row, or take it away"
    assert holds()


def test_a_wrong_number_is_found():
    assert wrong(["1.35", "1.4"], [1.347, 1.418]) == []
    assert wrong(["1.35", "14", "0.7"], [1.356, 14.75, 0.649]) == [("1.35", "1.36"), ("14", "15"), ("0.7", "0.6")]
