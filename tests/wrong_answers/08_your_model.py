"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""

import qk

# who comes first in a race, and what doesn't compile, is told in the interpreter only
INTERPRETED = qk.device() == "cpu"


def output(*lines):
    return "\n    ".join(["def output_error(error, S):", *lines])


def plan(
    useful="saved[name] > 0", key="costs[name] / saved[name]", before="", order="costs", start="[]",
    fits="spent + costs[name] <= budget", spend="costs[name]", otherwise="", result="moved",
):  # fmt: skip
    return f"""def shrink(costs, saved, budget):
    {before or "pass"}
    moved, spent = {start}, 0
    useful = [name for name in {order} if {useful}]
    ranked = sorted(useful, key=lambda name: {key})
    for name in ranked:
        if {fits}:
            moved.append(name)
            spent += {spend}
        {otherwise}
    return {result}
"""


def lookup(
    row="tl.load(ids_ptr + token)", scale="tl.load(scale_ptr + row)", column="tl.program_id(1) * BLOCK", D="D",
    value="code.to(tl.float32) * scale", mask="column < D", store="column < D", other=", other=0", before="",
):  # fmt: skip
    load, kept = (f", mask={condition}" if condition else "" for condition in (mask, store))
    return f"""@triton.jit
def lookup_kernel(ids_ptr, codes_ptr, scale_ptr, out_ptr, D, BLOCK: tl.constexpr):
    token, column = tl.program_id(0), {column} + tl.arange(0, BLOCK)
    row = {row}
    code = tl.load(codes_ptr + row * {D} + column{load}{other if load else ""})
    scale = {scale}
    value = {value}
    {before}
    tl.store(out_ptr + token * D + column, value{kept})
"""


def shard(
    share="-(-absmax.shape[1] // gpus)", first="rank * share", last="(rank + 1) * share", size="group_size // 2",
    packed="packed[:, first * size : last * size]", absmax="absmax[:, first:last]", result="codes, scales",
):  # fmt: skip
    return f"""def shard(packed, absmax, group_size, gpus, rank):
    share, size = {share}, {size}
    first, last = {first}, {last}
    codes, scales = {packed}, {absmax}
    return {result}
"""


NO_KERNEL = "def lookup(ids, codes, scale, BLOCK):\n    return codes[ids] * scale[ids]"
# a store into the next token's row before the correct one
RACE = "tl.store(out_ptr + (token + 1) * D + column, value, mask=(column < D) & (token + 0 * column == 0))"
# right in the interpreter; but a loop can't change a variable's type
WIDER = lookup(before="for _ in range(D * 0 + 1):\n        value = value.to(tl.float64)")

FREE = "costs[name] / saved[name] if saved[name] else 0"
# takes the worst layers out again
NO_ROOM = """def shrink(costs, saved, budget):
    moved = sorted((name for name in costs if saved[name]), key=lambda name: costs[name] / saved[name])
    while sum(costs[name] for name in moved) > budget:
        moved.pop()
    return moved
"""

