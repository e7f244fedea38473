#include "fn-host-experts.h"

#include "fn-host-pin.h"
#include "fn-host-read.h"

#include "llama-impl.h"
#include "llama-mmap.h"
#include "llama-model-loader.h"

#include "../ggml/src/ggml-backend-impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <regex>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static constexpr int32_t FN_HOST_THREADS_MAX = 8;

static bool fn_host_on() {
    const char * value = getenv("LLAMA_MMAP_PIN_HOST");
    return !value || atoi(value) != 0;
}

static bool fn_is_host_type_of_device(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return dev && buft == ggml_backend_dev_host_buffer_type(dev);
}

//
// overrides
//

ggml_backend_buffer_type_t fn_host_override(const llama_model_loader & ml, const std::string & tensor_name) {
    if (!ml.tensor_buft_overrides || !fn_host_on()) {
        return nullptr;
    }
    for (const auto * o = ml.tensor_buft_overrides; o->pattern != nullptr; ++o) {
        if (std::regex_search(tensor_name, std::regex(o->pattern))) {
            return fn_is_host_type_of_device(o->buft) ? o->buft : nullptr;
        }
    }
    return nullptr;
}

// --cpu-moe and --n-cpu-moe make their own patterns, for layers that a model may not have
static bool fn_is_generated(const std::string & pattern) {
    for (const char * suffix : { "\\.ffn_(up|down|gate|gate_up)_(ch|)exps", "\\.ffn_(up|down|gate)\\." }) {
        const size_t n = strlen(suffix);
        if (pattern.size() >= n && pattern.compare(pattern.size() - n, n, suffix) == 0) {
            return true;
        }
    }
    return false;
}

static size_t fn_edit_distance(const std::string & a, const std::string & b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t up = row[j];
            row[j] = std::min({ up + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]) });
            diagonal = up;
        }
    }
    return row[b.size()];
}

static std::vector<std::string> fn_nearest_names(const llama_model_loader & ml, const std::string & pattern) {
    // the letters of the pattern, without the syntax
    std::string plain;
    for (const char c : pattern) {
        if (isalnum((unsigned char) c) || c == '_' || c == '.') {
            plain += c;
        }
    }
    std::vector<std::pair<size_t, std::string>> ranked;
    std::map<std::string, bool> seen; // one per kind of tensor, not one per layer
    for (const auto & item : ml.weights_map) {
        const std::string kind = std::regex_replace(item.first, std::regex("[0-9]+"), "N");
        if (!seen.emplace(kind, true).second) {
            continue;
        }
        // the best place for the pattern within the name
        size_t best = fn_edit_distance(plain, item.first);
        for (size_t i = 0; i + plain.size() <= item.first.size(); ++i) {
            best = std::min(best, fn_edit_distance(plain, item.first.substr(i, plain.size())));
        }
        ranked.emplace_back(best, item.first);
    }
    std::sort(ranked.begin(), ranked.end());

    std::vector<std::string> names;
    for (size_t i = 0; i < std::min<size_t>(3, ranked.size()); ++i) {
        names.push_back(ranked[i].second);
    }
    return names;
}

void fn_host_check_overrides(const llama_model_loader & ml) {
    if (!ml.tensor_buft_overrides || ml.weights_map.empty() || !fn_host_on()) {
        return;
    }
    for (const auto * o = ml.tensor_buft_overrides; o->pattern != nullptr; ++o) {
        const std::regex pattern(o->pattern);
        const bool found = std::any_of(ml.weights_map.begin(), ml.weights_map.end(), [&](const auto & item) {
            return std::regex_search(item.first, pattern);
        });
        if (found || fn_is_generated(o->pattern)) {
            continue;
        }
        std::string names;
        for (const std::string & name : fn_nearest_names(ml, o->pattern)) {
            names += (names.empty() ? "" : ", ") + name;
        }
        throw std::runtime_error(format("tensor override '%s' matches no tensor of the model; nearest names: %s", o->pattern, names.c_str()));
    }
}

//
// memory
//

namespace {

// lives beside the mapping; a buffer's own context is the address of its data
struct host_region {
    uint8_t * base = nullptr;
    size_t    size = 0;
    bool      loaded = false;

    fn_host_unpin_t unpin = nullptr;
    std::vector<void *> pinned;
};

} // namespace

