# SPDX-License-Identifier: Apache-2.0
"""The rules of the repository itself: sizes, imports, headers, documents, commands."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("nki_bn", "kernels", "configs", "sim_tests", "hw_tests", "examples", "docs")
# Folders that are installed below nki_bn from elsewhere.
MAPPED = {"kernels": "nki_bn.kernels", "configs": "nki_bn.configs"}

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500
MAX_PARAMETERS = 8
# Files whose functions mirror signatures of the vendor's.
VENDOR_SIGNATURES = ("nki_bn/simulator/",)
# Each with its reason.
MORE_PARAMETERS = {
    "nki_bn/torch/functional.py:batch_norm": "the arguments of torch's function",
    "nki_bn/torch/functional.py:batch_norm_add_relu": "likewise",
    "nki_bn/torch/functional.py:batch_norm_relu": "likewise",
    "nki_bn/ops.py:batch_norm_bwd": "the public function: torch's arguments and the ways to run",
    "nki_bn/ops.py:batch_norm_fwd": "likewise",
    "sim_tests/test_idioms.py:kernel": "a kernel that takes one argument of every kind",
    "sim_tests/public_cases/nki_library.py:run": "the arguments of the library's convolution",
}

# Lowest first: a module imports from its own entry and from earlier ones. Entries of one row do not know each other.
LAYERS = (
    ("nki_bn.configs",),
    ("nki_bn.hardware",),
    ("nki_bn.links",),
    ("nki_bn.simulator", "nki_bn.lint"),
    ("nki_bn",),
    ("nki_bn.problem",),
    ("nki_bn.reference",),
    ("nki_bn.cases", "nki_bn.tolerances", "nki_bn.synchronised_reference"),
    ("nki_bn.comparison",),
    ("nki_bn.kernels",),
    ("nki_bn.pipeline",),
    ("nki_bn.predict_columns",),
    ("nki_bn.predict_tiles", "nki_bn.predict_rows"),
    ("nki_bn.predict_resident_state",),
    ("nki_bn.predict_resident_core",),
    ("nki_bn.predict_resident", "nki_bn.predict_staged", "nki_bn.predict_transposed", "nki_bn.predict_two_read"),
    ("nki_bn.predict_resident_fwd",),
    ("nki_bn.predict",),
    ("nki_bn.resident_estimate", "nki_bn.resident_forward_estimate", "nki_bn.fitting", "nki_bn.layout_words"),
    ("nki_bn.resident_planner", "nki_bn.transposed_planner"),
    ("nki_bn.resident_forward_planner",),
    ("nki_bn.planner", "nki_bn.execute"),
    ("nki_bn.requests",),
    ("nki_bn.ops",),
    ("nki_bn.synchronised",),
    ("nki_bn.torch", "nki_bn.stablehlo"),
    ("nki_bn.verify",),
    ("nki_bn.pair",),
    ("nki_bn.bench",),
    ("nki_bn.explanation",),
    ("nki_bn.commands",),
    ("nki_bn.cli",),
)
KERNEL_IMPORTS = ("nki", "nki_bn.kernels", "math", "dataclasses", "typing")

MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home|Users|tmp)/")
LEFT_TO_DO = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    written = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt")]
    folders = [ROOT / folder for folder in (*FOLDERS, ".ci")]
    deeper = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return sorted(written + [path for path in deeper if path.suffix in (".py", ".md", ".toml", "")])


def documents() -> list[Path]:
    return [path for path in text_files() if path.suffix == ".md"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Without self and cls."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def is_kernel_entry(path: Path, function: Function) -> bool:
    return name_of(path).startswith("kernels/") and any("nki.jit" in ast.unparse(d) for d in function.decorator_list)


def code_lines(function: Function) -> int:
    """Without the docstring."""
    assert function.end_lineno is not None
    docstring = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)


def test_files_and_functions_are_short() -> None:
    long_files = {
        name_of(path): lines
        for path in python_files(*FOLDERS)
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_FILE_LINES
    }
    long_functions = {
        f"{name_of(path)}:{function.name}": lines
        for path in python_files(*FOLDERS)
        for function in functions(path)
        if (lines := code_lines(function)) > MAX_FUNCTION_LINES
    }
    assert not long_files and not long_functions


def test_functions_take_few_parameters() -> None:
    many = {
        f"{name_of(path)}:{function.name}"
        for path in python_files(*FOLDERS)
        for function in functions(path)
        if parameters(function) > MAX_PARAMETERS and not is_kernel_entry(path, function)
    }
    assert {name for name in many if not name.startswith(VENDOR_SIGNATURES)} == set(MORE_PARAMETERS)


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts[:1] = MAPPED.get(parts[0], parts[0]).split(".")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> frozenset[str]:
    return frozenset(module_of(path) for path in python_files("nki_bn", *MAPPED))


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports at any place, but for what only type checkers see in the package's own file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name_of(path)} has a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules() else node.module


def layer(module: str) -> tuple[int, str]:
    """Row and entry of a module in ``LAYERS``."""
    found = [
        (row, entry)
        for row, entries in enumerate(LAYERS)
        for entry in entries
        if module == entry or (entry != "nki_bn" and module.startswith(entry + "."))
    ]
    assert len(found) == 1, f"{module} has no place in LAYERS"
    return found[0]


def test_imports_run_downward() -> None:
    wrong = []
    for path in python_files("nki_bn", "configs"):
        importer = module_of(path)
        row, entry = layer(importer)
        for imported in imports(path):
            if importer == "nki_bn" or imported.partition(".")[0] != "nki_bn":
                continue
            other_row, other_entry = layer(imported)
            if other_entry != entry and other_row >= row:
                wrong.append(f"{importer} imports {imported}")
    assert not wrong


def test_the_simulator_knows_the_hardware_and_itself_alone() -> None:
    known = ("nki_bn.hardware", "nki_bn.links", "nki_bn.simulator")
    inner = {name for path in python_files("nki_bn/simulator") for name in imports(path) if name.startswith("nki_bn")}
    assert inner and {name for name in inner if not name.startswith(known)} == set()


def test_only_tests_import_jax() -> None:
    found = {name.partition(".")[0] for path in python_files("nki_bn", *MAPPED, "examples") for name in imports(path)}
    assert "numpy" in found and not found & {"jax", "jaxlib"}


def test_kernels_know_nki_and_themselves_alone() -> None:
    found = {name for path in python_files("kernels") for name in imports(path)}
    assert {name for name in found if not any(name == k or name.startswith(k + ".") for k in KERNEL_IMPORTS)} == set()
    assert "nki.isa" in found


def test_the_package_imports_no_kernel_before_it_is_used() -> None:
    """Only the branch for type checkers, and a name found at first use, reach ops from the package's own file."""
    tree = tree_of(ROOT / "nki_bn" / "__init__.py")
    at_import = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in at_import if (node.module or "").startswith("nki_bn")} == {"nki_bn.simulator"}


