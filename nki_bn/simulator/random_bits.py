# SPDX-License-Identifier: Apache-2.0
"""The random number generators of the engines: one state per lane, and the bits it gives.

The hardware's generators are documented by name only (XORWOW, on early chips an LFSR), not bit for bit. Here every
engine has XORWOW as G. Marsaglia published it ("Xorshift RNGs", 2003): five words of xorshift and a Weyl counter, six
words a stream, which is how many the instructions that move states in and out work on. Bits differ from hardware.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

# Words of one stream, and the streams of a lane on each engine: element i of a row comes from stream i mod streams.
STREAM_WORDS = 6
STREAMS = {"vector": 4, "gpsimd": 1}

# Shifts and increment of the generator.
_ONE, _TWO, _FOUR = np.uint32(1), np.uint32(2), np.uint32(4)
_WEYL = np.uint32(362437)
# Bits of a float32's significand.
_UNIFORM_BITS = 24


class Xorwow:
    """Generators of all lanes of one engine; ``state`` has shape (lanes, streams, 6).

    Args:
        lanes: number of lanes.
        streams: independent streams per lane.
        seeds: numbers that decide the first state.
    """

    def __init__(self, lanes: int, streams: int, *seeds: int) -> None:
        self.state: Words = np.empty((lanes, streams, STREAM_WORDS), np.uint32)
        self.seed(*seeds)

    def seed(self, *seeds: int) -> None:
        """Start all streams of all lanes from states that NumPy's ``SeedSequence`` makes of ``seeds``."""
        self.state[...] = np.random.SeedSequence(seeds).generate_state(self.state.size).reshape(self.state.shape)

    def rows(self, first: int, partitions: int) -> Words:
        """The states of ``partitions`` lanes from ``first`` on, shape (partitions, words), writable."""
        return self.state.reshape(len(self.state), -1)[first : first + partitions]

    def bits(self, first: int, partitions: int, columns: int) -> Words:
        """The next 32-bit numbers of these lanes, shape (partitions, columns); a last round of streams is used up."""
        lanes = self.state[first : first + partitions]
        rounds = -(-columns // lanes.shape[1])
        result = np.empty((rounds, *lanes.shape[:2]), np.uint32)
        words: list[Words] = [lanes[..., word].copy() for word in range(STREAM_WORDS)]
        x, y, z, w, v, d = words
        for step in range(rounds):
            t = x ^ (x >> _TWO)
            x, y, z, w, v = y, z, w, v, v ^ (v << _FOUR) ^ t ^ (t << _ONE)
            d = d + _WEYL
            np.add(d, v, out=result[step])
        lanes[...] = np.stack([x, y, z, w, v, d], axis=-1)
        return result.transpose(1, 0, 2).reshape(partitions, -1)[:, :columns]

    def uniform(self, first: int, partitions: int, columns: int) -> npt.NDArray[np.float32]:
        """The next float32 numbers in [0, 1) of these lanes, multiples of 2^-24, shape (partitions, columns)."""
        high = self.bits(first, partitions, columns) >> (32 - _UNIFORM_BITS)
        return high.astype(np.float32) * np.float32(2.0**-_UNIFORM_BITS)
