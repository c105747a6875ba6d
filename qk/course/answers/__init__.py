"""The right answers to the exercises, the cases that check them, and the mistakes that have a hint: a file a page."""

import torch

from qk.core.numerics import INTERPRETED


def as_bfloat16(x):
    """Round float32 as a kernel's cast to bfloat16 does: Triton's interpreter cuts bits off."""
    return (x.float().view(torch.int32) & -65536).view(torch.float32) if INTERPRETED.value else x.bfloat16().float()


def as_int8(x):
    """Cast floats to int8 as a kernel does on a GPU: cut to int16's range, of which int8 is the low byte."""
    return x.clamp(-(2**15), 2**15 - 1).to(torch.int16).to(torch.int8)
