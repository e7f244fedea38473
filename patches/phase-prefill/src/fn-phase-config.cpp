#include "fn-phase-config.h"

#include "common.h"

#include "fn-cache-marker.h"
#include "fn-phase-fault.h"
#include "fn-phase-marker.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <sys/stat.h>

// the setting that was measured and published
static constexpr int32_t FN_QUALIFIED_UBATCH = 512;
static constexpr int32_t FN_QUALIFIED_BATCH  = 4096;
static constexpr int32_t FN_QUALIFIED_SLOTS  = 150;

static const char * fn_env(const char * name) {
    return getenv((std::string("LLAMA_PHASE_PREFILL_") + name).c_str());
}

// digits and nothing else: 2k, -1, 1e9, " 5" and "" are not numbers
static bool fn_number(const char * text, int32_t & value) {
    if (!*text || strspn(text, "0123456789") != strlen(text) || strlen(text) > 9) {
        return false;
    }
    value = (int32_t) strtol(text, nullptr, 10);
    return true;
}

static void fn_off(std::vector<std::string> & wrong, const char * name, const char * value, const char * expected) {
    wrong.push_back(std::string("LLAMA_PHASE_PREFILL_") + name + " is \"" + value + "\", expected " + expected);
}

fn_phase_config fn_phase_config::from_env(std::vector<std::string> & wrong) {
    fn_phase_config config;

    auto read_switch = [&](const char * name, bool & value) {
        if (const char * text = fn_env(name)) {
            if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0) {
                fn_off(wrong, name, text, "0 or 1");
            }
            value = strcmp(text, "1") == 0;
        }
    };
    read_switch("QUALIFIED", config.qualified);
    read_switch("VERIFY",    config.verify);
    read_switch("REHEARSE",  config.rehearse);

    const char * ubatch = fn_env("UBATCH");
    if (ubatch) {
        config.on = true;
        if (!fn_number(ubatch, config.n_ubatch) || config.n_ubatch == 0) {
            fn_off(wrong, "UBATCH", ubatch, "512 or 2048");
        } else if (config.qualified && config.n_ubatch != 512 && config.n_ubatch != 2048) {
            fn_off(wrong, "UBATCH", ubatch, "512 or 2048 (other sizes need LLAMA_PHASE_PREFILL_QUALIFIED=0)");
        }
    }
    if (const char * mode = fn_env("MODE")) {
        config.bypass = strcmp(mode, "bypass") == 0;
        if (!config.bypass && strcmp(mode, "transaction") != 0) {
            fn_off(wrong, "MODE", mode, "transaction or bypass");
        }
    }
    if (const char * min_tokens = fn_env("MIN_TOKENS")) {
        if (!fn_number(min_tokens, config.min_tokens)) {
            fn_off(wrong, "MIN_TOKENS", min_tokens, "a number of tokens, 0 = always");
        }
    }
    if (const char * dir = fn_env("LOGIT_DUMP")) {
        struct stat info;
        config.logit_dump = dir;
        if (stat(dir, &info) != 0 || !S_ISDIR(info.st_mode)) {
            fn_off(wrong, "LOGIT_DUMP", dir, "a folder that exists");
        }
    }
    if (const char * text = fn_env("FAULT")) {
        fn_phase_fault fault;
        config.fault = text;
        if (!fault.set(text)) {
            fn_off(wrong, "FAULT", text, "<point>:<n>, and a build for tests");
        }
    }
    if (!config.on) {
        for (const char * name : { "MODE", "MIN_TOKENS", "VERIFY", "REHEARSE", "LOGIT_DUMP", "FAULT", "QUALIFIED" }) {
            if (const char * value = fn_env(name)) {
                fn_off(wrong, name, value, "to be unset while LLAMA_PHASE_PREFILL_UBATCH is");
            }
        }
    }
    return config;
}

void fn_phase_config::check(const common_params & params, std::vector<std::string> & wrong) const {
    auto number = [&](const char * what, int32_t value, int32_t expected) {
        if (value != expected) {
            wrong.push_back(std::string(what) + " is " + std::to_string(value) + ", expected " + std::to_string(expected));
        }
    };
    if (qualified) {
        number("micro-batch (-ub)",               params.n_ubatch,         FN_QUALIFIED_UBATCH);
        number("batch (-b)",                      params.n_batch,          FN_QUALIFIED_BATCH);
        if (params.moe_expert_cache != 0) {
            number("slots (--moe-expert-cache)",  params.moe_expert_cache, FN_QUALIFIED_SLOTS);
        }
    }
    number("sequences (-np)", params.n_parallel, 1);

    if (params.moe_expert_cache <= 0) {
        wrong.push_back("the expert cache is off (--moe-expert-cache), expected " + std::to_string(FN_QUALIFIED_SLOTS) + " slots");
    }
    int32_t n_mtp   = 0;
    int32_t n_other = 0;
    for (const auto type : params.speculative.types) {
        n_mtp   += type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP;
        n_other += type != COMMON_SPECULATIVE_TYPE_DRAFT_MTP && type != COMMON_SPECULATIVE_TYPE_NONE;
    }
    if (n_mtp != 1 || n_other != 0) {
        wrong.push_back("the drafter (--spec-type) has to be draft-mtp and nothing else");
    }
    if (params.embedding) {
        wrong.push_back("embeddings or reranking are on");
    }
    if (!params.mmproj.path.empty() || !params.mmproj.url.empty() || !params.mmproj.hf_repo.empty()) {
        wrong.push_back("a projector is given (--mmproj)");
    }
    if (params.sleep_idle_seconds >= 0) {
        wrong.push_back("unloading when idle is on (--sleep-idle-seconds)");
    }
    if (!bypass && on && n_ubatch > 0 && (n_ubatch < params.n_ubatch || n_ubatch > params.n_batch)) {
        wrong.push_back("LLAMA_PHASE_PREFILL_UBATCH is " + std::to_string(n_ubatch) + ", expected from the micro-batch (" +
                std::to_string(params.n_ubatch) + ") to the batch (" + std::to_string(params.n_batch) + ")");
    }
}

bool fn_phase_preflight(const common_params & params) {
    std::vector<std::string> wrong;

    const fn_phase_config config = fn_phase_config::from_env(wrong);
    if (config.on) {
        config.check(params, wrong);
    }
    if (wrong.empty()) {
        return true;
    }
    std::string json;
    for (const std::string & why : wrong) {
        fprintf(stderr, "error: phase-prefill: %s\n", why.c_str());
        json += (json.empty() ? "" : ",") + fn_cache_json_string(why);
    }
    fn_phase_marker("refused", "{\"wrong\":[" + json + "]}");
    return false;
}
