# SPDX-License-Identifier: Apache-2.0
"""The function that is being emitted: its parameters, operations and names, and the replicas that run it."""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Sequence

from nki_bn.stablehlo.value import ELEMENTS, Type, Value, number, require_float32

_CLAIMED = "collective of a site"
# What the text format takes for a name that does not start with a digit; those that do are given to what has none.
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_.$]*")


class Graph:
    """One function, which all replicas run on shards of the same shape; as a group, one that emits its collectives.

    Args:
        replicas: how many run the function.
        groups: those that share a batch, all groups of one size; None for all of them. R is the size of a group.
        first_channel: the handle of the first collective; each has one of its own.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """

    def __init__(
        self, replicas: int = 1, groups: Sequence[Sequence[int]] | None = None, first_channel: int = 1
    ) -> None:
        self.replicas = _at_least_one("replicas", replicas)
        self.groups = _groups(groups, self.replicas)
        self._channel = _at_least_one("first_channel", first_channel)
        self._parameters: list[Value] = []
        # What has a name: a parameter, a collective, or one that a site may emit.
        self._taken: dict[str, str] = {}
        self._sites: set[tuple[str, str]] = set()
        self._fresh = 0
        self._lines: list[str] = []
        self._made: dict[tuple[object, ...], tuple[Value, ...]] = {}

    @property
    def size(self) -> int:
        """R, the number of replicas that share a batch."""
        return len(self.groups[0])

    @property
    def body(self) -> str:
        """The operations so far, one to a line but for regions."""
        return "".join(f"    {line}\n" for line in self._lines)

    def parameter(self, name: str, shape: Sequence[int], dtype: str = "float32") -> Value:
        """One more parameter of the function.

        Raises:
            TypeError, ValueError: the name, shape or dtype is not accepted; another parameter or a collective has the
                name.
        """
        _check_name("name", name)
        if not isinstance(dtype, str) or dtype not in ELEMENTS:
            raise TypeError(f"dtype of {name} is {dtype!r}; accepted: {', '.join(ELEMENTS)}")
        if name in self._taken:
            raise ValueError(f"name is {name!r}, that of a {self._taken[name]}; accepted: a name of its own")
        self._taken[name] = "parameter"
        self._parameters.append(Value(self, name, Type(_shape(name, shape), dtype)))
        return self._parameters[-1]

    def claim(self, tag: str, site: str, names: Sequence[str]) -> None:
        """Take a tag for a ``site`` of its layer, and the names of the collectives that may be emitted there.

        Raises:
            TypeError: the tag is no string.
            ValueError: the tag was used for such a site before, is no SSA name, or makes a name that is taken.
        """
        _check_name("tag", tag)
        if (tag, site) in self._sites:
            raise ValueError(f"tag is {tag!r}, which another {site} site has; accepted: a tag of its own per layer")
        for name in names:
            self._require_free(name)
        self._sites.add((tag, site))
        self._taken.update(dict.fromkeys(names, _CLAIMED))

    def emit(
        self,
        operation: str,
        operands: Sequence[Value],
        results: Sequence[Type],
        attributes: str = "",
        name: str = "",
        adds: bool = False,
    ) -> tuple[Value, ...]:
        """The results of a StableHLO operation, in the generic form; one that is there already is not emitted again.

        Args:
            operation, operands, results, attributes: of the operation, which has no side effect unless it is named.
            name: that of its one result, and its location, which outlives parsing. Without one, results are numbered.
            adds: it reduces, by a region that adds float32 numbers.

        Raises:
            TypeError, ValueError: an operand is of another graph, or to be added up and not float32; the name is taken,
                or not accepted.
        """
        self._require_own(operands)
        if adds:
            require_float32(operands)
        if name and self._taken.get(name) != _CLAIMED:
            _check_name("name", name)
            self._require_free(name)
        key = operation, tuple(operands), tuple(results), attributes
        if not name and key in self._made:
            return self._made[key]
        region = f" ({self._addition()})" if adds else ""
        made = tuple(Value(self, name or self._number(), result) for result in results)
        called = f'"stablehlo.{operation}"({_names(operands)}){region}' + (f" {{{attributes}}}" if attributes else "")
        out = _types(results) if len(results) == 1 else f"({_types(results)})"
        signature = f"({_types([value.type for value in operands])}) -> {out}"
        self._lines.append(f"{_names(made)} = {called} : {signature}" + (f' loc("{name}")' if name else ""))
        self._made[key] = made
        if name:
            self._taken[name] = "collective"
        return made

    def constant(self, value: float, shape: Sequence[int] = ()) -> Value:
        """A float32 tensor of one value."""
        made = Type(tuple(shape), "float32")
        return self.emit("constant", (), (made,), f"value = dense<{number(value)}> : {made}")[0]

    def join(self, parts: Sequence[Value]) -> Value:
        """One float32 value [sum of K] of values [K]."""
        made = Type((sum(map(len, parts)),), "float32")
        return self.emit("concatenate", parts, (made,), "dimension = 0 : i64")[0]

    def all_reduce(self, name: str, values: Value) -> Value:
        """The sum over the group of ``values`` [K], on each replica."""
        return self.emit("all_reduce", (values,), (values.type,), self._collective(), name, adds=True)[0]

    def all_gather(self, name: str, values: Value) -> Value:
        """[R, K]: ``values`` [K] of all replicas of the group, on each."""
        row = values.reshape((1, len(values)))
        made = Type((self.size, len(values)), values.dtype)
        return self.emit("all_gather", (row,), (made,), f"all_gather_dim = 0 : i64, {self._collective()}", name)[0]

    def module(self, results: Sequence[Value], name: str = "nki_bn") -> str:
        """The whole module, with the function as ``main``, which returns ``results``.

        Raises:
            TypeError, ValueError: a result is of another graph, or the name is not accepted.
        """
        _check_name("name", name)
        self._require_own(results)
        taken = ", ".join(f"%{value.name}: {value.type}" for value in self._parameters)
        types = _types([value.type for value in results])
        returned = f"return {_names(results)} : {types}" if results else "return"
        attributes = f"mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {self.replicas} : i32"
        return (
            f"module @{name} attributes {{{attributes}}} {{\n"
            f"  func.func public @main({taken}) -> ({types}) {{\n"
            f"{self.body}    {returned}\n  }}\n}}\n"
        )

    def _require_own(self, values: Sequence[Value]) -> None:
        for value in values:
            if value.graph is not self:
                raise ValueError(f"{value.name} is a value of another graph; accepted: values of one graph")

    def _require_free(self, name: str) -> None:
        if name in self._taken:
            raise ValueError(
                f"the collective {name} has the name of a {self._taken[name]}; accepted: a tag for a new name"
            )

    def _addition(self) -> str:
        """The region of a reduction that adds float32 numbers."""
        one, other, total = (f"%{self._number()}" for _ in range(3))
        scalar = Type((), "float32")
        return (
            f"{{\n    ^bb0({one}: {scalar}, {other}: {scalar}):\n"
            f'      {total} = "stablehlo.add"({one}, {other}) : ({scalar}, {scalar}) -> {scalar}\n'
            f'      "stablehlo.return"({total}) : ({scalar}) -> ()\n    }}'
        )

    def _number(self) -> str:
        self._fresh += 1
        return str(self._fresh - 1)

    def _collective(self) -> str:
        """The attributes that say who takes part, with a channel of its own."""
        channel, self._channel = self._channel, self._channel + 1
        ranks = ", ".join(str(list(group)) for group in self.groups)
        return (
            f"replica_groups = dense<[{ranks}]> : tensor<{len(self.groups)}x{self.size}xi64>, "
            f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 0>"
        )


def _names(values: Sequence[Value]) -> str:
    return ", ".join(f"%{value.name}" for value in values)


def _types(types: Sequence[Type]) -> str:
    return ", ".join(map(str, types))


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} is {value}; accepted: integers from 1 up")
    return int(value)


def _groups(groups: Sequence[Sequence[int]] | None, replicas: int) -> tuple[tuple[int, ...], ...]:
    if groups is None:
        return (tuple(range(replicas)),)
    made = tuple(tuple(map(operator.index, group)) for group in groups)
    if sorted(rank for group in made for rank in group) != list(range(replicas)):
        raise ValueError(f"groups is {made}; accepted: every replica from 0 to {replicas - 1} in one group")
    if len({len(group) for group in made}) != 1:
        raise ValueError(f"groups is {made}; accepted: groups of one size, as all replicas run one function")
    return made


def _check_name(argument: str, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a string, got {type(name).__name__}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{argument} is {name!r}; accepted: letters, digits, and _ . $, not starting with digit or dot"
        )


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(map(operator.index, shape))
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape of {name} is {sizes}; accepted: sizes from 0 up")
    return sizes