def test_every_source_file_names_its_licence() -> None:
    scripts = [ROOT / ".ci" / "run"]
    missing = [
        name_of(path)
        for path in [*python_files(*FOLDERS), *scripts]
        if "# SPDX-License-Identifier: Apache-2.0" not in path.read_text(encoding="utf-8").splitlines()[:2]
    ]
    assert not missing


def test_nothing_is_left_to_do_and_no_machine_is_named() -> None:
    hits = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in text_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line) or LEFT_TO_DO.search(line)
    ]
    assert not hits


def asserts(function: Function, asserting: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("pytest.raises", "pytest.warns", "pytest.fail") or called.split(".")[-1] in asserting:
                return True
            if re.match(r"(np|torch)\.testing\.assert_", called):
                return True
    return False


def test_every_test_asserts_something() -> None:
    """Itself, or through a function of the tests that does."""
    everything = [(path, function) for path in python_files("sim_tests", "hw_tests") for function in functions(path)]
    asserting: set[str] = set()
    while more := {f.name for _, f in everything if f.name not in asserting and asserts(f, asserting)}:
        asserting |= more
    idle = [
        f"{name_of(path)}:{function.name}"
        for path, function in everything
        if function.name.startswith("test_") and not asserts(function, asserting)
    ]
    assert not idle


def commands() -> list[str]:
    """The lines in the bash blocks of the README."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_readme_has_two_commands_and_ci_runs_the_second() -> None:
    assert len(commands()) == 2
    job, tests = commands()
    assert all(line.startswith("python3 -m venv .venv && .venv/bin/pip install ") for line in (job, tests))
    assert job.endswith("nki-bn verify --op bwd --shape 32,64,56,56 --dtype bfloat16 --lnc 2")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in script
    run = [line for line in script if line and not line.startswith(("#", "set ", "cd "))]
    assert run == [tests] and (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_readme_example_prints_what_it_says() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example[1], "README.md", "exec"), {})
    assert printed.getvalue().strip() == example[1].rpartition("# ")[2].strip()


def test_every_document_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def test_the_project_file_lists_every_package_and_maps_two() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {module_of(path) for path in python_files("nki_bn", *MAPPED) if path.name == "__init__.py"}
    assert set(settings["packages"]) == packages
    assert settings["package-dir"] == {"nki_bn": "nki_bn"} | {name: folder for folder, name in MAPPED.items()}


def test_data_files_are_installed() -> None:
    """Everything in configs is found by the pattern that installs it, from the installed package."""
    from importlib import resources

    data = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.toml")}
    installed = resources.files("nki_bn.configs")
    assert data and {name for name in data if not installed.joinpath(*name.split("/")).is_file()} == set()
    assert resources.files("nki_bn").joinpath("py.typed").is_file()
