# SPDX-License-Identifier: Apache-2.0
"""TCP transport of hetccl. The entry object is `driver.TcpDriver`."""
