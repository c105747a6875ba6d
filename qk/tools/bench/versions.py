"""Load the kernels that notebooks develop, version by version, to time them next to the package's."""

import ast
import json
import re
import runpy
import tempfile
from pathlib import Path

_NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
_VERSIONS = {
    "quantize_int4": (
        "01_int4_packing.ipynb",
        ("naive_quantize", "joined_quantize", "tile_quantize", "careful_quantize"),
    ),
    "act_quant": (
        "02_block_quantization.ipynb",
        ("naive_act_quant", "exact_act_quant", "tile_act_quant", "ragged_act_quant"),
    ),
    "dequant_bias": ("05_dequant_bias_memory.ipynb", ("naive", "held_rows")),
    "quant_slide": ("06_sparse_chain.ipynb", ("naive",)),
    "int4_gemm": ("07_int4_gemm.ipynb", ("naive_gemv", "magic_gemv", "pairs_gemv", "split_by")),
    "int4_gemm int8": (
        "07_int8_activations.ipynb",
        ("dequantized_gemm", "shifted_gemm", "sixteenfold_gemm", "staged_gemm", "tiled_gemm"),
    ),
}
_SOLUTION = re.compile(r"<summary>Solution.*?```python\n(.*?)```", re.DOTALL)


def grown():
    """Return {operation: [(version, function), ...]} for the notebooks that are found."""
    found = {}
    for op, (notebook, names) in _VERSIONS.items():
        if (_NOTEBOOKS / notebook).exists():
            functions = _functions_of(notebook)
            found[op] = [(name.partition("_")[0], functions[name]) for name in names]
    return found


def _functions_of(notebook):
    """Return a notebook's functions and kernels as {name: function}. Only its imports and definitions run.

    Solutions of exercises replace their stubs.
    """
    parts = []
    for cell in json.loads((_NOTEBOOKS / notebook).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = "\n".join(_SOLUTION.findall(source))
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom):
                first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
                parts.append("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{Path(notebook).stem}.py")  # Triton reads a kernel's source from its file
        file.write_text("\n\n\n".join(parts), encoding="utf-8")
        return runpy.run_path(str(file))
