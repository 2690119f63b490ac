/* SPDX-License-Identifier: Apache-2.0
 * oneCCL called straight from C, as a yardstick: all_reduce of float32 between the ranks of one host.
 * usage: oneccl_direct FOLDER RANK SIZE IDFILE BYTES ITERS...   prints "bytes median_us" for each pair
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct { char bytes[4096]; } unique_id;
typedef int (*fn_id)(unique_id *);
typedef int (*fn_init)(void **, size_t, unique_id, int);
typedef int (*fn_reduce)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*fn_destroy)(void *);

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec * 1e-3; }
static int by_size(const void *a, const void *b) { double x = *(const double *)a, y = *(const double *)b; return (x > y) - (x < y); }

int main(int argc, char **argv)
{
    if (argc < 7)
        return 2;
    char path[4096];
    int rank = atoi(argv[2]), size = atoi(argv[3]);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(rank % (int)sysconf(_SC_NPROCESSORS_ONLN), &set);
    sched_setaffinity(0, sizeof set, &set);
    snprintf(path, sizeof path, "%s/libfabric.so.1", argv[1]);
    dlopen(path, RTLD_NOW | RTLD_LOCAL);
    snprintf(path, sizeof path, "%s/libccl.so.2", argv[1]);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL), *comm;
    if (!lib)
        return fprintf(stderr, "%s\n", dlerror()), 1;
    fn_id get_id = (fn_id)dlsym(lib, "onecclGetUniqueId");
    fn_init init = (fn_init)dlsym(lib, "onecclCommInitRank");
    fn_reduce all_reduce = (fn_reduce)dlsym(lib, "onecclAllReduce");
    fn_destroy destroy = (fn_destroy)dlsym(lib, "onecclCommDestroy");
    unique_id id;
    if (rank == 0) {
        snprintf(path, sizeof path, "%s.part", argv[4]);
        FILE *f = fopen(path, "wb");
        if (get_id(&id) || !f || fwrite(&id, sizeof id, 1, f) != 1 || fclose(f) || rename(path, argv[4]))
            return 1;
    } else {
        struct stat st;
        while (stat(argv[4], &st))
            usleep(2000);
        FILE *f = fopen(argv[4], "rb");
        if (!f || fread(&id, sizeof id, 1, f) != 1 || fclose(f))
            return 1;
    }
    if (init(&comm, (size_t)size, id, rank))
        return 1;
    for (int a = 5; a + 1 < argc; a += 2) {
        size_t bytes = strtoul(argv[a], NULL, 0);
        int iters = atoi(argv[a + 1]);
        float *x = aligned_alloc(4096, bytes + 4096);
        double *t = malloc(sizeof *t * (size_t)iters);
        memset(x, 0, bytes);
        for (int i = 0; i < iters / 5 + 2; i++)
            all_reduce(x, x, bytes / 4, 7, 0, comm, NULL);
        for (int i = 0; i < iters; i++) {
            double start = now();
            if (all_reduce(x, x, bytes / 4, 7, 0, comm, NULL))
                return 1;
            t[i] = now() - start;
        }
        qsort(t, (size_t)iters, sizeof *t, by_size);
        if (rank == 0)
            printf("%zu %.3f\n", bytes, t[iters / 2]);
        free(x);
        free(t);
    }
    destroy(comm);
    return 0;
}
