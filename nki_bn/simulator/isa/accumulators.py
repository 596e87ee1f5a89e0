# SPDX-License-Identifier: Apache-2.0
"""The two banks of accumulator registers, one float32 per lane, and the commands that change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.enums import reduce_cmd
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.numerics import Array, Float32
from nki_bn.simulator.tensor import NkiTensor, require

_RESETTING = (reduce_cmd.reset, reduce_cmd.reset_reduce)
_REDUCING = (reduce_cmd.reduce, reduce_cmd.reset_reduce, reduce_cmd.load_reduce)


def registers(bank: str, dst: NkiTensor) -> Float32:
    """The accumulators of the lanes that write ``dst``, shape (partitions, 1), writable."""
    first = dst.address[0]
    return current_core().accumulators[bank][first : first + dst.shape[0], None]


@dataclass(frozen=True)
class Accumulation:
    """What an instruction does with its bank: the operator, the command and where the result goes.

    ``initial`` (number or column) is what ``load_reduce`` starts from.
    """

    bank: str
    operator: str
    command: reduce_cmd
    result: NkiTensor | None = None
    negate: bool = False
    initial: Any = None

    @property
    def results(self) -> list[NkiTensor]:
        """The tile that the registers are read out into, if any."""
        return [] if self.result is None else [self.result]

    @property
    def columns(self) -> list[NkiTensor]:
        """The initial value if it is a column in memory."""
        return [self.initial] if isinstance(self.initial, NkiTensor) else []

    @property
    def attributes(self) -> dict[str, Any]:
        """What a timing model needs to know."""
        return {"reduce_op": self.operator, "reduce_cmd": self.command.name, "read_out": self.result is not None}

    def start(self, dst: NkiTensor) -> Float32:
        """The registers of the lanes of ``dst`` after what the command does first: reset, load, or nothing."""
        lanes = registers(self.bank, dst)
        if self.command in _RESETTING:
            lanes[...] = alu.IDENTITIES[self.operator]
        if self.command is reduce_cmd.load_reduce:
            lanes[...] = checks.operand_values(self.initial)
        return lanes

    def run(self, dst: NkiTensor, values: Array) -> list[Array]:
        """Bring the registers of the lanes of ``dst`` up to date with ``values`` (partitions, columns).

        Returns what is read out: one column, or nothing.
        """
        lanes = self.start(dst)
        if self.command in _REDUCING:
            lanes[...] = alu.accumulate(self.operator, lanes, values, current_core().options.accumulate)
        if self.result is None:
            return []
        return [-lanes if self.negate else lanes.copy()]


def command(instruction: str, value: Any, accepted: tuple[reduce_cmd, ...]) -> reduce_cmd:
    """``value`` if it is one of the ``accepted`` members.

    Raises:
        TypeError: it is no member of reduce_cmd.
        NkiValidationError: it is not accepted.
    """
    member = checks.member(instruction, "reduce_cmd", value, reduce_cmd)
    require(
        member in accepted,
        f"{instruction} reduce_cmd {member.name} is not accepted; accepted: "
        f"{', '.join(item.name for item in accepted)}",
    )
    return member


def row_maximum(
    operands: Operands, reduce_op: Any, reduce_cmd: Any, reduce_res: Any, data: NkiTensor, accepted: tuple[Any, ...]
) -> Accumulation:
    """The accumulation of Vector instructions that keep the maximum of every partition of ``data``.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: another operator, a command that is not ``accepted``, or no column to read out into.
    """
    operator = alu.find_reduction(operands.instruction, "reduce_op", reduce_op, ("maximum",))
    chosen = command(operands.instruction, reduce_cmd, accepted)
    return Accumulation("vector", operator.name, chosen, operands.result("reduce_res", reduce_res, data))
