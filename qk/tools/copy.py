"""Copy a kernel into a file of your own: `python -m qk copy act_quant --out act_quant.py`.

The file is what you would write by hand: the kernel, the helpers that it uses, a checked function that launches it, and
its reference. It imports torch and Triton only, runs compiled or with TRITON_INTERPRET=1, with the package's bits.

    python -m qk copy --list                                  what can be copied
    python -m qk copy act_quant                               print it
    python -m qk copy int8_gemm --arch sm90 --out gemm.py     a GEMM for one instruction set
    python -m qk copy int8 gelu --full --out kernels.py       whole files, with operators and torch.compile support
    python -m qk copy act_quant --hub act-quant               a folder for Hugging Face `kernels`: see hub.py
"""

import argparse
import ast
import functools
import importlib
import inspect
import io
import itertools
import keyword
import re
import sys
import textwrap
import tokenize
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from . import hub
from .simplify import Known, Places, first_line, replaced, simplified

PACKAGE = Path(__file__).parents[1]
MODULES = ("int4", "gemm_int4", "int8", "hadamard", "gelu", "norm", "linear.dequant", "linear.sparsity",
           "kv_cache", "gemm", "linear")  # fmt: skip
WIDTH = 120


class _Item(NamedTuple):
    """A statement at the top level of a module."""

    text: str  # with the comments above it
    binds: set  # the names that it defines
    uses: set
    blank: int  # lines before it
    defines: bool  # a function or a class
    node: ast.stmt


class _Module(NamedTuple):
    docstring: str
    public: list  # __all__
    items: list
    relative: dict  # {name: the module that it is imported from}
    absolute: dict  # {name: the statement that imports it}


def _bound(node):
    """Return the names that a statement defines at the top level, in any of its branches."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)
            for name in _bound(child)}  # fmt: skip


def _import_of(node, alias):
    renamed = f" as {alias.asname}" if alias.asname else ""
    return f"{'import' if isinstance(node, ast.Import) else f'from {node.module} import'} {alias.name}{renamed}"


def _path(module):
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _absolute_name(module, node):
    """Return the module in qk that a relative import names."""
    parts = module.split(".") if _path(module).name == "__init__.py" else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module])


@functools.cache
def _module(name):
    source = _path(name).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    found = _Module(ast.get_docstring(tree), [], [], {}, {})
    end = tree.body[0].end_lineno
    for node in tree.body[1:]:
        first = first_line(node, lines)
        blank, end = min(first - 1 - end, 2), node.end_lineno
        if isinstance(node, ast.ImportFrom) and node.level:
            found.relative.update({alias.name: _absolute_name(name, node) for alias in node.names})
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.absolute.update({alias.asname or alias.name: _import_of(node, alias) for alias in node.names})
        elif _bound(node) == {"__all__"}:
            found.public.extend(ast.literal_eval(node.value))
        else:
            uses = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
            found.items.append(_Item("".join(lines[first - 1 : end]), _bound(node), uses, blank, defines, node))
    return found


def functions():
    """Return {public function: its module}, without the references."""
    return {name: module for module in MODULES for name in _module(module).public if not name.endswith("_ref")}


def _needed(roots, read):
    """Find what the roots, pairs (module, name), need: {module: numbers of its items}. read(module) is a _Module."""
    needed, waiting = {}, list(roots)
    while waiting:
        where, name = waiting.pop()
        module = read(where)
        if name in module.relative:
            waiting.append((module.relative[name], name))
            continue
        first = where not in needed
        taken = needed.setdefault(where, set())
        for i, item in enumerate(module.items):
            # a statement that defines nothing, such as the Triton version check, belongs to all of its module
            if i not in taken and (name in item.binds or (first and not item.binds)):
                taken.add(i)
                waiting.extend((where, use) for use in item.uses)
    return {where: sorted(taken) for where, taken in needed.items() if taken}


def _ordered(needed):
    """Sort modules, each after those that it imports from."""
    order = []

    def visit(where):
        if where not in order:
            for other in sorted(set(_module(where).relative.values())):
                visit(other)
            order.append(where)

    for where in sorted(needed, key=lambda where: (MODULES.index(where) if where in MODULES else -1, where)):
        visit(where)
    return [where for where in order if where in needed]


def _renamed(text, names):
    """Rename names in Python text, but not attributes. An imported name is renamed by `as`."""

    def inside(braces):
        return re.sub(r"(?<![.\w])\w+", lambda found: names.get(found[0], found[0]), braces[0])

    lines, before, importing = text.splitlines(keepends=True), "", False
    edits = []
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        importing = token.string == "import" or importing and token.type != tokenize.NEWLINE
        if token.type == tokenize.NAME and token.string in names and before != ".":
            name = names[token.string]
            if importing and before != "as":
                name = token.string if after.string == "as" else f"{token.string} as {name}"
            edits.append((*token.start, token.end[1], name))
        elif token.type == tokenize.STRING and token.string[0] == "f":  # one token, before Python 3.12
            edits.append((*token.start, token.end[1], re.sub(r"{[^{}]+}", inside, token.string)))
        before = token.string
    for row, start, end, name in reversed(edits):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + name + line[end:]
    return "".join(lines)


def _clashes(modules, needed, read):
    """Find new names, {module: {name: new one}}, for those that an earlier module of the file defines too."""
    taken, renamed = set(), {}
    for where in modules:
        bound = {name for i in needed[where] for name in read(where).items[i].binds}
        parts, names = where.split("."), {}
        for name in sorted(bound & taken):
            suffixes = (part.upper() if name.isupper() else part for part in (parts[-1], "_".join(parts)))
            names[name] = next(each for each in (f"{name}_{suffix}" for suffix in suffixes) if each not in taken)
        renamed[where] = names
        taken |= bound | set(names.values())
    return renamed


def _import_section(statements):
    """Sort import statements as ruff does."""
    named = {}
    for statement in statements:
        if statement.startswith("from "):
            module, name = statement[5:].split(" import ")
            named.setdefault(module, []).append(name)
    plain = sorted(statement for statement in statements if statement.startswith("import "))
    for module, names in sorted(named.items()):
        line = f"from {module} import {', '.join(sorted(names, key=_import_order))}"
        if len(line) > WIDTH:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"
        plain.append(line)
    standard = [line for line in plain if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    others = [line for line in plain if line not in standard]
    return "\n\n".join("\n".join(section) for section in (standard, others) if section)


def _import_order(name):
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _origin(modules, command):
    try:
        package = f"qk {version('qk')}"
    except PackageNotFoundError:
        package = "qk"
    files = ", ".join(f"qk/{_path(where).relative_to(PACKAGE).as_posix()}" for where in modules)
    text = f"From {package}, by `python -m qk copy {command}`, out of {files}. Licence: Apache-2.0."
    return textwrap.fill(text, WIDTH - 1, initial_indent="# ", subsequent_indent="# ")


def _body(where, numbers, names):
    """Return the text of a module's items, with the blank lines between them."""
    text, before = "", None
    for i in numbers:
        item = _module(where).items[i]
        blank = item.blank
        if before is None:
            blank = 2
        elif before != i - 1:
            blank = 2 if item.defines or _module(where).items[before].defines else 1
        text += "\n" * blank + (_renamed(item.text, names) if names else item.text)
        before = i
    return text


