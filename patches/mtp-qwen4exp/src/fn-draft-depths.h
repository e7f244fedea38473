#pragma once

#include "json.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <ostream>
#include <string>

// Drafted and accepted tokens by depth (1 = the first drafted token of a step). The pinned server counts accepted tokens
// per position and drafted ones in total only, so the acceptance at a depth cannot be told from its numbers.
struct fn_draft_depths {
    static constexpr size_t N_MAX = 16; // deeper drafts count at the last depth

    std::array<uint64_t, N_MAX> drafted  = {};
    std::array<uint64_t, N_MAX> accepted = {};

    // one verified draft
    void add(size_t n_drafted, size_t n_accepted) {
        for (size_t i = 0; i < n_drafted; ++i) {
            drafted[std::min(i, N_MAX - 1)]++;
        }
        for (size_t i = 0; i < n_accepted; ++i) {
            accepted[std::min(i, N_MAX - 1)]++;
        }
    }

    void add(const fn_draft_depths & other) {
        for (size_t i = 0; i < N_MAX; ++i) {
            drafted [i] += other.drafted [i];
            accepted[i] += other.accepted[i];
        }
    }

    void to_timings(common_json & timings) const {
        uint64_t n_drafted  = 0;
        uint64_t n_accepted = 0;
        common_json depths = common_json::array();
        for (size_t i = 0; i < N_MAX && drafted[i] > 0; ++i) {
            depths.push_back({ { "depth", i + 1 }, { "drafted", drafted[i] }, { "accepted", accepted[i] } });
            n_drafted  += drafted [i];
            n_accepted += accepted[i];
        }
        if (n_drafted > 0) {
            timings["draft_acceptance"] = (double) n_accepted / (double) n_drafted;
            timings["draft_depths"]     = depths;
        }
    }

    void to_prometheus(std::ostream & out) const {
        print(out, "fn_mtp_drafted_total",  "Drafted tokens that were verified, by draft depth",   drafted);
        print(out, "fn_mtp_accepted_total", "Drafted tokens that were accepted, by draft depth",   accepted);
    }

private:
    void print(std::ostream & out, const char * name, const char * help, const std::array<uint64_t, N_MAX> & values) const {
        if (drafted[0] == 0) {
            return;
        }
        out << "# HELP llamacpp:" << name << " " << help << "\n# TYPE llamacpp:" << name << " counter\n";
        for (size_t i = 0; i < N_MAX && drafted[i] > 0; ++i) {
            out << "llamacpp:" << name << "{depth=\"" << i + 1 << "\"} " << values[i] << "\n";
        }
    }
};
