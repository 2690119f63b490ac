/* SPDX-License-Identifier: Apache-2.0
 * The C shapes of CUDA-like runtime calls, and one opened device: what the functions of its device table work on.
 */
#ifndef HETCCL_CUDA_DEVICE_H
#define HETCCL_CUDA_DEVICE_H
#include "hetccl/spi.h"

#define HETCCL_CUDA_CODES 1024          /* result codes below this may have a meaning of their own */
#define HETCCL_CUDA_SOURCES 32          /* MAX_SOURCES of cuda_kernels.py */
#define HETCCL_CUDA_TYPES 16            /* numbers of memory types */

enum { HETCCL_CUDA_HOST = 0, HETCCL_CUDA_DEVICE = 1, HETCCL_CUDA_MANAGED = 2 };  /* Memory of cuda_shape.py */

/* What the runtime says of a pointer; later versions append fields, so there is room. */
typedef struct hetccl_cuda_attributes {
    int type, device;
    void *pointers[2];
    long more[60];
} hetccl_cuda_attributes;

/* Arguments of a kernel, as the source text in cuda_kernels.py declares them. */
typedef struct hetccl_cuda_kernel_args {
    void *dst;
    uint64_t count;
    double divisor;
    uint32_t n_src, divides;
    const void *src[HETCCL_CUDA_SOURCES];
} hetccl_cuda_kernel_args;

#define HETCCL_CUDA_ARGS 288            /* every kernel gets as much: it reads what it declares */

/* As cuda_spin.py declares them. */
typedef union hetccl_cuda_resident_args {
    struct {
        void *dst;
        uint64_t count, chunk;
        double divisor;
        const void *src[HETCCL_SPIN_SOURCES];
        uint32_t ring[HETCCL_SPIN_SOURCES], first[HETCCL_SPIN_SOURCES];
        uint32_t n_src, divides, op, base, slots, pad;
        uint64_t slot_bytes, timeout_ns;
        uint32_t *arrive, *freed, *stop, *scratch;
    };
    char room[HETCCL_CUDA_ARGS];
} hetccl_cuda_resident_args;

typedef union hetccl_cuda_words_args {
    struct {
        void *dst;
        const void *src;
        uint64_t count;
        double divisor;
        void *out;
        const void *in;
        uint32_t *done, *stop, *scratch;
        uint64_t timeout_ns;
        uint32_t flag, op, position, divides;
    };
    char room[HETCCL_CUDA_ARGS];
} hetccl_cuda_words_args;

typedef int (*hetccl_cuda_int_fn)(int);
typedef int (*hetccl_cuda_get_fn)(int *);
typedef int (*hetccl_cuda_plain_fn)(void);
typedef int (*hetccl_cuda_alloc_fn)(void **, size_t);
typedef int (*hetccl_cuda_host_alloc_fn)(void **, size_t, unsigned);
typedef int (*hetccl_cuda_register_fn)(void *, size_t, unsigned);
typedef int (*hetccl_cuda_ptr_fn)(void *);
typedef int (*hetccl_cuda_copy_fn)(void *, const void *, size_t, int, void *);
typedef int (*hetccl_cuda_memset_fn)(void *, int, size_t, void *);
typedef int (*hetccl_cuda_make_fn)(void **, unsigned);
typedef int (*hetccl_cuda_wait_fn)(void *, void *, unsigned);
typedef int (*hetccl_cuda_two_fn)(void *, void *);
typedef int (*hetccl_cuda_attributes_fn)(hetccl_cuda_attributes *, const void *);
typedef int (*hetccl_cuda_attribute_fn)(int *, int, int);
typedef int (*hetccl_cuda_capturing_fn)(void *, int *);
typedef int (*hetccl_cuda_address_fn)(void **, void *, unsigned);
typedef int (*hetccl_cuda_priority_fn)(void **, unsigned, int);
typedef const char *(*hetccl_cuda_text_fn)(int);
typedef int (*hetccl_cuda_bus_fn)(char *, int, int);
typedef int (*hetccl_cuda_load_fn)(void **, const void *);
typedef int (*hetccl_cuda_function_fn)(void **, void *, const char *);
typedef int (*hetccl_cuda_launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                                     void **, void **);
typedef int (*hetccl_cuda_range_fn)(void *, void *, size_t, int, unsigned long long);

/* Filled once, then only read. Never freed. */
typedef struct hetccl_cuda_device {
    hetccl_device_ops ops;
    hetccl_table table;
    int index;
    int invalid_is_host;
    char name[32];
    int16_t status_of[HETCCL_CUDA_CODES];
    int8_t memory_of[HETCCL_CUDA_TYPES];
    hetccl_cuda_int_fn set_device;
    hetccl_cuda_get_fn get_device;
    hetccl_cuda_plain_fn clear_error;   /* GetLastError: else the program's next look at it would find our error */
    hetccl_cuda_text_fn error_text;
    hetccl_cuda_alloc_fn alloc;
    hetccl_cuda_host_alloc_fn host_alloc;
    hetccl_cuda_register_fn host_register;
    hetccl_cuda_ptr_fn free, host_free, host_unregister, stream_destroy, stream_sync, stream_query, event_destroy, event_query, event_sync;
    hetccl_cuda_copy_fn copy;
    hetccl_cuda_memset_fn fill;
    hetccl_cuda_make_fn stream_create, event_create;
    hetccl_cuda_wait_fn stream_wait_event;
    hetccl_cuda_two_fn event_record;
    hetccl_cuda_attributes_fn attributes;
    hetccl_cuda_capturing_fn capturing;
    hetccl_cuda_get_fn capture_mode;    /* ThreadExchangeStreamCaptureMode */
    hetccl_cuda_launch_fn launch;
    hetccl_cuda_range_fn memory_handle; /* cuMemGetHandleForAddressRange */
    void *kernel[HETCCL_DTYPE_COUNT][HETCCL_REDOP_COUNT];
    void *resident[HETCCL_DTYPE_COUNT], *words[HETCCL_DTYPE_COUNT];
    hetccl_cuda_address_fn device_address;      /* HostGetDevicePointer */
    int elsewhere;                      /* kernels see registered host memory at other addresses than the host does */
    hetccl_cuda_priority_fn stream_create_first;  /* StreamCreateWithPriority */
    int first_priority;
} hetccl_cuda_device;

/* For cuda_spin.c: makes the device current and launches; keeps the text of a failure. */
int hetccl_cuda_launch(hetccl_cuda_device *d, void *function, unsigned blocks, unsigned threads, void *args, void *stream,
                       const char *call);
int hetccl_cuda_explain(int status, const char *words);
int hetccl_cuda_resident(void *ctx, const hetccl_resident_args *args);
int hetccl_cuda_words(void *ctx, const hetccl_exchange_args *args);

/* Fills the table from the functions that are there; takes away bits of caps whose functions are not. */
void hetccl_cuda_fill_table(hetccl_cuda_device *d);
#endif
