// fn_expert_lru against a plain model of the same rules, on random and on chosen routings.

#include "fn-expert-lru.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <random>
#include <set>
#include <vector>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

// the rules in their simplest form: a list from least to most recently used
struct model_lru {
    struct entry { int32_t expert; int32_t slot; };

    int32_t n_slots;
    int32_t n_inserts;

    std::list<entry>  order;
    std::set<int32_t> free_slots;
    std::vector<fn_expert_insert> inserts;

    model_lru(int32_t n_slots, int32_t n_inserts) : n_slots(n_slots), n_inserts(n_inserts) {
        for (int32_t s = 0; s < n_slots; ++s) {
            free_slots.insert(s);
        }
    }

    std::list<entry>::iterator find(int32_t expert) {
        return std::find_if(order.begin(), order.end(), [&](const entry & e) { return e.expert == expert; });
    }

    void step(const std::vector<int32_t> & ids, std::vector<int32_t> & slots, std::vector<uint8_t> & hits) {
        std::set<int32_t>    hit_now;
        std::vector<int32_t> wanted;
        inserts.clear();
        for (size_t i = 0; i < ids.size(); ++i) {
            auto it = find(ids[i]);
            hits [i] = it != order.end();
            slots[i] = hits[i] ? it->slot : -1;
            if (hits[i]) {
                order.splice(order.end(), order, it);
                hit_now.insert(ids[i]);
            } else if ((int32_t) wanted.size() < n_inserts && std::find(wanted.begin(), wanted.end(), ids[i]) == wanted.end()) {
                wanted.push_back(ids[i]);
            }
        }
        std::vector<entry> added;
        for (const int32_t expert : wanted) {
            if (!free_slots.empty()) {
                added.push_back({ expert, *free_slots.begin() });
                inserts.push_back({ expert, added.back().slot, -1 });
                free_slots.erase(free_slots.begin());
                continue;
            }
            auto victim = std::find_if(order.begin(), order.end(), [&](const entry & e) { return !hit_now.count(e.expert); });
            if (victim == order.end()) {
                break;
            }
            added.push_back({ expert, victim->slot });
            inserts.push_back({ expert, victim->slot, victim->expert });
            order.erase(victim);
        }
        order.insert(order.end(), added.begin(), added.end());
    }
};

static void check_row(const fn_expert_lru & lru, const int32_t * slots, int32_t n_used) {
    std::set<int32_t> seen(slots, slots + n_used);
    CHECK((int32_t) seen.size() == n_used);
    CHECK(*seen.begin() >= 0 && *seen.rbegin() < lru.n_physical());
    for (const fn_expert_insert & ins : lru.inserts()) {
        CHECK(!seen.count(ins.slot)); // being written
    }
}

static void run(int32_t n_expert, int32_t n_used, int32_t n_slots, int32_t n_inserts, int32_t n_tokens_max, double locality, uint32_t seed) {
    fn_expert_lru lru(n_expert, n_slots, fn_expert_lru::spare_needed(n_slots, n_used, n_inserts), n_inserts);
    model_lru     ref(n_slots, n_inserts);

    std::mt19937 rng(seed);
    std::vector<int32_t> recent;

    for (int32_t step = 0; step < 2000; ++step) {
        const int32_t n_tokens = 1 + (int32_t) (rng() % n_tokens_max);

        std::vector<int32_t> ids;
        for (int32_t t = 0; t < n_tokens; ++t) {
            std::set<int32_t> row;
            while ((int32_t) row.size() < n_used) {
                const bool again = !recent.empty() && rng()/4294967296.0 < locality;
                row.insert(again ? recent[rng() % recent.size()] : (int32_t) (rng() % n_expert));
            }
            std::vector<int32_t> shuffled(row.begin(), row.end());
            std::shuffle(shuffled.begin(), shuffled.end(), rng);
            ids.insert(ids.end(), shuffled.begin(), shuffled.end());
        }
        recent.insert(recent.end(), ids.begin(), ids.end());
        if (recent.size() > 200) {
            recent.erase(recent.begin(), recent.end() - 200);
        }

        std::vector<int32_t> slots(ids.size()), ref_slots(ids.size());
        std::vector<uint8_t> hits (ids.size()), ref_hits (ids.size());

        lru.route(ids.data(), n_used, n_tokens, slots.data(), hits.data());
        ref.step(ids, ref_slots, ref_hits);

        CHECK(hits == ref_hits);
        for (size_t i = 0; i < ids.size(); ++i) {
            CHECK(!hits[i] || slots[i] == ref_slots[i]);
        }
        CHECK(lru.inserts().size() == ref.inserts.size());
        CHECK((int32_t) lru.inserts().size() <= n_inserts);
        for (size_t i = 0; i < ref.inserts.size(); ++i) {
            CHECK(lru.inserts()[i].expert  == ref.inserts[i].expert);
            CHECK(lru.inserts()[i].slot    == ref.inserts[i].slot);
            CHECK(lru.inserts()[i].evicted == ref.inserts[i].evicted);
        }
        for (int32_t t = 0; t < n_tokens; ++t) {
            check_row(lru, slots.data() + t*n_used, n_used);
        }
    }

    lru.publish();
    for (const model_lru::entry & e : ref.order) {
        CHECK(lru.expert_in(e.slot) == e.expert);
    }
    CHECK(lru.n_ready() == (int32_t) ref.order.size());
}

int main() {
    CHECK(fn_expert_lru::spare_needed(150, 10, 2) == 0); // the qualified set pays nothing
    CHECK(fn_expert_lru::spare_needed(1, 10, 2) == 10);
    CHECK(fn_expert_lru::spare_needed(11, 10, 2) == 1);

    uint32_t seed = 1;
    for (const int32_t n_slots : { 1, 2, 4, 5, 16, 31, 32 }) {
        for (const int32_t n_inserts : { 1, 2, 3, 4 }) {
            for (const int32_t n_tokens : { 1, 4, 32 }) {
                run(32, 4, n_slots, n_inserts, n_tokens, 0.7, seed++);
            }
        }
    }
    run(512, 10, 150, 2, 4, 0.8, seed++);
    run(512, 10, 512, 4, 32, 0.0, seed++);
    run(64, 1, 1, 1, 1, 0.5, seed++);

    printf("ok\n");
    return 0;
}
