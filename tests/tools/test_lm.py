"""The course's language model: its text, its tokens, its training, and the model itself."""

import io
import json
import math
import struct
import tarfile
import zlib

import pytest
import torch
from cases import DEVICE, same
from torch.nn import functional as F

from qk.data import language
from qk.data.language import LanguageModel, Shape, generate, mean_loss
from qk.nn import dequantize_, layers
from qk.tools import lm, lm_formats

TINY = Shape(layers=2, width=64, heads=2, inner=64, vocabulary=300, context=16)
NOVEL = (
    ["EMMA", "", "By Jane Austen", "", "CHAPTER I", "", "She was _very_", "  happy.", "", "", "* * *", "", "He bowed."]
    + [line for number in range(9) for line in ("", f"Paragraph {number} of the novel.")]
    + ["", "FINIS", "", "a note"]
)  # fmt: skip


def vector(strings):
    """A character vector as R writes it."""
    entries = (struct.pack(">ii", 0x40009, len(text)) + text.encode() for text in strings)
    return b"X\n" + b"\0" * 16 + b"UTF-8" + struct.pack(">ii", 16, len(strings)) + b"".join(entries)


@pytest.fixture
def package(tmp_path):
    """A Debian package with two novels."""
    packed = b""
    for novel in (NOVEL, NOVEL[:-3]):
        data = vector(novel)
        packed += struct.pack(">i", len(data)) + zlib.compress(data)
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w:xz") as tar:
        info = tarfile.TarInfo("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        info.size = len(packed)
        tar.addfile(info, io.BytesIO(packed))
    archive = b"!<arch>\n"
    for name, data in ((b"debian-binary", b"2.0"), (b"data.tar.xz", tree.getvalue())):
        archive += name.ljust(48) + str(len(data)).encode().ljust(10) + b"`\n" + data + b"\n" * (len(data) % 2)
    file = tmp_path / "novels.deb"
    file.write_bytes(archive)
    return file


def test_novels_are_read_from_the_package(package, tmp_path):
    assert list(lm.novels(package)) == ["\n".join(NOVEL), "\n".join(NOVEL[:-3])]
    for data in (b"", b"!<arch>\n" + b"0" * 70, package.read_bytes()[:-500]):
        (tmp_path / "other").write_bytes(data)
        with pytest.raises(ValueError, match="other isn't the Debian package r-cran-janeaustenr"):
            list(lm.novels(tmp_path / "other"))


def test_paragraphs_and_parts(monkeypatch):
    expected = ["CHAPTER I", "She was very happy.", "He bowed.", *(f"Paragraph {i} of the novel." for i in range(9))]
    assert lm.paragraphs("\n".join(NOVEL)) == expected
    monkeypatch.setattr(lm, "HELD_OUT", 50)
    parts = lm.parts_of("\n".join(NOVEL))
    assert parts["held_out"] == "Paragraph 7 of the novel.\nParagraph 8 of the novel.\n"
    assert parts["validation"] == "Paragraph 5 of the novel.\nParagraph 6 of the novel.\n"
    assert "".join(parts[part] for part in lm.PARTS).splitlines() == expected


def test_from_a_package_to_a_checkpoint(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lm, "HELD_OUT", 50)
    folder, out = tmp_path / "text", tmp_path / "run"
    assert lm.main(["text", str(package), str(folder), "--vocabulary", "300"]) == 0
    about = json.loads(capsys.readouterr().out)
    text = lm.Text.read(folder)
    assert about == text.about and about["source"] == "novels.deb" and 256 < about["vocabulary"] <= 300
    held_out = (folder / "held_out.txt").read_bytes()
    assert about["bytes"]["held_out"] == len(held_out) == 2 * 52
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(text.held_out.tolist()).encode() == held_out
    assert text.bits_per_byte("held_out", 1.0) == pytest.approx(1.442695 * len(text.held_out) / 104)

    small = "--layers 1 --width 32 --heads 2 --inner 32 --context 16 --batch 2 --steps 3 --every 2 --warmup 1 --eager"
    assert lm.main(["train", str(folder), "--out", str(out), *small.split()]) == 0
    printed = capsys.readouterr().out.splitlines()
    run = json.loads((out / "run.json").read_text())
    assert run["steps"] == [2, 3] and len(run["training"]) == len(run["validation"]) == 2 and len(printed) == 4
    model, recorded = lm.read_checkpoint(out / "checkpoint.safetensors")
    assert recorded["best"] == run["best"] and run["best"]["validation"] == pytest.approx(min(run["validation"]), 1e-4)
    assert model.head.weight is model.embedding.weight and not model.training
    # float16 weights, float32 arithmetic, against float32 weights and bf16 arithmetic
    assert mean_loss(model, text.held_out.cpu()) == pytest.approx(run["best"]["held_out"], abs=0.02)
    check_formats(folder, out, tmp_path / "shipped", text, model, monkeypatch)


def check_formats(folder, run, out, text, model, monkeypatch):
    """`lm quantize`, for the model that was trained above."""
    for module in (lm, lm_formats):
        monkeypatch.setattr(module, "SAMPLE", lm_formats.SAMPLE | {"prompt": "He", "tokens": 3})
    kernels = dict(vars(layers))
    assert lm.main(["quantize", str(folder), str(run), "--int8", str(run), "--out", str(out)]) == 0
    assert dict(vars(layers)) == kernels
    record = json.loads((out / "austen.json").read_text())
    assert record["training"]["int8"]["validation"] == json.loads((run / "run.json").read_text())["validation"]
    assert list(record["formats"]) == list(lm_formats.FORMATS) and record["shipped"] in record["formats"]
    exact = mean_loss(model, text.held_out.cpu())
    for name, found in record["formats"].items():
        assert found["loss"] == pytest.approx(exact, rel=0.02) and ("sample" in found) == (name in lm_formats.TOLD)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-3)
    assert len({found["loss"] for found in record["formats"].values()}) == 7  # of 11: here, every group is a whole row
    monkeypatch.setattr(language, "FOLDER", out)
    loaded = language.language_model()
    kinds = {type(module).__name__ for module in loaded.modules()}
    assert {"Int4Linear", "Int8Embedding", "TiedInt8Linear"} <= kinds and loaded.head.table is loaded.embedding
    assert dequantize_(loaded, progress=False)
    assert mean_loss(loaded, text.held_out.cpu()) == pytest.approx(record["formats"][record["shipped"]]["loss"], 1e-3)
    assert language.language_text().encode() == (folder / "held_out.txt").read_bytes()
    assert language.language_tokenizer().get_vocab_size() == text.about["vocabulary"]


