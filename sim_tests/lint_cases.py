# SPDX-License-Identifier: Apache-2.0
"""Snippets that violate one lint rule each, and near misses that violate none.

A line that must be flagged ends in ``# CODE ps``: the letters say how the parser (NKI 0.6) and the tracer (NKI 0.7)
take it, E an error, W a warning, - not at all. Nothing else in the snippet may be flagged.
"""

from __future__ import annotations

import textwrap

IMPORTS = "import math\nimport nki\nimport nki.isa as nisa\nimport nki.language as nl\nimport numpy as np\n"


def kernel(body: str, before: str = "", signature: str = "x, n=4, flag=True") -> str:
    """A module with one kernel around a body, and definitions before it."""
    indented = textwrap.indent(textwrap.dedent(body), "    ")
    return f"{IMPORTS}{textwrap.dedent(before)}\n@nki.jit\ndef kernel({signature}):\n{indented}\n"


FUNCTIONS = {
    "keyword-only": kernel("return x", signature="x, *, n=4  # NKI101 E-\n"),
    "keyword-only helper": kernel("return f(x, n=1)", "def f(x, *, n):  # NKI101 E-\n    return x"),
    "varargs": kernel("return f(x)", "def f(*args):  # NKI102 E-\n    return args[0]"),
    "kwargs": kernel("return f(x)", "def f(x, **options):  # NKI103 W-\n    return x"),
    "positional-only": kernel("return f(x)", "def f(x, /):  # NKI104 E-\n    return x"),
    "nested function": kernel("def f(y):  # NKI105 E-\n    return y\nreturn f(x)"),
    "decorator below jit": f"{IMPORTS}@nki.jit\n@np.vectorize  # NKI106 E-\ndef kernel(x):\n    return x\n",
    "decorator of a helper": kernel("return f(x)", "@cached  # NKI106 E-\ndef f(x):\n    return x"),
    "jit sub-kernel": kernel("return f(x)  # NKI107 W-", "@nki.jit\ndef f(x):\n    return x"),
    "recursion": kernel("return f(n)", "def f(n):\n    return f(n - 1) if n > 0 else 0  # NKI108 W-"),
    "mutual recursion": kernel(
        "return f(n)", "def f(n):\n    return g(n)  # NKI108 W-\ndef g(n):\n    return f(n)  # NKI108 W-"
    ),
    "mutable list": kernel("return SEEN[0]  # NKI109 EE", "SEEN = []\ndef remember(value):\n    SEEN.append(value)"),
    "mutable dict": kernel("return TABLE['a']  # NKI109 EE", "TABLE: dict = {'a': 1}\nTABLE['b'] = 2"),
    "rebound global": kernel(
        "return x if SIZE > 1 else n  # NKI109 EE", "SIZE = 1\ndef f():\n    global SIZE\n    SIZE = 2"
    ),
}

CLOSURE = """
def build(n):
    seen = [n]
    @nki.jit
    def kernel(x):
        return nl.full((1, 4), seen[0], nl.float32, buffer=nl.shared_hbm)  # NKI109 EE
    seen.append(2)
    return kernel
"""
FUNCTIONS["mutable closure"] = IMPORTS + CLOSURE

