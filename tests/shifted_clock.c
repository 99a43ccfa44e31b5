/* A wall clock that somebody sets while processes run, as a library to preload.

   The seconds by which it is set stand in a file of eight bytes, whose path is in the
   environment as SHIFTED_CLOCK. Each process maps the file, so they all see a change at
   once. What the kernel measures by its own clock is shifted in the other direction: the
   deadline of a wait, as it begins. The start of the machine in /proc/stat moves with
   the clock.

   Deliberately not here: times of files, waits that have begun, and programs that are
   linked statically. All of these keep the clock of the machine. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shared;

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int file = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) shared = mapped;
    close(file);
}

/* Other libraries may ask for the time before this one is ready. */
static int64_t shift(void) { return shared ? *shared : 0; }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* ------------------------------------------------------------------- the clock */

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) next;
    if (!next) next = NEXT(clock_gettime);
    int result = next(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*next)(struct timeval *, void *);
    if (!next) next = (int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday");
    int result = next(now, zone);
    if (!result) now->tv_sec += shift();
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* ------------------------------------------------------------------- deadlines */

static struct timespec kernels(const struct timespec *deadline) {
    struct timespec unshifted = *deadline;
    /* A smaller number counts from the start of the machine. */
    if (unshifted.tv_sec > 1000000000) unshifted.tv_sec -= shift();
    return unshifted;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static __typeof__(&sem_timedwait) next;
    if (!next) next = NEXT(sem_timedwait);
    struct timespec unshifted = kernels(deadline);
    return next(semaphore, &unshifted);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition,
                           pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static __typeof__(&pthread_cond_timedwait) next;
    /* Without its version the oldest is found, which has other conditions. */
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) next = NEXT(pthread_cond_timedwait);
    struct timespec unshifted = kernels(deadline);
    return next(condition, mutex, &unshifted);
}

/* Libraries wait for a futex without a function of its own. */
long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (!next) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    struct timespec unshifted;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
        unshifted = kernels((const struct timespec *)a[3]);
        a[3] = (long)&unshifted;
    }
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* ------------------------------------------------------------- the machine's start */

static int shifted_stat(int file) {
    int copy = memfd_create("stat", MFD_CLOEXEC);
    FILE *from = fdopen(file, "r"), *to = fdopen(dup(copy), "w");
    char line[8192];
    long long start;
    while (fgets(line, sizeof line, from))
        if (sscanf(line, "btime %lld", &start) == 1)
            fprintf(to, "btime %lld\n", start + (long long)shift());
        else
            fputs(line, to);
    fclose(from);
    fclose(to);
    lseek(copy, 0, SEEK_SET);
    return copy;
}

static int opened(const char *path, int flags, mode_t mode) {
    int file = openat(AT_FDCWD, path, flags, mode);
    return file >= 0 && shift() && !strcmp(path, "/proc/stat") ? shifted_stat(file) : file;
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    return opened(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    return opened(path, flags, mode);
}