def test_wrong_folders_are_refused(tmp_path, capsys):
    for arguments in (["text", str(tmp_path / "no.deb"), str(tmp_path)], ["train", str(tmp_path), "--out", "run"]):
        with pytest.raises(SystemExit):
            lm.main(arguments)
        assert "error: " in capsys.readouterr().err


def learned(int8):
    """Train a tiny model on a text that repeats itself. Returns the validation losses."""
    codes = torch.arange(400, device=DEVICE) % 7
    model = lm.make(TINY._replace(layers=1), lm.Setting(), 3, int8)
    losses = []
    setting = lm.Setting(batch=4, steps=24, warmup=2, rate=1e-2, every=12)
    text = lm.Text({}, codes, codes[:40], codes[:40])
    lm.train(model, text, setting, 3, False, lambda step, training, validation: losses.append(validation))
    return losses


def test_it_learns_and_int8_starts_from_the_same_weights():
    losses = learned(False)
    assert learned(False) == pytest.approx(losses, abs=0.02)
    assert losses[-1] < losses[0] < 0.5 * math.log(TINY.vocabulary)
    int8 = learned(True)
    assert int8 != losses and int8[-1] == pytest.approx(losses[-1], abs=0.5)
    first, second = (lm.make(TINY, lm.Setting(), 3, int8).state_dict() for int8 in (False, True))
    assert all(same(first[name], second[name]) for name in first)


def test_the_full_model_s_size():
    with torch.device("meta"):
        model = LanguageModel()
    weights = 5 * (4 * 384**2 + 3 * 384 * 1024)
    assert sum(p.numel() for p in model.parameters()) == weights + 2048 * 384 + 11 * 384


