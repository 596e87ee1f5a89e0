# SPDX-License-Identifier: Apache-2.0
"""Which way a batch norm is computed: by the kernel on a Neuron device, in the simulator, or by torch itself."""

from __future__ import annotations

import torch

from nki_bn import execute

# What a module or a call may ask for; None chooses by the device of the input.
BACKENDS = ("neuron", "simulator", "torch")
# Of torch-xla, of the native backend under its name, and of the latter where nobody named it.
NEURON_DEVICES = frozenset({"xla", "neuron", "privateuseone"})


def check_backend(backend: str | None) -> str | None:
    """``backend`` if it is one of ``BACKENDS`` or None.

    Raises:
        ValueError: it is something else.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; accepted: {', '.join(map(repr, BACKENDS))} and None")
    return backend


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def path_of(device_type: str, backend: str | None) -> str:
    """One of ``BACKENDS``, for an input on a device of type ``device_type``.

    None takes the kernel on a Neuron device; the simulator on the CPU if NKI_SIMULATOR is 1; else torch's own batch
    norm. Compiled code keeps what was chosen when it was compiled.

    Raises:
        ValueError: ``backend`` is unknown, or cannot work with tensors on that device; NKI_SIMULATOR is something else
            than 0 and 1 where it counts.
        RuntimeError: the simulator is asked for where the vendor's nki would run on a device instead.
    """
    if check_backend(backend) is None:
        return _automatic(device_type)
    needed = {"neuron": NEURON_DEVICES, "simulator": {"cpu"}}
    if backend in needed and device_type not in needed[backend]:
        names = " or ".join(sorted(needed[backend]))
        raise ValueError(f"backend is {backend!r} and the input is on {device_type}; accepted: an input on {names}")
    if backend == "simulator" and _would_run_on_a_device():
        raise RuntimeError(
            f"backend is 'simulator' beside a Neuron device; accepted with {execute.SIMULATOR_VARIABLE}=1 set"
        )
    assert backend is not None
    return backend


def _automatic(device_type: str) -> str:
    if device_type in NEURON_DEVICES:
        return "neuron"
    return "simulator" if device_type == "cpu" and execute.simulating() else "torch"


def _would_run_on_a_device() -> bool:
    return execute.which_nki().kind == "vendor" and execute.has_device() and not execute.simulating()
