/* A CUDA driver with two devices of plain books, for tests of the tools that hold and measure device memory. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static size_t total = (size_t) 80 << 30;
static size_t used[2] = {(size_t) 1 << 30, (size_t) 512 << 20};
static int now;

int cuInit(unsigned flags) { return getenv("FAKE_CUDA_FAIL") ? 999 : 0; }
int cuGetErrorName(int code, const char ** text) { *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN"; return 0; }
int cuDeviceGetCount(int * count) { *count = 2; return 0; }
int cuDeviceGet(int * device, int index) { *device = index; return 0; }
int cuDeviceGetName(char * name, int size, int device) { strncpy(name, device ? "Fake B" : "Fake A", size); return 0; }
int cuDevicePrimaryCtxRetain(void ** context, int device) { *context = (void *) (size_t) (device + 1); return 0; }
int cuCtxSetCurrent(void * context) { now = (int) (size_t) context - 1; return 0; }
int cuMemGetInfo_v2(size_t * free_, size_t * total_) { *free_ = total - used[now]; *total_ = total; return 0; }
int cuMemAlloc_v2(unsigned long long * address, size_t size) {
    if (size > total - used[now]) { return 2; }
    used[now] += size; *address = 4096; return 0;
}
int cuMemHostAlloc(void ** address, size_t size, unsigned flags) { *address = malloc(64); return 0; }
int cuStreamCreate(void ** stream, unsigned flags) { *stream = (void *) 1; return 0; }
int cuMemcpyHtoDAsync_v2(unsigned long long to, void * from, size_t size, void * stream) { return 0; }
int cuStreamSynchronize(void * stream) { return 0; }
