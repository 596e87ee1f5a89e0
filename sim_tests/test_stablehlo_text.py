# SPDX-License-Identifier: Apache-2.0
"""What the sites emit as StableHLO: the plain node for one replica, named collectives for more, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xla_runs import Xla

from nki_bn.stablehlo import (
    Graph,
    Options,
    Value,
    batch_norm_grad,
    batch_norm_training,
    bn_back_site,
    bn_fwd_site,
    bn_gamma_site,
)
from nki_bn.synchronised import MODES

SHAPE = (4, 3, 5)
COLLECTIVES = re.compile(r'%(\w+) = "stablehlo\.(all_\w+)"')
NAMES = {
    "two_round": [("gmu", "all_reduce"), ("gvar", "all_reduce")],
    "one_round": [("gmom", "all_gather")],
}


def parameters(graph: Graph, dtype: str = "float32") -> tuple[Value, Value, Value, Value]:
    """x, dy, gamma, beta."""
    x, dy = (graph.parameter(name, SHAPE, dtype) for name in ("x", "dy"))
    gamma, beta = (graph.parameter(name, (3,)) for name in ("g", "b"))
    return x, dy, gamma, beta


def by_sites(graph: Graph, options: Options, dtype: str = "float32", add: bool = False) -> str:
    x, dy, gamma, beta = parameters(graph, dtype)
    forward = bn_fwd_site(x, gamma, beta, "g", options, dy if add else None)
    sums = bn_gamma_site(dy, x, gamma, forward)
    dx = bn_back_site(dy, x, gamma, "g", forward, sums)
    return graph.module([forward.y, forward.statistics.mean, forward.statistics.var, dx, *sums])


def plain(options: Options, dtype: str = "float32", add: bool = False) -> str:
    graph = Graph()
    x, dy, gamma, beta = parameters(graph, dtype)
    forward = batch_norm_training(x, gamma, beta, options, dy if add else None)
    gradients = batch_norm_grad(dy, x, gamma, forward)
    return graph.module([forward.y, forward.statistics.mean, forward.statistics.var, *gradients])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_replica_is_the_plain_emission_to_the_byte(dtype: str, mode: str, fused: bool) -> None:
    options = Options(mode, fuse_relu=fused)
    assert by_sites(Graph(1), options, dtype, fused) == plain(options, dtype, fused)


def test_the_plain_emission_is_one_node_each_way() -> None:
    """Written out by hand; 1e-3 in float32 is 1.00000005e-3."""
    big, small = "tensor<4x3x5xf32>", "tensor<3xf32>"
    attributes = "{epsilon = 1.00000005e-03 : f32, feature_index = 1 : i64}"
    results = ", ".join((big, small, small))
    assert by_sites(Graph(), Options(eps=1e-3)) == (
        "module @nki_bn attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {\n"
        f"  func.func public @main(%x: {big}, %dy: {big}, %g: {small}, %b: {small}) -> ({results}, {results}) {{\n"
        f'    %0, %1, %2 = "stablehlo.batch_norm_training"(%x, %g, %b) {attributes} : '
        f"({big}, {small}, {small}) -> ({results})\n"
        f'    %3 = "stablehlo.constant"() {{value = dense<2.00000000e+01> : tensor<1xf32>}} : () -> tensor<1xf32>\n'
        f'    %4, %5, %6 = "stablehlo.batch_norm_grad"(%x, %g, %1, %2, %dy) {attributes} : '
        f"({big}, {small}, {small}, {small}, {big}) -> ({results})\n"
        f"    return %0, %1, %2, %4, %5, %6 : {results}, {results}\n"
        "  }\n"
        "}\n"
    )


def test_replicas_in_groups_of_one_are_alone() -> None:
    text = by_sites(Graph(2, [[1], [0]]), Options())
    assert text.replace("num_replicas = 2", "num_replicas = 1") == plain(Options())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", [2, 4, 16])
def test_collectives_of_each_site(replicas: int, mode: str) -> None:
    """Three all-reduces in two rounds; an all-gather and an all-reduce in one; none for gamma."""
    graph = Graph(replicas)
    x, dy, gamma, beta = parameters(graph)
    forward = bn_fwd_site(x, gamma, beta, "g", Options(mode))
    assert COLLECTIVES.findall(graph.body) == NAMES[mode]
    sums = bn_gamma_site(dy, x, gamma, forward)
    assert COLLECTIVES.findall(graph.body) == NAMES[mode]
    bn_back_site(dy, x, gamma, "g", forward, sums)
    assert COLLECTIVES.findall(graph.body) == [*NAMES[mode], ("gdst", "all_reduce")]


def test_sums_may_be_left_to_the_backward() -> None:
    texts = []
    for given in (True, False):
        graph = Graph(2)
        x, dy, gamma, beta = parameters(graph)
        forward = bn_fwd_site(x, gamma, beta, "g")
        sums = bn_gamma_site(dy, x, gamma, forward) if given else None
        texts.append(graph.module([bn_back_site(dy, x, gamma, "g", forward, sums)]))
    assert texts[0] == texts[1]


def test_groups_and_channels() -> None:
    """Every collective names the groups, and has a channel of its own."""
    text = by_sites(Graph(4, [[0, 2], [1, 3]], first_channel=7), Options())
    groups = re.findall(r"replica_groups = (dense<.*?> : tensor<\w+>)", text)
    assert groups == ["dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>"] * 3
    assert re.findall(r"handle = (\d+)", text) == ["7", "8", "9"]
    assert "mhlo.num_replicas = 4 : i32" in text


@pytest.mark.parametrize(("mode", "dtype"), [("two_round", "bfloat16"), ("one_round", "float16")])
def test_names_outlive_parser_and_compiler(xla: Xla, mode: str, dtype: str) -> None:
    """As locations, which XLA keeps as names of operations."""
    text = by_sites(Graph(4), Options(mode, fuse_relu=True), dtype, add=True)
    parsed, compiled = xla.parsed(text), xla.compiled(text, 4)
    for name, kind in [*NAMES[mode], ("gdst", "all_reduce")]:
        assert f'loc("{name}")' in parsed
        pattern = rf'{kind.replace("_", "-")}(?:-start)?\(.*op_name="{name}"'
        assert len(re.findall(pattern, compiled)) == 1
    assert len(re.findall(r" all-(?:reduce|gather)(?:-start)?\(", compiled)) == len(NAMES[mode]) + 1


def test_the_example_of_the_page_is_a_module(xla: Xla, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "stablehlo.md"
    example = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    exec(compile(example[1], page.name, "exec"), {})
    parsed = xla.parsed(capsys.readouterr().out)
    assert all(f'loc("gamma1{end}")' in parsed for end in ("mu", "var", "dst"))


def test_every_name_is_given_once(xla: Xla) -> None:
    """Two layers and their backward; the parser would not have it otherwise."""
    graph = Graph(2)
    x, dy, gamma, beta = parameters(graph)
    other = graph.parameter("layer1.bn$weight", (3,))
    first = bn_fwd_site(x, gamma, beta, "g")
    second = bn_fwd_site(first.y, other, None, other.name, Options("one_round"))
    middle = bn_back_site(dy, first.y, other, other.name, second)
    text = graph.module([bn_back_site(middle, x, gamma, "g", first)])
    assert [name for name, _ in re.findall(r'loc\("(.*?)(mu|var|mom|dst)"\)', text)] == [
        *("g", "g"),
        *(other.name, other.name),
        "g",
    ]
    assert "stablehlo.all_gather" in xla.parsed(text)


def refuses(match: str, call: Callable[[], Any], error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tag_is_used_once(replicas: int) -> None:
    """Whatever the mode; nothing is emitted for one that is refused."""
    graph = Graph(replicas)
    x, dy, gamma, beta = parameters(graph)
    forward = bn_fwd_site(x, gamma, beta, "g")
    bn_back_site(dy, x, gamma, "g", forward)
    before = graph.body
    for mode in MODES:
        refuses(
            "tag is 'g', which another forward site has; accepted: a tag of its own per layer",
            lambda mode=mode: bn_fwd_site(x, gamma, beta, "g", Options(mode)),
        )
    refuses("'g', which another backward site has", lambda: bn_back_site(dy, x, gamma, "g", forward))
    assert graph.body == before


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_collective_has_a_name_of_its_own(replicas: int) -> None:
    graph = Graph(replicas)
    x, dy, gamma, beta = parameters(graph)
    for name in ("hmu", "kmom", "ldst"):
        graph.parameter(name, (3,))
    refuses("the collective hmu has the name of a parameter; acc", lambda: bn_fwd_site(x, gamma, beta, "h"))
    refuses("kmom has the name of a parameter", lambda: bn_fwd_site(x, gamma, beta, "k", Options("one_round")))
    forward = bn_fwd_site(x, gamma, beta, "l")
    refuses("ldst has the name of a parameter", lambda: bn_back_site(dy, x, gamma, "l", forward))
    refuses("name is 'x', that of a parameter", lambda: graph.parameter("x", (3,)))
    refuses("name is 'lmu', that of a collective", lambda: graph.parameter("lmu", (3,)))
    graph.all_reduce("mmu", gamma)
    refuses("the collective mmu has the name of a collective", lambda: bn_fwd_site(x, gamma, beta, "m"))
    refuses("the collective x has the name of a parameter", lambda: graph.all_reduce("x", gamma))


@pytest.mark.parametrize("tag", ["", "0.weight", "a b", 'g"', "%g", "g\n"])
def test_a_tag_is_an_ssa_name(tag: str) -> None:
    graph = Graph(2)
    x, _, gamma, beta = parameters(graph)
    refuses("tag is .*; accepted: letters, digits, and _ . [$], not", lambda: bn_fwd_site(x, gamma, beta, tag))
    refuses("name is .*; accepted: letters", lambda: graph.parameter(tag, (3,)))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, "replicas is 0; accepted: integers from 1 up"),
        ((-1,), ValueError, "replicas is -1"),
        ((2.0,), TypeError, "replicas must be an int, got float"),
        ((True,), TypeError, "replicas must be an int, got bool"),
        ((2, [[0]]), ValueError, "groups is .*; accepted: every replica from 0 to 1 in one group"),
        ((2, [[0, 1], [1]]), ValueError, "every replica from 0 to 1 in one group"),
        ((2, [[0, 1, 2]]), ValueError, "every replica from 0 to 1"),
        ((3, [[0, 1], [2]]), ValueError, "accepted: groups of one size"),
        ((2, [[0.5, 1]]), TypeError, "integer"),
        ((2, None, 0), ValueError, "first_channel is 0"),
    ],
)
def test_groups_are_checked(arguments: tuple[Any, ...], error: type[Exception], match: str) -> None:
    refuses(match, lambda: Graph(*arguments), error)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype", "error", "match"),
    [
        ((4,), "float32", ValueError, "rank 1; accepted: ranks 2 to 5"),
        ((4, 3, 1, 1, 1, 1), "float32", ValueError, "rank 6"),
        ((4, 0, 5), "float32", ValueError, "C at least 1"),
        ((0, 3, 5), "float32", ValueError, "x has 0 values per channel on all replicas together; acc.*2 or more"),
        (SHAPE, "bool", TypeError, "dtype 'bool' is unknown; accepted: float32, float16, bfloat16"),
        (SHAPE, "float64", TypeError, "dtype of x is 'float64'; accepted: float32, float16, bfloat16, bool"),
        ((4, -3), "float32", ValueError, "shape of x is .*; accepted: sizes from 0 up"),
    ],
)
def test_x_is_checked(shape: tuple[int, ...], dtype: str, error: type[Exception], match: str, replicas: int) -> None:
    graph = Graph(replicas)
    gamma = graph.parameter("g", shape[1:2] if min(shape) >= 0 else (3,))
    refuses(match, lambda: bn_fwd_site(graph.parameter("x", shape, dtype), gamma, None, "g"), error)


def test_one_value_per_channel_is_enough_on_two_replicas_alone() -> None:
    for replicas in (1, 2):
        graph = Graph(replicas)
        x, gamma = graph.parameter("x", (1, 3)), graph.parameter("g", (3,))
        if replicas == 1:
            refuses("x has 1 values per channel", lambda x=x, gamma=gamma: bn_fwd_site(x, gamma, None, "g"))
        else:
            assert bn_fwd_site(x, gamma, None, "g").y.shape == (1, 3)


def test_what_comes_with_x_is_checked() -> None:
    graph = Graph(2)
    x, dy, gamma, beta = parameters(graph)
    wrong, half = graph.parameter("wrong", (4,)), graph.parameter("half", SHAPE, "float16")
    refuses("gamma is tensor<4xf32>; accepted: tensor<3xf32>", lambda: bn_fwd_site(x, wrong, beta, "g"))
    refuses("beta is tensor<4xf32>; accepted: tensor<3xf32>", lambda: bn_fwd_site(x, gamma, wrong, "g"))
    refuses("residual is tensor<4x3x5xf16>; acc", lambda: bn_fwd_site(x, gamma, beta, "g", residual=half))
    refuses("examples is tensor<4xf32>; accepted: tensor<1xf32>", lambda: examples(x, gamma, wrong))
    forward = bn_fwd_site(x, gamma, beta, "h")
    refuses("dy is tensor<4x3x5xf16>; accepted: tensor<4x3x5xf32>", lambda: bn_gamma_site(half, x, gamma, forward))
    refuses("gamma is tensor<4xf32>", lambda: bn_back_site(dy, x, wrong, "h", forward))
    refuses("y is tensor<4x3x5xf32>; accepted: tensor<4x3x5xf16>", lambda: bn_gamma_site(half, half, gamma, forward))
    alone = Graph()
    x, _, gamma, _ = parameters(alone)
    refuses("examples is given with one replica", lambda: examples(x, gamma, alone.parameter("n", (1,))))
    refuses("b is a value of another graph; accepted: values of one graph", lambda: bn_fwd_site(x, gamma, beta, "g"))
    refuses("dy is a value of another graph", lambda: alone.module([dy]))


def test_arithmetic_is_of_float32() -> None:
    graph = Graph(2)
    x, dy, gamma, _ = parameters(graph, "bfloat16")
    match = r"x is bfloat16; accepted in arithmetic: float32, as by to\('float32'\)"
    for call in (lambda: x + dy, lambda: x * 2.0, lambda: x.sum(0), lambda: graph.all_reduce("sum", x)):
        refuses(match, call, TypeError)
    for value in (float("nan"), 1e39):
        refuses("a constant is .*; accepted: finite values in float32", lambda value=value: gamma + value)
    refuses("exponent is 3; accepted: 2", lambda: gamma**3)


def examples(x: Value, gamma: Value, number: Value) -> Any:
    return bn_fwd_site(x, gamma, None, "g", examples=number)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"mode": "three_round"}, ValueError, "mode is 'three_round'; accepted: 'two_round', 'one_round'"),
        ({"eps": 0.0}, ValueError, "eps is 0"),
        ({"eps": "1"}, TypeError, "eps must be a real number"),
        ({"fuse_relu": 1}, TypeError, "fuse_relu must be a bool"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], error: type[Exception], match: str) -> None:
    refuses(match, lambda: Options(**wrong), error)
