# SPDX-License-Identifier: Apache-2.0
"""What the docs build does to docstrings before it reads their sections: one entry per name, results as plain text."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# `mean, var: text`, with the lines of its text, which are indented further.
GROUP = re.compile(r"^( {4})(\w+(?:, \w+)+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
SECTION = re.compile(r"^(?:Args|Attributes):\n(?: .*\n?|\n)+", re.MULTILINE)
# The parser would take whatever stands before a colon for a type.
RETURNS = re.compile(r"^Returns:\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|mod):(?=`)")


def rewritten(text: str) -> str:
    """``text`` with every group of names in its sections written out, each name with the text of the group; what it
    says about results as Markdown; without roles."""
    text = SECTION.sub(lambda section: GROUP.sub(_entries, section[0]), ROLE.sub("", text))
    return RETURNS.sub(lambda section: f"**Returns:** {textwrap.dedent(section[1])}", text)


def _entries(group: re.Match[str]) -> str:
    return "\n".join(f"{group[1]}{name}: {group[3]}" for name in group[2].split(", "))


class Docstrings(griffe.Extension):
    """Names of one type and meaning share an entry in the source; the parser of sections knows single names."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of ``obj`` in place."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)
