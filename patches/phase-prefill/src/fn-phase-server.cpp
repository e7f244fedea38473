#include "fn-phase-server.h"

#include "fn-phase-marker.h"

#include "common.h"
#include "log.h"

#include "llama.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <unistd.h>

// the clients have this long to take their error, then the sockets this long to send it
static constexpr auto FN_DRAIN_MAX = std::chrono::milliseconds(2000);
static constexpr auto FN_DRAIN_NET = std::chrono::milliseconds(150);

bool fn_phase_server::init(llama_context * ctx_tgt, llama_context * ctx_dft, clients clients) {
    std::vector<std::string> wrong;
    config = fn_phase_config::from_env(wrong);
    if (!config.on) {
        return true;
    }

    if (!ctx_dft) {
        LOG_ERR("%s", "phase-prefill: the drafter could not be initialised\n");
        return false;
    }

    fn_phase_params params = {};
    params.n_ubatch = config.n_ubatch;
    params.mode     = config.bypass ? FN_PHASE_BYPASS : FN_PHASE_TRANSACTION;
    params.verify   = config.verify;

    char reason[512];
    phase.reset(fn_phase_init(ctx_tgt, ctx_dft, params, reason, sizeof(reason)));
    if (!phase) {
        LOG_ERR("phase-prefill: %s\n", reason);
        return false;
    }
    fn_phase_set_fault(phase.get(), config.fault.c_str());
    fn_phase_set_stop(phase.get(), [](void * self) { return ((fn_phase_server *) self)->cancelled.load(); }, this);

    this->ctx_tgt = ctx_tgt;
    reach    = std::move(clients);
    rehearse = config.rehearse;

    LOG_INF("phase-prefill: %s, micro-batch %d for prompts of at least %d tokens\n",
            config.bypass ? "bypass" : "transaction", config.n_ubatch, config.min_tokens);
    return true;
}

void fn_phase_server::follow(int id, int32_t n_new, int32_t n_cached) {
    id_current = id;

    const bool open = fn_phase_get_state(phase.get()) == FN_PHASE_PROMPT;

    if (open && id != id_decided) {
        // the prompt is done, or its client is gone
        if (transition([this]() { return fn_phase_end(phase.get()); }) != FN_PHASE_OK) {
            give_up();
        }
    }
    if (id < 0 || id == id_decided) {
        return;
    }

    id_decided = id;
    cancelled  = false;
    const bool rehearsal = rehearse;
    rehearse = false;
    wanted   = n_new >= config.min_tokens || rehearsal;

    LOG_INF("phase-prefill: task %d: %d tokens to compute, %d cached: %s\n", id, n_new, n_cached,
            !wanted ? "below the minimum, nothing is released" :
            n_new >= config.min_tokens ? "the prompt gets the devices" : "the first prompt rehearses the transaction");
    fn_phase_marker("decided", "{\"id_task\":" + std::to_string(id) + ",\"n_tokens\":" + std::to_string(n_new) +
            ",\"n_cached\":" + std::to_string(n_cached) + ",\"min_tokens\":" + std::to_string(config.min_tokens) +
            ",\"begin\":" + (wanted ? "true" : "false") + "}");

    if (wanted && transition([this, n_new]() { return fn_phase_begin(phase.get(), n_new); }) != FN_PHASE_OK) {
        give_up();
    }
}

int32_t fn_phase_server::transition(const std::function<int32_t()> & work) {
    int32_t result = FN_PHASE_BROKEN;
    reach.beside([&]() { result = work(); });
    return result;
}

// Every client gets an answer, then the process ends: nothing is computed on a state that is half restored.
void fn_phase_server::give_up() {
    const std::string message = std::string("fn-phase-failed: ") + fn_phase_last_check(phase.get()) + ": " +
        fn_phase_last_detail(phase.get()) + "; the server restarts, try again";

    // also to those who come while others are being told: no loop takes their tasks any more
    std::unordered_set<int> told;
    const auto start = std::chrono::steady_clock::now();
    auto quiet = start; // since when nobody waits
    for (auto now = start; now - start < FN_DRAIN_MAX && now - quiet < FN_DRAIN_NET; now = std::chrono::steady_clock::now()) {
        for (const int id : reach.waiting()) {
            quiet = now;
            if (told.insert(id).second) {
                reach.answer(id, message);
            }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }

    fn_phase_print_failed(phase.get());
    fflush(nullptr);

    // no destructors: they would run against devices and threads in an unknown state
    _exit(FN_PHASE_EXIT_CODE);
}

void fn_phase_server::dump_logits(int id, int32_t n_prompt, int32_t i) {
    if (config.logit_dump.empty()) {
        return;
    }
    const float * logits  = llama_get_logits_ith(ctx_tgt, i);
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx_tgt)));

    char name[64];
    snprintf(name, sizeof(name), "/%06d.f32", ++n_dumped);
    const std::string path = config.logit_dump + name;

    FILE * file = fopen(path.c_str(), "wb");
    const bool ok = file && logits && fwrite(logits, sizeof(float), n_vocab, file) == (size_t) n_vocab;
    if ((file && fclose(file) != 0) || !ok) {
        LOG_ERR("phase-prefill: cannot write %s\n", path.c_str());
        return;
    }
    fn_phase_marker("logits", "{\"id_task\":" + std::to_string(id) + ",\"n_prompt\":" + std::to_string(n_prompt) +
            ",\"n_vocab\":" + std::to_string(n_vocab) + ",\"file\":\"" + (name + 1) + "\"}");
}

std::string fn_phase_server::metrics() const {
    std::string text;
    if (phase) {
        text.resize(fn_phase_metrics(phase.get(), nullptr, 0) + 1);
        // a value may have become longer in between: what is written counts
        fn_phase_metrics(phase.get(), &text[0], text.size());
        text.resize(std::char_traits<char>::length(text.c_str()));
    }
    return text;
}
