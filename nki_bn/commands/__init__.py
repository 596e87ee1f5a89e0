# SPDX-License-Identifier: Apache-2.0
"""The subcommands of ``nki-bn``: each module has ``add_arguments(parser)``, and ``run(args)`` for the exit code.

Whatever imports a kernel is imported inside ``run``, so that a broken kernel breaks only the commands that need it.
"""
