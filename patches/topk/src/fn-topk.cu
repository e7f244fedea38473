#include "fn-topk.cuh"

#include <algorithm>
#include <cstdlib>
#include <cstring>

// The selection narrows the 32-bit ordered key of the k-th largest value digit by digit (13 + 13 + 6 bits, one
// histogram each). As soon as the values that share the digits found so far fit into FN_TOPK_CAP candidates, the row
// is read once more: larger values are final, candidates are settled in shared memory by (key, lowest index). So a
// usual row is read twice. Rows with more equal values than candidates fit are settled by an ordered scan.
//
// Many rows: one block reads one row (fn_topk_row). Few long rows: several blocks share a row and the phases become
// launches (fn_topk_split), their number being independent of the number of rows.

#define FN_TOPK_BLOCK    1024
#define FN_TOPK_CAP      4096
#define FN_TOPK_BINS     8192 // 13 bits; the candidates reuse this shared memory
#define FN_TOPK_LEVELS   3
#define FN_TOPK_MIN_COLS 8192
#define FN_TOPK_MAX_COLS (1 << 24)

static_assert(FN_TOPK_CAP * 2 * sizeof(uint32_t) == FN_TOPK_BINS * sizeof(uint32_t), "candidates reuse the histogram");

struct fn_topk_state {
    uint32_t prefix; // digits of the k-th key found so far, in place
    uint32_t level;  // digits found
    int      above;  // values with a larger prefix
    int      count;  // values with this prefix
    int      n_out;  // outputs written
    int      n_cand; // candidates collected
    int      ticket; // blocks of this row that finished the present launch
    int      done;
};

static __device__ __forceinline__ int fn_topk_shift(const uint32_t level) {
    return level == 0 ? 19 : level == 1 ? 6 : 0;
}

static __device__ __forceinline__ uint32_t fn_topk_prefix_mask(const uint32_t level) {
    return level == 0 ? 0u : 0xFFFFFFFFu << fn_topk_shift(level - 1);
}

static __device__ __forceinline__ uint32_t fn_topk_digit_mask(const uint32_t level) {
    return level == 2 ? 0x3Fu : 0x1FFFu;
}

// Larger float <=> larger key; -0 counts as +0. Integers only: the tree's fast math flushes denormals in comparisons.
static __device__ __forceinline__ uint32_t fn_topk_key(const float x) {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) == 0) {
        bits = 0;
    }
    return bits ^ ((uint32_t) ((int32_t) bits >> 31) | 0x80000000u);
}

// inclusive scan of one int per thread; the total of the block is in *total after the call
static __device__ __forceinline__ int fn_topk_scan(const int value, int * warp_sums, int * total) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
        if (lane >= offset) {
            sum += other;
        }
    }
    __syncthreads(); // a previous use of warp_sums is over
    if (lane == 31) {
        warp_sums[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        int w = warp_sums[lane];
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(0xFFFFFFFFu, w, offset);
            if (lane >= offset) {
                w += other;
            }
        }
        warp_sums[lane] = w;
    }
    __syncthreads();
    *total = warp_sums[FN_TOPK_BLOCK / 32 - 1];
    return sum + (warp > 0 ? warp_sums[warp - 1] : 0);
}

