"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""

import qk

# who comes first in a race, and what doesn't compile, is told in the interpreter only
INTERPRETED = qk.device() == "cpu"


def size(expression):
    return f"def int4_bytes(N, K, group_size):\n    groups = -(-K // group_size)\n    return {expression}"


def moment(*lines):
    return "\n    ".join(["def second_moment(x, mask):", *lines])


def plan(*lines):
    order = "names = sorted(costs, key=costs.get, reverse=True)"
    left = "left = lambda n: sum(costs[name] for name in names[n:])"
    enough = "enough = next((n for n in range(len(names)) if left(n) <= budget), len(names))"
    return "\n    ".join(["def keep(costs, budget):", order, left, enough, *lines])


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


NO_KERNEL = "def lookup(ids, codes, scale, BLOCK):\n    return codes[ids] * scale[ids]"
# a store into the next token's row before the correct one
RACE = "tl.store(out_ptr + (token + 1) * D + column, value, mask=(column < D) & (token + 0 * column == 0))"
# right in the interpreter; but a loop can't change a variable's type
WIDER = lookup(before="for _ in range(D * 0 + 1):\n        value = value.to(tl.float64)")

ANSWERS = {
    "int4_bytes": [
        ("half a byte empty", size("N * (K // 2 + 2 * groups + 4) + 12")),
        ("don't share a byte", size("-(-N * K // 2) + 2 * N * groups + 4 * N + 12")),
        ("two codes", size("N * (K + 2 * groups + 4) + 12")),
        ("has an absmax too", size("N * (-(-K // 2) + 2 * (K // group_size) + 4) + 12")),
        ("its own groups", size("N * (-(-K // 2) + 4) + 2 * -(-N * K // group_size) + 12")),
        ("float16 has two bytes", size("N * (-(-K // 2) + 4 * groups + 4) + 12")),
        ("an absmax has two bytes", size("N * (-(-K // 2) + groups + 4) + 12")),
        ("for each group", size("N * (-(-K // 2) + 4) + 12")),
        ("not just one", size("N * (-(-K // 2) + 2 + 4) + 12")),
        ("bias is missing", size("N * (-(-K // 2) + 2 * groups) + 12")),
        ("bias is in float32", size("N * (-(-K // 2) + 2 * groups + 2) + 12")),
        ("not for each column", size("N * (-(-K // 2) + 2 * groups) + 4 * K + 12")),
        ("format is missing", size("N * (-(-K // 2) + 2 * groups + 4)")),
        ("three integers", size("N * (-(-K // 2) + 2 * groups + 4) + 3")),
        ("eight codes", size("N * (-(-K // 8) + 2 * groups + 4) + 12")),
        ("only the codes", size("N * -(-K // 2)")),
        (
            "needn't begin with a new byte",
            size("N * (K // group_size * -(-group_size // 2) + -(-K % group_size // 2) + 2 * groups + 4) + 12"),
        ),
        ("", size("N * K * 4 / 8")),
        ("", size("math.ceil(N * (K / 2 + 2 * groups + 4) + 12.5)")),
    ],
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
        ("tl.constexpr" if INTERPRETED else "", WIDER),
        ("the sign", lookup(value="-code.to(tl.float32) * scale")),
        ("signs are lost", lookup(value="tl.abs(code.to(tl.float32)) * scale")),
    ],
    "second_moment": [
        ("padding was counted: use", moment("x = x.reshape(-1, x.shape[-1])", "return x.T @ x")),
        ("where the mask is 0", moment("kept = x[mask == 0]", "return kept.T @ kept")),
        ("not the mean", moment("kept = x[mask.bool()]", "return kept.T @ kept / len(kept)")),
        ("select the tokens", moment("x = (x * mask[..., None]).flatten(0, 1)", "return x.T @ x")),
        ("and padding was counted", moment("kept = x[mask.bool()]", "return kept.T @ kept / mask.numel()")),
        ("then sum them", moment("total = x[mask.bool()].sum(0)", "return torch.outer(total, total)")),
        ("not just the diagonal", moment("return torch.diag((x[mask.bool()] ** 2).sum(0))")),
        ("[K, K]", moment("kept = x[mask.bool()]", "return kept @ kept.T")),
        ("", moment("kept = x[mask.bool()]", "return (kept.T @ kept).squeeze()")),
        ("add up the sentences", moment("x = x * mask[..., None]", "return x.transpose(1, 2) @ x")),
        ("the first sentence", moment("x = x[0][mask[0].bool()]", "return x.T @ x")),
        ("subtract the mean", moment("x = x[mask.bool()]", "x = x - x.mean(0)", "return x.T @ x")),
        ("", moment("x = x.sum(1)", "return x.T @ x")),
        (
            "padding can come first",
            moment("x = torch.cat([row[: int(m.sum())] for row, m in zip(x, mask)])", "return x.T @ x"),
        ),
        ("must stay as it is.", moment("x[mask == 0] = 0", "x = x.flatten(0, 1)", "return x.T @ x")),
        ("", moment("x = x[mask.bool()].half()", "return (x.T @ x).float()")),
    ],
    "keep": [
        (
            "to the last unit",
            plan("return names[:next((n for n in range(len(names)) if left(n) < budget), len(names))]"),
        ),
        (
            "keep the most costly ones",
            plan(
                "names.reverse()",
                "return names[:next((n for n in range(len(names)) if left(n) <= budget), len(names))]",
            ),
        ),
        (
            "not for the ones you keep",
            plan("return names[:max(n for n in range(len(names) + 1) if left(0) - left(n) <= budget)]"),
        ),
        ("the costs add up", plan("return [name for name in names if costs[name] > budget]")),
        ("not of the others", plan("return names[enough:]")),
        ("comes first", plan("return names[:enough][::-1]")),
        ("not by name", plan("return sorted(names[:enough])")),
        ("one fewer", plan("return names[:enough + 1]")),
        ("one more", plan("return names[:max(enough - 1, 0)]")),
        ("not how many", plan("return enough")),
        (
            "the first in `costs` comes first",
            plan("return sorted(reversed(list(costs)), key=costs.get, reverse=True)[:enough]"),
        ),
        (
            "even if others cost as much",
            plan("return [name for name in names if enough and costs[name] >= costs[names[enough - 1]]]"),
        ),
        ("sort by cost", plan("return list(costs)[:enough]")),
        ("return a list", plan("return tuple(names[:enough])")),
        ("not their costs", plan("return [costs[name] for name in names[:enough]]")),
        ("stop when the others fit", plan("return names")),
        ("", plan("return set(names[:enough])")),
        ("", plan("return names[:next(n for n in range(len(names)) if left(n) <= budget)]")),
        ("", plan("return names[:2]")),
        ("layers of no cost", plan("return names[:enough] if budget else names")),
    ],
}
