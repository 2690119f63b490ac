# SPDX-License-Identifier: Apache-2.0
"""Public conformance suites and helpers, for us and for authors of plug-ins. The suites need pytest and NumPy."""

import sys

if "pytest" in sys.modules:  # so that a failing suite shows values, as a test module does
    sys.modules["pytest"].register_assert_rewrite(
        "hetccl.testing.ccl_suite", "hetccl.testing.device_suite", "hetccl.testing.transport_suite"
    )
