# SPDX-License-Identifier: Apache-2.0
"""The functions of ``nki.language``, by subject; ``nki_bn.simulator.api.language`` gathers them."""
