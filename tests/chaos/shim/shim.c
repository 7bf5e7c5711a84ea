// Counts the file operations of a process below some folders and fails one of them, as the plan in a mapped file says.
//
// Preloaded with LD_PRELOAD. The plan is shared by all processes that a command starts, so that an operation has one
// number whichever of them does it. Operations are made with syscall(), which no other interposer sees; only stdio needs
// the functions of the C library, because those call no exported write().

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAGIC 0x6d696873u

enum call { OPEN, CREATE, WRITE, READ, SYNC, RENAME, MKDIR, TRUNCATE, MAP, REMOVE, NUM_CALLS };
enum action { COUNT_ONLY, KILL, FAIL_ONCE, FAIL_ON, SHORT };

// plan.py packs the same structure.
struct plan {
  uint32_t magic;
  int32_t call, action, error;
  uint64_t nth;                // counted from 1
  uint64_t counts[NUM_CALLS];  // of the operations so far
  uint64_t num_injected;
  char roots[2048];  // absolute paths, each followed by a line feed
};

static struct plan* the_plan;

EXPORT int chaos_use(const char* path) {
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return errno;
  void* found = (void*)syscall(SYS_mmap, NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (found == MAP_FAILED) return errno;
  if (((struct plan*)found)->magic != MAGIC) return EINVAL;
  the_plan = found;
  return 0;
}

__attribute__((constructor)) static void from_environment(void) {
  const char* path = getenv("CHAOS_PLAN");
  if (path != NULL) chaos_use(path);
}

static int is_below(const char* path) {
  for (const char* root = the_plan->roots; *root != '\0';) {
    const char* end = strchr(root, '\n');
    const size_t length = (size_t)(end - root);
    if (strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == '\0')) return 1;
    root = end + 1;
  }
  return 0;
}

static int link_of(const char* link, char* path) {
  const ssize_t length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return 1;
}

static int is_watched_fd(int fd) {
  char link[64], path[PATH_MAX];
  if (the_plan == NULL || fd < 0) return 0;
  const int saved = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const int found = link_of(link, path) && is_below(path);
  errno = saved;
  return found;
}

static int is_watched_path(int folder, const char* name) {
  char link[64], path[2 * PATH_MAX + 2];
  if (the_plan == NULL || name == NULL) return 0;
  if (name[0] == '/') return is_below(name);
  const int saved = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  const int is_known = link_of(folder == AT_FDCWD ? "/proc/self/cwd" : link, path);
  errno = saved;
  if (!is_known) return 0;
  strcat(path, "/");
  strncat(path, name, PATH_MAX);
  return is_below(path);
}

static void die(void) {
  syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  for (;;) pause();
}

// Counts an operation. Returns what to do with it; COUNT_ONLY means that it takes place as usual.
static enum action turn(enum call call) {
  const uint64_t number = __atomic_add_fetch(&the_plan->counts[call], 1, __ATOMIC_SEQ_CST);
  if (the_plan->action == COUNT_ONLY || the_plan->call != (int)call) return COUNT_ONLY;
  if (number != the_plan->nth && !(the_plan->action == FAIL_ON && number > the_plan->nth)) return COUNT_ONLY;
  __atomic_add_fetch(&the_plan->num_injected, 1, __ATOMIC_SEQ_CST);
  return (enum action)the_plan->action;
}

// For operations that either take place or not: kills, or sets errno and returns 1, or returns 0.
static int fails(enum call call) {
  switch (turn(call)) {
    case KILL:
      die();
      return 1;
    case FAIL_ONCE:
    case FAIL_ON:
      errno = the_plan->error;
      return 1;
    default:
      return 0;
  }
}

// For transfers: sets how many bytes to transfer, and returns 1 if the call fails. A killed write leaves half behind.
static int fails_transfer(enum call call, size_t* num_bytes, int* dies) {
  *dies = 0;
  switch (turn(call)) {
    case KILL:
      if (call == READ || *num_bytes < 2) die();
      *num_bytes /= 2;
      *dies = 1;
      return 0;
    case FAIL_ONCE:
    case FAIL_ON:
      errno = the_plan->error;
      return 1;
    case SHORT:
      *num_bytes = *num_bytes > 1 ? *num_bytes / 2 : *num_bytes;
      return 0;
    default:
      return 0;
  }
}

#define TRANSFER(call, fd, size, made)                                        \
  do {                                                                        \
    int dies = 0;                                                             \
    if (is_watched_fd(fd) && fails_transfer(call, &(size), &dies)) return -1; \
    const ssize_t done = (made);                                              \
    if (dies) die();                                                          \
    return done;                                                              \
  } while (0)

EXPORT ssize_t write(int fd, const void* from, size_t size) {
  TRANSFER(WRITE, fd, size, syscall(SYS_write, fd, from, size));
}

