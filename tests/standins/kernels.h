/* SPDX-License-Identifier: Apache-2.0
 * Part of runtime.c: loading and launching kernels.
 */
/* Kernels: the module is the path of a library that the compiler's stand-in has made (see compiler.c). */
typedef struct kernel_args { uint64_t word[36]; } kernel_args;      /* hetccl_kernel_args, by value */
typedef struct launch { void (*kernel)(kernel_args); void (*at)(unsigned, unsigned, unsigned, unsigned); unsigned grid, block; kernel_args args; } launch;
typedef struct function { void (*kernel)(kernel_args); void (*at)(unsigned, unsigned, unsigned, unsigned); } function;
static void *again_launch(void *arg) { launch *l = malloc(sizeof *l); *l = *(launch *)arg; return l; }
static int do_launch(void *arg)
{
    launch *l = arg;
    for (unsigned b = 0; b < l->grid; b++)
        for (unsigned t = 0; t < l->block; t++) {
            l->at(b, l->block, t, l->grid);
            l->kernel(l->args);
        }
    free(l);
    return 1;
}
API int standin_load(void **module, const void *image)
{
    *module = strncmp(image, "STANDIN ", 8) ? NULL : dlopen((const char *)image + 8, RTLD_NOW | RTLD_LOCAL);
    return *module ? OK : 200;
}
API int standin_function(void **out, void *module, const char *name)
{
    function *f = malloc(sizeof *f);
    *(void **)&f->kernel = dlsym(module, name);
    *(void **)&f->at = dlsym(module, "standin_at");
    *out = f;
    return f->kernel && f->at ? OK : 500;
}
API int standin_launch(void *what, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **args, void **extra)
{
    function *f = what;
    launch *l = calloc(1, sizeof *l);
    if (!l || gy * gz * by * bz != 1 || shared || extra || !gx || bx > 1024)
        return answer(INVALID);
    l->kernel = f->kernel;
    l->at = f->at;
    l->grid = gx;
    l->block = bx;
    memcpy(&l->args, args[0], sizeof l->args);
    return answer(enqueue(s, do_launch, l, again_launch));
}
#ifdef HIP
API int hipModuleLoadData(void **m, const void *image) { return standin_load(m, image); }
API int hipModuleGetFunction(void **f, void *m, const char *name) { return standin_function(f, m, name); }
API int hipModuleLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s, void **args, void **extra)
{
    return standin_launch(f, a, b, c, d, e, g, h, s, args, extra);
}
#endif
