# SPDX-License-Identifier: Apache-2.0
"""What replicas that share a batch exchange inside a launch, per group of channels: moments, and sums of the backward.

    two_round   all-reduce of the means, weighted with the numbers of values; then of the variances around that mean
    one_round   all-gather of (n, mean, M2), merged by bn_aggr
    sums        one all-reduce of sum dy' and sum dy'*(x - hi), of which every replica keeps its own as well

A replica weighs as many values per channel as it has. The numbers of values are known when a launch is made.
"""

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

# Steps between a collective and what waits for it, for other work of the engines.
WAITING = 3


@dataclass(frozen=True)
class Replicas(nl.NKIObject):
    """The replicas that share a batch with this one.

    Attributes:
        group: the ranks of all of them.
        size: their number.
        count: values per channel of this replica.
        total: those of all.
        mode: "two_round" or "one_round".
    """

    group: ncc.ReplicaGroup
    size: int
    count: int
    total: int
    mode: str


def total_of(replicas: Replicas | None, count: int) -> int:
    """Values per channel of the batch, of which this replica has ``count``."""
    if replicas == None:
        return count
    return replicas.total


def check_replicas(replicas: Replicas | None, count: int, training: bool) -> None:
    """The kernel's own refusal of replicas that it would misread."""
    if replicas == None:
        return
    assert replicas.count == count, f"replicas says {replicas.count} values per channel, the tensors have {count}"
    assert replicas.total >= count, f"replicas says {replicas.total} values in total, of which {count} are here"
    assert replicas.mode == "two_round" or replicas.mode == "one_round", (
        f"replicas.mode must be two_round or one_round, got {replicas.mode}"
    )
    assert training, "replicas exchange statistics in training only"


def exchange_steps(replicas: Replicas | None) -> int:
    """Steps of :func:`exchange_step`."""
    if replicas == None:
        return 0
    if replicas.mode == "two_round":
        return 2 * (1 + WAITING) + 1
    return 1 + WAITING + 1


def exchange_step(
    replicas: Replicas, moments: nl.NkiTensor, scratch: nl.NkiTensor, gathered: nl.NkiTensor | None, step: int
) -> None:
    """One step from (mean, var) of this replica, (P, 2, G) for G groups, to those of all, in the same place.

    ``scratch`` has 4*G columns, ``gathered`` (of ``one_round``) 3*G for each replica.
    """
    lanes, _, groups = moments.shape
    if replicas.mode == "two_round":
        two_round_step(replicas, moments, scratch.reshape((lanes, 4, groups)), step)
        return
    assert gathered != None, "mode one_round needs a tile to gather into, got None"
    if step == 0:
        own = scratch[:, 0 : 3 * groups]
        triples = own.reshape((lanes, groups, 3))
        nisa.memset(dst=triples[:, :, 0], value=float(replicas.count))
        nisa.tensor_copy(dst=triples[:, :, 1], src=moments[:, 0, :])
        nisa.tensor_scalar(dst=triples[:, :, 2], data=moments[:, 1, :], op0=nl.multiply, operand0=float(replicas.count))
        ncc.all_gather(srcs=[own], dsts=[gathered], replica_group=replicas.group, collective_dim=1)
    elif step == WAITING + 1:
        triples = gathered.reshape((lanes, replicas.size, groups, 3))
        for i in range(groups):
            nisa.bn_aggr(dst=moments[:, :, i], data=triples[:, :, i, :])


def two_round_step(replicas: Replicas, moments: nl.NkiTensor, scratch: nl.NkiTensor, step: int) -> None:
    """A step of ``two_round``: the scratch (P, 4, G) is for a term and its sum, twice."""
    weight = replicas.count / replicas.total
    own = scratch[:, 0, :]
    mean = scratch[:, 1, :]
    around = scratch[:, 2, :]
    var = scratch[:, 3, :]
    if step == 0:
        nisa.tensor_scalar(dst=own, data=moments[:, 0, :], op0=nl.multiply, operand0=weight)
        add_over_replicas(replicas, own, mean)
    elif step == WAITING + 1:
        nisa.tensor_tensor(dst=around, data1=moments[:, 0, :], data2=mean, op=nl.subtract)
        nisa.tensor_tensor(dst=around, data1=around, data2=around, op=nl.multiply)
        nisa.tensor_tensor(dst=around, data1=around, data2=moments[:, 1, :], op=nl.add)
        nisa.tensor_scalar(dst=around, data=around, op0=nl.multiply, operand0=weight)
        add_over_replicas(replicas, around, var)
    elif step == 2 * (WAITING + 1):
        nisa.tensor_copy(dst=moments[:, 0, :], src=mean)
        nisa.tensor_copy(dst=moments[:, 1, :], src=var)


def exchange_at_once(
    replicas: Replicas, moments: nl.NkiTensor, scratch: nl.NkiTensor, gathered: nl.NkiTensor | None
) -> None:
    """All steps of :func:`exchange_step`."""
    for step in range(exchange_steps(replicas)):
        exchange_step(replicas, moments, scratch, gathered, step)


def add_over_replicas(replicas: Replicas, own: nl.NkiTensor, total: nl.NkiTensor) -> None:
    """total = sum of ``own`` over all replicas, both (P, K) in SBUF."""
    ncc.all_reduce(srcs=[own], dsts=[total], replica_group=replicas.group, op=nl.add)
