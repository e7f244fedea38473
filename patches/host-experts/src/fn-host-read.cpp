#include "fn-host-read.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include <sys/resource.h>
#include <unistd.h>

// large enough for full speed of a direct read, small enough to share one tensor among the threads
static constexpr size_t FN_HOST_BLOCK = 16*1024*1024;

typedef std::chrono::steady_clock fn_clock;

static double fn_seconds(fn_clock::time_point t0, fn_clock::time_point t1) {
    return std::chrono::duration<double>(t1 - t0).count();
}

size_t fn_host_pages(uint64_t offs, size_t size) {
    const size_t lead = offs % FN_HOST_PAGE;
    return (lead + size + FN_HOST_PAGE - 1)/FN_HOST_PAGE*FN_HOST_PAGE;
}

// the page-aligned range of a tensor in memory
static uint8_t * fn_page_base(const fn_host_tensor & t) {
    return t.data - t.offs % FN_HOST_PAGE;
}

namespace {

class host_reader {
public:
    host_reader(const std::vector<fn_host_tensor> & tensors, const fn_host_read_params & params) :
        tensors(tensors), params(params), left(new std::atomic<size_t>[tensors.size()]) {
        for (size_t i = 0; i < tensors.size(); ++i) {
            const size_t pages = fn_host_pages(tensors[i].offs, tensors[i].size);
            for (size_t start = 0; start < pages; start += FN_HOST_BLOCK) {
                blocks.push_back({ i, start, std::min(FN_HOST_BLOCK, pages - start) });
            }
            left[i] = (pages + FN_HOST_BLOCK - 1)/FN_HOST_BLOCK;
            if (pages == 0) {
                to_pin.push_back(i);
            }
        }
    }

    fn_host_read_result run() {
        t_start = fn_clock::now();

        std::vector<std::thread> threads;
        for (int32_t i = 0; i < std::max(1, params.n_threads); ++i) {
            threads.emplace_back([this]() { read_blocks(); });
        }
        std::thread pinner([this]() { pin_tensors(); });

        watch();

        for (std::thread & thread : threads) {
            thread.join();
        }
        pinner.join();

        result.total_s = fn_seconds(t_start, fn_clock::now());
        result.ok      = result.error.empty() && !result.stopped;
        return std::move(result);
    }

private:
    struct block {
        size_t tensor;
        size_t start; // from the page base
        size_t size;
    };

    // copies of the file outside the tensor are read where pages are shared with it: the memory there is padding
    bool read_block(const block & b, std::string & error) const {
        const fn_host_tensor & t = tensors[b.tensor];

        const uint64_t page_offs = t.offs - t.offs % FN_HOST_PAGE;

        uint64_t offs = page_offs + b.start;
        uint64_t end  = offs + b.size;
        uint8_t * dst = fn_page_base(t) + b.start;
        if (!params.direct) {
            // without the rounding to pages
            const uint64_t first = std::max(offs, t.offs);
            dst += first - offs;
            offs = first;
            end  = std::min<uint64_t>(end, t.offs + t.size);
        }

        const uint64_t need = std::min<uint64_t>(end, t.offs + t.size);
        while (offs < need) {
            const ssize_t n = pread(t.fd, dst, end - offs, (off_t) offs);
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n <= 0) {
                error = n == 0 ? "the file ends before the tensor does" : std::string("read: ") + strerror(errno);
                return false;
            }
            offs += n;
            dst  += n;
        }
        return true;
    }

    void read_blocks() {
        while (!stop) {
            const size_t i = next.fetch_add(1);
            if (i >= blocks.size()) {
                break;
            }
            std::string error;
            if (!read_block(blocks[i], error)) {
                fail(blocks[i].tensor, error, 0);
                break;
            }
            n_done += blocks[i].size;
            if (left[blocks[i].tensor].fetch_sub(1) == 1) {
                std::lock_guard<std::mutex> lock(mutex);
                to_pin.push_back(blocks[i].tensor);
                result.read_s = fn_seconds(t_start, fn_clock::now());
                changed.notify_all();
            }
        }
    }

    void pin_tensors() {
        for (size_t n = 0; n < tensors.size() && !stop; ++n) {
            size_t i;
            {
                std::unique_lock<std::mutex> lock(mutex);
                changed.wait(lock, [&]() { return stop || !to_pin.empty(); });
                if (stop) {
                    break;
                }
                i = to_pin.front();
                to_pin.pop_front();
            }
            const size_t pages = fn_host_pages(tensors[i].offs, tensors[i].size);
            if (params.pin && pages > 0) {
                const auto t0 = fn_clock::now();
                std::string error;
                if (!params.pin(fn_page_base(tensors[i]), pages, error)) {
                    fail(i, error, pages);
                    break;
                }
                const double s = fn_seconds(t0, fn_clock::now());

                std::lock_guard<std::mutex> lock(mutex);
                result.pin_s += s;
                result.pinned.push_back(i);
            }
        }
        std::lock_guard<std::mutex> lock(mutex);
        finished = true;
        changed.notify_all();
    }

    void watch() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!finished && !stop) {
            changed.wait_for(lock, std::chrono::milliseconds(100), [&]() { return finished || stop; });
            if (params.progress && !stop) {
                lock.unlock();
                const bool go_on = params.progress(n_done);
                lock.lock();
                if (!go_on) {
                    result.stopped = true;
                    stop = true;
                    changed.notify_all();
                }
            }
        }
    }

    void fail(size_t tensor, const std::string & error, size_t pin_bytes) {
        std::lock_guard<std::mutex> lock(mutex);
        if (result.error.empty()) {
            result.tensor = tensors[tensor].name;
            result.error  = error;
            result.pin_failed_bytes = pin_bytes;
        }
        stop = true;
        changed.notify_all();
    }

    const std::vector<fn_host_tensor> & tensors;
    const fn_host_read_params &         params;

    std::vector<block> blocks;
    std::unique_ptr<std::atomic<size_t>[]> left; // blocks per tensor

    std::atomic<size_t> next  {0};
    std::atomic<size_t> n_done{0};
    std::atomic<bool>   stop  {false};

    std::mutex              mutex;
    std::condition_variable changed;
    std::deque<size_t>      to_pin;
    bool                    finished = false;
    fn_host_read_result     result;

    fn_clock::time_point t_start;
};

} // namespace

fn_host_read_result fn_host_read(const std::vector<fn_host_tensor> & tensors, const fn_host_read_params & params) {
    return host_reader(tensors, params).run();
}

std::string fn_host_limits() {
    std::string out;

    rlimit limit = {};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
        auto text = [](rlim_t v) { return v == RLIM_INFINITY ? std::string("unlimited") : std::to_string((unsigned long long) v); };
        out += "RLIMIT_MEMLOCK " + text(limit.rlim_cur) + " of " + text(limit.rlim_max) + " bytes";
    }

    if (FILE * file = fopen("/proc/meminfo", "r")) {
        char line[256];
        unsigned long long kb = 0;
        while (fgets(line, sizeof(line), file)) {
            if (sscanf(line, "MemAvailable: %llu kB", &kb) == 1) {
                out += (out.empty() ? "" : ", ") + std::string("MemAvailable ") + std::to_string(kb*1024) + " bytes";
                break;
            }
        }
        fclose(file);
    }
    return out;
}
