#include "fn-lean-ring.h"

#include <algorithm>

fn_lean_ring::fn_lean_ring(int32_t n_places, bool stay, fn_lean_port & port) : places(n_places), stay(stay), port(port) {}

void fn_lean_ring::submit(int32_t layer, int32_t place, const uint8_t * experts, bool ahead) {
    places[place].serial = port.submit(layer, place, experts, ahead);
    places[place].layer  = layer;
    places[place].whole  = experts == nullptr;
}

void fn_lean_ring::begin(const std::vector<fn_lean_want> & wants) {
    pass = wants;
    fetch_ahead(0, busy);
}

// from: position in the pass, may go beyond its end. keep: the place that must not be written
void fn_lean_ring::fetch_ahead(size_t from, int32_t keep) {
    const size_t n = pass.size();

    for (size_t k = from; n > 0 && k < from + places.size(); ++k) {
        // beyond the end: the next pass, which likely has the same layers
        fn_lean_want want = pass[k % n];
        if (k >= n) {
            want.place = (pass[n - 1].place + 1 + (int32_t) (k - n)) % n_places();
        }
        if (k >= (stay ? n : 2*n) || !want.whole) {
            return;
        }
        if (places[want.place].layer == want.layer && places[want.place].whole) {
            continue;
        }
        if (want.place == keep) {
            return;
        }
        submit(want.layer, want.place, nullptr, k >= n);
    }
}

bool fn_lean_ring::reach(int32_t layer, int32_t place, const uint8_t * experts) {
    busy = -1;

    const place_state & state = places[place];
    if (state.layer != layer || !state.whole) {
        submit(layer, place, experts, false);
    }

    const auto it = std::find_if(pass.begin(), pass.end(), [&](const fn_lean_want & w) { return w.layer == layer; });
    if (it != pass.end()) {
        fetch_ahead(it - pass.begin() + 1, place);
    }

    const bool ready = port.wait(state.serial);
    busy = place;
    last = place;
    return ready;
}

void fn_lean_ring::forget() {
    for (place_state & place : places) {
        place.layer = -1;
        place.whole = false;
    }
    busy = -1;
}
