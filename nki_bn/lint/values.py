# SPDX-License-Identifier: Apache-2.0
"""What kind of object the names of a function hold, as far as its text shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum, auto

from nki_bn.lint.module import Module
from nki_bn.lint.tree import (
    DefinitionNode,
    FunctionNode,
    base_names,
    bound_names,
    defaults,
    last_name,
    own_nodes,
    parameters,
)


class Kind(Enum):
    """Kinds of objects that rules treat apart."""

    TENSOR = auto()
    REGISTER = auto()
    LIST = auto()
    DICT = auto()
    STRING = auto()
    FLOAT = auto()
    MEMBER = auto()  # of an Enum
    NC_VERSION = auto()
    OBJECT = auto()  # of a class without __eq__


TENSOR_MAKERS = (
    "ndarray zeros ones full zeros_like empty_like rand shared_constant shared_identity_matrix load copy"
    " load_transpose2d gather_flattened transpose broadcast_to expand_dims add subtract multiply divide maximum minimum"
    " abs_max abs_min power equal not_equal less less_equal greater greater_equal bitwise_and bitwise_or bitwise_xor"
    " left_shift right_shift logical_and logical_or logical_xor fmod mod abs square invert logical_not exp log sqrt"
    " rsqrt tanh sigmoid relu gelu silu softplus mish erf reciprocal sin cos tan arctan ceil floor trunc negative sign"
    " sum max min mean prod var all softmax rms_norm where dropout matmul"
).split()
VIEW_METHODS = frozenset(
    "slice select vector_select permute broadcast expand_dim squeeze_dim reshape_dim flatten_dims reshape rearrange"
    " view reinterpret_cast ap indirect".split()
)
_CALLS = {
    **{f"nki.language.{name}": Kind.TENSOR for name in TENSOR_MAKERS},
    "nki.isa.register_alloc": Kind.REGISTER,
    "nki.isa.get_nc_version": Kind.NC_VERSION,
    "nki.collectives.rank_id": Kind.REGISTER,
    "nki.collectives.collective_permute_implicit_current_processing_rank_id": Kind.REGISTER,
}
_ANNOTATIONS = {
    "nki.language.ndarray": Kind.TENSOR,
    "nki.language.NkiTensor": Kind.TENSOR,
    "nki.typing.tensor": Kind.TENSOR,
    "nki.typing.mutable_tensor": Kind.TENSOR,
    "nki.isa.VirtualRegister": Kind.REGISTER,
}
_BUILTINS = {
    "str": Kind.STRING,
    "float": Kind.FLOAT,
    "list": Kind.LIST,
    "List": Kind.LIST,
    "dict": Kind.DICT,
    "Dict": Kind.DICT,
}
_LITERALS: dict[type[ast.AST], Kind] = {
    ast.JoinedStr: Kind.STRING,
    ast.List: Kind.LIST,
    ast.ListComp: Kind.LIST,
    ast.Dict: Kind.DICT,
    ast.DictComp: Kind.DICT,
}
_Binding = ast.expr | Kind | None


class Values:
    """The kinds of a function's local names. A name has a kind only when every assignment to it has that kind."""

    def __init__(self, node: DefinitionNode, module: Module, outer: Values | None = None) -> None:
        self._module = module
        self._outer = outer
        self._local = bound_names(node)
        self._kinds: dict[str, Kind | None] = {}
        bindings = list(self._bindings(node)) if isinstance(node, FunctionNode) else []
        for name, value in bindings:
            self._kinds[name] = self._of(value)
        while changed := {name for name, value in bindings if self._kinds[name] not in (None, self._of(value))}:
            self._kinds.update(dict.fromkeys(changed))

    def kind(self, node: ast.expr) -> Kind | None:
        """The kind of an expression; None when the text does not show it."""
        if isinstance(node, ast.Name):
            outer = self._outer.kind(node) if self._outer and node.id not in self._local else None
            return self._kinds.get(node.id, outer)
        if isinstance(node, ast.Constant):
            return {str: Kind.STRING, float: Kind.FLOAT}.get(type(node.value))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return Kind.TENSOR if self.kind(node.value) is Kind.TENSOR else None
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return self._operation(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        return _LITERALS.get(type(node))

    def _of(self, value: _Binding) -> Kind | None:
        return self.kind(value) if isinstance(value, ast.expr) else value

    def _call(self, node: ast.Call) -> Kind | None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in VIEW_METHODS:
            if self.kind(function.value) is Kind.TENSOR:
                return Kind.TENSOR
        if isinstance(function, ast.Name) and function.id not in self._module.names | self._local:
            return _BUILTINS.get(function.id)
        found = self._module.resolve(function)
        if found and isinstance(found.node, ast.ClassDef):
            return _instance(found.node)
        return _CALLS.get(self._module.dotted(function) or "")

    def _operation(self, node: ast.UnaryOp | ast.BinOp) -> Kind | None:
        operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        is_float = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        return Kind.FLOAT if is_float or Kind.FLOAT in map(self.kind, operands) else None

    def _attribute(self, node: ast.Attribute) -> Kind | None:
        found = self._module.resolve(node.value)
        if found and isinstance(found.node, ast.ClassDef) and "Enum" in base_names(found.node):
            return Kind.MEMBER
        return Kind.NC_VERSION if self._module.dotted(node.value) == "nki.isa.nc_version" else None

    def _bindings(self, function: FunctionNode) -> Iterator[tuple[str, _Binding]]:
        yield from self._parameters(function)
        for node in own_nodes(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from _targets(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
                yield node.target.id, node.value
            elif isinstance(node, ast.For | ast.comprehension):
                yield from _targets(node.target, self._loop_variable(node.iter))
            elif isinstance(node, ast.withitem) and node.optional_vars:
                yield from _targets(node.optional_vars, None)

    def _parameters(self, function: FunctionNode) -> Iterator[tuple[str, _Binding]]:
        names = parameters(function)
        for position, parameter in enumerate(names):
            in_loop = position == 0 and function in self._module.loop_bodies
            yield parameter.arg, Kind.REGISTER if in_loop else self._annotation(parameter.annotation)
        yield from ((name, None) for name, value in defaults(function) if is_none(value))

    def _annotation(self, node: ast.expr | None) -> Kind | None:
        base = node.value if isinstance(node, ast.Subscript) else node
        if base is None:
            return None
        found = self._module.resolve(base)
        if found and isinstance(found.node, ast.ClassDef):
            return _instance(found.node)
        return _ANNOTATIONS.get(self._module.dotted(base) or "") or _BUILTINS.get(last_name(base))

    def _loop_variable(self, iterable: ast.expr) -> Kind | None:
        return Kind.REGISTER if is_dynamic_range(self._module, iterable) else None


def is_none(node: ast.expr) -> bool:
    """Whether a node is the literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def is_dynamic_range(module: Module, iterable: ast.expr) -> bool:
    """Whether a for loop over this runs on the device."""
    return isinstance(iterable, ast.Call) and module.dotted(iterable.func) == "nki.language.dynamic_range"


def _targets(target: ast.expr, value: _Binding) -> Iterator[tuple[str, _Binding]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        values: list[ast.expr] = value.elts if same and isinstance(value, ast.Tuple | ast.List) else []
        for position, element in enumerate(target.elts):
            yield from _targets(element, values[position] if values else None)
    elif isinstance(target, ast.Starred):
        yield from _targets(target.value, None)


def _instance(node: ast.ClassDef) -> Kind | None:
    if "Enum" in base_names(node):
        return Kind.MEMBER
    return Kind.OBJECT if "NKIObject" in base_names(node) and not _has_eq(node) else None


def _has_eq(node: ast.ClassDef) -> bool:
    if any(isinstance(item, FunctionNode) and item.name == "__eq__" for item in node.body):
        return True
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if last_name(call.func if call else decorator) == "dataclass":
            given = {keyword.arg: keyword.value for keyword in call.keywords} if call else {}
            return getattr(given.get("eq"), "value", True) is not False
    return False
