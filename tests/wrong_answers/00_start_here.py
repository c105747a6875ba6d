def restore(
    scale="x.abs().amax(-1, keepdim=True) / 7", codes="(x / scale).round().to(torch.int8)", out="codes * scale"
):
    return f"def restore(x):\n    scale = {scale}\n    codes = {codes}\n    return {out}"


SIGNED, EIGHT, CAST = "x.amax(-1, keepdim=True) / 7", "x.abs().amax(-1, keepdim=True) / 8", "(x / scale).to(torch.int8)"
BOTH = "x.amax(-1, keepdim=True) / 8"
ANSWERS = {
    "restore": [
        ("largest magnitude: x.abs()", restore(SIGNED, "(x / scale).round()")),
        ("codes end at 7", restore(EIGHT)),
        ("round first", restore(codes=CAST)),
        ("x.abs() (then look again at the divisor)", restore(BOTH, "(x / scale).round()")),
        ("x.abs() (then look again at codes)", restore(SIGNED, "(x / scale).trunc()")),
        ("codes end at 7 (then look again at codes)", restore(EIGHT, CAST)),
        ("(then look again at the divisor and codes)", restore(BOTH, "(x / scale).trunc()")),
        ("the divisor and which weights share a scale)", restore("x.amax() / 8", "(x / scale).round()")),
        (
            "codes end at 7 (then look again at which weights share a scale)",
            restore("x.abs().max() / 8", "(x / scale).round()"),
        ),
        ("a scale of its own (then look again at codes)", restore("x.abs().max() / 7", "(x / scale).trunc()")),
        ("aren't weights", restore(out="codes")),
        ("multiply by the scale", restore(codes="(x / scale).round()", out="codes")),
        ("a scale of its own", restore("x.abs().max() / 7")),
        ("rounding down", restore(codes="(x / scale).floor()")),
        ("only for positive values", restore(codes="(x / scale + 0.5).to(torch.int8)")),
        ("five bits", restore("x.abs().amax(-1, keepdim=True) / 15")),
        ("still absmax / 8", restore(EIGHT, "(x / scale).round().clamp(-7, 7)")),
        ("", restore("x.abs().mean(-1, keepdim=True) / 7")),
        ("", restore("x.std(-1, keepdim=True) / 7")),
        ("must stay as it is.", "def restore(x):\n    return x.round_()"),
    ]
}

# kinds that were once called right, or whose words were wrong
ANSWERS["restore"] += [
    ("rows of tiny weights", restore("(x.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-3)")),
    ("rows of tiny weights", restore("x.abs().amax(-1, keepdim=True) / 7 + 1e-8")),
    ("maximum of each row", restore("x.abs().amax(0, keepdim=True) / 7")),
    ("exit()", "def restore(x):\n    exit()"),
    (
        "`return`",
        "def restore(x):\n    scale = x.abs().amax(-1, keepdim=True) / 7\n    scale = (x / scale).round() * scale",
    ),
]
OTHERS = {
    "restore": [
        "def restore(x):\n    top = x.abs().amax(1, keepdim=True)\n    return torch.round(x * (7 / top)) * top / 7",
        "def restore(x):\n    return torch.stack([(row / (s := row.abs().max() / 7)).round() * s for row in x])",
    ]
}
