/* Preloaded into a process: logs what it does to files below one folder, in the order in which it is done.
 *
 * RECORD_ROOT is that folder (a real path), RECORD_LOG the file of the log; support/disk.py reads it.
 * RECORD_FULL names a file: while that is there, no file below the folder can grow, as on a full disk.
 *
 * Where the C library has two names for one function (open, open64), both are here. What cannot be logged (memory
 * maps are not seen at all; copying inside the kernel) is logged as '!', so that nobody takes the log for whole.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct head {
    uint32_t text_bytes, data_bytes, thread;
    char kind;
    char filler[3];
    uint64_t inode;
    int64_t offset;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* what is done and what is logged are one */
static int log_fd = -1;
static const char *root, *full;
static size_t root_length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RECORD_LOG");
    root = getenv("RECORD_ROOT");
    full = getenv("RECORD_FULL");
    root_length = root ? strlen(root) : 0;
    if (path)
        log_fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void record(char kind, uint64_t inode, int64_t offset, const char *text, const void *data, size_t count) {
    struct head head = {.text_bytes = strlen(text), .data_bytes = count, .kind = kind, .inode = inode, .offset = offset};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)text, head.text_bytes}, {(void *)data, count}};
    int before = errno;
    head.thread = syscall(SYS_gettid);
    if (log_fd >= 0 && syscall(SYS_writev, log_fd, parts, 3) < 0)
        abort();
    errno = before;
}

/* For the process itself: something was promised, or is going to be done. */
void record_mark(const char *text) { record('X', 0, 0, text, "", 0); }

static int below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path of `path` in `out` (PATH_MAX bytes); whether it is below the folder. */
static int resolve(int folder, const char *path, char *out) {
    char base[PATH_MAX], link[64];
    ssize_t length;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return below(out);
    }
    if (folder == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    length = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
    base[length < 0 ? 0 : length] = 0;
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX)
        return 0;
    return below(out);
}

/* Whether an open file or folder is below the folder; its path in `out`, its state in `state`. */
static int holds(int fd, char *out, struct stat *state) {
    char link[64];
    ssize_t length;
    int before = errno;
    if (!root_length || fstat(fd, state) || !(S_ISREG(state->st_mode) || S_ISDIR(state->st_mode)))
        return errno = before, 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
    errno = before;
    return below(out);
}

static int no_room(void) {
    if (!full || syscall(SYS_faccessat, AT_FDCWD, full, F_OK))
        return 0;
    errno = ENOSPC;
    return 1;
}