ANSWERS = {
    "lookup": [
        ("load the one of row ids[t]", lookup(scale="tl.load(scale_ptr)")),
        ("use the scale of row ids[t]", lookup(scale="tl.load(scale_ptr + token)")),
        ("the scale is missing", lookup(value="code.to(tl.float32)")),
        ("don't divide", lookup(value="code.to(tl.float32) / scale")),
        ("the b-th block", lookup(column="0 * tl.program_id(1)")),
        ("missing or too wide?", lookup(mask="", store="")),
        ("missing or too wide?", lookup(mask="")),
        ("missing or too wide?", lookup(store="")),
        ("use row ids[t]", lookup(row="token")),
        ("missing or too wide?", lookup(D="64")),
        ("numbers are missing", lookup(column="tl.program_id(1) * 64")),
        ("float16", lookup(value="(code.to(tl.float16) * scale.to(tl.float16)).to(tl.float32)")),
        ("", lookup(value="(code * scale.to(tl.int32)).to(tl.float32)")),
        ("a lower bound", lookup(value="code.to(tl.float32) * tl.maximum(scale, 1e-8)")),
        ("a race: " if INTERPRETED else "", lookup(before=RACE)),
        ("launch your kernel", NO_KERNEL),
        ("a loop can't change" if INTERPRETED else "", WIDER),
        ("the sign", lookup(value="-code.to(tl.float32) * scale")),
        ("signs are lost", lookup(value="tl.abs(code.to(tl.float32)) * scale")),
    ],
    "output_error": [
        ("off the diagonal", output("return error.square() @ S.diagonal()")),
        ("off the diagonal", output("return (error**2 * torch.diag(S)).sum(dim=1)")),
        ("(a + b)² isn't", output("return (error**2 @ S).sum(1)")),
        ("two factors of error", output("return (error @ S).sum(1)")),
        ("don't square error @ S", output("return (error @ S).square().sum(1)")),
        ("S is missing", output("return error.square().sum(1)")),
        ("not one for all", output("return torch.trace(error @ S @ error.T)")),
        ("the diagonal of error @ S", output("return error @ S @ error.T")),
        ("not summed yet", output("return error @ S * error")),
        ("rows of error don't mix", output("return (error @ S @ error.T).sum(1)")),
        ("not the mean", output("return (error @ S * error).mean(1)")),
        ("not its root", output("return (error @ S * error).sum(1).sqrt()")),
        ("signs of error", output("error = error.abs()", "return (error @ S * error).sum(1)")),
        ("once in each order", output("return (error @ torch.triu(S) * error).sum(1)")),
        ("[N], not [N, 1]", output("return (error @ S * error).sum(1, keepdim=True)")),
        ("with their signs", output("return (error @ S * error).abs().sum(1)")),
        ("", output("return error.square().sum(1) * S.trace()")),
        ("", output("return (error @ S).norm(dim=1)")),
        ("", output("return (error @ S * error).sum(1).double()")),
        ("", output("return torch.linalg.cholesky(S)")),
        ("must stay as it is.", output("error *= error @ S", "return error.sum(1)")),
        ("float16", output("return (error.half().float() @ S.half().float() * error.half().float()).sum(1)")),
    ],
    "shrink": [
        ("not by cost alone", plan(key="costs[name]")),
        ("not by bytes alone", plan(key="-saved[name]")),
        ("lowest cost per byte", plan(key="-costs[name] / saved[name]")),
        ("lowest cost per byte", plan(key="saved[name] / costs[name] if costs[name] else float('inf')")),
        ("don't multiply", plan(key="costs[name] * saved[name]")),
        ("use /, not //", plan(key="costs[name] // saved[name]")),
        ("not the largest", plan(key="(costs[name] / saved[name], -saved[name])")),
        ("not in `saved`", plan(order="saved")),
        ("not the last", plan(order="reversed(costs)")),
        ("by name", plan(key="(costs[name] / saved[name], name)")),
        ("is skipped", plan(otherwise="else: break")),
        ("to the last unit", plan(fits="spent + costs[name] < budget")),
        ("one layer below the budget", plan(fits="costs[name] <= budget")),
        ("before you move", plan(fits="spent < budget")),
        ("not the bytes", plan(fits="spent + saved[name] <= budget", spend="saved[name]")),
        ("saves nothing", plan(useful="True", key="costs[name] / saved[name] if saved[name] else float('inf')")),
        ("division by zero", plan(useful="True")),
        ("division by zero", plan(key="-saved[name] / costs[name]")),
        ("costs nothing can", plan(useful="saved[name] > 0 and costs[name] > 0")),
        ("order of the ranking", plan(result="[name for name in costs if name in moved]")),
        ("moved comes first", plan(result="moved[::-1]")),
        ("not of the others", plan(result="[name for name in costs if name not in moved]")),
        ("stop moving layers", plan(result="ranked")),
        ("not how many", plan(result="len(moved)")),
        ("return a list", plan(result="tuple(moved)")),
        ("return a list", plan(result="set(moved)")),
        ("not the bytes saved", plan(result="sum(saved[name] for name in moved)")),
        ("a budget of 0", plan(before="if budget == 0: return []")),
        ("late digit", plan(key="round(costs[name] / saved[name], 3)")),
        ("late digit", plan(key="int(1000 * costs[name] / saved[name])")),
        ("and bytes second", plan(key="(costs[name], -saved[name])")),
        ("even if it saves little", plan(key="-saved[name] / max(costs[name], 1)")),
        ("not last", plan(key="-saved[name] / costs[name] if costs[name] else 0")),
        ("rank alike", plan(key="(costs[name] / saved[name], -saved[name] * (costs[name] == 0))")),
        ("not the largest", plan(key="-saved[name] / (costs[name] + 1e-9)")),
        ("even if it costs nothing", plan(useful="saved[name] or not costs[name]", key=FREE)),
        ("is skipped", NO_ROOM),
        ("", plan(result="moved[:2]")),
    ],
    "shard": [
        ("at the same columns", shard(packed="(*packed.chunk(gpus, 1), *[packed[:, :0]] * gpus)[rank]")),
        (
            "would need its scale",
            """def shard(packed, absmax, group_size, gpus, rank):
    share = -(-packed.shape[1] // gpus)
    first, last = min(rank * share, packed.shape[1]), min((rank + 1) * share, packed.shape[1])
    return packed[:, first:last], absmax[:, 2 * first // group_size : -(-2 * last // group_size)]
""",
        ),
        ("holds two codes", shard(size="group_size")),
        (
            "not between rows",
            shard(
                share="-(-len(packed) // gpus)",
                packed="packed[first:last]",
                absmax="absmax[first:last]",
            ),
        ),
        ("on no GPU", shard(share="absmax.shape[1] // gpus")),
        (
            "get the rest",
            shard(
                share="absmax.shape[1] // gpus",
                last="absmax.shape[1] if rank == gpus - 1 else (rank + 1) * share",
            ),
        ),
        (
            "follow one another",
            shard(
                packed="packed[:, [i for i in range(packed.shape[1]) if i // size % gpus == rank]]",
                absmax="absmax[:, rank::gpus]",
            ),
        ),
        (
            "only the last GPUs",
            shard(
                share="divmod(absmax.shape[1], gpus)",
                first="rank * share[0] + min(rank, share[1])",
                last="(rank + 1) * share[0] + min(rank + 1, share[1])",
            ),
        ),
        (
            "short last group",
            shard(
                result="""(
        codes[:, : codes.shape[1] // size * size], scales[:, : codes.shape[1] // size])"""
            ),
        ),
        (
            "don't fill up",
            shard(
                result="""(
        torch.nn.functional.pad(codes, (0, share * size - codes.shape[1])),
        torch.nn.functional.pad(scales, (0, share - scales.shape[1])))"""
            ),
        ),
        ("part before it ends", shard(first="0")),
        ("count from 0", shard(first="max(rank - 1, 0) * share", last="rank * share")),
        ("absmax must be cut", shard(absmax="absmax")),
        ("packed must be cut", shard(packed="packed")),
        ("packed comes first", shard(result="scales, codes")),
        ("in float16", shard(result="codes, scales.float()")),
        ("a tuple", shard(result="[codes, scales]")),
        ("", shard(result="codes")),
        ("", shard(last="rank * share + 1")),
    ],
}

