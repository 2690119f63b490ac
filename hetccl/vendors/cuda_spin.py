# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait for words in host memory: one that stays and sums chunk after chunk, and one that exchanges
small data with another rank by itself. Part of the source text of `cuda_kernels`.

What they need of a device beyond plain C++ is written twice: as PTX, and with the compilers' atomic builtins (hipRTC,
whose builtins are of system scope, and the stand-in).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Element", "resident_name", "spin_source", "words_name"]


@dataclass(frozen=True)
class Element:
    """How one dtype is computed in: storage, type that computes, texts of x read from storage, and back; the statement
    that divides x by a.divisor ("" if it cannot be), and x combined with y, by number of the operator."""

    storage: str
    computes: str
    read: str
    write: str
    divide: str
    steps: Mapping[int, str]


def resident_name(label: str) -> str:
    return f"hetccl_resident_{label}"


def words_name(label: str) -> str:
    return f"hetccl_words_{label}"


def spin_source(elements: Mapping[str, Element]) -> str:
    """`elements` by the dtype's label."""
    lines = [_TOOLS, _RESIDENT, _WORDS]
    for label, e in elements.items():
        cases = "\n".join(f"        case {op}: return {text};" for op, text in e.steps.items())
        lines.append(
            _ELEMENT % {"label": label, "cases": cases, "T": e.storage, "C": e.computes, "read": e.read,
                        "write": e.write, "divide": e.divide, "sum": e.steps[0], "resident": resident_name(label),
                        "words": words_name(label)}
        )  # fmt: skip
    return "\n".join(lines)


_TOOLS = """
struct __attribute__((aligned(16))) hetccl_w4 { uint32_t v[4]; };
#define HETCCL_FN static __device__ __forceinline__
#ifdef __CUDA_ARCH__
HETCCL_FN uint32_t hetccl_acquire(const uint32_t *p)
{ uint32_t v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
HETCCL_FN void hetccl_release(uint32_t *p, uint32_t v)
{ asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
HETCCL_FN uint64_t hetccl_now(void) { uint64_t t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
HETCCL_FN hetccl_w4 hetccl_load16(const void *p)        /* past L1: engines write there while the kernel runs */
{ hetccl_w4 w; asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]),
                            "=r"(w.v[3]) : "l"(p) : "memory"); return w; }
HETCCL_FN void hetccl_store16(void *p, hetccl_w4 w)
{ asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(w.v[0]), "r"(w.v[1]), "r"(w.v[2]),
               "r"(w.v[3]) : "memory"); }
HETCCL_FN void hetccl_put(void *p, uint32_t a, uint32_t flag, uint32_t b)
{ asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%2};" :: "l"(p), "r"(a), "r"(flag), "r"(b) : "memory"); }
HETCCL_FN hetccl_w4 hetccl_get(const void *p)
{ hetccl_w4 w; asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]),
                            "=r"(w.v[3]) : "l"(p) : "memory"); return w; }
HETCCL_FN uint32_t hetccl_count_up(uint32_t *p) { return atomicAdd(p, 1u); }
HETCCL_FN void hetccl_fence(void) { __threadfence_system(); }
#else
HETCCL_FN uint32_t hetccl_acquire(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
HETCCL_FN void hetccl_release(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
HETCCL_FN uint64_t hetccl_now(void) { return (uint64_t)wall_clock64() * 10u; }      /* of 100 MHz */
HETCCL_FN hetccl_w4 hetccl_load16(const void *p)
{ hetccl_w4 w; for (int i = 0; i < 4; i++) w.v[i] = ((const volatile uint32_t *)p)[i]; return w; }
HETCCL_FN void hetccl_store16(void *p, hetccl_w4 w) { *(hetccl_w4 *)p = w; }
HETCCL_FN void hetccl_put(void *p, uint32_t a, uint32_t flag, uint32_t b)           /* each half carries its own flag */
{ __atomic_store_n((uint64_t *)p, a | (uint64_t)flag << 32, __ATOMIC_RELAXED);
  __atomic_store_n((uint64_t *)p + 1, b | (uint64_t)flag << 32, __ATOMIC_RELAXED); }
HETCCL_FN hetccl_w4 hetccl_get(const void *p)
{ const uint64_t *q = (const uint64_t *)p;
  uint64_t a = __atomic_load_n(q, __ATOMIC_RELAXED), b = __atomic_load_n(q + 1, __ATOMIC_RELAXED);
  hetccl_w4 w = {{(uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32)}}; return w; }
HETCCL_FN uint32_t hetccl_count_up(uint32_t *p) { return __atomic_fetch_add(p, 1u, __ATOMIC_ACQ_REL); }
HETCCL_FN void hetccl_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif
/* 1: the time is over, or the host says stop. Looks for that only now and then. */
HETCCL_FN int hetccl_given_up(uint32_t *polls, uint64_t *since, const uint32_t *stop, uint64_t timeout_ns)
{
    if (++*polls & 1023u)
        return 0;
    uint64_t t = hetccl_now();
    *since = *since ? *since : t;
    return t - *since > timeout_ns || hetccl_acquire(stop) != 0;
}
/* The last block to come here resets the counter and says so to the host. */
HETCCL_FN void hetccl_last_block(uint32_t *counter, uint32_t *word, uint32_t value)
{
    hetccl_fence();
    if (hetccl_count_up(counter) == gridDim.x - 1) {
        *counter = 0;
        hetccl_fence();
        hetccl_release(word, value);
    }
}
"""

