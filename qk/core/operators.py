"""Turn a function into a torch operator that torch.compile, torch.export, modes and the profiler can see.

act_quant(x)                      a public function checks its arguments
  | ordinary tensors              the outputs are allocated, and the function fills them
  | something observes them       torch's dispatcher calls qk::act_quant, which does the same
"""

import functools
import inspect
import itertools

import torch

from .checks import ORDINARY
from .launch import recording
from .replay import listened, replayed

# Operators disappear with their library, so a reloaded module keeps the libraries it had.
_LIBRARIES = globals().get("_LIBRARIES", [])


def operator(fake, *depends, check=None, fills=True, mutates=()):
    """Register a function as the operator <namespace>::<name>. Returns a function that calls it.

    The operator has the function's annotated parameters. The parameters after these are the outputs, which the function
    fills. If the first output is empty, the function isn't called and the others are zeroed: a row without columns
    still has one scale, which is 0. The namespace is qk in the package and the module's name in a copy, so that the two
    run side by side; a reloaded module gets a number.

    Args:
        fake: takes the arguments and returns the outputs, unfilled. torch.compile calls it, too.
        depends: as in `replayed`.
        check: takes the arguments and raises an error if their device can't run the call, which `fake` doesn't check.
        fills: False for a function that allocates its output itself.
        mutates: names of the parameters that the function writes to.
    """

    def register(function):
        implementation = dispatched = _filling(function, fake, check) if fills else function
        if fills:  # direct callers are replayed themselves; calls from torch.compile's code go through the dispatcher
            dispatched = replayed(*depends, passed_by=lambda: False)(implementation)
        overload = _registered(function, dispatched, fake, mutates)

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
        save, backward: as in torch.library.register_autograd: save(ctx, inputs, output), or None where backward needs
            nothing, and backward(ctx, *grads).
    """

    def register(function):
        overload = _registered(function, function, fake)
        torch.library.register_autograd(overload, backward, setup_context=save, lib=_LIBRARIES[-1])
        return overload

    return register


def _ordinary(args):
    """Whether a call may bypass the dispatcher: nothing observes it, and memory holds the tensors' values."""
    if listened():
        return False
    for arg in args:
        if isinstance(arg, torch.Tensor) and (
            arg.__class__ not in ORDINARY or arg.is_neg() or arg._is_zerotensor() or arg.is_meta
        ):
            return False
    return True


def _filling(function, fake, check):
    """Returns a function that gets the outputs from `fake`, fills them with `function`, and returns them."""

    @functools.wraps(function)
    def filling(*args):
        if check is not None:
            check(*args)
        results = fake(*args)
        outputs = (results,) if isinstance(results, torch.Tensor) else results
        if outputs[0].numel():
            function(*args, *outputs)
        else:
            for output in outputs:
                output.zero_()
        if (noted := recording()) is not None:  # in a recorded call, these are temporaries or results
            noted.temporaries.extend(outputs)
        return results

    signature = inspect.signature(function)
    arguments = [each for each in signature.parameters.values() if each.annotation is not each.empty]
    filling.__signature__ = signature.replace(parameters=arguments)
    return filling


def _registered(function, implementation, fake, mutates=()):
    """Register an operator. Returns its overload."""
    name = function.__name__.lstrip("_")
    package = __name__.removesuffix(".core.operators").replace(".", "_")
    for number in itertools.count(1):
        namespace = package if number == 1 else f"{package}_{number}"
        if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
            break
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(name + torch.library.infer_schema(implementation, mutates_args=mutates))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    return getattr(getattr(torch.ops, namespace), name).default
