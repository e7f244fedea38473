#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Reads tensors from files straight into their place in host memory, on several threads, and page-locks each tensor
// while the next ones are being read. No ggml, no llama: the unit test gives it its own files and its own lock.

struct fn_host_tensor {
    std::string name;
    int         fd   = -1;
    uint64_t    offs = 0;       // in the file
    uint8_t *   data = nullptr; // congruent to offs modulo FN_HOST_PAGE, so that direct reads need no copy
    size_t      size = 0;
};

constexpr size_t FN_HOST_PAGE = 4096;

// bytes of whole pages a tensor takes at this offset of its file
size_t fn_host_pages(uint64_t offs, size_t size);

struct fn_host_read_params {
    int32_t n_threads = 1;
    bool    direct    = false; // the files are open for direct reads: whole pages only

    // lock the pages [ptr, ptr + size), whole pages; false and a reason on failure. Empty: no locking
    std::function<bool(void * ptr, size_t size, std::string & error)> pin;

    // bytes read and locked so far; false: stop. Called on the caller's thread, about ten times a second
    std::function<bool(size_t done)> progress;
};

struct fn_host_read_result {
    bool        ok       = false;
    bool        stopped  = false; // by progress
    std::string tensor;           // that failed
    std::string error;
    size_t      pin_failed_bytes = 0; // asked for when locking failed, else 0

    std::vector<size_t> pinned; // tensors whose pages are locked, in order of locking

    double read_s  = 0; // first read to last read
    double pin_s   = 0; // spent locking
    double total_s = 0;
};

fn_host_read_result fn_host_read(const std::vector<fn_host_tensor> & tensors, const fn_host_read_params & params);

// "RLIMIT_MEMLOCK 65536 of 65536 bytes, MemAvailable 1234 kB": what can bound locking
std::string fn_host_limits();