// Calls f(key, col, valid) for every column of [begin, end) in order of chunks; every thread makes the same calls, so
// that f may use block-wide operations per chunk of four columns a thread.
template <typename F>
static __device__ __forceinline__ void fn_topk_each(const float * row, const int begin, const int end, const bool vec, F && f) {
    for (int base = begin; base < end; base += FN_TOPK_BLOCK * 4) {
        const int col = base + 4 * threadIdx.x;
        float     x[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        int       n    = min(max(end - col, 0), 4);
        if (vec && n == 4) {
            const float4 v = *(const float4 *) (row + col);
            x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
        } else {
            for (int i = 0; i < n; ++i) {
                x[i] = row[col + i];
            }
        }
        f(x, col, n);
    }
}

// histogram of the digit of `level` over the values that share `prefix`
static __device__ void fn_topk_histogram(const float * row, const int begin, const int end, const bool vec, const uint32_t prefix,
                                         const uint32_t level, uint32_t * hist) {
    for (int i = threadIdx.x; i < FN_TOPK_BINS; i += FN_TOPK_BLOCK) {
        hist[i] = 0;
    }
    __syncthreads();
    const uint32_t mask  = fn_topk_prefix_mask(level);
    const uint32_t dmask = fn_topk_digit_mask(level);
    const int      shift = fn_topk_shift(level);
    // Runs of one value are common (the columns of a block share its score, masked columns are -inf): a thread adds a
    // run at once, also over its chunks, or these atomics would all meet in one bin.
    uint32_t run_bin = 0;
    uint32_t run     = 0;
    fn_topk_each(row, begin, end, vec, [&](const float * x, const int, const int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t key = fn_topk_key(x[i]);
            if (i < n && (key & mask) == prefix) {
                const uint32_t bin = (key >> shift) & dmask;
                if (bin != run_bin) {
                    if (run) {
                        atomicAdd(&hist[run_bin], run);
                    }
                    run_bin = bin;
                    run     = 0;
                }
                run++;
            }
        }
    });
    if (run) {
        atomicAdd(&hist[run_bin], run);
    }
    __syncthreads();
}

// the bin of the rank-th largest value (1-based) of the histogram: found[0] = bin, found[1] = values in larger bins,
// found[2] = values in the bin
static __device__ void fn_topk_find(const uint32_t * hist, const int rank, int * warp_sums, int * found) {
    constexpr int PER = FN_TOPK_BINS / FN_TOPK_BLOCK;
    const int     top = FN_TOPK_BINS - 1 - PER * (int) threadIdx.x; // thread 0 owns the largest bins
    int sum = 0;
    for (int i = 0; i < PER; ++i) {
        sum += (int) hist[top - i];
    }
    int       total;
    const int incl  = fn_topk_scan(sum, warp_sums, &total);
    int       above = incl - sum;
    if (above < rank && rank <= incl) {
        int bin = top;
        while (above + (int) hist[bin] < rank) {
            above += (int) hist[bin--];
        }
        found[0] = bin;
        found[1] = above;
        found[2] = (int) hist[bin];
    }
    __syncthreads();
}

// Of n candidates in shared memory write the `need` largest (key, then lowest index) to out[*n_out ...].
static __device__ void fn_topk_settle(const uint32_t * key, const uint32_t * idx, const int n, const int need, int * dst,
                                      uint32_t * small_hist, int * found, int * n_out) {
    // composite of 64 bits, all different; narrowed 8 bits at a time
    unsigned long long prefix = 0;
    int                rank   = need;
    for (int shift = 56; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) {
            small_hist[threadIdx.x] = 0;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += FN_TOPK_BLOCK) {
            const unsigned long long c = ((unsigned long long) key[i] << 32) | (uint32_t) ~idx[i];
            if (shift == 56 || (c >> (shift + 8)) == (prefix >> (shift + 8))) {
                atomicAdd(&small_hist[(c >> shift) & 0xFF], 1u);
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) { // one warp: lane 0 owns the largest eight bins
            int sum = 0;
            for (int i = 0; i < 8; ++i) {
                sum += (int) small_hist[255 - 8 * threadIdx.x - i];
            }
            int incl = sum;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const int other = __shfl_up_sync(0xFFFFFFFFu, incl, offset);
                if ((int) threadIdx.x >= offset) {
                    incl += other;
                }
            }
            int above = incl - sum;
            if (above < rank && rank <= incl) {
                int bin = 255 - 8 * threadIdx.x;
                while (above + (int) small_hist[bin] < rank) {
                    above += (int) small_hist[bin--];
                }
                found[0] = bin;
                found[1] = above;
            }
        }
        __syncthreads();
        prefix |= (unsigned long long) found[0] << shift;
        rank   -= found[1];
        __syncthreads();
    }
    for (int i = threadIdx.x; i < n; i += FN_TOPK_BLOCK) {
        const unsigned long long c = ((unsigned long long) key[i] << 32) | (uint32_t) ~idx[i];
        if (c >= prefix) {
            dst[atomicAdd(n_out, 1)] = (int) idx[i];
        }
    }
    __syncthreads();
}