EXPORT ssize_t pwrite64(int fd, const void* from, size_t size, off64_t at) {
  TRANSFER(WRITE, fd, size, syscall(SYS_pwrite64, fd, from, size, at));
}

EXPORT ssize_t pwrite(int fd, const void* from, size_t size, off_t at) { return pwrite64(fd, from, size, at); }

EXPORT ssize_t read(int fd, void* into, size_t size) { TRANSFER(READ, fd, size, syscall(SYS_read, fd, into, size)); }

EXPORT ssize_t __read_chk(int fd, void* into, size_t size, size_t room) {
  if (size > room) abort();
  return read(fd, into, size);
}

EXPORT ssize_t pread64(int fd, void* into, size_t size, off64_t at) {
  TRANSFER(READ, fd, size, syscall(SYS_pread64, fd, into, size, at));
}

EXPORT ssize_t pread(int fd, void* into, size_t size, off_t at) { return pread64(fd, into, size, at); }

EXPORT ssize_t __pread_chk(int fd, void* into, size_t size, off_t at, size_t room) {
  if (size > room) abort();
  return pread64(fd, into, size, at);
}

EXPORT ssize_t __pread64_chk(int fd, void* into, size_t size, off64_t at, size_t room) {
  if (size > room) abort();
  return pread64(fd, into, size, at);
}

EXPORT ssize_t sendfile64(int to, int from, off64_t* at, size_t size) {
  TRANSFER(WRITE, to, size, syscall(SYS_sendfile, to, from, at, size));
}

EXPORT ssize_t sendfile(int to, int from, off_t* at, size_t size) { return sendfile64(to, from, at, size); }

EXPORT ssize_t copy_file_range(int from, off64_t* at, int to, off64_t* into, size_t size, unsigned flags) {
  TRANSFER(WRITE, to, size, syscall(SYS_copy_file_range, from, at, to, into, size, flags));
}

// A short transfer of several buffers ends inside the first.
EXPORT ssize_t writev(int fd, const struct iovec* parts, int num_parts) {
  if (!is_watched_fd(fd) || num_parts < 1) return syscall(SYS_writev, fd, parts, num_parts);
  size_t size = parts[0].iov_len;
  int dies = 0;
  if (fails_transfer(WRITE, &size, &dies)) return -1;
  const int is_whole = size == parts[0].iov_len && !dies;
  const ssize_t done =
      is_whole ? syscall(SYS_writev, fd, parts, num_parts) : syscall(SYS_write, fd, parts[0].iov_base, size);
  if (dies) die();
  return done;
}

EXPORT ssize_t readv(int fd, const struct iovec* parts, int num_parts) {
  if (!is_watched_fd(fd) || num_parts < 1) return syscall(SYS_readv, fd, parts, num_parts);
  size_t size = parts[0].iov_len;
  int dies = 0;
  if (fails_transfer(READ, &size, &dies)) return -1;
  return size == parts[0].iov_len ? syscall(SYS_readv, fd, parts, num_parts)
                                  : syscall(SYS_read, fd, parts[0].iov_base, size);
}

static int opened(int folder, const char* name, int flags, mode_t mode) {
  if (is_watched_path(folder, name) && fails(flags & O_CREAT ? CREATE : OPEN)) return -1;
  return (int)syscall(SYS_openat, folder, name, flags, mode);
}

#define MODE_OF(flags, mode)                   \
  mode_t mode = 0;                             \
  if ((flags) & (O_CREAT | __O_TMPFILE)) {     \
    va_list more;                              \
    va_start(more, flags);                     \
    mode = (mode_t)va_arg(more, unsigned int); \
    va_end(more);                              \
  }

EXPORT int open(const char* name, int flags, ...) {
  MODE_OF(flags, mode)
  return opened(AT_FDCWD, name, flags, mode);
}

EXPORT int open64(const char* name, int flags, ...) {
  MODE_OF(flags, mode)
  return opened(AT_FDCWD, name, flags | O_LARGEFILE, mode);
}

EXPORT int openat(int folder, const char* name, int flags, ...) {
  MODE_OF(flags, mode)
  return opened(folder, name, flags, mode);
}

EXPORT int openat64(int folder, const char* name, int flags, ...) {
  MODE_OF(flags, mode)
  return opened(folder, name, flags | O_LARGEFILE, mode);
}

