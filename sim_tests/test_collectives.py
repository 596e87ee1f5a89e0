# SPDX-License-Identifier: Apache-2.0
"""``nki.collectives`` on replicas in lockstep: values, refusals, replicas that do not fit, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import nisa, nki, nl

from nki_bn.links import load_links
from nki_bn.simulator import DeadlockError, Launch, NkiValidationError, RunOptions, Shaped, run, run_replicas
from nki_bn.simulator.timing import model, report

ncc: Any = nki.collectives
Array = np.ndarray[Any, Any]
ALL = ncc.ReplicaGroup([[0, 1, 2, 3]])
PAIRS = ncc.ReplicaGroup([[2, 0], [1, 3]])
TWO = ncc.ReplicaGroup([[0, 1]])
PLACES = (nl.sbuf, nl.shared_hbm, nl.private_hbm)


def call(x: Any, out_shape: tuple[int, ...], collective: Callable[[Any, Any], None], place: Any) -> Any:
    """A kernel: x into ``place``, the collective, and what it gave."""
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=place)
    dst = nl.ndarray(out_shape, dtype=x.dtype, buffer=place)
    nisa.dma_copy(dst=src, src=x)
    collective([src], [dst])
    out = nl.ndarray(out_shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=dst)
    return out


def given(shape: tuple[int, ...], dtype: Any = np.float32, size: int = 4) -> list[Array]:
    return [np.random.default_rng(rank).integers(-50, 50, shape).astype(dtype) for rank in range(size)]


def results(
    xs: Sequence[Array], out_shape: tuple[int, ...], collective: Callable[[Any, Any], None], place: Any = nl.shared_hbm
) -> list[Any]:
    launches = [Launch(call, (x, out_shape, collective, place)) for x in xs]
    return [result.outputs for result in run_replicas(launches, 1, RunOptions())]


def same(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("place", "dtype"), [*((place, np.float32) for place in PLACES), (nl.sbuf, ml_dtypes.bfloat16), (nl.sbuf, np.int32)]
)
@pytest.mark.parametrize(
    ("op", "reduce"), [(nl.add, sum), (nl.minimum, min), (nl.maximum, max)], ids=["add", "minimum", "maximum"]
)
def test_all_reduce(op: Any, reduce: Any, place: Any, dtype: Any) -> None:
    """Of whole numbers so small that every sum is exact."""
    xs = given((4, 6), dtype)
    made = results(xs, (4, 6), lambda s, d: ncc.all_reduce(s, d, ALL, op), place)
    stacked = np.stack([x.astype(np.float64) for x in xs])
    wanted = {sum: stacked.sum(0), min: stacked.min(0), max: stacked.max(0)}[reduce].astype(dtype)
    same(made, [wanted] * 4)


def test_groups_reduce_apart() -> None:
    xs = given((3, 2))
    made = results(xs, (3, 2), lambda s, d: ncc.all_reduce(s, d, PAIRS, nl.add))
    same(made, [xs[0] + xs[2], xs[1] + xs[3]] * 2)


@pytest.mark.parametrize(("place", "dim"), [(nl.sbuf, 0), (nl.sbuf, 1), (nl.shared_hbm, 0)], ids=str)
def test_all_gather_joins_in_the_order_of_the_group(place: Any, dim: int) -> None:
    xs = given((2, 3))
    shape = (4, 3) if dim == 0 else (2, 6)
    made = results(xs, shape, lambda s, d: ncc.all_gather(s, d, PAIRS, dim), place)
    even, odd = np.concatenate([xs[2], xs[0]], dim), np.concatenate([xs[1], xs[3]], dim)
    same(made, [even, odd, even, odd])


@pytest.mark.parametrize("place", [nl.sbuf, nl.shared_hbm], ids=str)
def test_reduce_scatter_keeps_the_own_part(place: Any) -> None:
    xs = given((8, 3))
    made = results(xs, (2, 3), lambda s, d: ncc.reduce_scatter(s, d, ALL, 0, nl.add), place)
    same(made, np.split(np.sum(xs, axis=0), 4))


def test_all_to_all_is_a_transpose_of_parts() -> None:
    xs = given((8, 3))
    made = results(xs, (8, 3), lambda s, d: ncc.all_to_all(s, d, ALL, 0))
    same(made, [np.concatenate([np.split(x, 4)[rank] for x in xs]) for rank in range(4)])


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
# Every collective over a group: what it takes, and what it gives the ranks of a group whose shards these are.
KINDS: dict[str, tuple[Callable[[Any, Any, Any], None], Callable[[list[Array]], list[Array]]]] = {
    "all_reduce": (lambda s, d, g: ncc.all_reduce(s, d, g, nl.maximum), lambda xs: [np.max(xs, 0)] * len(xs)),
    "all_gather": (lambda s, d, g: ncc.all_gather(s, d, g, 0), lambda xs: [np.concatenate(xs)] * len(xs)),
    "reduce_scatter": (
        lambda s, d, g: ncc.reduce_scatter(s, d, g, 0, nl.minimum),
        lambda xs: np.split(np.min(xs, 0), len(xs)),
    ),
    "all_to_all": (
        lambda s, d, g: ncc.all_to_all(s, d, g, 0),
        lambda xs: [np.concatenate([np.split(x, len(xs))[at] for x in xs]) for at in range(len(xs))],
    ),
    "implicit": (
        lambda s, d, g: ncc.collective_permute_implicit([s], [d], g),
        lambda xs: [xs[at - 1] for at in range(len(xs))],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8], ids=lambda d: d.__name__
)
def test_dtypes_and_groups(kind: str, dtype: Any) -> None:
    collective, wanted = KINDS[kind]
    xs = [np.random.default_rng(rank).integers(0, 100, (8, 3)).astype(dtype) for rank in range(4)]
    for group in (ALL, PAIRS):
        expected: dict[int, Array] = {}
        for ranks in group.groups:
            expected |= dict(zip(ranks, wanted([xs[rank] for rank in ranks]), strict=True))
        made = results(xs, expected[0].shape, lambda s, d, group=group: collective(s, d, group))  # type: ignore[misc]
        assert made[0].dtype == dtype
        same(made, [expected[rank] for rank in range(4)])


def test_floats_add_in_float32_and_round_once() -> None:
    """1 + 3/512 is nearer to 1 + 1/128 than to 1 in bfloat16, but each term on its own is lost."""
    xs = [np.full((2, 2), value, ml_dtypes.bfloat16) for value in (1.0, *[2.0**-9] * 3)]
    for made in results(xs, (2, 2), lambda s, d: ncc.all_reduce(s, d, ALL, nl.add), nl.sbuf):
        assert np.all(made.astype(np.float64) == 1 + 2.0**-7)


def test_collective_permute() -> None:
    """A ring of three; rank 3 stands in no pair, waits for nobody, and calls it all the same."""
    xs = given((2, 3))

    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x)
        ncc.collective_permute([x], [out], [(0, 1), (1, 2), (2, 0)])
        return out

    made = run_replicas([Launch(kernel, (x,)) for x in xs], 1, RunOptions())
    same([result.outputs for result in made], [xs[2], xs[0], xs[1], xs[3]])


def test_implicit_permutes_send_to_the_next() -> None:
    xs = given((2, 3))
    made = results(xs, (2, 3), lambda s, d: ncc.collective_permute_implicit([s], [d], PAIRS), nl.sbuf)
    same(made, [xs[2], xs[3], xs[0], xs[1]])
    made = results(xs, (2, 3), lambda s, d: ncc.collective_permute_implicit_reduce([s], [s], [d], ALL, nl.add), nl.sbuf)
    same(made, [2 * xs[rank - 1] for rank in range(4)])


def test_ranks_are_registers() -> None:
    """The own rank picks a row; so does, after one step of the ring, the rank before."""

    def kernel(x: Any) -> Any:
        out = nl.ndarray((2, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        before = ncc.collective_permute_implicit_current_processing_rank_id(1, ALL)
        for at, rank in enumerate((ncc.rank_id(), before)):
            row = x.ap(pattern=[[3, 1], [1, 3]], scalar_offset=rank, indirect_dim=0)
            nisa.dma_copy(dst=out[at : at + 1, :], src=row)
        return out

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    made = run_replicas([Launch(kernel, (x.copy(),)) for _ in range(4)], 1, RunOptions())
    same([result.outputs for result in made], [x[[rank, (rank - 1) % 4]] for rank in range(4)])
    with pytest.raises(NkiValidationError, match="channel_id must be below 2, got 2"):
        of_one(lambda x: ncc.collective_permute_implicit_current_processing_rank_id(0, PAIRS, 2))


@pytest.mark.parametrize("lnc", [1, 2])
def test_every_core_meets_its_own_kind(lnc: int) -> None:
    """With memories of their own: SBUF per core, shared HBM per replica."""

    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((nl.num_programs(0), 2, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        tiles = [nl.ndarray((2, 3), dtype=x.dtype, buffer=nl.sbuf) for _ in range(2)]
        nisa.dma_copy(dst=tiles[0], src=x)
        nisa.tensor_scalar(dst=tiles[0], data=tiles[0], op0=nl.multiply, operand0=1.0 + core)
        ncc.all_reduce([tiles[0]], [tiles[1]], ncc.ReplicaGroup([[0, 1]]), nl.add)
        nisa.dma_copy(dst=out[core], src=tiles[1])
        return out

    xs = given((2, 3), size=2)
    made = run_replicas([Launch(kernel, (x,)) for x in xs], lnc, RunOptions())
    same([result.outputs for result in made], [np.stack([(xs[0] + xs[1]) * (1 + core) for core in range(lnc)])] * 2)
    assert [len(result.sbuf_high_water) for result in made] == [lnc] * 2
    assert [result.trace.count("all_reduce") for result in made] == [lnc] * 2


def test_on_shared_hbm_both_cores_call_for_one_collective() -> None:
    """Each core writes its half before and reads the other's after; in place, so that nothing may be added twice."""

    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        held = nl.ndarray((2, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=held[core : core + 1], src=x[core : core + 1])
        ncc.all_reduce([held], [held], TWO, nl.add)
        out = nl.ndarray((2, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[core : core + 1], src=held[1 - core : 2 - core])
        return out

    xs = given((2, 3), size=2)
    made = run_replicas([Launch(kernel, (x,)) for x in xs], 2, RunOptions())
    same([result.outputs for result in made], [(xs[0] + xs[1])[::-1]] * 2)
    dry = run(kernel, (Shaped((2, 3), "float32"),), {}, 2, RunOptions(dry=True, replicas=2))
    assert dry.trace.count("all_reduce") == made[0].trace.count("all_reduce") == 2


def test_one_core_alone_cannot_call_on_shared_hbm() -> None:
    def kernel(x: Any, both: bool) -> Any:
        if nl.program_id(0) == 0:
            ncc.all_reduce([x], [x], ncc.ReplicaGroup([[0]]), nl.add)
        elif both:
            ncc.all_reduce([x], [x], ncc.ReplicaGroup([[0]]), nl.maximum)
        return x

    (x,) = given((2, 3), size=1)
    with pytest.raises(DeadlockError, match="core 0 waits for all_reduce.*; core 1 has ended"):
        run(kernel, (x, False), {}, 2, RunOptions())
    with pytest.raises(NkiValidationError, match="the cores of a replica meet in all_reduce.*, but in all_reduce.*at"):
        run(kernel, (x, True), {}, 2, RunOptions())


def test_several_tensors_in_hbm_are_reduced_together() -> None:
    def kernel(x: Any, z: Any) -> Any:
        outs = [nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm) for t in (x, z)]
        ncc.all_reduce([x, z], outs, ncc.ReplicaGroup([[0, 1]]), nl.add)
        return outs[0], outs[1]

    xs, zs = given((2, 3), size=2), given((5,), size=2)
    made = run_replicas([Launch(kernel, pair) for pair in zip(xs, zs, strict=True)], 1, RunOptions())
    for result in made:
        same(result.outputs, [xs[0] + xs[1], zs[0] + zs[1]])


def test_alone_a_collective_is_a_copy() -> None:
    (x,) = given((2, 3), size=1)
    same(results([x], (2, 3), lambda s, d: ncc.all_reduce(s, d, ncc.ReplicaGroup([[0]]), nl.add)), [x])


def of_one(body: Callable[[Any], Any], dtype: str = "float32", shape: tuple[int, ...] = (8, 4), **options: Any) -> None:
    """The body on replica 0 of four, on shapes alone."""

    def kernel(x: Any) -> Any:
        body(x)
        return x

    run(kernel, (Shaped(shape, dtype),), {}, 1, RunOptions(dry=True, replicas=4, **options))


def tile(shape: tuple[int, ...] = (8, 4), dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "mixed places": (lambda x: ncc.all_reduce([x], [tile()], ALL, nl.add), "mix HBM and SBUF"),
    "psum": (lambda x: ncc.all_reduce([tile(buffer=nl.psum)], [tile()], ALL, nl.add), "srcs is in psum"),
    "several tiles": (lambda x: ncc.all_reduce([tile()] * 2, [tile()] * 2, ALL, nl.add), "several only in HBM"),
    "3-D tile": (lambda x: ncc.all_reduce([tile((8, 2, 2))], [tile((8, 2, 2))], ALL, nl.add), "takes 2-D tiles"),
    "numbers": (lambda x: ncc.all_reduce([x], [x, x], ALL, nl.add), "has 1 srcs and 2 dsts"),
    "no dst": (lambda x: ncc.all_reduce([x], [], ALL, nl.add), "dsts is empty; accepted: one tensor or more"),
    "nothing": (lambda x: ncc.all_reduce([], [], ALL, nl.add), "srcs is empty"),
    "shape": (lambda x: ncc.all_reduce([tile()], [tile((8, 5))], ALL, nl.add), r"must have shape \(8, 4\)"),
    "dtype": (lambda x: ncc.all_reduce([tile()], [tile(dtype=nl.bfloat16)], ALL, nl.add), "dtype of src, float32"),
    "operator": (lambda x: ncc.all_reduce([x], [x], ALL, nl.multiply), "op is nl.multiply; accepted: nl.add"),
    "dimension": (lambda x: ncc.all_gather([x], [x], ALL, 1), "collective_dim is 1; accepted here: 0$"),
    "dimension in SBUF": (lambda x: ncc.all_gather([tile()], [tile()], ALL, 2), "accepted here: 0 or 1$"),
    "partitions": (
        lambda x: ncc.all_gather([tile((64, 4))], [tile((256, 4))], ALL, 0),
        "partition dimension 256 exceeds maximum 128",
    ),
    "parts": (lambda x: ncc.reduce_scatter([x[0:6]], [x[0:2]], ALL, 0, nl.add), "does not fall into 4 equal parts"),
    "all_to_all in SBUF": (lambda x: ncc.all_to_all([tile()], [tile()], ALL, 0), "is in sbuf; accepted: private_hbm"),
    "permute in SBUF": (lambda x: ncc.collective_permute([tile()], [tile()], [(0, 1)]), "is in sbuf"),
    "permute of two": (lambda x: ncc.collective_permute([x, x], [x, x], [(0, 1)]), "takes one tensor, got 2"),
    "two targets": (lambda x: ncc.collective_permute([x], [x], [(0, 1), (2, 1)]), "has a target twice"),
    "no pairs": (lambda x: ncc.collective_permute([x], [x], []), "source_target_pairs is empty"),
    "channel ids": (
        lambda x: ncc.collective_permute_implicit([[x]], [[x]], ALL, [1]),
        r"channel_ids is \[1\]; accepted: 0, 1, ... without a gap, at most 4",
    ),
    "channels of a part": (
        lambda x: ncc.collective_permute_implicit([[x]] * 3, [[x]] * 3, PAIRS, [0, 1, 2]),
        "at most 2",
    ),
    "tensors per channel": (lambda x: ncc.collective_permute_implicit([[x, x]], [[x]], ALL), r"srcs has \[2\] tensors"),
    "rank": (lambda x: ncc.all_reduce([x], [x], ncc.ReplicaGroup([[0, 4]]), nl.add), "rank 4; accepted of 4 replicas"),
    "absent": (lambda x: ncc.all_reduce([x], [x], ncc.ReplicaGroup([[1, 2]]), nl.add), "rank 0, which is in none"),
    "priority": (lambda x: ncc.all_reduce([x], [x], ALL, nl.add, priority=1), "priority needs gen4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case: str) -> None:
    body, message = WRONG[case]
    with pytest.raises(NkiValidationError, match=message):
        of_one(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x: ncc.all_reduce([x], [x], [[0, 1, 2, 3]], nl.add), "replica_group must be a ReplicaGroup, got list"),
        (lambda x: ncc.all_reduce(x, x, ALL, nl.add), "srcs must be a list of tensors, got NkiTensor"),
        (lambda x: ncc.all_reduce([1], [x], ALL, nl.add), "srcs must be a tensor, got int"),
        (lambda x: ncc.all_reduce([x], [None], ALL, nl.add), "dsts must be a tensor, got NoneType"),
        (lambda x: ncc.all_reduce([x], None, ALL, nl.add), "dsts must be a list of tensors, got NoneType"),
        (lambda x: ncc.all_reduce([x], replica_group=ALL, op=nl.add), "missing 1 required .* 'dsts'"),
        (lambda x: ncc.all_reduce([x], [x], ALL, "add"), "must be an operator of nki.language"),
        (lambda x: ncc.all_gather([x], [x], ALL, "0"), "collective_dim must be an integer"),
    ],
)
def test_wrong_types_are_refused(body: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        of_one(body)


def test_priority_is_for_gen4() -> None:
    of_one(lambda x: ncc.all_reduce([x], [x], ALL, nl.add, priority=3), target="trn3")
    with pytest.raises(NkiValidationError, match="priority must be 0, 1, 2 or 3, got 4"):
        of_one(lambda x: ncc.all_reduce([x], [x], ALL, nl.add, priority=4), target="trn3")


def different(*bodies: Callable[[Any, Any], Any]) -> None:
    """Each replica with a body of its own."""
    places = [(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)) for _ in bodies]

    def kernel(x: Any, y: Any, body: Any) -> Any:
        body(x, y)
        return y

    launches = [Launch(kernel, (*pair, body)) for pair, body in zip(places, bodies, strict=True)]
    run_replicas(launches, 1, RunOptions())


def test_replicas_in_different_collectives() -> None:
    """Another operation, another operator, another shape: both sides are named, with their lines."""

    def add(x: Any, y: Any) -> None:
        ncc.all_reduce([x], [y], TWO, nl.add)

    others = {
        "all_to_all": lambda x, y: ncc.all_to_all([x], [y], TWO, 0),
        "maximum": lambda x, y: ncc.all_reduce([x], [y], TWO, nl.maximum),
        r"\(1, 3\)": lambda x, y: ncc.all_reduce([x[0:1]], [y[0:1]], TWO, nl.add),
    }
    for said, other in others.items():
        with pytest.raises(NkiValidationError, match=rf"replicas 1 and 0 meet in different.*{said}.*test_collectives"):
            different(add, other)


def test_other_groups() -> None:
    """Rank 0 waits for both others, rank 1 for rank 2 alone: refused as soon as two that wait for each other differ."""
    part = ncc.ReplicaGroup([[1, 2]])
    everyone = ncc.ReplicaGroup([[0, 1, 2]])

    def all_of(x: Any, y: Any) -> None:
        ncc.all_reduce([x], [y], everyone, nl.add)

    with pytest.raises(NkiValidationError, match=r"ranks \(0, 1, 2\).*ranks \(1, 2\)"):
        different(all_of, lambda x, y: ncc.all_reduce([x], [y], part, nl.add), all_of)


def test_a_replica_that_never_comes() -> None:
    def add(x: Any, y: Any) -> None:
        ncc.all_reduce([x], [y], TWO, nl.add)

    with pytest.raises(DeadlockError, match=r"replica 0 core 0 waits for all_reduce.*; replica 1 core 0 has ended"):
        different(add, lambda x, y: None)


def test_a_replica_that_fails_ends_the_others() -> None:
    def fail(x: Any, y: Any) -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        different(lambda x, y: ncc.all_reduce([x], [y], TWO, nl.add), fail)


def test_groups_may_be_apart_in_time() -> None:
    """Ranks 0 and 1 meet twice before all four do; ranks 2 and 3 are there long before."""
    halves = ncc.ReplicaGroup([[0, 1], [2, 3]])

    def first(x: Any, y: Any) -> None:
        ncc.all_reduce([x], [y], halves, nl.add)
        ncc.all_reduce([y], [x], halves, nl.add)
        ncc.all_reduce([x], [y], ALL, nl.add)
        np.testing.assert_array_equal(y.array(), np.full((2, 3), 10.0))

    def second(x: Any, y: Any) -> None:
        ncc.all_reduce([x], [y], ALL, nl.add)
        np.testing.assert_array_equal(y.array(), np.full((2, 3), 10.0))

    different(first, first, second, second)


def test_launches_are_counted() -> None:
    kernel = Launch(call, (np.ones((2, 3), np.float32),))
    with pytest.raises(ValueError, match="launches has 0 entries; accepted: from 1 up"):
        run_replicas([], 1, RunOptions())
    with pytest.raises(ValueError, match="launches has 2 entries; accepted: 1, as options has replicas"):
        run_replicas([kernel, kernel], 1, RunOptions(dry=True, replicas=2))
    with pytest.raises(ValueError, match="replicas is 2 without dry"):
        RunOptions(replicas=2)
    with pytest.raises(ValueError, match="replicas is 0; accepted: integers from 1 up"):
        RunOptions(replicas=0)


def test_the_timeline_has_a_track_of_collectives() -> None:
    """A gather of 2 KiB after a load: one hop as a mesh and three as a ring, and the store waits for it."""

    def kernel(x: Any) -> Any:
        return call(x, (128, 16), lambda s, d: ncc.all_gather(s, d, ALL, 1), nl.sbuf)

    trace = run(kernel, (Shaped((128, 4), "float32"),), {}, 1, RunOptions(dry=True, replicas=4)).trace
    links = load_links("trn2")
    for topology, hops in (("mesh", 1), ("ring", 3)):
        timeline = model(trace, "trn2", topology)
        (gather,) = [span for span in timeline.spans if span.engine == "collective"]
        assert gather.done - gather.start == pytest.approx(1e3 * hops * (links.hop + 2048 / links.rate))
        load, _, store = timeline.spans
        assert load.done <= gather.start and store.start >= gather.done
        assert "core 0 collective" in report(timeline)
    with pytest.raises(ValueError, match="topology is 'star'; accepted: 'mesh', 'ring'"):
        model(trace, "trn2", "star")


@pytest.mark.parametrize("kind", [*KINDS, "permute"])
def test_every_kind_has_its_time(kind: str) -> None:
    """All but permutes go R - 1 times round a ring; what counts is what a rank gives."""

    def collective(srcs: Any, dsts: Any) -> None:
        if kind == "permute":
            ncc.collective_permute(srcs, dsts, RING)
        else:
            KINDS[kind][0](srcs, dsts, ALL)

    shape = {"all_gather": (32, 50), "reduce_scatter": (2, 50)}.get(kind, (8, 50))

    def kernel(x: Any) -> Any:
        return call(x, shape, collective, nl.shared_hbm)

    trace = run(kernel, (Shaped((8, 50), "float32"),), {}, 1, RunOptions(dry=True, replicas=4)).trace
    links = load_links("trn2")
    for topology, hops in (("mesh", 1), ("ring", 1 if kind in ("implicit", "permute") else 3)):
        (span,) = [span for span in model(trace, "trn2", topology).spans if span.engine == "collective"]
        assert span.done - span.start == pytest.approx(1e3 * hops * (links.hop + 1600 / links.rate))


def test_the_module_is_found_by_its_name() -> None:
    import nki.collectives as found

    assert found is ncc and all(hasattr(found, name) for name in found.__all__)