STATEMENTS = {
    "inner class": kernel("class A(nl.NKIObject):  # NKI120 E-\n    pass\nreturn x"),
    "inner import": kernel("import os  # NKI121 E-\nreturn x"),
    "raise": kernel("if n > 4:\n    raise ValueError('n')  # NKI122 E-\nreturn x"),
    "try": kernel("try:  # NKI123 E-\n    n = 5\nexcept TypeError:\n    n = 6\nreturn x"),
    "with": kernel("with open_trace(n):  # NKI124 E-\n    pass\nreturn x"),
    "with as": kernel("with nl.no_reorder() as order:  # NKI124 E-\n    pass\nreturn x"),
    "no_reorder with an argument": kernel("with nl.no_reorder(n):  # NKI124 E-\n    pass\nreturn x"),
    "del": kernel("y = n\ndel y  # NKI125 E-\nreturn x"),
    "global": kernel("global COUNT  # NKI126 E-\nreturn x"),
    "nonlocal": kernel("def body(i):\n    nonlocal n  # NKI126 E-\n    n = 2\nnl.fori_loop(0, n, body)\nreturn x"),
    "match": kernel("match n:  # NKI127 E-\n    case 1:\n        pass\nreturn x"),
    "async": IMPORTS + "@nki.jit\nasync def kernel(x):  # NKI128 E-\n    await x  # NKI128 E-\n",
    "yield": kernel("yield x  # NKI129 E-"),
    "loop target": kernel("for i, j in ((1, 2), (3, 4)):  # NKI131 E-\n    pass\nreturn x"),
    "loop target attribute": kernel("for n.i in range(3):  # NKI131 E-\n    pass\nreturn x"),
    "for-else": kernel("for i in range(3):\n    pass\nelse:\n    n = 2  # NKI132 E-\nreturn x"),
    "item of a new tensor": kernel("t = nl.ndarray((128, 4), nl.float32)\nt[0] = n  # NKI133 EE\nreturn x"),
    "item of a view": kernel("t = nl.load(x)\nt = t.reshape((4, 4))\nt[0:2] += 1  # NKI133 EE NKI212 EW\nreturn x"),
    "item of an argument": kernel("x[0] = 1.0  # NKI133 EE\nreturn x"),
    "item by slices": kernel("f(x)", "def f(y):\n    y[0:1, :] = 0.0  # NKI133 EE"),
    "item by ellipsis": kernel("f(x)", "def f(y):\n    y[...] = 0.0  # NKI133 EE"),
    "loop over a tensor": kernel("t = nl.load(x)\nfor row in t:  # NKI135 W-\n    pass\nreturn x"),
    "loop over a string": kernel("for letter in 'abc':  # NKI135 W-\n    pass\nreturn x"),
    "two mutating targets": kernel("a = [1, 2]\na[0], a[1] = 3, 4  # NKI134 E-\nreturn x"),
}

REGISTER = "r = nisa.register_alloc(3)\n"
BODY = "def body(i):\n    {}\nnl.fori_loop(0, n, body)\nreturn x"
DYNAMIC_LOOPS = {
    "break": kernel("for i in nl.dynamic_range(n):  # NKI142 WE\n    break  # NKI140 EE\nreturn x"),
    "continue": kernel(f"{REGISTER}while r:  # NKI143 WE\n    continue  # NKI140 EE\nreturn x"),
    "return": kernel(
        "for i in nl.dynamic_range(n):  # NKI142 WE\n    for j in range(3):\n        return x  # NKI140 EE\nreturn x"
    ),
    "affine_range": kernel("for i in nl.affine_range(n):  # NKI141 WW\n    pass\nreturn x"),
    "sequential_range": kernel("for i in nl.sequential_range(n):  # NKI141 WW\n    pass\nreturn x"),
    "static_range": kernel("for i in nl.static_range(n):  # NKI141 WW\n    pass\nreturn x"),
    "if register": kernel(f"{REGISTER}if r:  # NKI144 EE\n    pass\nreturn x"),
    "range of register": kernel(f"{REGISTER}for i in range(r):  # NKI144 EE\n    pass\nreturn x"),
    "int of register": kernel(BODY.format("y = int(i)  # NKI144 EE")),
    "arithmetic on register": kernel(BODY.format("y = i * 128 + 1  # NKI144 EE")),
    "comparison of register": kernel(BODY.format("y = n if i == 0 else 2  # NKI144 EE")),
    "if the own rank": kernel("r = nki.collectives.rank_id()\nif r:  # NKI144 EE\n    pass\nreturn x"),
    "range of a rank of a ring": kernel(
        "r = nki.collectives.collective_permute_implicit_current_processing_rank_id(0, n)\n"
        "for i in range(r):  # NKI144 EE\n    pass\nreturn x"
    ),
    "not register": kernel(f"{REGISTER}y = not r  # NKI144 EE\nreturn x"),
    "fori body returns": kernel(BODY.format("return i  # NKI145 EE")),
    "while body returns nothing": kernel(
        f"{REGISTER}def body(r):  # NKI145 EE\n    nisa.register_load(r, x)\nnl.while_loop(r, body)\nreturn x"
    ),
    "write to fori variable": kernel(BODY.format("i = 2  # NKI146 EE")),
    "write to dynamic_range variable": kernel(
        "for i in nl.dynamic_range(n):  # NKI142 WE\n    i = 2  # NKI146 EE\nreturn x"
    ),
    "loop inside no_reorder": kernel(
        "def body(i):\n    pass\nwith nl.no_reorder():\n    nl.fori_loop(0, n, body)  # NKI147 EE\nreturn x"
    ),
    "module-level body": kernel("nl.fori_loop(0, n, body)", "def body(i):\n    return i + 1  # NKI144 EE NKI145 EE"),
}

