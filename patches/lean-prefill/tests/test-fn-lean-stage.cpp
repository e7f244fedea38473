// The copy thread with the ring that drives it, on the CPU device: what a place holds when it is handed over, slots that
// change between passes, slots that were lent. For the thread sanitizer above all; the one thread here is graph and device.
// The CPU has no asynchronous copies, so the second stream (the one for copies from slots) is not in it.

#include "fn-lean-ring.h"
#include "fn-lean-stage.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); exit(1); } } while (0)

static constexpr int32_t N_LAYER  = 5;
static constexpr int32_t N_EXPERT = 8;
static constexpr int32_t N_SLOTS  = 4;
static constexpr int32_t N_ROWS   = 16;
static constexpr int32_t N_COLS   = 64;

// host experts, and slots of every layer in one buffer, in order
struct model {
    ggml_context_ptr        host;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    std::vector<std::unique_ptr<fn_lean_layer>> layers;
    int32_t expert_in[N_LAYER][N_SLOTS];

    explicit model(ggml_backend_dev_t dev, uint32_t seed) {
        host.reset(ggml_init({ 16*1024*1024, nullptr, false }));
        ctx.reset (ggml_init({ ggml_tensor_overhead()*3*N_LAYER, nullptr, true }));
        std::mt19937 rng(seed);
        for (int32_t il = 0; il < N_LAYER; ++il) {
            layers.emplace_back(new fn_lean_layer);
            layers[il]->cache_index = il;
            layers[il]->il          = il;
            for (int i = 0; i < 3; ++i) {
                ggml_tensor * src = ggml_new_tensor_3d(host.get(), GGML_TYPE_F32, N_COLS, N_ROWS, N_EXPERT);
                for (int64_t k = 0; k < ggml_nelements(src); ++k) {
                    ((float *) src->data)[k] = (float) (rng() % 1000);
                }
                layers[il]->src[i]   = src;
                layers[il]->slots[i] = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, N_COLS, N_ROWS, N_SLOTS);
            }
            for (int32_t & expert : expert_in[il]) {
                expert = -1;
            }
        }
        buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev)));
        ggml_backend_buffer_clear(buf.get(), 0);
    }

    uint8_t *       slot  (int32_t il, int i, int32_t slot)         { return (uint8_t *) layers[il]->slots[i]->data + slot*layers[il]->slots[i]->nb[2]; }
    const uint8_t * expert(int32_t il, int i, int32_t expert) const { return (uint8_t *) layers[il]->src[i]->data + expert*layers[il]->src[i]->nb[2]; }
    size_t          bytes() const { return layers[0]->src[0]->nb[2]; }

    // as decode does between prompts
    void admit(int32_t il, int32_t s, int32_t e) {
        expert_in[il][s] = e;
        for (int i = 0; i < 3; ++i) {
            memcpy(slot(il, i, s), expert(il, i, e), bytes());
        }
    }

    static void slot_map(void * data, int32_t il, std::vector<int32_t> & slot_of) {
        const model & m = *(const model *) data;
        for (int32_t s = 0; s < N_SLOTS; ++s) {
            if (m.expert_in[il][s] >= 0) {
                slot_of[m.expert_in[il][s]] = s;
            }
        }
    }
};

// passes of whole and routed layers, some cut short; between them slots change
static void run_passes(fn_lean_stage & stage, fn_lean_ring & ring, model & m, std::mt19937 & rng, bool slots_change) {
    uint64_t n_verified = 0;
    for (int pass = 0; pass < 41; ++pass) { // the last one is whole: its fetch ahead is under way at the end
        std::vector<fn_lean_want> wants;
        int32_t place = ring.first_place();
        for (int32_t il = 0; il < N_LAYER; ++il) {
            wants.push_back({ il, place, pass % 4 != 3 });
            place = (place + 1) % ring.n_places();
        }
        ring.begin(wants);
        for (const fn_lean_want & want : wants) {
            uint8_t experts[N_EXPERT];
            for (int32_t e = 0; e < N_EXPERT; ++e) {
                experts[e] = want.whole || rng() % 3 == 0;
            }
            ring.reach(want.layer, want.place, want.whole ? nullptr : experts);
            CHECK(stage.n_different(want.layer, want.place, experts, n_verified) == 0);
            if (rng() % 40 == 0) {
                break;
            }
        }
        stage.wait_slots();
        for (int k = 0; slots_change && k < 3; ++k) {
            const int32_t il = rng() % N_LAYER, s = rng() % N_SLOTS, e = rng() % N_EXPERT;
            bool held = false;
            for (const int32_t other : m.expert_in[il]) {
                held = held || other == e;
            }
            if (!held) {
                m.admit(il, s, e);
            }
        }
        CHECK(stage.take_times().size() <= 2*N_LAYER + 2);
    }
    CHECK(n_verified > 0);
}