// Writes values above the prefix to dst, values that share it to the candidates (both unordered).
static __device__ void fn_topk_collect(const float * row, const int begin, const int end, const bool vec, const uint32_t prefix,
                                       const uint32_t level, int * dst, int * n_out, uint32_t * cand_key,
                                       uint32_t * cand_idx, int * n_cand) {
    const uint32_t mask = fn_topk_prefix_mask(level);
    fn_topk_each(row, begin, end, vec, [&](const float * x, const int col, const int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t key = fn_topk_key(x[i]);
            if (i < n && (key & mask) >= prefix) {
                if ((key & mask) > prefix) {
                    dst[atomicAdd(n_out, 1)] = col + i;
                } else {
                    const int c = atomicAdd(n_cand, 1);
                    cand_key[c] = key;
                    cand_idx[c] = (uint32_t) (col + i);
                }
            }
        }
    });
}

// With the whole key known: values above it, and of the equal ones those numbered below `need` in order of columns,
// the first column of this range having the number eq_base.
static __device__ void fn_topk_ordered(const float * row, const int begin, const int end, const bool vec, const uint32_t prefix,
                                       const int need, int eq_base, int * dst, int * n_out, int * warp_sums) {
    fn_topk_each(row, begin, end, vec, [&](const float * x, const int col, const int n) {
        int n_eq = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            n_eq += i < n && fn_topk_key(x[i]) == prefix;
        }
        int eq = 0;
        int total = 0;
        if (eq_base < need) { // uniform over the block
            eq = eq_base + fn_topk_scan(n_eq, warp_sums, &total) - n_eq;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t key = fn_topk_key(x[i]);
            if (i < n && key > prefix) {
                dst[atomicAdd(n_out, 1)] = col + i;
            } else if (i < n && key == prefix && eq_base < need) {
                if (eq < need) {
                    dst[atomicAdd(n_out, 1)] = col + i;
                }
                eq++;
            }
        }
        eq_base += total;
    });
}

static __global__ void __launch_bounds__(FN_TOPK_BLOCK) fn_topk_row(const float * src, int * dst, const int ncols, const int k, const bool vec) {
    __shared__ uint32_t hist[FN_TOPK_BINS];
    __shared__ uint32_t small_hist[256];
    __shared__ int      warp_sums[32];
    __shared__ int      found[3];
    __shared__ int      n_out;
    __shared__ int      n_cand;

    const float * row = src + (size_t) blockIdx.x * ncols;
    dst += (size_t) blockIdx.x * k;
    if (threadIdx.x == 0) {
        n_out  = 0;
        n_cand = 0;
    }
    uint32_t prefix = 0;
    int      need   = k;
    for (uint32_t level = 0; level < FN_TOPK_LEVELS; ++level) {
        fn_topk_histogram(row, 0, ncols, vec, prefix, level, hist);
        fn_topk_find(hist, need, warp_sums, found);
        prefix |= (uint32_t) found[0] << fn_topk_shift(level);
        need   -= found[1];
        const int count = found[2];
        __syncthreads();
        if (count <= FN_TOPK_CAP) {
            fn_topk_collect(row, 0, ncols, vec, prefix, level + 1, dst, &n_out, hist, hist + FN_TOPK_CAP, &n_cand);
            __syncthreads();
            fn_topk_settle(hist, hist + FN_TOPK_CAP, n_cand, need, dst, small_hist, found, &n_out);
            return;
        }
        if (level == 0 && prefix == (0x007FFFFFu & fn_topk_prefix_mask(1))) {
            prefix = 0x007FFFFFu; // of a bin of NaNs and -inf only -inf can be there
            break;
        }
    }
    fn_topk_ordered(row, 0, ncols, vec, prefix, need, 0, dst, &n_out, warp_sums);
}