# Only one block polls host memory and passes the news on: with all of them polling, four blocks lost a third of their
# speed.
_RESIDENT = """
struct hetccl_resident_args {
    void *dst; uint64_t count, chunk; double divisor;
    const void *src[8]; uint32_t ring[8], first[8];
    uint32_t n_src, divides, op, base, slots, pad; uint64_t slot_bytes, timeout_ns;
    uint32_t *arrive, *freed, *stop, *scratch;
};
template <class E>
HETCCL_FN const char *hetccl_source(const hetccl_resident_args &a, uint32_t k, uint32_t t, uint64_t at)
{
    return a.ring[k] ? (const char *)a.src[k] + (uint64_t)((a.first[k] + t) % a.slots) * a.slot_bytes
                     : (const char *)a.src[k] + at * sizeof(typename E::T);
}
/* Sums of two only, in code that is as short as it can be: many kernels are compiled when a process starts. The rest
 * takes a kernel a chunk. */
template <class E, bool DIVIDES>
HETCCL_FN void hetccl_sum(const hetccl_resident_args &a, const char *s0, const char *s1, typename E::T *dst, uint64_t n)
{
    typedef typename E::T T;
    typedef typename E::C C;
    enum { V = 16 / sizeof(T), U = DIVIDES ? 1 : V <= 4 ? 4 : V <= 8 ? 2 : 1 };
    union pack { hetccl_w4 w; T e[V]; };
    const uint64_t me = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, all = (uint64_t)gridDim.x * blockDim.x;
    const uint64_t packs = ((uint64_t)s0 | (uint64_t)s1 | (uint64_t)dst) & 15u ? 0 : n / V;
    for (uint64_t i = me; i < packs; i += U * all) {
        pack x[U], y[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u * all < packs) {
                x[u].w = hetccl_load16(s0 + 16 * (i + u * all));
                y[u].w = hetccl_load16(s1 + 16 * (i + u * all));
            }
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u * all < packs) {
#pragma unroll
                for (int v = 0; v < V; v++) {
                    C c = E::sum(E::read(x[u].e[v]), E::read(y[u].e[v]));
                    if (DIVIDES)
                        c = E::divide(c, a);
                    x[u].e[v] = E::write(c);
                }
                hetccl_store16((char *)dst + 16 * (i + u * all), x[u].w);
            }
    }
#pragma unroll 1
    for (uint64_t i = packs * V + me; i < n; i += all) {
        C c = E::sum(E::read(((const volatile T *)s0)[i]), E::read(((const volatile T *)s1)[i]));
        if (DIVIDES)
            c = E::divide(c, a);
        dst[i] = E::write(c);
    }
}
template <class E> HETCCL_FN void hetccl_resident(const hetccl_resident_args &a)
{
    typedef typename E::T T;
    __shared__ int gone;
    uint32_t t = 0;
    for (uint64_t at = 0; at < a.count; at += a.chunk, t++) {
        if (threadIdx.x == 0) {
            const uint32_t want = a.base + t + 1, *word = blockIdx.x == 0 ? a.arrive : a.scratch;
            uint32_t polls = 0, left = 0;
            uint64_t since = 0;
            while ((int32_t)(hetccl_acquire(word) - want) < 0 && !left)
                left = (uint32_t)hetccl_given_up(&polls, &since, a.stop, a.timeout_ns);
            if (blockIdx.x == 0 && !left)
                hetccl_release(a.scratch, want);
            gone = (int)left;
        }
        __syncthreads();
        if (gone)
            return;
        const uint64_t n = a.count - at < a.chunk ? a.count - at : a.chunk;
        const char *s0 = hetccl_source<E>(a, 0, t, at), *s1 = hetccl_source<E>(a, 1, t, at);
        if (a.divides)
            hetccl_sum<E, true>(a, s0, s1, (T *)a.dst + at, n);
        else
            hetccl_sum<E, false>(a, s0, s1, (T *)a.dst + at, n);
        __syncthreads();
        if (threadIdx.x == 0)                   /* a block may be a whole ring ahead of one that began late */
            hetccl_last_block(a.scratch + 1 + t % a.slots, a.freed, a.base + t + 1);
    }
}
"""