static int there(const char *path) {
    struct stat state;
    int before = errno, found = !lstat(path, &state);
    errno = before;
    return found;
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    struct stat state;
    int fd, was_there;
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolve(folder, path, whole))
        return syscall(SYS_openat, folder, path, flags, mode);
    pthread_mutex_lock(&lock);
    was_there = there(whole);
    fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && !fstat(fd, &state)) {
        if (!was_there)
            record('C', state.st_ino, 0, whole, "", 0);
        else if (flags & O_TRUNC)
            record('T', state.st_ino, 0, "", "", 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE_OF(flags, last)                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list more;                                                                                                  \
        va_start(more, last);                                                                                          \
        mode = va_arg(more, int);                                                                                      \
        va_end(more);                                                                                                  \
    }

int open(const char *path, int flags, ...) {
    MODE_OF(flags, flags)
    return opened(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE_OF(flags, flags)
    return opened(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE_OF(flags, flags)
    return opened(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE_OF(flags, flags)
    return opened(folder, path, flags, mode);
}
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Write at `offset`, or where the file stands when that is below 0. */
static ssize_t written(int fd, const void *data, size_t count, off_t offset) {
    char path[PATH_MAX];
    struct stat state;
    ssize_t done;
    if (!holds(fd, path, &state))
        return offset < 0 ? syscall(SYS_write, fd, data, count) : syscall(SYS_pwrite64, fd, data, count, offset);
    pthread_mutex_lock(&lock);
    if ((offset < 0 || offset + (off_t)count > state.st_size) && no_room()) {
        pthread_mutex_unlock(&lock);
        return -1;
    }
    done = offset < 0 ? syscall(SYS_write, fd, data, count) : syscall(SYS_pwrite64, fd, data, count, offset);
    if (done > 0)
        record('W', state.st_ino, offset < 0 ? lseek(fd, 0, SEEK_CUR) - done : offset, "", data, done);
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t write(int fd, const void *data, size_t count) { return written(fd, data, count, -1); }
ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) { return written(fd, data, count, offset); }
ssize_t pwrite64(int fd, const void *data, size_t count, off_t offset) { return written(fd, data, count, offset); }

static int cut(int fd, off_t length) {
    char path[PATH_MAX];
    struct stat state;
    int failed, ours = holds(fd, path, &state);
    if (ours && length > state.st_size && no_room())
        return -1;
    pthread_mutex_lock(&lock);
    failed = syscall(SYS_ftruncate, fd, length);
    if (ours && !failed)
        record('T', state.st_ino, length, "", "", 0);
    pthread_mutex_unlock(&lock);
    return failed;
}

int ftruncate(int fd, off_t length) { return cut(fd, length); }
int ftruncate64(int fd, off_t length) { return cut(fd, length); }

static int synced(int fd, int data_only) {
    char path[PATH_MAX];
    struct stat state;
    int failed;
    if (!holds(fd, path, &state))
        return syscall(data_only ? SYS_fdatasync : SYS_fsync, fd);
    pthread_mutex_lock(&lock);
    failed = syscall(data_only ? SYS_fdatasync : SYS_fsync, fd);
    if (!failed)
        record(S_ISDIR(state.st_mode) ? 'f' : 'F', state.st_ino, 0, path, "", 0);
    pthread_mutex_unlock(&lock);
    return failed;
}

int fsync(int fd) { return synced(fd, 0); }
int fdatasync(int fd) { return synced(fd, 1); }

/* Names: `call` is done and, when it succeeds below the folder, logged with one path or two. */
#define NAMED(kind, folder, path, other, call)                                                                         \
    char first[PATH_MAX], second[PATH_MAX] = "";                                                                       \
    int failed, ours = resolve(folder, path, first);                                                                   \
    ours |= other;                                                                                                     \
    pthread_mutex_lock(&lock);                                                                                         \
    failed = call;                                                                                                     \
    if (ours && !failed)                                                                                               \
        record(kind, 0, 0, first, second, strlen(second));                                                             \
    pthread_mutex_unlock(&lock);                                                                                       \
    return failed;

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    NAMED('R', from_folder, from, resolve(to_folder, to, second),
          syscall(SYS_renameat2, from_folder, from, to_folder, to, flags))
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renameat2(from_folder, from, to_folder, to, 0);
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    NAMED('L', from_folder, from, resolve(to_folder, to, second),
          syscall(SYS_linkat, from_folder, from, to_folder, to, flags))
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int folder, const char *path, int flags) {
    NAMED('U', folder, path, 0, syscall(SYS_unlinkat, folder, path, flags))
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    NAMED('M', folder, path, 0, syscall(SYS_mkdirat, folder, path, mode))
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int symlinkat(const char *target, int folder, const char *path) {
    char whole[PATH_MAX];
    int failed, ours = resolve(folder, path, whole);
    pthread_mutex_lock(&lock);
    failed = syscall(SYS_symlinkat, target, folder, path);
    if (ours && !failed)
        record('S', 0, 0, whole, target, strlen(target));
    pthread_mutex_unlock(&lock);
    return failed;
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

/* What is not followed. */
static void unseen(int fd) {
    char path[PATH_MAX];
    struct stat state;
    if (holds(fd, path, &state))
        record('!', state.st_ino, 0, path, "", 0);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    unseen(fd);
    return syscall(SYS_writev, fd, parts, count);
}
ssize_t sendfile(int out, int in, off_t *offset, size_t count) {
    unseen(out);
    return syscall(SYS_sendfile, out, in, offset, count);
}
ssize_t sendfile64(int out, int in, off_t *offset, size_t count) { return sendfile(out, in, offset, count); }
ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t count, unsigned flags) {
    unseen(out);
    return syscall(SYS_copy_file_range, in, from, out, to, count, flags);
}
int fallocate(int fd, int mode, off_t offset, off_t count) {
    unseen(fd);
    return syscall(SYS_fallocate, fd, mode, offset, count);
}
int fallocate64(int fd, int mode, off_t offset, off_t count) { return fallocate(fd, mode, offset, count); }