// One launch of the split form. Launches 0..3 narrow the key or collect, whichever the state calls for; launch 4 is the
// ordered scan. grid = (splits, rows).
static __global__ void __launch_bounds__(FN_TOPK_BLOCK) fn_topk_split(const float * src, int * dst, const int ncols, const int k, const bool vec,
                                                                      const int per_split, fn_topk_state * states, uint32_t * hists,
                                                                      uint32_t * cands, int * eq_counts, const int launch) {
    __shared__ uint32_t hist[FN_TOPK_BINS];
    __shared__ uint32_t small_hist[256];
    __shared__ int      warp_sums[32];
    __shared__ int      found[3];
    __shared__ int      last;

    const int row_id = blockIdx.y;
    const int split  = blockIdx.x;
    const int begin  = split * per_split;
    const int end    = min(begin + per_split, ncols);

    fn_topk_state * state    = states + row_id;
    const float *   row      = src + (size_t) row_id * ncols;
    uint32_t *      row_hist = hists + (size_t) row_id * FN_TOPK_BINS * FN_TOPK_LEVELS;
    uint32_t *      row_cand = cands + (size_t) row_id * FN_TOPK_CAP * 2;
    int *           row_eq   = eq_counts + (size_t) row_id * gridDim.x;
    dst += (size_t) row_id * k;

    if (state->done) {
        return;
    }
    const uint32_t prefix = state->prefix;
    const uint32_t level  = state->level;
    const int      need   = k - state->above;
    const bool     fits   = level > 0 && state->count <= FN_TOPK_CAP;

    if (fits) {
        fn_topk_collect(row, begin, end, vec, prefix, level, dst, &state->n_out, row_cand, row_cand + FN_TOPK_CAP, &state->n_cand);
    } else if (level < FN_TOPK_LEVELS) {
        fn_topk_histogram(row, begin, end, vec, prefix, level, hist);
        for (int i = threadIdx.x; i < FN_TOPK_BINS; i += FN_TOPK_BLOCK) {
            if (hist[i]) {
                atomicAdd(&row_hist[(size_t) level * FN_TOPK_BINS + i], hist[i]);
            }
        }
    } else if (launch < FN_TOPK_LEVELS) {
        return; // the key was known early: the ordered scan is the business of the last two launches
    } else if (launch == FN_TOPK_LEVELS) {
        int n_eq = 0;
        fn_topk_each(row, begin, end, vec, [&](const float * x, const int, const int n) {
            for (int i = 0; i < n; ++i) {
                n_eq += fn_topk_key(x[i]) == prefix;
            }
        });
        int total;
        fn_topk_scan(n_eq, warp_sums, &total);
        if (threadIdx.x == 0) {
            row_eq[split] = total;
        }
        return; // the next launch reads the counts
    } else {
        int eq_base = 0;
        for (int s = 0; s < split; ++s) {
            eq_base += row_eq[s];
        }
        fn_topk_ordered(row, begin, end, vec, prefix, need, eq_base, dst, &state->n_out, warp_sums);
        return;
    }

    // the last block of the row to arrive here settles this launch
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&state->ticket, 1) == (int) gridDim.x - 1;
    }
    __syncthreads();
    if (!last) {
        return;
    }
    __threadfence();
    if (fits) {
        const int n = state->n_cand;
        for (int i = threadIdx.x; i < n; i += FN_TOPK_BLOCK) {
            hist[i]               = __ldcg(row_cand + i);
            hist[FN_TOPK_CAP + i] = __ldcg(row_cand + FN_TOPK_CAP + i);
        }
        __syncthreads();
        fn_topk_settle(hist, hist + FN_TOPK_CAP, n, need, dst, small_hist, found, &state->n_out);
        if (threadIdx.x == 0) {
            state->done = 1;
        }
        return;
    }
    for (int i = threadIdx.x; i < FN_TOPK_BINS; i += FN_TOPK_BLOCK) {
        hist[i] = __ldcg(row_hist + (size_t) level * FN_TOPK_BINS + i);
    }
    __syncthreads();
    fn_topk_find(hist, need, warp_sums, found);
    if (threadIdx.x == 0) {
        uint32_t next = prefix | (uint32_t) found[0] << fn_topk_shift(level);
        state->level  = level + 1;
        state->above += found[1];
        state->count  = found[2];
        state->ticket = 0;
        if (level == 0 && found[2] > FN_TOPK_CAP && next == (0x007FFFFFu & fn_topk_prefix_mask(1))) {
            next         = 0x007FFFFFu; // as in fn_topk_row
            state->level = FN_TOPK_LEVELS;
        }
        state->prefix = next;
    }
}

