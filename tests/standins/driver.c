/* SPDX-License-Identifier: Apache-2.0
 * Stand-in for the three calls of libcuda that load and launch kernels: they are the runtime stand-in's.
 */
#define _GNU_SOURCE
#include "beside.h"
#include <stddef.h>
#define API __attribute__((visibility("default")))

API int cuModuleLoadData(void **module, const void *image)
{
    int (*f)(void **, const void *) = (int (*)(void **, const void *))runtime("standin_load");
    return f ? f(module, image) : 3;
}
API int cuModuleGetFunction(void **out, void *module, const char *name)
{
    int (*f)(void **, void *, const char *) = (int (*)(void **, void *, const char *))runtime("standin_function");
    return f ? f(out, module, name) : 3;
}
typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
API int cuLaunchKernel(void *k, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s, void **args, void **extra)
{
    launch_fn f = (launch_fn)runtime("standin_launch");
    return f ? f(k, a, b, c, d, e, g, h, s, args, extra) : 3;
}