def public_functions(names, whole):
    """Return the public functions that these names stand for, or raise ValueError.

    Args:
        names: of both kinds.
        whole: whether `hadamard`, which is both a file and a function in it, means the file.
    """
    known, public = functions(), []
    for name in names:
        found = [function for function, where in known.items() if name in (function, where, where.split(".")[-1])]
        found = [name] if name in known and not whole else found
        if not found:
            raise ValueError(f"there is no kernel or file {name!r}; python -m qk copy --list shows what there is")
        public += [function for function in found if function not in public]
    return public


def _all(public):
    names = sorted([*public, *(f"{name}_ref" for name in public)])
    line = f"__all__ = [{', '.join(map(_quoted, names))}]\n"
    if len(line) <= WIDTH + 1:
        return line
    return "__all__ = [\n" + "".join(f"    {_quoted(name)},\n" for name in names) + "]\n"


def _quoted(name):
    return f'"{name}"'


def full(*names):
    """Return a file with operators, torch.compile support and the fast launch, or raise ValueError.

    Args:
        names: of MODULES, or of public functions.
    """
    known, public = functions(), public_functions(names, True)
    needed = _needed([(known[name], each) for name in public for each in (name, f"{name}_ref")], _module)
    modules = _ordered(needed)
    renamed = _clashes(modules, needed, _module)
    asked = [where for where in MODULES if where in {known[name] for name in public}]
    docstring = "\n\n\n".join(_module(where).docstring for where in asked)
    body = "".join(_body(where, needed[where], renamed[where]) for where in modules)
    head = f'{_origin(modules, " ".join([*names, "--full"]))}\n"""{docstring}\n"""\n\n'
    return f"{head}{_import_section(_used(body, modules, _module))}\n\n{_all(public)}{body}"


def to_hub(names, folder, force=False):
    """Write a folder that Hugging Face `kernels` can load, with a full copy. See `hub.write`."""
    return hub.write(folder, full(*names), public_functions(names, True), names, force)