ENUM = "from enum import Enum\nclass Mode(Enum):\n    A = 0\n    B = 1\n"
EXPRESSIONS = {
    "set": kernel("return x if n in {1, 2} else n  # NKI201 E-"),
    "list comprehension": kernel("y = [i for i in range(n)]  # NKI202 E-\nreturn x"),
    "dict comprehension": kernel("y = {str(i): i for i in range(n)}  # NKI202 E-\nreturn x"),
    "generator": kernel("y = tuple(i for i in range(n))  # NKI202 E-\nreturn x"),
    "lambda": kernel("f = lambda y: y  # NKI203 E-\nreturn f(x)"),
    "walrus": kernel("if (m := n) > 2:  # NKI204 E-\n    pass\nreturn x"),
    "format specification": kernel("print(f'{n} {n:.2f}')  # NKI205 E-\nreturn x"),
    "is None": kernel("return n if x is None else x  # NKI206 W-"),
    "is not None": kernel("return x if x is not None else n  # NKI206 W-"),
    "is": kernel("return x if flag is True else n  # NKI207 E-"),
    "chained in": kernel("return x if 0 < n in (1, 2) else n  # NKI208 E-"),
    "starred argument": kernel("y = (1, 2)\nreturn max(*y)  # NKI209 E-"),
    "starred tuple": kernel("y = (1, 2)\nz = (*y, 3)  # NKI209 E-\nreturn x"),
    "starred target": kernel("y, *z = (1, 2, 3)  # NKI209 E-\nreturn x"),
    "double-starred argument": kernel("y = {'a': 1}\nreturn dict(**y)  # NKI209 E-"),
    "double-starred dict": kernel("y = {'a': 1}\nreturn {**y, 'b': 2}  # NKI209 E-"),
    "integer key": kernel("y = {1: 2}  # NKI210 E-\nreturn x"),
    "stored integer key": kernel("y = {}\ny[1] = 2  # NKI210 E-\nreturn x"),
    "member key": kernel("y = {Mode.A: 2}  # NKI210 E-\nreturn x", ENUM),
    "matrix operator": kernel("return x @ n  # NKI211 EW"),
    "tensor operator": kernel("t = nl.load(x)\nreturn t * 2  # NKI212 EW"),
    "tensor comparison": kernel("return x if x > 0 else n  # NKI212 EW", signature="x: nl.ndarray, n=4"),
    "tensor truth": kernel("t = nl.load(x)\nif t and flag:  # NKI213 EW\n    pass\nreturn x"),
    "tensor while": kernel("t = nl.load(x)\nwhile t:  # NKI213 EW\n    pass\nreturn x"),
    "bool of a tensor": kernel("t = nl.load(x)\nreturn bool(t[0, 0])  # NKI213 EW"),
    "float modulo": kernel("return n / 2 % 2  # NKI214 E-"),
    "string modulo": kernel("print('n is %d' % n)  # NKI214 E-\nreturn x"),
    "or as a choice": kernel("return n or 2  # NKI215 W-"),
    "or a list": kernel("y = flag or [n]  # NKI215 W-\nreturn x"),
    "wide power": kernel("return n % 2**40  # NKI216 E-"),
    "wide shift": kernel("return n % (1 << 32)  # NKI216 E-"),
    "wide product": kernel("return n % (-65536 * 65536)  # NKI216 E-"),
    "wide float product": kernel("return 1e30 * 1e30  # NKI216 E-"),
    "wide constant": kernel("return n % LIMIT  # NKI216 E-", "LIMIT = 1 << 40"),
    "integer of many digits": kernel(f"return n % 0x{'f' * 6000}  # NKI216 E-"),
    "wide integer": kernel("return n + 4294967296  # NKI216 E-"),
    "low integer": kernel("return n + -2147483649  # NKI216 E-"),
    "wide float": kernel("return 1e39  # NKI216 E-"),
    "bytes": kernel("return b'x'  # NKI217 E-"),
    "order of members": kernel("return x if mode > Mode.A else n  # NKI218 EE", ENUM, signature="x, mode, n=4"),
    "order of versions": kernel("return x if nisa.get_nc_version() >= nisa.nc_version.gen3 else n  # NKI219 W-"),
    "equality of objects": kernel(
        "return x if A(1) == A(n) else n  # NKI220 WW",
        "class A(nl.NKIObject):\n    def __init__(self, a):\n        self.a = a",
    ),
    "chained comparison": kernel("y = (1, 2)\nreturn x if 0 < n < y[n] else n  # NKI222 W-"),
    "chained division": kernel("return x if 0 < n < 4 // n else n  # NKI222 W-"),
}

