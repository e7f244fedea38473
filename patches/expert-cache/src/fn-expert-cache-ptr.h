#pragma once

#include <memory>

// What a llama_context has to know about its cache.

struct fn_expert_cache;

struct fn_expert_cache_deleter {
    void operator()(fn_expert_cache * cache) const;
};

using fn_expert_cache_ptr = std::unique_ptr<fn_expert_cache, fn_expert_cache_deleter>;
