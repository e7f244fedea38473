#pragma once

#include "fn-lean.h"

#include <stdexcept>
#include <string>

// Value of --lean-prefill: "auto", or decimal digits and nothing else. Throws std::invalid_argument.
inline int32_t fn_lean_chunk_of(const std::string & text) {
    if (text == "auto") {
        return FN_LEAN_AUTO;
    }
    // nine digits fit
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos) {
        throw std::invalid_argument("\"" + text + "\" is neither auto nor a number of tokens in plain digits (0 = off)");
    }
    return std::stoi(text);
}
