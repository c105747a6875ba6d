"""Partial evaluation: cut the source of kernels down to what a few functions need.

`simplified` repeats two steps until nothing changes:

    _pruned   drops functions, classes and constants that no wanted function reaches
    _Pass     works out the values that names can have, from call to call, and edits the text: branches that are never
              taken, parameters, local variables and fields that nothing reads, helpers that are called once

Edits replace ranges of the text, so that everything else keeps its formatting and its comments. A value is a list of
all the values that an expression can have; SOMETHING, if it is only known not to be None; or UNKNOWN.
"""

import ast
import itertools
import re
from typing import NamedTuple

import torch

UNKNOWN = object()
SOMETHING = object()  # any value but None
_IMPURE = {"store", "static_assert", "device_assert", "debug_barrier", "inline_asm_elementwise", "atomic_add"}
_PURE = {"cdiv", "next_power_of_2", "min", "max", "len", "int", "float", "list", "tuple", "gpu", "abs", "as_matrix",
         "with_contiguous_rows"}  # fmt: skip
_PURE_METHODS = {"stride", "to", "numel", "contiguous", "detach", "view", "expand_dims", "data_ptr", "element_size",
                 "get_device_capability"}  # fmt: skip
_TENSOR_METHODS = _PURE_METHODS | {"reshape", "new_empty", "new_zeros", "t", "float", "double", "expand", "permute"}
_TENSOR_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "itemsize", "type"}
_LONGEST = 14  # lines of a function that may be inlined
_SIZES = ("block_size", "group_size")  # parameters that are never 0
_OPERATORS = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b, ast.LShift: lambda a, b: a << b,
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
    ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


def _walk(node):
    """List a node and everything inside it. The list is made once."""
    if not hasattr(node, "all_nodes"):
        node.all_nodes = list(ast.walk(node))
    return node.all_nodes


class _Tensor(NamedTuple):
    """A tensor whose dtype is known, and nothing else."""

    dtype: torch.dtype


def _join(values):
    """Merge the values of several assignments to one name."""
    found, something = [], False
    for value in values:
        if value is UNKNOWN:
            return UNKNOWN
        something = something or value is SOMETHING
        new = [] if value is SOMETHING else value
        found = found + [each for each in new if not any(type(each) is type(old) and each == old for old in found)]
    if something or len(found) > 8:
        return UNKNOWN if None in found else SOMETHING
    return found


def _combined(function, *operands):
    """Apply a function to every combination of its operands' values."""
    if [] in operands:
        return []
    if any(not isinstance(each, list) or isinstance(each[0], _Tensor) for each in operands):
        return UNKNOWN
    try:
        return _join([function(*each)] for each in itertools.product(*operands))
    except (TypeError, KeyError, IndexError, ZeroDivisionError, AttributeError):
        return UNKNOWN


def _known(value):
    """Return (True, the value) if there is exactly one, else (False, None)."""
    if isinstance(value, list) and len(value) == 1:
        return True, value[0]
    return False, None


def _truth(value):
    """Return True, False, or None if a condition may be either."""
    if not isinstance(value, list) or not value or any(isinstance(each, _Tensor) for each in value):
        return None
    truths = {bool(each) for each in value}
    return truths.pop() if len(truths) == 1 else None


class _Site:
    """One call of a function in the file, with the nodes of its arguments."""

    def __init__(self, positional, keywords, launched, spread):
        self.positional, self.keywords, self.launched, self.spread = positional, keywords, launched, spread

    def argument(self, parameters, name):
        """Find the argument for a parameter. Returns None if the call has none, UNKNOWN if stars hide it."""
        if name in self.keywords:
            return self.keywords[name].value
        index = parameters.index(name)
        stars = [i for i, each in enumerate(self.positional) if isinstance(each, ast.Starred)]
        if not stars or index < stars[0]:
            return self.positional[index] if index < len(self.positional) else UNKNOWN if self.spread else None
        if self.launched:  # each parameter is given, so that those after the last star count from the end
            given = len([each for each in parameters if each not in self.keywords])
            place = len(self.positional) - (given - index)
            if place > stars[-1]:
                return self.positional[place]
            # strides and shapes of matrices: as many of each
            each, left = divmod(given - (len(self.positional) - len(stars)), len(stars))
            place = 0
            while left == 0 and index > 0 and place < len(self.positional):
                index -= each if place in stars else 1
                place += 1
            if left == 0 and index == 0 and place not in stars:
                return self.positional[place]
        return UNKNOWN


class _Function:
    """A function of the file: its parameters, the names that it assigns, and those that it reads."""

    def __init__(self, node):
        self.node = node
        arguments = node.args
        self.parameters = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        self.variadic = bool(arguments.vararg or arguments.kwarg)
        first = arguments.posonlyargs + arguments.args
        pairs = [*zip(first[::-1], arguments.defaults[::-1], strict=False)]
        pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        self.defaults = {each.arg: default for each, default in pairs if default is not None}
        self.assigned, self.loads, self.foreign = {}, {}, set()
        for child in node.body:
            self._walk(child)
        for inner in _walk(node):  # names of an inner scope
            if isinstance(inner, ast.FunctionDef | ast.Lambda) and inner is not node:
                self.foreign |= {each.arg for each in inner.args.args}
                if isinstance(inner, ast.FunctionDef):
                    self.foreign |= {each.id for each in _walk(inner) if _is_store(each)} | {inner.name}
            elif isinstance(inner, ast.comprehension):
                self.foreign |= {each.id for each in _walk(inner.target) if isinstance(each, ast.Name)}

    def only(self, name):
        """Return the node that is assigned to a local variable, if there is one assignment only; else None."""
        (how, *others) = self.assigned[name]
        return None if others or len(how) > 1 or name in self.parameters or name in self.foreign else how[0]

    def _bind(self, target, how):
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(how)
        elif isinstance(target, ast.Tuple | ast.List):
            for i, each in enumerate(target.elts):
                starred = any(isinstance(x, ast.Starred) for x in target.elts)
                value = how[0] if len(how) == 1 else None
                self._bind(each.value if isinstance(each, ast.Starred) else each,
                           (None,) if starred or value is None else (value, i, len(target.elts)))  # fmt: skip

    def _walk(self, node):
        for each in _walk(node):
            if isinstance(each, ast.Assign):
                for target in each.targets:
                    self._bind(target, (each.value,))
            elif isinstance(each, ast.AnnAssign | ast.NamedExpr):
                self._bind(each.target, (each.value,))
            elif isinstance(each, ast.AugAssign):
                self._bind(each.target, (None,))
                if isinstance(each.target, ast.Name):
                    self.loads.setdefault(each.target.id, []).append(each.target)
            elif isinstance(each, ast.For):
                self._bind(each.target, (None,))
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
                self.loads.setdefault(each.id, []).append(each)


