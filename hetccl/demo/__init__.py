# SPDX-License-Identifier: Apache-2.0
"""A training run over ranks of two vendors, beside the same run on Gloo: `python -m hetccl.demo`."""