FIELDS = "class A(nl.NKIObject):\n    a: int\n    b: int = 2\n    c = 3"
DATA_FIELDS = f"from dataclasses import dataclass\n@dataclass(frozen=True)\n{FIELDS}"
CALLS = {
    "unknown keyword": kernel("return f(x, width=2)  # NKI221 EE", "def f(x, depth=1):\n    return x"),
    "unknown keyword of an instruction": kernel("nisa.memset(dst=x, value=0, dtype=n)  # NKI221 EE\nreturn x"),
    "unknown keyword of a creation": kernel("nl.store(x, x, axis=0)  # NKI221 EE\nreturn x"),
    "unknown field": kernel("return A(a=1, d=2)  # NKI221 EE", FIELDS),
    "unknown keyword of an initialiser": kernel(
        "return A(b=2)  # NKI221 EE NKI223 EE",
        "class A(nl.NKIObject):\n    def __init__(self, a):\n        self.a = a",
    ),
    "no dst": kernel("t = nisa.tensor_copy(src=x)  # NKI223 EE\nreturn t"),
    "no dst by position": kernel("nisa.tensor_tensor(x, x, nl.add)  # NKI223 EE\nreturn x"),
    "no dtype": kernel("return nl.ndarray((1, 4), buffer=nl.shared_hbm)  # NKI223 EE"),
    "no argument": kernel("return f(n=2)  # NKI223 EE", "def f(x, n):\n    return x"),
    "no argument of a method": kernel(
        "return b.p()",
        "class B(nl.NKIObject):\n    def p(self):\n        self.q()  # NKI223 EE\n    def q(self, n):\n        pass",
        signature="b",
    ),
    "no field of a named tuple": kernel(
        "return A(1)  # NKI223 EE", "from typing import NamedTuple\nclass A(NamedTuple):\n    a: int\n    b: int"
    ),
    "too many arguments": kernel("return f(x, n, 3)  # NKI224 EE", "def f(x, n):\n    return x"),
    "too many arguments of nl": kernel("nl.store(x, x, 1)  # NKI224 EE\nreturn x"),
    "field left out": kernel("return A(b=1)  # NKI225 WW", FIELDS),
    "field of a dataclass left out": kernel("return A()  # NKI225 WW", DATA_FIELDS),
    "keyword for kwargs": kernel(
        "return f(x, width=2)  # NKI226 E-", "def f(x, **options):  # NKI103 W-\n    return x"
    ),
}