// the first page of the mapping points to its region
static host_region * fn_region(ggml_backend_buffer_t buffer) {
    host_region * region;
    memcpy(&region, (const uint8_t *) buffer->context - FN_HOST_PAGE, sizeof(region));
    return region;
}

static void fn_region_free(ggml_backend_buffer_t buffer) {
    host_region * region = fn_region(buffer);
    for (void * ptr : region->pinned) {
        region->unpin(ptr);
    }
    munmap(region->base, region->size);
    delete region;
}

static bool fn_is_ours(ggml_backend_buffer_t buffer) {
    return buffer && buffer->iface.free_buffer == fn_region_free;
}

static bool fn_find_pin(ggml_backend_buffer_type_t buft, fn_host_pin_t & pin, fn_host_unpin_t & unpin) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    if (!reg) {
        return false;
    }
    pin   = (fn_host_pin_t)   ggml_backend_reg_get_proc_address(reg, "fn_host_pin");
    unpin = (fn_host_unpin_t) ggml_backend_reg_get_proc_address(reg, "fn_host_unpin");
    return pin && unpin;
}

ggml_backend_buffer_t fn_host_alloc(const llama_model_loader & ml, ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const bool plain  = buft == ggml_backend_cpu_buffer_type();
    const bool locked = fn_is_host_type_of_device(buft);
    if (!fn_host_on() || ml.files.empty() || (!plain && !locked)) {
        return nullptr;
    }

    fn_host_pin_t   pin   = nullptr;
    fn_host_unpin_t unpin = nullptr;
    if (locked && !fn_find_pin(buft, pin, unpin)) {
        // a backend that locks in its own way: it may, but not fall back in silence
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
        if (buffer && ggml_backend_buffer_get_type(buffer) != buft) {
            ggml_backend_buffer_free(buffer);
            throw std::runtime_error(format("%s gave pageable memory (%s)", ggml_backend_buft_name(buft), fn_host_limits().c_str()));
        }
        return buffer;
    }

    // tensors keep the offset in the page that they have in the file: direct reads then go straight to their place,
    // and each tensor has whole pages of its own, which can be locked as one range
    size_t size = FN_HOST_PAGE;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        const auto * weight = ml.get_weight(ggml_get_name(t));
        if (!weight || t->view_src || weight->offs % ggml_backend_buft_get_alignment(buft) != 0) {
            return nullptr; // nothing to read for it: leave the whole to the stock path
        }
        size += fn_host_pages(weight->offs, ggml_nbytes(t));
    }

    uint8_t * base = (uint8_t *) mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        throw std::runtime_error(format("cannot map %zu bytes of host memory for %s: %s (%s)", size, ggml_backend_buft_name(buft),
                    strerror(errno), fn_host_limits().c_str()));
    }
    madvise(base, size, MADV_HUGEPAGE); // fewer faults; a kernel without it is only slower

    host_region * region = new host_region();
    region->base  = base;
    region->size  = size;
    region->unpin = unpin;
    memcpy(base, &region, sizeof(region));

    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(base + FN_HOST_PAGE, size - FN_HOST_PAGE);
    buffer->buft = buft;
    buffer->iface.free_buffer = fn_region_free;

    uint8_t * next = base + FN_HOST_PAGE;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        const auto * weight = ml.get_weight(ggml_get_name(t));
        ggml_backend_tensor_alloc(buffer, t, next + weight->offs % FN_HOST_PAGE);
        next += fn_host_pages(weight->offs, ggml_nbytes(t));
    }
    return buffer;
}

//
// loading
//

namespace {

// second descriptors of the model's files, for direct reads where the stock loader was asked for them
struct direct_files {
    std::vector<int> fds;

    ~direct_files() {
        for (const int fd : fds) {
            close(fd);
        }
    }

    bool open_all(const llama_model_loader & ml) {
        for (const auto & file : ml.files) {
            const std::string path = "/proc/self/fd/" + std::to_string(file->file_id());
            const int fd = open(path.c_str(), O_RDONLY | O_DIRECT);
            if (fd < 0) {
                return false;
            }
            fds.push_back(fd);
        }
        return true;
    }
};

} // namespace