# kinds that were once called right, or whose words were wrong
ALL_BLOCKS = """    for b in range(tl.where(tl.program_id(1) == 0, tl.cdiv(D, BLOCK), 0)):
        column = b * BLOCK + tl.arange(0, BLOCK)
        code = tl.load(codes_ptr + row * D + column, mask=column < D, other=0)
        tl.store(out_ptr + token * D + column, code.to(tl.float32) * scale, mask=column < D)
"""
FROM_0 = lookup().split("    code =")[0] + "    scale = tl.load(scale_ptr + row)\n" + ALL_BLOCKS
SWAPPED = lookup(column="tl.program_id(0) * BLOCK").replace("column = tl.program_id(0),", "column = tl.program_id(1),")
ANSWERS["lookup"] += [
    ("only the b-th block", FROM_0),
    ("more than 8 bits", lookup(row="tl.load(ids_ptr + token).to(tl.uint8)")),
    ("more than 16 bits", lookup(row="tl.load(ids_ptr + token).to(tl.uint16)")),
    ("is the token", SWAPPED),
    ("row 0 is", lookup(value="(row != 0) * code.to(tl.float32) * scale")),
]
ANSWERS["output_error"] += [
    ("column n of S alone", output("return torch.diag(error @ S)")),
    ("too coarse", output("return (error @ S.bfloat16().float() * error).sum(1)")),
    ("", output("return (error[:, :384] @ S[:384, :384] * error[:, :384]).sum(1)")),
    (
        "only the end is wrong",
        output("return torch.cat([(error @ S * error).sum(1)[:384], torch.zeros(len(error[384:]))])"),
    ),
    ("a lower bound", output("return (error @ S * error).sum(1).clamp(min=1e-12)")),
]
ANSWERS["shrink"] += [
    ("", plan(spend="int(costs[name])")),
    ("", plan(fits="round(spent + costs[name]) <= round(budget)")),
    ("", plan(fits="spent + costs[name] <= int(budget)")),
    ("", plan(fits="spent + costs[name] <= budget + 1e-9")),
    ("", plan(key="int(costs[name]) / saved[name]")),
    ("very close", plan(key="round(costs[name] / saved[name], 12)")),
    ("by name", plan(key="(costs[name] / saved[name], '' if costs[name] else name)")),
    ("not in `saved`", plan(key="(costs[name] / saved[name], not costs[name] and list(saved).index(name))")),
    ("not the smallest", plan(key="(costs[name] / saved[name], not costs[name] and saved[name])")),
    ("no finite rank", plan(key="-saved[name] / costs[name] if costs[name] else -1e12")),
]
ANSWERS["shard"] += [
    ("", shard(share="-(-(packed.shape[1] // size) // gpus)")),
    ("", shard(share="-(-absmax.shape[1] // min(gpus, 8))")),
    ("the order is reversed", shard(first="(gpus - 1 - rank) * share", last="(gpus - rank) * share")),
]

