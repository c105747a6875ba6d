import qk

ANSWERS = {
    "decode": [
        (
            "the two nibbles are swapped",
            "def decode(packed):\n    n = torch.stack([packed >> 4, packed & 15], dim=1).to(torch.int8)\n"
            "    return (n ^ 8) - 8",
        ),
        (
            "mean negative codes",
            "def decode(packed):\n    return torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)",
        ),
        (
            "the even column comes first",
            "def decode(packed):\n    return torch.stack([packed >> 4, packed & 15], dim=1).to(torch.int8)",
        ),
        (
            "there is no offset of 8",
            "def decode(packed):\n    return torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8) - 8",
        ),
        (
            "subtract 16, not 15",
            "def decode(packed):\n    n = torch.stack([packed % 16, packed // 16], dim=1).to(torch.int8)\n"
            "    return torch.where(n > 7, n - 15, n)",
        ),
        (
            "this isn't sign and magnitude",
            "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)\n"
            "    return torch.where(n >= 8, -(n & 7), n)",
        ),
        (
            "8 means a negative code too",
            "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)\n"
            "    return torch.where(n > 8, n - 16, n)",
        ),
        (
            "without bytes",
            "def decode(packed):\n    codes = [[(n ^ 8) - 8 for n in (b & 15, b >> 4)] for b in packed.tolist()]\n"
            "    return torch.tensor(codes, dtype=torch.int8)",
        ),
        (
            "",  # the dtype is wrong
            "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).int()\n    return (n ^ 8) - 8",
        ),
        (
            "",  # the shape is wrong
            "def decode(packed):\n    n = torch.cat([packed & 15, packed >> 4]).to(torch.int8)\n    return (n ^ 8) - 8",
        ),
    ],
}
RANGE = """@triton.jit
def range_kernel(x_ptr, packed_ptr, low_ptr, step_ptr, C, BLOCK: tl.constexpr):
    ROUNDER: tl.constexpr = 12582912.0
    row, offs, half = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BLOCK // 2)
    mask = offs < C
    x = tl.load(x_ptr + row * C + offs, mask=mask, other=0.0)
    low = tl.min(tl.where(mask, x, float("inf")), 0)
    high = tl.max(tl.where(mask, x, float("-inf")), 0)
    step = tl.div_rn(high - low, 15.0)
    codes = tl.where(mask, (tl.div_rn(x - low, step) + ROUNDER) - ROUNDER, 0.0).to(tl.int32)
    pairs = tl.reshape(codes, (BLOCK // 2, 2))
    bytes = tl.sum(pairs << (4 * tl.arange(0, 2))[None, :], 1).to(tl.uint8)
    width = (C + 1) // 2
    tl.store(packed_ptr + row * width + half, bytes, mask=half < width)
    tl.store(low_ptr + row, low)
    tl.store(step_ptr + row, step)
"""
LOW, HIGH = 'tl.where(mask, x, float("inf"))', 'tl.where(mask, x, float("-inf"))'
CODES = "tl.where(mask, (tl.div_rn(x - low, step) + ROUNDER) - ROUNDER, 0.0)"


def ranged(*changes):
    """RANGE with these changes: pairs of old and new text."""
    code = RANGE
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


ANSWERS["quantize_range"] = [
    ("what do masked-off columns hold?", ranged(LOW, "x", HIGH, "x")),
    ("a masked-off 0 became the smallest", ranged(LOW, "x")),
    ("a masked-off 0 became the largest", ranged(HIGH, "x")),
    ("smallest weight", ranged(LOW, "tl.where(mask, tl.minimum(x, 0.0), 0.0)")),
    ("15 steps", ranged("15.0)", "16.0)")),
    ("to the even code", ranged("(tl.div_rn(x - low, step) + ROUNDER) - ROUNDER", "tl.floor((x - low) / step + 0.5)")),
    ("", ranged(LOW, "tl.where(mask, x, 1e9)", HIGH, "tl.where(mask, x, -1e9)")),
    ("not at 7", ranged("15.0)", "7.0)")),
    ("a cast drops the fraction", ranged("(tl.div_rn(x - low, step) + ROUNDER) - ROUNDER", "tl.div_rn(x - low, step)")),
    ("subtract low first", ranged("tl.div_rn(x - low, step)", "tl.div_rn(x, step)")),
    ("swapped", ranged("(4 * tl.arange(0, 2))", "(4 - 4 * tl.arange(0, 2))")),
    ("the low nibble", ranged("(4 * tl.arange(0, 2))", "(0 * tl.arange(0, 2))")),
    (
        "the scale for absmax",
        ranged(f"tl.min({LOW}, 0)", "-tl.max(tl.abs(x), 0)", f"tl.max({HIGH}, 0)", "tl.max(tl.abs(x), 0)"),
    ),
    ("high in place of step", ranged("step_ptr + row, step", "step_ptr + row, high")),
    ("over 15", ranged("step_ptr + row, step", "step_ptr + row, high - low")),
    ("high in place of low", ranged("low_ptr + row, low", "low_ptr + row, high")),
    ("last high nibble", ranged(CODES, "tl.where(mask, (tl.div_rn(x - low, step) + ROUNDER) - ROUNDER, 15.0)")),
    ("load's mask", ranged("offs, mask=mask, other=0.0", "offs")),
    ("past the end of packed_ptr", ranged("bytes, mask=half < width", "bytes")),
    ("a byte more than C // 2", ranged("(C + 1) // 2", "C // 2")),
    ("", ranged("row * width", "row * BLOCK // 2")),
    ("", ranged(CODES, "(tl.div_rn(x - low, step) + ROUNDER) - ROUNDER")),
    ("load's mask", ranged("row * C + offs", "row * BLOCK + offs")),
    (
        "course.launch",
        "def quantize_range(x):\n    low, high = x.amin(1), x.amax(1)\n    step = (high - low) / 15\n"
        "    codes = ((x - low[:, None]) / step[:, None]).round().to(torch.uint8)\n"
        "    codes = torch.nn.functional.pad(codes, (0, x.shape[1] % 2))\n"
        "    return codes[:, ::2] | codes[:, 1::2] << 4, low, step",
    ),
]

