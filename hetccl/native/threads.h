/* SPDX-License-Identifier: Apache-2.0
 * Threads of our own, in which no signal is delivered: signals belong to the program's threads, Python's handlers among them.
 */
#ifndef HETCCL_THREADS_H
#define HETCCL_THREADS_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE                         /* whoever includes wait.h behind this needs it */
#endif
#include <pthread.h>
#include <signal.h>

/* As pthread_create. `attr` may be NULL. */
static inline int hetccl_thread_start(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(thread, attr, body, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}
#endif