EXPORT int __open_2(const char* name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
EXPORT int __open64_2(const char* name, int flags) { return opened(AT_FDCWD, name, flags | O_LARGEFILE, 0); }
EXPORT int __openat_2(int folder, const char* name, int flags) { return opened(folder, name, flags, 0); }
EXPORT int __openat64_2(int folder, const char* name, int flags) {
  return opened(folder, name, flags | O_LARGEFILE, 0);
}
EXPORT int creat(const char* name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
EXPORT int creat64(const char* name, mode_t mode) { return creat(name, mode); }

EXPORT int fsync(int fd) { return is_watched_fd(fd) && fails(SYNC) ? -1 : (int)syscall(SYS_fsync, fd); }
EXPORT int fdatasync(int fd) { return is_watched_fd(fd) && fails(SYNC) ? -1 : (int)syscall(SYS_fdatasync, fd); }

static int renamed(int folder, const char* name, int to_folder, const char* to, unsigned flags) {
  if (is_watched_path(to_folder, to) && fails(RENAME)) return -1;
  return (int)syscall(SYS_renameat2, folder, name, to_folder, to, flags);
}

EXPORT int rename(const char* name, const char* to) { return renamed(AT_FDCWD, name, AT_FDCWD, to, 0); }
EXPORT int renameat(int folder, const char* name, int to_folder, const char* to) {
  return renamed(folder, name, to_folder, to, 0);
}
EXPORT int renameat2(int folder, const char* name, int to_folder, const char* to, unsigned flags) {
  return renamed(folder, name, to_folder, to, flags);
}

EXPORT int mkdirat(int folder, const char* name, mode_t mode) {
  return is_watched_path(folder, name) && fails(MKDIR) ? -1 : (int)syscall(SYS_mkdirat, folder, name, mode);
}
EXPORT int mkdir(const char* name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

EXPORT int ftruncate64(int fd, off64_t size) {
  return is_watched_fd(fd) && fails(TRUNCATE) ? -1 : (int)syscall(SYS_ftruncate, fd, size);
}
EXPORT int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
EXPORT int truncate64(const char* name, off64_t size) {
  return is_watched_path(AT_FDCWD, name) && fails(TRUNCATE) ? -1 : (int)syscall(SYS_truncate, name, size);
}
EXPORT int truncate(const char* name, off_t size) { return truncate64(name, size); }

// posix_fallocate returns its error and leaves errno alone.
EXPORT int posix_fallocate64(int fd, off64_t at, off64_t size) {
  const int saved = errno;
  const int failed =
      (is_watched_fd(fd) && fails(TRUNCATE)) || (int)syscall(SYS_fallocate, fd, 0, at, size) != 0 ? errno : 0;
  errno = saved;
  return failed;
}
EXPORT int posix_fallocate(int fd, off_t at, off_t size) { return posix_fallocate64(fd, at, size); }

EXPORT void* mmap64(void* where, size_t size, int protection, int flags, int fd, off64_t at) {
  if (!(flags & MAP_ANONYMOUS) && is_watched_fd(fd) && fails(MAP)) return MAP_FAILED;
  return (void*)syscall(SYS_mmap, where, size, protection, flags, fd, at);
}
EXPORT void* mmap(void* where, size_t size, int protection, int flags, int fd, off_t at) {
  return mmap64(where, size, protection, flags, fd, at);
}

EXPORT int unlinkat(int folder, const char* name, int flags) {
  return is_watched_path(folder, name) && fails(REMOVE) ? -1 : (int)syscall(SYS_unlinkat, folder, name, flags);
}
EXPORT int unlink(const char* name) { return unlinkat(AT_FDCWD, name, 0); }
EXPORT int rmdir(const char* name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
EXPORT int remove(const char* name) {
  const int removed = unlink(name);
  return removed != 0 && errno == EISDIR ? rmdir(name) : removed;
}

#define REAL(name, type) \
  static type real;      \
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, name)

typedef FILE* opener(const char*, const char*);

EXPORT FILE* fopen64(const char* name, const char* how) {
  REAL("fopen64", opener*);
  if (is_watched_path(AT_FDCWD, name) && fails(how[0] == 'r' ? OPEN : CREATE)) return NULL;
  return real(name, how);
}
EXPORT FILE* fopen(const char* name, const char* how) { return fopen64(name, how); }

typedef size_t stream_writer(const void*, size_t, size_t, FILE*);
typedef size_t stream_reader(void*, size_t, size_t, FILE*);

// Both return how many items were transferred, and what is missing is the error.
EXPORT size_t fwrite(const void* from, size_t size, size_t count, FILE* stream) {
  REAL("fwrite", stream_writer*);
  int dies = 0;
  if (is_watched_fd(fileno(stream)) && fails_transfer(WRITE, &count, &dies)) return 0;
  const size_t done = real(from, size, count, stream);
  if (dies) {
    fflush(stream);
    die();
  }
  return done;
}

EXPORT size_t fread(void* into, size_t size, size_t count, FILE* stream) {
  REAL("fread", stream_reader*);
  int dies = 0;
  if (is_watched_fd(fileno(stream)) && fails_transfer(READ, &count, &dies)) return 0;
  return real(into, size, count, stream);
}

typedef int stream_action(FILE*);

EXPORT int fflush(FILE* stream) {
  REAL("fflush", stream_action*);
  if (stream != NULL && is_watched_fd(fileno(stream)) && fails(WRITE)) return EOF;
  return real(stream);
}
