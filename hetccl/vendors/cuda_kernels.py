# SPDX-License-Identifier: Apache-2.0
"""The reduce and scale kernels of CUDA-shaped devices: one source text for all vendors, types and operators.

The arithmetic of single elements is the host's own header (`native/combine_elements.h`), so that both round alike.
"""

from __future__ import annotations

from importlib.resources import files

from hetccl.types import DType, RedOp
from hetccl.vendors.cuda_spin import Element, spin_source

__all__ = ["MAX_SOURCES", "kernel_name", "kernel_source", "kernels", "spinning"]

MAX_SOURCES = 32  # pointers that travel as arguments of one launch

_FLOATS = {DType.FLOAT32: ("float", "f32"), DType.FLOAT64: ("double", "f64")}
# dtype -> (storage, suffix of hetccl_widen_ and hetccl_narrow_)
_SMALL = {
    DType.FLOAT16: ("uint16_t", "f16"),
    DType.BFLOAT16: ("uint16_t", "bf16"),
    DType.FLOAT8_E4M3FN: ("uint8_t", "e4m3fn"),
    DType.FLOAT8_E5M2: ("uint8_t", "e5m2"),
    DType.FLOAT8_E4M3FNUZ: ("uint8_t", "e4m3fnuz"),
    DType.FLOAT8_E5M2FNUZ: ("uint8_t", "e5m2fnuz"),
}
# dtype -> (storage, type that wraps, type that divides)
_INTEGERS = {
    DType.INT8: ("int8_t", "uint32_t", "int64_t"),
    DType.UINT8: ("uint8_t", "uint32_t", "int64_t"),
    DType.INT16: ("int16_t", "uint32_t", "int64_t"),
    DType.UINT16: ("uint16_t", "uint32_t", "int64_t"),
    DType.INT32: ("int32_t", "uint32_t", "int64_t"),
    DType.UINT32: ("uint32_t", "uint32_t", "int64_t"),
    DType.INT64: ("int64_t", "uint64_t", "int64_t"),
    DType.UINT64: ("uint64_t", "uint64_t", "uint64_t"),
}
_REALS = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}  # an element is two numbers: sum only

_BITS = (RedOp.BAND, RedOp.BOR, RedOp.BXOR)
_EXPRESSIONS = {
    RedOp.SUM: "x + y",
    RedOp.PROD: "x * y",
    RedOp.MAX: "(x > y || x != x) ? x : y",
    RedOp.MIN: "(x < y || x != x) ? x : y",
    RedOp.BAND: "x & y",
    RedOp.BOR: "x | y",
    RedOp.BXOR: "x ^ y",
}
_BOOLS = {
    RedOp.SUM: "x | y", RedOp.MAX: "x | y", RedOp.BOR: "x | y", RedOp.PROD: "x & y", RedOp.MIN: "x & y",
    RedOp.BAND: "x & y", RedOp.BXOR: "x ^ y",
}  # fmt: skip

_HEAD = """
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t; typedef long long int64_t; typedef unsigned long long uint64_t;
#define HETCCL_INLINE static __device__ __forceinline__
"""

_BODY = """
struct hetccl_kernel_args { void *dst; uint64_t count; double divisor; uint32_t n_src; uint32_t divides;
                            const void *src[%(max)d]; };
#define LOOP for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.count; \\
                  i += (uint64_t)gridDim.x * blockDim.x)
#define AT(T, s) (((const T *)a.src[s])[i])
/* C is the type that is computed in, all of it before the one rounding to T; DIVIDED sees x. */
#define KERNEL(NAME, T, C, IN, STEP, EXPR, DIVIDED, OUT) \\
extern "C" __global__ void NAME(hetccl_kernel_args a) \\
{ \\
    LOOP { \\
        C x = IN(AT(T, 0)); \\
        if (a.n_src > 1) { \\
            for (uint32_t s = 1; s < a.n_src; s++) { C y = IN(AT(T, s)); x = STEP(EXPR); } \\
        } else if (!a.divides) { \\
            ((T *)a.dst)[i] = AT(T, 0); \\
            continue; \\
        } \\
        if (a.divides) { DIVIDED } \\
        ((T *)a.dst)[i] = (T)OUT(x); \\
    } \\
}
#define SAME(x) (x)
#define TRUTH(x) ((uint8_t)((x) != 0))
#define DIVIDE_F32 float d = (float)a.divisor; \\
    x = hetccl_canonical_f32((double)d == a.divisor ? x / d : (float)((double)x / a.divisor));
#define DIVIDE_F64 x = hetccl_canonical_f64(x / a.divisor);
"""


