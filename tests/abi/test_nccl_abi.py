# SPDX-License-Identifier: Apache-2.0
"""The real NCCL's header and library against what hetccl and its stand-ins take for granted: symbols, signatures,
values, sizes and offsets. Opt-in, because the library is large:

    pip download --no-deps -d /tmp/nccl nvidia-nccl-cu13 && unzip -qd /tmp/nccl /tmp/nccl/nvidia_nccl*.whl
    ABI_NCCL=/tmp/nccl/nvidia/nccl pytest -m abi

ABI_CUDA is a folder of CUDA's headers, for the runtime's values (default: /usr/local/cuda/include).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hetccl.types import DType, RedOp

driver = pytest.importorskip("hetccl_vendor_nccl.driver")
pytestmark = pytest.mark.abi

STANDINS = Path(__file__).resolve().parents[1] / "standins"
ENABLE = (
    "pip download --no-deps -d /tmp/nccl nvidia-nccl-cu13 && unzip -qd /tmp/nccl /tmp/nccl/nvidia_nccl*.whl && "
    "ABI_NCCL=/tmp/nccl/nvidia/nccl pytest -m abi"
)
# C types of hetccl's calls (nccl_state.h), in the words of NCCL's header.
SIGNATURES = {
    "ncclGetVersion": "int *", "ncclGetUniqueId": "ncclUniqueId *",
    "ncclCommInitRank": "ncclComm_t *, int, ncclUniqueId, int", "ncclCommDestroy": "ncclComm_t",
    "ncclCommAbort": "ncclComm_t", "ncclCommGetAsyncError": "ncclComm_t, ncclResult_t *",
    "ncclAllReduce": "const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t",
    "ncclReduceScatter": "const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t",
    "ncclReduce": "const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t",
    "ncclAllGather": "const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t",
    "ncclBroadcast": "const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t",
    "ncclSend": "const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t",
    "ncclRecv": "void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t",
    "ncclGroupStart": "void", "ncclGroupEnd": "void",
}  # fmt: skip
ALL_TO_ALL = "const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t"  # from 2.28 on
DTYPES = {
    DType.INT8: "ncclInt8", DType.UINT8: "ncclUint8", DType.INT32: "ncclInt32", DType.UINT32: "ncclUint32",
    DType.INT64: "ncclInt64", DType.UINT64: "ncclUint64", DType.FLOAT16: "ncclFloat16", DType.FLOAT32: "ncclFloat32",
    DType.FLOAT64: "ncclFloat64", DType.BFLOAT16: "ncclBfloat16",
}  # fmt: skip
REDOPS = {
    RedOp.SUM: "ncclSum",
    RedOp.PROD: "ncclProd",
    RedOp.MAX: "ncclMax",
    RedOp.MIN: "ncclMin",
    RedOp.AVG: "ncclAvg",
}
RESULTS = {
    0: "ncclSuccess", 1: "ncclUnhandledCudaError", 2: "ncclSystemError", 3: "ncclInternalError",
    4: "ncclInvalidArgument", 5: "ncclInvalidUsage", 6: "ncclRemoteError", 7: "ncclInProgress",
}  # fmt: skip
# Values of the runtime that hetccl (cuda_shape.py, cuda_device.c) and the stand-ins count on.
RUNTIME = {
    "cudaSuccess": 0, "cudaErrorInvalidValue": 1, "cudaErrorMemoryAllocation": 2, "cudaErrorNoDevice": 100,
    "cudaErrorInvalidDevice": 101, "cudaErrorInvalidResourceHandle": 400, "cudaErrorNotReady": 600,
    "cudaErrorNotSupported": 801, "cudaErrorStreamCaptureUnsupported": 900, "cudaErrorStreamCaptureInvalidated": 901,
    "cudaErrorStreamCaptureUnjoined": 904, "cudaErrorStreamCaptureIsolation": 905, "cudaErrorCapturedEvent": 907,
    "cudaMemoryTypeUnregistered": 0, "cudaMemoryTypeHost": 1, "cudaMemoryTypeDevice": 2, "cudaMemoryTypeManaged": 3,
    "cudaMemcpyDefault": 4, "cudaStreamNonBlocking": 1, "cudaEventDisableTiming": 2, "cudaHostAllocPortable": 1,
    "cudaStreamCaptureModeGlobal": 0, "cudaStreamCaptureModeRelaxed": 2, "cudaStreamCaptureStatusActive": 1,
    "cudaDevAttrComputeCapabilityMajor": 75, "cudaDevAttrComputeCapabilityMinor": 76,
}  # fmt: skip


@pytest.fixture(scope="module")
def nccl(require: Callable[[object, str, str], None]) -> Path:
    folder = Path(os.environ.get("ABI_NCCL", "/nowhere"))
    require((folder / "include" / "nccl.h").exists(), "NCCL's wheel, unpacked", ENABLE)
    require(shutil.which("gcc"), "gcc", "apt-get install gcc")
    return folder


@pytest.fixture(scope="module")
def version(nccl: Path) -> int:
    return int(evaluated(nccl, ["NCCL_VERSION_CODE"])["NCCL_VERSION_CODE"])


def test_the_library_has_what_hetccl_looks_up(nccl: Path, version: int) -> None:
    there = exported(next((nccl / "lib").glob("libnccl.so*")))
    wanted = set(SIGNATURES) | {"ncclGetErrorString", "ncclGetLastError", "ncclCommCount", "ncclCommCuDevice"}
    assert wanted - there == set()
    spellings = set(driver.NCCL.spellings["AllToAll"])
    assert bool(spellings & there) == (version >= 22800)


def test_the_stand_in_exports_nothing_of_its_own(nccl: Path, tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    command = ["gcc", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(library)]
    subprocess.run([*command, str(STANDINS / "ccl.c"), "-lpthread", "-ldl", "-lrt"], check=True, timeout=60)
    there = exported(next((nccl / "lib").glob("libnccl.so*")))
    assert exported(library) - there == set()


def test_signatures(nccl: Path, version: int, tmp_path: Path) -> None:
    """hetccl calls through pointers of these types: enumerations are ints, handles are pointers."""
    checked = SIGNATURES | ({"ncclAlltoAll": ALL_TO_ALL} if version >= 22800 else {})
    lines = [
        f'_Static_assert(__builtin_types_compatible_p(__typeof__(&{name}), ncclResult_t (*)({types})), "{name}");'
        for name, types in checked.items()
    ]
    lines += [
        f'_Static_assert(sizeof({name}) == sizeof(int), "{name} is no int");'
        for name in ("ncclResult_t", "ncclDataType_t", "ncclRedOp_t")
    ]
    compiled(nccl, "\n".join(lines), tmp_path)


def test_values(nccl: Path) -> None:
    names = [*DTYPES.values(), *REDOPS.values(), *RESULTS.values()]
    found = evaluated(nccl, names)
    assert {name: found[name] for name in DTYPES.values()} == {DTYPES[d]: driver.NCCL.dtypes[d] for d in DTYPES}
    assert set(driver.NCCL.dtypes) == set(DTYPES)
    assert {name: found[name] for name in REDOPS.values()} == {REDOPS[r]: driver.NCCL.redops[r] for r in REDOPS}
    assert set(driver.NCCL.redops) == set(REDOPS)
    assert {name: found[name] for name in RESULTS.values()} == {name: code for code, name in RESULTS.items()}
    assert set(RESULTS) <= set(driver.NCCL.results)


def test_sizes_and_offsets(nccl: Path) -> None:
    found = evaluated(nccl, ["sizeof(ncclUniqueId)", "NCCL_UNIQUE_ID_BYTES", *CONFIG])
    assert found["sizeof(ncclUniqueId)"] == found["NCCL_UNIQUE_ID_BYTES"] == driver.NCCL.id_bytes
    assert [found[name] for name in CONFIG] == [0, 8, 12, 16, 20, 24, 28, 32, 40]


# What a non-blocking communicator would set; the same since 2.18.
CONFIG = [
    f"offsetof(ncclConfig_t, {name})"
    for name in (
        "size",
        "magic",
        "version",
        "blocking",
        "cgaClusterSize",
        "minCTAs",
        "maxCTAs",
        "netName",
        "splitShare",
    )
]


def test_the_runtime(require: Callable[[object, str, str], None], nccl: Path) -> None:
    """Values, and the beginning of what PointerGetAttributes fills (cuda_device.h)."""
    folder = Path(os.environ.get("ABI_CUDA", "/usr/local/cuda/include"))
    require(
        (folder / "driver_types.h").exists(), "CUDA's headers", "pip download nvidia-cuda-runtime; ABI_CUDA=its include"
    )
    offsets = {f"offsetof(struct cudaPointerAttributes, {name})": at for name, at in (("type", 0), ("device", 4))}
    found = evaluated(nccl, [*RUNTIME, *offsets], folder)
    assert found == RUNTIME | offsets


# ---- reading headers and libraries


def exported(library: Path) -> set[str]:
    """NCCL's public functions (weak ones too) in a library."""
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True)
    return set(re.findall(r" [TW] (nccl[A-Z]\w+)", listed.stdout))


def compiled(nccl: Path, text: str, folder: Path, cuda: Path | None = None) -> Path:
    """A program with NCCL's header. Without CUDA's headers the one type that NCCL's needs of them is made up."""
    include = [f"-I{nccl / 'include'}"]
    if cuda is None:
        (folder / "cuda_runtime.h").write_text("typedef struct CUstream_st *cudaStream_t;\n")
        (folder / "cuda_fp16.h").write_text("")
        include.append(f"-I{folder}")
    else:
        include.append(f"-I{cuda}")
    source, program = folder / "abi.c", folder / "abi"
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n#include <nccl.h>\n{text}\n")
    code = ["-c"] if "main(" not in text else []
    done = subprocess.run(
        ["gcc", "-std=gnu11", *include, *code, "-o", str(program), str(source)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return program


def evaluated(nccl: Path, expressions: list[str], cuda: Path | None = None) -> dict[str, int]:
    """What constants of the headers are."""
    import tempfile

    prints = "\n".join(f'printf("%lld\\n", (long long)({e}));' for e in expressions)
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(nccl, f"int main(void) {{ {prints} return 0; }}", Path(folder), cuda)
        out = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=20).stdout
    return dict(zip(expressions, map(int, out.split()), strict=True))
