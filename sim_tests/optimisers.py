# SPDX-License-Identifier: Apache-2.0
"""One step of the two usual optimisers, for one parameter of any shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nki_bn.reference import Float64


@dataclass(frozen=True)
class Momentum:
    """velocity = decay*velocity + gradient; parameter -= rate*velocity."""

    rate: float = 0.1
    decay: float = 0.9

    def step(self, parameter: Float64, gradient: Float64, velocity: Float64) -> Float64:
        """The new parameter."""
        return parameter - self.rate * (self.decay * velocity + gradient)


@dataclass(frozen=True)
class Adam:
    """Means of the gradient and of its square, both freed from their start at 0; the step is their ratio."""

    rate: float = 0.01
    decay: float = 0.9
    square_decay: float = 0.999
    eps: float = 1e-8

    def step(self, parameter: Float64, gradient: Float64, first: Float64, second: Float64, steps: int) -> Float64:
        """The new parameter after ``steps`` earlier ones, which left the means ``first`` and ``second``."""
        mean = (self.decay * first + (1 - self.decay) * gradient) / (1 - self.decay ** (steps + 1))
        square = self.square_decay * second + (1 - self.square_decay) * gradient**2
        square /= 1 - self.square_decay ** (steps + 1)
        return parameter - self.rate * mean / (np.sqrt(square) + self.eps)
