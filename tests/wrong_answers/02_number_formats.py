KERNEL = """@triton.jit
def e4m3_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, 2.0**-6) / 8
    rounder = 1.5 * 2.0**23 * step
    tl.store(out_ptr + offs, (x + rounder) - rounder, mask=offs < n)
"""
CLAMP = "    x = tl.minimum(tl.maximum(x, -448.0), 448.0)\n"


def changed(*changes):
    """The solution with these changes: pairs of old and new text."""
    code = KERNEL
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def rounded(text):
    return changed("(x + rounder) - rounder", text)


ANSWERS = {
    "round_to_e4m3": [
        ("past the end of out_ptr", changed("- rounder, mask=offs < n", "- rounder")),
        ("missing or too wide?", changed(", mask=offs < n, other=0.0", "")),
        ("clamp first", changed(CLAMP, "")),
        (
            "at 448: clamp",
            changed(CLAMP, "    x = tl.where(tl.abs(x) < 2.0**100, x, tl.where(x < 0, -1.0, 1.0) * 2.0**100)\n"),
        ),
        ("where it is 2**-9", changed("2.0**-6", "2.0**-100")),
        ("where it is 2**-9", changed("tl.maximum(power, 2.0**-6)", "power")),
        ("drops what is left", rounded("tl.where(x < 0, -1.0, 1.0) * tl.floor(tl.abs(x) / step) * step")),
        ("this rounds down", rounded("tl.floor(x / step) * step")),
        ("ties go up here", rounded("tl.floor(x / step + 0.5) * step")),
        ("ties go away", rounded("tl.where(x < 0, -1.0, 1.0) * tl.floor(tl.abs(x) / step + 0.5) * step")),
        ("too fine", changed("/ 8", "/ 16")),
        ("too coarse", changed("/ 8", "/ 4")),
        ("no fraction bits", changed(" / 8", "")),
        ("multiply by the step", rounded("((x + rounder) - rounder) / step")),
        ("whole numbers", changed(" * step\n", "\n")),
        ("needn't become 0", rounded("tl.where(tl.abs(x) < 2.0**-6, 0.0, (x + rounder) - rounder)")),
        ("is 2**-6", changed("2.0**-6", "2.0**-7")),
        ("not 240", changed("-448.0), 448.0", "-240.0), 240.0")),
        ("would be NaN", changed("-448.0), 448.0", "-480.0), 480.0")),
        ("where does yours begin?", changed("tl.program_id(0) * BLOCK + ", "")),
        ("", changed("0x7F800000", "0x7FC00000")),
        ("", changed("1.5 * 2.0**23", "2.0**22")),
        ("course.launch", "def round_to_e4m3(x, BLOCK):\n    return e4m3(x)"),
    ],
}
OTHERS = {
    "round_to_e4m3": [
        KERNEL.replace("(x + rounder) - rounder", "(x / step + 12582912.0 - 12582912.0) * step"),
        changed(
            "    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)\n",
            "    power = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.abs(x), 2.0**-7))))\n",
        ),
    ]
}
