#include "fn-vgpu-device.h"

std::string fn_vgpu_device::stats_json() const {
    const fn_vgpu_stats s    = stats();
    const uint64_t      free = s.memory_bytes > s.allocated_bytes ? s.memory_bytes - s.allocated_bytes : 0;

    std::string json  = "{\"name\":\"" + options.name + "\"";
    const auto  field = [&json](const char * key, uint64_t value) {
        json += ",\"" + std::string(key) + "\":" + std::to_string(value);
    };
    field("memory_bytes", s.memory_bytes);
    field("free_bytes", free);
    field("allocated_bytes", s.allocated_bytes);
    field("peak_bytes", s.peak_bytes);
    field("buffers", s.buffers);
    field("allocations", s.allocations);
    field("refusals", s.refusals);
    field("frees", s.frees);
    field("uploads", s.uploads);
    field("upload_bytes", s.upload_bytes);
    field("downloads", s.downloads);
    field("download_bytes", s.download_bytes);
    field("copies", s.copies);
    field("copy_bytes", s.copy_bytes);
    field("graphs", s.graphs);
    field("faults", s.faults);
    return json + "}";
}
