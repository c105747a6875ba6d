"""Answers that learners give to the exercises of 00_triton_primer: part of the hint that each must get, and code."""

import qk

# what a race writes is certain in the interpreter only
INTERPRETED = qk.device() == "cpu"


def kernel(name, arguments, *lines):
    return "\n".join(["@triton.jit", f"def {name}({arguments}):", *(f"    {line}" for line in lines)])


def one(*lines):
    return kernel("add_one_kernel", "x_ptr, out_ptr, n, BLOCK: tl.constexpr", *lines)


def turned(*lines):
    return kernel("reverse_kernel", "x_ptr, out_ptr, n, BLOCK: tl.constexpr", *lines)


def bias(*lines):
    arguments = "x_ptr, bias_ptr, out_ptr, rows, columns, stride_0, stride_1, ROWS: tl.constexpr, COLUMNS: tl.constexpr"
    return kernel("bias_kernel", arguments, *lines)


def row(name, *lines):
    return kernel(name, "x_ptr, out_ptr, columns, stride, BLOCK: tl.constexpr", "row = tl.program_id(0)", *lines)


def longest(store, load=None):
    return row("row_max_kernel", ROW_OFFS, load or ROW_LOAD, store)


def walk(first=None, load=None, keep=None, end=None, loop=None, step=None):
    lines = first or ZERO, loop or WALK, step or STEP, load or LOAD, keep or KEEP, end or END
    return row("absmax_kernel", *lines)


def swap(pair):
    """The lines of a tile, with two words swapped."""
    return [line.replace(pair[0], "@").replace(pair[1], pair[0]).replace("@", pair[1]) for line in TILE]


OFFS = "offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"
COPY = "tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)"
ADD = "tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)"
TURN = "tl.store(out_ptr + offs, tl.load(x_ptr + n - 1 - offs, mask=offs < n), mask=offs < n)"
TILE_R = "offs_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]"
TILE_C = "offs_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]"
TILE_MASK = "mask = (offs_r < rows) & (offs_c < columns)"
TILE = TILE_R, TILE_C, TILE_MASK
FIRST_R = TILE_R.replace("tl.program_id(0) * ROWS + ", "")
SWAPPED = ("program_id(0) counts", "program_id(0)", "program_id(1)"), ("ROWS rows and COLUMNS", "ROWS", "COLUMNS")
TILE_LOAD = "x = tl.load(x_ptr + offs_c * stride_0 + offs_r * stride_1, mask=mask)"
TILE_BIAS = "b = tl.load(bias_ptr + offs_c, mask=offs_c < columns)"
TILE_STORE = "tl.store(out_ptr + offs_r * columns + offs_c, x + b, mask=mask)"
ROW_OFFS = "offs = tl.arange(0, BLOCK)"
ROW_LOAD = 'x = tl.load(x_ptr + row * stride + offs, mask=offs < columns, other=float("-inf"))'
ZERO = "largest = tl.zeros((BLOCK,), tl.float32)"
WALK = "for start in range(0, columns, BLOCK):"
STEP = "    offs = start + tl.arange(0, BLOCK)"
LOAD = "    x = tl.load(x_ptr + row * stride + offs, mask=offs < columns, other=0)"
KEEP = "    largest = tl.maximum(largest, tl.abs(x))"
LOWEST = 'float("-inf")'
FULL = f"largest = tl.full((BLOCK,), {LOWEST}, tl.float32)"
LOAD_LOWEST = LOAD.replace("other=0", f"other={LOWEST}")
MAX = "tl.store(out_ptr + row, tl.max(x))"
END = "tl.store(out_ptr + row, tl.max(largest))"

