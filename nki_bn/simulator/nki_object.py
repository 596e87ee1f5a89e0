# SPDX-License-Identifier: Apache-2.0
"""NKIObject: the base of classes that kernels use."""

from __future__ import annotations

import inspect
from typing import Any


class NKIObject:
    """Base of objects that kernels build or take as compile-time arguments.

    A subclass without initialiser gets one, as from a compiler: its fields in order, a missing one is its default or
    None, then ``__post_init__``. Fields are the annotated names and the plainly assigned ones, for ``@dataclass`` too.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields = inspect.get_annotations(cls)
        for name in fields:
            if not hasattr(cls, name) and cls.__init__ is NKIObject.__init__:
                setattr(cls, name, None)
        cls.__annotations__ = fields | {
            name: type(value)
            for name, value in vars(cls).items()
            if name not in fields and not name.startswith("_") and _is_default(value)
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = [name for kind in reversed(type(self).__mro__) for name in inspect.get_annotations(kind)]
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} has {len(names)} fields, got {len(args)} values")
        defaults = {name: getattr(type(self), name, None) for name in names}
        for name, value in (defaults | dict(zip(names, args, strict=False)) | kwargs).items():
            setattr(self, name, value)
        if hasattr(self, "__post_init__"):
            self.__post_init__()


def _is_default(value: Any) -> bool:
    """Whether a value in a class body is that of a field: no method, property or class, and not mutable."""
    return not hasattr(value, "__get__") and not isinstance(value, type) and type(value).__hash__ is not None
