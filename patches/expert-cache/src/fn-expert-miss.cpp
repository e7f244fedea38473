#include "fn-expert-miss.h"

#include <algorithm>
#include <thread>

// rows of a matrix per task: large enough that the counter does not matter, small enough to feed every thread
static constexpr int64_t FN_MISS_CHUNK = 64;

fn_expert_miss::fn_expert_miss(int32_t n_workers, int32_t spin_us) : pool(n_workers, spin_us) {
}

void fn_expert_miss::start(const fn_expert_host & host_new, const float * x, int64_t x_stride,
        const int32_t * ids, const uint8_t * hits, int32_t n_used, int32_t n_tokens, bool deferred_new) {
    finish(); // an execution that was cut short left its job behind

    host     = &host_new;
    deferred = deferred_new;
    n_embd   = host->down.n_out;
    n_ff     = host->gate.n_out;

    rows.clear();
    for (int32_t t = 0; t < n_tokens; ++t) {
        for (int32_t i = 0; i < n_used; ++i) {
            const int32_t lane = t*n_used + i;
            if (!hits[lane]) {
                rows.push_back({ lane, t, ids[lane] });
            }
        }
    }
    if (rows.empty()) {
        return;
    }

    order.resize(rows.size());
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = (int32_t) i;
    }
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rows[a].expert < rows[b].expert; });

    groups.clear();
    for (size_t i = 0; i < order.size(); ++i) {
        const int32_t expert = rows[order[i]].expert;
        if (groups.empty() || groups.back().expert != expert) {
            groups.push_back({ expert, (int32_t) i, 0 });
        }
        groups.back().count++;
    }

    nb_gate = ggml_row_size(fn_expert_mat_input_type(host->gate), n_embd);
    nb_up   = ggml_row_size(fn_expert_mat_input_type(host->up),   n_embd);
    nb_down = ggml_row_size(fn_expert_mat_input_type(host->down), n_ff);

    x_gate.resize(nb_gate*n_tokens);
    x_up  .resize(nb_up  *n_tokens);
    x_down.resize(nb_down*rows.size());
    gate  .resize(n_ff  *rows.size());
    up    .resize(n_ff  *rows.size());
    out   .resize(n_embd*rows.size());

    const bool same_input = fn_expert_mat_input_type(host->gate) == fn_expert_mat_input_type(host->up);

    int32_t last = -1;
    for (const row_desc & row : rows) {
        if (row.token == last) {
            continue;
        }
        last = row.token;
        fn_expert_mat_quantize(host->gate, x + row.token*x_stride, x_gate.data() + row.token*nb_gate);
        if (!same_input) {
            fn_expert_mat_quantize(host->up, x + row.token*x_stride, x_up.data() + row.token*nb_up);
        }
    }
    if (same_input) {
        x_up = x_gate;
    }

    n_chunks_up   = (int32_t) ((n_ff   + FN_MISS_CHUNK - 1)/FN_MISS_CHUNK);
    n_chunks_down = (int32_t) ((n_embd + FN_MISS_CHUNK - 1)/FN_MISS_CHUNK);

    if (state.size() < groups.size()) {
        state = std::vector<group_state>(groups.size());
    }
    for (size_t g = 0; g < groups.size(); ++g) {
        state[g].chunks_left.store(n_chunks_up);
        state[g].ready.store(false);
    }

    n_tasks = (int32_t) groups.size()*(n_chunks_up + n_chunks_down);
    waiting = true;

    if (!deferred) {
        pool.start(n_tasks, run_task, this);
    }
}

void fn_expert_miss::finish() {
    if (!waiting) {
        return;
    }
    if (deferred) {
        pool.start(n_tasks, run_task, this);
    }
    pool.finish();
    waiting = false;
}

void fn_expert_miss::run_task(void * ctx, int32_t i) {
    fn_expert_miss & self = *(fn_expert_miss *) ctx;

    const int32_t n_up = (int32_t) self.groups.size()*self.n_chunks_up;
    if (i < n_up) {
        self.run_gate_up(i/self.n_chunks_up, i%self.n_chunks_up);
    } else {
        self.run_down((i - n_up)/self.n_chunks_down, (i - n_up)%self.n_chunks_down);
    }
}

void fn_expert_miss::run_gate_up(int32_t g, int32_t chunk) {
    const group_desc & group = groups[g];

    const int64_t r0 = chunk*FN_MISS_CHUNK;
    const int64_t r1 = std::min(r0 + FN_MISS_CHUNK, n_ff);

    for (int32_t k = 0; k < group.count; ++k) {
        const int32_t    i   = order[group.first + k];
        const row_desc & row = rows[i];

        fn_expert_mat_rows(host->gate, group.expert, r0, r1, x_gate.data() + row.token*nb_gate, gate.data() + i*n_ff);
        fn_expert_mat_rows(host->up,   group.expert, r0, r1, x_up  .data() + row.token*nb_up,   up  .data() + i*n_ff);
    }

    if (state[g].chunks_left.fetch_sub(1) == 1) {
        activate(g);
        state[g].ready.store(true);
    }
}

void fn_expert_miss::activate(int32_t g) {
    const group_desc & group = groups[g];

    for (int32_t k = 0; k < group.count; ++k) {
        const int32_t i = order[group.first + k];

        float * h = gate.data() + i*n_ff;

        fn_expert_swiglu(n_ff, h, h, up.data() + i*n_ff);
        fn_expert_mat_quantize(host->down, h, x_down.data() + i*nb_down);
    }
}

void fn_expert_miss::run_down(int32_t g, int32_t chunk) {
    // the chunks before have lower task indices: another thread is at them
    while (!state[g].ready.load()) {
        std::this_thread::yield();
    }

    const group_desc & group = groups[g];

    const int64_t r0 = chunk*FN_MISS_CHUNK;
    const int64_t r1 = std::min(r0 + FN_MISS_CHUNK, n_embd);

    for (int32_t k = 0; k < group.count; ++k) {
        const int32_t i = order[group.first + k];

        fn_expert_mat_rows(host->down, group.expert, r0, r1, x_down.data() + i*nb_down, out.data() + i*n_embd);
    }

    if (chunk == n_chunks_down - 1) {
        n_computed += group.count;
    }
}