# In place of the package's own. A copy launches as Triton documents it, and its checks say less.
_LAUNCH = '''
def launch(device, kernel, grid, *args, **options):
    """Run a kernel on a GPU, or in Triton's interpreter, where numpy would warn of Inf - Inf."""
    with triton.runtime.interpreter.np.errstate(all="ignore") if INTERPRETED else torch.cuda.device(device):
        # multiply and add are fused only where the kernel calls tl.fma, so every GPU returns the same bits
        kernel[grid](*args, enable_fp_fusion=False, **options)
'''
_TEMPORARY = """
def temporary(x, shape, dtype):
    return x.new_empty(shape, dtype=dtype)
"""
_CHECK_SHAPE = """    if shape is not None and not _fits(x, shape):
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {shape}")
"""
_CHECK_DTYPE = """    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype not in dtypes:
        got = f"{x.layout} tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name} is a {got}; expected a dense tensor of {' or '.join(map(str, dtypes))}")
"""
_CHECK_DATA = f'''
def check_data(name, x, dtypes, shape=None):
    """Check a tensor on any device."""
{_CHECK_DTYPE}{_CHECK_SHAPE}'''
_CHECK_TENSOR = f'''
def check_tensor(name, x, dtypes, shape=None, like=None):
    """Check a tensor that a kernel reads."""
{_CHECK_DTYPE}{_CHECK_SHAPE}    if x.device.type != "cuda" and not (INTERPRETED and x.device.type == "cpu"):
        raise ValueError(f"{{name}} is on {{x.device}}; expected a CUDA tensor, or a CPU tensor if TRITON_INTERPRET=1")
    if like is not None and x.device != like[1].device:  # the name of another argument, and that tensor
        raise ValueError(f"{{name}} is on {{x.device}}; expected {{like[0]}}'s device, {{like[1].device}}")
'''
_CHECK_ONE_OF = '''
def check_one_of(name, value, choices, note=""):
    """Check that an argument is one of a few values, and of the same type: to Python, True == 1."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(repr, choices))}{note}")
'''
_VERSION = """
if triton.__version__.startswith("3.4."):
    raise ImportError("Triton 3.4 miscompiles these kernels: it merges the two results of tl.split")
"""
_TEMPLATES = {
    ("core.launch", "launch"): _LAUNCH,
    ("core.launch", "temporary"): _TEMPORARY,
    ("core.checks", "check_data"): _CHECK_DATA,
    ("core.checks", "check_tensor"): _CHECK_TENSOR,
    ("core.checks", "check_one_of"): _CHECK_ONE_OF,
    ("core.checks",): _VERSION,
    ("gemm_int4", "_ACTIVATIONS"): "_ACTIVATIONS = (torch.float16, torch.bfloat16)\n",
}
# Helpers written for faster launches. In a copy, Triton's own equivalents will do.
_RENAMED = {"INTERPRETING": "INTERPRETED", "cdiv": "triton.cdiv", "next_power_of_2": "triton.next_power_of_2"}
_CLEARER = {"divide": "div_rn_of_normals"}  # names that say more to a reader who sees one kernel only
# Operators with one scale per row, which exists even if rows have no columns. Outputs of others are empty together.
_PER_ROW = ("_quantize_int4", "_quantize_per_token", "_quant_slide", "_rms_norm_quant", "_add_rms_norm_quant",
            "_swiglu_quant")  # fmt: skip


class _Plan(NamedTuple):
    """What a short copy of some functions leaves out."""

    pins: dict  # {parameter of a public function: its only value}
    dropped: tuple = ()  # functions that only the left-out modes call
    word: str = ""  # docstrings lose the sentences that contain it
    elsewhere: dict = {}  # {arch: as `word`, about other GPUs}
    fields: bool = False  # whether attributes of these names, such as a problem's, have the same values


_PLANS = {
    "int8": _Plan({"evens_first": False}),  # what int4_gemm reads on Hopper
    "core.checks": _Plan({"evens_first": False}),
    "norm": _Plan({"evens_first": False, "scale_layout": "row"}),
    "gemm": _Plan({"path": None, "exact": True}, elsewhere={"sm75": "Hopper", "sm80": "Hopper"}),
    "gemm_int4": _Plan(
        {"x_scale": None, "block_size": None, "zero_point": None, "evens_first": False},
        dropped=("_check_int8", "_unpack_int8"),
        word="int8|x_scale|zero_point",
        elsewhere={
            "sm75": "K is split|512 tokens|Hopper|Below compute",
            "sm80": "512 tokens|Hopper|Below compute",
            "sm90": "Below compute",
        },
        fields=True,
    ),
    "int4": _Plan({"zero_point": None}),
    "kv_cache": _Plan({"tile": None, "arch": 86}, fields=True),
    "gelu": _Plan({}, dropped=("_launch_square", "_squares", "_has_squares", "quantize_squares_ref"), word="quare"),
}


