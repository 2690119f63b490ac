/* SPDX-License-Identifier: Apache-2.0
 * Part of runtime.c: loading and launching kernels.
 */
/* Kernels: the module is the path of a library that the compiler's stand-in has made (see compiler.c). */
typedef struct kernel_args { uint64_t word[36]; } kernel_args;      /* hetccl_kernel_args, by value */
typedef struct function { void (*kernel)(kernel_args); void (*at)(unsigned, unsigned, unsigned, unsigned); int spins; } function;
typedef struct launch { function f; unsigned grid, block, started, ended; kernel_args args; } launch;
typedef struct part { launch *of; unsigned number; } part;        /* a block */
static void *again_launch(void *arg) { launch *l = malloc(sizeof *l); *l = *(launch *)arg; return l; }
/* A kernel that waits for others runs on a thread of its own, as one block of one thread: others go on meanwhile. With
 * STANDIN_LATE_BLOCK, as all its blocks, the last of which begins so many ms after the others, as on a busy device. */
static void *spin(void *arg)
{
    part b = *(part *)arg;
    free(arg);
    if (b.number + 1 == b.of->started && b.number)
        usleep((unsigned)env("STANDIN_LATE_BLOCK", 0) * 1000u);
    b.of->f.at(b.number, 1, 0, b.of->started);
    b.of->f.kernel(b.of->args);
    __atomic_add_fetch(&b.of->ended, 1, __ATOMIC_RELEASE);
    return NULL;
}
static void start(launch *l)
{
    l->started = env("STANDIN_LATE_BLOCK", 0) ? l->grid : 1;
    for (unsigned i = 0; i < l->started; i++) {
        pthread_t thread;
        part *b = malloc(sizeof *b);
        *b = (part){l, i};
        if (pthread_create(&thread, NULL, spin, b) != 0)
            abort();
        pthread_detach(thread);
    }
}
static int do_launch(void *arg)
{
    launch *l = arg;
    if (l->f.spins && !l->started)
        start(l);
    if (l->f.spins) {
        if (__atomic_load_n(&l->ended, __ATOMIC_ACQUIRE) < l->started)
            return 0;
        free(l);
        return 1;
    }
    for (unsigned b = 0; b < l->grid; b++)
        for (unsigned t = 0; t < l->block; t++) {
            l->f.at(b, l->block, t, l->grid);
            l->f.kernel(l->args);
        }
    free(l);
    return 1;
}

/* Nobody asks for what such a kernel does but by the words that it writes, so its stream has to run by itself. */
typedef struct nudge { stream *s; uint64_t upto; } nudge;
static void *nudging(void *arg)
{
    nudge *n = arg;
    for (int done = 0; !done; usleep(20)) {
        pthread_mutex_lock(&lock);
        done = run(n->s, n->upto);
        pthread_mutex_unlock(&lock);
    }
    free(n);
    return NULL;
}
static void start_by_itself(void *handle)
{
    pthread_t thread;
    nudge *n = malloc(sizeof *n);
    pthread_mutex_lock(&lock);
    *n = (nudge){of(handle), 0};
    n->upto = n->s->enqueued;
    pthread_mutex_unlock(&lock);
    if (pthread_create(&thread, NULL, nudging, n) == 0)
        pthread_detach(thread);
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
    f->spins = !strncmp(name, "hetccl_resident_", 16) || !strncmp(name, "hetccl_words_", 13);
    *out = f;
    return f->kernel && f->at ? OK : 500;
}
API int standin_launch(void *what, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **args, void **extra)
{
    function *f = what;
    launch *l = calloc(1, sizeof *l);
    if (!l || gy * gz * by * bz != 1 || shared || extra || !gx || bx > 1024)
        return answer(INVALID);
    l->f = *f;
    l->grid = gx;
    l->block = bx;
    memcpy(&l->args, args[0], sizeof l->args);
    int code = enqueue(s, do_launch, l, again_launch);
    if (code == OK && f->spins)
        start_by_itself(s);
    return answer(code);
}
#ifdef HIP
API int hipModuleLoadData(void **m, const void *image) { return standin_load(m, image); }
API int hipModuleGetFunction(void **f, void *m, const char *name) { return standin_function(f, m, name); }
API int hipModuleLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s, void **args, void **extra)
{
    return standin_launch(f, a, b, c, d, e, g, h, s, args, extra);
}
#endif
