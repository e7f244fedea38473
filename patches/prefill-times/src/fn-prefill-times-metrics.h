#pragma once

#include "fn-prefill-times.h"

#include <algorithm>
#include <string>

// what the server's /metrics adds for the context; empty when nobody asked for times
inline std::string fn_prefill_times_metrics_text(llama_context * ctx) {
    std::string text(fn_prefill_times_metrics(ctx, nullptr, 0), '\0');
    if (!text.empty()) {
        text.resize(text.size() + 1);
        text.resize(std::min(text.size() - 1, fn_prefill_times_metrics(ctx, &text[0], text.size())));
    }
    return text;
}
