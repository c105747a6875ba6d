"""Make the course's language model: `python -m qk lm`.

    text       a Debian package -> the text of six novels, a tokenizer, and tokens
    train      tokens -> a float16 checkpoint and its losses, on a GPU
    quantize   checkpoint -> the shipped int4 model, and a record: training losses, perplexities and texts per format

The text is Jane Austen's six novels, 4.1 MB, in the public domain, from the Debian package r-cran-janeaustenr 1.0.0-1
(MIT; Ubuntu has it too). The last 30 KB or so of each novel are held out: the first half is for validation, which
chooses the checkpoint, and the other half only for the losses that are reported.

    apt-get download r-cran-janeaustenr
    python -m qk lm text r-cran-janeaustenr_1.0.0-1_all.deb austen
    python -m qk lm train austen --out run
    python -m qk lm train austen --out run-int8 --int8
    python -m qk lm quantize austen run --int8 run-int8 --out shipped

A line of the text is a paragraph or a heading. The tokenizer is a byte-level BPE, trained on what isn't held out.
"""

import argparse
import hashlib
import io
import json
import math
import pathlib
import re
import struct
import tarfile
import time
import zlib
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import qk
from qk.data.language import LanguageModel, Shape, mean_loss
from qk.nn import int8_train_, save

from .bench.characters import rate_at, windows
from .lm_formats import CALIBRATION, FLOAT, SAMPLE, SHIPPED, measure, statistics_of

PACKAGE = "r-cran-janeaustenr 1.0.0-1"
SOURCES = {
    "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95": f"Jane Austen's novels, Debian {PACKAGE}"
}
PARTS = "training", "validation", "held_out"
HELD_OUT = 15_000  # bytes of a novel for each of the two held-out parts


class Setting(NamedTuple):
    batch: int = 32
    dropout: float = 0.3
    decay: float = 0.5  # weight decay of matrices
    steps: int = 3000
    warmup: int = 200
    rate: float = 1e-3  # the highest; it falls to a tenth
    every: int = 100  # steps from one validation to the next


OPTIONS = {
    "layers": "transformer blocks",
    "width": "channels between the blocks",
    "heads": "attention heads",
    "inner": "channels inside the feed-forward part",
    "context": "tokens of a window",
    "batch": "windows in a step",
    "dropout": "probability of dropout",
    "decay": "weight decay of matrices",
    "steps": "training steps",
    "warmup": "steps in which the learning rate rises",
    "rate": "the highest learning rate, which falls to a tenth",
    "every": "steps from one validation to the next",
}


# The text


