# SPDX-License-Identifier: Apache-2.0
"""The documents: their links and anchors, the list of public functions, the variables of the environment, the site."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from test_repository import ROOT, documents, name_of, python_files

from nki_bn.hardware import TARGETS

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+).+?\1")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
# What an identifier of mkdocstrings in a page looks like.
PUBLIC = re.compile(r"^::: (\S+)$", re.MULTILINE)
ENVIRONMENT = re.compile(r"environ(?:\.get\(|\.setdefault\(|\[)\s*([\w\"']+)")
CONSTANT = re.compile(r"^(\w+_VARIABLE) = \"(\w+)\"$", re.MULTILINE)


def prose(path: Path) -> str:
    """The text of a document without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """What links may name in a document: the anchors that GitHub and the built site both give its headings."""
    headings = [heading.replace("`", "").lower() for heading in HEADING.findall(prose(path))]
    plain = [re.sub(r"[^\w\s-]", "", heading).strip() for heading in headings]
    unique = {text for text in plain if plain.count(text) == 1}  # the two number repeated ones differently
    return frozenset(
        text.replace(" ", "-") for text in unique if re.sub(r"[\s-]+", "-", text) == text.replace(" ", "-")
    )


def broken_links(path: Path) -> list[str]:
    """The relative links of a document that lead nowhere, for a reader of the source or of the site."""
    links = [link for link in LINK.findall(CODE.sub("", prose(path))) if "://" not in link]
    return [link for link in links if not resolves(path, link)]


def resolves(path: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (path.parent / file).resolve() if file else path
    # The site has the folder of documents and nothing else.
    inside = not path.is_relative_to(DOCS) or target.is_relative_to(DOCS)
    return inside and target.exists() and (not anchor or (target.suffix == ".md" and anchor in anchors(target)))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_links_resolve(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text(
        "# One title\n\n## Twice\n\n## Twice\n\n## Here / there\n\n```\n# a comment\n```\n"
    )
    page = tmp_path / "page.md"
    good = ["there.md", "there.md#one-title", "#page", "https://example.org/#any"]
    bad = ["absent.md", "there.md#absent", "there.md#a-comment", "there.md#twice", "there.md#here-there", "#absent"]
    page.write_text("# Page\n\n" + "\n".join(f"[text]({link})" for link in good + bad) + "\n`[code](absent.md)`\n")
    assert broken_links(page) == bad


def test_documents_link_to_documents_alone() -> None:
    """A link out of docs works in the source, and not on the site."""
    assert (DOCS / "../README.md").exists() and not resolves(DOCS / "index.md", "../README.md")


def test_every_public_name_is_listed() -> None:
    listed = PUBLIC.findall((DOCS / "api.md").read_text(encoding="utf-8"))
    packages = {name.rpartition(".")[0] for name in listed}
    public = [f"{package}.{name}" for package in packages for name in importlib.import_module(package).__all__]
    assert sorted(listed) == sorted(public)
    listing = {path for path in python_files("nki_bn") if path.name == "__init__.py" and "__all__" in path.read_text()}
    of_vendor = {"nki_bn.simulator.api", "nki_bn.simulator.isa", "nki_bn.simulator.language"}
    names = {".".join(path.relative_to(ROOT).parent.parts) for path in listing}
    assert names - of_vendor == packages


def test_the_page_of_hardware_has_the_numbers_of_the_files() -> None:
    """Its two tables, row by row, and nothing else in them."""
    files = [
        tomllib.loads((ROOT / "configs/hardware" / f"{name}.toml").read_text(encoding="utf-8")) for name in TARGETS
    ]
    capacities = [
        (name, *(file[name]["value"] for file in files), entry["confidence"], entry["source"])
        for name, entry in files[0].items()
        if isinstance(entry, dict) and "value" in entry
    ]
    assert all(
        file[row[0]]["source"] == row[-1] and file[row[0]]["confidence"] == row[-2]
        for file in files
        for row in capacities
    )
    links = tomllib.loads((ROOT / "configs/collectives/trn2.toml").read_text(encoding="utf-8"))
    collectives = [
        (name, *(entry[key] for key in ("value", "unit", "confidence", "source"))) for name, entry in links.items()
    ]
    lines = (DOCS / "hardware.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| parameter |")]
    assert rows == [f"| {' | '.join(map(str, row))} |" for row in capacities + collectives]


def variables_read() -> set[str]:
    """Names of the variables that the package reads or sets."""
    texts = [path.read_text(encoding="utf-8") for path in python_files("nki_bn")]
    constants = dict(found for text in texts for found in CONSTANT.findall(text))
    read = {name for text in texts for name in ENVIRONMENT.findall(text)} - {
        "variable"
    }  # the doctor goes through a list
    return {constants[name] if name in constants else ast.literal_eval(name) for name in read}


def test_every_variable_is_documented() -> None:
    from nki_bn.commands.doctor import VARIABLES

    read = variables_read()
    assert "NKI_BN_NKI" in read and read <= set(VARIABLES)
    rows = re.findall(r"^\| `([A-Z_]+)` \|", (DOCS / "environment.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(VARIABLES)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (the extra docs)")
@pytest.mark.parametrize(
    ("added", "complaint"),
    [
        ("", None),
        ("[a page](absent.md)", "absent.md"),
        ("[an anchor](numerics.md#absent)", "#absent"),
        ("[outside](../README.md)", "../README.md"),
        ("::: nki_bn.absent", "nki_bn.absent"),
    ],
    ids=["as it is", "page", "anchor", "outside", "name"],
)
def test_the_site_builds_and_a_fault_stops_it(added: str, complaint: str | None, tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "nki_bn").symlink_to(ROOT / "nki_bn")
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as index:
        index.write(f"\n{added}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (complaint is None) and (complaint or "") in done.stderr, done.stderr
    assert complaint or "batch_norm_bwd" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