_WORDS = """
struct hetccl_words_args {
    void *dst; const void *src; uint64_t count; double divisor;
    void *out; const void *in; uint32_t *done, *stop, *scratch; uint64_t timeout_ns;
    uint32_t flag, op, position, divides;
};
template <class E> HETCCL_FN void hetccl_words(const hetccl_words_args &a)
{
    typedef typename E::T T;
    typedef typename E::C C;
    enum { W = 8 / sizeof(T) };
    union one { uint64_t u; T e; };
    const T *src = (const T *)a.src;
    T *dst = (T *)a.dst;
    const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x, n = (uint32_t)a.count;
    const uint32_t words = (n + W - 1) / W;
    for (uint32_t i = me; i < words; i += all) {
        uint64_t bits = 0;
#pragma unroll 1
        for (uint32_t v = 0; v < W && i * W + v < n; v++) {
            one e;
            e.u = 0;
            e.e = src[i * W + v];
            bits |= e.u << 8 * sizeof(T) * v;
        }
        hetccl_put((char *)a.out + 16u * (uint64_t)i, (uint32_t)bits, a.flag, (uint32_t)(bits >> 32));
    }
    uint32_t polls = 0;
    uint64_t since = 0;
    int gone = 0;
    for (uint32_t i = me; i < words; i += all) {
        hetccl_w4 w = hetccl_get((const char *)a.in + 16u * (uint64_t)i);
        while ((w.v[1] != a.flag || w.v[3] != a.flag) && !gone) {
            gone = hetccl_given_up(&polls, &since, a.stop, a.timeout_ns);
            w = hetccl_get((const char *)a.in + 16u * (uint64_t)i);
        }
        if (gone)
            break;
        const uint64_t bits = w.v[0] | (uint64_t)w.v[2] << 32;
#pragma unroll 1
        for (uint32_t v = 0; v < W && i * W + v < n; v++) {
            one e;
            e.u = bits >> 8 * sizeof(T) * v;
            C mine = E::read(src[i * W + v]), other = E::read(e.e);
            C c = E::step(a.op, a.position ? other : mine, a.position ? mine : other);
            if (a.divides)
                c = E::divide(c, a);
            dst[i * W + v] = E::write(c);
        }
    }
    if (__syncthreads_or(gone))
        return;
    if (threadIdx.x == 0)
        hetccl_last_block(a.scratch, a.done, a.flag);
}
"""

_ELEMENT = """
struct hetccl_e_%(label)s {
    typedef %(T)s T;
    typedef %(C)s C;
    HETCCL_FN C read(T x) { return (C)(%(read)s); }
    HETCCL_FN T write(C x) { return (T)(%(write)s); }
    template <class A> HETCCL_FN C divide(C x, const A &a) { %(divide)s return x; }
    HETCCL_FN C sum(C x, C y) { return %(sum)s; }
    HETCCL_FN C step(uint32_t op, C x, C y)
    {
        switch (op) {
%(cases)s
        default: return x;
        }
    }
};
extern "C" __global__ void __launch_bounds__(512) %(resident)s(hetccl_resident_args a)
{ hetccl_resident<hetccl_e_%(label)s>(a); }
extern "C" __global__ void __launch_bounds__(512, 4) %(words)s(hetccl_words_args a)
{ hetccl_words<hetccl_e_%(label)s>(a); }
"""