def _without_package(text, pinned):
    """Make launches wait for the previous kernel; drop replays, and checks of arguments that have one value only."""
    text = re.sub(r"\bearly=(?!None)[^,\n]+(,[^#\n]*?)(?:  #.*)?$", r"EARLY=False\1", text, flags=re.M)
    text = re.sub(r"^@replayed\(.*\)\n", "", text, flags=re.M)
    names = "|".join(pinned) or "(?!)"
    return re.sub(rf'^ +check_one_of\("({names})",.*\n', "", text, flags=re.M)


def _plain_operator(text, checks):
    """Turn an operator of the package into a function that allocates its outputs and fills them.

    checks: {name of a function: how many parameters it has, besides `*_`}.
    """
    places = Places(text)
    node = places.tree.body[0]
    decorator = node.decorator_list[0]
    arguments = [each.arg for each in node.args.args if each.annotation is not None]
    outputs = [each.arg for each in node.args.args if each.annotation is None]
    options = {each.arg: each.value for each in decorator.keywords}
    check = options.get("check")
    lines, start = text.split("\n"), node.body[0].lineno - 1
    body = node.body[ast.get_docstring(node) is not None :]
    head = [f"def {node.name}({', '.join(arguments)}):", *lines[start : body[0].lineno - 1]]
    rest = lines[body[0].lineno - 1 : node.end_lineno]
    if len(head[0]) > WIDTH:
        inner = textwrap.wrap(", ".join(arguments) + ",", WIDTH - 2, initial_indent="    ", subsequent_indent="    ")
        head[:1] = [f"def {node.name}(", *inner, "):  # fmt: skip"]
    if isinstance(check, ast.Lambda):
        head.append(f"    {places.segment(check.body)}")
    elif check is not None:
        head.append(f"    {check.id}({', '.join(arguments[: checks[check.id]])})")
    if "fills" in options:
        return "\n".join([*head, *rest]) + "\n"
    head.append(f"    {', '.join(outputs)} = {decorator.args[0].id}({', '.join(arguments)})")
    if any(isinstance(each, ast.Return) for part in body for each in ast.walk(part)):
        into = f"{node.name}_into"
        first = f"def {into}({', '.join([*arguments, *outputs])}):"
        head += [f"    if {outputs[0]}.numel():", f"        {into}({', '.join([*arguments, *outputs])})"]
        head.append(f"    return {', '.join(outputs)}")
        return "\n".join([first, *rest, "", "", *head]) + "\n"
    head += [f"    if {outputs[0]}.numel():", *(f"    {line}" if line else line for line in rest)]
    if node.name in _PER_ROW:
        head += ["    else:", f"        {outputs[1]}.zero_()  # a row without columns has one scale, 0"]
    return "\n".join([*head, f"    return {', '.join(outputs)}"]) + "\n"


def _is_operator(node):
    """Whether a statement is a function that `core.operators.operator` decorates."""
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(each, ast.Call) and getattr(each.func, "id", "") == "operator" for each in node.decorator_list
    )