def kernels() -> list[tuple[DType, RedOp]]:
    """Every pair that has a kernel."""
    found = [(d, r) for d in (*_FLOATS, *_SMALL) for r in (RedOp.SUM, RedOp.PROD, RedOp.MAX, RedOp.MIN)]
    found += [(d, r) for d in _INTEGERS for r in _EXPRESSIONS]
    return found + [(DType.BOOL, r) for r in _BOOLS]


def spinning() -> list[DType]:
    """Every dtype that has a resident kernel and one that exchanges words."""
    return [*_FLOATS, *_SMALL, *_INTEGERS, DType.BOOL]


def kernel_name(dtype: DType, redop: RedOp) -> str:
    """Name of the kernel of a pair. Complex numbers go through the kernel of their reals."""
    return f"hetccl_{redop.label}_{dtype.label}"


def reals(dtype: DType) -> DType:
    """The type of the numbers that an element is made of."""
    return _REALS.get(dtype, dtype)


def _element(dtype: DType) -> Element:
    """The same arithmetic as the kernels above, for those of `cuda_spin`."""
    if dtype in _FLOATS:
        kind, short = _FLOATS[dtype]
        parts = (kind, kind, "x", "x", f"DIVIDE_{short.upper()}", f"hetccl_canonical_{short}")
    elif dtype in _SMALL:
        kind, short = _SMALL[dtype]
        read, write = f"hetccl_widen_{short}(x)", f"hetccl_narrow_{short}(x)"
        parts = (kind, "float", read, write, "DIVIDE_F32", "hetccl_canonical_f32")
    elif dtype == DType.BOOL:
        parts = ("uint8_t", "uint8_t", "TRUTH(x)", "x", "", "(uint8_t)")
    else:
        kind, _, divides = _INTEGERS[dtype]
        unsigned = "uint64_t" if kind.endswith("64_t") else "uint32_t"
        divide = f"x = ({kind})(({divides})x / ({divides})a.divisor);"
        steps = {
            int(r): f"(x {t[2]} y)" if r in _BITS else f"({kind})(({unsigned})x {t[2]} ({unsigned})y)"
            for r, t in _EXPRESSIONS.items()
            if r not in (RedOp.MAX, RedOp.MIN)
        }
        steps |= {int(r): f"(({_EXPRESSIONS[r]}))" for r in (RedOp.MAX, RedOp.MIN)}
        return Element(kind, kind, "x", "x", divide, steps)
    kind, wide, read, write, divide, wrap = parts
    texts = _BOOLS if dtype == DType.BOOL else {r: t for r, t in _EXPRESSIONS.items() if r not in _BITS}
    return Element(kind, wide, read, write, divide, {int(r): f"{wrap}({t})" for r, t in texts.items()})


def kernel_source() -> str:
    """The whole text, for NVRTC, hipRTC and their like."""
    header = files("hetccl").joinpath("native", "combine_elements.h").read_text()
    lines = [_HEAD, header, _BODY % {"max": MAX_SOURCES}]
    for dtype, redop in kernels():
        name = kernel_name(dtype, redop)
        if dtype in _FLOATS:
            kind, short = _FLOATS[dtype]
            canonical = f"hetccl_canonical_{short}"
            parts = (kind, kind, "SAME", canonical, _EXPRESSIONS[redop], f"DIVIDE_{short.upper()}", "SAME")
        elif dtype in _SMALL:
            kind, short = _SMALL[dtype]
            parts = (
                kind, "float", f"hetccl_widen_{short}", "hetccl_canonical_f32", _EXPRESSIONS[redop], "DIVIDE_F32",
                f"hetccl_narrow_{short}",
            )  # fmt: skip
        elif dtype == DType.BOOL:
            parts = ("uint8_t", "uint8_t", "TRUTH", "(uint8_t)", _BOOLS[redop], "", "SAME")
        else:
            kind, wraps, divides = _INTEGERS[dtype]
            compute = kind if redop in (RedOp.MAX, RedOp.MIN) else wraps
            divided = f"x = ({compute})(({divides})({kind})x / ({divides})a.divisor);"
            parts = (kind, compute, f"({compute})", f"({compute})", _EXPRESSIONS[redop], divided, f"({kind})")
        lines.append(f"KERNEL({name}, {', '.join(parts)})")
    lines.append(spin_source({dtype.label: _element(dtype) for dtype in spinning()}))
    return "\n".join(lines) + "\n"
