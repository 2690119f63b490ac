/* SPDX-License-Identifier: Apache-2.0
 * Part of runtime.c: capture of streams into graphs, with the rules that the real runtimes have. A graph keeps its steps in the
 * order of their capture, which is one of the orders that its edges allow.
 */
enum { UNSUPPORTED_IN_CAPTURE = 900, SPOILT = 901, UNJOINED = 904, ISOLATION = 905, CAPTURED_EVENT = 907 };
enum { GLOBAL = 0, RELAXED = 2 };

typedef struct graph { op *head, *tail; stream *origin; int mode, spoilt; struct graph *next; } graph;

static graph *captures;                         /* those under way */
static _Thread_local int capture_mode;

static int spoil(int code)
{
    for (graph *g = captures; g; g = g->next)
        g->spoilt = 1;
    return code;
}

/* A call that might synchronise: while a stream is captured in the global mode only threads that said "relaxed" may make it. */
static int unsafe(void)
{
    for (graph *g = captures; g; g = g->next)
        if (g->mode == GLOBAL && capture_mode != RELAXED)
            return spoil(UNSUPPORTED_IN_CAPTURE);
    return OK;
}
#define UNSAFE() do { int u = unsafe(); if (u) return answer(u); } while (0)

/* One more step of the graph that the stream is captured into; lock held. */
static void keep(stream *s, op *o)
{
    graph *g = s->into;
    if (!o->again)
        g->spoilt = 1;
    if (g->tail)
        g->tail->next = o;
    else
        g->head = o;
    g->tail = o;
    s->apart |= s != g->origin;
}

/* What waiting for an event means for captures: -1 nothing, else the answer of the call. */
static int join(void *handle, event *e)
{
    pthread_mutex_lock(&lock);
    stream *s = of(handle);
    int rc = -1;
    if (!s)
        rc = BAD_HANDLE;
    else if (e->into && (!s->into || s->into == e->into)) {
        s->into = e->into;                      /* a stream that waits for a captured event is captured, too */
        if (e->on != s)
            e->on->apart = 0;
        rc = OK;
    } else if (e->into || (s->into && e->on))   /* of another capture, or of before this one */
        rc = spoil(ISOLATION);
    pthread_mutex_unlock(&lock);
    return rc;
}

API int N(ThreadExchangeStreamCaptureMode)(int *mode) { int before = capture_mode; capture_mode = *mode; *mode = before; return OK; }
API int N(StreamIsCapturing)(void *handle, int *now)
{
    pthread_mutex_lock(&lock);
    stream *s = of(handle);
    *now = s && s->into ? 1 + s->into->spoilt : 0;
    pthread_mutex_unlock(&lock);
    return s ? OK : answer(BAD_HANDLE);
}
API int N(StreamBeginCapture)(void *handle, int mode)
{
    if (!handle || ((stream *)handle)->magic != STREAM || ((stream *)handle)->into)
        return answer(handle ? INVALID : UNSUPPORTED_IN_CAPTURE);   /* the default stream cannot be captured */
    graph *g = calloc(1, sizeof *g);
    pthread_mutex_lock(&lock);
    *g = (graph){NULL, NULL, handle, mode, 0, captures};
    captures = g;
    g->origin->into = g;
    pthread_mutex_unlock(&lock);
    return OK;
}
API int N(StreamEndCapture)(void *handle, graph **out)
{
    stream *s = handle;
    if (!s || s->magic != STREAM || !s->into || s->into->origin != s)
        return answer(INVALID);
    pthread_mutex_lock(&lock);
    graph *g = s->into;
    int rc = g->spoilt ? SPOILT : OK;
    for (stream *o = streams; o; o = o->next)
        if (o->into == g) {
            rc = o->apart && !rc ? UNJOINED : rc;
            o->into = NULL;
            o->apart = 0;
        }
    graph **at = &captures;
    while (*at != g)
        at = &(*at)->next;
    *at = g->next;
    pthread_mutex_unlock(&lock);
    *out = rc ? NULL : g;
    return answer(rc);
}
API int N(GraphInstantiateWithFlags)(graph **exec, graph *g, unsigned long long flags) { *exec = g; return flags ? answer(INVALID) : OK; }
static int enqueue(void *handle, step_fn fn, void *arg, again_fn again);
API int N(GraphLaunch)(graph *g, void *handle)
{
    int rc = OK;
    for (op *o = g->head; o && !rc; o = o->next)
        rc = enqueue(handle, o->fn, o->again(o->arg), o->again);
    return answer(rc);
}
