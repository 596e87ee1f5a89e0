# SPDX-License-Identifier: Apache-2.0
"""The three sites on replicas in threads: a step is that of the global batch, and the plain one where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from judging import same_bits
from site_steps import drawn, judge, judge_statistics, on_all, options_of, steps

import nki_bn
from nki_bn.execute import simulation
from nki_bn.problem import Array
from nki_bn.simulator import RunOptions
from nki_bn.synchronised import (
    MODES,
    Alone,
    Replica,
    SiteBackward,
    SiteForward,
    SiteOptions,
    Statistics,
    bn_back_site,
    bn_fwd_site,
    replicas,
    running_statistics,
)
from nki_bn.synchronised.exchange import Moments, global_moments
from nki_bn.tolerances import Arithmetic

NAMES = {"two_round": ["gmu", "gvar", "gdst"], "one_round": ["gmom", "gdst"]}
SIZES = ((4,), (2, 2), (1, 3, 2), (3, 0, 1, 2), (1,) * 8, (2, 1, 0, 1, 3, 1, 1, 2))
RELUS = ("none", "mask", "recompute")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sizes", "relu"),
    [*((sizes, "none") for sizes in SIZES), ((1, 3, 2), "mask"), ((3, 0, 1, 2), "recompute")],
    ids=str,
)
def test_a_step_is_that_of_the_global_batch(sizes: tuple[int, ...], relu: str, mode: str) -> None:
    """With a residual before the ReLU; the collectives have the names of the site, and there are no others."""
    batch, options, add = drawn(sizes), options_of(mode, relu), relu != "none"
    made, groups = steps(batch, options, add)
    judge(batch, options, made, add)
    judge_statistics(batch, made)
    assert [group.collectives for group in groups] == [NAMES[mode] if len(sizes) > 1 else []] * len(sizes)


@pytest.mark.parametrize("mean", [1e3, 1e6])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 0, 3), (1,) * 8], ids=str)
def test_means_far_from_zero(sizes: tuple[int, ...], mode: str, mean: float) -> None:
    batch, options = drawn(sizes, mean, 1.0), options_of(mode, "none")
    made, _ = steps(batch, options)
    judge(batch, options, made, add=False)


@pytest.mark.parametrize("numerics", ["ideal", "trn2"])
@pytest.mark.parametrize("channels", [32, 130])
def test_two_cores_and_bfloat16(channels: int, numerics: str) -> None:
    batch = drawn((3, 1), dtype=ml_dtypes.bfloat16, channels=channels)
    options = replace(options_of("two_round", "mask"), lnc=2)
    with simulation(RunOptions(numerics=numerics)):
        made, _ = steps(batch, options)
    judge(batch, options, made, add=False, numerics=numerics)


def test_packed_forms_are_what_was_reduced() -> None:
    """[mu | var], and [mu | var | mean(gamma*dy) | mean(x_hat*gamma*dy)]."""
    batch = drawn((1, 3))
    made, _ = steps(batch, options_of("two_round", "none"))
    total, gamma = batch.x.size // 3, batch.parameters["g"]
    dgamma, dbeta = (sum(getattr(step.sums, name) for step in made) for name in ("dgamma", "dbeta"))
    for step in made:
        assert step.forward.packed is not None and step.backward.packed is not None
        same_bits(step.forward.packed, np.stack([step.forward.statistics.mean, step.forward.statistics.var]))
        same_bits(step.backward.packed[:2], step.forward.packed)
        np.testing.assert_allclose(step.backward.packed[2:], gamma * [dbeta, dgamma] / total, rtol=2.0**-22)


@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_replica_is_the_plain_kernel_bit_for_bit(dtype: Any, mode: str, relu: str) -> None:
    """And has nothing packed."""
    batch, options = drawn((4,), dtype=dtype), options_of(mode, relu)
    gamma, beta = batch.parameters["g"], batch.parameters["b"]
    running = np.float32([0.5, -1, 2]), np.float32([1, 2, 0.5])
    plain = nki_bn.batch_norm_fwd(
        batch.x, gamma, beta, *running, fuse_relu=relu != "none", save_relu_mask=relu == "mask", lnc=1
    )
    saved = (relu != "none", plain.relu_mask)
    gradients = nki_bn.batch_norm_bwd(batch.dy, batch.x, plain.mean, plain.var, gamma, beta, 1e-5, *saved, lnc=1)
    ((step,), _), want = steps(batch, options), (plain.y, plain.mean, plain.var, *gradients)
    statistics = step.forward.statistics
    got = (step.forward.y, statistics.mean, statistics.var, step.backward.dx, *step.sums)
    got += running_statistics(*running, statistics)
    for one, other in zip(got, (*want, plain.running_mean, plain.running_var), strict=True):
        assert other is not None
        same_bits(one, other)
    assert step.forward.packed is None and step.backward.packed is None


def test_equal_means_come_out_exactly_in_one_round() -> None:
    """So that a constant channel is its beta, whatever the counts are; two rounds are off by a rounding or two."""
    counts, channels = (1, 3, 7, 0, 5), 200
    constants = np.random.default_rng(0).normal(size=channels).astype(np.float32)
    gaps = {}
    for mode in MODES:
        groups = replicas(len(counts))

        def merged(rank: int, mode: str = mode, groups: list[Replica] = groups) -> Moments:
            mean = constants if counts[rank] else np.zeros_like(constants)
            local = Moments(mean, np.zeros_like(mean), np.float32([counts[rank]]))
            return global_moments(local, groups[rank], "g", mode)

        moments = on_all(groups, merged)[0]
        gaps[mode] = np.abs(moments.mean - constants) / np.abs(constants)
        assert moments.total == 16
        # Of equal values, all of the variance is that of a mean that is off.
        np.testing.assert_allclose(moments.var, (moments.mean - constants) ** 2, rtol=2.0**-20)
    assert not gaps["one_round"].any()
    reduction = Arithmetic("float32", replicas=len(counts)).reduction
    assert 0 < gaps["two_round"].max() <= reduction


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_stays_in_its_channel(mode: str, value: float) -> None:
    batch, options = drawn((2, 2)), options_of(mode, "none")
    clean, _ = steps(batch, options)
    batch.x[3, 1, 0, 0] = value
    with np.errstate(all="ignore"):
        made, _ = steps(batch, options)
    for step, before in zip(made, clean, strict=True):
        assert np.isnan(step.forward.y[:, 1]).all() and np.isnan(step.backward.dx[:, 1]).all()
        for got, want in ((step.forward.y, before.forward.y), (step.backward.dx, before.backward.dx)):
            same_bits(np.delete(got, 1, 1), np.delete(want, 1, 1))


def test_a_batch_without_values_moves_nothing() -> None:
    batch = replace(drawn((0, 0)), sizes=(0, 0))
    made, _ = steps(batch, options_of("two_round", "none"))
    old = np.float32([1, 2, 3]), np.float32([4, 5, 6])
    for step in made:
        assert step.forward.y.size == step.backward.dx.size == step.forward.statistics.total == 0
        assert not step.sums.dgamma.any() and not step.sums.dbeta.any()
        for got, want in zip(running_statistics(*old, step.forward.statistics), old, strict=True):
            same_bits(got, want)


def one_forward(groups: list[Replica], x: list[Array], mode: str = "two_round") -> list[SiteForward]:
    parameters = {"g": np.ones(x[0].shape[1], np.float32)}
    options = SiteOptions(None, mode, lnc=1)
    return on_all(groups, lambda rank: bn_fwd_site(x[rank], parameters, groups[rank], "g", options))


@pytest.mark.parametrize("mode", MODES)
def test_one_value_per_replica(mode: str) -> None:
    """1 and 3: mean 2, var 1, y = -+1/sqrt(1 + 1e-5); a total of one is refused, on all replicas."""
    made = one_forward(replicas(2), [np.float32([[1]]), np.float32([[3]])], mode)
    assert [float(site.statistics.mean[0]) for site in made] == [2.0, 2.0]
    assert [float(site.statistics.var[0]) for site in made] == [1.0, 1.0]
    normalised = (1 + 1e-5) ** -0.5
    np.testing.assert_allclose([site.y[0, 0] for site in made], [-normalised, normalised], rtol=2.0**-16)
    _, var = running_statistics(np.zeros(1, np.float32), np.ones(1, np.float32), made[0].statistics)
    assert var[0] == pytest.approx(1.1, rel=1e-6)
    with pytest.raises(ValueError, match="1 value per channel on all replicas"):
        one_forward(replicas(2), [np.float32([[1]]), np.zeros((0, 1), np.float32)], mode)


PARAMETERS: dict[str, Array] = {name: np.ones(3, np.float32) for name in ("g", "h", "hmu", "kdst", "k")}


def test_a_tag_is_used_once_in_a_step() -> None:
    group, x = Alone(), drawn((2,)).x
    options = SiteOptions(lnc=1)
    forward = bn_fwd_site(x, PARAMETERS, group, "g", options)
    bn_back_site(x, x, PARAMETERS, group, "g", forward, options=options)
    with pytest.raises(ValueError, match="the collective gmu is in use in this step; accepted: a tag of its own"):
        bn_fwd_site(x, PARAMETERS, group, "g", options)
    with pytest.raises(ValueError, match="gdst is in use"):
        bn_back_site(x, x, PARAMETERS, group, "g", forward, options=options)
    group.new_step()
    same_bits(bn_fwd_site(x, PARAMETERS, group, "g", options).y, forward.y)


def test_a_collective_has_no_parameters_name() -> None:
    x, options = drawn((2,)).x, SiteOptions(lnc=1)
    with pytest.raises(ValueError, match="the collective hmu has the name of a parameter"):
        bn_fwd_site(x, PARAMETERS, Alone(), "h", options)
    forward = bn_fwd_site(x, PARAMETERS, Alone(), "h", replace(options, mode="one_round"))
    with pytest.raises(ValueError, match="the collective kdst has the name of a parameter"):
        bn_back_site(x, x, PARAMETERS, Alone(), "k", forward, options=options)
    with pytest.raises(KeyError, match="missing"):
        bn_fwd_site(x, PARAMETERS, Alone(), "missing", options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "three_round"}, "mode is 'three_round'; accepted: 'two_round', 'one_round'"),
        ({"eps": 0.0}, "eps is 0"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SiteOptions(**wrong)


def test_a_replica_that_leaves_is_an_error_on_the_others() -> None:
    """At once if it says so, after the timeout if it does not."""
    groups = replicas(2, timeout=0.2)
    with pytest.raises(RuntimeError, match="replica 1 waited for the others in gmu; one left, or did not come"):
        groups[1].all_reduce("gmu", np.ones(3, np.float32))
    groups = replicas(2)
    groups[0].leave()
    with pytest.raises(RuntimeError, match="replica 1 waited"):
        groups[1].all_reduce("gmu", np.ones(3, np.float32))


@pytest.mark.parametrize("other", [("gvar", 3), ("gmu", 4)])
def test_replicas_that_disagree_are_an_error_on_all(other: tuple[str, int]) -> None:
    groups, errors = replicas(2), []

    def call(rank: int) -> None:
        name, channels = (("gmu", 3), other)[rank]
        with pytest.raises(RuntimeError, match="replicas call different collectives: gmu of") as caught:
            groups[rank].all_reduce(name, np.ones(channels, np.float32))
        errors.append(caught)

    on_all(groups, call)
    assert len(errors) == 2


def test_running_statistics_take_the_unbiased_variance() -> None:
    """Four values of variance 3: 0.9*2 + 0.1*3*4/3."""
    batch = Statistics(np.float32([1]), np.float32([3]), 4)
    mean, var = running_statistics(np.zeros(1, np.float32), np.float32([2]), batch)
    assert (mean[0], var[0]) == (np.float32(0.1), pytest.approx(2.2))


def test_sums_may_be_left_to_the_backward() -> None:
    batch, options = drawn((1, 3)), options_of("two_round", "mask")
    given, _ = steps(batch, options)
    groups = replicas(2)
    x, dy = batch.shards(batch.x), batch.shards(batch.dy)

    def back(rank: int) -> SiteBackward:
        forward = given[rank].forward
        return bn_back_site(dy[rank], x[rank], batch.parameters, groups[rank], "g", forward, None, options)

    for got, step in zip(on_all(groups, back), given, strict=True):
        same_bits(got.dx, step.backward.dx)
