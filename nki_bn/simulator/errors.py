# SPDX-License-Identifier: Apache-2.0
"""The errors a simulated kernel can raise, one class per kind of fault."""

from __future__ import annotations


class NkiValidationError(AssertionError):
    """A rule of the instruction set is violated (an AssertionError too, as the vendor's simulator raises those)."""


class UnsupportedError(NkiValidationError, NotImplementedError):
    """A documented name that the simulator does not execute."""


class OutOfMemoryError(NkiValidationError):
    """A tile does not fit into SBUF or PSUM; the message lists the live tiles."""


class UninitializedReadError(NkiValidationError):
    """An instruction of a strict run read bytes that nothing has written."""


class IncompleteOutputError(NkiValidationError):
    """A strict run returned a tensor of which some elements were never written."""


class IndexRangeError(NkiValidationError):
    """A run-time index reaches outside its tensor."""


class RaceError(NkiValidationError):
    """Two cores touched the same bytes of shared HBM, one of them writing, with no barrier between."""


class DeadlockError(RuntimeError):
    """Every unfinished core waits for something that no other core will do."""
