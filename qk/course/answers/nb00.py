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
            "that counts the codes; the scales are missing": lambda rows, columns: rows * columns // 2,
            "two codes share a byte": lambda rows, columns: rows * (columns + 2),
            "each row has its own scale": lambda rows, columns: rows * columns // 2 + 2,
            "that is the number of bits": lambda rows, columns: rows * (4 * columns + 16),
            "a scale has 2 bytes": lambda rows, columns: rows * (columns // 2 + 1),
            "a scale has 2 bytes, not 4": lambda rows, columns: rows * (columns // 2 + 4),
            "a code has 4 bits; at 16 bits you get the original matrix": lambda rows, columns: 2 * rows * columns,
            "a scale has 2 bytes, not 2 bits": lambda rows, columns: (4 * rows * columns + 2 * rows) // 8,
            "here a row has a single scale, not one per 128 columns": lambda rows, columns: (
                rows * (columns // 2 + 2 * -(-columns // 128))
            ),
            "the scales come on top of the codes: add them": lambda rows, columns: rows * (columns // 2 - 2),
            "each row has one scale; columns have none": lambda rows, columns: rows * columns // 2 + 2 * columns,
        },
        note="any number of rows, and any even number of columns",
    ),
}
