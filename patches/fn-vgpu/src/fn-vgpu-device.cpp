#include "fn-vgpu-device.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>

// A buffer: a CPU buffer and whose books it is in.
struct fn_vgpu_buffer {
    fn_vgpu_device *      device;
    ggml_backend_buffer_t inner;
};

// A backend: a CPU backend of its own, so that two backends of one device do not share a work buffer.
struct fn_vgpu_backend {
    fn_vgpu_device * device;
    ggml_backend_t   inner;
};

//
// buffer
//

static fn_vgpu_buffer * fn_vgpu_of(ggml_backend_buffer_t buffer) {
    return (fn_vgpu_buffer *) buffer->context;
}

static void fn_vgpu_buffer_free(ggml_backend_buffer_t buffer) {
    fn_vgpu_buffer * self = fn_vgpu_of(buffer);
    ggml_backend_buffer_free(self->inner);
    self->device->free_buffer(buffer->size);
    delete self;
}

static void * fn_vgpu_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ggml_backend_buffer_get_base(fn_vgpu_of(buffer)->inner);
}

static void fn_vgpu_buffer_memset_tensor(ggml_backend_buffer_t buffer,
                                         ggml_tensor *         tensor,
                                         uint8_t               value,
                                         size_t                offset,
                                         size_t                size) {
    memset((char *) tensor->data + offset, value, size);
    GGML_UNUSED(buffer);
}

static void fn_vgpu_buffer_set_tensor(ggml_backend_buffer_t buffer,
                                      ggml_tensor *         tensor,
                                      const void *          data,
                                      size_t                offset,
                                      size_t                size) {
    fn_vgpu_of(buffer)->device->upload(tensor, data, offset, size);
}

static void fn_vgpu_buffer_get_tensor(ggml_backend_buffer_t buffer,
                                      const ggml_tensor *   tensor,
                                      void *                data,
                                      size_t                offset,
                                      size_t                size) {
    memcpy(data, (const char *) tensor->data + offset, size);
    fn_vgpu_of(buffer)->device->count_download(size);
}

static bool fn_vgpu_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    if (!ggml_backend_buffer_is_host(src->buffer)) {
        return false;
    }
    memcpy(dst->data, src->data, ggml_nbytes(src));
    fn_vgpu_of(buffer)->device->count_copy(ggml_nbytes(src));
    return true;
}

static void fn_vgpu_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    ggml_backend_buffer_clear(fn_vgpu_of(buffer)->inner, value);
}

static const ggml_backend_buffer_i fn_vgpu_buffer_i = {
    /* .free_buffer   = */ fn_vgpu_buffer_free,
    /* .get_base      = */ fn_vgpu_buffer_get_base,
    /* .init_tensor   = */ NULL,
    /* .memset_tensor = */ fn_vgpu_buffer_memset_tensor,
    /* .set_tensor    = */ fn_vgpu_buffer_set_tensor,
    /* .get_tensor    = */ fn_vgpu_buffer_get_tensor,
    /* .set_tensor_2d = */ NULL,
    /* .get_tensor_2d = */ NULL,
    /* .cpy_tensor    = */ fn_vgpu_buffer_cpy_tensor,
    /* .clear         = */ fn_vgpu_buffer_clear,
    /* .reset         = */ NULL,
};

//
// buffer type
//

static fn_vgpu_device * fn_vgpu_of(ggml_backend_buffer_type_t buft) {
    return (fn_vgpu_device *) buft->context;
}

static const char * fn_vgpu_buft_get_name(ggml_backend_buffer_type_t buft) {
    return fn_vgpu_of(buft)->name().c_str();
}

static ggml_backend_buffer_t fn_vgpu_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return fn_vgpu_of(buft)->alloc_buffer(size);
}

static size_t fn_vgpu_buft_get_alignment(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
    GGML_UNUSED(buft);
}

static bool fn_vgpu_buft_is_host(ggml_backend_buffer_type_t buft) {
    return true;
    GGML_UNUSED(buft);
}

