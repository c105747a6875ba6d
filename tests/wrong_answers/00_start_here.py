ANSWERS = {
    "bytes_in_4_bits": [
        ("the scales are missing", "def bytes_in_4_bits(rows, columns):\n    return rows * columns // 2"),
        ("two codes share a byte", "def bytes_in_4_bits(rows, columns):\n    return rows * (columns + 2)"),
        ("its own scale", "def bytes_in_4_bits(rows, columns):\n    return rows * columns // 2 + 2"),
        ("number of bits", "def bytes_in_4_bits(rows, columns):\n    return rows * columns * 4 + rows * 16"),
        ("", "def bytes_in_4_bits(rows, columns):\n    return rows * columns * 2"),
        ("", "def bytes_in_4_bits(rows, columns):\n    return rows * (columns / 2 + 2) + 1"),
        ("two codes share a byte", "def bytes_in_4_bits(rows, columns):\n    return columns * rows + 2 * rows"),
        ("its own scale", "def bytes_in_4_bits(rows, columns):\n    return int(rows * columns * 0.5) + 2"),
    ]
}

# kinds that were once called right, or whose words were wrong
ANSWERS["bytes_in_4_bits"] += [
    ("exit()", "def bytes_in_4_bits(rows, columns):\n    exit()"),
    ("`return`", "def bytes_in_4_bits(rows, columns):\n    total = rows * (columns // 2 + 2)\n    total += 0"),
    ("off by one", "def bytes_in_4_bits(rows, columns):\n    return rows * (columns // 2 + 2) - 1"),
]
OTHERS = {
    "bytes_in_4_bits": [
        "import numpy as np\n\n\ndef bytes_in_4_bits(rows, columns):\n    return np.int64(rows) * (columns // 2 + 2)",
        "from fractions import Fraction\n\n\n"
        "def bytes_in_4_bits(rows, columns):\n    return rows * (Fraction(columns, 2) + 2)",
    ]
}
