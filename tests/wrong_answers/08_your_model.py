def size(expression):
    return f"def int4_bytes(N, K, group_size):\n    groups = -(-K // group_size)\n    return {expression}"


def moment(*lines):
    return "\n    ".join(["def second_moment(x, mask):", *lines])


def plan(*lines):
    order = "names = sorted(costs, key=costs.get, reverse=True)"
    left = "left = lambda n: sum(costs[name] for name in names[n:])"
    return "\n    ".join(["def keep(costs, budget):", order, left, *lines])


ANSWERS = {
    "int4_bytes": [
        ("half a byte empty", size("N * (K // 2 + 2 * groups + 4) + 12")),
        ("don't share a byte", size("-(-N * K // 2) + 2 * N * groups + 4 * N + 12")),
        ("two codes", size("N * (K + 2 * groups + 4) + 12")),
        ("has an absmax too", size("N * (-(-K // 2) + 2 * (K // group_size) + 4) + 12")),
        ("groups of its own", size("N * (-(-K // 2) + 4) + 2 * -(-N * K // group_size) + 12")),
        ("float16 has two bytes", size("N * (-(-K // 2) + 4 * groups + 4) + 12")),
        ("an absmax has two bytes", size("N * (-(-K // 2) + groups + 4) + 12")),
        ("for each group", size("N * (-(-K // 2) + 4) + 12")),
        ("bias is missing", size("N * (-(-K // 2) + 2 * groups) + 12")),
        ("bias is in float32", size("N * (-(-K // 2) + 2 * groups + 2) + 12")),
        ("format is missing", size("N * (-(-K // 2) + 2 * groups + 4)")),
        ("three integers", size("N * (-(-K // 2) + 2 * groups + 4) + 3")),
        ("", size("N * K * 4 / 8")),
        ("", size("N * (-(-K // 8) + 2 * groups + 4) + 12")),
    ],
    "second_moment": [
        ("pads came in", moment("x = x.reshape(-1, x.shape[-1])", "return x.T @ x")),
        ("where the mask is 0", moment("kept = x[mask == 0]", "return kept.T @ kept")),
        ("not the mean", moment("kept = x[mask.bool()]", "return kept.T @ kept / len(kept)")),
        ("counted in a mean", moment("x = (x * mask[..., None]).flatten(0, 1)", "return x.T @ x / len(x)")),
        ("and then the sum", moment("total = (x * mask[..., None]).sum((0, 1))", "return torch.outer(total, total)")),
        ("not only the diagonal", moment("return torch.diag((x[mask.bool()] ** 2).sum(0))")),
        ("[K, K]", moment("kept = x[mask.bool()]", "return kept @ kept.T")),
        ("add up the sentences", moment("x = x * mask[..., None]", "return x.transpose(1, 2) @ x")),
        ("", moment("x = x.sum(1)", "return x.T @ x")),
        ("", moment("x = x[0][mask[0].bool()]", "return x.T @ x")),
    ],
    "keep": [
        ("to the last unit", plan("return names[:next(n for n in range(9) if left(n) < budget or n == len(names))]")),
        (
            "keep those that cost most",
            plan("names.reverse()", "return names[:next(n for n in range(9) if left(n) <= budget)]"),
        ),
        (
            "not for those that are kept",
            plan("return names[:max(n for n in range(len(names) + 1) if left(0) - left(n) <= budget)]"),
        ),
        ("the costs add up", plan("return [name for name in names if costs[name] > budget]")),
        ("not of the others", plan("return names[next(n for n in range(9) if left(n) <= budget):]")),
        ("comes first", plan("return names[:next(n for n in range(9) if left(n) <= budget)][::-1]")),
        ("not by name", plan("return sorted(names[:next(n for n in range(9) if left(n) <= budget)])")),
        ("one fewer", plan("return names[:next(n for n in range(9) if left(n) <= budget) + 1]")),
        ("one more", plan("return names[:max(next(n for n in range(9) if left(n) <= budget) - 1, 0)]")),
        ("not how many", plan("return next(n for n in range(9) if left(n) <= budget)")),
        ("sort by cost", plan("return list(costs)[:next(n for n in range(9) if left(n) <= budget)]")),
        ("", plan("return names")),
    ],
}
