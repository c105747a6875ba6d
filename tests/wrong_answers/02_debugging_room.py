def kernel(head, *lines):
    return "\n    ".join([f"@triton.jit\ndef {head}:", *lines])


def changed(code, *changes):
    """The solution with these changes: pairs of old and new text."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


TOKEN = kernel(
    "token_kernel(x_ptr, q_ptr, K, BLOCK: tl.constexpr)",
    "row, offs = tl.program_id(0), tl.arange(0, BLOCK)",
    "x = tl.load(x_ptr + row * K + offs, offs < K, other=0.0).to(tl.float32)",
    "inverse = tl.div_rn(127.0, tl.max(tl.abs(x), 0))",
    "code = nearest(x * inverse)",
    "tl.store(q_ptr + row * K + offs, code.to(tl.int8), offs < K)",
)
RESTORE = kernel(
    "restore_kernel(q_ptr, s_ptr, out_ptr, K, QUANT_BLOCK: tl.constexpr, TILE: tl.constexpr)",
    "row, tile = tl.program_id(0), tl.program_id(1)",
    "offs = tile * TILE + tl.arange(0, TILE)",
    "blocks = tl.cdiv(K, QUANT_BLOCK)",
    "scale = tl.load(s_ptr + row * blocks + offs // QUANT_BLOCK, offs < K, other=0.0)",
    "code = tl.load(q_ptr + row * K + offs, offs < K, other=0)",
    "tl.store(out_ptr + row * K + offs, code.to(tl.float32) * scale, offs < K)",
)
TRIP = kernel(
    "trip_kernel(x_ptr, out_ptr, K, BLOCK: tl.constexpr)",
    "row, block = tl.program_id(0), tl.program_id(1)",
    "offs = block * BLOCK + tl.arange(0, BLOCK)",
    "x = tl.load(x_ptr + row * K + offs, offs < K, other=0.0).to(tl.float32)",
    "absmax = tl.max(tl.abs(x), 0)",
    "code = nearest(x * tl.div_rn(127.0, absmax))",
    "tl.store(out_ptr + row * K + offs, code * tl.div_rn(absmax, 127.0), offs < K)",
)
GATHER = kernel(
    "gather_kernel(x_ptr, rows_ptr, q_ptr, inverse, K: tl.constexpr, BLOCK: tl.constexpr)",
    "slot, offs = tl.program_id(0), tl.arange(0, BLOCK)",
    "place = tl.load(rows_ptr + slot).to(tl.int64) * K + offs",
    "x = tl.load(x_ptr + place, (offs < K) & (place >= 0), other=0.0).to(tl.float32)",
    "tl.store(q_ptr + slot * K + offs, nearest(x * inverse).to(tl.int8), offs < K)",
)
ABSMAX = kernel(
    "absmax_kernel(x_ptr, absmax_ptr, tile, K, TILE: tl.constexpr)",
    "row = tl.program_id(0)",
    "offs = tile * TILE + tl.arange(0, TILE)",
    "x = tl.load(x_ptr + row * K + offs, offs < K, other=0.0)",
    "largest = tl.max(tl.abs(x.to(tl.float32)), 0)",
    "tl.atomic_max(absmax_ptr + row, largest)",
)
UNPACK = kernel(
    "unpack_kernel(packed_ptr, q_ptr, K, BLOCK: tl.constexpr)",
    "row, offs = tl.program_id(0), tl.arange(0, BLOCK)",
    "byte = tl.load(packed_ptr + row * tl.cdiv(K, 2) + offs // 2, offs < K, other=0).to(tl.int32)",
    "nibble = (byte >> 4 * (offs % 2)) & 15",
    "code = tl.where(nibble > 7, nibble - 16, nibble)",
    "tl.store(q_ptr + row * K + offs, code.to(tl.int8), offs < K)",
)
MASK = ", offs < K, other=0.0)", ")"
MASKS = (*MASK, ", offs < K)", ")")
NEAREST, ATOMIC = "nearest(x * inverse)", "tl.atomic_max("

ANSWERS = {
    "token_codes": [
        ("below zero, the staircase", changed(TOKEN, NEAREST, "x * inverse + 0.5")),
        ("above zero, the staircase", changed(TOKEN, NEAREST, "x * inverse - 0.5")),
        ("nothing rounds before", changed(TOKEN, NEAREST, "x * inverse")),
        ("rounds down", changed(TOKEN, NEAREST, "tl.floor(x * inverse)")),
        ("ties go up", changed(TOKEN, NEAREST, "tl.floor(x * inverse + 0.5)")),
        ("ties go away", changed(TOKEN, NEAREST, "x * inverse + tl.where(x < 0, -0.5, 0.5)")),
        ("past the end of q_ptr", changed(TOKEN, *MASKS)),
        ("no scale is used", changed(TOKEN, NEAREST, "nearest(x)")),
        ("", changed(TOKEN, "tl.program_id(0)", "0")),
    ],
    "restore": [
        ("which scale does each half", changed(RESTORE, "offs // QUANT_BLOCK, offs < K, other=0.0", "tile")),
        ("several blocks", changed(RESTORE, "offs // QUANT_BLOCK, offs < K, other=0.0", "tile * TILE // QUANT_BLOCK")),
        ("does the tile start", changed(RESTORE, "offs // QUANT", "tl.arange(0, TILE) // QUANT")),
        ("by their scales", changed(RESTORE, " * scale", "")),
        ("each row", changed(RESTORE, "row * blocks + ", "")),
        ("past the end of out_ptr", changed(RESTORE, *MASKS, ", offs < K, other=0)", ")")),
        ("past the end of out_ptr", changed(RESTORE, " * scale, offs < K", " * scale")),
        ("", changed(RESTORE, "tl.cdiv(K, QUANT_BLOCK)", "K // QUANT_BLOCK")),
        ("", changed(RESTORE, "offs // QUANT_BLOCK", "offs % QUANT_BLOCK")),
    ],
    "round_trips": [
        ("beyond the last column", changed(TRIP, *MASK)),
        ("beyond the last column", changed(TRIP, "offs < K, other", "offs < (block + 1) * BLOCK, other")),
        ("one column too many", changed(TRIP, "offs < K, other", "offs <= K, other")),
        ("must not become the absmax", changed(TRIP, "other=0.0", "other=1.0")),
        ("with other=", changed(TRIP, ", other=0.0", "")),
        ("past the end of out_ptr", changed(TRIP, *MASKS)),
        ("past the end of out_ptr", changed(TRIP, ", offs < K)", ")")),
        ("into the next row", changed(TRIP, "offs < K, other", "row * K + offs < tl.num_programs(0) * K, other")),
        ("it is K - 1", changed(TRIP, "offs < K, other", "offs < K - 1, other")),
        ("blocks after the first", changed(TRIP, "offs < K, other", "offs < BLOCK, other")),
        ("rows after the first", changed(TRIP, "offs < K, other", "row * K + offs < K, other")),
    ],
    "gather_codes": [
        ("multiply its number by K", changed(GATHER, ".to(tl.int64)", "")),
        (
            "multiply its number by K",
            changed(GATHER, ".to(tl.int64) * K", " * K").replace("+ place", "+ place.to(tl.int64)"),
        ),
        ("slot's number", changed(GATHER, "tl.load(rows_ptr + slot).to(tl.int64)", "slot")),
        ("where does each row start", changed(GATHER, "tl.int64) * K", "tl.int64)")),
        ("missing or too wide", changed(GATHER, ".to(tl.int64)", "", "(offs < K) & (place >= 0), other=0.0", "None")),
        ("missing or too wide", changed(GATHER, ", (offs < K) & (place >= 0), other=0.0", "", ", offs < K)", ")")),
        ("missing or too wide", changed(GATHER, " & (place >= 0)", "")),
        ("", changed(GATHER, "tl.int64", "tl.uint16")),
        ("", changed(GATHER, "tl.int64", "tl.int8")),
    ],
    "row_absmax": [
        ("another order", changed(ABSMAX, ATOMIC, "tl.store(")),
        (
            "another program may store",
            changed(ABSMAX, f"{ATOMIC}absmax_ptr + row, largest)", "old = tl.load(absmax_ptr + row)")
            + "\n    tl.store(absmax_ptr + row, tl.maximum(old, largest))",
        ),
        (
            "another program may store",
            changed(ABSMAX, f"{ATOMIC}absmax_ptr + row, largest)", "old = tl.atomic_max(absmax_ptr + row, -1.0)")
            + "\n    tl.store(absmax_ptr + row, tl.maximum(old, largest))",
        ),
        ("the sum", changed(ABSMAX, ATOMIC, "tl.atomic_add(")),
        ("starts at 0", changed(ABSMAX, ATOMIC, "tl.atomic_min(")),
        ("one tile of a row", changed(ABSMAX, "largest)", "largest, tile == 0)")),
        ("one tile of a row", changed(ABSMAX, ATOMIC, "if tile == 0:\n        tl.store(")),
        ("largest magnitude", changed(ABSMAX, "tl.abs(x.to(tl.float32))", "x.to(tl.float32)")),
        ("missing or too wide", changed(ABSMAX, *MASK)),
        ("", changed(ABSMAX, "absmax_ptr + row", "absmax_ptr + tile")),
        ("", changed(ABSMAX, "x_ptr + row * K", "x_ptr")),
    ],
    "unpack": [
        ("neighbor's place", changed(UNPACK, "(offs % 2)", "(1 - offs % 2)")),
        ("above 7", changed(UNPACK, "tl.where(nibble > 7, nibble - 16, nibble)", "nibble")),
        ("its low nibble", changed(UNPACK, " >> 4 * (offs % 2)", "")),
        ("its high nibble", changed(UNPACK, "4 * (offs % 2)", "4")),
        ("half a byte", changed(UNPACK, "tl.cdiv(K, 2)", "(K // 2)")),
        ("past the end of q_ptr", changed(UNPACK, ", offs < K, other=0)", ")", ", offs < K)", ")")),
        ("past the end of q_ptr", changed(UNPACK, ", offs < K)", ")")),
        ("a nibble of 8", changed(UNPACK, "nibble > 7", "nibble > 8")),
        ("subtract 16", changed(UNPACK, "nibble - 16, nibble", "nibble - 8, nibble")),
    ],
}

# kinds that were once called right, or whose words were wrong
HELPER = "@triton.jit\ndef keep(ptr, value):\n    tl.store(ptr, tl.maximum(tl.load(ptr), value))\n\n\n"
ANSWERS["row_absmax"] += [
    ("another program may store", HELPER + changed(ABSMAX, ATOMIC, "keep(")),
    ("course.launch", "def row_absmax(x, order, size):\n    return x.float().abs().amax(1)"),
]
ANSWERS["restore"] += [
    ("", changed(RESTORE, "offs // QUANT_BLOCK", "offs // 64", "tl.cdiv(K, QUANT_BLOCK)", "tl.cdiv(K, 64)")),
    ("", changed(RESTORE, "code.to(tl.float32) * scale", "code.to(tl.float16) * scale.to(tl.float16)")),
]
PLACES = "tile * TILE // QUANT_BLOCK + tl.arange(0, TILE) // QUANT_BLOCK"
ANSWERS["restore"] += [
    ("separately", changed(RESTORE, "offs // QUANT_BLOCK", PLACES)),
    (
        "is 0 where a tile",
        changed(RESTORE, "offs // QUANT", "tile * (TILE // QUANT_BLOCK) + tl.arange(0, TILE) // QUANT"),
    ),
    ("start over in each row", changed(RESTORE, "row * blocks + offs // QUANT", "(row * K + offs) // QUANT")),
]
ANSWERS["token_codes"] += [
    ("drop the half", changed(TOKEN, NEAREST, "nearest(x * inverse + 0.5)")),
    ("largest magnitude", changed(TOKEN, "tl.abs(x)", "x")),
    ("scale first", changed(TOKEN, NEAREST, "nearest(x) * inverse")),
    ("the largest code is 127", changed(TOKEN, "127.0", "128.0")),
]
ANSWERS["gather_codes"] += [
    ("gets zeros", changed(GATHER, "tl.load(rows_ptr + slot)", "tl.maximum(tl.load(rows_ptr + slot), 0)"))
]
ANSWERS["row_absmax"] += [
    (
        "the last",
        changed(
            ABSMAX,
            f"{ATOMIC}absmax_ptr + row, largest)",
            "tl.store(absmax_ptr + row, largest, tile == tl.cdiv(K, TILE) - 1)",
        ),
    )
]
ANSWERS["unpack"] += [
    ("from byte to byte", changed(UNPACK, "(offs % 2)", "(offs // 2 % 2)")),
    ("begins with a low nibble", changed(UNPACK, "(offs % 2)", "((row * K + offs) % 2)")),
    ("the other nibble", changed(UNPACK, " & 15", "")),
]
ANSWERS["round_trips"] += [
    ("", changed(TRIP, "block * BLOCK + tl.arange(0, BLOCK)", "block * 128 + tl.arange(0, 128)"))
]
ANSWERS["restore"] += [
    ("`return`", "def restore(codes, scales, tile, block=64):\n    out = codes.float()\n    out += scales[0, 0]"),
    ("course.launch", "def restore(codes, scales, tile, block=64):\n    return codes.float().to_sparse()"),
    ("exit()", "def restore(codes, scales, tile, block=64):\n    exit()"),
    ("course.launch", "def restore(codes, scales, tile, block=64):\n    return codes.float()"),
    (
        "a race",
        RESTORE + "\n    tl.store(out_ptr + row * K + offs + TILE, code.to(tl.float32) * scale, offs + TILE < K)",
    ),
]
ANSWERS["round_trips"] += [
    ("course.launch", "def round_trips(batch, tokens, block=128):\n    return batch[:tokens].float()"),
    ("a race", TRIP + "\n    tl.store(out_ptr + row * K + offs + BLOCK, code, offs + BLOCK < K)"),
]
ANSWERS["token_codes"] += [
    ("course.launch", "import qk\n\n\ndef token_codes(x):\n    return qk.quantize_per_token(x)[0]")
]
OTHERS = {
    "row_absmax": [
        kernel(
            "absmax_kernel(x_ptr, absmax_ptr, tile, K, TILE: tl.constexpr)",
            "row = tl.program_id(0)",
            "for half in tl.static_range(2):",
            "    offs = tile * TILE + half * (TILE // 2) + tl.arange(0, TILE // 2)",
            "    x = tl.load(x_ptr + row * K + offs, offs < K, other=0.0).to(tl.float32)",
            "    tl.atomic_max(absmax_ptr + row, tl.max(tl.abs(x), 0))",
        ),
    ],
    "gather_codes": [changed(GATHER, "tl.int64", "tl.int32")],
}