BUILTINS = {
    **{
        name: kernel(f"y = {name}({arguments})  # NKI301 E-\nreturn x")
        for name, arguments in {
            **dict.fromkeys("enumerate sorted reversed sum any all set iter next".split(), "(1, 2)"),
            **dict.fromkeys("zip map filter".split(), "n, (1, 2)"),
            **dict.fromkeys("getattr hasattr setattr".split(), "x, 'shape'"),
            **dict.fromkeys("round super open input hash repr pow".split(), "n"),
        }.items()
    },
    "string method": kernel("name = f'{n}'\nreturn name.upper()  # NKI302 W-"),
    "list method": kernel("y = [3, 1]\ny.sort()  # NKI303 E-\nreturn x"),
    "dict method": kernel("y = {'a': 1}\ny.update(b=2)  # NKI303 E-\nreturn x"),
    "math function": kernel("return math.sin(n)  # NKI304 E-"),
    "numpy function": kernel("return np.zeros(n)  # NKI305 E-"),
    "numpy submodule": kernel("return np.random.rand(n)  # NKI305 E-"),
    "numpy constant": kernel("return -np.inf  # NKI306 W-"),
    "numpy dtype": kernel("return nl.ndarray((1, 4), np.float32, buffer=nl.shared_hbm)  # NKI307 EW"),
}

CLASSES = {
    "base chain": kernel("return B()", "class A(nl.NKIObject):\n    pass\nclass B(A):  # NKI401 E-\n    pass"),
    "two bases": kernel("return B()", "class B(nl.NKIObject, object):  # NKI401 E-\n    pass"),
    "no base": kernel("return B()", "class B:  # NKI402 E-\n    pass"),
    "metaclass": kernel("return B()", "class B(nl.NKIObject, metaclass=M):  # NKI403 E-\n    pass"),
    "property": kernel(
        "return B().p", "class B(nl.NKIObject):\n    @property  # NKI405 E-\n    def p(self):\n        return 1"
    ),
    "class method": kernel(
        "return B.p()", "class B(nl.NKIObject):\n    @classmethod  # NKI405 E-\n    def p(cls):\n        return 1"
    ),
    "__slots__": kernel("return B()", "class B(nl.NKIObject):\n    __slots__ = ('a',)  # NKI406 E-"),
    "slots of a dataclass": kernel(
        "return B(1)",
        "from dataclasses import dataclass\n@dataclass(slots=True)  # NKI406 E-\nclass B(nl.NKIObject):\n    a: int",
    ),
    "class body": kernel("return B()", "class B(nl.NKIObject):\n    for i in range(2):  # NKI407 E-\n        pass"),
    "class decorator": kernel("return B()", "@registered  # NKI408 E-\nclass B(nl.NKIObject):\n    pass"),
    "class by annotation": kernel(
        "return x", "class B(nl.NKIObject):\n    p = q = 1\n    del q  # NKI407 E-", signature="x, b: B"
    ),
    "method by name": kernel(
        "return b.p()",
        "class B(nl.NKIObject):\n    def p(self):\n        return sum((1, 2))  # NKI301 E-",
        signature="b",
    ),
}

API = {
    "old import": "import neuronxcc.nki.language as nl  # NKI501 EE\n",
    "old package": "from neuronxcc import nki  # NKI501 EE\n@nki.jit\ndef kernel(x):\n    raise x  # NKI122 E-\n",
    "list default": kernel("return x", signature="x, axes=[0, 1]  # NKI502 EE\n"),
    "jit mode": IMPORTS + "@nki.jit(mode='trace')  # NKI504 WW\ndef kernel(x):\n    return x\n",
    "jit target": IMPORTS + "@nki.jit(platform_target='trn2')  # NKI505 EE\ndef kernel(x):\n    return x\n",
    "benchmark": IMPORTS + "def measure(f):\n    return nki.benchmark(f)  # NKI506 EE\n",
    "mgrid": kernel("i = nl.mgrid[0:128, 0:4]  # NKI507 EE\nreturn x"),
    "mask": kernel("nl.store(x, nl.load(x), mask=n)  # NKI507 EE\nreturn x"),
    "dynamic copy": kernel("nisa.tensor_copy_dynamic_src(x, x)  # NKI507 EE\nreturn x"),
    "list at a launch": kernel("return x") + "kernel(1, [2, 3])  # NKI502 EE\n",
    "launch without arguments": kernel("return x") + "kernel[2]()  # NKI514 EE\n",
    "wide grid": kernel("return x") + "kernel[4](1)  # NKI515 EE\n",
    "grid of two dimensions": kernel("return x") + "kernel[1, 2](1)  # NKI515 EE\n",
}

