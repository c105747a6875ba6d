"""Write one notebook that carries the package: `python -m qk export notebooks/03_scaled_int8_gemm.ipynb out.ipynb`.

The new notebook needs no clone, no installed qk and no network. Folded cells near its top write the package's files
into a folder `qk` next to it: code as text that can be read and edited, data as base64.

    title | what the folded cells are | how files are written | %%package_file qk/__init__.py ... | the data | the rest

Its metadata asks Colab for a T4 GPU, and Kaggle for one with the internet off.

    python -m qk export --pictures notebooks/images notebooks/*.ipynb

writes the README's figures instead: the images of the cells tagged "readme", as <notebook>.png, <notebook>_2.png ...

    python -m qk export --badges

writes the repository's address, a line of pyproject.toml, into the course: see badges.py.

The first two overwrite only an export that nobody has changed since (its metadata holds a hash), unless --force is set.
"""

import argparse
import hashlib
import json
import lzma
import re
import sys
from base64 import b64decode, encodebytes
from pathlib import Path

from qk.course import badges

PACKAGE = Path(__file__).parents[1]
# JupyterLab, Colab and Kaggle each have their own key for a cell whose code is folded
_FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form", "_kg_hide-input": True}
_METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kaggle": {
        "accelerator": "nvidiaTeslaT4",
        "dataSources": [],
        "isGpuEnabled": True,
        "isInternetEnabled": False,
        "language": "python",
        "sourceType": "notebook",
    },
}
# large files, and what a notebook that needs them calls
_LARGE = {"austen.safetensors": "language_model("}
_ABOUT = """\
## This copy carries its package

You don't need to download anything: the folded cells below write the package `qk`, code and data, into a folder next to this notebook. Open one to read a kernel, or to change it: then restart the kernel and run all cells. If you change a file in that folder instead, the cells leave it alone and tell you.\
"""  # noqa: E501 (a paragraph of Markdown)
# A new file replaces the old one. Writing into the old one could change what another notebook has mapped into memory.
_WRITER = '''\
import hashlib
import json
import os
from base64 import b64decode
from lzma import decompress
from pathlib import Path

RECORD = Path("qk/written-by-a-notebook.json")  # {file: hash of what a notebook wrote}
if not RECORD.exists():
    if Path("qk").exists():
        raise FileExistsError("The folder qk next to this notebook isn't from a notebook. Move this one elsewhere.")
    RECORD.parent.mkdir()
    RECORD.write_text("{}")


def package_file(path, content):
    """Write a file of the package, unless somebody has changed it since a notebook wrote it."""
    content = content.encode() if isinstance(content, str) else content
    file, digest = Path(path), hashlib.sha256(content).hexdigest()
    written = json.loads(RECORD.read_text())
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() not in (digest, written.get(path)):
        raise FileExistsError(f"You have changed {path}. Copy your change into this cell, delete the file, run again.")
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, new in ((path, content), (RECORD, json.dumps(written | {path: digest}).encode())):
        Path(f"{name}.{os.getpid()}").write_bytes(new)
        os.replace(f"{name}.{os.getpid()}", name)


get_ipython().register_magic_function(package_file, "cell")\
'''
_BINARY = '''\
package_file("{path}", decompress(b64decode("""
{text}""")))\
'''


def package_files(notebook=None):
    """Read the package's code and data. Returns {path next to a notebook: bytes}.

    Args:
        notebook: the dict of a notebook. Large files that its code doesn't ask for are left out. None: all files.
    """
    code = {path for init in PACKAGE.rglob("__init__.py") for path in init.parent.glob("*.py")}
    data = {path for path in PACKAGE.glob("data/*") if path.is_file()}
    if notebook is not None:
        cells = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
        data -= {PACKAGE / "data" / name for name, function in _LARGE.items() if function not in cells}
    return {path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes() for path in sorted(code | data)}


