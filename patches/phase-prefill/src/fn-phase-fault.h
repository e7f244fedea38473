#pragma once

#include <cstdint>
#include <string>

// Points of the transaction that a test can make fail. Without FLASHNEXT_TESTS no point can be armed.
struct fn_phase_fault {
    // "point:n". false when malformed or when the build has no faults
    bool set(const char * text);

    bool hits(const char * name, uint64_t n_begin) const { return armed && n == n_begin && point == name; }

private:
    bool        armed = false;
    std::string point;
    uint64_t    n = 0;
};