def first_line(node, lines):
    """Return a statement's first line, counting its decorators and the comments above it."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    while first > 1 and re.match(rf" {{{node.col_offset}}}#", lines[first - 2]):
        first -= 1
    return first


def _names(node):
    return {each.id for each in _walk(node) if isinstance(each, ast.Name)}


def _is_store(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_call_of(node, name):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def replaced(text, edits):
    """Apply edits (start, end, new text) to a text. Offsets are in bytes."""
    data = text.encode()
    for start, end, new in sorted(edits, reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


class Places:
    """A text, its syntax tree, and where the nodes are, in bytes."""

    def __init__(self, text):
        self.text, self.data, self.lines, self.tree = text, text.encode(), text.split("\n"), ast.parse(text)
        self.starts = [0, *itertools.accumulate(len(line.encode()) + 1 for line in self.lines)]

    def at(self, node):
        first, last = self.starts[node.lineno - 1], self.starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def segment(self, node):
        start, end = self.at(node)
        return self.data[start:end].decode()


class _Pass(Places):
    """One round over the text: analyze it, then collect edits that don't overlap."""

    def __init__(self, text, roots, known):
        super().__init__(text)
        self.roots = roots
        self.pins, self.facts, self.constants, self.dropped, self.verbatim = known
        self.parents = {child: node for node in _walk(self.tree) for child in ast.iter_child_nodes(node)}
        # f-strings are left alone: before Python 3.12, the nodes in them have no valid positions
        self.in_text = {each for node in _walk(self.tree) if isinstance(node, ast.JoinedStr) for each in _walk(node)}
        self.functions, self.classes, self.owner = {}, {}, {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = _Function(node)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        self.functions[f"{node.name}.{method.name}"] = _Function(method)
        for function in self.functions.values():
            for node in _walk(function.node):
                self.owner[node] = function
        self.sites, self.escaped = {name: [] for name in self.functions}, set()
        self._find_sites()
        self.properties = {name.split(".")[1]: function for name, function in self.functions.items() if "." in name
                           and function.node.decorator_list}  # fmt: skip
        self.fields = self._find_fields()
        self.cache, self.query, self.assumed, self.busy = {}, {}, {}, set()
        self.taken, self.groups, self.inlined = [], [], set()

    # what calls what

    def _find_sites(self):
        called = set()
        for node in _walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in self.functions:
                    called.add(node.func)
                    self._add_site(node.func.id, node.args, node.keywords, False)
                if node.func.id == "launch" and len(node.args) > 2 and isinstance(node.args[1], ast.Name):
                    if node.args[1].id in self.functions:
                        called.add(node.args[1])
                        self._add_site(node.args[1].id, node.args[3:], node.keywords, True)
            elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Tuple):
                if isinstance(node.elts[0], ast.Name) and node.elts[0].id in self.functions:  # of warp_specialize
                    called.add(node.elts[0])
                    self._add_site(node.elts[0].id, node.elts[1].elts, [], False)
        for node in _walk(self.tree):
            if isinstance(node, ast.Name) and node.id in self.functions and node not in called:
                self.escaped.add(node.id)

    def _add_site(self, name, positional, keywords, launched):
        flat = []
        for each in positional:
            inside = isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple)
            flat += each.value.elts if inside else [each]
        named = {each.arg: each for each in keywords if each.arg is not None}
        self.sites[name].append(_Site(flat, named, launched, len(named) < len(keywords)))

    def _find_fields(self):
        """Returns {field of a NamedTuple: the nodes of all values that it gets}; UNKNOWN stands for any value."""
        found = {}
        calls = [each for each in _walk(self.tree) if isinstance(each, ast.Call)]
        for name, node in self.classes.items():
            fields = {each.target.id: each.value for each in node.body if isinstance(each, ast.AnnAssign)}
            for call in calls:
                given = {each.arg: each.value for each in call.keywords}
                if _is_call_of(call, name):
                    given = fields | dict(zip(fields, call.args, strict=False)) | given
                elif getattr(call.func, "attr", "") != "_replace":
                    continue
                starred = any(isinstance(each, ast.Starred) for each in call.args)
                for field in fields.keys() & given.keys():
                    found.setdefault(field, []).append(UNKNOWN if starred else given[field])
        return found

    # values

    def parameter(self, function, name):
        key = next(key for key, known in self.functions.items() if known is function)
        if (key, name) in self.pins:
            return self.pins[key, name]
        if key in self.roots or key in self.escaped or "." in key or not self.sites[key]:
            return SOMETHING if (key, name) in self.facts else UNKNOWN
        values = []
        for site in self.sites[key]:
            node = site.argument(function.parameters, name)
            node = function.defaults.get(name, UNKNOWN) if node is None else node
            values.append(UNKNOWN if node is UNKNOWN else self.value(node))
        result = _join(values)
        return SOMETHING if result is UNKNOWN and (key, name) in self.facts else result

    def name(self, function, name):
        if function is None or (name not in function.parameters and name not in function.assigned):
            if name in self.constants:
                return [self.constants[name]]
            return SOMETHING if name in self.functions or name in self.classes else UNKNOWN
        if name in function.foreign:
            return UNKNOWN
        key = id(function), name
        return self._once(key, lambda: self._all_of(function, name))

    def _all_of(self, function, name):
        values = [self.parameter(function, name)] if name in function.parameters else []
        return _join([*values, *map(self._bound, function.assigned.get(name, []))])

    def _once(self, key, compute):
        """Cache compute(). A value that depends on itself starts as no value, and is recomputed until it is stable."""
        for cache in (self.cache, self.query):
            if key in cache:
                return cache[key]
        if key in self.busy:
            self.assumed.setdefault(key, [])
            return self.assumed[key]
        outermost = not self.busy
        for turn in itertools.count():
            self.busy.add(key)
            self.query[key] = compute()
            self.busy.discard(key)
            wrong = {each for each, value in self.assumed.items() if value is not UNKNOWN}
            wrong = {each for each in wrong if each in self.query and self.query[each] != self.assumed[each]}
            if not outermost or not wrong:
                break
            self.assumed |= {each: self.query[each] if turn < 4 else UNKNOWN for each in wrong}
            self.query.clear()
        result = self.query[key]
        if outermost:
            self.cache |= self.query
            self.query.clear()
            self.assumed.clear()
        return result

    def _bound(self, how):
        if how[0] is None:
            return UNKNOWN
        if len(how) == 1:
            return self.value(how[0])
        node, i, count = how
        if isinstance(node, ast.Tuple) and len(node.elts) == count:
            if not any(isinstance(each, ast.Starred) for each in node.elts):
                return self.value(node.elts[i])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            returns = self._returns(node.func.id)
            if returns and all(isinstance(each, ast.Tuple) and len(each.elts) == count for each in returns):
                return _join(self.value(each.elts[i]) for each in returns)
        return _combined(lambda value: value[i], self.value(node))

    def _returns(self, name):
        function = self.functions[name].node
        return [each.value for each in _walk(function) if isinstance(each, ast.Return) and each.value is not None]

    def value(self, node):
        method = getattr(self, f"_value_{type(node).__name__}", None)
        return UNKNOWN if method is None else method(node)

    def _value_Constant(self, node):
        return [node.value]

    def _value_Name(self, node):
        return self.name(self.owner.get(node), node.id)

    def _value_Tuple(self, node):
        known = [_known(self.value(each)) for each in node.elts]
        return [tuple(value for _, value in known)] if all(ok for ok, _ in known) else SOMETHING

    def _value_IfExp(self, node):
        test = self.value(node.test)
        truth = _truth(test)
        if test == []:
            return []
        if truth is None:
            return _join((self.value(node.body), self.value(node.orelse)))
        return self.value(node.body if truth else node.orelse)

    def truth(self, node):
        """Like _truth, but for a node, and block sizes are never 0."""
        value = self.value(node)
        if value is SOMETHING and getattr(node, "id", getattr(node, "attr", "")).endswith(_SIZES):
            return True
        return _truth(value)

    def _value_BoolOp(self, node):
        stops = isinstance(node.op, ast.Or)
        values = [self.value(each) for each in node.values]
        if self.truth(node.values[0]) is stops:
            return values[0]
        if any(value == [stops] and isinstance(value[0], bool) for value in values):
            return [stops]  # the others are conditions, too
        return _join(value for value in values if _truth(value) is not (not stops) or value is values[-1])

    def _value_UnaryOp(self, node):
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            truth = _truth(value)
            return UNKNOWN if truth is None else [not truth]
        return _combined(lambda x: -x, value) if isinstance(node.op, ast.USub) else SOMETHING

    def _value_BinOp(self, node):
        operator = _OPERATORS.get(type(node.op))
        result = UNKNOWN if operator is None else _combined(operator, self.value(node.left), self.value(node.right))
        return SOMETHING if result is UNKNOWN else result

    def _value_Compare(self, node):
        if len(node.ops) > 1:
            return UNKNOWN
        left, right = self.value(node.left), self.value(node.comparators[0])
        if isinstance(left, list) and any(isinstance(each, _Tensor) for each in left):
            left = SOMETHING if None not in left else UNKNOWN
        if isinstance(node.ops[0], ast.Is | ast.IsNot) and left is SOMETHING and right == [None]:
            return [isinstance(node.ops[0], ast.IsNot)]
        return _combined(_OPERATORS[type(node.ops[0])], left, right)

    def _value_Call(self, node):
        if isinstance(node.func, ast.Name):
            if node.func.id == "isinstance":
                value, kinds = self.value(node.args[0]), ast.unparse(node.args[1])
                if kinds == "str" and isinstance(value, list) and not any(isinstance(each, _Tensor) for each in value):
                    return _join([isinstance(each, str)] for each in value)
                return [False] if value == [None] else UNKNOWN
            if node.func.id in ("min", "max") and len(node.args) > 1:
                result = _combined({"min": min, "max": max}[node.func.id], *map(self.value, node.args))
                return SOMETHING if result is UNKNOWN else result
            if node.func.id == "len" and (result := _combined(len, self.value(node.args[0]))) is not UNKNOWN:
                return result
            plain = {"jit", "triton.jit"}
            if node.func.id in self.functions and plain.issuperset(
                map(ast.unparse, self.functions[node.func.id].node.decorator_list)
            ):
                returns = self._returns(node.func.id)
                result = self._once((node.func.id, ""), lambda: _join(map(self.value, returns)))
                return SOMETHING if result is UNKNOWN and node.func.id in _PURE else result
            return SOMETHING if node.func.id in _PURE or node.func.id in self.classes else UNKNOWN
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "get":
                table = self.value(node.func.value)
                return _combined(lambda table, *given: table.get(*given), table, *map(self.value, node.args))
            method, base = node.func.attr, self.value(node.func.value) if node.func.attr in _TENSOR_METHODS else UNKNOWN
            dtypes = [each.value for each in node.keywords if each.arg == "dtype"] + node.args[:1]
            dtype = _known(self.value(dtypes[0])) if dtypes else (False, None)
            if method in ("new_empty", "new_zeros", "view", "to") and dtype[0] and isinstance(dtype[1], torch.dtype):
                return [_Tensor(dtype[1])]
            if method in ("contiguous", "reshape", "view", "detach", "t") and isinstance(base, list):
                if all(isinstance(each, _Tensor) for each in base):
                    return base
            if isinstance(node.func.value, ast.Name) and node.func.value.id in ("tl", "gl", "torch", "triton"):
                return SOMETHING
            return SOMETHING if node.func.attr in _TENSOR_METHODS else UNKNOWN
        return UNKNOWN

    def _value_Attribute(self, node):
        if node.attr in self.pins:
            return self.pins[node.attr]
        if node.attr in self.properties:
            returns = [each.value for each in _walk(self.properties[node.attr].node) if isinstance(each, ast.Return)]
            return _join(map(self.value, returns))
        if isinstance(node.value, ast.Name) and node.value.id in ("torch", "tl", "gl"):
            found = getattr(torch, node.attr, None)  # a dtype stands for that of Triton, too
            return [found] if isinstance(found, torch.dtype) else SOMETHING
        base = self.value(node.value)
        if node.attr == "element_ty" and isinstance(base, list):
            return base
        if node.attr == "dtype" and isinstance(base, list) and base and all(isinstance(x, _Tensor) for x in base):
            return _join([each.dtype] for each in base)
        if (result := _combined(lambda base: getattr(base, node.attr), base)) is not UNKNOWN:
            return result
        if node.attr in self.fields:
            values = self.fields[node.attr]
            return self._once(
                (".", node.attr), lambda: _join(UNKNOWN if each is UNKNOWN else self.value(each) for each in values)
            )
        return SOMETHING if node.attr in _TENSOR_ATTRIBUTES else UNKNOWN

    def _value_Subscript(self, node):
        base, index = self.value(node.value), self.value(node.slice)
        if isinstance(node.slice, ast.Slice) and base == [()]:
            return base
        if isinstance(base, list) and not isinstance(index, list):
            if len(base) == 1 and isinstance(base[0], dict):
                return _join([each] for each in base[0].values())
        return _combined(lambda base, index: base[index], base, index)

    def _value_JoinedStr(self, node):
        return SOMETHING

    _value_List = _value_Dict = _value_ListComp = _value_Lambda = _value_JoinedStr

    # edits

    def propose(self, *edits):
        """Accept edits (start, end, text) that belong together, unless one of them overlaps an accepted edit."""
        if not any(start < last and first < end for start, end, _ in edits for first, last in self.taken):
            self.taken += [(start, max(end, start + 1)) for start, end, _ in edits]
            self.groups += edits

    def result(self):
        return replaced(self.text, self.groups)

    def _lines_of(self, first, last):
        """Return the byte range of whole lines. They count from 1, and the last one is included."""
        return self.starts[first - 1], self.starts[last]

    def _siblings(self, node):
        """Return the list of statements that a statement is in."""
        parent = self.parents[node]
        return next(block for block in (parent.body, getattr(parent, "orelse", [])) if node in block)

    def without(self, node):
        """Return the edit that removes a statement."""
        parent, block = self.parents[node], self._siblings(node)
        start, end = self._lines_of(first_line(node, self.lines), node.end_lineno)
        only = len([each for each in block if not _is_docstring(each)]) == 1 and not isinstance(parent, ast.Module)
        indent = " " * node.col_offset
        return start, end, f"{indent}pass\n" if only else ""

    def _header_line(self, first):
        """Return the line above a block and its comments: the last one of `if ...:` or `else:`."""
        line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))]) - 1
        while not self.lines[line - 1].strip() or self.lines[line - 1].lstrip().startswith("#"):
            line -= 1
        return line

    def _block(self, block, indent, replacements=()):
        """Return the text of a block at another indentation, with some nodes replaced."""
        first, last = self._header_line(block[0]) + 1, block[-1].end_lineno
        lines = self._with(*self._lines_of(first, last), replacements).split("\n")
        drop = block[0].col_offset - indent
        if drop < 0:
            return "\n".join(" " * -drop + line if line.strip() else line for line in lines)
        return "\n".join(line[drop:] if not line[:drop].strip() else line for line in lines)

    def _with(self, start, end, replacements):
        """Return the text from start to end, with some nodes replaced: pairs of a node and its new text."""
        data = self.data
        for node, text in sorted(replacements, key=lambda each: -self.at(each[0])[0]):
            a, b = self.at(node)
            if start <= a < end:
                data = data[:a] + text.encode() + data[b:]
                end += len(text.encode()) - (b - a)
        return data[start:end].decode()

    def edits(self):
        for node in _walk(self.tree):
            if isinstance(node, ast.If):
                self._if(node)
            elif isinstance(node, ast.For):
                self._for(node)
            elif isinstance(node, ast.While) and self.truth(node.test) is False:
                self.propose(self.without(node))
        for node in _walk(self.tree):
            handler = getattr(self, f"_edit_{type(node).__name__}", None)
            if handler and node not in self.in_text:
                handler(node)
        for name, function in self.functions.items():
            self._constants_of(function, name in self.verbatim)
            self._aliases(function)
            self._dead_locals(function)
            self._tuples(function)
            if name not in self.roots or any(key[0] == name for key in self.pins if isinstance(key, tuple)):
                self._unused_parameters(name, function)
            self._docstring(name, function)
        self._tables()
        for name, node in self.classes.items():
            self._unused_fields(name, node)
        if not self.groups:
            for name, function in self.functions.items():
                self._inline(name, function)
        return self.groups

    def _drops(self, node):
        """Whether an `if` belongs to a mode that the copy leaves out."""
        inside = [node.test, *node.body]
        return any(isinstance(each, ast.Name) and each.id in self.dropped for part in inside for each in _walk(part))

    def _if(self, node):
        truth = False if self._drops(node) else self.truth(node.test)
        if truth is None:
            return
        start, end = self._lines_of(node.lineno, node.end_lineno)
        is_elif = self._is_elif(node)
        if truth and is_elif:
            text = f"{' ' * node.col_offset}else:\n{self._block(node.body, node.col_offset + 4)}"
        elif truth:
            if isinstance(node.body[-1], ast.Return):  # what comes after it is never reached
                end = self._lines_of(node.lineno, self._siblings(node)[-1].end_lineno)[1]
            text = self._block(node.body, node.col_offset)
        elif not node.orelse:
            start, end, text = (start, end, "") if is_elif else self.without(node)
        elif is_elif or self._is_elif(node.orelse[0]):
            other = node.orelse[0]
            line = other.lineno if self._is_elif(other) else self._header_line(other)
            text = self.data[self._lines_of(line, line)[0] : end].decode()
            text = text if is_elif else text.replace("elif", "if", 1)
        else:
            text = self._block(node.orelse, node.col_offset)
        self.propose((start, end, text))

    def _is_elif(self, node):
        return self.lines[node.lineno - 1].lstrip().startswith("elif ")

    def _for(self, node):
        call = node.iter
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", getattr(call.func, "id", "")) not in (
            "static_range", "range",
        ):  # fmt: skip
            return
        known = [_known(self.value(each)) for each in call.args]
        if len(call.args) == 3 and known[0] == (True, 0) and len({self.segment(each) for each in call.args[1:]}) == 1:
            known = [(True, 0), (True, 1), (True, 1)]  # from 0 to N in steps of N, which isn't 0
        if call.keywords or not all(ok and isinstance(value, int) for ok, value in known):
            return
        values = range(*(value for _, value in known))
        if len(values) == 0:
            self.propose(self.without(node))
        elif len(values) == 1 and isinstance(node.target, ast.Name):
            loads = [each for part in node.body for each in _walk(part)
                     if isinstance(each, ast.Name) and each.id == node.target.id]  # fmt: skip
            if all(isinstance(each.ctx, ast.Load) for each in loads):
                text = self._block(node.body, node.col_offset, [(each, str(values[0])) for each in loads])
                self.propose((*self._lines_of(node.lineno, node.end_lineno), text))

    def _operand(self, node, text, parent):
        """Return the text of an expression, in parentheses if its new parent needs them."""
        loose = ast.BinOp | ast.UnaryOp | ast.IfExp | ast.BoolOp | ast.Compare
        inside = ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Compare | ast.BoolOp | ast.Subscript | ast.IfExp
        return f"({text})" if isinstance(node, loose) and isinstance(parent, inside) else text

    def _put(self, node, part, text=None):
        """Replace an expression with one of its parts, or with a text."""
        start, end = self.at(node)
        text = self.segment(part) if text is None else text
        simple = (
            isinstance(part, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript) or text[0] in "([{"
        )
        before, after = self.data[:start].rstrip()[-1:], self.data[end:].lstrip()[:1]
        parent = self.parents[node]
        grouped = before == b"(" and after == b")" and not (isinstance(parent, ast.Call) and node in parent.args)
        if simple and grouped:
            start, end = self.data.rindex(b"(", 0, start), self.data.index(b")", end) + 1
        elif not simple and not grouped and isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Compare):
            text = f"({text})"
        self.propose((start, end, text))

    def _edit_IfExp(self, node):
        truth = self.truth(node.test)
        if truth is not None:
            self._put(node, node.body if truth else node.orelse)

    def _edit_UnaryOp(self, node):
        truth = _truth(self.value(node))
        if isinstance(node.op, ast.Not) and truth is not None:
            self.propose((*self.at(node), repr(truth)))

    def _edit_BoolOp(self, node):
        stops = isinstance(node.op, ast.Or)
        truths = [self.truth(each) for each in node.values]
        if truths[0] is stops:
            return self._put(node, node.values[0], self._grouped(node.values[0], node))
        last = node.values[-1]
        kept = [each for each, truth in zip(node.values, truths, strict=True) if truth is not (not stops)]
        kept = kept if last in kept or self._is_test(node) else [*kept, last]
        if not kept or len(kept) == len(node.values):
            return
        if len(kept) == 1:
            self._put(node, kept[0], self._grouped(kept[0], node))
        else:
            word = " or " if stops else " and "
            if "\n" in self.segment(node):  # one operand a line
                line = self.lines[node.end_lineno - 1]
                word = "\n" + line[: len(line) - len(line.lstrip())] + word.lstrip()
            self.propose((*self.at(node), word.join(self._grouped(each, node) for each in kept)))

    def _is_test(self, node):
        """Whether an expression is used as a condition only."""
        parent = self.parents[node]
        return isinstance(parent, ast.BoolOp) or getattr(parent, "test", None) is node

    def _grouped(self, node, within):
        """Return an operand's text, with its parentheses."""
        (start, end), (first, last) = self.at(node), self.at(within)
        while start > first and end < last:
            before, after = self.data[first:start].rstrip(), self.data[end:last].lstrip()
            if not before.endswith(b"(") or not after.startswith(b")"):
                break
            start, end = first + len(before) - 1, last - len(after) + 1
        return self.data[start:end].decode()

    def _edit_BinOp(self, node):
        left, right = (each.value if isinstance(each, ast.Constant) and type(each.value) is int else None
                       for each in (node.left, node.right))  # fmt: skip
        kind = type(node.op)
        # x * 0 by itself may be there for its type
        if kind is ast.Mult and 0 in (left, right) and self.pure(node) and isinstance(self.parents[node], ast.BinOp):
            self._put(node, node.left if left == 0 else node.right, "0")
        elif (kind in (ast.Add, ast.Sub) and right == 0) or (kind in (ast.Mult, ast.FloorDiv) and right == 1):
            self._put(node, node.left, self._grouped(node.left, node))
        elif (kind is ast.Add and left == 0) or (kind is ast.Mult and left == 1):
            self._put(node, node.right, self._grouped(node.right, node))

    def _edit_Call(self, node):
        """Remove duplicate arguments of min and max, and evaluate table.get(key) for a known key."""
        if getattr(node.func, "attr", "") == "get":
            ok, value = _known(self.value(node))
            if ok and type(value) is int:
                self.propose((*self.at(node), str(value)))
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and not node.keywords:
            texts = list(map(self.segment, node.args))
            if len(texts) > 1 and len(set(texts)) == 1:
                self._put(node, node.args[0])
            elif len(set(texts)) < len(texts):
                self.propose((*self.at(node), f"{node.func.id}({', '.join(dict.fromkeys(texts))})"))

    def _edit_Expr(self, node):
        """Remove calls to functions that have become empty, and assertions that hold."""
        if getattr(getattr(node.value, "func", None), "attr", "") == "static_assert":
            if self.truth(node.value.args[0]):
                self.propose(self.without(node))
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            function = self.functions.get(node.value.func.id)
            if function and all(_is_docstring(each) or isinstance(each, ast.Pass) for each in function.node.body):
                self.propose(self.without(node))

    def _aliases(self, function):
        """Where two names always mean the same, keep one of them."""
        for name in function.assigned:
            value = function.only(name)
            if not isinstance(value, ast.Name) or value.id in function.foreign:
                continue
            bindings = len(function.assigned.get(value.id, [])) + (value.id in function.parameters)
            if bindings == 1 and len(value.id) > len(name) > 1 and value.id in function.assigned:
                names = [each for each in _walk(function.node) if isinstance(each, ast.Name) and each.id == value.id]
                if not any(each in self.in_text for each in names):
                    self.propose(*((*self.at(each), name) for each in names))
            elif bindings == 1 and len(value.id) <= len(name):
                for node in function.loads.get(name, []):
                    if isinstance(node.ctx, ast.Load) and node not in self.in_text:
                        self.propose((*self.at(node), value.id))

    def _constants_of(self, function, verbatim):
        """Replace names that have only one value with it; in the docstring too, for numbers named in capitals."""
        numbers = {}
        for name, loads in function.loads.items():
            assigned = function.assigned.get(name, [])
            if name in function.foreign or (name not in function.parameters and not assigned):
                continue
            ok, value = _known(self.name(function, name))
            if not ok or not (value is None or isinstance(value, bool | int | float | str | torch.dtype)):
                continue
            checks = function.node.name.startswith("check_") and value is not None
            if verbatim and (checks or name in function.parameters and isinstance(value, float)):
                continue
            text = f'"{value}"' if isinstance(value, str) else repr(value)
            if type(value) is int and name.isupper():
                numbers[name] = text
            if isinstance(value, torch.dtype) and function.node.decorator_list:
                text = text.replace("torch", "tl" if "triton" in ast.unparse(function.node.decorator_list[0]) else "gl")
            for node in loads:
                if not isinstance(node.ctx, ast.Load) or node in self.in_text:
                    continue
                parent = self.parents[node]
                if isinstance(parent, ast.keyword) and isinstance(value, float):
                    continue
                if isinstance(parent, ast.Attribute) or (isinstance(value, int | float) and value and text[0] == "-"):
                    continue
                self.propose((*self.at(node), text))
        first = function.node.body[0]
        if numbers and _is_docstring(first):
            old = self.segment(first)
            new = re.sub(rf"\b({'|'.join(numbers)})\b(?!( None)?:)", lambda found: numbers[found[0]], old)
            if new != old:
                self.propose((*self.at(first), new))

    def pure(self, node):
        for each in _walk(node):
            if isinstance(each, ast.Call):
                if isinstance(each.func, ast.Name):
                    ok = each.func.id in _PURE
                elif isinstance(each.func, ast.Attribute):
                    module = isinstance(each.func.value, ast.Name) and each.func.value.id in ("tl", "gl", "triton")
                    ok = each.func.attr not in _IMPURE if module else each.func.attr in _PURE_METHODS
                else:
                    ok = False
                if not ok:
                    return False
        return True

    def _dead_locals(self, function):
        live = set(function.loads) | function.foreign
        for node in _walk(function.node):
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            if isinstance(target, ast.Name):
                unused = target.id not in live and self.pure(node.value)
                if unused or self.segment(node.value) == target.id:
                    self.propose(self.without(node))
            elif isinstance(target, ast.Tuple) and not isinstance(node.value, ast.Tuple):
                names = {each.id for each in target.elts if isinstance(each, ast.Name)}
                if len(names) == len(target.elts) and not names & live and self.pure(node.value):
                    self.propose(self.without(node))
            elif isinstance(target, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
                if len(target.elts) != len(node.value.elts) or any(isinstance(each, ast.Starred) for pair in pairs
                                                                   for each in pair):  # fmt: skip
                    continue
                kept = [(a, b) for a, b in pairs if not isinstance(a, ast.Name) or a.id in live or not self.pure(b)]
                # x, y = x, z: nothing happens to x
                kept = [(a, b) for a, b in kept if self.segment(a) != self.segment(b)]
                if not kept:
                    self.propose(self.without(node))
                elif len(kept) < len(pairs):
                    sides = (", ".join(self.segment(each) for each in side) for side in zip(*kept, strict=True))
                    self.propose((*self.at(node), " = ".join(sides)))

    def _tuples(self, function):
        """Turn `x = ()` and `x = x + (e,)` into `x = (e,)`, and that into `x = e` where only x[0] is read."""
        for node in _walk(function.node):
            if isinstance(node, ast.Assign) and ast.unparse(node.value) == "()":
                name, block = self.segment(node.targets[0]), self._siblings(node)
                after = block[-1] if block[-1] is node else block[block.index(node) + 1]
                if self.segment(after).startswith(f"{name} = {name} + "):
                    added = f"{name} = {self.segment(after.value.right)}"
                    self.propose((self.at(node)[0], self.at(after)[1], added))
        for name in function.assigned:
            value, loads = function.only(name), function.loads.get(name, [])
            if not isinstance(value, ast.Tuple) or len(value.elts) != 1 or isinstance(value.elts[0], ast.Starred):
                continue
            uses = [self.parents[each] for each in loads]
            if uses and all(
                isinstance(use, ast.Subscript) and use.value is each and _truth(self.value(use.slice)) is False
                for use, each in zip(uses, loads, strict=True)
            ):
                self.propose((*self.at(value), self.segment(value.elts[0])), *((*self.at(use), name) for use in uses))

    def _unused_parameters(self, key, function):
        if key in self.escaped or function.variadic or "." in key:
            return
        for name in function.parameters:
            if name in function.loads or name in function.assigned or name in function.foreign:
                continue
            if key in self.roots and (key, name) not in self.pins:
                continue
            arguments = [site.argument(function.parameters, name) for site in self.sites[key]]
            given = [each for each in arguments if each is not None]
            if any(each is UNKNOWN or not self.pure(each) for each in given):
                continue
            nodes = [self._argument(function.node, name), *(self._element(each) for each in given)]
            self.propose(*map(self._element_edit, nodes))
            if nodes[0] in function.node.args.kwonlyargs:  # one at a time: the last edit also removes the bare star
                return

    def _inline(self, key, function):
        """Replace the only call to a function with its body, if that is short and no two names clash."""
        node, sites = function.node, self.sites[key]
        if key in self.roots or key in self.escaped or len(sites) != 1 or sites[0].launched or function.variadic:
            return
        if any(ast.unparse(each) not in ("triton.jit", "jit") for each in node.decorator_list) or _is_generator(node):
            return
        call = next((each for each in _walk(self.tree) if _is_call_of(each, key)), None)
        caller, statement = self.owner.get(call), self.parents.get(call)
        if caller is None or caller is function or call in self.in_text or {caller, function} & self.inlined:
            return
        body = node.body[1:] if _is_docstring(node.body[0]) else node.body
        returns = [each for part in body for each in _walk(part) if isinstance(each, ast.Return)]
        alone = returns == [body[-1]] and returns[0].value is not None
        tail = isinstance(statement, ast.Return)
        both = isinstance(statement, ast.Assign) and alone and isinstance(body[-1].value, ast.Tuple)
        expression = alone and len(body) == 1 and not tail and not both
        if self._repeated(call, caller.node) and any(isinstance(each, ast.AnnAssign) for each in _walk(node)):
            return  # a constexpr can't be redefined
        if not (tail or expression or isinstance(statement, ast.Assign) and alone or
                isinstance(statement, ast.Expr) and not returns):  # fmt: skip
            return
        size = body[-1].end_lineno - body[0].lineno + 1
        if size > (60 if tail else _LONGEST) or size + len(caller.node.body[0:1]) > 70:
            return
        if size + caller.node.end_lineno - caller.node.body[_is_docstring(caller.node.body[0])].lineno > 62:
            return
        targets = {each.id for each in _walk(statement) if _is_store(each)} if not expression else set()
        names = set(caller.assigned) | set(caller.parameters) | caller.foreign
        given = [(name, self._given(sites[0], function, name)) for name in function.parameters]
        if any(each is None for _, each in given) or any(isinstance(each, ast.FunctionDef) for each in body):
            return
        own, heads, replacements = set(function.assigned) | function.foreign, [], []
        used = {each.id for _, value in given for each in _walk(value) if isinstance(each, ast.Name)}
        for name, value in given:
            text, loads = self.segment(value), function.loads.get(name, [])
            simple = isinstance(value, ast.Name | ast.Constant) or isinstance(value, ast.Attribute) and len(text) < 20
            if name not in function.assigned and text == name:
                continue
            if name in function.assigned and text == name and (tail or name in targets):
                used = used - {name} if sum(name in _names(each) for _, each in given) == 1 else used
            elif any(each in self.in_text for each in loads):
                return
            elif name in function.assigned or not simple and (len(loads) != 1 or self._repeated(loads[0], node)):
                users = [each for _, each in given if name in _names(each)]
                if users == [value] and (tail or name in targets):
                    used = used - {name}
                elif name in used or name in names and not tail or expression:
                    return
                heads.append(f"{name} = {text}")
                own = own | {name}
            else:
                replacements += [(each, self._operand(value, text, self.parents[each])) for each in loads]
        if own & used or (own - targets & names and not tail):
            return
        indent = " " * self._statement(call).col_offset
        about = [f"{indent}# {each}" for each in self._about(function) if node.decorator_list or not tail]
        for name, value in given:
            if isinstance(value, ast.Constant):
                about = [re.sub(rf"\b{name}\b", self.segment(value), each) for each in about]
        if expression:
            value = body[0].value
            text = " ".join(self._with(*self.at(value), replacements).split())
            if len(self.lines[call.lineno - 1]) - len(self.segment(call)) + len(text) > 120:
                return
            if "#" in self.data[slice(*self._lines_of(self._header_line(body[0]) + 1, body[0].end_lineno))].decode():
                return
            self.inlined |= {caller, function}
            self.propose((*self.at(call), self._operand(value, text, statement)))
            return
        lines = [f"{indent}{head}" for head in heads]
        if not alone or tail:
            lines.append(self._block(body, len(indent), replacements).rstrip("\n"))
        else:
            if len(body) > 1:
                lines.append(self._block(body[:-1], len(indent), replacements).rstrip("\n"))
            lines += [f"{indent}{each}" for each in self._bindings(statement.targets[0], body[-1].value, replacements)]
        text = "\n".join([*about, *lines])
        if any(len(line) > 120 and not line.lstrip().startswith("#") for line in text.split("\n")):
            return
        if tail and "Args:" in ast.unparse(node.body[0]) and "Args:" not in ast.unparse(caller.node.body[0]):
            self._share(caller.node.body[0], node.body[0])
        self.inlined |= {caller, function}
        self.propose((*self._lines_of(statement.lineno, statement.end_lineno), f"{text}\n"))

    def _repeated(self, node, function):
        """Whether a node is inside a loop of a function."""
        while node is not function:
            node = self.parents[node]
            if isinstance(node, ast.For | ast.While | ast.comprehension | ast.GeneratorExp | ast.ListComp):
                return True
        return False

    def _share(self, docstring, other):
        """Complete a docstring that has no Args with those of the function that was inlined."""
        summary = docstring.value.value.split(". ")[0].split("\n")[0].removesuffix(".")
        rest = other.value.value.split("\n\n", 1)[1]
        self.propose((*self.at(docstring), f'"""{summary}.\n\n{rest}"""'))

    def _given(self, site, function, name):
        """Return the node of a parameter's argument or default, or None if that isn't known."""
        value = site.argument(function.parameters, name)
        value = function.defaults.get(name) if value is None else value
        return None if value is UNKNOWN or isinstance(value, ast.Starred) else value

    def _bindings(self, target, value, replacements):
        """Return the lines that assign an inlined function's result."""

        def text(node):
            inside = [each for each in replacements if each[0] in _walk(node)]
            start, end = self.at(node)
            return self._with(start, end, inside)

        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [(self.segment(a), text(b), b) for a, b in zip(target.elts, value.elts, strict=True)]
            pairs = [pair for pair in pairs if pair[0] != pair[1]]
            mixed = any(a in _names(c) for i, (a, _, _) in enumerate(pairs) for _, _, c in pairs[i + 1 :])
            if not mixed:
                return [f"{a} = {b}" for a, b, _ in pairs]
        return [f"{self.segment(target)} = {text(value)}"] if self.segment(target) != text(value) else []

    def _statement(self, node):
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def _about(self, function):
        """Return the first sentence of a docstring as a comment, in a list; [] if there is none, or it is long."""
        if not _is_docstring(function.node.body[0]):
            return []
        paragraph = function.node.body[0].value.value.split("\n\n")[0].strip()
        text = (paragraph if len(paragraph) < 110 else re.split(r"[.]\s", paragraph)[0]).removesuffix(".")
        text = re.sub(r"[.] Returns .*", "", text)
        text = re.sub(r"^Returns? ", "", text).replace("\n    ", " ")
        more = self.lines[self._header_line(function.node.body[1])].lstrip().startswith("#")  # another comment
        if text[1:2].islower():
            text = (text[0].upper() if more else text[0].lower()) + text[1:]
        return [f"{text}{'.' * more}"] if len(text) < 110 else []

    def _docstring(self, key, function):
        """Remove from a docstring the parameters that are gone, and what None means where it is never passed."""
        if not _is_docstring(function.node.body[0]) or "." in key:
            return
        text = self.segment(function.node.body[0])

        def unless_stale(found):
            name, none = found.groups()
            if name in function.parameters:
                return "" if none and self.name(function, name) is SOMETHING else found[0]
            used = {each.id for each in _walk(function.node) if isinstance(each, ast.Name)}
            return "" if name.islower() or name.isupper() and name not in used else found[0]

        new = re.sub(r"^ {8}(\w+)(): .*\n(?: {9}.*\n)*", unless_stale, text, flags=re.M)
        new = re.sub(r"\n\n    Args:\n(?=\n|    \w|    \"\"\")", "\n\n", new)
        if key not in self.roots:
            sentence = r"(?:(?<=[.] )|(?<=^\"\"\")|(?<=^ {4}))(\w+)( None)?: [^.]*[.](?: |(?=\n|\"))"
            new = re.sub(sentence, unless_stale, new, flags=re.M)
        rest = re.sub(r"\s+\"\"\"$", "", new)
        new = rest if rest == new else f'{rest}\n    """' if "\n" in rest else f'{rest}"""'
        new = re.sub(r" +\n", "\n", new)
        if new == text:
            return
        if not new.strip('" \n'):
            self.propose(self.without(function.node.body[0]))
        else:
            self.propose((*self.at(function.node.body[0]), new))

    def _argument(self, node, name):
        arguments = node.args
        return next(each for each in (*arguments.args, *arguments.kwonlyargs) if each.arg == name)

    def _element(self, node):
        """Return the keyword argument that has this value, or else the value itself."""
        parent = self.parents[node]
        return parent if isinstance(parent, ast.keyword) else node

    def _element_edit(self, node):
        """Return the edit that removes a list's element, with its comma and comment."""
        start, end = self.at(node)
        if isinstance(node, ast.arg) and self.data[end:].lstrip()[:1] == b"=":  # its default
            function = self.parents[self.parents[node]]
            default = self.owner[function].defaults[node.arg]
            end = self.at(default)[1]
        if isinstance(node, ast.arg) and self.parents[node].kwonlyargs == [node]:  # with its bare star
            start = self.data.rindex(b"*", 0, start)
        while self.data[:start].rstrip()[-1:] == b"(" and self.data[end:].lstrip()[:1] == b")":
            parent = self.parents[node]
            if isinstance(parent, ast.Call | ast.Tuple | ast.arguments):
                break
            start, end = self.data.rindex(b"(", 0, start), self.data.index(b")", end) + 1
        rest = self.data[end:]
        comma = re.match(rb"\s*,", rest)
        if not comma:  # the last one
            before = re.search(rb",\s*$", self.data[:start])
            start = before.start() if before else start
            return start, end, ""
        end += comma.end()
        line = re.match(rb"[ ]*(#[^\n]*)?\n", self.data[end:])
        first = self.data.rfind(b"\n", 0, start) + 1
        if line and not self.data[first:start].strip():
            return first, end + line.end(), ""
        if line:
            head = re.search(rb"[ ]*$", self.data[:start])
            return head.start(), end, ""
        space = re.match(rb"[ ]*", self.data[end:])
        return start, end + space.end(), ""

    def _unused_fields(self, name, node):
        """Remove fields that nothing reads from a NamedTuple and from the calls that make one."""
        calls = [each for each in _walk(self.tree) if _is_call_of(each, name)]
        made = {each for call in calls for each in (call.func, *call.args, *call.keywords)}
        loose = [each for each in self.loads_of(name) if each not in made]
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        if len(node.bases) != 1 or loose or any(isinstance(each, ast.Starred) for call in calls for each in call.args):
            return
        others = [each for each in _walk(self.tree) if getattr(getattr(each, "func", None), "attr", "") == "_replace"]
        read = {each.attr for each in _walk(self.tree) if isinstance(each, ast.Attribute)}
        unpacked = [each for each in _walk(self.tree) if isinstance(each, ast.Assign) and len(fields) > 2 and
                    isinstance(each.targets[0], ast.Tuple) and len(each.targets[0].elts) == len(fields)]  # fmt: skip
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.decorator_list and method.name not in read:
                self.propose(self.without(method))
        for i, field in enumerate(fields):
            if field.target.id in read or unpacked or len(fields) == 1:
                continue
            given = [next((each for each in call.keywords if each.arg == field.target.id), None) or
                     (call.args[i] if i < len(call.args) else None) for call in calls]  # fmt: skip
            given += [each for call in others for each in call.keywords if each.arg == field.target.id]
            values = [each.value if isinstance(each, ast.keyword) else each for each in given if each is not None]
            if all(self.pure(each) for each in values):
                self.propose(self.without(field), *(self._element_edit(each) for each in given if each is not None))

    def loads_of(self, name):
        return [each for each in _walk(self.tree) if isinstance(each, ast.Name) and each.id == name]

    def _tables(self):
        """Remove a table's entries that nobody looks up."""
        for node in self.tree.body:
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
                continue
            name = node.targets[0].id
            keys, uses = set(), [each for each in _walk(self.tree) if isinstance(each, ast.Name) and each.id == name]
            for use in uses:
                parent = self.parents[use]
                if isinstance(use.ctx, ast.Store):
                    continue
                index = self.value(parent.slice) if isinstance(parent, ast.Subscript) else UNKNOWN
                if not isinstance(index, list):
                    keys = None
                    break
                keys |= set(index)
            if keys is None or not keys:
                continue
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if not isinstance(key, ast.Constant) or key.value in keys:
                    continue
                if self.lines[key.lineno - 1].lstrip().startswith(self.segment(key)):
                    self.propose((*self._lines_of(first_line(key, self.lines), value.end_lineno), ""))


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_generator(node):
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in _walk(node))


