#include "fn-expert-slots.h"

#include "fn-expert-lru.h"

#include "ggml-alloc.h"

#include <algorithm>

static constexpr size_t FN_LATE_BYTES = 8*1024*1024;

fn_expert_slots::fn_expert_slots(std::vector<fn_slot_layer> layers_in, const std::vector<ggml_backend_t> & backends, int32_t n_physical, int32_t n_late) :
    layers(std::move(layers_in)),
    n_late(n_late) {
    for (size_t il = 0; il < layers.size(); ++il) {
        fn_slot_layer & layer = layers[il];

        auto it = std::find_if(devices.begin(), devices.end(), [&](const fn_slot_device & d) { return d.dev == layer.dev; });
        if (it == devices.end()) {
            devices.emplace_back();
            it = devices.end() - 1;
            it->dev = layer.dev;
        }
        layer.device = (int32_t) (it - devices.begin());
        it->layers.push_back((int32_t) il);
    }

    for (fn_slot_device & device : devices) {
        for (ggml_backend_t backend : backends) {
            if (ggml_backend_get_device(backend) == device.dev) {
                device.compute = backend;
            }
        }
        GGML_ASSERT(device.compute != nullptr);

        ggml_backend_dev_props props;
        ggml_backend_dev_get_props(device.dev, &props);
        if (props.caps.async) {
            device.upload.reset(ggml_backend_dev_init(device.dev, nullptr));
        }

        ggml_init_params params = {
            /*.mem_size   =*/ ggml_tensor_overhead()*3*device.layers.size(),
            /*.mem_buffer =*/ nullptr,
            /*.no_alloc   =*/ true,
        };
        device.ctx.reset(ggml_init(params));

        for (int32_t il : device.layers) {
            for (int i = 0; i < 3; ++i) {
                const ggml_tensor * src = layers[il].src[i];
                ggml_tensor * dst = ggml_new_tensor_3d(device.ctx.get(), src->type, src->ne[0], src->ne[1], n_physical);
                ggml_format_name(dst, "fn_slots.%d.%s", il, src->name);
                layers[il].dst[i] = dst;
                device.slot_bytes += dst->nb[2];
            }
        }
    }

    events.resize(layers.size());
    for (size_t il = 0; il < layers.size(); ++il) {
        const fn_slot_device & device = devices[layers[il].device];
        if (device.upload) {
            events[il].reset(ggml_backend_event_new(device.dev));
        }
    }

    if (n_late > 0) {
        for (const fn_slot_layer & layer : layers) {
            for (const ggml_tensor * dst : layer.dst) {
                slot_max = std::max(slot_max, dst->nb[2]);
            }
        }
    }
}

fn_expert_slots::~fn_expert_slots() {
    drain();
}

bool fn_expert_slots::plan(int32_t n_slots, int32_t n_used, int32_t n_inserts) {
    bool fits = true;

    for (fn_slot_device & device : devices) {
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device.dev);
        const size_t align = ggml_backend_buft_get_alignment(buft);

        device.need_bytes = 0;
        for (ggml_tensor * t = ggml_get_first_tensor(device.ctx.get()); t; t = ggml_get_next_tensor(device.ctx.get(), t)) {
            device.need_bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), align);
        }

        size_t total = 0;
        ggml_backend_dev_memory(device.dev, &device.free_bytes, &total);

        // what does not depend on the number of slots: row padding and alignment of the tensors
        const int32_t n_physical = n_slots + fn_expert_lru::spare_needed(n_slots, n_used, n_inserts);
        const size_t  fixed      = device.need_bytes - (size_t) n_physical*device.slot_bytes;

        device.n_fit = 0;
        for (int32_t n = 1; n <= n_slots; ++n) {
            const int32_t n_phys = n + fn_expert_lru::spare_needed(n, n_used, n_inserts);
            if (fixed + (size_t) n_phys*device.slot_bytes > device.free_bytes) {
                break;
            }
            device.n_fit = n;
        }

        fits = fits && device.need_bytes <= device.free_bytes;
    }

    return fits;
}

