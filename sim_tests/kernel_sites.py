# SPDX-License-Identifier: Apache-2.0
"""Sites of the whole network whose batch norm the kernels do, and what their errors do to the rest of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from judging import joined, judge_gradients, judge_output, judge_statistics
from layers import Gradients
from replicas import Backward, Forward, Layer, Part, synchronised_backward, synchronised_forward
from whole_net import Normalised, PlainSite, Shards

from nki_bn import reference, tolerances
from nki_bn.problem import BackwardCase, ForwardCase
from nki_bn.reference import Array, Float64
from nki_bn.simulator import RunOptions
from nki_bn.tolerances import FLOAT32, Arithmetic

FLOAT = Arithmetic("float32")


@dataclass(frozen=True)
class KernelSite:
    """float32 kernels, plain on one replica and synchronised on more; every result is judged as it comes."""

    options: RunOptions = field(default_factory=RunOptions)

    def forward(self, x: Shards, gamma: Float64, beta: Float64, masks: list[Array] | None) -> Normalised:
        """See ``whole_net.Site``; the masks are the kernels' own."""
        assert masks is None
        layer = Layer(gamma.astype(np.float32), beta.astype(np.float32), relu="mask", options=self.options)
        parts = [Part(_launched(part), np.zeros_like(_launched(part))) for part in x]
        done = synchronised_forward(layer, parts) if len(parts) > 1 else _plain_forward(layer, parts[0])
        whole = Part(joined([part.x for part in parts]), joined([part.dy for part in parts]))
        judge_statistics(whole, parts, done, layer)
        judge_output(whole, done, layer)
        y = [_returned(values, part.shape) for values, part in zip(done.y, x, strict=True)]
        passed = [mask.reshape(part.shape) > 0 for mask, part in zip(done.masks, x, strict=True)]
        return Normalised(y, passed, (layer, parts, done))

    def backward(self, dy: Shards, saved: Any) -> list[Gradients]:
        """See ``whole_net.Site``."""
        layer, forward_parts, forward = saved
        masked = zip(forward_parts, dy, forward.masks, strict=True)
        parts = [Part(part.x, _launched(cotangent), mask=mask) for part, cotangent, mask in masked]
        statistics = forward.mean, forward.var
        if len(parts) > 1:
            done = synchronised_backward(layer, parts, *statistics)
        else:
            done = Backward(*([result] for result in layer.gradients(parts[0], *statistics)))
        gradient = joined([part.dy for part in parts])
        whole = Part(joined([part.x for part in parts]), gradient, mask=joined(forward.masks))
        judge_gradients(whole, parts, done, forward, layer)
        return [
            Gradients(_returned(dx, cotangent.shape), dgamma.astype(np.float64), dbeta.astype(np.float64))
            for dx, dgamma, dbeta, cotangent in zip(*done, dy, strict=True)
        ]


def _plain_forward(layer: Layer, part: Part) -> Forward:
    y, mean, var, _, _, mask = layer.training_forward(part)
    return Forward([y], [mask], mean, var)


def _launched(x: Float64) -> Array:
    """[n, C, 1, H, W] float32."""
    return x.astype(np.float32)[:, :, None]


def _returned(x: Array, shape: tuple[int, ...]) -> Float64:
    return x.astype(np.float64).reshape(shape)


@dataclass(frozen=True)
class ShakenSite:
    """The float64 site with every result moved by all that a float32 kernel may be off, up or down by chance."""

    rng: np.random.Generator
    exact: PlainSite = PlainSite()

    def forward(self, x: Shards, gamma: Float64, beta: Float64, masks: list[Array] | None) -> Normalised:
        """See ``whole_net.Site``."""
        (given,) = x
        moved = self._shaken(given, FLOAT32 * np.abs(given))
        y, chosen, saved = self.exact.forward([moved], gamma, beta, masks)
        error = np.where(chosen[0], self._output_error(moved, gamma, beta) + FLOAT32 * np.abs(y[0]), 0.0)
        return Normalised([self._shaken(y[0], error)], chosen, saved)

    def backward(self, dy: Shards, saved: Any) -> list[Gradients]:
        """See ``whole_net.Site``."""
        x, mean, var, gamma, mask = saved
        cotangent = self._shaken(dy[0], FLOAT32 * np.abs(dy[0]))
        (local,) = self.exact.backward([cotangent], saved)
        case = BackwardCase(cotangent, x, mean, var, gamma, None, self.exact.eps, True, mask)
        want = reference.batch_norm_bwd(cotangent, x, mean, var, gamma, self.exact.eps, mask)
        allowed = tolerances.backward(case, want, FLOAT, np.zeros(x.shape, np.bool_))
        names = zip(local, ("dx", "dgamma", "dbeta"), strict=True)
        return [Gradients(*(self._shaken(v, allowed[name].error + FLOAT32 * np.abs(v)) for v, name in names))]

    def _output_error(self, x: Float64, gamma: Float64, beta: Float64) -> Float64:
        """Of y from the kernel's own statistics."""
        mean, var = reference.statistics(x)
        want = reference.batch_norm_fwd(x, gamma, beta, self.exact.eps)
        own = tolerances.forward(ForwardCase(x, gamma, beta), want, FLOAT)
        allowed = tolerances.statistics(x, mean, var, FLOAT)
        root = np.sqrt(var + self.exact.eps)
        of_mean = np.abs(gamma) * (allowed["mean"].error + FLOAT32 * np.abs(mean)) / root
        of_var = (allowed["var"].error + FLOAT32 * var) / (2 * root**2)
        through = reference.column(of_mean, x) + want.z.scale * reference.column(of_var, x)
        error: Float64 = own + through
        return error

    def _shaken(self, values: Float64, error: Float64) -> Float64:
        return values + np.where(self.rng.random(values.shape) < 0.5, error, -error)
