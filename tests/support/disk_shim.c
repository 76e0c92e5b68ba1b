/* Stands between a server and its disk and clock (LD_PRELOAD). What it does is said in a shared file
 * of three 64-bit numbers: hold (syncs wait while it is not 0), delay_us (each sync takes so much
 * longer), clock_step_us (added to the time of day). After each sync one line "size path" tells how
 * much of which file is on the disk for certain. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t hold, delay_us, clock_step_us;
};

static struct control *control;
static int synced_log = -1;
static int (*real_fsync)(int), (*real_fdatasync)(int);
static int (*real_gettimeofday)(struct timeval *, void *);
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static time_t (*real_time)(time_t *);

__attribute__((constructor)) static void begin(void) {
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_gettimeofday = dlsym(RTLD_NEXT, "gettimeofday");
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_time = dlsym(RTLD_NEXT, "time");
    const char *path = getenv("DUPLEX_SHIM_CONTROL"), *log = getenv("DUPLEX_SHIM_SYNCED");
    if (!path || !log) _exit(97);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    synced_log = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || synced_log < 0) _exit(98);
    control = mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, fd, 0);
    if (control == MAP_FAILED) _exit(99);
    close(fd);
}

static int synced(int fd, int (*really)(int)) {
    struct stat before;
    char link[64], path[4096], line[4200];
    int known = fstat(fd, &before) == 0;
    if (control->delay_us) usleep(control->delay_us);
    while (control->hold) usleep(1000);
    int result = really(fd);
    if (result || !known) return result;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return result;
    path[length] = 0;
    int size = snprintf(line, sizeof line, "%lld %s\n", (long long)before.st_size, path);
    if (write(synced_log, line, size) != size) _exit(96);
    return result;
}

int fsync(int fd) { return synced(fd, real_fsync); }
int fdatasync(int fd) { return synced(fd, real_fdatasync); }

int gettimeofday(struct timeval *now, void *zone) {
    int result = real_gettimeofday(now, zone);
    if (!result && control) {
        int64_t at_us = now->tv_sec * 1000000LL + now->tv_usec + control->clock_step_us;
        now->tv_sec = at_us / 1000000, now->tv_usec = at_us % 1000000;
    }
    return result;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real_clock_gettime(clock, now);
    if (!result && control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t at_us = now->tv_sec * 1000000LL + now->tv_nsec / 1000 + control->clock_step_us;
        now->tv_sec = at_us / 1000000, now->tv_nsec = at_us % 1000000 * 1000;
    }
    return result;
}

time_t time(time_t *into) {
    time_t now = real_time(NULL) + (control ? control->clock_step_us / 1000000 : 0);
    if (into) *into = now;
    return now;
}