RESTORE = """@triton.jit
def restore_kernel(packed_ptr, absmax_ptr, out_ptr, n, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed_ptr + offs // 2, mask=offs < n, other=0).to(tl.int32)
    nibble = (byte >> (offs % 2 * 4)) & 15
    code = (nibble ^ 8) - 8
    absmax = tl.load(absmax_ptr + offs // GROUP, mask=offs < n, other=0.0)
    tl.store(out_ptr + offs, code * absmax / 7, mask=offs < n)
"""
BY_BYTES = """@triton.jit
def restore_kernel(packed_ptr, absmax_ptr, out_ptr, n, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    half = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    byte = tl.load(packed_ptr + half, mask=2 * half < n, other=0).to(tl.int32)
    for i in tl.static_range(2):
        code = (((byte >> (4 * i)) & 15) ^ 8) - 8
        absmax = tl.load(absmax_ptr + (2 * half + i) // GROUP, mask=2 * half < n, other=0.0)
        tl.store(out_ptr + 2 * half + i, code * absmax / 7, mask=2 * half < n)
"""


def changed(*changes):
    """RESTORE with these changes: pairs of old and new text."""
    code = RESTORE
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


ANSWERS["restore"] = [
    ("past the end of out_ptr", changed("/ 7, mask=offs < n", "/ 7")),
    ("missing or too wide?", changed("offs // 2, mask=offs < n, other=0", "offs // 2")),
    ("missing or too wide?", changed("offs // GROUP, mask=offs < n, other=0.0", "offs // GROUP")),
    ("past the end of packed_ptr", changed("offs // 2", "offs")),
    ("swapped", changed("offs % 2", "(1 - offs % 2)")),
    ("mean negative codes", changed("(nibble ^ 8) - 8", "nibble")),
    ("no offset of 8", changed("(nibble ^ 8) - 8", "nibble - 8")),
    ("divide by 7", changed(" / 7", "")),
    ("codes end at 7", changed("/ 7", "/ 8")),
    ("these are codes", changed("code * absmax / 7", "code.to(tl.float32)")),
    ("first group's absmax", changed("absmax_ptr + offs // GROUP", "absmax_ptr + offs * 0")),
    ("GROUP weights long", changed("offs // GROUP", "offs // 2 // GROUP")),
    ("second weight of a byte", changed("offs // GROUP", "offs // 2 * 2 // GROUP")),
    ("the last group may be short", changed("GROUP, mask=offs < n", "GROUP, mask=offs // GROUP < n // GROUP")),
    ("a single store", BY_BYTES),
    ("where does yours begin?", changed("tl.program_id(0) * BLOCK + ", "")),
    ("in turn", changed("(byte >> (offs % 2 * 4))", "byte")),
    ("", changed("offs % 2 * 4", "offs % 2 * 3")),
    ("", changed("code * absmax / 7", "code + absmax / 7")),
    ("course.launch", "def restore(packed, absmax, GROUP, BLOCK):\n    return decode(packed).flatten() * absmax[0]"),
]

# kinds that were once called right, or whose words were wrong
ANSWERS["quantize_range"] += [
    ("don't subtract 8", ranged("0.0).to(tl.int32)", "8.0).to(tl.int32) - 8 & 15")),
    ("no code needs clamping", ranged("15.0)", "16.0)", CODES, f"tl.minimum({CODES}, 15.0)")),
]
if qk.device() == "cpu":  # a GPU may round these ties as this does
    ANSWERS["quantize_range"] += [
        ("divide by step", ranged("tl.div_rn(x - low, step)", "(x - low) * (15 / (high - low))")),
    ]
ANSWERS["restore"] += [
    ("bad input must stay visible", changed("code * absmax / 7", "tl.where(absmax == absmax, code * absmax / 7, 0)")),
]
ANSWERS["decode"] += [
    ("exit()", "def decode(packed):\n    exit()"),
    (
        "",
        "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)\n"
        "    return ((n ^ 8) - 8).to_sparse()",
    ),
    ("`return`", "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)"),
]
OTHERS = {
    "quantize_range": [
        ranged(
            "tl.div_rn(high - low, 15.0)",
            "(high - low) / 15",
            "tl.div_rn(x - low, step)",
            "(x - low) / step",
        ),
        ranged(
            LOW,
            'tl.load(x_ptr + row * C + offs, mask=mask, other=float("inf"))',
            "tl.sum(pairs << (4 * tl.arange(0, 2))[None, :], 1)",
            "(tl.sum(pairs * (1 + 15 * tl.arange(0, 2))[None, :], 1))",
        ),
    ],
    "restore": [
        changed("offs // 2", "(offs >> 1)", "offs % 2 * 4", "(offs & 1) << 2"),
    ],
}
