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
            "",  # the dtype is wrong
            "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).int()\n    return (n ^ 8) - 8",
        ),
        (
            "",  # the shape is wrong
            "def decode(packed):\n    n = torch.cat([packed & 15, packed >> 4]).to(torch.int8)\n    return (n ^ 8) - 8",
        ),
    ],
}
LOAD = """@triton.jit
def unpack_kernel(packed_ptr, codes_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed_ptr + offs, mask=offs < n, other=0).to(tl.int32)
    low = ((byte & 15) ^ 8) - 8
    high = ((byte >> 4) ^ 8) - 8
"""
EVEN = "    tl.store(codes_ptr + 2 * offs, low.to(tl.int8), mask=offs < n)\n"
ODD = "    tl.store(codes_ptr + 2 * offs + 1, high.to(tl.int8), mask=offs < n)\n"
RIGHT = LOAD + EVEN + ODD
ANSWERS["unpack"] = [
    ("past the end of codes_ptr", RIGHT.replace(", mask=offs < n, other=0", "").replace(", mask=offs < n", "")),
    ("past the end of codes_ptr", LOAD + EVEN + ODD.replace(", mask=offs < n", "")),
    ("past the end of codes_ptr", RIGHT.replace("mask=offs < n)", "mask=offs < 2 * n)")),
    ("the two nibbles are swapped", LOAD + EVEN.replace("low", "high") + ODD.replace("high", "low")),
    (
        "mean negative codes",
        RIGHT.replace("((byte & 15) ^ 8) - 8", "byte & 15").replace("((byte >> 4) ^ 8) - 8", "byte >> 4"),
    ),
    ("there is no offset of 8", RIGHT.replace(" ^ 8", "")),
    ("where does yours begin?", RIGHT.replace("tl.program_id(0) * BLOCK + ", "")),
    ("the odd columns are missing", LOAD + EVEN),
    ("the even columns are missing", LOAD + ODD),
    ("side by side, not n apart", LOAD + EVEN.replace("2 * offs", "offs") + ODD.replace("2 * offs + 1", "n + offs")),
    ("the mask counts bytes", RIGHT.replace("mask=offs < n)", "mask=2 * offs < n)")),
    ("", LOAD + EVEN.replace("2 * offs", "offs") + ODD.replace("2 * offs", "offs")),
    ("", RIGHT.replace("byte >> 4", "byte >> 3")),
    ("", RIGHT.replace("* BLOCK", "* (BLOCK - 1)").replace("byte & 15", "byte & 7")),
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
    ("where does yours begin?", changed("tl.program_id(0) * BLOCK + ", "")),
    ("in turn", changed("(byte >> (offs % 2 * 4))", "byte")),
    ("", changed("offs % 2 * 4", "offs % 2 * 3")),
    ("", changed("code * absmax / 7", "code + absmax / 7")),
    ("course.launch", "def restore(packed, absmax, GROUP, BLOCK):\n    return decode(packed).flatten() * absmax[0]"),
]

# kinds that were once called right, or whose words were wrong
ANSWERS["decode"] += [
    ("exit()", "def decode(packed):\n    exit()"),
    (
        "",
        "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)\n"
        "    return ((n ^ 8) - 8).to_sparse()",
    ),
    ("`return`", "def decode(packed):\n    n = torch.stack([packed & 15, packed >> 4], dim=1).to(torch.int8)"),
]
ANSWERS["unpack"] += [
    (
        "a race",
        LOAD + "    tl.store(codes_ptr + 2 * (offs + BLOCK), low.to(tl.int8), mask=offs + BLOCK < n)\n" + EVEN + ODD,
    ),
    (
        "course.launch",
        "import qk\n\n\ndef unpack(packed, BLOCK):\n    return qk.unpack_int4_ref(packed[None], 2 * len(packed))[0]",
    ),
    ("tl.constexpr", "import numpy as np\n\n\n" + (LOAD + EVEN + ODD).replace("15", "int(np.full(1, 15)[0])", 1)),
    ("", (LOAD + EVEN + ODD).replace("* BLOCK + tl.arange(0, BLOCK)", "* 64 + tl.arange(0, 64)")),
]
OTHERS = {
    "unpack": [
        LOAD + "    at = 2 * tl.program_id(0) * BLOCK + tl.arange(0, 2 * BLOCK)\n"
        "    tl.store(codes_ptr + at, tl.interleave(low, high).to(tl.int8), mask=at < 2 * n)\n"
    ],
    "restore": [
        changed("offs // 2", "(offs >> 1)", "offs % 2 * 4", "(offs & 1) << 2"),
    ],
}
