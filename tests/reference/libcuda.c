// A fake CUDA driver with the functions that memtune's allocator calls, over a file in memory. It checks arguments and ends the process
// with 7 where the real driver would return an error. `fake_driver_set` lets events pass, streams capture and memory run out.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK (2ul << 20)
typedef unsigned long long ptr;
struct location { int type, id; };
struct properties { int type, handles; struct location location; void *metadata; unsigned char flags[8]; };
struct access { struct location location; int flags; };

static int file = -1, supported = 1, capturing = 0, passed = 1, entered = 0;
static long chunks = 0, most = 64, accessible = 0;

static void require(int holds) { if (!holds) _exit(7); }
void fake_driver_set(const char *what, int value) {
  if (!strcmp(what, "supported")) supported = value;
  if (!strcmp(what, "capturing")) capturing = value;
  if (!strcmp(what, "pass")) passed = value;
  if (!strcmp(what, "chunks")) most = value;
}
int cuInit(unsigned flags) { require(flags == 0); file = file < 0 ? memfd_create("cuda", 0) : file; return file < 0; }
int cuDeviceGet(int *device, int number) { *device = number; return number == 0 ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { require(attribute == 102 && device == 0); *value = supported; return 0; }
// The primary context of device 0 is the address of `file`. The allocator must make calls on events and mappings in it, since
// threads that free may have no context; the real driver returns 201 (CUDA_ERROR_INVALID_CONTEXT) without one.
int cuDevicePrimaryCtxRetain(void **context, int device) { require(device == 0); *context = &file; return 0; }
int cuCtxPushCurrent_v2(void *context) { require(context == &file); ++entered; return 0; }
int cuCtxPopCurrent_v2(void **context) { require(entered > 0); --entered; *context = &file; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { require(device == 0); *bytes = 64 * CHUNK; return 0; }
int cuMemGetAllocationGranularity(size_t *bytes, const struct properties *p, int option) {
  require(p->type == 1 && p->location.type == 1 && option == 0);
  *bytes = CHUNK;
  return 0;
}
int cuMemAddressReserve(ptr *address, size_t bytes, size_t alignment, ptr wanted, ptr flags) {
  require(entered > 0 && bytes % CHUNK == 0 && alignment % CHUNK == 0 && wanted == 0 && flags == 0);
  void *at = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = (ptr)at;
  return at == MAP_FAILED ? 2 : 0;
}
int cuMemAddressFree(ptr address, size_t bytes) { require(entered > 0); return munmap((void *)address, bytes); }
int cuMemCreate(ptr *handle, size_t bytes, const struct properties *p, ptr flags) {
  require(entered > 0 && bytes == CHUNK && p->type == 1 && p->handles == 0 && p->location.id == 0 && flags == 0);
  if (chunks == most) return 2;
  *handle = 100 + (ptr)chunks++;
  return ftruncate(file, chunks * (long)CHUNK);
}
int cuMemRelease(ptr handle) { require(handle >= 100); return 0; }
int cuMemMap(ptr address, size_t bytes, size_t offset, ptr handle, ptr flags) {
  require(entered > 0 && bytes == CHUNK && offset == 0 && flags == 0);
  return mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, (long)((handle - 100) * CHUNK)) == MAP_FAILED;
}
int cuMemSetAccess(ptr address, size_t bytes, const struct access *a, size_t count) {
  require(entered > 0 && a->location.type == 1 && a->location.id == 0 && a->flags == 3 && count == 1);
  ++accessible;
  return mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
}
int cuMemUnmap(ptr address, size_t bytes) {
  require(entered > 0);
  return mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED;
}
int cuCtxSynchronize(void) { require(entered > 0); passed = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = error == 2 ? "out of memory" : "no such device"; return 0; }
// A query of stream 0 while another one captures returns 906, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
int cuStreamIsCapturing(void *stream, int *status) { *status = stream ? capturing : 0; return !stream && capturing ? 906 : 0; }
int cuEventCreate(void **event, unsigned flags) { require(entered > 0 && flags == 2); *event = malloc(1); return 0; }
int cuEventRecord(void *event, void *stream) { (void)stream; require(event && entered > 0); return 0; }
int cuEventQuery(void *event) { require(event != 0); return passed ? 0 : 600; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
