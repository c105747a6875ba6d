"""Run kernels in Triton's interpreter: one thread at a time, quietly, and with less patching."""

import contextlib
import dataclasses
import os
import threading

import triton

from .numerics import INTERPRETED


@contextlib.contextmanager
def interpreting():
    """Wrap one launch in the interpreter: one thread at a time, without numpy's warnings."""
    interpreter = triton.runtime.interpreter
    # numpy would warn of overflow, and of Inf - Inf; the interpreter keeps the grid in a global variable
    with (
        interpreter._qk_lock,
        interpreter.np.errstate(all="ignore"),
        _patching_once(interpreter),
        _unchecked(interpreter),
    ):
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
def _patching_once(interpreter):
    """Wrap one launch, in which triton.language is patched only once for each module of helpers.

    On its own, the interpreter patches it at every call of a helper, which takes up to a third of a launch's time.
    """
    patch, scopes = interpreter._patch_lang, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module in scopes:
            return type(scopes[module])()  # with nothing to restore
        scopes[module] = patch(function)
        return scopes[module]

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = patch


@contextlib.contextmanager
def _unchecked(interpreter):
    """Wrap one launch, in which no integer is computed twice to find overflow.

    On its own, the interpreter computes every sum and product in 64 bits, too, for an assertion that it then makes
    only in debug mode. That takes about a third of a launch's time.
    """
    builder = interpreter.interpreter_builder
    options = builder.options
    builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    try:
        yield
    finally:
        builder.options = options


def _numbers(version):
    return tuple(int(part) for part in version.split(".")[:2])


def _new_lock():
    # stored where copies of this module share it
    triton.runtime.interpreter._qk_lock = threading.RLock()


if INTERPRETED.value and not hasattr(triton.runtime.interpreter, "_qk_lock"):
    _new_lock()
    os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it
