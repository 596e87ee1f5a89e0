# SPDX-License-Identifier: Apache-2.0
"""``nki-bn bench --replicas``: what a synchronised step costs, worked out by hand where it is not a launch."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from nki_bn import cli
from nki_bn.bench import synchronised
from nki_bn.bench.modelled import ModelTimer
from nki_bn.bench.record import Case
from nki_bn.bench.synchronised import Cost
from nki_bn.links import Links, load_links
from nki_bn.planner import plan
from nki_bn.problem import Array, BackwardProblem, ForwardProblem
from nki_bn.synchronised import replicas
from nki_bn.synchronised.exchange import MODES, Moments, global_moments, global_sums
from nki_bn.synchronised.launches import Exchange, backward_plans, forward_plans, meetings

CASE = Case("small", "3x4x5", 2, "bwd", (4, 3, 4, 5), "bfloat16", "none", "high", 1, "trn2", "planned")
FILE = 'model = "small"\n[[layer]]\nchannels = 3\nspatial = [4, 5]\ncount = 2\n'


def test_links() -> None:
    """Two hops of 3 us and twice 100 bytes at 50 bytes per us make a ring of three."""
    links = Links(hop=3.0, rate=50.0)
    assert links.mesh(100) == 5.0 and links.ring(100, 3) == 10.0


def test_the_parameters_have_sources() -> None:
    text = resources.files("nki_bn.configs").joinpath("collectives", "trn2.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    assert all(set(entry) == {"value", "unit", "source", "confidence"} for entry in entries.values())
    assert load_links("trn2") == Links(entries["hop"]["value"], entries["rate"]["value"] * 1e3)
    with pytest.raises(ValueError, match="target is 'trn1'; accepted with replicas: trn2"):
        load_links("trn1")


@pytest.mark.parametrize("mode", MODES)
def test_payloads_are_those_of_the_exchange(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where they are sent, by a replica whose other one is a copy of it."""
    replica, sent = replicas(2)[0], []

    def gather(name: str, values: Array) -> Array:
        sent.append(values.nbytes)
        return np.stack([values, values])

    monkeypatch.setattr(replica, "all_gather", gather)
    columns = np.ones(7, np.float32)
    global_moments(Moments(columns, columns, np.ones(1, np.float32)), replica, "g", mode)
    global_sums(columns, columns, replica, "g")
    assert tuple(sent) == synchronised.payloads(7, mode)


def test_a_layer_is_its_launches_and_its_collectives() -> None:
    cost = synchronised.layer_cost(CASE, 4, "two_round")
    problems = ForwardProblem(CASE.shape, "bfloat16", lnc=1), BackwardProblem(CASE.shape, "bfloat16", lnc=1)
    times = [ModelTimer().time(problem, plan(problem)).time_us for problem in problems]
    assert cost.plain == pytest.approx(sum(time for time in times if time is not None))
    links = load_links("trn2")
    assert cost.mesh == pytest.approx(3 * links.hop + (16 + 12 + 24) / links.rate)
    assert cost.ring == pytest.approx(3 * cost.mesh)
    one_round = synchronised.layer_cost(CASE, 4, "one_round")
    assert one_round.kernels == cost.kernels > 0
    assert one_round.mesh == pytest.approx(2 * links.hop + (28 + 24) / links.rate)


def test_single_launches_wait_for_their_collectives() -> None:
    """Of one group of channels each: hops of 1.5 us between the phases, and no second read of x."""
    shape = (8, 2, 32, 32)
    problems = ForwardProblem(shape, "bfloat16", lnc=1), BackwardProblem(shape, "bfloat16", lnc=1)
    case = Case("one", "32x32", 1, "bwd", shape, "bfloat16", "none", "high", 1, "trn2", "planned")
    cost, hop = synchronised.layer_cost(case, 4, "two_round"), load_links("trn2").hop
    groups = 0
    for problem, plans in zip(problems, (forward_plans, backward_plans), strict=True):
        exchange = Exchange((problem.count,) * 4, "two_round")
        found = meetings(problem, plans([problem] * 4, exchange)[0], "two_round", 4)  # type: ignore[arg-type,operator]
        groups += len(found[0])
    assert groups == 3, "two rounds and one"
    assert cost.plain + 3 * hop < cost.single_mesh < cost.kernels + cost.mesh
    # Two more hops for each, unless something else takes longer than the first.
    assert cost.single_mesh + 3 * hop < cost.single_ring <= cost.single_mesh + 3 * 2 * (hop + 0.1)


def test_layers_add_up() -> None:
    cost = Cost().plus(Cost(1, 2, 3, 4, 5, 6), 3).plus(Cost(10, 20, 30, 40, 50, 60), 1)
    assert cost == Cost(13, 26, 39, 52, 65, 78) and cost.slowdown == (65 / 13, 78 / 13)
    assert cost.single_slowdown == (65 / 13, 78 / 13)


def test_the_command_prints_a_row_per_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(FILE, encoding="utf-8")
    arguments = ["bench", str(path), "--replicas", "4", "--batch", "4", "--lnc", "1", "--sync-mode", "one_round"]
    assert cli.main(arguments) == 0
    title, header, row, caveat = capsys.readouterr().out.splitlines()
    cost = Cost().plus(synchronised.layer_cost(CASE, 4, "one_round"), 2)
    figures = [f"{value:.0f}" for value in (cost.plain, cost.kernels, cost.mesh, cost.ring)]
    assert title == "4 replicas, one_round" and header.split()[:4] == ["model", "dtype", "batch", "lnc"]
    single = [f"{value:.0f}" for value in (cost.single_mesh, cost.single_ring)]
    slower = ["{:.2f} to {:.2f}".format(*pair).split() for pair in (cost.slowdown, cost.single_slowdown)]
    assert row.split() == ["small", "bfloat16", "4", "1", *figures, *slower[0], *single, *slower[1]]
    assert caveat.startswith("modelled: ")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--replicas", "1"], "'1' is no number of replicas; accepted: from 2 to 65536"),
        (["--replicas", "65537"], "'65537' is no number of replicas; accepted: from 2 to 65536"),
        (["--replicas", "9" * 5000], "is no number of replicas; accepted: from 2 to 65536"),
        (
            ["--replicas", "65536", "--sync-mode", "one_round"],
            "mode is 'one_round' with 65536 replicas, whose moments take 786432 of",
        ),
        (["--sync-mode", "one_round"], "--sync-mode is about replicas; accepted with --replicas R"),
        (["--replicas", "2", "--op", "fwd"], "--op is about a sweep; accepted without --replicas"),
        (["--replicas", "2", "--dry"], "--dry is about a sweep"),
    ],
)
def test_wrong_uses_are_refused(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "cifar8", *wrong])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
