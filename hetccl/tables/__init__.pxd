# SPDX-License-Identifier: Apache-2.0
# For modules that call a table directly: `t.ops.copy_async(t.ctx, ...)`. Every function of `ops` may be called.
from hetccl.tables.ccl cimport CclTable
from hetccl.tables.device cimport DeviceTable
from hetccl.tables.transport cimport TransportTable