# right, in another style
OTHERS = {
    "shard": [
        """def shard(packed, absmax, group_size, gpus, rank):
    scales = absmax.split(math.ceil(absmax.shape[1] / gpus), 1)
    codes = packed.split(group_size // 2 * scales[0].shape[1], 1)
    return (codes[rank], scales[rank]) if rank < len(scales) else (packed[:, :0], absmax[:, :0])
""",
        """def shard(packed, absmax, group_size, gpus, rank):
    owner = torch.arange(absmax.shape[1], device=absmax.device) // math.ceil(absmax.shape[1] / gpus)
    return packed[:, owner.repeat_interleave(group_size // 2)[: packed.shape[1]] == rank], absmax[:, owner == rank]
""",
        shard(packed="packed[:, first * size : last * size].clone()", absmax="absmax[:, first:last].contiguous()"),
    ],
    "output_error": [
        output("return torch.einsum('ni,ij,nj->n', error, S, error)"),
        output("return torch.diagonal(error @ S @ error.T)"),
        output("return (error.double() @ S.double() * error.double()).sum(1).float()"),
        output("return torch.stack([row @ S @ row for row in error])"),
        output(
            "values, vectors = torch.linalg.eigh(S.double())",
            "return ((error.double() @ vectors).square() @ values.clamp(min=0)).float()",
        ),
    ],
    "shrink": [
        plan(key="-saved[name] / costs[name] if costs[name] else float('-inf')"),
        """from fractions import Fraction


def shrink(costs, saved, budget):
    left, names, moved = budget, [n for n in costs if saved[n]], []
    while names:
        best = min(names, key=lambda n: Fraction(costs[n]) / saved[n])
        names.remove(best)
        if left >= costs[best]:
            left -= costs[best]
            moved += [best]
    return moved
""",
    ],
}
