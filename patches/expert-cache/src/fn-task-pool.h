#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

// Threads that work on one job at a time while the thread that started it does something else.
//
// The graph's own threads cannot do this: they belong to the scheduler's current split, and a split ends before the
// next one is queued.
class fn_task_pool {
public:
    // run(ctx, i) is called once for each i in 0..n_tasks-1, in order of i, from any thread.
    // A task may wait for tasks of a lower index: they have been started.
    typedef void (*task_fn)(void * ctx, int32_t i);

    // spin_us: how long an idle worker looks for the next job before it sleeps
    fn_task_pool(int32_t n_workers, int32_t spin_us);
    ~fn_task_pool();

    fn_task_pool(const fn_task_pool &) = delete;
    fn_task_pool & operator=(const fn_task_pool &) = delete;

    // the job starts on the workers; ctx lives until finish() returns
    void start(int32_t n_tasks, task_fn run, void * ctx);

    // the caller helps until every task is done; returns at once when there is no job
    void finish();

    int32_t n_workers() const { return (int32_t) threads.size(); }

private:
    void work();
    void run_tasks();

    std::vector<std::thread> threads;

    std::mutex              mutex;
    std::condition_variable wake;

    std::atomic<uint64_t> epoch{0};
    const int32_t         spin_us;

    // guarded by mutex
    bool    open = false;
    bool    stop = false;
    int32_t n_inside = 0; // workers that may touch the job

    // set before the job opens, constant until it closes
    int32_t n_tasks = 0;
    task_fn run = nullptr;
    void *  ctx = nullptr;

    std::atomic<int32_t> next{0};
    std::atomic<int32_t> done{0};
};