def novels(package):
    """Yield the novels of the Debian package r-cran-janeaustenr, in the order of their names.

    Raises:
        ValueError: the file isn't this package.
    """
    try:
        tree = tarfile.open(fileobj=io.BytesIO(_member(package.read_bytes(), b"data.tar")))
        packed = tree.extractfile("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read()
        while packed:  # each novel: its unpacked size, 4 bytes, and a zlib stream
            stream = zlib.decompressobj()
            yield "\n".join(_strings(stream.decompress(packed[4:])))
            packed = stream.unused_data
    except (OSError, KeyError, ValueError, tarfile.TarError, zlib.error, struct.error) as error:
        raise ValueError(f"{package} isn't the Debian package r-cran-janeaustenr: {error}") from error


def _member(archive, name):
    """Return the file of an `ar` archive whose name starts with `name`."""
    place = 8
    while place < len(archive):
        size = int(archive[place + 48 : place + 58])
        if archive[place : place + 16].startswith(name):
            return archive[place + 60 : place + 60 + size]
        place += 60 + size + size % 2
    raise KeyError(name.decode())


def _strings(data):
    """Yield the strings of a character vector that R serialized: a header, a count, and for each flags and a length."""
    place = 31
    for _ in range(*struct.unpack(">i", data[27:31])):
        (size,) = struct.unpack(">i", data[place + 4 : place + 8])
        yield data[place + 8 : place + 8 + size].decode()
        place += 8 + size


def paragraphs(novel):
    """Return a novel's paragraphs and headings, from its first chapter to its end. Marks of italics are left out."""
    found = [" ".join(part.split()).replace("_", "") for part in re.split(r"\n\s*\n", novel)]
    first = next((i for i, text in enumerate(found) if re.match(r"chapter\b", text, re.I)), 0)
    ends = (i for i, text in enumerate(found) if re.match(r"(the end|finis|a note on the text)$", text, re.I))
    return [text for text in found[first : next(ends, None)] if any(map(str.isalnum, text))]


def parts_of(novel):
    """Split a novel's paragraphs: {part: text}."""
    lines, parts = paragraphs(novel), {}
    for part in reversed(PARTS):
        place, size = len(lines), 0
        while place and (part == "training" or size < HELD_OUT):
            place -= 1
            size += len(lines[place]) + 1
        lines, parts[part] = lines[:place], "".join(f"{line}\n" for line in lines[place:])
    return parts


def train_tokenizer(text, vocabulary):
    """Train a byte-level BPE tokenizer with a vocabulary of this size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def write_text(package, folder, vocabulary):
    """Write tokens.safetensors, tokenizer.json and the held-out text to a folder. Returns the tokens' description."""
    split = [parts_of(novel) for novel in novels(package)]
    texts = {part: "".join(parts[part] for parts in split) for part in PARTS}
    tokenizer = train_tokenizer(texts["training"], vocabulary)
    codes = {part: torch.tensor(tokenizer.encode(text).ids, dtype=torch.int16) for part, text in texts.items()}
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    about = {
        "source": SOURCES.get(digest, package.name),
        "source_sha256": digest,
        "vocabulary": tokenizer.get_vocab_size(),
        "bytes": {part: len(text.encode()) for part, text in texts.items()},
        "tokens": {part: len(ids) for part, ids in codes.items()},
        "sha256": {part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(codes, folder / "tokens.safetensors", {"about": json.dumps(about)})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for part in PARTS[1:]:
        (folder / f"{part}.txt").write_text(texts[part], encoding="utf-8", newline="\n")
    return about


class Text(NamedTuple):
    about: dict
    training: torch.Tensor  # int64 tokens, on qk's device
    validation: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def read(cls, folder):
        """Read what `write_text` wrote."""
        with safe_open(folder / "tokens.safetensors", "pt") as file:
            about = json.loads(file.metadata()["about"])
            return cls(about, *(file.get_tensor(part).long().to(qk.device()) for part in PARTS))

    def bits_per_byte(self, part, loss):
        """Convert nats per token into bits per byte of the text."""
        return loss / math.log(2) * self.about["tokens"][part] / self.about["bytes"][part]


# Training


def make(shape, setting, seed, int8):
    """Make a model. With the same seed, both kinds have the same weights."""
    torch.manual_seed(seed)
    model = LanguageModel(shape, setting.dropout).to(qk.device())
    if int8:
        int8_train_(model, ["head"])
    return model


def optimizer_of(model, setting):
    decayed, others = ([p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": setting.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, setting.rate, (0.9, 0.95), fused=True)


def save_checkpoint(model, file, about):
    """Write a model's weights in float16. The head's are the embedding's, so it has none of its own."""
    weights = {name: weight.detach().half().cpu() for name, weight in model.named_parameters()}
    save_file(weights, file, {"about": json.dumps(about)})


def read_checkpoint(file):
    """Read what `save_checkpoint` wrote. Returns the model, in float32 on the CPU, and what was recorded, as a dict."""
    with safe_open(file, "pt") as tensors:
        about = json.loads(tensors.metadata()["about"])
        model = LanguageModel(Shape(**about["shape"]))
        weights = {name: tensors.get_tensor(name).float() for name in tensors.keys()}
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    return model.eval().requires_grad_(False), about


def train(model, text, setting, seed, compiled, heard):
    """Train a model: AdamW, cosine schedule, matmuls in bf16 by autocast.

    Args:
        compiled: whether to use torch.compile for the steps.
        heard: a function called at each validation with the step, the mean training loss (with dropout) since the last
            one, and the loss on the validation part.
    """
    device, context = qk.device(), model.shape.context
    called = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    optimizer, losses = optimizer_of(model, setting), []
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, setting)
        starts = torch.randint(len(text.training) - context, (setting.batch,), generator=generator)
        inputs, targets = windows(text.training, starts.to(device), context)
        with torch.autocast(device, torch.bfloat16):
            logits = called(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % setting.every == 0 or step + 1 == setting.steps:
            with torch.autocast(device, torch.bfloat16):
                validation = mean_loss(model, text.validation)
            heard(step + 1, torch.stack(losses).mean().item(), validation)
            losses = []


def run_training(args):
    """Train a model. Write its best checkpoint and its losses at each validation, so that a crash loses little."""
    text = Text.read(args.text)
    shape = Shape(**{name: getattr(args, name) for name in Shape._fields if name != "vocabulary"},
                  vocabulary=text.about["vocabulary"])  # fmt: skip
    setting = Setting(**{name: getattr(args, name) for name in Setting._fields})
    model = make(shape, setting, args.seed, args.int8)
    run = {"kind": "int8" if args.int8 else "bf16", "seed": args.seed, "setting": setting._asdict()}
    run |= {"parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__}
    run |= {"gpu": torch.cuda.get_device_name() if qk.device() == "cuda" else "none", "text": text.about}
    run |= {"shape": shape._asdict(), "best": None, "steps": [], "training": [], "validation": []}
    begin = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)

    def heard(step, training, validation):
        best = not run["validation"] or validation < min(run["validation"])
        for name, value in (("steps", step), ("training", training), ("validation", validation)):
            run[name].append(round(value, 5))
        seconds = time.perf_counter() - begin
        bits = text.bits_per_byte("validation", validation)
        print(
            f"{args.out.name} {step:>6} training {training:.4f} validation {validation:.4f} nats per token, "
            f"{bits:.4f} bits per byte, {seconds:.0f} s{' *' if best else ''}", flush=True,
        )  # fmt: skip
        if best:
            with torch.autocast(qk.device(), torch.bfloat16):
                run["best"] = {"step": step, "validation": validation, "held_out": mean_loss(model, text.held_out)}
            about = {key: run[key] for key in ("shape", "setting", "seed", "kind", "best")}
            save_checkpoint(model, args.out / "checkpoint.safetensors", about)
        (args.out / "run.json").write_text(json.dumps(run | {"seconds": round(seconds, 1)}), encoding="utf-8")

    train(model, text, setting, args.seed, qk.device() == "cuda" and not args.eager, heard)
    for part in PARTS[1:]:
        loss = run["best"][part]
        bits = text.bits_per_byte(part, loss)
        print(f"{args.out.name} step {run['best']['step']}: {part} {loss:.4f} nats per token, {bits:.4f} bits per byte")
    return 0


# Quantizing


def write_formats(text, folder, runs, out):
    """Quantize a trained model in all formats. Writes the shipped model, and the record as it grows.

    Args:
        text: a `Text`, with the tokenizer next to it in `folder`.
        runs: {"bf16": folder, "int8": folder or None} of `train`'s. The model is the one trained in bf16.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model, about = read_checkpoint(runs["bf16"] / "checkpoint.safetensors")
    model = model.to(qk.device())
    training = {kind: json.loads((run / "run.json").read_text(encoding="utf-8")) for kind, run in runs.items() if run}
    record = {"shape": about["shape"], "text": text.about, "training": training, "torch": torch.__version__}
    record |= {"device": torch.cuda.get_device_name() if qk.device() == "cuda" else "CPU, by plain-torch references"}
    record |= {"float": FLOAT, "shipped": SHIPPED, "calibration": CALIBRATION, "sample": SAMPLE, "formats": {}}
    for run in training.values():
        for key in ("text", "shape", "seconds"):  # each run has the same text; runs that shared a GPU have no times
            run.pop(key, None)
    out.mkdir(parents=True, exist_ok=True)

    def heard(name, new, found):
        if name == SHIPPED:
            save(new, out / "austen.safetensors")
        if "sample" in found:
            found["sample"] = [tokenizer.decode([code]) for code in found["sample"]]
        record["formats"][name] = found | {"bits_per_byte": round(text.bits_per_byte("held_out", found["loss"]), 5)}
        (out / "austen.json").write_text(json.dumps(record) + "\n", encoding="utf-8")

    prompt = torch.tensor(tokenizer.encode(SAMPLE["prompt"]).ids)
    measure(model, statistics_of(model, text.training, **CALIBRATION), text.held_out, prompt, heard)
    for name, copied in (("tokenizer.json", "austen_tokenizer.json"), ("held_out.txt", "austen_held_out.txt")):
        (out / copied).write_bytes((folder / name).read_bytes())


# The command


def run_text(args):
    about = write_text(args.package, args.folder, args.vocabulary)
    print(json.dumps(about, indent=1))
    return 0


def run_quantize(args):
    write_formats(Text.read(args.text), args.text, {"bf16": args.run_folder, "int8": args.int8}, args.out)
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m qk lm", description="Make the course's language model from the text of Jane Austen's novels."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = commands.add_parser("text", help="extract the text from its package, and train a tokenizer")
    text.add_argument("package", type=pathlib.Path, help="the file that `apt-get download r-cran-janeaustenr` fetches")
    text.add_argument("folder", type=pathlib.Path, help="write text, tokenizer and tokens here")
    text.add_argument(
        "--vocabulary", type=int, default=Shape().vocabulary, metavar="N", help="number of tokens (default: 2048)"
    )
    text.set_defaults(run=run_text)
    train = commands.add_parser("train", help="train the model, on a GPU")
    train.add_argument("text", type=pathlib.Path, help="the folder that `text` wrote")
    train.add_argument("--out", type=pathlib.Path, required=True, help="write checkpoint and losses to this folder")
    train.add_argument("--int8", action="store_true", help="train all linear layers but the head in int8")
    train.add_argument("--eager", action="store_true", help="don't use torch.compile")
    train.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (default: 0)")
    defaults = {**Shape()._asdict(), **Setting()._asdict()}
    for name, what in OPTIONS.items():
        value = defaults[name]
        metavar = "N" if isinstance(value, int) else "X"
        train.add_argument(
            f"--{name}", type=type(value), default=value, metavar=metavar, help=f"{what} (default: {value})"
        )
    train.set_defaults(run=run_training)
    quantize = commands.add_parser("quantize", help="quantize the model in many formats, and measure each")
    quantize.add_argument("text", type=pathlib.Path, help="the folder that `text` wrote")
    quantize.add_argument("run_folder", metavar="run", type=pathlib.Path, help="the folder that `train` wrote")
    quantize.add_argument("--int8", type=pathlib.Path, metavar="RUN", help="the folder of the same run with --int8")
    quantize.add_argument("--out", type=pathlib.Path, required=True, help="write model and record to this folder")
    quantize.set_defaults(run=run_quantize)
    return parser


def main(argv=None):
    """Run `python -m qk lm`. Return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