static const ggml_backend_buffer_type_i fn_vgpu_buft_i = {
    /* .get_name       = */ fn_vgpu_buft_get_name,
    /* .alloc_buffer   = */ fn_vgpu_buft_alloc_buffer,
    /* .get_alignment  = */ fn_vgpu_buft_get_alignment,
    /* .get_max_size   = */ NULL,
    /* .get_alloc_size = */ NULL,
    /* .is_host        = */ fn_vgpu_buft_is_host,
};

//
// backend
//

static fn_vgpu_backend * fn_vgpu_of(ggml_backend_t backend) {
    return (fn_vgpu_backend *) backend->context;
}

static ggml_guid_t fn_vgpu_backend_guid() {
    static ggml_guid guid = { 0x66, 0x6e, 0x76, 0x67, 0x70, 0x75, 0x4b, 0x0d,
                              0x9a, 0x31, 0x5e, 0xc8, 0x27, 0x70, 0x1f, 0xd2 };
    return &guid;
}

static const char * fn_vgpu_backend_get_name(ggml_backend_t backend) {
    return fn_vgpu_of(backend)->device->name().c_str();
}

static void fn_vgpu_backend_free(ggml_backend_t backend) {
    fn_vgpu_of(backend)->device->forget_backend(backend);
    ggml_backend_free(fn_vgpu_of(backend)->inner);
    delete fn_vgpu_of(backend);
    delete backend;
}

static ggml_status fn_vgpu_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    fn_vgpu_backend * self = fn_vgpu_of(backend);
    return self->device->compute(self->inner, graph);
}

static const ggml_backend_i fn_vgpu_backend_i = {
    /* .get_name            = */ fn_vgpu_backend_get_name,
    /* .free                = */ fn_vgpu_backend_free,
    /* .set_tensor_async    = */ NULL,
    /* .get_tensor_async    = */ NULL,
    /* .set_tensor_2d_async = */ NULL,
    /* .get_tensor_2d_async = */ NULL,
    /* .cpy_tensor_async    = */ NULL,
    /* .synchronize         = */ NULL,
    /* .graph_plan_create   = */ NULL,
    /* .graph_plan_free     = */ NULL,
    /* .graph_plan_update   = */ NULL,
    /* .graph_plan_compute  = */ NULL,
    /* .graph_compute       = */ fn_vgpu_backend_graph_compute,
    /* .event_record        = */ NULL,
    /* .event_wait          = */ NULL,
    /* .graph_optimize      = */ NULL,
};

//
// device
//

static fn_vgpu_device * fn_vgpu_of(ggml_backend_dev_t dev) {
    return (fn_vgpu_device *) dev->context;
}

static ggml_backend_dev_t fn_vgpu_cpu_dev() {
    return ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
}

static const char * fn_vgpu_dev_get_name(ggml_backend_dev_t dev) {
    return fn_vgpu_of(dev)->name().c_str();
}

static const char * fn_vgpu_dev_get_description(ggml_backend_dev_t dev) {
    return "flashnext virtual GPU";
    GGML_UNUSED(dev);
}

static void fn_vgpu_dev_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    fn_vgpu_of(dev)->memory(free, total);
}

static enum ggml_backend_dev_type fn_vgpu_dev_get_type(ggml_backend_dev_t dev) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
    GGML_UNUSED(dev);
}

static void fn_vgpu_dev_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = fn_vgpu_dev_get_name(dev);
    props->description = fn_vgpu_dev_get_description(dev);
    props->type        = fn_vgpu_dev_get_type(dev);
    fn_vgpu_dev_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {
        /* .async                = */ false,
        /* .host_buffer          = */ false,
        /* .buffer_from_host_ptr = */ false,
        /* .events               = */ false,
        /* .mmap_support         = */ false,
    };
}

static ggml_backend_t fn_vgpu_dev_init_backend(ggml_backend_dev_t dev, const char * params) {
    return fn_vgpu_of(dev)->init_backend();
    GGML_UNUSED(params);
}

static bool fn_vgpu_dev_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(fn_vgpu_cpu_dev(), op);
    GGML_UNUSED(dev);
}

static bool fn_vgpu_dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft->device == dev;
}

//
// registry of one device: the RPC server asks it for functions and gets none
//

static const char * fn_vgpu_reg_get_name(ggml_backend_reg_t reg) {
    return "VGPU";
    GGML_UNUSED(reg);
}