static void test_own_memory(ggml_backend_dev_t dev, int32_t n_ring, int32_t late_ms) {
    model m(dev, 1);
    fn_lean_switches switches;
    switches.late_ms = late_ms;
    fn_lean_stage stage(dev, n_ring, switches);
    for (int32_t il = 0; il < N_LAYER; ++il) {
        stage.add(il, m.layers[il].get());
    }
    CHECK(stage.alloc());
    stage.slot_map      = model::slot_map;
    stage.slot_map_data = &m;
    CHECK(stage.start());
    fn_lean_ring ring(n_ring, N_LAYER <= n_ring, stage);
    std::mt19937 rng(2);
    run_passes(stage, ring, m, rng, true);
    CHECK(stage.bytes_uploaded > 0);
    CHECK(N_LAYER <= n_ring || stage.bytes_copied > 0);
}

// the ring in the slots of the last layers, which hold their experts, or zero, after each prompt
static void test_lent_memory(ggml_backend_dev_t dev) {
    model m(dev, 3);
    const int32_t n_ring = 2, first_lent = 1; // 4 layers of 4 slots: two of 8 experts
    fn_lean_switches switches;
    switches.late_ms = 1; // the last fetch ahead is under way when a prompt ends
    fn_lean_stage stage(dev, n_ring, switches);
    for (int32_t il = 0; il < N_LAYER; ++il) {
        stage.add(il, m.layers[il].get());
    }
    uint8_t * base = m.slot(first_lent, 0, 0);
    CHECK(base + stage.need_bytes() <= (uint8_t *) ggml_backend_buffer_get_base(m.buf.get()) + ggml_backend_buffer_get_size(m.buf.get()));
    CHECK(stage.borrow(m.buf.get(), base));
    CHECK(stage.start());
    fn_lean_ring ring(n_ring, false, stage);
    std::mt19937 rng(4);
    for (int prompt = 0; prompt < 5; ++prompt) {
        m.admit(first_lent + prompt % 4, prompt % N_SLOTS, prompt);
        run_passes(stage, ring, m, rng, false);
        stage.wait_all();
        ring.forget();
        for (int32_t il = first_lent; il < N_LAYER; ++il) {
            stage.refill(il, std::vector<int32_t>(m.expert_in[il], m.expert_in[il] + N_SLOTS));
            for (int32_t s = 0; s < N_SLOTS; ++s) {
                const std::vector<uint8_t> zero(m.bytes(), 0);
                for (int i = 0; i < 3; ++i) {
                    const int32_t e = m.expert_in[il][s];
                    CHECK(memcmp(m.slot(il, i, s), e < 0 ? zero.data() : m.expert(il, i, e), m.bytes()) == 0);
                }
            }
        }
    }
}

// seen by the copy thread, asked by the graph's
static void test_balance_of_two_threads() {
    fn_lean_balance balance;
    std::thread copies([&] {
        for (int i = 1; i < 2000; ++i) {
            balance.saw_copies (1000*i, i);
            balance.saw_uploads(1000*i, 3*i);
        }
    });
    for (int i = 0; i < 2000; ++i) {
        const int32_t n = balance.n_copies(150, 512);
        CHECK(n >= 0 && n <= 150);
    }
    copies.join();
}

int main() {
    ggml_backend_load_all();
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    CHECK(dev);
    for (const int32_t n_ring : { 2, 3, N_LAYER }) {
        test_own_memory(dev, n_ring, -1);
    }
    test_own_memory(dev, 2, 1);
    test_lent_memory(dev);
    test_balance_of_two_threads();
    printf("ok\n");
    return 0;
}
