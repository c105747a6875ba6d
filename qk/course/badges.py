"""What follows from the repository's address: badges that open a notebook on Colab or Kaggle, and the setup cell.

The address is one line of pyproject.toml, `Repository` under `[project.urls]`. After a change, `python -m qk export
--badges` writes it into all notebooks and the README. A notebook that was opened from a badge has nothing next to it,
so its setup cell installs qk from that address.
"""

import re

_REPOSITORY = re.compile(r'^Repository = "(https://github\.com/([\w.-]+/[\w.-]+)(?<!\.git))"$', re.MULTILINE)
_OPENS = {
    "Open in Colab": (
        "https://colab.research.google.com/assets/colab-badge.svg",
        "https://colab.research.google.com/github/{name}/blob/main/notebooks/{file}",
    ),
    "Open in Kaggle": (
        "https://kaggle.com/static/images/open-in-kaggle.svg",
        "https://kaggle.com/kernels/welcome?src=https://github.com/{name}/blob/main/notebooks/{file}",
    ),
}
_BADGE = re.compile(r"\[!\[(Open in \w+)\]\([^)\s]*\)\]\(([^)\s]*/)?([^)\s/]+\.ipynb)\)")
# Among wheels, rjust makes names sort by version: 0.9 before 0.10, and 0.2.0rc1 before 0.2.0.
_SETUP = """\
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

wanted = [] if find_spec("triton") else ["triton>=3.3,!=3.4.*"]
if not getattr(find_spec("qk"), "origin", None):
    near = [here := Path.cwd(), *Path("/kaggle/input").glob("*")]
    clones = [up for up in here.parents for file in up.glob("pyproject.toml") if b'\\nname = "qk"' in file.read_bytes()]
    sys.path[:0] = folders = [str(p) for p in [here, *clones, *near] if (p / "qk" / "__init__.py").is_file()][:1]
    wheels = [(re.sub(r"[a-z]*\\d+", lambda n: n[0].rjust(9), w.name), w) for p in near for w in p.glob("qk-*.whl")]
    source = os.environ.get("QK_SOURCE") or "qk @ git+{address}"
    wanted += [] if folders else [str(max(wheels)[1]) if wheels else source]
if wanted and subprocess.call([sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--quiet", *wanted]):
    raise ImportError(f"no {{wanted}}: clone qk, put its folder or wheel here (Kaggle: in a dataset), or set QK_SOURCE")
import qk

print(qk.backend())\
"""


def address(pyproject):
    """Read the repository's address.

    Args:
        pyproject: the text of pyproject.toml.

    Returns:
        The address, for example "https://github.com/someone/qk".

    Raises:
        ValueError: there is no such line, or it isn't the address of a GitHub repository.
    """
    found = _REPOSITORY.search(pyproject)
    if not found:
        raise ValueError('pyproject.toml needs a line Repository = "https://github.com/OWNER/NAME" in [project.urls]')
    return found[1]


def setup_source(address):
    """The setup cell's code, for a package that comes from this address."""
    return _SETUP.format(address=address)


def _badge(address, label, file):
    picture, page = _OPENS[label]
    return f"[![{label}]({picture})]({page.format(name=address.removeprefix('https://github.com/'), file=file)})"


def badges(address, file):
    """The badges of a notebook, in Markdown. `file` is its name in the folder notebooks."""
    return " ".join(_badge(address, label, file) for label in _OPENS)


def readdress(text, address):
    """Replace the address in all badges of a Markdown text."""
    return _BADGE.sub(lambda found: _badge(address, found[1], found[3]) if found[1] in _OPENS else found[0], text)


def linked(text):
    """Turn the badges of a Markdown text into plain links, which load no picture from elsewhere."""
    return _BADGE.sub(r"[\1](\2\3)", text)


def links(text):
    """Find the badges of a Markdown text. Returns {label: address of the page that it opens}."""
    return {label: folder + file for label, folder, file in _BADGE.findall(text)}


def update(notebook, address, file):
    """Write the address into a notebook: the badges under its title, and its setup cell, the first with code.

    Args:
        notebook: the dict that its JSON holds. No cell needs to run again.
        address: the repository's, as `address` returns it.
        file: the notebook's name in the folder notebooks.

    Returns:
        The new notebook, as a dict.

    Raises:
        ValueError: it doesn't start with a title, or its first code cell isn't the setup cell.
    """
    cells = list(notebook["cells"])
    title, end, rest = "".join(cells[0]["source"]).partition("\n")
    if cells[0]["cell_type"] != "markdown" or not title.startswith("# "):
        raise ValueError(f"{file} doesn't start with a title")
    place = next((i for i, cell in enumerate(cells) if cell["cell_type"] == "code"), 0)
    if 'find_spec("qk")' not in "".join(cells[place]["source"]):
        raise ValueError(f"the first code cell of {file} isn't the setup cell")
    first, _, others = (rest := rest.lstrip("\n")).partition("\n\n")
    body = rest if _BADGE.sub("", first).strip() else others
    sources = {0: f"{title}\n\n{badges(address, file)}\n\n{body}".rstrip("\n"), place: setup_source(address)}
    for i, source in sources.items():
        cells[i] = cells[i] | {"source": source.splitlines(keepends=True)}
    return notebook | {"cells": cells}
