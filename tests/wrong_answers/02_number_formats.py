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
LEVEL = "tl.where(exponent == 0, fraction / 2, ((2 + fraction) << exponent) / 4)"
IN_BLOCKS = "tl.program_id(0) * (BLOCK // 16) + tl.arange(0, BLOCK) // 16"
CLAMP = "    x = tl.minimum(tl.maximum(x, -448.0), 448.0)\n"


NVFP4 = """@triton.jit
def nvfp4_kernel(packed_ptr, scale_ptr, tensor_scale, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed_ptr + offs // 2, mask=offs < n, other=0).to(tl.int32)
    nibble = (byte >> (offs % 2 * 4)) & 15
    exponent, fraction = (nibble >> 1) & 3, nibble & 1
    level = tl.where(exponent == 0, fraction / 2, ((2 + fraction) << exponent) / 4)
    sign = 1 - 2 * (nibble >> 3)
    scale = tl.load(scale_ptr + offs // 16, mask=offs < n, other=0.0)
    tl.store(out_ptr + offs, sign * level * scale * tensor_scale, mask=offs < n)
"""


def changed(*changes, code=KERNEL):
    """The solution with these changes: pairs of old and new text."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def restored(*changes):
    return changed(*changes, code=NVFP4)


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
        ("clamp on both sides", changed("tl.minimum(tl.maximum(x, -448.0), 448.0)", "tl.minimum(x, 448.0)")),
        (
            "before the clamp",
            changed(
                CLAMP, "", "(x + rounder) - rounder", "tl.minimum(tl.maximum(x + rounder - rounder, -448.0), 448.0)"
            ),
        ),
        ("the step of the value", changed(CLAMP, "", "    step =", f"{CLAMP}    step =")),
        ("without the 1.5", changed("1.5 * ", "")),
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
    "from_nvfp4": [
        ("in the low nibble", restored("offs % 2 * 4", "4 - offs % 2 * 4")),
        ("from its low nibble", restored(" >> (offs % 2 * 4)", "")),
        ("from its high nibble", restored("(offs % 2 * 4)", "4")),
        ("top bit is a sign", restored(f"level = {LEVEL}", "level = (nibble ^ 8) - 8", "sign * level", "level")),
        ("not a number", restored(LEVEL, "nibble & 7")),
        ("no leading 1", restored("exponent == 0", "exponent < 0")),
        ("exponent is e - 1", restored("exponent) / 4", "exponent) / 2")),
        ("one half, not 1", restored(LEVEL, "tl.where(exponent == 0, fraction, ((1 + fraction) << exponent) / 2)")),
        ("are 00, too", restored("fraction / 2", "fraction")),
        ("aren't 00, too", restored("(2 + fraction)", "((1 + fraction) * 2)")),
        ("several scales", restored("scale_ptr + offs // 16", "scale_ptr + offs * 0 + tl.program_id(0) * BLOCK // 16")),
        ("BLOCK // 16 is 0", restored("ptr + offs // 16", f"ptr + {IN_BLOCKS}")),
        ("first one's scales", restored("ptr + offs // 16", "ptr + tl.arange(0, BLOCK) // 16")),
        ("not 32", restored("offs // 16", "offs // 32")),
        ("not eight", restored("scale_ptr + offs // 16", "scale_ptr + tl.minimum(offs // 8, n // 16 - 1)")),
        ("first block's scale", restored("scale_ptr + offs // 16", "scale_ptr + offs * 0")),
        ("block's scale is missing", restored(" * scale *", " *")),
        ("tensor's scale is missing", restored(" * tensor_scale", "")),
        ("multiply by both scales", restored(" * scale * tensor_scale", "")),
        ("don't divide", restored("* tensor_scale", "/ tensor_scale")),
        ("where do yours begin?", restored("tl.program_id(0) * BLOCK + ", "")),
        ("signs are lost", restored("sign * level", "level")),
        ("past the end of out_ptr", restored("tensor_scale, mask=offs < n", "tensor_scale")),
        ("", restored("offs // 2,", "offs,")),
        (
            "course.launch",
            "def from_nvfp4(packed, scale, tensor_scale, BLOCK):\n    return scale.repeat_interleave(16)",
        ),
    ],
}
OTHERS = {
    "round_to_e4m3": [
        KERNEL.replace("(x + rounder) - rounder", "(x / step + 12582912.0 - 12582912.0) * step"),
        changed(
            "    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)\n",
            "    power = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.abs(x), 2.0**-7))))\n",
        ),
    ],
    "from_nvfp4": [
        restored(LEVEL, "tl.where(exponent == 0, 0.5 * fraction, (1 + 0.5 * fraction) * tl.exp2(exponent - 1.0))"),
        restored("level * scale * tensor_scale", "(scale * tensor_scale) * level"),
    ],
}