static size_t fn_vgpu_reg_get_device_count(ggml_backend_reg_t reg) {
    return 1;
    GGML_UNUSED(reg);
}

static ggml_backend_dev_t fn_vgpu_reg_get_device(ggml_backend_reg_t reg, size_t index) {
    GGML_ASSERT(index == 0);
    return ((fn_vgpu_device *) reg->context)->dev();
}

//
// fn_vgpu_device
//

fn_vgpu_device::fn_vgpu_device(const fn_vgpu_options & options, fn_vgpu_emit emit) :
    options(options),
    emit(std::move(emit)),
    armed(options.faults),
    reg{ GGML_BACKEND_API_VERSION, {}, this },
    device{ {}, &reg, this },
    buft{ fn_vgpu_buft_i, &device, this } {
    reg.iface.get_name         = fn_vgpu_reg_get_name;
    reg.iface.get_device_count = fn_vgpu_reg_get_device_count;
    reg.iface.get_device       = fn_vgpu_reg_get_device;

    device.iface.get_name        = fn_vgpu_dev_get_name;
    device.iface.get_description = fn_vgpu_dev_get_description;
    device.iface.get_memory      = fn_vgpu_dev_get_memory;
    device.iface.get_type        = fn_vgpu_dev_get_type;
    device.iface.get_props       = fn_vgpu_dev_get_props;
    device.iface.init_backend    = fn_vgpu_dev_init_backend;
    device.iface.get_buffer_type = [](ggml_backend_dev_t dev) -> ggml_backend_buffer_type_t {
        return &fn_vgpu_of(dev)->buft;
    };
    device.iface.supports_op   = fn_vgpu_dev_supports_op;
    device.iface.supports_buft = fn_vgpu_dev_supports_buft;

    size_t bytes = options.memory_bytes;
    if (bytes == 0) {
        size_t free = 0;
        ggml_backend_dev_memory(fn_vgpu_cpu_dev(), &free, &bytes);
    }
    books.memory_bytes = bytes;
}

fn_vgpu_device::~fn_vgpu_device() {
    // a buffer that outlives its device would write into freed books
    GGML_ASSERT(books.buffers == 0);
    while (!backends.empty()) {
        ggml_backend_free(*backends.begin());
    }
}

fn_vgpu_stats fn_vgpu_device::stats() const {
    std::lock_guard<std::mutex> lock(mutex);
    return books;
}

void fn_vgpu_device::arm(const fn_vgpu_fault & fault) {
    std::lock_guard<std::mutex> lock(mutex);
    armed.push_back(fault);
}

void fn_vgpu_device::set_memory(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    books.memory_bytes = bytes;
}

void fn_vgpu_device::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    stopped.notify_all();
}

bool fn_vgpu_device::is_stopping() const {
    std::lock_guard<std::mutex> lock(mutex);
    return stopping;
}

void fn_vgpu_device::memory(size_t * free, size_t * total) const {
    const fn_vgpu_stats s = stats();
    *total                = s.memory_bytes;
    *free                 = s.memory_bytes > s.allocated_bytes ? s.memory_bytes - s.allocated_bytes : 0;
}

// Counts one event and says whether a fault is due at it.
bool fn_vgpu_device::take_fault(fn_vgpu_event event) {
    uint64_t n_due = 0;
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (size_t i = 0; i < armed.size();) {
            if (armed[i].event == event && --armed[i].n == 0) {
                armed.erase(armed.begin() + (ptrdiff_t) i);
                n_due++;
            } else {
                i++;
            }
        }
        books.faults += n_due;
    }
    if (n_due > 0 && emit) {
        emit("fault", "{\"name\":\"" + options.name + "\",\"event\":\"" + fn_vgpu_event_name(event) + "\"}");
    }
    return n_due > 0;
}

void fn_vgpu_device::sleep_until(clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex);
    stopped.wait_until(lock, deadline, [this] { return stopping; });
}

void fn_vgpu_device::hang() {
    std::unique_lock<std::mutex> lock(mutex);
    stopped.wait(lock, [this] { return stopping; });
}

