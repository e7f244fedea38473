// Every byte in its place, from files with tensors at any offset, with and without direct reads; locking beside reading;
// every failure named.

#include "fn-host-read.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

struct sample {
    std::string path = "test-fn-host-read.XXXXXX";
    int         fd   = -1;
    std::vector<uint8_t>        content;
    std::vector<fn_host_tensor> tensors;
    uint8_t * base = nullptr;
    size_t    size = 0;

    explicit sample(const std::vector<size_t> & sizes, uint64_t first = 3*32) {
        fd = mkstemp(&path[0]);
        CHECK(fd >= 0);

        uint64_t offs = first;
        for (size_t i = 0; i < sizes.size(); ++i) {
            fn_host_tensor t;
            t.name = "tensor" + std::to_string(i);
            t.fd   = fd;
            t.offs = offs;
            t.size = sizes[i];
            tensors.push_back(t);
            offs += (sizes[i] + 31)/32*32;
            size += fn_host_pages(t.offs, t.size);
        }
        std::mt19937 rng(3);
        content.resize(offs);
        for (uint8_t & c : content) {
            c = (uint8_t) rng();
        }
        CHECK(write(fd, content.data(), content.size()) == (ssize_t) content.size());

        base = (uint8_t *) mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(base != MAP_FAILED);
        uint8_t * next = base;
        for (fn_host_tensor & t : tensors) {
            t.data = next + t.offs % FN_HOST_PAGE;
            next += fn_host_pages(t.offs, t.size);
        }
    }

    ~sample() {
        munmap(base, size);
        close(fd);
        unlink(path.c_str());
    }

    void check_content() const {
        for (const fn_host_tensor & t : tensors) {
            CHECK(memcmp(t.data, content.data() + t.offs, t.size) == 0);
        }
    }
};

static void test_content(bool direct) {
    sample s({ 100, 4096, 1, 17*1024*1024 + 5, 4064, 33*1024*1024, 64 });
    if (direct) {
        const int fd = open(s.path.c_str(), O_RDONLY | O_DIRECT);
        if (fd < 0) {
            fprintf(stderr, "direct reads not tried: this file system has none\n");
            return;
        }
        for (fn_host_tensor & t : s.tensors) {
            t.fd = fd;
        }
    }
    for (const int32_t n_threads : { 1, 2, 4 }) {
        memset(s.base, 0, s.size);

        std::mutex mutex;
        std::set<void *> pages;

        fn_host_read_params params;
        params.n_threads = n_threads;
        params.direct    = direct;
        params.pin = [&](void * ptr, size_t size, std::string &) {
            std::lock_guard<std::mutex> lock(mutex);
            CHECK((uintptr_t) ptr % FN_HOST_PAGE == 0 && size % FN_HOST_PAGE == 0);
            for (size_t i = 0; i < size; i += FN_HOST_PAGE) {
                CHECK(pages.insert((uint8_t *) ptr + i).second); // no page twice
            }
            return true;
        };
        const fn_host_read_result result = fn_host_read(s.tensors, params);
        CHECK(result.ok);
        CHECK(result.pinned.size() == s.tensors.size());
        CHECK(pages.size()*FN_HOST_PAGE == s.size);
        s.check_content();
    }
    if (direct) {
        close(s.tensors[0].fd);
    }
}

// what is locked has been read: the lock sees the bytes
static void test_lock_after_read() {
    sample s({ 1000, 5000, 20*1024*1024, 3 });
    fn_host_read_params params;
    params.n_threads = 2;
    std::atomic<int> n{0};
    params.pin = [&](void * ptr, size_t, std::string &) {
        for (const fn_host_tensor & t : s.tensors) {
            if (t.data - t.offs % FN_HOST_PAGE == ptr) {
                CHECK(memcmp(t.data, s.content.data() + t.offs, t.size) == 0);
                n++;
            }
        }
        return true;
    };
    CHECK(fn_host_read(s.tensors, params).ok);
    CHECK(n == 4);
}

// reading goes on while a tensor is being locked: the first lock ends only when everything has been read
static void test_overlap() {
    sample s(std::vector<size_t>(6, 1024*1024));

    std::atomic<size_t> n_read{0};
    bool first = true;

    fn_host_read_params params;
    params.n_threads = 1;
    params.progress  = [&](size_t done) { n_read = done; return true; };
    params.pin = [&](void *, size_t, std::string &) {
        for (int i = 0; first && i < 10000 && n_read < s.size; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        first = false;
        return true;
    };
    CHECK(fn_host_read(s.tensors, params).ok);
    CHECK(n_read == s.size);
}

static void test_failures() {
    {
        sample s({ 1000, 1024*1024, 1000 });
        fn_host_read_params params;
        params.pin = [&](void *, size_t size, std::string & error) {
            error = "no more";
            return size < 1024*1024;
        };
        const fn_host_read_result result = fn_host_read(s.tensors, params);
        CHECK(!result.ok && !result.stopped);
        CHECK(result.tensor == "tensor1" && result.error == "no more");
        CHECK(result.pin_failed_bytes == fn_host_pages(s.tensors[1].offs, s.tensors[1].size));
        CHECK(result.pinned.size() == 1);
    }
    {
        sample s({ 1000, 100000 });
        CHECK(ftruncate(s.fd, (off_t) s.content.size() - 5000) == 0);
        const fn_host_read_result result = fn_host_read(s.tensors, {});
        CHECK(!result.ok && result.tensor == "tensor1" && result.pin_failed_bytes == 0);
        CHECK(result.error.find("ends before") != std::string::npos);
    }
    {
        sample s(std::vector<size_t>(8, 1024*1024));
        fn_host_read_params params;
        params.pin      = [](void *, size_t, std::string &) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); return true; };
        params.progress = [](size_t) { return false; };
        const fn_host_read_result result = fn_host_read(s.tensors, params);
        CHECK(!result.ok && result.stopped && result.error.empty());
        CHECK(result.pinned.size() < 8);
    }
    CHECK(fn_host_read({}, {}).ok);
    CHECK(fn_host_limits().find("MemAvailable") != std::string::npos);
    CHECK(fn_host_limits().find("RLIMIT_MEMLOCK") != std::string::npos);
}

int main() {
    test_content(false);
    test_content(true);
    test_lock_after_read();
    test_overlap();
    test_failures();
    printf("ok\n");
    return 0;
}