static bool fn_topk_enabled() {
    const char * value = getenv("FN_TOPK");
    return value == nullptr || strcmp(value, "0") != 0;
}

bool fn_topk(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    static const bool enabled = fn_topk_enabled();

    const ggml_tensor * src = dst->src[0];
    const int64_t ncols = src->ne[0];
    const int64_t nrows = ggml_nrows(src);
    const int64_t k     = dst->ne[0];
    if (!enabled || ncols < FN_TOPK_MIN_COLS || ncols > FN_TOPK_MAX_COLS || k < 1 || nrows < 1 || k > ncols) {
        return false;
    }
    GGML_ASSERT(src->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_I32);
    GGML_ASSERT(ggml_is_contiguous(src) && ggml_is_contiguous(dst));

    const float * src_d  = (const float *) src->data;
    int *         dst_d  = (int *) dst->data;
    cudaStream_t  stream = ctx.stream();
    const bool    vec    = ncols % 4 == 0 && (uintptr_t) src_d % sizeof(float4) == 0;

    // split a row only where whole rows leave most of the device idle
    const int     nsm     = ggml_cuda_info().devices[ctx.device].nsm;
    const int64_t per_min = 16 * 1024;
    const int64_t splits  = std::min<int64_t>(nsm / nrows, (ncols + per_min - 1) / per_min);
    if (splits < 4) {
        fn_topk_row<<<(unsigned) nrows, FN_TOPK_BLOCK, 0, stream>>>(src_d, dst_d, (int) ncols, (int) k, vec);
        CUDA_CHECK(cudaGetLastError());
        return true;
    }

    const int64_t per_split = (((ncols + splits - 1) / splits) + 3) / 4 * 4;
    const int64_t n_splits  = (ncols + per_split - 1) / per_split;

    const size_t n_hist  = (size_t) nrows * FN_TOPK_BINS * FN_TOPK_LEVELS;
    const size_t n_state = (size_t) nrows * sizeof(fn_topk_state) / sizeof(uint32_t);

    ggml_cuda_pool_alloc<uint32_t> zeroed(ctx.pool(), n_hist + n_state);
    ggml_cuda_pool_alloc<uint32_t> cands(ctx.pool(), (size_t) nrows * FN_TOPK_CAP * 2);
    ggml_cuda_pool_alloc<int>      eq_counts(ctx.pool(), (size_t) nrows * n_splits);
    CUDA_CHECK(cudaMemsetAsync(zeroed.get(), 0, (n_hist + n_state) * sizeof(uint32_t), stream));

    const dim3 grid((unsigned) n_splits, (unsigned) nrows);
    for (int launch = 0; launch < FN_TOPK_LEVELS + 2; ++launch) {
        fn_topk_split<<<grid, FN_TOPK_BLOCK, 0, stream>>>(src_d, dst_d, (int) ncols, (int) k, vec, (int) per_split,
            (fn_topk_state *) (zeroed.get() + n_hist), zeroed.get(), cands.get(), eq_counts.get(), launch);
        CUDA_CHECK(cudaGetLastError());
    }
    return true;
}
