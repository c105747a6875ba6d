"""00_start_here: the exercise's right answer, cases and mistakes."""

import qk
from qk import data
from qk.course.exercises import Exercise


def _counted(rows, columns):
    codes, scales = qk.quantize_int4(data.load("ffn_in.weight")[:rows, :columns].contiguous().to(qk.device()))
    return codes.nbytes + scales.nbytes


EXERCISES = {
    "bytes_in_4_bits": Exercise(
        expected=_counted,
        cases=lambda: [(1, 2), (3, 384), (1536, 384), (7, 50), (1000, 6)],
        mistakes={
            "those are the codes; the scales are missing": lambda rows, columns: rows * columns // 2,
            "two codes share a byte": lambda rows, columns: rows * (columns + 2),
            "each row has a scale of its own": lambda rows, columns: rows * columns // 2 + 2,
            "that is in bits": lambda rows, columns: rows * (4 * columns + 16),
            "a scale has 2 bytes": lambda rows, columns: rows * (columns // 2 + 1),
            "a scale has 2 bytes, not 4": lambda rows, columns: rows * (columns // 2 + 4),
            "a code has 4 bits; with 16, that is the matrix as it was": lambda rows, columns: 2 * rows * columns,
            "a scale has 2 bytes, not 2 bits": lambda rows, columns: (4 * rows * columns + 2 * rows) // 8,
            "a row has one scale here, not one for each 128 columns": lambda rows, columns: (
                rows * (columns // 2 + 2 * -(-columns // 128))
            ),
            "scales come on top of the codes: add them": lambda rows, columns: rows * (columns // 2 - 2),
            "each row has one scale, not each column": lambda rows, columns: rows * columns // 2 + 2 * columns,
        },
        note="any number of rows, and any even number of columns",
    ),
}
