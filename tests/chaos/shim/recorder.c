// Records what a process does to the files below a folder, for reconstructing the disk after a power loss.
//
// Preloaded with LD_PRELOAD. CHAOS_RECORD names the folder of the record, CHAOS_RECORD_ROOT the folder to watch. Each
// line of RECORD/log is: operation, inode, size, path, second path, separated by tabs; where the file's content is
// needed, RECORD/<offset of the line> holds a copy of it. A lock on the log orders the operations of all threads and
// processes. Operations are made with syscall(), so the recorder never records itself.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static char record[PATH_MAX], root[PATH_MAX];

__attribute__((constructor)) static void begin(void) {
  const char *folder = getenv("CHAOS_RECORD"), *watched = getenv("CHAOS_RECORD_ROOT");
  if (folder == NULL || watched == NULL) return;
  snprintf(record, sizeof record, "%s", folder);
  snprintf(root, sizeof root, "%s", watched);
}

static int is_below(const char* path) {
  const size_t length = strlen(root);
  return length > 0 && strncmp(path, root, length) == 0 && path[length] == '/';
}

static int path_of_fd(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return 1;
}

// Writes the absolute path of `name` relative to the folder `at`. Returns whether it is watched.
static int absolute(int at, const char* name, char* path) {
  const int saved = errno;
  char base[PATH_MAX];
  int found = root[0] != '\0' && name != NULL;
  if (found && name[0] == '/') {
    snprintf(path, PATH_MAX, "%s", name);
  } else if (found) {
    found = at == AT_FDCWD ? syscall(SYS_getcwd, base, sizeof base) > 0 : path_of_fd(at, base);
    if (found && snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) found = 0;
  }
  errno = saved;
  return found && is_below(path);
}

static int watched_fd(int fd, char* path) {
  const int saved = errno;
  const int found = root[0] != '\0' && fd >= 0 && path_of_fd(fd, path) && (is_below(path) || strcmp(path, root) == 0);
  errno = saved;
  return found;
}

static int lock_log(void) {
  char path[PATH_MAX + 8];
  snprintf(path, sizeof path, "%s/log", record);
  const int log = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  while (log >= 0 && syscall(SYS_flock, log, LOCK_EX) != 0 && errno == EINTR) {
  }
  return log;
}