@functools.cache
def arches(module):
    """Return {instruction set: (name of its `supports`, name of its `run`)} for a GEMM's module, else {}."""
    for node in ast.parse(_path(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and _bound(node) == {"IMPLEMENTATIONS"}:
            named = {each.args[0].value: (each.args[1], each.args[-1]) for each in node.value.elts}
            named["sm80"] = named["portable"]
            named = {name: each for name, each in named.items() if re.fullmatch(r"sm\d+", name)}
            return {name: [getattr(each, "id", None) for each in named[name]] for name in sorted(named)}
    return {}


def _capability(arch):
    return int(arch[2:-1]), int(arch[-1])


def _direct(text, module, arch):
    """Replace a GEMM's choice among implementations by a call of the one for an instruction set."""
    places = Places(text)
    for node in ast.walk(places.tree):
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", getattr(call.func, "id", "")) != "run":
            continue
        supports, run = arches(module)[arch]
        given, first = ", ".join(map(places.segment, call.args)), places.segment(call.args[0])
        device = f"torch.cuda.get_device_capability({'x' if first == 'x' else f'{first}.out'}.device)"
        exactly = arch == "sm90"  # instructions that no other GPU has
        takes = f"of capability {'.'.join(map(str, _capability(arch)))}{'' if exactly else ' or more'}"
        unfit = f"{device} {'!=' if exactly else '<'} {_capability(arch)}"
        unfit = f"not INTERPRETED and {unfit}" if arch == "sm80" else unfit
        indent = "\n" + " " * node.col_offset
        new = f"if {unfit}:{indent}    raise ValueError({_quoted(f'these kernels are for GPUs {takes}')}){indent}"
        if supports and arch != "sm80":
            refusal = _quoted(f"{arch}'s kernel can't multiply these operands")
            new += f"if not {supports}({first}):{indent}    raise ValueError({refusal}){indent}"
        edits = [(*places.at(node), f"{new}{run}({given})")]
        for each in ast.walk(places.tree):
            if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", "") == "run":
                start, end = places.at(each)
                edits.append((start - each.col_offset, end + 1, ""))
        return replaced(text, edits)
    return text


def _compiled(text):
    """Return a text for kernels with inline assembly, which Triton's interpreter doesn't run."""
    for said in (
        ", or a CPU tensor if TRITON_INTERPRET=1",
        ", or in Triton's interpreter, where numpy would warn of Inf - Inf",
        " The interpreter counts as capability 8.0.",
    ):
        text = text.replace(said, "")
    return _renamed(text.replace(" and not INTERPRETED.value", ""), {"INTERPRETED": "False"})


def _opened(item):
    """Yield the statements of a `try` as items. It succeeds wherever such a copy can run."""
    lines = item.text.split("\n")
    for node in ast.parse(item.text).body[0].body:
        text = textwrap.dedent("\n".join(lines[first_line(node, lines) - 1 : node.end_lineno])) + "\n"
        yield item._replace(text=text, binds=_bound(node), node=ast.parse(text).body[0])


@functools.cache
def _plain_module(name, arch):
    """Return a module without operators and early launches, and with this file's plain launch and checks."""
    module = _module(name)
    items = []
    defined = [item.node for item in module.items if isinstance(item.node, ast.FunctionDef)]
    checks = {node.name: len(node.args.args) for node in defined}
    relative, absolute = dict(module.relative), dict(module.absolute)
    opens = arch == "sm90" and name == "core.gluon"
    parts = [_opened(item) if opens and isinstance(item.node, ast.Try) else [item] for item in module.items]
    for item in itertools.chain(*parts):
        if isinstance(item.node, ast.Import | ast.ImportFrom):
            absolute |= {alias.asname or alias.name: _import_of(item.node, alias) for alias in item.node.names}
            continue
        text = next((_TEMPLATES[key] for key in _TEMPLATES if key[0] == name and item.binds == set(key[1:])), item.text)
        if item.binds & _RENAMED.keys():
            continue
        text = text.lstrip("\n")
        text = _without_package(text, _PLANS.get(name, _Plan({})).pins)
        if arches(name):
            text = _direct(text, name, arch)
        if _is_operator(item.node):
            text = _plain_operator(text, checks)
        text = re.sub(r"^(def \w+[(].*), [*]_[)]:", r"\1):", text, flags=re.M)  # what a check takes and ignores
        text = _renamed(text, _RENAMED | _CLEARER)
        if arch != "sm80":
            if item.binds == {"INTERPRETED"}:
                continue
            text = _compiled(text)
        tree = ast.parse(text)
        uses = {inner.id for inner in ast.walk(tree) if isinstance(inner, ast.Name)}
        binds = {_CLEARER.get(name, name) for name in item.binds}
        items.append(item._replace(text=text, binds=binds, uses=uses, node=tree.body[-1]))
    relative["INTERPRETED"] = "core.numerics"
    if name == "core.numerics":
        del relative["INTERPRETED"]
    return module._replace(items=items, relative=relative, absolute=absolute)


def _given(modules):
    """Return the (function, parameter) of operators that are never None, by their annotations."""
    known = set()
    for where in modules:
        for item in _module(where).items:
            if _is_operator(item.node):
                for each in item.node.args.args:
                    if each.annotation is not None and "None" not in ast.unparse(each.annotation):
                        known |= {(name, each.arg) for name in (item.node.name, f"{item.node.name}_into")}
                        public = getattr(importlib.import_module(f"qk.{where}"), item.node.name.lstrip("_"), None)
                        given = public and inspect.signature(public).parameters.get(each.arg)
                        if given and given.default is not None:
                            known.add((f"{item.node.name.lstrip('_')}_ref", each.arg))
    return known


def _constants(modules, needed, renamed, read):
    """Return {name in the copy: value} of the constants that the items define."""
    found = {}
    for where in modules:
        module = importlib.import_module(f"qk.{where}")
        for i in needed[where]:
            item = read(where).items[i]
            if isinstance(item.node, ast.Assign):
                for name in item.binds:
                    value = getattr(module, name, None)
                    if isinstance(value, dict | int | float | str | tuple) and not isinstance(value, bool):
                        found[renamed[where].get(name, name)] = value
    return found


def short(*names, arch=None):
    """Return a file that is as short as one written by hand, or raise ValueError.

    Args:
        names: of MODULES, or of public functions.
        arch: of the GEMMs' `arches`; None is "sm80", which runs on most GPUs.
    """
    known, public = functions(), public_functions(names, False)
    asked = [where for where in MODULES if where in {known[name] for name in public}]
    for where in asked if arch else ():
        if arch not in arches(where):
            takes = ", ".join(arches(where)) or "None, since only GEMMs have kernels for one instruction set"
            raise ValueError(f"--arch is {arch!r}; for {where}, expected {takes}")
    target = arch or "sm80"

    def read(where):
        return _plain_module(where, target)

    roots = [each for name in public for each in (name, f"{name}_ref")]
    needed = _needed([(known[name.removesuffix("_ref")], name) for name in roots], read)
    modules = _ordered(needed)
    renamed = _clashes(modules, needed, read)
    parts = []
    for where in modules:
        for i in needed[where]:
            text = read(where).items[i].text
            parts.append(_renamed(text, renamed[where]) if renamed[where] else text)
    pins, dropped, words = {}, [], []
    for where in asked:
        plan = _PLANS.get(where, _Plan({}))
        pins |= {(root, name): [value] for root in roots for name, value in plan.pins.items()}
        pins |= {name: [value] for name, value in plan.pins.items()} if plan.fields else {}
        dropped += plan.dropped
        words += [plan.word] if plan.word else []
        words += [plan.elsewhere[target]] if target in plan.elsewhere else []
        parts = [_without_sentences(part, "|".join(words)) for part in parts]
        if arches(where):
            # many GPUs with sm80's instructions have only the shared memory of capability 8.6
            capability = _capability(target.replace("80", "86"))
            pins |= {"capability": [capability], "arch": [10 * capability[0] + capability[1]]}
            pins |= {"scratch": [0]} if target == "sm80" else {}  # many tokens: one kernel, which unpacks in its loop
    constants = _constants(modules, needed, renamed, read)
    verbatim = {name for where in modules if where.startswith("core.") for i in needed[where]
                for name in read(where).items[i].binds}  # fmt: skip
    facts = Known(pins, _given(modules), constants, set(dropped), verbatim)
    text = simplified("\n\n".join(parts), roots, facts)
    text = text if re.search(r"[.]split[(]", text) else text.replace(_VERSION.strip(), "")
    text = _assembled(_laid_out(_without_stale_notes(text, "\n\n".join(parts), "|".join(words))), roots)
    command = " ".join([*names, *(["--arch", arch] if arch else [])])
    head = f'{_origin(asked, command)}\n"""{_about(asked, text)}\n"""\n\n'
    head += f"{_import_section(_used(text, modules, read))}\n\n{_all(public)}"
    between = "" if ast.parse(text).body and isinstance(ast.parse(text).body[0], ast.Assign) else "\n"
    return f"{head}\n{between}{text}"


def _without_sentences(text, words):
    """Remove the sentences that match one of the words, except for those that begin a text."""
    if not words:
        return text
    inside = r"(?:[^.]|[.]\d)*"
    text = re.sub(rf"(?<=[.])\s+(?=[A-Z]){inside}?(?:{words}){inside}[.](?=\s|$)", "\0", text)
    lines = text.split("\n")
    for first in [i for i, line in enumerate(lines) if "\0" in line][::-1]:  # wrap the rest of the paragraph again
        own = re.match(" *", lines[first])[0]
        item = re.match(rf"{own}\w+: ", lines[first])  # the name of a parameter
        indent, last = own + 4 * " " * bool(item), first + 1
        while last < len(lines) and re.match(rf"{indent}(?!\w+: )[^ \"#]", lines[last]):
            if '"""' in lines[last - 1].lstrip(' "'):
                break  # the docstring's end; code follows
            last += 1
        rest = " ".join(line.strip() for line in lines[first:last])
        lines[first:last] = textwrap.wrap(rest, WIDTH, initial_indent=own, subsequent_indent=indent) or [""]
    return "\n".join(lines).replace("\0", "")


def _without_stale_notes(text, before, words):
    """Remove clauses about what the text no longer has from comments on parameters and fields.

    Clauses end with a semicolon. A stale one has one of the words, or a name in capitals that the text had before.
    """
    had, has = ({*re.findall(r"\b[A-Z][A-Z_]+\b", _without_comments(each))} for each in (before, text))
    stale = "|".join(filter(None, (words, *(rf"\b{name}\b" for name in sorted(had - has)))))
    lines = text.split("\n")
    for i, line in enumerate(lines if stale else ()):
        found = re.fullmatch(r"(    [^#\"]*(?:,|: [^#\"=]*(?:=[^#\"]*)?))  # (.*)", line)
        if found:
            clauses = [each for each in found[2].split("; ") if not re.search(stale, each)]
            lines[i] = f"{found[1]}  # {'; '.join(clauses)}" if clauses else found[1]
    return "\n".join(lines)


def _without_comments(text):
    return re.sub(r'"""(?s:.*?)"""|#.*', "", text)


def _laid_out(text):
    """Put each statement on one line if it fits."""
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef):
            text = "\n".join(_packed_header(node, text.split("\n")))
    return _with_short_comments(_refilled(text))


def _with_short_comments(text):
    """Wrap comments again that have become too long."""
    result, rows = [], text.split("\n")
    while rows:
        indent = re.match(r" *(?=# )", rows[0])
        count = 1
        while indent and count < len(rows) and rows[count].startswith(f"{indent[0]}# "):
            count += 1
        block, rows = rows[:count], rows[count:]
        if indent and max(map(len, block)) > WIDTH:
            words = " ".join(row.strip().removeprefix("# ") for row in block)
            block = textwrap.wrap(words, WIDTH, initial_indent=f"{indent[0]}# ", subsequent_indent=f"{indent[0]}# ")
        result += block
    return "\n".join(result)


def _refilled(text):
    """Put statements on one line if they fit, and close the gaps in calls of `launch`."""
    places, lines = Places(text), text.split("\n")
    statements = [each for each in ast.walk(places.tree) if isinstance(each, ast.stmt)]
    for node in sorted(statements, key=lambda each: -each.lineno):
        if hasattr(node, "body") or node.lineno == node.end_lineno:
            continue
        rows = lines[node.lineno - 1 : node.end_lineno]
        bare = [row.removesuffix("  # fmt: skip") for row in rows]
        if any("#" in row for row in bare) or any(_is_long_text(each) for each in ast.walk(node)):
            continue
        skip = rows[-1] != bare[-1]
        joined = re.sub(r"([(\[{]) | (?=[)\]}])", r"\1", " ".join([bare[0], *map(str.strip, bare[1:])]))
        joined = re.sub(r",([)\]}])$", r"\1", joined)
        magic = bare[-2].rstrip().endswith(",") if len(bare) > 1 else False
        if len(joined) <= WIDTH and (skip or not magic):
            lines[node.lineno - 1 : node.end_lineno] = [joined]
        elif skip:
            lines[node.lineno - 1 : node.end_lineno] = _packed(rows)
    return "\n".join(lines)


def _is_long_text(node):
    return isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno


def _packed(rows):
    """Join short rows of arguments."""
    packed = [rows[0]]
    for row in rows[1:]:
        last = packed[-1]
        short = min(len(row), len(last)) < 50 and len(last) + len(row.strip()) < WIDTH - 1
        if len(packed) > 2 and short and last.endswith(",") and row.lstrip()[:1] not in ")]}":
            packed[-1] += " " + row.strip()
        else:
            packed.append(row)
    return packed


def _groups(text, roots):
    """Sort statements for a reader: constants; kernels, and what they call; the same of public functions; the rest."""
    tree = ast.parse(text)
    names = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}

    def reached(nodes, step):
        """Return functions, each before those that it calls: in the order of the calls, or the last one first."""
        found, waiting = [], list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found += [node] if isinstance(node, ast.FunctionDef) else []
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in names]
                calls.sort(key=lambda each: (each.lineno, each.col_offset))
                waiting += [names[each.id] for each in calls[::step]]
        return found

    at_import = reached([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], 1)
    real = reached([names[root] for root in roots[::-1] if not root.endswith("_ref") and root in names], 1)
    in_turn = reached([names[root] for root in roots[::-1] if not root.endswith("_ref") and root in names], -1)
    kernels = reached([node for node in in_turn[::-1] if _is_jit(node)], -1)
    all = reached([names[root] for root in roots[::-1] if root in names], 1)
    first = [node for node in tree.body if node in at_import or not isinstance(node, ast.FunctionDef)]
    host = [node for node in real if node not in kernels]
    groups = [first, kernels, host, [node for node in all if node not in host and node not in kernels]]
    return [groups[0], *([node for node in group if node not in first] for group in groups[1:])]