static void fn_report(const fn_host_read_result & result, size_t size, bool locked, int32_t n_threads, bool direct) {
    fprintf(stderr, "\nfn:host:loaded {\"size_bytes\":%zu,\"locked\":%s,\"threads\":%d,\"direct\":%s,\"read_s\":%.3f,\"pin_s\":%.3f,\"total_s\":%.3f}\n",
            size, locked ? "true" : "false", n_threads, direct ? "true" : "false", result.read_s, result.pin_s, result.total_s);
    fflush(stderr);
}

static void fn_load_failed(const fn_host_read_result & result, ggml_backend_buffer_type_t buft) {
    if (result.pin_failed_bytes == 0) {
        throw std::runtime_error(format("tensor '%s': %s", result.tensor.c_str(), result.error.c_str()));
    }
    fprintf(stderr, "\nfn:host:refused {\"tensor\":\"%s\",\"bytes\":%zu,\"type\":\"%s\",\"reason\":\"%s\",\"limits\":\"%s\"}\n",
            result.tensor.c_str(), result.pin_failed_bytes, ggml_backend_buft_name(buft), result.error.c_str(), fn_host_limits().c_str());
    fflush(stderr);
    throw std::runtime_error(format("cannot page-lock %zu bytes for tensor '%s' in %s: %s (%s)",
                result.pin_failed_bytes, result.tensor.c_str(), ggml_backend_buft_name(buft), result.error.c_str(), fn_host_limits().c_str()));
}

bool fn_host_loaded(const ggml_tensor * tensor) {
    return fn_is_ours(tensor->buffer) && fn_region(tensor->buffer)->loaded;
}

bool fn_host_load(const llama_model_loader & ml, const std::vector<ggml_tensor *> & tensors,
        bool (*progress)(float progress, void * user_data), void * user_data) {
    direct_files files;
    const bool direct = !ml.files.empty() && ml.files[0]->has_direct_io() && files.open_all(ml);

    std::vector<fn_host_tensor> list;
    ggml_backend_buffer_t buffer = nullptr;
    size_t size = 0;
    for (const ggml_tensor * t : tensors) {
        const auto * weight = ml.get_weight(ggml_get_name(t));
        if (!weight || !fn_is_ours(t->buffer)) {
            continue;
        }
        buffer = t->buffer; // the tensors of a call have one buffer

        fn_host_tensor item;
        item.name = ggml_get_name(t);
        item.fd   = direct ? files.fds[weight->idx] : ml.files[weight->idx]->file_id();
        item.offs = weight->offs;
        item.data = (uint8_t *) t->data;
        item.size = ggml_nbytes(t);
        size += item.size;
        list.push_back(std::move(item));
    }
    if (list.empty()) {
        return true;
    }

    fn_host_read_params params;
    params.n_threads = std::min<int32_t>(FN_HOST_THREADS_MAX, std::max(1u, std::thread::hardware_concurrency()));
    params.direct    = direct;

    fn_host_pin_t   pin   = nullptr;
    fn_host_unpin_t unpin = nullptr;
    const bool locked = fn_find_pin(buffer->buft, pin, unpin) && fn_is_host_type_of_device(buffer->buft);
    if (locked) {
        params.pin = [pin](void * ptr, size_t n, std::string & error) {
            char text[256] = "";
            const bool ok = pin(ptr, n, text, sizeof(text));
            error = text;
            return ok;
        };
    }
    if (progress) {
        params.progress = [&](size_t done) {
            return progress((float) (ml.size_done + std::min(done, size))/ml.size_data, user_data);
        };
    }

    const fn_host_read_result result = fn_host_read(list, params);

    host_region * region = fn_region(buffer);
    for (const size_t i : result.pinned) {
        region->pinned.push_back(list[i].data - list[i].offs % FN_HOST_PAGE);
    }
    if (result.stopped) {
        return false;
    }
    if (!result.ok) {
        fn_load_failed(result, buffer->buft);
    }
    region->loaded = true;
    fn_report(result, size, locked, params.n_threads, direct);

    if (ml.check_tensors) {
        for (const ggml_tensor * t : tensors) {
            if (fn_is_ours(t->buffer) && !ggml_validate_row_data(t->type, t->data, ggml_nbytes(t))) {
                throw std::runtime_error(format("tensor '%s' has invalid data", ggml_get_name(t)));
            }
        }
    }
    return true;
}
