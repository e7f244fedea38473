#include "fn-lean-stage.h"

#include "ggml-alloc.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cstring>

// long copies in pieces: the RPC client hashes anything larger, to ask the server whether it has it
static constexpr size_t FN_LEAN_PIECE = 8*1024*1024;

// CUDA's quantised matmul reads so far past the end of an expert
static constexpr size_t FN_LEAN_PAD = 512;

// the uploads ended after the copies, if waiting for them took longer than this
static constexpr int64_t FN_LEAN_SEEN_US = 200;

// times are for whoever asks in time
static constexpr size_t FN_LEAN_TIMES_MAX = 4096;

fn_lean_stage::fn_lean_stage(ggml_backend_dev_t dev, int32_t n_ring, const fn_lean_switches & switches) :
    dev(dev), n_ring(n_ring), switches(switches) {}

fn_lean_stage::~fn_lean_stage() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    cv_jobs.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void fn_lean_stage::add(int32_t layer, fn_lean_layer * l) {
    layers.resize(std::max<size_t>(layers.size(), layer + 1));
    layers[layer] = l;

    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
    for (int i = 0; i < 3; ++i) {
        const size_t size = GGML_PAD(ggml_backend_buft_get_alloc_size(buft, l->src[i]), ggml_backend_buft_get_alignment(buft));
        part_bytes[i] = std::max(part_bytes[i], size);
    }
}

size_t fn_lean_stage::need_bytes() const {
    return n_ring*(part_bytes[0] + part_bytes[1] + part_bytes[2]);
}

bool fn_lean_stage::alloc() {
    buf.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), need_bytes()));
    if (!buf) {
        return false;
    }
    // the graph runs where its weights are
    ggml_backend_buffer_set_usage(buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    // what a kernel reads beyond a row has to be finite
    ggml_backend_buffer_clear(buf.get(), 0);

    size_bytes = ggml_backend_buffer_get_size(buf.get());
    return place_tensors(buf.get(), (uint8_t *) ggml_backend_buffer_get_base(buf.get()));
}

bool fn_lean_stage::borrow(ggml_backend_buffer_t from, uint8_t * base) {
    lent_bytes = need_bytes();
    return place_tensors(from, base);
}

void fn_lean_stage::free() {
    GGML_ASSERT(!thread.joinable());
    for (fn_lean_layer * l : layers) {
        for (int i = 0; l && i < 3; ++i) {
            l->dst[i].clear();
        }
    }
    ctx.reset();
    buf.reset();
    size_bytes = 0;
    lent_bytes = 0;
}

bool fn_lean_stage::place_tensors(ggml_backend_buffer_t buffer, uint8_t * base) {
    ggml_init_params params = { ggml_tensor_overhead()*3*n_ring*layers.size(), nullptr, true };
    ctx.reset(ggml_init(params));

    for (fn_lean_layer * l : layers) {
        uint8_t * part = base;
        for (int32_t place = 0; l && place < n_ring; ++place) {
            for (int i = 0; i < 3; ++i) {
                const ggml_tensor * src = l->src[i];
                ggml_tensor * dst = ggml_new_tensor_3d(ctx.get(), src->type, src->ne[0], src->ne[1], src->ne[2]);
                ggml_format_name(dst, "fn_lean.%d.%s", place, src->name);
                if (ggml_backend_tensor_alloc(buffer, dst, part) != GGML_STATUS_SUCCESS) {
                    return false;
                }
                l->dst[i].push_back(dst);
                l->pad[i] = ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(buffer), dst) - ggml_nbytes(dst);
                part += part_bytes[i];
            }
        }
    }
    return true;
}

