#pragma once

#include "fn-lean.h"

#include <algorithm>
#include <string>

// what the server's /metrics adds for the context; empty when lean prefill is off
inline std::string fn_lean_metrics_text(llama_context * ctx) {
    std::string text(fn_lean_metrics(ctx, nullptr, 0), '\0');
    if (!text.empty()) {
        text.resize(text.size() + 1);
        text.resize(std::min(text.size() - 1, fn_lean_metrics(ctx, &text[0], text.size())));
    }
    return text;
}