def test_a_cache_changes_nothing():
    torch.manual_seed(0)
    model = LanguageModel(TINY).eval()
    codes = torch.randint(TINY.vocabulary, (2, 14))
    past = [[] for _ in model.layers]
    parts = [model(codes[:, :5], past), *(model(codes[:, i : i + 1], past) for i in range(5, 14))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(codes), rtol=1e-4, atol=1e-6)


def test_generated_tokens():
    torch.manual_seed(0)
    model = LanguageModel(TINY).eval()
    codes = torch.randint(TINY.vocabulary, (5,))
    greedy, text = generate(model, codes, 11), codes.tolist()
    for code in greedy.tolist():
        assert code == model(torch.tensor([text]))[0, -1].argmax()
        text.append(code)
    assert len(text) == TINY.context and generate(model, codes, 0).shape == (0,)
    # a low temperature is nearly greedy; a seed draws the same tokens again, and another one others
    assert torch.equal(generate(model, codes, 11, 1e-6, seed=3), greedy)
    drawn = generate(model, codes, 11, 2.0, seed=3)
    assert torch.equal(generate(model, codes, 11, 2.0, seed=3), drawn)
    assert not torch.equal(generate(model, codes, 11, 2.0, seed=4), drawn)


def test_tokens_are_drawn_with_their_probabilities():
    torch.manual_seed(0)
    model = LanguageModel(TINY._replace(vocabulary=5)).eval()
    model.norm.weight.data.mul_(2)  # neither uniform nor certain
    codes = torch.tensor([1, 4])
    expected = (model(codes[None])[0, -1] / 2).softmax(0)
    drawn = torch.cat([generate(model, codes, 1, 2.0, seed) for seed in range(1000)])
    assert (drawn.bincount(minlength=5) / 1000 - expected).abs().max() < 0.05 < expected.std()


@pytest.mark.parametrize("size, count, temperature", [(0, 1, 0.0), (8, 9, 0.0), (8, -1, 0.0), (8, 1, -1.0)])
def test_what_generate_refuses(size, count, temperature):
    model = LanguageModel(TINY)
    with pytest.raises(ValueError, match="temperature is -1" if temperature else rf"shape \[{size}\] and count is"):
        generate(model, torch.zeros(size, dtype=torch.int64), count, temperature)
    with pytest.raises(ValueError, match=r"tokens has shape \[1, 8\]"):
        generate(model, torch.zeros(1, 8, dtype=torch.int64), 1)


def test_it_sees_positions_and_no_later_token():
    torch.manual_seed(0)
    model = LanguageModel(TINY).eval()
    codes = torch.randint(TINY.vocabulary, (1, 10))
    other = codes.clone()
    other[0, 6] = (other[0, 6] + 1) % TINY.vocabulary
    before, after = model(codes)[0], model(other)[0]
    torch.testing.assert_close(before[:6], after[:6])
    assert (before[6:] - after[6:]).abs().amax(dim=1).min() > 1e-6
    swapped = codes[:, [1, 0, *range(2, 10)]]
    assert (model(swapped)[0, 5] - before[5]).abs().max() > 1e-6


@pytest.mark.parametrize("tokens", [2, 17, 33, 40])
def test_the_mean_loss_counts_every_token_once(tokens):
    torch.manual_seed(0)
    model = LanguageModel(TINY, dropout=0.5)
    codes = torch.randint(TINY.vocabulary, (tokens,))
    losses = []
    for start in range(0, tokens - 1, TINY.context):
        window = codes[start : start + TINY.context + 1]
        losses.append(F.cross_entropy(model.eval()(window[None, :-1])[0], window[1:], reduction="none"))
    expected = torch.cat(losses).mean().item()
    assert len(torch.cat(losses)) == tokens - 1
    assert mean_loss(model.train(), codes, batch=2) == pytest.approx(expected, rel=1e-5) and model.training


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="width is 66, but must be a multiple of 2 \\* heads, 8"):
        LanguageModel(TINY._replace(width=66, heads=4))
