"""The kernels that notebooks grow version by version, taken out of them, to be measured beside the package's."""

import ast
import json
import runpy
import tempfile
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def functions_of(notebook):
    """{name: function} of a notebook's functions and kernels; nothing of it runs but imports and definitions."""
    parts = []
    for cell in json.loads((NOTEBOOKS / notebook).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom):
                    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
                    parts.append("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{Path(notebook).stem}.py")  # Triton reads a kernel's source from its file
        file.write_text("\n\n\n".join(parts), encoding="utf-8")
        return runpy.run_path(str(file))