bool fn_lean_stage::start() {
    backend.reset(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        return false;
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    if (slot_map && props.caps.async) {
        copier.reset(ggml_backend_dev_init(dev, nullptr));
        if (!copier) {
            return false;
        }
    }
    zeros.assign(FN_LEAN_PIECE, 0);
    if (switches.late_ms >= 0) {
        junk.assign(FN_LEAN_PIECE, 0xff); // a NaN in every float type, and as the scale of a quantized block
    }
    thread = std::thread(&fn_lean_stage::run, this);
    return true;
}

uint64_t fn_lean_stage::submit(int32_t layer, int32_t place, const uint8_t * experts, bool ahead) {
    const fn_lean_layer & l = *layers[layer];
    const int32_t n_expert  = (int32_t) l.src[0]->ne[2];

    std::vector<int32_t> slot_of(n_expert, -1);
    if (slot_map && !ahead && l.cache_index >= 0) {
        slot_map(slot_map_data, l.cache_index, slot_of);
    }
    int32_t n_wanted = 0;
    int32_t n_cached = 0;
    for (int32_t e = 0; e < n_expert; ++e) {
        n_wanted += !experts || experts[e];
        n_cached += (!experts || experts[e]) && slot_of[e] >= 0;
    }
    int32_t n_copies = copier ? balance.n_copies(n_cached, n_wanted) : n_cached;

    job j = { next_serial++, layer, place, ggml_time_us(), {} };
    bool has_slots = false;
    for (int32_t e = 0; e < n_expert; ++e) {
        if (experts && !experts[e]) {
            continue;
        }
        copy * prev = j.copies.empty() ? nullptr : &j.copies.back();
        if (slot_of[e] >= 0 && n_copies > 0) {
            j.copies.push_back({ e, 1, slot_of[e], false });
            has_slots = true;
            n_copies--;
        } else if (prev && prev->slot < 0 && prev->expert + prev->n_experts == e) {
            prev->n_experts++;
        } else {
            j.copies.push_back({ e, 1, -1, false });
        }
    }
    if (experts) {
        // what follows a run is then whatever the place held, perhaps of another type
        for (copy & c : j.copies) {
            const int32_t next = c.expert + c.n_experts;
            c.pad = next < n_expert && !experts[next];
        }
    }
    if (has_slots) {
        last_slot_serial = j.serial;
    }

    const uint64_t serial = j.serial;
    {
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_back(std::move(j));
    }
    cv_jobs.notify_one();
    return serial;
}

bool fn_lean_stage::wait(uint64_t serial) {
    std::unique_lock<std::mutex> lock(mutex);
    const bool ready = done >= serial;
    cv_done.wait(lock, [&] { return done >= serial; });
    return ready;
}

void fn_lean_stage::run() {
    while (true) {
        job j;
        {
            std::unique_lock<std::mutex> lock(mutex);
            cv_jobs.wait(lock, [&] { return stop || !jobs.empty(); });
            if (stop) {
                return;
            }
            j = std::move(jobs.front());
            jobs.pop_front();
        }
        execute(j);
    }
}

void fn_lean_stage::upload(ggml_tensor * dst, const void * data, size_t offset, size_t size) {
    for (size_t at = 0; at < size; at += FN_LEAN_PIECE) {
        ggml_backend_tensor_set_async(backend.get(), dst, (const uint8_t *) data + at, offset + at, std::min(FN_LEAN_PIECE, size - at));
    }
}

// n bytes of a tensor, as a tensor
static ggml_tensor fn_bytes_of(const ggml_tensor * t, size_t offset, size_t n) {
    ggml_tensor bytes = {};
    bytes.type   = GGML_TYPE_I8;
    bytes.buffer = t->buffer;
    bytes.data   = (uint8_t *) t->data + offset;
    bytes.ne[0]  = (int64_t) n;
    bytes.ne[1]  = bytes.ne[2] = bytes.ne[3] = 1;
    bytes.nb[0]  = 1;
    bytes.nb[1]  = bytes.nb[2] = bytes.nb[3] = n;
    return bytes;
}

void fn_lean_stage::zero(const ggml_tensor * t, size_t offset, size_t size) {
    ggml_tensor bytes = fn_bytes_of(t, offset, size);
    for (size_t at = 0; at < size; at += zeros.size()) {
        upload(&bytes, zeros.data(), at, std::min(zeros.size(), size - at));
    }
}

void fn_lean_stage::copy_slot(const ggml_tensor * slots, int32_t slot, ggml_tensor * dst, int32_t expert) {
    const ggml_tensor from = fn_bytes_of(slots, slot*slots->nb[2], slots->nb[2]);
    ggml_tensor       to   = fn_bytes_of(dst,   expert*dst->nb[2], dst->nb[2]);
    ggml_backend_t stream = copier ? copier.get() : backend.get();
    ggml_backend_tensor_copy_async(stream, stream, &from, &to);
}

void fn_lean_stage::poison(const fn_lean_layer & l, int32_t place) {
    for (int i = 0; i < 3; ++i) {
        ggml_tensor * dst = l.dst[i][place];
        for (size_t at = 0; at < ggml_nbytes(dst); at += junk.size()) {
            upload(dst, junk.data(), at, std::min(junk.size(), ggml_nbytes(dst) - at));
        }
    }
    ggml_backend_synchronize(backend.get());
    std::this_thread::sleep_for(std::chrono::milliseconds(switches.late_ms));
}

void fn_lean_stage::execute(const job & j) {
    const fn_lean_layer & l = *layers[j.layer];

    if (switches.late_ms >= 0) {
        poison(l, j.place);
    }

    fn_lean_job_times t = { j.layer, j.place, j.t_submit, ggml_time_us(), 0, 0, 0 };
    for (int i = 0; i < 3; ++i) {
        const ggml_tensor * src = l.src[i];
        ggml_tensor       * dst = l.dst[i][j.place];
        const size_t n_expert_bytes = src->nb[2];
        for (const copy & c : j.copies) {
            if (c.slot >= 0) {
                copy_slot(l.slots[i], c.slot, dst, c.expert);
                t.bytes_copied += n_expert_bytes;
            } else {
                upload(dst, (const uint8_t *) src->data + c.expert*n_expert_bytes, c.expert*n_expert_bytes, c.n_experts*n_expert_bytes);
                t.bytes_uploaded += c.n_experts*n_expert_bytes;
            }
            if (c.pad) {
                const size_t end = (c.expert + c.n_experts)*n_expert_bytes;
                upload(dst, (const uint8_t *) src->data + end, end, std::min(FN_LEAN_PAD, n_expert_bytes));
            }
        }
        if (l.pad[i]) {
            zero(dst, ggml_nbytes(dst), l.pad[i]); // another layer's larger tensor may have been there
        }
    }
    int64_t t_copied = t.t_begin;
    if (copier && t.bytes_copied > 0) {
        ggml_backend_synchronize(copier.get());
        t_copied = ggml_time_us();
        balance.saw_copies(t.bytes_copied, t_copied - t.t_begin);
    }
    ggml_backend_synchronize(backend.get());
    t.t_end = ggml_time_us();
    if (t.t_end - t_copied > FN_LEAN_SEEN_US) {
        balance.saw_uploads(t.bytes_uploaded, t.t_end - t.t_begin); // otherwise they may have ended earlier
    }

    bytes_uploaded += t.bytes_uploaded;
    bytes_copied   += t.bytes_copied;
    upload_us      += t.t_end - t.t_begin;
    {
        std::lock_guard<std::mutex> lock(mutex);
        done = j.serial;
        if (times.size() < FN_LEAN_TIMES_MAX) {
            times.push_back(t);
        }
    }
    cv_done.notify_all();
}

uint64_t fn_lean_stage::refill(int32_t layer, const std::vector<int32_t> & expert_in) {
    const fn_lean_layer & l = *layers[layer];
    uint64_t result = 0;
    for (int i = 0; i < 3; ++i) {
        const ggml_tensor * src = l.src[i];
        ggml_tensor dst = *l.slots[i];
        const auto expert_of = [&](int64_t slot) { return slot < (int64_t) expert_in.size() ? expert_in[slot] : -1; };
        for (int64_t slot = 0; slot < dst.ne[2]; ) {
            const int64_t first = slot;
            if (expert_of(slot) >= 0) {
                upload(&dst, (const uint8_t *) src->data + expert_of(slot)*src->nb[2], slot*dst.nb[2], dst.nb[2]);
                result += dst.nb[2];
                ++slot;
                continue;
            }
            while (slot < dst.ne[2] && expert_of(slot) < 0) {
                ++slot;
            }
            // A masked lane may read it. By the device: most slots are empty in a process's first minutes.
            ggml_tensor empty = fn_bytes_of(&dst, first*dst.nb[2], (slot - first)*dst.nb[2]);
            ggml_backend_tensor_memset(&empty, 0, 0, ggml_nbytes(&empty));
        }
        const size_t pad = ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(dst.buffer), &dst) - ggml_nbytes(&dst);
        if (pad) {
            zero(&dst, ggml_nbytes(&dst), pad);
        }
    }
    ggml_backend_synchronize(backend.get());
    bytes_uploaded += result;
    return result;
}

std::vector<fn_lean_job_times> fn_lean_stage::take_times() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<fn_lean_job_times> result;
    result.swap(times);
    return result;
}

size_t fn_lean_stage::n_different(int32_t layer, int32_t place, const uint8_t * experts, uint64_t & n_verified) const {
    const fn_lean_layer & l = *layers[layer];
    std::vector<uint8_t> staged;
    size_t result = 0;
    for (int i = 0; i < 3; ++i) {
        const ggml_tensor * src = l.src[i];
        staged.resize(ggml_nbytes(src));
        ggml_backend_tensor_get(l.dst[i][place], staged.data(), 0, staged.size());
        for (int64_t e = 0; e < src->ne[2]; ++e) {
            if (experts && !experts[e]) {
                continue;
            }
            const size_t offset = e*src->nb[2];
            if (memcmp(staged.data() + offset, (const uint8_t *) src->data + offset, src->nb[2]) != 0) {
                for (size_t k = offset; k < offset + src->nb[2]; ++k) {
                    result += staged[k] != ((const uint8_t *) src->data)[k];
                }
            }
            n_verified += i == 2;
        }
    }
    return result;
}