class Known(NamedTuple):
    """What is known about a text beyond the text itself."""

    pins: dict  # {(function, parameter): [value]} for parameters that have one value only, and {attribute: [value]}
    given: set  # of (function, parameter) that isn't None
    constants: dict  # {global name: its value}
    dropped: set  # functions of modes that aren't wanted: an `if` that names one is never taken
    verbatim: set  # functions whose parameters aren't replaced by numbers


def simplified(text, roots, known):
    """Cut a file down to what calls of a few functions need.

    Args:
        text: the whole file. Nothing else calls its functions, except for the roots.
        roots: the functions that are wanted.
        known: a Known.
    """
    for _ in range(300):
        text = _pruned(text, roots)
        one = _Pass(text, roots, known)
        if not one.edits():
            return text
        text = one.result()
    raise RuntimeError("the text never settles")


def _pruned(text, roots):
    """Remove functions, classes and constants that no root needs."""
    tree, lines = ast.parse(text), text.split("\n")
    items = {}
    for node in tree.body:
        stores = isinstance(node, ast.Assign | ast.Try)
        names = {each.id for each in _walk(node) if _is_store(each)} if stores else set()
        names |= {each.asname or each.name for each in _walk(node) if isinstance(each, ast.alias)}
        names |= {each.name for each in _walk(node) if stores and isinstance(each, ast.FunctionDef)}
        names |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        for name in names:
            items.setdefault(name, []).append(node)
    bound = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.Try
    waiting = [node for node in tree.body if not isinstance(node, bound)]
    waiting += [node for root in roots for node in items.get(root, [])]
    kept = set()
    while waiting:
        node = waiting.pop()
        if node in kept:
            continue
        kept.add(node)
        own = {each.arg for each in _walk(node) if isinstance(each, ast.arg)}
        if isinstance(node, ast.FunctionDef):
            own |= {each.id for each in _walk(node) if _is_store(each)}
        for each in _walk(node):
            if isinstance(each, ast.Name) and each.id in items and each.id not in own:
                waiting += items[each.id]
    for node in reversed(tree.body):
        if node in kept:
            continue
        del lines[first_line(node, lines) - 1 : node.end_lineno]
    return "\n".join(lines)
