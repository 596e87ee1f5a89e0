# SPDX-License-Identifier: Apache-2.0
"""Sweeps: what is checked, what is timed, what is recorded; modelled and, with a stand-in for the device, measured."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_rows import case

from nki_bn import __version__, cli, execute
from nki_bn.bench import checks, modelled, sweep, timers
from nki_bn.bench.launches import EPS, Launch, launch_of
from nki_bn.bench.measured import DeviceTimer, XlaLauncher, values_of
from nki_bn.bench.modelled import ModelTimer, bound_by
from nki_bn.bench.record import Record
from nki_bn.bench.roofline import minimum_bytes, roofline_us
from nki_bn.bench.rows import read_records
from nki_bn.bench.strategies import plan_of, problem_of, sized, strategies_of
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem
from nki_bn.simulator import RunOptions, run

SHAPES = """model = "net"
[[layer]]
channels = 3
spatial = [4]
count = 2
[[layer]]
channels = 5
spatial = []
count = 1
"""


def command(*arguments: str) -> int:
    """The exit code of the command line."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code


def shapes(folder: Path) -> str:
    path = folder / "shapes.toml"
    path.write_text(SHAPES, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("problem", "elements", "columns", "mask"),
    [
        (BackwardProblem((4, 3, 5), "float32"), 3 * 4, 5, 0),
        (BackwardProblem((4, 3, 5), "bfloat16"), 3 * 2, 5, 0),
        (BackwardProblem((4, 3, 5), "bfloat16", relu="mask"), 3 * 2, 5, 1),
        (BackwardProblem((4, 3, 5), "bfloat16", relu="recompute"), 3 * 2, 6, 0),
        (BackwardProblem((4, 3, 5), "float32", relu="recompute", residual=True), 4 * 4, 6, 0),
        (ForwardProblem((4, 3, 5), "float32"), 2 * 4, 8, 0),
        (ForwardProblem((4, 3, 5), "float32", training=False), 2 * 4, 4, 0),
        (ForwardProblem((4, 3, 5), "float16", relu="mask", residual=True), 3 * 2, 8, 1),
        (ForwardProblem((4, 3, 5), "float32", relu="recompute"), 2 * 4, 8, 0),
    ],
)
def test_minimum_bytes(problem: Problem, elements: int, columns: int, mask: int) -> None:
    """60 elements: bytes per element, float32 columns of 3 channels, a byte per element of a mask."""
    assert minimum_bytes(problem) == 60 * (elements + mask) + 3 * 4 * columns


def test_the_roofline_is_that_of_the_cores() -> None:
    """716 GB/s for a pair, 400 for a core alone: the limits the design pins."""
    pair, core = (BackwardProblem((4, 3, 5), "float32", lnc=lnc) for lnc in (2, 1))
    assert roofline_us(pair) == pytest.approx(780 / 716e3) and roofline_us(core) == pytest.approx(780 / 400e3)
    with pytest.raises(ValueError, match="trn1.toml has no timing"):
        roofline_us(BackwardProblem((4, 3, 5), "float32", lnc=1, target="trn1"))