def _source(path, content):
    """Return the source of a cell that writes a file."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    # the text that a cell magic receives ends with one newline, isn't empty, and has one kind of line ending
    if re.fullmatch(r"[^\r]*[^\r\n]\n", text):
        return f"%%package_file {path}\n{text[:-1]}"
    return _BINARY.format(path=path, text=encodebytes(lzma.compress(content)).decode())


def _cell(kind, name, source, **metadata):
    cell = {"cell_type": kind, "id": re.sub(r"\W", "-", name), "metadata": metadata}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": source.splitlines(keepends=True)}


def _is_packed(cell):
    """Return whether an export has put the cell there."""
    return str(cell.get("id")).startswith("pack-")


def _digest(notebook):
    """Return a hash of all that a notebook holds, except the hash in an export's metadata."""
    metadata = {name: value for name, value in notebook["metadata"].items() if name != "qk"}
    return hashlib.sha256(json.dumps(notebook | {"metadata": metadata}, sort_keys=True).encode()).hexdigest()


def export(notebook):
    """Add cells to a notebook that write the package's files before it uses them.

    Args:
        notebook: the dict that its JSON holds. If it is an export, its packed files are replaced.

    Returns:
        The new notebook, as a dict.
    """
    sources = {"writer": _WRITER} | {path: _source(path, content) for path, content in package_files(notebook).items()}
    cells = [_cell("code", f"pack-{name}", source, **_FOLDED) for name, source in sources.items()]
    own = [cell for cell in notebook["cells"] if not _is_packed(cell)]
    about = _cell("markdown", "pack-about", _ABOUT)
    new = notebook | {"cells": [*own[:1], about, *cells, *own[1:]], "metadata": notebook["metadata"] | _METADATA}
    new["metadata"]["qk"] = {"exported_sha256": _digest(new)}
    return new


def pictures(notebook):
    """Yield the PNG images in the outputs of cells tagged "readme", in order."""
    for cell in notebook["cells"]:
        if "readme" in cell["metadata"].get("tags", []):
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    yield b64decode("".join(output["data"]["image/png"]))


def _is_text(value):
    """Return whether a JSON value is a text, in one piece or as a list of lines."""
    return isinstance(value, str) or isinstance(value, list) and all(isinstance(line, str) for line in value)


def _is_output(output):
    if not isinstance(output, dict) or not _is_text(output.get("text", "")):
        return False
    data, metadata = output.get("data", {}), output.get("metadata", {})
    if not isinstance(data, dict) or not isinstance(metadata, dict):
        return False
    return all(kind.endswith("json") or _is_text(value) for kind, value in data.items())


def _is_png(output):
    """Return whether an output's PNG image, if it has one, is valid."""
    if "image/png" not in output.get("data", {}):
        return True
    try:
        png = b64decode("".join(output["data"]["image/png"]))
    except ValueError:
        return False
    return png.startswith(b"\x89PNG\r\n\x1a\n") and isinstance(output.get("metadata", {}).get("image/png", {}), dict)


def _broken_part(cell):
    """Return the name of a cell's first part that is missing or invalid, or None."""
    if not isinstance(cell, dict):
        return "content"
    cell = {"outputs": []} | cell
    for name, kind in {"cell_type": str, "source": str | list, "metadata": dict, "outputs": list}.items():
        if not isinstance(cell.get(name), kind):
            return name
    if not _is_text(cell["source"]):
        return "source"
    if not all(map(_is_output, cell["outputs"])):
        return "outputs"
    if not all(map(_is_png, cell["outputs"])):
        return "PNG image"
    return None if isinstance(cell["metadata"].get("tags", []), list) else "tags"