TILE = "t = nl.ndarray((128, 4), nl.float32, buffer=nl.sbuf)\n"
TENSORS = {
    "string buffer": kernel("return nl.ndarray((1, 4), nl.float32, buffer='sbuf')  # NKI503 EE"),
    "string buffer by position": kernel("return nl.full((1, 4), 0.0, nl.float32, 'psum')  # NKI503 EE"),
    "flat tile": kernel("t = nl.zeros((128,), nl.float32)  # NKI508 EE\nreturn x"),
    "flat psum tile": kernel("t = nl.ndarray(shape=[512], dtype=nl.float32, buffer=nl.psum)  # NKI508 EE\nreturn x"),
    "private output": kernel("y = nl.ndarray((1, 4), nl.float32, buffer=nl.hbm)\nreturn x, y  # NKI509 EE"),
    "flat tile by name": kernel("shape = (128,)\nt = nl.zeros(shape, nl.float32)  # NKI508 EE\nreturn x"),
    "tile of a number": kernel("t = nl.zeros(128, nl.float32)  # NKI508 EE\nreturn x"),
    "tile as output": kernel(f"{TILE}return t  # NKI509 EE"),
    "view of a tile as output": kernel("return x, nl.load(x).reshape((1, 4))[0:1]  # NKI509 EE"),
    "number of a mode": kernel("nisa.dma_copy(x, x, dge_mode=2)  # NKI510 EE\nreturn x"),
    "name of an engine": kernel("nisa.tensor_copy(x, x, 'vector')  # NKI510 EE\nreturn x"),
    "hwdge that casts": kernel(
        f"{TILE}u = nl.ndarray((128, 4), dtype=nl.bfloat16)\n"
        "nisa.dma_copy(dst=t[:, 0:2], src=u[:, 0:2], dge_mode=nisa.dge_mode.hwdge)  # NKI511 EE\nreturn x"
    ),
}

NAMED = "nl.zeros((1, 4), nl.float32, name='a')"
NAMES = {
    "name twice": kernel(f"t = {NAMED}\nu = {NAMED}  # NKI512 WW\nreturn x"),
    "name in a loop": kernel(f"for i in range(n):\n    t = {NAMED}  # NKI512 WW\nreturn x"),
    "name inside a condition and after it": kernel(f"if flag:\n    t = {NAMED}\nu = {NAMED}  # NKI512 WW\nreturn x"),
    "name of an instruction twice": kernel(
        "nisa.memset(x, 0, name='m')\nnisa.memset(x, 1, name='m')  # NKI512 WW\nreturn x"
    ),
    "scalar of 0.7": kernel("return nisa.scalar_load(x)  # NKI513 E-"),
}

