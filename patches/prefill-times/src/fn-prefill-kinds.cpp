#include "fn-prefill-kinds.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

static constexpr fn_prefill_kind UNKNOWN = FN_PREFILL_N_KINDS;

const char * fn_prefill_kind_name(fn_prefill_kind kind) {
    static const char * const names[FN_PREFILL_N_KINDS] = {
        "upload", "wait", "experts", "attention", "indexer", "top_k", "linear_attention", "residual", "transfer", "other", "between",
    };
    return names[kind];
}

static bool starts(const char * name, const char * prefix) {
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

bool fn_prefill_computes_nothing(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

static fn_prefill_kind mixer(int il, const std::function<bool(int)> & is_recr) {
    return is_recr(il) ? FN_PREFILL_LINEAR_ATTENTION : FN_PREFILL_ATTENTION;
}

// Names that say it alone. Norms and histories of convolutions have one name for all uses; ggml's own names ("node_7",
// "kq-3 (cont)") say where data is from.
static fn_prefill_kind by_name(const char * name, bool & says_nothing) {
    says_nothing = !*name || strstr(name, " (") || starts(name, "norm-") || starts(name, "norm_w-") || starts(name, "node_") ||
        starts(name, "conv_state_at");
    if (says_nothing) {
        return UNKNOWN;
    }
    static const struct { const char * prefix; fn_prefill_kind kind; } known[] = {
        { "indexer_top_k",      FN_PREFILL_TOP_K    },
        { "indexer_",           FN_PREFILL_INDEXER  },
        { "fn_qsa_hidden",      FN_PREFILL_INDEXER  },
        { "fn_lean_stop",       FN_PREFILL_WAIT     },
        { "fn_lean_ids",        FN_PREFILL_EXPERTS  },
        { "fn_cache_",          FN_PREFILL_EXPERTS  },
        { "ffn_",               FN_PREFILL_EXPERTS  },
        { "shared_expert_gate", FN_PREFILL_EXPERTS  },
        { "hc_",                FN_PREFILL_RESIDUAL },
        { "ple_",               FN_PREFILL_OTHER    },
        { "l_last",             FN_PREFILL_RESIDUAL },
        { "result_",            FN_PREFILL_OTHER    },
        { "model.",             FN_PREFILL_OTHER    },
        { "inp",                FN_PREFILL_OTHER    },
        { "embd",               FN_PREFILL_OTHER    },
    };
    for (const auto & k : known) {
        if (starts(name, k.prefix)) {
            return k.kind;
        }
    }
    return UNKNOWN;
}

// a weight that it reads: blk.<layer>.<what>, also behind a copy's or a staging tensor's prefix
static fn_prefill_kind by_weight(const ggml_tensor * node, const std::function<bool(int)> & is_recr) {
    for (const ggml_tensor * src : node->src) {
        const char * at = src ? strstr(src->name, "blk.") : nullptr;
        if (!at) {
            continue;
        }
        char * end = nullptr;
        const int il = (int) strtol(at + 4, &end, 10);
        if (*end != '.') {
            continue;
        }
        const char * what = end + 1;
        return starts(what, "ffn_")    ? FN_PREFILL_EXPERTS :
               starts(what, "indexer") ? FN_PREFILL_INDEXER :
               starts(what, "hc_")     ? FN_PREFILL_RESIDUAL :
               starts(what, "ple_")    ? FN_PREFILL_OTHER : mixer(il, is_recr);
    }
    return UNKNOWN;
}

// a store into a cache, which nothing else reads
static fn_prefill_kind by_cache(const ggml_tensor * node) {
    const char * name = node->view_src ? node->view_src->name : "";
    return !starts(name, "cache_")      ? UNKNOWN :
           starts(name, "cache_ple_")   ? FN_PREFILL_OTHER :
           starts(name, "cache_r_") || starts(name, "cache_s_") ? FN_PREFILL_LINEAR_ATTENTION :
           starts(name, "cache_k_") || starts(name, "cache_v_") ? FN_PREFILL_ATTENTION : FN_PREFILL_INDEXER;
}

static fn_prefill_kind explicit_kind(const ggml_tensor * node, const std::function<bool(int)> & is_recr) {
    if (node->op == GGML_OP_TOP_K) {
        return FN_PREFILL_TOP_K;
    }
    bool says_nothing = false;
    fn_prefill_kind kind = by_name(node->name, says_nothing);
    if (kind == UNKNOWN) {
        kind = by_weight(node, is_recr);
    }
    if (kind == UNKNOWN && (node->op == GGML_OP_CPY || node->op == GGML_OP_SET_ROWS || node->op == GGML_OP_SCALE)) {
        kind = by_cache(node);
    }
    // whatever else a layer names is in its mixer
    const char * dash = kind == UNKNOWN && !says_nothing ? strrchr(node->name, '-') : nullptr;
    if (dash && isdigit((unsigned char) dash[1])) {
        kind = mixer(atoi(dash + 1), is_recr);
    }
    return kind;
}

// nodes that say nothing are for what reads them first
static std::vector<fn_prefill_kind> kinds_of(ggml_cgraph * graph, const std::function<bool(int)> & is_recr) {
    const int n = ggml_graph_n_nodes(graph);
    std::vector<fn_prefill_kind> kinds(n, UNKNOWN);
    std::unordered_map<const ggml_tensor *, fn_prefill_kind> reader;
    for (int i = n - 1; i >= 0; --i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        kinds[i] = explicit_kind(node, is_recr);
        if (kinds[i] == UNKNOWN) {
            const auto it = reader.find(node);
            kinds[i] = it == reader.end() ? UNKNOWN : it->second;
        }
        for (const ggml_tensor * src : node->src) {
            if (src && kinds[i] != UNKNOWN) {
                reader[src] = kinds[i];
            }
        }
    }
    // a reader on another device has a copy as its source
    fn_prefill_kind last = FN_PREFILL_OTHER;
    for (fn_prefill_kind & kind : kinds) {
        kind = last = kind == UNKNOWN ? last : kind;
    }
    return kinds;
}

// The scheduler names a copy <backend>#<tensor>#<number>. Each is in the first split that reads it.
static fn_prefill_copies new_copies(const ggml_tensor * node, std::unordered_set<const ggml_tensor *> & seen) {
    fn_prefill_copies found = FN_PREFILL_NO_COPY;
    for (const ggml_tensor * src : node->src) {
        if (src && strchr(src->name, '#') && seen.insert(src).second) {
            const bool weight = strstr(src->name, ".weight") != nullptr;
            found = weight || found == FN_PREFILL_COPY_WEIGHTS ? FN_PREFILL_COPY_WEIGHTS : FN_PREFILL_COPY;
        }
    }
    return found;
}

std::vector<fn_prefill_piece> fn_prefill_pieces(
        ggml_cgraph * graph, const std::function<bool(int)> & is_recr, const std::function<const void *(ggml_tensor *)> & backend_of) {
    const std::vector<fn_prefill_kind> kinds = kinds_of(graph, is_recr);
    std::unordered_set<const ggml_tensor *> seen;
    std::vector<fn_prefill_piece> pieces;
    const void * backend = nullptr;
    bool first = true;
    for (int i = 0; i < (int) kinds.size(); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (fn_prefill_computes_nothing(node)) {
            continue;
        }
        const fn_prefill_copies copies = new_copies(node, seen);
        const void * at = backend_of(node);
        // a split begins where the backend changes, or at a node that reads a weight's new copy
        const bool may_split = first || at != backend || copies == FN_PREFILL_COPY_WEIGHTS;
        if (may_split || kinds[i] != pieces.back().kind) {
            pieces.push_back({ first ? 0 : i, kinds[i], FN_PREFILL_NO_COPY });
        }
        if (may_split) {
            // what a later node of the split reads is copied at its begin too
            pieces.back().copies = copies == FN_PREFILL_COPY_WEIGHTS ? copies : FN_PREFILL_COPY;
        }
        backend = at;
        first   = false;
    }
    return pieces;
}
