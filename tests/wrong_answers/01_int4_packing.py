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
    "bits_per_weight": [
        ("each group also stores", "def bits_per_weight(columns, group_size):\n    return 4"),
        (
            "a short last group has a full",
            "def bits_per_weight(columns, group_size):\n    return 4 + 16 / (group_size or columns)",
        ),
        (
            "round up",
            "def bits_per_weight(columns, group_size):\n    group = group_size or columns\n"
            "    return 4 + 16 * (columns // group) / columns",
        ),
        (
            "there is no extra one",
            "def bits_per_weight(columns, group_size):\n    groups = columns // (group_size or columns) + 1\n"
            "    return 4 + 16 * groups / columns",
        ),
        (
            "an absmax has 16 bits",
            "def bits_per_weight(columns, group_size):\n    groups = triton.cdiv(columns, group_size or columns)\n"
            "    return 4 + 2 * groups / columns",
        ),
        ("not just each row", "def bits_per_weight(columns, group_size):\n    return (4 * columns + 16) / columns"),
        (
            "divide by its number of weights",
            "def bits_per_weight(columns, group_size):\n    groups = triton.cdiv(columns, group_size or columns)\n"
            "    return 4 * columns + 16 * groups",
        ),
        (
            "those are bytes",
            "def bits_per_weight(columns, group_size):\n    groups = triton.cdiv(columns, group_size or columns)\n"
            "    return (columns / 2 + 2 * groups) / columns",
        ),
        ("", "def bits_per_weight(columns, group_size):\n    return 4 + 16 / group_size"),
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
    "bits_per_weight": [
        "from fractions import Fraction\n\n\ndef bits_per_weight(columns, group_size):\n"
        "    return 4 + Fraction(16 * -(-columns // (group_size or columns)), columns)"
    ],
}
