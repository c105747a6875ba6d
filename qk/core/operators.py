"""Make a function a torch operator, which torch.compile, torch.export, modes and the profiler can see.

act_quant(x)                      a public function checks its arguments
  | ordinary tensors              the outputs are allocated, and the function fills them
  | somebody listens              torch's dispatcher calls qk::act_quant, which does the same
"""

import functools
import inspect
import itertools

import torch

from .launch import ORDINARY, recording
from .replay import listened, replayed

# Operators go away with their library. A module that is loaded again keeps those of before.
_LIBRARIES = globals().get("_LIBRARIES", [])


def operator(fake, *depends, check=None, fills=True):
    """Register a function as the operator <namespace>::<name>. Returns a function that calls it.

    The function's annotated parameters are the operator's. Those after them are its outputs, which it fills; it isn't
    called where no output holds an element. The namespace is qk in the package, and the module's name in a copy, so
    that the two run side by side; a module that is loaded again gets a number.

    Args:
        fake: takes the arguments and returns the empty outputs. torch.compile calls it, too.
        depends: as in `replayed`.
        check: takes the arguments and raises what `fake` can't know: what the device of a real tensor can't do.
        fills: False for a function that makes its output itself.
    """

    def register(function):
        implementation = _filling(function, fake, check) if fills else function
        if fills:  # whoever comes through the dispatcher replays as well, torch.compile's code among them
            implementation = replayed(*depends, passed_by=lambda: False)(implementation)
        overload = _registered(function, implementation, fake)

        @functools.wraps(function)
        def call(*args):
            if _ordinary(args):
                return implementation(*args)
            return overload(*(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args))

        call.overload = overload
        return call

    return register


def differentiable(fake, save, backward):
    """Register a function as an operator with a gradient.

    Args:
        fake: as in `operator`.
        save, backward: as in torch.library.register_autograd: save(ctx, inputs, output) and backward(ctx, *grads).
    """

    def register(function):
        overload = _registered(function, function, fake)
        torch.library.register_autograd(overload, backward, setup_context=save, lib=_LIBRARIES[-1])
        return overload

    return register


def _ordinary(args):
    """Whether a call may go past the dispatcher: nobody listens, and memory holds what the tensors show."""
    if listened():
        return False
    for arg in args:
        if isinstance(arg, torch.Tensor) and (
            arg.__class__ not in ORDINARY or arg.is_neg() or arg._is_zerotensor() or arg.is_meta
        ):
            return False
    return True


def _filling(function, fake, check):
    """Returns a function that allocates what `fake` returns, has it filled, and returns it."""

    @functools.wraps(function)
    def filling(*args):
        if check is not None:
            check(*args)
        results = fake(*args)
        outputs = (results,) if isinstance(results, torch.Tensor) else results
        if any(map(torch.numel, outputs)):
            function(*args, *outputs)
        if (noted := recording()) is not None:  # in a call that is recorded, they are temporaries, or its results
            noted.temporaries.extend(outputs)
        return results

    signature = inspect.signature(function)
    arguments = [each for each in signature.parameters.values() if each.annotation is not each.empty]
    filling.__signature__ = signature.replace(parameters=arguments)
    return filling


def _registered(function, implementation, fake):
    """Register an operator. Returns its overload."""
    name = function.__name__.lstrip("_")
    package = __name__.removesuffix(".core.operators").replace(".", "_")
    for number in itertools.count(1):
        namespace = package if number == 1 else f"{package}_{number}"
        if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
            break
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(name + torch.library.infer_schema(implementation, mutates_args=()))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    return getattr(getattr(torch.ops, namespace), name).default
