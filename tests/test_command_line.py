"""`python -m qk`: its commands, and what it says where it can't run one."""

import sys

import pytest

from qk.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", [*COMMANDS, "bench characters"])
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and printed.startswith(f"usage: python -m qk {name} ")


def test_help_lists_the_commands_and_a_wrong_one_is_refused(capsys):
    for arguments in ([], ["-h"], ["--help"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(f"\n  {name} " in printed for name in COMMANDS)
    assert main(["gelu", "--help"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("there is no command 'gelu'") and "\n  copy " in said.err


@pytest.mark.parametrize("missing", ["matplotlib", "ipywidgets"])
def test_without_the_notebooks_extra_it_says_what_to_install(missing, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[:2] == ["qk", "course"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    hint = f"qk.course needs {missing}, which isn't installed: pip install -e '.[notebooks]'"
    with pytest.raises(ModuleNotFoundError) as error:
        import qk.course  # noqa: F401
    assert str(error.value) == hint
    assert main(["export", "a.ipynb", "b.ipynb"]) == 1
    assert capsys.readouterr().err == f"python -m qk export: {hint}\n"
