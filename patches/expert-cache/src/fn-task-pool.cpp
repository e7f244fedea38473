#include "fn-task-pool.h"

#include <chrono>

// a step of waiting that leaves the core to its other half
static void fn_relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

fn_task_pool::fn_task_pool(int32_t n_workers, int32_t spin_us) : spin_us(spin_us) {
    for (int32_t i = 0; i < n_workers; ++i) {
        threads.emplace_back([this]() { work(); });
    }
}

fn_task_pool::~fn_task_pool() {
    finish();
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
        epoch++;
    }
    wake.notify_all();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

void fn_task_pool::run_tasks() {
    while (true) {
        const int32_t i = next.fetch_add(1);
        if (i >= n_tasks) {
            return;
        }
        run(ctx, i);
        done.fetch_add(1);
    }
}

void fn_task_pool::work() {
    uint64_t seen = 0;
    while (true) {
        if (spin_us > 0) {
            const auto t_end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
            while (epoch.load() == seen && std::chrono::steady_clock::now() < t_end) {
                for (int32_t i = 0; i < 32; ++i) {
                    fn_relax();
                }
            }
        }
        {
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [&]() { return epoch.load() != seen; });
            seen = epoch.load();
            if (stop) {
                return;
            }
            if (!open) {
                continue; // the job was over before this thread woke up
            }
            n_inside++;
        }
        run_tasks();
        {
            std::lock_guard<std::mutex> lock(mutex);
            n_inside--;
        }
    }
}

void fn_task_pool::start(int32_t n_tasks_new, task_fn run_new, void * ctx_new) {
    finish();
    {
        std::lock_guard<std::mutex> lock(mutex);
        n_tasks = n_tasks_new;
        run     = run_new;
        ctx     = ctx_new;
        next    = 0;
        done    = 0;
        open    = true;
        epoch++;
    }
    wake.notify_all();
}

void fn_task_pool::finish() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!open) {
            return;
        }
    }

    run_tasks();

    while (done.load() < n_tasks) {
        std::this_thread::yield();
    }

    // the next job may change the fields only when nobody can look at them
    while (true) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            open = false;
            if (n_inside == 0) {
                return;
            }
        }
        std::this_thread::yield();
    }
}