def _is_jit(node):
    return any("jit" in ast.unparse(each) or "layout_function" in ast.unparse(each) for each in node.decorator_list)


def _packed_header(node, lines):
    """Put a function's header on one line if it fits; else parameters side by side, except those with a comment."""
    last = node.body[0].lineno - 2
    while lines[last].lstrip().startswith("#"):
        last -= 1
    header = lines[node.lineno : last]
    if lines[last] not in ("):", "):  # fmt: skip"):
        return lines
    joined = f"{lines[node.lineno - 1]}{' '.join(map(str.strip, header)).removesuffix(',')}):"
    if "#" not in joined and len(joined) <= WIDTH:
        return [*lines[: node.lineno - 1], joined, *lines[last + 1 :]]
    if not all(re.fullmatch(r" {4}[^()#]+,(  # .*)?", line) for line in header):
        return lines
    packed = []
    for line in header:
        side = packed and "#" not in packed[-1] and "#" not in line and len(packed[-1]) + len(line) < WIDTH - 2
        if side:
            packed[-1] += " " + line.strip()
        else:
            packed.append(line)
    return [*lines[: node.lineno], *packed, "):  # fmt: skip", *lines[last + 1 :]]


def _assembled(text, roots):
    """Join the statements in a reader's order, with blank lines between them."""
    lines, result, before = text.split("\n"), "", None
    for group in _groups(text, roots):
        for node in group:
            first = first_line(node, lines)
            part = "\n".join(lines[first - 1 : node.end_lineno])
            small = isinstance(node, ast.Assign) and isinstance(before, ast.Assign)
            defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
            blank = (
                2 if defines or before is None or isinstance(before, ast.FunctionDef | ast.ClassDef | ast.Try) else 1
            )
            blank = 0 if small and first == node.lineno == node.end_lineno else blank
            result += "\n" * (blank + 1 if before is not None else 0) + part
            before = node
    return result + "\n"


