// The ring's rules, against a device that reads the place it was given last and copies that are watched.

#include "fn-lean-balance.h"
#include "fn-lean-ring.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); exit(1); } } while (0)

struct watched_port : fn_lean_port {
    struct content {
        int32_t layer = -1;
        bool    whole = false;
        std::vector<uint8_t> experts;
    };
    explicit watched_port(int32_t n_places) : places(n_places) {}

    uint64_t submit(int32_t layer, int32_t place, const uint8_t * experts, bool ahead) override {
        CHECK(place >= 0 && place < (int32_t) places.size());
        CHECK(place != reading);
        CHECK(!(ahead && experts)); // the routing of a later pass is not known
        places[place].layer = layer;
        places[place].whole = experts == nullptr;
        places[place].experts.assign(experts ? experts : nullptr, experts ? experts + 4 : nullptr);
        n_submits++;
        n_ahead += ahead;
        return ++serial;
    }

    bool wait(uint64_t s) override {
        CHECK(s <= serial);
        waited = std::max(waited, s);
        return false;
    }

    std::vector<content> places;
    int32_t  reading   = -1;
    uint64_t serial    = 0;
    uint64_t waited    = 0;
    int      n_submits = 0;
    int      n_ahead   = 0;
};

static std::vector<fn_lean_want> pass_of(const fn_lean_ring & ring, int32_t n_layers, bool last_routed) {
    std::vector<fn_lean_want> wants;
    int32_t place = ring.first_place();
    for (int32_t layer = 0; layer < n_layers; ++layer) {
        wants.push_back({ layer, place, !(last_routed && layer == n_layers - 1) });
        place = (place + 1) % ring.n_places();
    }
    return wants;
}

static void reach(fn_lean_ring & ring, watched_port & port, const fn_lean_want & want) {
    const uint8_t experts[4] = { 1, 0, (uint8_t) (want.layer % 2), 1 };
    port.reading = -1; // the device has stopped
    ring.reach(want.layer, want.place, want.whole ? nullptr : experts);

    const watched_port::content & c = port.places[want.place];
    CHECK(c.layer == want.layer);
    CHECK(c.whole || (!want.whole && std::equal(experts, experts + 4, c.experts.begin())));
    CHECK(port.waited > 0);
    port.reading = want.place;
}

// equal passes: every layer is copied once per pass, the next one while this one is read
static void test_streaming(int32_t n_places, int32_t n_layers) {
    watched_port port(n_places);
    fn_lean_ring ring(n_places, n_layers <= n_places, port);
    for (int pass = 0; pass < 5; ++pass) {
        const std::vector<fn_lean_want> wants = pass_of(ring, n_layers, false);
        ring.begin(wants);
        for (int32_t k = 0; k < n_layers; ++k) {
            CHECK(port.places[wants[k].place].layer == wants[k].layer); // submitted before it is reached
            reach(ring, port, wants[k]);
        }
    }
    if (n_layers > n_places) {
        CHECK(port.n_submits == 5*n_layers + n_places - 1);
        CHECK(port.n_ahead   == 5*(n_places - 1));
    } else {
        CHECK(port.n_submits == n_layers); // they all stay
    }
}

// any passes: never into what is read, always what was asked for
static void test_any(uint32_t seed) {
    std::mt19937 rng(seed);
    const int32_t n_places = 2 + rng() % 3;
    watched_port port(n_places);
    fn_lean_ring ring(n_places, false, port);
    for (int pass = 0; pass < 200; ++pass) {
        std::vector<fn_lean_want> wants;
        int32_t place = rng() % 8 == 0 ? (int32_t) (rng() % n_places) : ring.first_place(); // a stored graph
        for (int32_t layer = 0; layer < 9; ++layer) {
            if (rng() % 4 == 0) {
                continue;
            }
            wants.push_back({ layer, place, rng() % 3 != 0 });
            place = (place + 1) % n_places;
        }
        ring.begin(wants);
        for (const fn_lean_want & want : wants) {
            reach(ring, port, want);
            if (rng() % 50 == 0) {
                break; // an execution that was cut short; the device has not finished it
            }
        }
    }
}

static void test_contents_stay() {
    watched_port port(3);
    fn_lean_ring ring(3, false, port);
    std::vector<fn_lean_want> wants = pass_of(ring, 2, false);
    ring.begin(wants);
    reach(ring, port, wants[0]);
    reach(ring, port, wants[1]);
    const int n = port.n_submits;
    // the first layer of the next pass was fetched into the third place
    wants = pass_of(ring, 2, false);
    CHECK(wants[0].place == 2);
    ring.begin(wants);
    reach(ring, port, wants[0]);
    CHECK(port.n_submits <= n + 2);
}

// copies and uploads end together, whatever the rates are
static void test_balance() {
    for (const double copy_rate : { 2.0, 17.0, 55.0, 900.0 }) {
        fn_lean_balance balance;
        CHECK(balance.n_copies(150, 512) == 150); // nothing is known: all
        const double upload_rate = 55.0;
        balance.saw_uploads(0, 0);
        CHECK(balance.n_copies(150, 512) == 150);
        int32_t n = 150;
        for (int i = 0; i < 20; ++i) {
            const double copy_us   = n*1000/copy_rate;
            const double upload_us = (512 - n)*1000/upload_rate;
            balance.saw_copies(n*1000, (int64_t) copy_us);
            balance.saw_uploads((512 - n)*1000, upload_us > copy_us ? (int64_t) upload_us : 0);
            if (i == 2) {
                balance.saw_uploads(512*1000, (int64_t) (512*1000/upload_rate)); // one that copies nothing
            }
            n = balance.n_copies(150, 512);
        }
        const double all = 512*1000/upload_rate;
        const double end = std::max(n*1000/copy_rate, (512 - n)*1000/upload_rate);
        CHECK(end <= all*1.01);
        CHECK(n == 150 || std::abs(n*1000/copy_rate - (512 - n)*1000/upload_rate) < 0.01*all + 1000/copy_rate); // to one expert
    }
}

int main() {
    for (int32_t n_places = 2; n_places <= 4; ++n_places) {
        for (int32_t n_layers : { 1, 2, 3, 4, 7, 12 }) {
            test_streaming(n_places, n_layers);
        }
    }
    for (uint32_t seed = 1; seed <= 200; ++seed) {
        test_any(seed);
    }
    test_contents_stay();
    test_balance();
    printf("ok\n");
    return 0;
}
