#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct common_params;

// The setting of one server, from LLAMA_PHASE_PREFILL_*.
struct fn_phase_config {
    bool        on          = false;
    int32_t     n_ubatch    = 0;     // UBATCH
    bool        bypass      = false; // MODE
    int32_t     min_tokens  = 0;     // MIN_TOKENS
    bool        verify      = false; // VERIFY
    bool        rehearse    = false; // REHEARSE: the first prompt begins and ends one, whatever its size
    bool        qualified   = true;  // QUALIFIED
    std::string logit_dump;          // LOGIT_DUMP
    std::string fault;               // FAULT, builds for tests only

    // what does not read as it has to goes to wrong, one sentence each
    static fn_phase_config from_env(std::vector<std::string> & wrong);

    // what the server's parameters have to be for this setting and are not
    void check(const common_params & params, std::vector<std::string> & wrong) const;
};

// Before anything is loaded: false when the environment or the parameters do not allow the transaction, with every
// value that is off on stderr and in the marker fn:phase:refused.
bool fn_phase_preflight(const common_params & params);