def read(path):
    """Read a notebook.

    Returns:
        The dict that its JSON holds.

    Raises:
        ValueError: there is no such file, or it isn't a notebook of format 4.5 or newer.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        version = notebook["nbformat"], notebook["nbformat_minor"]
        is_known = (4, 5) <= version < (5, 0)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{str(path)!r} isn't a notebook") from None
    if not is_known:
        raise ValueError(f"{str(path)!r} is of format {version[0]}.{version[1]}, but must be of 4.5 or newer")
    if not isinstance(notebook.get("metadata"), dict):
        raise ValueError(f"{str(path)!r} isn't a notebook: it has no metadata")
    if not isinstance(notebook.get("cells"), list) or not notebook["cells"]:
        raise ValueError(f"{str(path)!r} is empty: it has no cells")
    for number, cell in enumerate(notebook["cells"], 1):
        if part := _broken_part(cell):
            raise ValueError(f"{str(path)!r} isn't a notebook: its cell {number} has no valid {part}")
    return notebook


def _why_kept(path):
    """Return why an existing file must not be overwritten, or None if it is an unchanged export."""
    try:
        notebook = read(path)
        recorded = notebook["metadata"]["qk"]["exported_sha256"]
    except (ValueError, KeyError, TypeError):
        return "isn't an export"
    return None if recorded == _digest(notebook) else "was changed since it was exported, and may hold your answers"


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m qk export",
        description="Write one notebook that carries the package qk in its cells, so that it runs on Colab or Kaggle "
        "without installing anything. With --pictures or --badges, write the README's figures or the badges instead.",
    )
    parser.add_argument(
        "paths", nargs="*", metavar="NOTEBOOK", help="the notebook to read, and the .ipynb file to write"
    )
    parser.add_argument(
        "--pictures",
        metavar="FOLDER",
        help='write the figures of cells tagged "readme" there instead, as PNG files; takes any number of notebooks',
    )
    parser.add_argument(
        "--badges",
        action="store_true",
        help="write the repository's address (from pyproject.toml) into this clone's notebooks (badges and setup "
        "cells) and README instead; takes no notebooks",
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite files even if they contain something else or your own work"
    )
    return parser


def main(argv=None):
    """Run the command line. Return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.badges:
            if args.paths or args.pictures:
                raise ValueError("--badges takes no notebooks and no other option: it is for all of this clone's")
            _write_badges(PACKAGE.parent)
        elif args.pictures:
            _write_pictures(args.paths, Path(args.pictures), args.force)
        elif len(args.paths) == 2:
            _write_export(*map(Path, args.paths), args.force)
        else:
            raise ValueError(f"expected two paths, a notebook and the new one to write; got {len(args.paths)}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _text(notebook):
    """Return a notebook as the bytes of a file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False).encode() + b"\n"


def _write_export(source, out, force):
    notebook = read(source)
    if out.suffix != ".ipynb":
        raise ValueError(f"the new notebook is {str(out)!r}, but its name must end in .ipynb")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {str(out.parent)!r}")
    if out.exists():
        if out.samefile(source):
            raise ValueError(f"{str(out)!r} is the notebook itself: give another name for the new one")
        if not force and (why := _why_kept(out)):
            raise ValueError(f"{str(out)!r} {why}: give another name for the new notebook, or --force")
    new = export(notebook)
    text, count = _text(new), sum(map(_is_packed, new["cells"])) - 2  # all of it, before the file is opened
    out.write_bytes(text)
    print(f"{out}: {len(text) / 1e6:.1f} MB, with {count} files of qk in it")


def _write_pictures(notebooks, folder, force):
    if not notebooks:
        raise ValueError("--pictures takes notebooks")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    files = {}
    for path in map(Path, notebooks):
        for number, png in enumerate(pictures(read(path)), 1):
            file = folder / f"{path.stem}{f'_{number}' if number > 1 else ''}.png"
            if file in files:
                raise ValueError(f"two pictures would have the name {str(file)!r}: give the notebooks one by one")
            files[file] = png
    for file, png in files.items():
        if file.exists() and not force and not (file.is_file() and file.read_bytes() == png):
            raise ValueError(f"{str(file)!r} is another picture or file: give another folder, or --force")
    for file, png in files.items():
        file.write_bytes(png)
        print(f"{file}: {len(png):,} bytes")


def _write_badges(root):
    if not (root / "pyproject.toml").is_file():
        raise ValueError(f"--badges is for a clone, but {str(root)!r} has no pyproject.toml")
    address = badges.address((root / "pyproject.toml").read_text(encoding="utf-8"))
    files = {}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = badges.update(read(path), address, path.name)
        # opened from a badge, it has to install its package
        metadata = notebook["metadata"] | _METADATA | {"kaggle": _METADATA["kaggle"] | {"isInternetEnabled": True}}
        files[path] = _text(notebook | {"metadata": dict(sorted(metadata.items()))})
    if (root / "README.md").is_file():
        text = (root / "README.md").read_text(encoding="utf-8")
        files[root / "README.md"] = badges.readdress(text, address).encode()
    changed = {path: new for path, new in files.items() if path.read_bytes() != new}
    for path, new in changed.items():
        path.write_bytes(new)
    print(f"{address}: {len(changed)} of {len(files)} files changed")


if __name__ == "__main__":
    sys.exit(main())
