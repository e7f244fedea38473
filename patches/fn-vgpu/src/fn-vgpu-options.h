#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Command line of fn-vgpu.

enum fn_vgpu_event {
    FN_VGPU_EVENT_ALLOC,           // the allocation fails
    FN_VGPU_EVENT_ABORT,           // the process is gone (SIGKILL) when the graph arrives
    FN_VGPU_EVENT_HANG,            // the graph is never computed
    FN_VGPU_EVENT_UPLOAD_CORRUPT,  // one byte of the upload is inverted
};

// A fault that happens once, at the n-th event of its kind (1 = the next one) after it was armed.
struct fn_vgpu_fault {
    fn_vgpu_event event;
    uint64_t      n;
};

struct fn_vgpu_options {
    std::string host         = "127.0.0.1";
    int         port         = 0;  // 0: a free one
    int         control_port = 0;  // 0: a free one
    std::string name         = "vgpu";
    size_t      memory_bytes = 0;  // 0: as much as the host has
    int         n_threads    = 1;

    uint64_t upload_delay_us  = 0;
    uint64_t compute_delay_us = 0;
    uint64_t upload_mib_s     = 0;  // 0: no limit

    std::vector<fn_vgpu_fault> faults;

    bool parent_death = true;
    bool help         = false;
};

const char * fn_vgpu_event_name(fn_vgpu_event event);

// "123", "64KiB", "1.5GiB"
bool fn_vgpu_parse_size(const std::string & text, size_t & bytes);

// "alloc:3": the event's name and a count >= 1
bool fn_vgpu_parse_fault(const std::string & text, fn_vgpu_fault & fault);

// On false, `error` says what is wrong with which option.
bool fn_vgpu_options_parse(int argc, const char * const * argv, fn_vgpu_options & options, std::string & error);

const char * fn_vgpu_help();
