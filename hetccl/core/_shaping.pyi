# SPDX-License-Identifier: Apache-2.0
from hetccl.tables import TransportTable

def shape(inner: TransportTable, bytes_s: int) -> TransportTable: ...
