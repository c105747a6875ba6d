"""Run kernels in Triton's interpreter: one thread at a time, quietly, and with less work."""

import contextlib
import dataclasses
import functools
import inspect
import os
import threading

import triton

from .numerics import INTERPRETED


@contextlib.contextmanager
def interpreting():
    """Wrap one launch in the interpreter: one thread at a time, without numpy's warnings."""
    interpreter = triton.runtime.interpreter
    # numpy would warn of overflow, and of Inf - Inf; the interpreter keeps the grid in a global variable
    with interpreter._qk_lock, interpreter.np.errstate(all="ignore"), _doing_less(interpreter):
        try:
            yield
        except Exception as error:
            version = interpreter.np.__version__
            broken = _numbers(version) >= (2, 4) and _numbers(triton.__version__) < (3, 7)
            if broken and "0-dimensional" in str(error):
                raise RuntimeError(
                    f"numpy {version} breaks the interpreter of Triton {triton.__version__}: pip install 'numpy<2.4'"
                ) from error
            raise


@contextlib.contextmanager
def _doing_less(interpreter):
    """Wrap one launch, and skip work that takes most of the interpreter's time.

    By itself, the interpreter looks for functions to patch at every call of a helper, recomputes every integer in 64
    bits for an assertion that only debug mode makes, and works out each tensor's shape and types anew. Here, it patches
    once per module and launch, skips the assertion, and caches the rest.
    """
    core, builder = triton.language.core, interpreter.interpreter_builder
    patch, options, scopes = interpreter._patch_lang, builder.options, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module in scopes:
            return type(scopes[module])()  # with nothing to restore
        return scopes.setdefault(module, patch(function))

    changes = {
        (interpreter, "_patch_lang"): patch_once,
        (builder, "options"): dataclasses.replace(options, sanitize_overflow=options.debug),
    } | _remembering(core, interpreter)
    with contextlib.ExitStack() as before:
        for place, value in changes.items():
            before.callback(setattr, *place, getattr(*place))
            setattr(*place, value)
        yield


@functools.cache
def _remembering(core, interpreter):
    """Return {(owner, name): replacement}: constructors and functions that cache what they compute, by name."""
    numpy_types, block_types, tensors, built_in = {}, {}, {}, {}
    compute, new_block_type, new_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__

    def numpy_type(kind):
        name = kind.scalar.name
        return numpy_types.get(name) or numpy_types.setdefault(name, compute(kind))

    def block_type(self, element_ty, shape):
        name = f"{element_ty.name} {[getattr(size, 'value', size) for size in shape]}"
        if name in block_types:
            vars(self).update(block_types[name], element_ty=element_ty)
        else:
            new_block_type(self, element_ty, shape)
            block_types[name] = dict(vars(self))

    def tensor(self, handle, type):
        if type.name in tensors:
            vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)
        else:
            new_tensor(self, handle, type)
            tensors[type.name] = {**vars(self), "handle": None}

    def patch_builtin(owner, *how):
        if owner not in built_in:
            built_in[owner] = [name for name, member in inspect.getmembers(owner) if core.is_builtin(member)]
        for name in built_in[owner]:
            if core.is_builtin(member := getattr(owner, name)):  # not patched already
                interpreter._patch_attr(owner, name, member, *how)

    methods = {(core.block_type, "__init__"): block_type, (core.tensor, "__init__"): tensor}
    methods |= {(core.block_type, "to_ir"): lambda self, builder: self}  # the interpreter's builder makes an equal one
    return {(interpreter, "_get_np_dtype"): numpy_type, (interpreter, "_patch_builtin"): patch_builtin, **methods}


def _numbers(version):
    return tuple(int(part) for part in version.split(".")[:2])


def _new_lock():
    # stored where copies of this module share it
    triton.runtime.interpreter._qk_lock = threading.RLock()


if INTERPRETED.value and not hasattr(triton.runtime.interpreter, "_qk_lock"):
    _new_lock()
    os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it