def _used(text, modules, read):
    """Return the import statements that a text needs."""
    tree = ast.parse(text)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {read(where).absolute[name] for where in modules for name in names & read(where).absolute.keys()}


def _about(asked, text):
    """Return the docstrings of files, without paragraphs about what isn't in the text."""
    known, parts = functions(), []
    for where in asked:
        kept, dropped = [], False
        for paragraph in _module(where).docstring.split("\n\n"):
            if paragraph.startswith(" ") and dropped:
                continue
            named = re.findall(r"`(\w+)", paragraph)
            gone = any(name in known and f"def {name}(" not in text for name in named)
            dropped = gone or "qk/" in paragraph or ".py`" in paragraph or "`path" in paragraph
            if not dropped:
                kept.append(_without_sentences(paragraph, _PLANS.get(where, _Plan({})).word))
        first, _, rest = "\n\n".join(kept).partition("\n")
        parts.append(f"{first}\n{textwrap.dedent(rest)}" if rest else first)
    return "\n\n\n".join(parts)


def _all_arches():
    return sorted({arch for module in MODULES for arch in arches(module)})


def _listing():
    known = functions()
    lines = [f"{module:17}{', '.join(name for name in known if known[name] == module)}" for module in MODULES]
    return "\n".join(["file             kernels", *lines, "", f"--arch, for the GEMMs: {', '.join(_all_arches())}"])


