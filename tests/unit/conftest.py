# SPDX-License-Identifier: Apache-2.0
"""Modules that several tests share lie beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
