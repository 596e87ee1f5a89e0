# SPDX-License-Identifier: Apache-2.0
"""NkiTensor: a strided view of a storage, with the indexing rules and view methods of NKI."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.dynamic import Dynamic, check_view, free_offsets, row_indices, scalar_index
from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.indexing import indexed
from nki_bn.simulator.memory import Bank, MemoryRegion, Storage
from nki_bn.simulator.nki_object import NKIObject
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.shapes import flat, infer, integer, put, require, row_major

__all__ = ["MAX_DIMS", "NkiTensor", "integer", "require"]

MAX_DIMS = 5


class NkiTensor(NKIObject):
    """A view: ``shape`` and ``strides`` and ``offset`` in elements of ``dtype`` over ``storage``."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        storage: Storage,
        buffer: MemoryRegion | None = None,
        name: str = "",
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        dynamic: Dynamic | None = None,
    ) -> None:
        self._storage = storage
        self.dtype = dtypes.normalize(dtype)
        self.shape = tuple(int(size) for size in shape)
        self.strides = tuple(strides) if strides is not None else row_major(self.shape)
        self.offset = offset
        self.dynamic = dynamic
        self.outside = ""
        # Found when they are needed: where the view lies, and how NumPy looks at it.
        self._bytes: tuple[int, tuple[int, ...]] | None = None
        self._layout: tuple[Any, ...] | None = None
        self._seen: tuple[Array, Array] | None = None
        require(len(self.shape) <= MAX_DIMS, f"a view has at most {MAX_DIMS} dimensions, got shape {self.shape}")

    def __repr__(self) -> str:
        return f"NkiTensor({self.name or 'unnamed'}, shape={self.shape}, dtype={self.dtype}, {self.buffer.value})"

    def __bool__(self) -> bool:
        # Public kernels ask `if tensor:` for `if tensor is not None:`; in a strict run it counts as one about values.
        if _lenient():
            return True
        raise TypeError(f"{self!r} has no truth value: what a tensor holds is unknown when a kernel is compiled")

    def __setitem__(self, key: Any, value: Any) -> None:
        # The vendor's parser refuses it, but its stub has it and kernels for its simulator use it.
        if _lenient():
            from nki_bn.simulator.language.tiles import assign

            return assign(self[key], value)
        raise TypeError("item assignment on a tensor is not NKI: write with an instruction, dst=tensor[...]")

    # --- queries -------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """What this view looks at."""
        return self._storage

    @property
    def buffer(self) -> MemoryRegion:
        """The memory region."""
        return self._storage.region

    @property
    def name(self) -> str:
        """Name given at creation, or the empty string."""
        return self._storage.name

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def address(self) -> tuple[int, int]:
        """(partition, byte in the partition) of the first element of an on-chip tensor."""
        if not self.buffer.on_chip:
            raise NkiValidationError(f"{self!r} is not on chip: only tiles have an address")
        partition, byte = divmod(self.byte_offset(), self._storage.pitch)
        return partition, byte

    def is_contiguous(self) -> bool:
        """Whether inner dimensions are packed (on chip the partition dimension does not count)."""
        dims = range(1 if self.buffer.on_chip else 0, self.ndim)
        packed = (0,) * dims.start + row_major(self.shape[dims.start :])
        return all(self.shape[dim] == 1 or self.strides[dim] == packed[dim] for dim in dims)

    def is_indirect(self) -> bool:
        """Whether a run-time index takes part in the address."""
        return self.dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        """``[[stride, count], ...]`` as :meth:`ap` takes it."""
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    # --- physical access -------------------------------------------------------------------------------------------

    def byte_offset(self) -> int:
        """Logical byte address of the first element (a run-time index not included)."""
        return self._located()[0]

    def byte_strides(self) -> tuple[int, ...]:
        """Logical byte stride of every dimension."""
        return self._located()[1]

    def _located(self) -> tuple[int, tuple[int, ...]]:
        if self._bytes is None:
            require(not self.outside, self.outside)
            storage, itemsize = self._storage, dtypes.size_of(self.dtype)
            self._bytes = storage.locate(self.offset, itemsize), storage.byte_strides(self.strides, itemsize)
        return self._bytes

    def array(self) -> Array:
        """The elements, as a writable NumPy view of the memory."""
        bank = self._storage.bank
        if not self._storage.region.on_chip:
            return self._look(bank)
        # One instruction after another looks at a tile. (What is in HBM may be the caller's, and is not kept.)
        if self._seen is None or self._seen[0] is not bank.data:
            self._seen = bank.data, self._look(bank)
        return self._seen[1]

    def _look(self, bank: Bank) -> Array:
        if self._layout is None:
            strides = tuple(stride * bank.scale for stride in self.byte_strides())
            element = self._storage.element_type(self.dtype)
            self._layout = self.shape, element, self.byte_offset() * bank.scale, strides
        shape, element, offset, strides = self._layout
        return np.ndarray(shape, element, bank.data, offset, strides)

    def shadow(self) -> Array:
        """The shadow bytes of the elements, as a writable view."""
        itemsize = dtypes.size_of(self.dtype)
        shape, strides = self.shape, self.byte_strides()
        if strides[-1] == itemsize:
            shape, strides = (*shape[:-1], shape[-1] * itemsize), (*strides[:-1], 1)
        elif itemsize > 1:
            shape, strides = (*shape, itemsize), (*strides, 1)
        return np.ndarray(shape, np.uint8, self._storage.bank.shadow, self.byte_offset(), strides)

    def begun(self) -> Array:
        """Of a tile in PSUM: whether each element was written through this tile, as a writable view."""
        itemsize = dtypes.size_of(self.dtype)
        strides = tuple(stride * itemsize for stride in self.strides)
        return np.ndarray(self.shape, np.bool_, self._storage.begun, self.offset * itemsize, strides)

    def put(self, array: Array | None = None, shadow: Array | None = None, begun: Array | None = None) -> None:
        """Write back what the three methods above gave, changed. They gave the memory itself: nothing is left to do."""

    # --- views -----------------------------------------------------------------------------------------------------

    def _view(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int | None = None,
        dtype: str | None = None,
        dynamic: Dynamic | None = None,
    ) -> NkiTensor:
        check_view(self, shape, strides, dynamic)
        view = NkiTensor(
            shape,
            dtype or self.dtype,
            self._storage,
            strides=tuple(strides),
            offset=self.offset if offset is None else offset,
            dynamic=dynamic or self.dynamic,
        )
        view.outside = self.outside
        return view

    def _dim(self, dim: int, *, partition: bool = False) -> int:
        require(
            isinstance(dim, int) and -self.ndim <= dim < self.ndim,
            f"dim {dim!r} is not a dimension of shape {self.shape}",
        )
        dim %= self.ndim
        require(
            partition or dim != 0 or not self.buffer.on_chip,
            f"dimension 0 of an on-chip tensor is the partition dimension: {self.shape} cannot be changed there",
        )
        return dim

    def __getitem__(self, key: Any) -> NkiTensor:
        return self._view(*indexed(key, self.shape, self.strides, self.offset, on_chip=self.buffer.on_chip))

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """``t[..., start:end:step, ...]`` at ``dim``; 0 <= start < end <= size, step >= 1."""
        dim = self._dim(dim, partition=True)
        start, end, step = (integer(value, "start, end and step of slice") for value in (start, end, step))
        require(
            0 <= start < end <= self.shape[dim] and step >= 1,
            f"slice(dim={dim}, start={start}, end={end}, step={step}) is out of range for shape {self.shape}",
        )
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        """The view at ``index`` of ``dim``; a tile or register as index is read when an instruction runs."""
        dim = self._dim(dim, partition=True)
        if not isinstance(index, NKIObject):
            return self[(slice(None),) * dim + (integer(index, "select index"),)]
        require(dim != 0 or not self.buffer.on_chip, "a run-time index cannot select the partition dimension")
        fixed = self[(slice(None),) * dim + (0,)]
        return fixed._with_dynamic(scalar_index(index, self.strides[dim], self.shape[dim]))

    def _with_dynamic(self, dynamic: Dynamic) -> NkiTensor:
        return self._view(self.shape, self.strides, dynamic=dynamic)

    def vector_select(self, dim: int, vector_offset: Any) -> NkiTensor:
        """Row w is row ``vector_offset[w]`` of this HBM tensor, read when an instruction runs.

        ``dim`` is 0; ``vector_offset`` is a tile (P, 1) of int32 or uint32 in SBUF, and dimension 0 becomes P.
        """
        require(dim == 0, f"vector_select dim must be 0, got {dim!r}")
        rows = row_indices(vector_offset, self.strides[0], self.shape[0], self)
        require(rows.index.size == rows.index.shape[0], f"vector_select vector_offset must be (P, 1), got {rows.index}")
        return self._view((rows.index.shape[0], *self.shape[1:]), self.strides, dynamic=rows)

    def indirect(self, index: Any, num_elem: int | None = None) -> NkiTensor:
        """Columns at run-time offsets along the (flattened) free dimensions: a view (P, num_elem), from gen4.

        ``index`` is an integer tile (P, K) in SBUF; column i lies at ``index[i % G, i // G]``, where G is 32 for the
        Tensor engine and 16 for the others. ``num_elem`` is by default the number of elements of ``index``.
        """
        require(self.buffer.on_chip, f"indirect needs a tile on chip, got {self!r}")
        tile = self.reshape((self.shape[0], -1))
        offsets = free_offsets(index, tile.shape[1], self.shape[0])
        count = index.size if num_elem is None else integer(num_elem, "indirect num_elem")
        require(1 <= count <= index.size, f"indirect num_elem must be 1 to {index.size}, got {count}")
        return tile._view((self.shape[0], count), tile.strides, dynamic=offsets)

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Dimensions in the order ``dims``; on chip the partition dimension stays first."""
        require(sorted(dims) == list(range(self.ndim)), f"dims {tuple(dims)} do not permute {self.ndim} dimensions")
        require(not self.buffer.on_chip or dims[0] == 0, f"dims {tuple(dims)} would move the partition dimension")
        return self._view([self.shape[dim] for dim in dims], [self.strides[dim] for dim in dims])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a dimension of size 1 ``size`` times without copying."""
        dim = self._dim(dim)
        require(self.shape[dim] == 1, f"broadcast needs size 1 in dimension {dim}, got shape {self.shape}")
        require(integer(size, "broadcast size") >= 1, f"broadcast size must be at least 1, got {size}")
        return self._view(put(self.shape, dim, size), put(self.strides, dim, 0))

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of size 1 at ``dim``."""
        require(
            0 <= dim <= self.ndim and (dim != 0 or not self.buffer.on_chip),
            f"expand_dim({dim}) is not possible for shape {self.shape} in {self.buffer.value}",
        )
        return self._view((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], 1, *self.strides[dim:]))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove a dimension of size 1."""
        dim = self._dim(dim)
        require(self.shape[dim] == 1, f"squeeze_dim needs size 1 in dimension {dim}, got shape {self.shape}")
        keep = [index for index in range(self.ndim) if index != dim]
        require(len(keep) >= (2 if self.buffer.on_chip else 1), f"squeeze_dim({dim}) leaves too few of {self.shape}")
        return self._view([self.shape[index] for index in keep], [self.strides[index] for index in keep])

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split ``dim`` into ``shape``, in which one size may be -1."""
        sizes = infer(tuple(shape), self.shape[self._dim(dim, partition=True)], self.shape)
        trivial = all(size == 1 for size in sizes[1:])
        dim = self._dim(dim, partition=trivial)
        steps = [self.strides[dim] * step for step in row_major(sizes)]
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), (*self.strides[:dim], *steps, *self.strides[dim + 1 :])
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge dimensions ``start_dim`` to ``end_dim`` (inclusive), which must be contiguous."""
        start, end = self._dim(start_dim), self._dim(end_dim, partition=True)
        require(start <= end, f"flatten_dims({start_dim}, {end_dim}) is not a range")
        merged = prod(self.shape[start : end + 1])
        return self.reshape((*self.shape[:start], merged, *self.shape[end + 1 :]))

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """The same elements in another shape, as far as that needs no copy; one size may be -1."""
        sizes = infer(tuple(shape), self.size, self.shape)
        require(
            not self.buffer.on_chip or sizes[0] == self.shape[0],
            f"reshape of {self.shape} to {sizes} would change the partition dimension",
        )
        # Element strides, as byte strides of a byte array that is never touched: NumPy says whether a view can do it.
        layout = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), self.shape, self.strides)
        try:
            strides = np.reshape(layout, sizes, copy=False).strides
        except ValueError:
            raise NkiValidationError(
                f"reshape of {self.shape} with strides {self.strides} to {sizes} would need a copy"
            ) from None
        return self._view(sizes, strides)

    def rearrange(
        self, src: tuple[Any, ...], dst: tuple[Any, ...], fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Split, permute and merge dimensions by names: ``('b', ('h', 'w')) -> ('b', 'w', 'h')`` with ``{'h': 4}``."""
        require(len(src) == self.ndim, f"pattern {src} has {len(src)} entries for shape {self.shape}")
        view = self
        for dim in reversed(range(len(src))):
            if isinstance(src[dim], tuple):
                sizes = [(fixed_sizes or {}).get(name, -1) for name in src[dim]]
                view = view.reshape_dim(dim, sizes)
        names, wanted = flat(src), flat(dst)
        require(
            len(set(names)) == len(names) and sorted(names) == sorted(wanted),
            f"patterns {src} and {dst} must hold the same names, each once",
        )
        view = view.permute([names.index(name) for name in wanted])
        for dim in range(len(dst)):
            if isinstance(dst[dim], tuple) and len(dst[dim]) > 1:
                view = view.flatten_dims(dim, dim + len(dst[dim]) - 1)
        return view

    def view(self, dtype: Any) -> NkiTensor:
        """The same bits as another dtype; the last dimension scales by the ratio of sizes."""
        new = dtypes.normalize(dtype)
        old_size, new_size = dtypes.size_of(self.dtype), dtypes.size_of(new)
        if new == self.dtype:
            return self
        wide = old_size == new_size == 4
        require(
            self.storage.bank.scale == 1 or wide,
            f"view({new}) of {self.dtype} needs bits, which NKI_PRECISE_FP=0 does not keep",
        )
        require(self.dynamic is None, "view of a tensor with a run-time index is not possible")
        if old_size == new_size:
            return self._view(self.shape, self.strides, dtype=new)
        require(
            self.strides[-1] == 1 or self.shape[-1] == 1, f"view({new}) needs a contiguous last dimension: {self!r}"
        )
        require(
            not any(value * old_size % new_size for value in (*self.strides[:-1], self.shape[-1], self.offset)),
            f"view({new}): the last dimension of {self!r} is not divisible",
        )
        scale = [value * old_size // new_size for value in (*self.strides[:-1], self.shape[-1], self.offset)]
        return self._view((*self.shape[:-1], scale[-2]), (*scale[:-2], 1), scale[-1], new)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """A raw access pattern ``[[stride, count], ...]`` over the storage, outermost first.

        An ``offset`` counts from the view's own; on a view that does not start at element 0 the sources disagree about
        that, so a warning is given. A pattern that leaves the tensor raises when an instruction uses it.
        """
        base = self if dtype is None else self._reinterpreted(dtypes.normalize(dtype))
        if self.offset:
            warnings.warn(f"ap on {self!r}, a view at offset {self.offset}: the pattern starts there", stacklevel=2)
        pattern = [[integer(value, "each value of an ap pattern") for value in pair] for pair in pattern]
        start = base.offset + (0 if offset is None else integer(offset, "ap offset"))
        require(
            len(pattern) > 0 and all(len(pair) == 2 and pair[1] >= 1 for pair in pattern),
            f"pattern {pattern} must be pairs [stride, count] with count at least 1",
        )
        require(scalar_offset is None or vector_offset is None, "scalar_offset and vector_offset exclude each other")
        gathers = vector_offset is not None
        shape, strides = [pair[1] for pair in pattern], [pair[0] for pair in pattern]
        # Of a gather, only where a row begins is unknown: its first one stands for all.
        view = base._view([1, *shape[1:]] if gathers else shape, strides, start)
        view._check_pattern()
        if scalar_offset is None and not gathers:
            return view
        step, bound = self._steps_of(indirect_dim, view)
        if not gathers:
            return view._with_dynamic(scalar_index(scalar_offset, step, bound))
        require(indirect_dim == 0, f"indirect_dim must be 0 with vector_offset, got {indirect_dim!r}")
        require(strides[0] >= 0, f"pattern {pattern} has a negative stride")
        return view._view(shape, (step, *strides[1:]), dynamic=row_indices(vector_offset, step, bound, self))

    def _steps_of(self, dim: int, view: NkiTensor) -> tuple[int, int]:
        """What one more of a run-time index of ``dim`` is worth, in elements of ``view``; and the extent of ``dim``."""
        # The dimension is one of the tensor in memory; a reshape of all of it counts as that tensor.
        storage, size = self.storage, dtypes.size_of(view.dtype)
        shape = self.shape if self.size == storage.size else storage.shape
        require(0 <= dim < len(shape), f"indirect_dim {dim} is not a dimension of {storage.label}, shape {shape}")
        step = prod(shape[dim + 1 :]) * dtypes.size_of(storage.dtype)
        require(step % size == 0, f"a step of {step} bytes is no multiple of an element of {view!r}")
        return step // size, shape[dim]

    def _reinterpreted(self, dtype: str) -> NkiTensor:
        require(
            dtype == self.dtype or self.storage.bank.scale == 1,
            "ap with dtype needs bits, which NKI_PRECISE_FP=0 lacks",
        )
        byte, size = self.offset * dtypes.size_of(self.dtype), dtypes.size_of(dtype)
        require(byte % size == 0, f"ap with dtype {dtype}: {self!r} starts at byte {byte}, no multiple of {size}")
        return self._view((1,) * self.ndim, (1,) * self.ndim, byte // size, dtype)

    def is_inside(self) -> bool:
        """Whether all elements lie in the storage, and on chip each partition's in that partition."""
        itemsize, storage = dtypes.size_of(self.dtype), self.storage
        reach = self._reach(0)
        inside = 0 <= self.offset and self.offset + reach < storage.size * dtypes.size_of(storage.dtype) // itemsize
        if not self.buffer.on_chip:
            return inside
        free = storage.row_bytes // itemsize
        return inside and self.offset % free + self._reach(1) < free

    def _reach(self, first: int) -> int:
        dims = zip(self.strides[first:], self.shape[first:], strict=True)
        return sum(stride * (size - 1) for stride, size in dims)

    def _check_pattern(self) -> None:
        storage, pattern = self.storage, f"pattern {self.get_pattern()} at offset {self.offset}"
        require(all(stride >= 0 for stride in self.strides), f"{pattern} has a negative stride")
        if self.buffer.on_chip:
            free = storage.row_bytes // dtypes.size_of(self.dtype)
            require(self.ndim >= 2, f"{pattern}: an on-chip view has at least 2 dimensions")
            require(
                self.shape[0] == 1 or self.strides[0] == free,
                f"{pattern}: the partition stride of {storage.label} is {free}",
            )
        if not self.is_inside():
            # Public kernels make patterns that they then do not use: the first use raises.
            self.outside = f"{pattern} leaves {storage.label}{' or crosses its partitions' * self.buffer.on_chip}"


def _lenient() -> bool:
    """Whether a kernel runs here in a lenient run."""
    from nki_bn.simulator.machine import running

    core = running()
    return core is not None and not core.options.strict
