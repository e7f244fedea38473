/* A management library with two devices whose use grows with every question, for tests of the memory watch. */
typedef struct { unsigned long long total, free, used; } memory;

static unsigned long long asked;

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned * count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void ** handle) { *handle = (void *) (unsigned long long) (index + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void * handle, memory * found) {
    unsigned long long index = (unsigned long long) handle - 1;
    if (asked > 1000) { return 999; }
    found->total = 1000; found->used = 100 * (index + 1) + asked++/2; found->free = found->total - found->used;
    return 0;
}
