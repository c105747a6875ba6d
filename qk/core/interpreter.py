"""Run kernels in Triton's interpreter: one thread at a time, quietly, and with less work."""

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
    """Wrap one launch, without two things that take up to a third of its time each.

    On its own, the interpreter patches triton.language at every call of a helper; here, once for each module of
    helpers. And it computes every integer again in 64 bits, for an assertion that only debug mode makes.
    """
    builder = interpreter.interpreter_builder
    patch, options, scopes = interpreter._patch_lang, builder.options, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module in scopes:
            return type(scopes[module])()  # with nothing to restore
        return scopes.setdefault(module, patch(function))

    interpreter._patch_lang, builder.options = patch_once, dataclasses.replace(options, sanitize_overflow=options.debug)
    try:
        yield
    finally:
        interpreter._patch_lang, builder.options = patch, options


def _numbers(version):
    return tuple(int(part) for part in version.split(".")[:2])


def _new_lock():
    # stored where copies of this module share it
    triton.runtime.interpreter._qk_lock = threading.RLock()


if INTERPRETED.value and not hasattr(triton.runtime.interpreter, "_qk_lock"):
    _new_lock()
    os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it
