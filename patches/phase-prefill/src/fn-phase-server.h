#pragma once

#include "fn-phase.h"
#include "fn-phase-config.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>

struct common_params;

// What the process exits with when a transition failed: the supervisor starts it again, from a clean state.
static constexpr int FN_PHASE_EXIT_CODE = 75;

// The transaction as the server drives it: one reconcile() that compares what the slots need with what is.
class fn_phase_server {
public:
    // how a failure reaches the clients: ids of all tasks somebody waits for, and an answer to one of them
    struct clients {
        std::function<std::unordered_set<int>()>      waiting;
        std::function<void(int, const std::string &)> answer;
        std::function<void(std::function<void()>)>    beside; // runs work while /metrics and /slots are still answered
    };

    // false: refused, with the reason printed. Does nothing when the setting is off
    bool init(llama_context * ctx_tgt, llama_context * ctx_dft, clients clients);

    // n_past of a prompt is known | the drafter has processed a batch (off: its first token) | an iteration starts
    template <typename Slots> void reconcile(const Slots & slots, int32_t off = -1);

    // After the target's part of a batch: when it was stopped, the batch and its prompt end where it stopped.
    template <typename Batch, typename Slots> void cut(Batch & batch, Slots & slots, int32_t off);

    // a client has left; from any thread
    void note_cancel(int id_task) {
        if (id_task == id_current) {
            cancelled = true;
        }
    }

    std::string metrics() const;

    // before the contexts are destroyed
    void stop() { phase.reset(); }

private:
    struct deleter {
        void operator()(fn_phase * phase) const { fn_phase_free(phase); }
    };

    // id: of the task whose prompt is being computed, -1 for none
    void follow(int id, int32_t n_new, int32_t n_cached);
    int32_t transition(const std::function<int32_t()> & work);
    void dump_logits(int id, int32_t n_prompt, int32_t i);

    [[noreturn]] void give_up();

    std::unique_ptr<fn_phase, deleter> phase;

    fn_phase_config config;
    clients         reach;
    llama_context * ctx_tgt = nullptr;

    int32_t n_dumped   = 0;
    int     id_decided = -1;
    bool    wanted     = false; // decided for id_decided
    bool    rehearse   = false; // the next prompt begins and ends one, whatever its size

    std::atomic<int>  id_current{-1};
    std::atomic<bool> cancelled{false};
};
