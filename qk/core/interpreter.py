"""Run kernels in Triton's interpreter: one thread at a time, quietly, and with less work."""

import contextlib
import dataclasses
import functools
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
    """Wrap one launch, without what takes most of its time.

    On its own, the interpreter patches triton.language at every call of a helper; here, once for each module of
    helpers. It computes every integer again in 64 bits, for an assertion that only debug mode makes. And each tensor
    computes its shape, its type and NumPy's type anew; here, one of each kind does.
    """
    core, builder = triton.language.core, interpreter.interpreter_builder
    patch, options, scopes = interpreter._patch_lang, builder.options, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module in scopes:
            return type(scopes[module])()  # with nothing to restore
        return scopes.setdefault(module, patch(function))

    changes = [
        (interpreter, "_patch_lang", patch_once),
        (builder, "options", dataclasses.replace(options, sanitize_overflow=options.debug)),
        (interpreter, "_get_np_dtype", _numpy_type(interpreter._get_np_dtype)),
        (core.block_type, "__init__", _block_type(core.block_type.__init__)),
        (core.tensor, "__init__", _tensor(core.tensor.__init__)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in before:
            setattr(*change)


@functools.cache
def _numpy_type(compute):
    known = {}

    def numpy_type(kind):
        name = kind.scalar.name  # the same whatever the shape
        if name not in known:
            known[name] = compute(kind)
        return known[name]

    return numpy_type


@functools.cache
def _block_type(construct):
    known = {}

    def block_type(self, element_ty, shape):
        sizes = [getattr(size, "value", size) for size in shape]
        if any(type(size) is not int for size in sizes):
            return construct(self, element_ty, shape)  # which refuses it
        key = element_ty.name, *sizes
        if key in known:
            vars(self).update(known[key], element_ty=element_ty)
            return
        construct(self, element_ty, shape)
        known[key] = dict(vars(self))

    return block_type


@functools.cache
def _tensor(construct):
    known = {}

    def tensor(self, handle, type):
        if type.name in known:
            vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)
            return
        construct(self, handle, type)
        known[type.name] = {name: value for name, value in vars(self).items() if name != "handle"}

    return tensor


def _numbers(version):
    return tuple(int(part) for part in version.split(".")[:2])


def _new_lock():
    # stored where copies of this module share it
    triton.runtime.interpreter._qk_lock = threading.RLock()


if INTERPRETED.value and not hasattr(triton.runtime.interpreter, "_qk_lock"):
    _new_lock()
    os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it
