#include "fn-expert-trace.h"

#include <algorithm>
#include <cinttypes>

static constexpr int32_t FN_TRACE_MAGIC   = 0x54524e46; // "FNRT"
static constexpr int32_t FN_TRACE_VERSION = 1;

std::unique_ptr<fn_routing_trace> fn_routing_trace::load(const char * path, int32_t n_layer, int32_t n_used, int32_t n_expert, std::string & error) {
    FILE * file = fopen(path, "rb");
    if (!file) {
        error = std::string("cannot open ") + path;
        return nullptr;
    }

    std::unique_ptr<fn_routing_trace> trace(new fn_routing_trace());

    int32_t head[5] = {};
    bool ok = fread(head, sizeof(head), 1, file) == 1 && head[0] == FN_TRACE_MAGIC && head[1] == FN_TRACE_VERSION && head[4] > 0;
    if (!ok) {
        error = std::string(path) + " is not a routing trace";
    } else if (head[2] != n_layer || head[3] != n_used) {
        ok = false;
        error = std::string(path) + " is for " + std::to_string(head[2]) + " layers of " + std::to_string(head[3]) +
            " experts a token; the model has " + std::to_string(n_layer) + " of " + std::to_string(n_used);
    } else {
        trace->n_layer = n_layer;
        trace->n_used  = n_used;
        trace->n_rows  = head[4];
        trace->ids.resize((size_t) n_layer*n_used*trace->n_rows);
        ok = fread(trace->ids.data(), sizeof(int32_t), trace->ids.size(), file) == trace->ids.size();
        if (!ok) {
            error = std::string(path) + " is shorter than its header says";
        }
    }
    fclose(file);
    if (!ok) {
        return nullptr;
    }

    for (size_t i = 0; i < trace->ids.size(); i += n_used) {
        const int32_t * row = trace->ids.data() + i;
        for (int32_t k = 0; k < n_used; ++k) {
            if (row[k] < 0 || row[k] >= n_expert || std::find(row, row + k, row[k]) != row + k) {
                error = std::string(path) + " has a row with an expert out of range or twice";
                return nullptr;
            }
        }
    }

    return trace;
}

const int32_t * fn_routing_trace::row(int64_t token, int32_t layer) const {
    return ids.data() + ((size_t) (token % n_rows)*n_layer + layer)*n_used;
}

std::unique_ptr<fn_routing_dump> fn_routing_dump::open(const char * path, int32_t n_layer, int32_t n_expert, int32_t n_used, int32_t n_slots, int32_t n_spare, int32_t n_inserts) {
    FILE * file = fopen(path, "w");
    if (!file) {
        return nullptr;
    }
    fprintf(file, "{\"n_layer\":%d,\"n_expert\":%d,\"n_used\":%d,\"n_slots\":%d,\"n_spare\":%d,\"n_inserts\":%d}\n",
            n_layer, n_expert, n_used, n_slots, n_spare, n_inserts);
    return std::unique_ptr<fn_routing_dump>(new fn_routing_dump(file));
}

fn_routing_dump::~fn_routing_dump() {
    fclose(file);
}

template <typename T>
static void fn_dump_array(FILE * file, const char * name, const T * values, int32_t n) {
    fprintf(file, ",\"%s\":[", name);
    for (int32_t i = 0; i < n; ++i) {
        fprintf(file, "%s%d", i ? "," : "", (int) values[i]);
    }
    fputc(']', file);
}

void fn_routing_dump::write(uint64_t step, int32_t layer, int32_t n_used, int32_t n_tokens,
        const int32_t * ids, const int32_t * slots, const uint8_t * hits, const std::vector<fn_expert_insert> & inserts) {
    const int32_t n = n_used*n_tokens;

    fprintf(file, "{\"step\":%" PRIu64 ",\"layer\":%d,\"n_tokens\":%d", step, layer, n_tokens);
    fn_dump_array(file, "ids",   ids,   n);
    fn_dump_array(file, "slots", slots, n);
    fn_dump_array(file, "hits",  hits,  n);
    fprintf(file, ",\"inserts\":[");
    for (size_t i = 0; i < inserts.size(); ++i) {
        fprintf(file, "%s[%d,%d,%d]", i ? "," : "", inserts[i].expert, inserts[i].slot, inserts[i].evicted);
    }
    fprintf(file, "]}\n");
}