@pytest.mark.parametrize("strategy", strategies_of("bwd"))
def test_strategies_make_plans(strategy: str) -> None:
    problem = problem_of(case(strategy=strategy))
    assert plan_of(problem, strategy).strategy in strategies_of("bwd")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"strategy": "two_read"},
            ValueError,
            "'two_read' is none of op bwd; accepted: staged, resident, reread, transposed, pl",
        ),
        ({"op": "fwd", "strategy": "staged"}, ValueError, "strategy 'staged' is none of op fwd"),
        ({"op": "fwd", "strategy": "planned", "precision": "fast"}, ValueError, "precision is 'fast'; accepted with"),
        (
            {"precision": "fast", "dtype": "float32"},
            ValueError,
            "is 'fast' with float32; accepted: 'fast' with 16-bit",
        ),
        ({"lnc": 3}, ValueError, "lnc is 3"),
    ],
)
def test_cases_that_are_no_problems(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        problem_of(case(**changes))


PROBLEMS = [
    BackwardProblem((32, 64, 112, 112), "bfloat16"),
    BackwardProblem((32, 1024, 14, 14), "bfloat16", relu="mask"),
    BackwardProblem((2, 32, 64, 128, 128), "float32", relu="recompute"),
    BackwardProblem((32, 128, 56, 56), "float16", lnc=1),
    BackwardProblem((64, 4096), "bfloat16"),
    ForwardProblem((32, 64, 112, 112), "bfloat16", relu="mask"),
    ForwardProblem((2, 32, 64, 128, 128), "float32", training=False),
    ForwardProblem((64, 1000), "float32"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{type(problem).__name__}-{problem.shape}")
def test_a_small_twin_takes_the_same_path(problem: Problem) -> None:
    plan = plan_of(problem, "planned")
    small, its_plan = checks.small_twin(problem, plan)
    assert checks.code_path(small, its_plan) == checks.code_path(problem, plan)
    assert prod(small.shape) <= min(prod(problem.shape), 2**21) and small.count >= min(problem.count, 64)
    assert len(small.shape) == len(problem.shape) and (small.dtype, small.relu) == (problem.dtype, problem.relu)


def test_paths_differ_by_what_matters() -> None:
    """Whether something is staged, how cores and bands divide the data, how the mask comes about."""
    small = (2, 256, 56, 56)
    shapes = [small, (32, 256, 56, 56), (2, 64, 56, 56), (2, 200, 56, 56), (2, 200, 7, 7)]
    problems = [BackwardProblem(shape, "bfloat16") for shape in shapes]
    problems += [
        BackwardProblem(small, "float32"),
        BackwardProblem(small, "bfloat16", relu="mask"),
        BackwardProblem(small, "bfloat16", lnc=1),
    ]
    paths = {checks.code_path(problem, plan_of(problem, "staged")) for problem in problems}
    assert len(paths) == len(problems)
    like = BackwardProblem((3, 256, 55, 55), "bfloat16")
    assert checks.code_path(like, plan_of(like, "staged")) in paths


def test_what_is_too_large_without_a_twin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_spaces", lambda problem: [])
    problem = BackwardProblem((32, 256, 56, 56), "bfloat16")
    with pytest.raises(checks.CheckFailed, match="no small shape was found that takes the code path of"):
        checks.small_twin(problem, plan_of(problem, "staged"))
    little = BackwardProblem((2, 3, 4), "bfloat16")
    assert checks.small_twin(little, plan_of(little, "staged"))[0] is little


def test_a_path_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []
    monkeypatch.setattr(checks, "check", lambda problem, plan: ran.append(problem.shape))
    problems = [
        BackwardProblem((32, 512, 28, 28), "bfloat16"),
        BackwardProblem((32, 512, 27, 27), "bfloat16"),
        BackwardProblem((32, 512, 28, 28), "float32"),
    ]
    checker = checks.Checker()
    found = [checker.shape(problem, plan_of(problem, "staged")) for problem in problems]
    assert len(ran) == 2 and found == [ran[0], ran[0], ran[1]]
    own = checks.Checker(own_shape=True).shape(problems[0], plan_of(problems[0], "staged"))
    assert own == problems[0].shape and ran[2:] == [problems[0].shape]


@pytest.mark.parametrize("op", ["bwd", "fwd", "eval"])
@pytest.mark.parametrize("relu", ["none", "mask", "recompute"])
def test_checks_pass_right_kernels(op: str, relu: str) -> None:
    problem = problem_of(case(op=op, relu=relu, strategy="planned", shape=(4, 3, 40), dtype="bfloat16", lnc=2))
    checks.check(problem, plan_of(problem, "planned"))
    assert prod(checks.Checker().shape(problem, plan_of(problem, "planned"))) <= prod(problem.shape)


@pytest.mark.parametrize("op", ["bwd", "fwd"])
def test_checks_fail_wrong_kernels(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict holds for every case of the path."""
    monkeypatch.setattr(execute, "run_forward", _off_by_a_percent(execute.run_forward))
    monkeypatch.setattr(execute, "run_backward", _off_by_a_percent(execute.run_backward))
    problem = problem_of(case(op=op, strategy="planned"))
    checker = checks.Checker()
    for _ in range(2):
        with pytest.raises(checks.CheckFailed, match=r"(?s)outputs at shape \(2, 3, 4\) are not .*NOT OK"):
            checker.shape(problem, plan_of(problem, "planned"))


def _off_by_a_percent(right: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        outputs = right(*arguments)
        return (outputs[0] * np.float32(1.01), *outputs[1:])

    return wrong


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("relu", ["none", "mask", "recompute"])
def test_a_backward_launch_is_that_of_the_public_function(relu: str, lnc: int) -> None:
    problem = BackwardProblem((4, 3, 5), "float32", relu=relu, lnc=lnc)
    plan = plan_of(problem, "staged")
    launch = launch_of(problem, plan, values_of)
    x, row, column = (values_of(shape, "float32") for shape in (problem.layout, (3,), (3, 1)))
    mask = values_of(problem.layout, "uint8") if relu == "mask" else None
    inputs = execute.BackwardInputs(x, x, row, row, column, column, EPS, mask, None)
    got = run(launch.kernel, launch.arguments, {}, launch.lnc, RunOptions()).outputs
    for one, other in zip(got, execute.run_backward(inputs, problem, plan), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_launch_is_that_of_the_public_function(training: bool) -> None:
    problem = ForwardProblem((4, 3, 5), "float32", training, relu="mask", residual=True, lnc=1)
    plan = plan_of(problem, "two_read")
    launch = launch_of(problem, plan, values_of)
    x, row, column = (values_of(shape, "float32") for shape in (problem.layout, (3,), (3, 1)))
    inputs = execute.ForwardInputs(x, column, column, row, row, x, 0.1, EPS)
    got = run(launch.kernel, launch.arguments, {}, launch.lnc, RunOptions()).outputs
    for one, other in zip(got, execute.run_forward(inputs, problem, plan), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)


def test_what_is_busy_longest_bounds() -> None:
    busy = {"vector.0": 60.0, "vector.1": 40.0, "dma.0": 50.0}
    assert bound_by(busy, 100.0) == "vector" and bound_by(busy | {"dma.1": 90.0}, 100.0) == "dma"
    assert bound_by(busy, 121.0) == "latency"


def test_a_modelled_record_holds_together() -> None:
    """A layer that stays in SBUF: x and dy in, dx out, once; the sums of engine times are those of the timeline."""
    found = sweep.run_case(case(shape=(4, 256, 14, 14), dtype="bfloat16", lnc=2), ModelTimer(), checks.Checker())
    assert found.ok and found.error is None and found.timing == "modelled" and found.measured_us is None
    assert found.hbm_bytes_min == 256 * (4 * 196 * 6 + 5 * 4) and found.hbm_bytes == found.hbm_bytes_min
    assert found.roofline_share == pytest.approx(found.hbm_bytes_min / 716e3 / found.time_us)
    assert found.engine_busy_us is not None and found.plan is not None and found.instructions is not None
    assert {"vector.0", "vector.1", "scalar.0", "dma.0", "dma.1"} <= set(found.engine_busy_us)
    assert 0 < max(found.engine_busy_us.values()) < found.time_us and found.instructions > 20
    assert found.sbuf_high_water == (found.plan["sbuf_bytes"],) * 2 and found.plan["strategy"] == "staged"
    assert found.version == __version__ and found.environment["nki"] == "embedded"


class Broken(ModelTimer):
    """Fails on one shape."""

    def time(self, problem: Problem, plan: Any) -> timers.Figures:
        """As ModelTimer, but for 5 channels."""
        if problem.channels == 5:
            raise MemoryError("too large")
        return super().time(problem, plan)


def test_a_failed_case_is_recorded_and_the_sweep_goes_on() -> None:
    found: list[Record] = []
    cases = [case(), case(shape=(2, 5, 4), layer="5x4"), case(shape=(2, 6, 4), layer="6x4")]
    sweep.sweep(cases, Broken(), checks.Checker(), found.append)
    assert [record.status for record in found] == ["ok", "failed", "ok"]
    assert found[1].error == "MemoryError: too large" and found[1].checked_shape == found[0].checked_shape
    assert found[1].modelled_us is None and found[1].roofline_us > 0 and found[1].plan is not None


def test_a_failed_check_fails_the_case_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Problem, plan: Any) -> None:
        raise checks.CheckFailed("wrong")

    monkeypatch.setattr(checks, "check", fail)
    monkeypatch.setattr(modelled, "launch_of", lambda *arguments: pytest.fail("timed without a check"))
    found = sweep.run_case(case(), ModelTimer(), checks.Checker())
    assert (found.status, found.error, found.checked_shape) == ("failed", "CheckFailed: wrong", None)


class StandIn:
    """A launcher whose launches take what ``durations`` (ns) says, on its own clock."""

    words = "on a stand-in"

    def __init__(self, durations: Iterator[int]) -> None:
        self.now = 0
        self.launches: list[Launch] = []
        self.tensors: list[tuple[tuple[int, ...], str]] = []
        self._durations = durations

    def clock(self) -> int:
        """Nanoseconds."""
        return self.now

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Remembers what was asked for."""
        self.tensors.append((shape, dtype))
        return values_of(shape, dtype)

    def run(self, launch: Launch) -> None:
        """Advances the clock."""
        self.launches.append(launch)
        self.now += next(self._durations)


def test_a_measured_time_is_the_median_after_a_warm_up() -> None:
    """Two slow launches that do not count, then 10, 30, 20 us: the median is 20, not the mean or the least."""
    device = StandIn(iter([900_000, 500_000, 10_000, 30_000, 20_000]))
    timer = DeviceTimer(device, device.clock, warmup=2, launches=3)
    found = sweep.run_case(case(relu="mask", lnc=2), timer, checks.Checker())
    assert (found.timing, found.measured_us, found.modelled_us, found.time_us) == ("measured", 20.0, None, 20.0)
    assert found.method == "median of 3 launches after 2, on a stand-in"
    assert found.hbm_bytes is None and found.roofline_share == pytest.approx(found.roofline_us / 20.0)
    assert len(device.launches) == 5 and {launch.lnc for launch in device.launches} == {2}
    layout = (2, 3, 1, 1, 4)
    assert sorted(device.tensors) == sorted(
        [(layout, "float32")] * 2 + [(layout, "uint8")] + [((3,), "float32")] * 2 + [((3, 1), "float32")] * 2
    )


def test_values_for_a_device() -> None:
    """Variances must not be negative, masks are 0 and 1."""
    floats, mask = values_of((3, 1000), "bfloat16"), values_of((3, 1000), "uint8")
    assert floats.dtype.name == "bfloat16" and float(floats.min()) >= 0 and float(floats.max()) <= 1
    assert mask.dtype == np.uint8 and set(np.unique(mask)) == {0, 1}


def test_launches_through_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go to the device; the results of a launch are held until the wait is over."""
    events: list[Any] = []

    class Output:
        """What a kernel returns."""

    class Kernel:
        def __getitem__(self, lnc: int) -> Any:
            def launch(*arguments: Any) -> Output:
                output = Output()
                events.extend([(lnc, arguments), weakref.ref(output)])
                return output

            return launch

    wait = SimpleNamespace(device=lambda: "meta", sync=lambda wait: events.append((wait, events[1]() is not None)))
    monkeypatch.setitem(sys.modules, "torch_xla", wait)
    launcher = XlaLauncher()
    tensor = launcher.tensor((2, 3), "bfloat16")
    assert (tensor.device.type, tensor.dtype, tuple(tensor.shape)) == ("meta", torch.bfloat16, (2, 3))
    assert launcher.tensor((2, 3), "uint8").dtype is torch.uint8
    launcher.run(Launch(Kernel(), (tensor, 1e-5), 2))
    assert events[0] == (2, (tensor, 1e-5)) and events[2:] == [(True, True)] and events[1]() is None


def test_values_become_torch_tensors_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(device=lambda: "cpu", sync=None))
    for dtype in ("float32", "float16", "bfloat16", "uint8"):
        tensor = XlaLauncher().tensor((2, 3), dtype)
        np.testing.assert_array_equal(tensor.float().numpy(), values_of((2, 3), dtype).astype(np.float32))


def test_bench_measures_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = StandIn(iter([25_000] * 50))
    monkeypatch.setattr(timers, "timer_here", lambda: DeviceTimer(device, device.clock))
    out, other = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert command("bench", shapes(tmp_path), "--lnc", "1", "--dry", "-o", out) == 0
    printed = capsys.readouterr().out
    assert "All times were measured on a device. Method: median of 20 launches after 5, on a stand-in." in printed
    assert "net bwd bfloat16, batch 32, trn2 lnc 1, measured" in printed and "      25.0  " in printed
    assert [(row.timing, row.measured_us) for row in read_records(Path(out))] == [("measured", 25.0)] * 2
    monkeypatch.undo()
    assert command("bench", shapes(tmp_path), "--lnc", "1", "--dry", "-o", other) == 0
    assert command("compare", out, other) == 2


def test_a_device_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timers.timer_here().timing == "modelled"
    vendor = execute.which_nki().__class__("vendor", "installed")
    monkeypatch.setattr(execute, "which_nki", lambda: vendor)
    monkeypatch.setattr(execute, "has_device", lambda: False)
    with pytest.raises(ValueError, match="without a Neuron device"):
        timers.timer_here()
    monkeypatch.setattr(execute, "has_device", lambda: True)
    monkeypatch.setattr("nki_bn.bench.measured.XlaLauncher", lambda: StandIn(iter([])))
    assert timers.timer_here().timing == "measured"


def test_bench_from_file_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.jsonl"
    options = ["--op", "bwd,fwd,eval", "--batch", "4", "--lnc", "1,2", "--dry", "-o", str(out)]
    assert command("bench", shapes(tmp_path), *options) == 0
    rows, printed = read_records(out), capsys.readouterr().out
    assert len(rows) == 2 * 3 * 2 and all(row.ok for row in rows)
    assert "12 cases, 0 failed. All times are modelled, none was measured on a device." in printed
    assert "net fwd bfloat16, batch 4, trn2 lnc 2, modelled" in printed and "mean speed-up" in printed
    lines = [line for line in printed.splitlines() if line.startswith(("3x4 ", "5 ", "layer "))]
    assert len({line.index("  ", 8) for line in lines if "planned" in line}) == 1 and len(lines) == 12 + 6


def test_bench_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that was killed in the second of four rows runs three cases more and ends with the same rows."""
    out = tmp_path / "a.jsonl"
    arguments = ["bench", shapes(tmp_path), "--lnc", "1,2", "--dry", "-o", str(out)]
    assert command(*arguments) == 0
    whole, lines = read_records(out), out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:100])
    assert command(*arguments) == 2 and "exists; accepted: another path" in capsys.readouterr().err
    ran: list[Any] = []
    run_case = sweep.run_case
    monkeypatch.setattr(sweep, "run_case", lambda case, *rest: ran.append(case) or run_case(case, *rest))
    assert command(*arguments, "--resume") == 0
    times = [(row.case, row.time_us) for row in whole]
    assert [(row.case, row.time_us) for row in read_records(out)] == times and ran == [row.case for row in whole[1:]]
    assert "1 of 4 cases are in the output already" in capsys.readouterr().out
    assert command(*arguments, "--force") == 0 and read_records(out) == whole


def test_bench_fails_with_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nki_bn.bench.timers.timer_here", Broken)
    assert command("bench", shapes(tmp_path), "--dry") == 1
    printed = capsys.readouterr().out
    assert "2 cases, 1 failed" in printed and "failed: net bwd" in printed and "MemoryError: too large" in printed


def test_without_dry_every_layer_is_checked_at_its_own_shape(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    assert command("bench", shapes(tmp_path), "--lnc", "1", "-o", str(out)) == 0
    assert [row.checked_shape for row in read_records(out)] == [(32, 3, 4), (32, 5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet51"], "model 'resnet51' is unknown; accepted: cifar8, "),
        (["smokes"], "unet3d, the sweeps full and smoke, or a path that ends in .toml"),
        (["absent.toml"], "absent.toml cannot be read"),
        (["smoke", "--op", "bwd"], "--op cannot go with the sweep smoke"),
        (["smoke", "--fuse-relu", "mask"], "--fuse-relu cannot go with the sweep smoke"),
        (["cifar8", "--op", "back"], "'back' in 'back' is unknown; accepted: bwd, fwd, eval"),
        (["cifar8", "--batch", "0"], "'0' is no list of numbers"),
        (
            ["cifar8", "--strategy", "best"],
            "strategy 'best' is none of op bwd; accepted: staged, resident, reread, transposed",
        ),
        (["cifar8", "--precision", "fast", "--dtype", "float32"], "precision is 'fast' with float32; accepted: 'fast'"),
        (["cifar8", "--lnc", "3"], "lnc is 3; accepted on trn2: 1 or 2"),
        (["cifar8", "--target", "trn1"], "trn1.toml has no timing"),
        (["cifar8", "--resume"], "--resume is about the output; accepted with -o OUT.jsonl"),
    ],
)
def test_bench_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("bench", *arguments) == 2
    assert message in capsys.readouterr().err


def test_without_rich_bench_says_which_extra_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command("bench", "cifar8", "--dry") == 2
    assert (
        "rich is not installed; the extra bench has it: in a checkout, pip install '.[bench]'"
        in capsys.readouterr().err
    )


def test_a_plan_can_be_made_in_less_memory() -> None:
    problem = BackwardProblem((8, 3, 4000), "bfloat16", lnc=1)
    assert sized(problem, "staged", 20_000).sbuf_bytes <= 20_000 < plan_of(problem, "staged").sbuf_bytes