static void copy_content(const char* path, long number) {
  char target[PATH_MAX + 32], buffer[1 << 16];
  snprintf(target, sizeof target, "%s/%ld", record, number);
  const int from = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
  const int to = (int)syscall(SYS_openat, AT_FDCWD, target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  long got;
  while (from >= 0 && to >= 0 && (got = syscall(SYS_read, from, buffer, sizeof buffer)) > 0)
    syscall(SYS_write, to, buffer, (size_t)got);
  if (from >= 0) syscall(SYS_close, from);
  if (to >= 0) syscall(SYS_close, to);
}

// Appends a line to the log, which is locked. The content of `path` is copied if it is a file and `with_content`.
static void note(int log, const char* what, const char* path, const char* second, int with_content) {
  char line[2 * PATH_MAX + 128];
  struct stat info;
  memset(&info, 0, sizeof info);
  const char* about = second[0] != '\0' ? second : path;
  const int exists = syscall(SYS_newfstatat, AT_FDCWD, about, &info, AT_SYMLINK_NOFOLLOW) == 0;
  const long at = syscall(SYS_lseek, log, 0, SEEK_END);
  if (with_content && exists && S_ISREG(info.st_mode)) copy_content(about, at);
  const int length = snprintf(line, sizeof line, "%s\t%lu\t%ld\t%s\t%s\n", what, (unsigned long)info.st_ino,
                              (long)info.st_size, path, second);
  syscall(SYS_write, log, line, (size_t)length);
}

// Makes an operation that returns a long, and records it if it succeeds and the path is watched.
#define RECORDED(watched, call, what, path, second, with_content) \
  if (!(watched)) return call;                                    \
  const int log = lock_log();                                     \
  const long result = call;                                       \
  const int error = errno;                                        \
  if (result >= 0) note(log, what, path, second, with_content);   \
  syscall(SYS_close, log);                                        \
  errno = error;                                                  \
  return result

static long open_recorded(int at, const char* name, int flags, mode_t mode) {
  char path[PATH_MAX];
  const int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0;
  if (!writes || !absolute(at, name, path)) return syscall(SYS_openat, at, name, flags, mode);
  const int log = lock_log();
  struct stat info;
  const int existed = syscall(SYS_newfstatat, AT_FDCWD, path, &info, AT_SYMLINK_NOFOLLOW) == 0;
  const long fd = syscall(SYS_openat, at, name, flags, mode);
  const int error = errno;
  if (fd >= 0 && !existed) note(log, "create", path, "", 0);
  if (fd >= 0 && existed && (flags & O_TRUNC) != 0) note(log, "dirty", path, "", 1);
  syscall(SYS_close, log);
  errno = error;
  return fd;
}

#define OPEN(name)                                          \
  EXPORT int name(const char* path, int flags, ...) {       \
    va_list rest;                                           \
    va_start(rest, flags);                                  \
    const mode_t mode = va_arg(rest, mode_t);               \
    va_end(rest);                                           \
    return (int)open_recorded(AT_FDCWD, path, flags, mode); \
  }
#define OPENAT(name)                                          \
  EXPORT int name(int at, const char* path, int flags, ...) { \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    const mode_t mode = va_arg(rest, mode_t);                 \
    va_end(rest);                                             \
    return (int)open_recorded(at, path, flags, mode);         \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

EXPORT int creat(const char* path, mode_t mode) {
  return (int)open_recorded(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

static FILE* fopen_recorded(const char* symbol, const char* name, const char* mode) {
  FILE* (*real)(const char*, const char*) = (FILE * (*)(const char*, const char*)) dlsym(RTLD_NEXT, symbol);
  char path[PATH_MAX];
  if (strpbrk(mode, "wa+") == NULL || !absolute(AT_FDCWD, name, path)) return real(name, mode);
  const int log = lock_log();
  struct stat info;
  const int existed = syscall(SYS_newfstatat, AT_FDCWD, path, &info, AT_SYMLINK_NOFOLLOW) == 0;
  FILE* file = real(name, mode);
  const int error = errno;
  if (file != NULL) note(log, existed ? "dirty" : "create", path, "", existed);
  syscall(SYS_close, log);
  errno = error;
  return file;
}
EXPORT FILE* fopen(const char* name, const char* mode) { return fopen_recorded("fopen", name, mode); }
EXPORT FILE* fopen64(const char* name, const char* mode) { return fopen_recorded("fopen64", name, mode); }

static int is_written(int fd, char* path) {
  return (syscall(SYS_fcntl, fd, F_GETFL) & O_ACCMODE) != O_RDONLY && watched_fd(fd, path);
}

EXPORT int fclose(FILE* file) {
  int (*real)(FILE*) = (int (*)(FILE*))dlsym(RTLD_NEXT, "fclose");
  char path[PATH_MAX];
  RECORDED(file != NULL && is_written(fileno(file), path), real(file), "dirty", path, "", 1);
}

EXPORT int close(int fd) {
  char path[PATH_MAX];
  RECORDED(root[0] != '\0' && is_written(fd, path), syscall(SYS_close, fd), "dirty", path, "", 1);
}

#define WRITES(type, name, parameters, call)                    \
  EXPORT type name parameters {                                 \
    char path[PATH_MAX];                                        \
    RECORDED(watched_fd(fd, path), call, "dirty", path, "", 0); \
  }
WRITES(ssize_t, write, (int fd, const void* data, size_t size), syscall(SYS_write, fd, data, size))
WRITES(ssize_t, pwrite, (int fd, const void* data, size_t size, off_t at), syscall(SYS_pwrite64, fd, data, size, at))
WRITES(ssize_t, pwrite64, (int fd, const void* data, size_t size, off_t at), syscall(SYS_pwrite64, fd, data, size, at))
WRITES(ssize_t, writev, (int fd, const struct iovec* parts, int count), syscall(SYS_writev, fd, parts, count))
WRITES(int, ftruncate, (int fd, off_t size), syscall(SYS_ftruncate, fd, size))
WRITES(int, ftruncate64, (int fd, off_t size), syscall(SYS_ftruncate, fd, size))
WRITES(int, fallocate, (int fd, int mode, off_t at, off_t size), syscall(SYS_fallocate, fd, mode, at, size))
WRITES(ssize_t, sendfile, (int fd, int from, off_t* at, size_t size), syscall(SYS_sendfile, fd, from, at, size))

// Returns the error number, unlike the others. The C library's own falls back to writing, which is not seen here.
EXPORT int posix_fallocate(int fd, off_t at, off_t size) { return fallocate(fd, 0, at, size) == 0 ? 0 : errno; }

EXPORT ssize_t copy_file_range(int from, off_t* from_at, int fd, off_t* at, size_t size, unsigned flags) {
  char path[PATH_MAX];
  RECORDED(watched_fd(fd, path), syscall(SYS_copy_file_range, from, from_at, fd, at, size, flags), "dirty", path, "",
           0);
}

EXPORT int truncate(const char* name, off_t size) {
  char path[PATH_MAX];
  RECORDED(absolute(AT_FDCWD, name, path), syscall(SYS_truncate, name, size), "dirty", path, "", 0);
}

EXPORT int fsync(int fd) {
  char path[PATH_MAX];
  RECORDED(watched_fd(fd, path), syscall(SYS_fsync, fd), "sync", path, "", 1);
}
EXPORT int fdatasync(int fd) {
  char path[PATH_MAX];
  RECORDED(watched_fd(fd, path), syscall(SYS_fdatasync, fd), "sync", path, "", 1);
}

static long rename_recorded(int at, const char* old, int to, const char* new, unsigned flags) {
  char path[PATH_MAX], second[PATH_MAX];
  const int watched = absolute(at, old, path) | absolute(to, new, second);
  RECORDED(watched, syscall(SYS_renameat2, at, old, to, new, flags), "rename", path, second, 1);
}
EXPORT int rename(const char* old, const char* new) { return (int)rename_recorded(AT_FDCWD, old, AT_FDCWD, new, 0); }
EXPORT int renameat(int at, const char* old, int to, const char* new) {
  return (int)rename_recorded(at, old, to, new, 0);
}
EXPORT int renameat2(int at, const char* old, int to, const char* new, unsigned flags) {
  return (int)rename_recorded(at, old, to, new, flags);
}

EXPORT int link(const char* old, const char* new) {
  char path[PATH_MAX], second[PATH_MAX];
  const int watched = absolute(AT_FDCWD, old, path) & absolute(AT_FDCWD, new, second);
  RECORDED(watched, syscall(SYS_linkat, AT_FDCWD, old, AT_FDCWD, new, 0), "link", path, second, 1);
}

static long unlink_recorded(int at, const char* name, int flags) {
  char path[PATH_MAX];
  RECORDED(absolute(at, name, path), syscall(SYS_unlinkat, at, name, flags), "remove", path, "", 0);
}
EXPORT int unlink(const char* name) { return (int)unlink_recorded(AT_FDCWD, name, 0); }
EXPORT int unlinkat(int at, const char* name, int flags) { return (int)unlink_recorded(at, name, flags); }
EXPORT int rmdir(const char* name) { return (int)unlink_recorded(AT_FDCWD, name, AT_REMOVEDIR); }

static long mkdir_recorded(int at, const char* name, mode_t mode) {
  char path[PATH_MAX];
  RECORDED(absolute(at, name, path), syscall(SYS_mkdirat, at, name, mode), "mkdir", path, "", 0);
}
EXPORT int mkdir(const char* name, mode_t mode) { return (int)mkdir_recorded(AT_FDCWD, name, mode); }
EXPORT int mkdirat(int at, const char* name, mode_t mode) { return (int)mkdir_recorded(at, name, mode); }