ANSWERS = {
    "add_one": [
        ("mask", one(OFFS, "tl.store(out_ptr + offs, tl.load(x_ptr + offs) + 1)")),
        ("mask", one(OFFS, "tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1)")),
        ("mask", one(OFFS, ADD.replace("< n", "<= n"))),
        ("below n", one(OFFS, ADD.replace("< n", "< n - 1"))),
        ("nothing was added", one(OFFS, COPY)),
        ("where is program_id", one("offs = tl.arange(0, BLOCK)", ADD)),
        ("p * BLOCK", one("offs = tl.program_id(0) + tl.arange(0, BLOCK)", ADD)),
        ("adds the program id", one(OFFS, ADD.replace("+ 1", "+ tl.program_id(0)"))),
        ("element's index", one(OFFS, ADD.replace("+ 1", "+ offs"))),
        ("", one("offs = tl.program_id(0) * BLOCK", ADD)),
    ],
    "reverse": [
        ("nothing was reversed", turned(OFFS, COPY)),
        (
            "stays in its place",
            turned(
                OFFS,
                "back = tl.minimum((tl.program_id(0) + 1) * BLOCK, n) - 1 - tl.arange(0, BLOCK)",
                "tl.store(out_ptr + offs, tl.load(x_ptr + back, mask=offs < n), mask=offs < n)",
            ),
        ),
        (
            "change places",
            turned(
                OFFS,
                "first = tl.maximum(n - (tl.program_id(0) + 1) * BLOCK, 0)",
                "x = tl.load(x_ptr + first + tl.arange(0, BLOCK), mask=offs < n)",
                "tl.store(out_ptr + offs, x, mask=offs < n)",
            ),
        ),
        ("mask", turned(OFFS, TURN.replace("n - 1 - offs", "n - offs"))),
        ("mask", turned(OFFS, "tl.store(out_ptr + offs, tl.load(x_ptr + n - 1 - offs))")),
        ("mask", turned(OFFS, "tl.store(out_ptr + offs, tl.load(x_ptr + n - 1 - offs, mask=offs < n))")),
        ("where is program_id", turned("offs = tl.arange(0, BLOCK)", TURN)),
        ("", turned(OFFS, TURN.replace("n - 1 - offs", "n - 2 - offs"))),
    ],
    "add_bias": [
        ("bias is missing", bias(*TILE, TILE_LOAD, TILE_STORE.replace("x + b", "x"))),
        (
            "not for each row",
            bias(*TILE, TILE_LOAD, "b = tl.load(bias_ptr + offs_r, mask=offs_r < rows)", TILE_STORE),
        ),
        (
            "use its strides",
            bias(*TILE, TILE_LOAD.replace("* stride_0", "* rows").replace(" * stride_1", ""), TILE_BIAS, TILE_STORE),
        ),
        (
            "first COLUMNS",
            bias(*TILE, TILE_LOAD, "b = tl.load(bias_ptr + tl.arange(0, COLUMNS))[None, :]", TILE_STORE),
        ),
        ("mask", bias(TILE_R, TILE_C, *(s.replace(", mask=mask", "") for s in (TILE_LOAD, TILE_BIAS, TILE_STORE)))),
        ("mask", bias(TILE_R, TILE_C, "mask = offs_c < columns", TILE_LOAD, TILE_BIAS, TILE_STORE)),
        ("mask", bias(TILE_R, TILE_C, "mask = offs_r < rows", TILE_LOAD, TILE_BIAS, TILE_STORE)),
        ("mask", bias(*TILE, TILE_LOAD, TILE_BIAS, TILE_STORE.replace("* columns", "* stride_0"))),
        ("", bias(*TILE, TILE_LOAD.replace("offs_c * stride_0", "offs_c * stride_1"), TILE_BIAS, TILE_STORE)),
        (
            "which stride",
            bias(
                *TILE,
                TILE_LOAD.replace("offs_c * stride_0 + offs_r", "offs_r * stride_0 + offs_c"),
                TILE_BIAS,
                TILE_STORE,
            ),
        ),
        ("use stride_1", bias(*TILE, TILE_LOAD.replace(" * stride_1", ""), TILE_BIAS, TILE_STORE)),
        *((hint, bias(*swap(pair), TILE_LOAD, TILE_BIAS, TILE_STORE)) for hint, *pair in SWAPPED),
        ("each tile", bias(*TILE, TILE_LOAD, "b = tl.load(bias_ptr + tl.program_id(1))", TILE_STORE)),
        ("first column", bias(*TILE, TILE_LOAD, "b = tl.load(bias_ptr + tl.program_id(1) * COLUMNS)", TILE_STORE)),
        ("of column 0", bias(*TILE, TILE_LOAD, "b = tl.load(bias_ptr)", TILE_STORE)),
        ("don't subtract", bias(*TILE, TILE_LOAD, TILE_BIAS, TILE_STORE.replace("x + b", "x - b"))),
        ("don't multiply", bias(*TILE, TILE_LOAD, TILE_BIAS, TILE_STORE.replace("x + b", "x * b"))),
        ("program_id(0)?", bias(FIRST_R, TILE_C, TILE_MASK, TILE_LOAD, TILE_BIAS, TILE_STORE)),
        ("added twice", bias(*TILE, TILE_LOAD, TILE_BIAS, TILE_STORE.replace("x + b", "x + 2 * b"))),
    ],
    "row_max": [
        ("0 is the largest", longest(MAX, load=ROW_LOAD.replace(LOWEST, "0"))),
        ("with other=", longest(MAX, load=ROW_LOAD.replace(f", other={LOWEST}", ""))),
        ("magnitude", longest(MAX.replace("max(x)", "max(tl.abs(x))"), load=ROW_LOAD.replace(LOWEST, "0"))),
        ("sum of the row", longest(MAX.replace("max", "sum"), load=ROW_LOAD.replace(LOWEST, "0"))),
        ("smallest", longest(MAX.replace("max", "min"), load=ROW_LOAD.replace(LOWEST, 'float("inf")'))),
        ("the largest value's position", longest(MAX.replace("max(x)", "argmax(x, 0)"))),
        ("took row 0", longest(MAX, load=ROW_LOAD.replace("row * stride + ", ""))),
        ("not `columns`", longest(MAX, load=ROW_LOAD.replace("* stride", "* columns"))),
        ("is the address wrong" if INTERPRETED else "", longest(MAX.replace("out_ptr + row", "out_ptr"))),
        ("mask", longest(MAX, load="x = tl.load(x_ptr + row * stride + offs)")),
        ("", longest(MAX, load=ROW_LOAD.replace("< columns", "< columns - 1"))),
    ],
    "row_absmax": [
        ("or 0: magnitudes", walk(keep=KEEP.replace("tl.abs(x)", "x"))),
        ("negative one can have", walk(FULL, LOAD_LOWEST, KEEP.replace("tl.abs(x)", "x"))),
        (
            "magnitudes first",
            walk(
                FULL,
                LOAD_LOWEST,
                KEEP.replace("tl.abs(x)", "x"),
                END.replace("tl.max(largest)", "tl.abs(tl.max(largest))"),
            ),
        ),
        ("first BLOCK columns", walk(loop="for start in range(0, BLOCK, BLOCK):")),
        ("first BLOCK columns", walk(step="    offs = tl.arange(0, BLOCK)")),
        ("keep the larger", walk(keep="    largest = tl.abs(x)")),
        ("short tile is missing", walk(loop="for start in range(0, columns // BLOCK * BLOCK, BLOCK):")),
        (
            "sum of the tiles",
            walk("total = 0.0", keep="    total += tl.max(tl.abs(x))", end="tl.store(out_ptr + row, total)"),
        ),
        ("not `columns`", walk(load=LOAD.replace("* stride", "* columns"))),
        ("took row 0", walk(load=LOAD.replace("row * stride + ", ""))),
        ("mask", walk(load="    x = tl.load(x_ptr + row * stride + offs)")),
        ("with other=", walk(load=LOAD.replace(", other=0", ""))),
        ("", walk(keep="    largest += tl.abs(x)")),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["add_one"] += [
    (
        "return what it stores",
        f"{one(OFFS, COPY)}\n\n\ndef add_one(x, BLOCK):\n    out = torch.zeros_like(x)\n"
        "    course.launch(add_one_kernel, (triton.cdiv(len(x), BLOCK),), x, out, len(x), BLOCK=BLOCK)\n"
        "    return out + 1",
    ),
    ("a race", one(OFFS, "tl.store(out_ptr + offs + BLOCK, 7.0, mask=offs + BLOCK < n)", ADD)),
    ("course.launch", "def add_one(x, BLOCK):\n    return x + 1"),
    *([("", one(OFFS.replace("(0, BLOCK)", "(0, 2 * BLOCK)"), ADD))] if INTERPRETED else []),  # else nobody watches
    ("exit()", "def add_one(x, BLOCK):\n    exit()"),
    ("course.launch", "def add_one(x, BLOCK):\n    return (x + 1).to('meta')"),
    ("@triton.jit", one(OFFS, ADD).replace("@triton.jit\n", "")),
    ("tl.constexpr", "import numpy as np\n\n\n" + one(OFFS, ADD.replace("+ 1", "+ int(np.ones(1)[0])"))),
    (
        "",
        one(OFFS, ADD.replace("mask=offs < n) + 1", "mask=offs < n).to(tl.float16) + 1")),
    ),
    ("", one(OFFS, ADD.replace("mask=offs < n) + 1", "mask=offs < n).to(tl.int32) + 1"))),
    ("", one(OFFS.replace("BLOCK", "32"), ADD)),
    ("far from", one(OFFS, "tl.atomic_cas(out_ptr + 1000000000, 0.0, 1.0)", ADD)),
    (
        "each program has a part",
        one(
            "if tl.program_id(0) == 0:",
            "    for start in range(0, n, BLOCK):",
            "        offs = start + tl.arange(0, BLOCK)",
            f"        {ADD}",
        ),
    ),
]
ANSWERS["reverse"] += [
    ("a race", turned(OFFS, "tl.store(out_ptr + n - 1 - offs, 0.0, mask=offs < n)", TURN)),
    ("course.launch", "def reverse(x, BLOCK):\n    return x.flip(0)"),
    ("", turned(OFFS.replace("BLOCK", "16"), TURN)),
]
ANSWERS["add_bias"] += [
    (
        "numbers are missing",
        bias(*TILE, TILE_LOAD, TILE_BIAS, TILE_STORE.replace("x + b", "tl.where(x == 0, 0, x + b)")),
    ),
    ("a race", bias(*TILE, TILE_LOAD, TILE_BIAS, "tl.store(out_ptr + offs_r + 0 * offs_c, x, mask=mask)", TILE_STORE)),
    ("course.launch", "def add_bias(x, bias, ROWS, COLUMNS):\n    return x.t() + bias"),
    ("", bias(*TILE, TILE_LOAD, TILE_BIAS, TILE_STORE.replace("x + b", "x.to(tl.int32) + b"))),
    (
        "",
        bias(TILE_R.replace("ROWS", "4"), TILE_C.replace("COLUMNS", "16"), TILE_MASK, TILE_LOAD, TILE_BIAS, TILE_STORE),
    ),
]
ANSWERS["row_max"] += [
    ("", longest(MAX.replace("tl.max(x)", "tl.minimum(tl.max(x), 3e38)"))),
    ("minus infinity" if INTERPRETED else "", longest(MAX, load=ROW_LOAD.replace(LOWEST, "-1000"))),
    ("", longest(MAX, load=ROW_LOAD.replace(LOWEST, "-1e9"))),
    ("course.launch", "def row_max(x):\n    return x.amax(1)"),
    ("", longest(MAX.replace("tl.max(x)", "tl.max(x.to(tl.int32))"))),
]
ANSWERS["row_absmax"] += [
    ("", walk(ZERO.replace("float32", "float16"), keep=KEEP + ".to(tl.float16)")),
    ("a loop can't change" if INTERPRETED else "", walk(ZERO.replace("float32", "int32"))),
    ("a race", walk(end="tl.store(out_ptr + row + 1, 0.0, mask=row < tl.num_programs(0) - 1)\n    " + END)),
    ("", walk(loop=WALK.replace("columns", "min(columns, 10 * BLOCK)"))),
    ("start from", walk(ZERO.replace("zeros((BLOCK,)", "full((BLOCK,), 1e-30"))),
    ("a single column", walk(loop=WALK.replace("columns", "columns - 1"))),
    ("this adds them", walk(end=END.replace("tl.max(", "tl.sum("))),
    ("course.launch", "def row_absmax(x, BLOCK):\n    return x.abs().amax(1)"),
]


def tiles(*lines):
    return kernel("tile_of", "program, M, N, BLOCK: tl.constexpr, GROUP: tl.constexpr", *lines)


SIZES, FIRST = "down, across = M // BLOCK, N // BLOCK", "first = program // (GROUP * across) * GROUP"
HEIGHT, INSIDE = "height = tl.minimum(GROUP, down - first)", "inside = program % (GROUP * across)"
ANSWERS["grouped_matmul"] = [
    ("whole rows", tiles(SIZES, "return program // across, program % across")),
    ("whole columns", tiles(SIZES, "return program % down, program // down")),
    ("whole rows", tiles(SIZES, FIRST, INSIDE, "return first + inside // across, inside % across")),
    ("missing or too wide?", tiles(SIZES, FIRST, INSIDE, "return first + inside % GROUP, inside // GROUP")),
    ("missing or too wide?", tiles(SIZES, "return program % across, program // across")),
    (
        "missing or too wide?",
        tiles(SIZES, FIRST, HEIGHT, INSIDE, "return first + inside % height + 1, inside // height"),
    ),
    ("", tiles(SIZES, FIRST, HEIGHT, INSIDE, "return first + inside % height, 0 * inside")),
]
OTHERS = {
    "add_one": [one("first = tl.program_id(0).to(tl.int64) * BLOCK", "offs = first + tl.arange(0, BLOCK)", ADD)],
    "reverse": [
        turned(
            "first = n - (tl.program_id(0) + 1) * BLOCK",
            "back = first + tl.arange(0, BLOCK)",
            "x = tl.flip(tl.load(x_ptr + back, mask=back >= 0, other=0), 0)",
            OFFS,
            "tl.store(out_ptr + offs, x, mask=offs < n)",
        )
    ],
    # loads x as it is stored, and transposes the tile
    "add_bias": [
        bias(
            *TILE,
            "r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)",
            "c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)",
            "x_mask = (c < columns)[:, None] & (r < rows)[None, :]",
            "x = tl.load(x_ptr + c[:, None] * stride_0 + r[None, :] * stride_1, mask=x_mask)",
            TILE_BIAS,
            TILE_STORE.replace("x + b", "tl.trans(x) + b"),
        )
    ],
    # orders that load as few bytes
    "grouped_matmul": [
        tiles(
            SIZES,
            FIRST,
            HEIGHT,
            INSIDE,
            "column, row = inside // height, inside % height",
            "return first + tl.where(column % 2 == 1, height - 1 - row, row), column",
        ),
        tiles(
            SIZES,
            "first = program // (GROUP * down) * GROUP",
            "width = tl.minimum(GROUP, across - first)",
            "inside = program % (GROUP * down)",
            "return inside // width, first + inside % width",
        ),
    ],
    "row_max": [longest(MAX, load=ROW_LOAD.replace(f"other={LOWEST}", f"other={LOWEST}").replace("x =", "x = 1.0 *"))],
}