ggml_backend_t fn_vgpu_device::init_backend() {
    ggml_backend_t inner = ggml_backend_cpu_init();
    if (inner == NULL) {
        return NULL;
    }
    ggml_backend_cpu_set_n_threads(inner, options.n_threads);
    ggml_backend_cpu_set_abort_callback(
        inner, [](void * data) { return ((fn_vgpu_device *) data)->is_stopping(); }, this);
    ggml_backend_t backend = new ggml_backend{
        /* .guid    = */ fn_vgpu_backend_guid(),
        /* .iface   = */ fn_vgpu_backend_i,
        /* .device  = */ &device,
        /* .context = */ new fn_vgpu_backend{ this, inner },
    };
    std::lock_guard<std::mutex> lock(mutex);
    backends.insert(backend);
    return backend;
}

void fn_vgpu_device::forget_backend(ggml_backend_t backend) {
    std::lock_guard<std::mutex> lock(mutex);
    backends.erase(backend);
}

ggml_backend_buffer_t fn_vgpu_device::alloc_buffer(size_t size) {
    const bool faulty = take_fault(FN_VGPU_EVENT_ALLOC);
    uint64_t   free   = 0;
    bool       fits   = false;
    {
        std::lock_guard<std::mutex> lock(mutex);
        free = books.memory_bytes > books.allocated_bytes ? books.memory_bytes - books.allocated_bytes : 0;
        fits = size <= free && !faulty;
        if (fits) {
            books.allocated_bytes += size;  // taken before the memory is, so that two threads cannot both have it
        }
    }
    ggml_backend_buffer_t inner = fits ? ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size) : NULL;

    std::unique_lock<std::mutex> lock(mutex);
    if (inner == NULL) {
        books.allocated_bytes -= fits ? size : 0;
        books.refusals++;
        lock.unlock();
        if (emit && !faulty) {
            emit("refused", "{\"name\":\"" + options.name + "\",\"asked_bytes\":" + std::to_string(size) +
                                ",\"free_bytes\":" + std::to_string(free) + "}");
        }
        return NULL;
    }
    books.allocations++;
    books.buffers++;
    books.peak_bytes = std::max(books.peak_bytes, books.allocated_bytes);
    return ggml_backend_buffer_init(&buft, fn_vgpu_buffer_i, new fn_vgpu_buffer{ this, inner }, size);
}

void fn_vgpu_device::free_buffer(size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    books.allocated_bytes -= size;
    books.buffers--;
    books.frees++;
}

void fn_vgpu_device::upload(ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const clock::time_point start = clock::now();

    uint8_t * dst = (uint8_t *) tensor->data + offset;
    memcpy(dst, data, size);
    if (take_fault(FN_VGPU_EVENT_UPLOAD_CORRUPT)) {
        // in the upper half of a 4-byte number: inverting its lowest byte would hardly change it
        const size_t middle = (size / 2) | 2;
        dst[middle < size ? middle : 0] ^= 0xff;
    }
    uint64_t at_least_us = options.upload_delay_us;
    if (options.upload_mib_s > 0) {
        at_least_us += (uint64_t) ((double) size / (1024.0 * 1024.0) / (double) options.upload_mib_s * 1e6);
    }
    if (at_least_us > 0) {
        sleep_until(start + std::chrono::microseconds(at_least_us));
    }
    std::lock_guard<std::mutex> lock(mutex);
    books.uploads++;
    books.upload_bytes += size;
}

void fn_vgpu_device::count_download(size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    books.downloads++;
    books.download_bytes += size;
}

void fn_vgpu_device::count_copy(size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    books.copies++;
    books.copy_bytes += size;
}

ggml_status fn_vgpu_device::compute(ggml_backend_t inner, ggml_cgraph * graph) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        books.graphs++;
    }
    if (take_fault(FN_VGPU_EVENT_ABORT)) {
        raise(SIGKILL);
    }
    if (take_fault(FN_VGPU_EVENT_HANG)) {
        hang();
    }
    if (options.compute_delay_us > 0) {
        sleep_until(clock::now() + std::chrono::microseconds(options.compute_delay_us));
    }
    const ggml_status status = ggml_backend_graph_compute(inner, graph);
    return status == GGML_STATUS_ABORTED && is_stopping() ? GGML_STATUS_SUCCESS : status;
}
