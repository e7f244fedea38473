#pragma once

#include "ggml-backend.h"

#include <map>
#include <regex>
#include <stdexcept>
#include <string>

// What -ot accepts beyond the devices' own buffer types.

// a device's host buffer type by its name, CUDA_Host for one
inline void fn_host_add_buffer_types(std::map<std::string, ggml_backend_buffer_type_t> & types) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(ggml_backend_dev_get(i))) {
            types.emplace(ggml_backend_buft_name(buft), buft);
        }
    }
}

// the loader would throw it from the middle of a load, without the pattern
inline void fn_host_check_pattern(const std::string & pattern) {
    try {
        std::regex checked(pattern);
    } catch (const std::regex_error & e) {
        throw std::invalid_argument("tensor override '" + pattern + "' is not a regular expression: " + e.what());
    }
}