def _shadows(path):
    """Return why a file of this name would cause trouble, or None."""
    stem = path.stem
    if path.suffix != ".py":
        return "expected a name that ends in .py"
    if not stem.isidentifier() or keyword.iskeyword(stem):
        return "Python can't import a file of that name: use letters, digits and _, as in my_kernel.py"
    if stem in sys.stdlib_module_names or stem in ("torch", "triton", "numpy", "qk"):
        return f"Python would import it in place of {stem} itself"
    return None


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m qk copy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Copy a kernel, with all it needs, into one file of your own that imports only torch and triton.",
        epilog="examples:\n"
        "  python -m qk copy --list\n"
        "  python -m qk copy act_quant --out my_quant.py\n"
        "  python -m qk copy int8_gemm --arch sm90 --out my_gemm.py\n\n"
        "The file runs compiled, or in Triton's interpreter if TRITON_INTERPRET=1 is set before Python starts.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a kernel, such as act_quant, or a file, such as int8")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the file to write (default: print)")
    parser.add_argument(
        "--arch", choices=_all_arches(), help="for a GEMM: the kernel for one instruction set (default: sm80)"
    )
    parser.add_argument("--full", action="store_true", help="add operators, torch.compile support and the fast launch")
    parser.add_argument("--hub", type=Path, metavar="DIR", help="write a folder that Hugging Face's `kernels` can load")
    parser.add_argument("--force", action="store_true", help="overwrite FILE, or write into DIR, if it exists")
    parser.add_argument("--list", action="store_true", help="print what can be copied")
    return parser


def main(argv=None):
    """Run the command line. Returns its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        print(_listing())
        return 0
    if not args.names:
        parser.error("expected the name of a kernel or a file; --list prints them")
    if args.hub and (args.out or args.arch):
        parser.error("--hub writes a folder with the kernels of all GPUs: it takes no --out and no --arch")
    if args.full and args.arch:
        parser.error("--arch is for short copies: a full one has the kernels of all GPUs")
    try:
        if args.hub:
            print(f"{args.hub}: {to_hub(args.names, args.hub, args.force)} files")
            return 0
        problem = args.out and _shadows(args.out)
        if problem:
            raise ValueError(f"--out is {str(args.out)!r}; {problem}")
        if args.out and args.out.exists() and not args.force:
            raise FileExistsError
        text = full(*args.names) if args.full else short(*args.names, arch=args.arch)
        if args.out is None:
            print(text, end="")
            return 0
        with args.out.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        parser.error(f"{str(args.hub or args.out)!r} exists: give another name, or --force")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{args.out}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
