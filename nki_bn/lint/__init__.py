# SPDX-License-Identifier: Apache-2.0
"""A linter for NKI kernels: does the source stay inside the Python that a front end of the compiler accepts?

NKI 0.6 parses the kernel's source and knows a subset of Python, NKI 0.7 traces the running kernel. Files are read,
never imported. ``RULES`` lists every rule with the reason why its construct is refused.
"""

from nki_bn.lint.engine import RULES, lint_file, lint_source
from nki_bn.lint.report import run_lint
from nki_bn.lint.rule import VERSIONS, Finding, Rule, Severity

__all__ = ["RULES", "VERSIONS", "Finding", "Rule", "Severity", "lint_file", "lint_source", "run_lint"]
