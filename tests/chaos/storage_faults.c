// LD_PRELOAD shim: the n-th call that changes files below a folder fails or is cut short.
//
// arm(kind, nth, folder) counts calls from now on; calls() returns how many there were, fired() whether one
// was changed. Only the folder's files count, so that a test reaches the writer under test and nothing else.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kOff, kNoSpace, kInputOutput, kShort };

static char folder[PATH_MAX];
static int kind = kOff, nth = 0, seen = 0, did_fire = 0;

void arm(int which, int number, const char* where) {
  snprintf(folder, sizeof folder, "%s", where);
  nth = number, seen = 0, did_fire = 0, kind = which;
}
void disarm(void) { kind = kOff; }
int calls(void) { return seen; }
int fired(void) { return did_fire; }

static int below_path(const char* path) { return path != NULL && strncmp(path, folder, strlen(folder)) == 0; }

static int below(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return below_path(path);
}

// Returns whether this call is the one to change.
static int is_due(int applies) {
  if (kind == kOff || !applies) return 0;
  if (++seen != nth) return 0;
  did_fire = 1;
  return 1;
}

static int fail(void) {
  errno = kind == kNoSpace ? ENOSPC : EIO;
  return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void* data, size_t n) {
  if (kind != kOff && is_due(below(fd))) {
    if (kind != kShort) return fail();
    n = n > 1 ? n / 2 : n;
  }
  return REAL(write)(fd, data, n);
}

ssize_t pwrite64(int fd, const void* data, size_t n, off64_t at) {
  if (kind != kOff && is_due(below(fd))) {
    if (kind != kShort) return fail();
    n = n > 1 ? n / 2 : n;
  }
  return REAL(pwrite64)(fd, data, n, at);
}

ssize_t pwrite(int fd, const void* data, size_t n, off_t at) { return pwrite64(fd, data, n, at); }

int fsync(int fd) {
  if (kind != kOff && kind != kShort && is_due(below(fd))) return fail();
  return REAL(fsync)(fd);
}

int fdatasync(int fd) {
  if (kind != kOff && kind != kShort && is_due(below(fd))) return fail();
  return REAL(fdatasync)(fd);
}

int rename(const char* from, const char* to) {
  if (kind != kOff && kind != kShort && is_due(below_path(to))) return fail();
  return REAL(rename)(from, to);
}

int posix_fallocate64(int fd, off64_t at, off64_t n) {
  if (kind != kOff && kind != kShort && is_due(below(fd))) return kind == kNoSpace ? ENOSPC : EIO;
  return REAL(posix_fallocate64)(fd, at, n);
}

int posix_fallocate(int fd, off_t at, off_t n) { return posix_fallocate64(fd, at, n); }

int mkdir(const char* path, mode_t mode) {
  if (kind != kOff && kind != kShort && is_due(below_path(path))) return fail();
  return REAL(mkdir)(path, mode);
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  mode_t mode = va_arg(more, mode_t);
  va_end(more);
  if (kind != kOff && kind != kShort && (flags & O_CREAT) && is_due(below_path(path))) return fail();
  return REAL(open64)(path, flags, mode);
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  mode_t mode = va_arg(more, mode_t);
  va_end(more);
  return open64(path, flags, mode);
}
