// Every task once, whatever the threads do; jobs back to back; tasks that wait for earlier ones.

#include "fn-task-pool.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

struct job {
    std::vector<int32_t> plain;  // written by the task, read after finish(): the pool has to order them
    std::unique_ptr<std::atomic<int32_t>[]> ready;
    int32_t n = 0;
};

static void run_chain(void * ctx, int32_t i) {
    job & j = *(job *) ctx;
    if (i > 0) {
        while (!j.ready[i - 1].load()) {
            std::this_thread::yield();
        }
        j.plain[i] = j.plain[i - 1] + 1;
    } else {
        j.plain[i] = 1;
    }
    j.ready[i].store(1);
}

int main() {
    for (const int32_t n_workers : { 0, 1, 2, 5 }) {
        for (const int32_t spin_us : { 0, 20 }) {
            job j; // outlives the pool, whose end still works on it
            fn_task_pool pool(n_workers, spin_us);
            pool.finish(); // nothing to wait for

            for (int32_t round = 0; round < 2000; ++round) {
                j.n = 1 + round % 17;
                j.plain.assign(j.n, 0);
                j.ready.reset(new std::atomic<int32_t>[j.n]());

                pool.start(j.n, run_chain, &j);
                if (round % 3 == 0) {
                    std::this_thread::yield();
                }
                pool.finish();

                for (int32_t i = 0; i < j.n; ++i) {
                    CHECK(j.plain[i] == i + 1);
                }
            }
            j.plain.assign(3, 0);
            j.ready.reset(new std::atomic<int32_t>[3]());
            pool.start(3, run_chain, &j); // the end waits for it
        }
    }
    printf("ok\n");
    return 0;
}
