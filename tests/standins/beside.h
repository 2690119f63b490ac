/* SPDX-License-Identifier: Apache-2.0
 * The runtime's stand-in that lies beside this library. Not by its bare name: the process may have opened the real one.
 */
#ifndef STANDIN_BESIDE_H
#define STANDIN_BESIDE_H
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#ifdef HIP
#define RUNTIME "libamdhip64.so.7"
#define CAPTURING "hipStreamIsCapturing"
#else
#define RUNTIME "libcudart.so.13"
#define CAPTURING "cudaStreamIsCapturing"
#endif

static void *runtime(const char *name)
{
    static void *library;
    if (!library) {
        char path[4096];
        Dl_info mine;
        if (!dladdr((void *)runtime, &mine) || strlen(mine.dli_fname) + sizeof RUNTIME >= sizeof path)
            return NULL;
        strcpy(path, mine.dli_fname);
        char *slash = strrchr(path, '/');
        strcpy(slash ? slash + 1 : path, RUNTIME);
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return library ? dlsym(library, name) : NULL;
}
#endif
