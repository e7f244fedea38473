#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// Which layer is in which place of one device's staging memory. Plain C++: no ggml, no locks; the thread that drives the
// graph calls it.
//
// A pass is one graph execution. The device works through the pass's layers in order, and before each layer's experts it
// stops until reach() returns. At that moment everything queued on it before has finished, so only the place of the layer
// that reach() is asked for is about to be read, and every other place may be written.

// One layer of a pass. whole: every expert is wanted, so the layer can be fetched before its routing is known.
struct fn_lean_want {
    int32_t layer;
    int32_t place;
    bool    whole;
};

// Starts copies and waits for them. Copies are done in the order in which they were submitted.
struct fn_lean_port {
    virtual ~fn_lean_port() = default;

    // experts: one byte per expert, nullptr = all. ahead: for a pass that has not begun, so that nothing but host memory
    // may be read. Returns the number of the copy.
    virtual uint64_t submit(int32_t layer, int32_t place, const uint8_t * experts, bool ahead) = 0;

    // returns when this copy and all before it are in place; true when there was nothing to wait for
    virtual bool wait(uint64_t serial) = 0;
};

class fn_lean_ring {
public:
    // stay: there is a place for every layer of the device, and each keeps its own
    fn_lean_ring(int32_t n_places, bool stay, fn_lean_port & port);

    // the place that a new graph gives to its first layer; the following layers take the next ones, going round.
    // With stay it does not move.
    int32_t first_place() const { return stay ? 0 : (last + 1) % n_places(); }

    // a graph with these layers is about to run
    void begin(const std::vector<fn_lean_want> & wants);

    // the device has stopped before this layer's experts. Returns when they are in place: true when they were already.
    // experts: those of a layer that is not whole
    bool reach(int32_t layer, int32_t place, const uint8_t * experts);

    // the contents are gone, and the device reads none of them
    void forget();

    int32_t n_places() const { return (int32_t) places.size(); }

    // the layer that is being read, or -1 before the first one
    int32_t reading_layer() const { return busy < 0 ? -1 : places[busy].layer; }
    int32_t reading_place() const { return busy; }

private:
    struct place_state {
        int32_t  layer  = -1;
        bool     whole  = false;
        uint64_t serial = 0;
    };

    void fetch_ahead(size_t from, int32_t keep);
    void submit(int32_t layer, int32_t place, const uint8_t * experts, bool ahead);

    std::vector<place_state>  places;
    const bool                stay;
    std::vector<fn_lean_want> pass;

    int32_t busy = -1; // place that the device may be reading
    int32_t last = -1; // place that was read last

    fn_lean_port & port;
};