bool fn_expert_slots::alloc() {
    for (fn_slot_device & device : devices) {
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device.dev);

        device.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(device.ctx.get(), buft));
        if (!device.buf) {
            free();
            return false;
        }

        // the graph runs where its weights are
        ggml_backend_buffer_set_usage(device.buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

        // a masked lane multiplies what it reads by zero: every byte has to be finite from the start
        ggml_backend_buffer_clear(device.buf.get(), 0);

        if (n_late > 0) {
            make_late(device);
        }
    }
    return true;
}

void fn_expert_slots::free() {
    drain();
    for (fn_slot_device & device : devices) {
        device.buf.reset();
        for (ggml_tensor * t = ggml_get_first_tensor(device.ctx.get()); t; t = ggml_get_next_tensor(device.ctx.get(), t)) {
            t->data   = nullptr;
            t->buffer = nullptr;
        }
        device.late_buf.reset();
        device.late_src.reset();
        device.late_ctx.reset();
        device.late_dst = nullptr;
    }
}

void fn_expert_slots::make_late(fn_slot_device & device) {
    ggml_init_params params = { ggml_tensor_overhead(), nullptr, true };
    device.late_ctx.reset(ggml_init(params));
    device.late_dst = ggml_new_tensor_1d(device.late_ctx.get(), GGML_TYPE_I8, FN_LATE_BYTES);
    device.late_buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(device.late_ctx.get(), ggml_backend_dev_buffer_type(device.dev)));
    GGML_ASSERT(device.late_buf);

    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(device.dev);
    device.late_src.reset(ggml_backend_buft_alloc_buffer(host ? host : ggml_backend_cpu_buffer_type(), std::max(FN_LATE_BYTES, slot_max)));
    GGML_ASSERT(device.late_src);
    ggml_backend_buffer_clear(device.late_src.get(), 0xff); // a NaN in every float type, and as the scale of a quantized block
}

void fn_expert_slots::upload(int32_t il, int32_t expert, int32_t slot) {
    const fn_slot_layer & layer = layers[il];
    fn_slot_device & device = devices[layer.device];

    auto set = [&](ggml_tensor * dst, const void * data, size_t offset, size_t size) {
        if (device.upload) {
            ggml_backend_tensor_set_async(device.upload.get(), dst, data, offset, size);
        } else {
            ggml_backend_tensor_set(dst, data, offset, size);
        }
    };

    if (n_late > 0) {
        const void * poison = ggml_backend_buffer_get_base(device.late_src.get());
        for (ggml_tensor * dst : layer.dst) {
            set(dst, poison, slot*dst->nb[2], dst->nb[2]);
        }
        for (int32_t i = 0; i < n_late; ++i) {
            set(device.late_dst, poison, 0, FN_LATE_BYTES);
        }
    }

    for (int i = 0; i < 3; ++i) {
        const ggml_tensor * src = layer.src[i];
        ggml_tensor       * dst = layer.dst[i];
        set(dst, (const uint8_t *) src->data + expert*src->nb[2], slot*dst->nb[2], dst->nb[2]);
    }
}

void fn_expert_slots::fence(int32_t il) {
    if (events[il]) {
        ggml_backend_event_record(events[il].get(), devices[layers[il].device].upload.get());
    }
}

void fn_expert_slots::wait(int32_t il) {
    const fn_slot_device & device = devices[layers[il].device];
    if (events[il]) {
        ggml_backend_event_wait(device.compute, events[il].get());
    } else if (device.upload) {
        ggml_backend_synchronize(device.upload.get());
    }
}

void fn_expert_slots::drain() {
    for (fn_slot_device & device : devices) {
        if (device.upload) {
            ggml_backend_synchronize(device.upload.get());
        }
    }
}

size_t fn_expert_slots::size_bytes(int32_t i) const {
    return devices[i].buf ? ggml_backend_buffer_get_size(devices[i].buf.get()) : 0;
}