NEAR_MISSES = {
    "host helper": kernel("return x", "def report(values):\n    return sorted({v for v in values}, key=lambda v: v)"),
    "host class": kernel("return x", "class Host:\n    @property\n    def p(self):\n        return 1"),
    "constant table": kernel("return TABLE['a'] + LIST[0]", "TABLE = {'a': 1}\nLIST = [1]"),
    "local list of a global's name": kernel(
        "return LIST[0]", "LIST = [1]\ndef f():\n    LIST = []\n    LIST.append(1)"
    ),
    "items of lists and dicts": kernel("y = [0] * n\ny[0] = 1\nz = {}\nz['a'] = y\ny[0], m = 2, 3\nreturn x"),
    "optional tensor": kernel("if x:\n    pass\nreturn n", signature="x: nl.ndarray = None, n=4"),
    "shape arithmetic": kernel("t = nl.load(x)\nreturn t.shape[0] * 2 % 3 == 0 and t.ndim > 1"),
    "tensor against None": kernel("t = nl.load(x)\nreturn t == None or None != t"),
    "static jumps": kernel(
        "for i in range(n):\n    if i > 2:\n        break\n    while n > 3:\n        n -= 1\n        continue\nreturn x"
    ),
    "static loop in a dynamic one": kernel(BODY.format("for j in range(3):\n        if j == 1:\n            break")),
    "register as an operand": kernel(
        f"{REGISTER}nisa.register_move(r, n)\nnl.fori_loop(0, r, body)\nreturn x",
        "def body(i):\n    nl.load(nl.zeros((1, 4), nl.float32).ap([[4, 1], [1, 4]], scalar_offset=i))",
    ),
    "chained comparison": kernel("return x if 0 < n < 4 and n in (1, 2) and n not in (3, 4) else n"),
    "conversions in f-strings": kernel("print(f'{n!r} {n!s} {n!a} {{n:.2f}}')\nreturn x"),
    "32-bit limits": kernel("return (4294967295, -2147483648, -3.4028235e38)"),
    "ellipsis as an index": kernel("nl.store(x[..., 0:1], nl.load(x[...]))\nreturn x"),
    "parameter called like a builtin": kernel("return x if sum > 1 else all", signature="x, sum, all"),
    "math": kernel("return math.ceil(n / 2) + math.floor(math.sqrt(n)) + math.log2(n) + math.pi"),
    "known methods": kernel("y = [1]\ny.append(2)\nz = {'a': 1}\nz.setdefault('b', y.pop())\nreturn len(z.items())"),
    "integer modulo": kernel("return n % 2 == n // 2 % 2"),
    "numpy in an annotation": kernel("y: np.ndarray = x\nreturn y", signature="x: np.ndarray"),
    "equality of a dataclass": kernel(
        "return x if A(1) == A(n) else n",
        "from dataclasses import dataclass\n@dataclass\nclass A(nl.NKIObject):\n    a: int",
    ),
    "decorator above jit": f"{IMPORTS}@np.vectorize\n@nki.jit()\ndef kernel(x):\n    return x\n",
    "sub-kernel wrapped for launching": kernel("return f(x)", "def f(x):\n    return x\nlaunch = nki.jit(f)"),
    "private tensor inside": kernel(
        "y = nl.ndarray((1, 4), nl.float32, buffer=nl.private_hbm)\nnl.store(x, nl.load(y))\nreturn x"
    ),
    "flat tensor in HBM": kernel("return nl.ndarray((128,), nl.float32, buffer=nl.shared_hbm)"),
    "output by another way": kernel(f"{TILE}t = x\nreturn t"),
    "name in exclusive branches": kernel(
        f"if flag:\n    t = {NAMED}\nelse:\n    t = {NAMED}\nif n:\n    u = nl.zeros((1, 4), nl.float32, name='b')\n"
        "    return x\nreturn nl.zeros((1, 4), nl.float32, buffer=nl.shared_hbm, name='b')"
    ),
    "name of a tensor and of an instruction": kernel(f"t = {NAMED}\nnisa.memset(t, 0, name='a')\nreturn x"),
    "name by the loop": kernel("for i in range(n):\n    t = nl.zeros((1, 4), nl.float32, name=f't{i}')\nreturn x"),
    "hwdge between views": kernel(
        f"{TILE}u = nl.ndarray((128, 4), nl.int32)\n"
        "nisa.dma_copy(t, u.view(nl.float32), dge_mode=nisa.dge_mode.hwdge)\nreturn x"
    ),
    "all fields and defaults": kernel("return A(1), A(a=n), A(1, 2, 3)", DATA_FIELDS),
    "arguments by position and keyword": kernel("return f(n, x=x)", "def f(n, x, m=2):\n    return x"),
    "launches": kernel("return x") + "kernel[2](1)\nkernel[cores](1)\nkernel(1, axes=(2, 3))\n",
    "closure that stays": IMPORTS + CLOSURE.replace("    seen.append(2)\n", "").replace("  # NKI109 EE", ""),
    "chain over shapes": kernel("return n if x.shape[0] == n == x.shape[1] else 0"),
    "32-bit arithmetic": kernel("return n % (1 << 31) + 65536 * 65535 + -(2**31) + LIMIT", "LIMIT = 2**32 - 1"),
    "no kernel and no nki": "def f(*args):\n    return sorted(args)\n",
}
