#pragma once

#include "fn-expert-lru.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

// Test switches: routing taken from a file instead of the router, and a log of what the cache did with the routing.

// FN_EXPERT_CACHE_ROUTING=<file>: little-endian int32: 'F','N','R','T' as one word, version 1, n_layer, n_used, n_rows,
// then ids [n_rows][n_layer][n_used]. Row r serves the r-th token decoded in batches the cache admits, again from the
// start after the last one.
class fn_routing_trace {
public:
    // nullptr and a reason when the file is not a trace for this model
    static std::unique_ptr<fn_routing_trace> load(const char * path, int32_t n_layer, int32_t n_used, int32_t n_expert, std::string & error);

    // ids of one token and layer: n_used values
    const int32_t * row(int64_t token, int32_t layer) const;

    int32_t n_layer = 0;
    int32_t n_used  = 0;
    int32_t n_rows  = 0;

private:
    std::vector<int32_t> ids;
};

// FN_EXPERT_CACHE_DUMP=<file>: JSON lines, first the geometry, then one per step and layer.
class fn_routing_dump {
public:
    static std::unique_ptr<fn_routing_dump> open(const char * path, int32_t n_layer, int32_t n_expert, int32_t n_used, int32_t n_slots, int32_t n_spare, int32_t n_inserts);
    ~fn_routing_dump();

    void write(uint64_t step, int32_t layer, int32_t n_used, int32_t n_tokens,
               const int32_t * ids, const int32_t * slots, const uint8_t * hits, const std::vector<fn_expert_insert> & inserts);

private:
    explicit fn_routing_dump(FILE * file) : file(file) {}

    FILE * file;
};
