/* powerdisk: a FUSE file system with one file, /disk, that is a disk with a volatile cache.
 *
 * Each write, in the order in which it was taken, and each flush go into a log with CLOCK_MONOTONIC, so that crash
 * images can be made afterwards (crashes.py). A flush covers what was logged before it; its time is the one at which it
 * ended, taken before it is answered: whoever has seen the flush end finds it in the log with an earlier time.
 *
 * usage: powerdisk IMAGE LOG MOUNTPOINT FLUSH_US WRITE_US
 * IMAGE is changed. LOG.idx: records, LOG.dat: contents. Each flush, and each write, takes so many microseconds.
 */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, FLUSH = 2 };
struct record { uint64_t time, offset, place; uint32_t kind, length; };

static int image, idx, dat;
static off_t size_;
static uint64_t place;
static long flush_us, write_us;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void all(int fd, const void *data, size_t length) {
    while (length) {
        ssize_t done = write(fd, data, length);
        if (done <= 0) { perror("log"); _exit(9); }
        data = (const char *)data + done, length -= done;
    }
}
static int get_attributes(const char *path, struct stat *s, struct fuse_file_info *f) {
    (void)f;
    memset(s, 0, sizeof *s);
    if (!strcmp(path, "/")) { s->st_mode = S_IFDIR | 0755; s->st_nlink = 2; return 0; }
    if (!strcmp(path, "/disk")) { s->st_mode = S_IFREG | 0600; s->st_nlink = 1; s->st_size = size_; return 0; }
    return -ENOENT;
}
static int open_(const char *path, struct fuse_file_info *f) { (void)path; f->direct_io = 1; return 0; }
static int read_(const char *path, char *data, size_t length, off_t offset, struct fuse_file_info *f) {
    (void)path, (void)f;
    ssize_t n = pread(image, data, length, offset);
    return n < 0 ? -errno : n;
}
static int write_(const char *path, const char *data, size_t length, off_t offset, struct fuse_file_info *f) {
    (void)path, (void)f;
    pthread_mutex_lock(&lock);
    ssize_t n = pwrite(image, data, length, offset);
    if (write_us) usleep(write_us);
    if (n == (ssize_t)length) {
        all(dat, data, length);
        struct record r = {now(), offset, place, WRITE, length};
        place += length;
        all(idx, &r, sizeof r);
    }
    pthread_mutex_unlock(&lock);
    return n == (ssize_t)length ? n : -EIO;
}
static int fsync_(const char *path, int data_only, struct fuse_file_info *f) {
    (void)path, (void)data_only, (void)f;
    pthread_mutex_lock(&lock);   /* it covers what is logged by now: nothing more is, while it lasts */
    if (flush_us) usleep(flush_us);
    struct record r = {now(), 0, 0, FLUSH, 0};
    all(idx, &r, sizeof r);
    pthread_mutex_unlock(&lock);
    return 0;
}
static void *init(struct fuse_conn_info *c, struct fuse_config *f) {
    f->direct_io = 1;
    c->max_write = 1 << 20;
    c->want |= c->capable & FUSE_CAP_ASYNC_DIO;
    return NULL;
}
static const struct fuse_operations operations = {
    .getattr = get_attributes, .open = open_, .read = read_, .write = write_, .fsync = fsync_, .init = init,
};
int main(int argc, char **argv) {
    if (argc != 6) return 2;
    char name[4096];
    struct stat s;
    image = open(argv[1], O_RDWR);
    snprintf(name, sizeof name, "%s.idx", argv[2]);
    idx = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    snprintf(name, sizeof name, "%s.dat", argv[2]);
    dat = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (image < 0 || idx < 0 || dat < 0 || fstat(image, &s)) { perror("open"); return 1; }
    size_ = s.st_size;
    flush_us = atol(argv[4]), write_us = atol(argv[5]);
    struct fuse_args arguments = FUSE_ARGS_INIT(1, argv);
    struct fuse *fuse = fuse_new(&arguments, &operations, sizeof operations, NULL);
    if (!fuse || fuse_mount(fuse, argv[3])) return 1;
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(config, 4);
    return fuse_loop_mt(fuse, config);
}
