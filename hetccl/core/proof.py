# SPDX-License-Identifier: Apache-2.0
"""Who presented another secret than rank 0: found while ranks join, so that the refused connections that would follow
have a name. The connections themselves are authenticated by `native/handshake.py`, whatever stands here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hetccl.core.topology import Record
from hetccl.errors import ConfigError

__all__ = ["check_proofs", "proof"]

ROUNDS = 20_000  # some milliseconds once a communicator; dear for who guesses at a weak secret


def proof(secret: bytes, job: str) -> str:
    """What shows in the store that a rank holds the secret. Fresh for each job, and says nothing of the secret."""
    return hashlib.pbkdf2_hmac("sha256", secret, b"hetccl record 1\0" + job.encode(), ROUNDS).hex()


def check_proofs(records: Sequence[Record], proofs: Sequence[str]) -> None:
    """On rank 0. Raises `ConfigError` that names the ranks whose secret is another than rank 0's."""
    wrong = [r for r, shown in zip(records, proofs, strict=True) if shown != proofs[0]]
    if wrong:
        names = ", ".join(f"rank {r.rank} (process {r.pid} on {r.host})" for r in wrong)
        raise ConfigError(
            f"{names} presented another secret than rank 0: set HETCCL_SECRET_FILE, or HETCCL_SECRET, to the same "
            "secret on every rank",
            variable="HETCCL_SECRET",
        )
