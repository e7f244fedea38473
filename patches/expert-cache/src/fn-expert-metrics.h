#pragma once

#include "fn-expert-cache.h"

#include <algorithm>
#include <string>

// what the server's /metrics adds for the context; empty without a cache
inline std::string fn_expert_cache_metrics_text(llama_context * ctx) {
    std::string text(fn_expert_cache_metrics(ctx, nullptr, 0), '\0');
    if (!text.empty()) {
        text.resize(text.size() + 1);
        text.resize(std::min(text.size() - 1, fn_expert_cache_metrics(ctx, &text[0], text.size())));
    }
    return text;
}
