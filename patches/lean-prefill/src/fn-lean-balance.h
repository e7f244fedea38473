#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

// Experts that the cache holds can be copied on the device while the others are uploaded, on another stream. Copies wait
// for room between the kernels of a prompt: on a fast link, copying all of them takes longer than the whole upload. So
// many are copied that both end together, by the rates that were seen.
class fn_lean_balance {
public:
    int32_t n_copies(int32_t n_cached, int32_t n_wanted) const {
        const double up = upload_rate;
        const double cp = copy_rate;
        return up > 0 && cp > 0 ? std::min(n_cached, (int32_t) (n_wanted*cp/(up + cp))) : n_cached;
    }

    // us: until the last of them had ended; 0 where that was not seen
    void saw_uploads(uint64_t bytes, int64_t us) { note(upload_rate, bytes, us); }
    void saw_copies (uint64_t bytes, int64_t us) { note(copy_rate,   bytes, us); }

private:
    static void note(std::atomic<double> & rate, uint64_t bytes, int64_t us) {
        if (bytes > 0 && us > 0) {
            const double seen = (double) bytes/us;
            rate = rate > 0 ? 0.5*rate + 0.5*seen : seen;
        }
    }

    std::atomic<double> upload_rate{0}; // bytes per us, 0: not known
    std::atomic<double> copy_rate  {0};
};
