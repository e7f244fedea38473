#include "fn-phase-fault.h"

#include <cstring>

#ifdef FLASHNEXT_TESTS

bool fn_phase_fault::set(const char * text) {
    static const char * const points[] = { "begin", "reserve", "restore", "upload", "generation", "corrupt", "pool" };

    armed = false;
    if (!text || !*text) {
        return true;
    }
    const char * colon = strchr(text, ':');
    if (!colon || !colon[1] || strspn(colon + 1, "0123456789") != strlen(colon + 1) || strlen(colon + 1) > 9) {
        return false;
    }
    point.assign(text, colon - text);
    n = std::stoul(colon + 1);
    for (const char * known : points) {
        armed = armed || point == known;
    }
    return armed && n > 0;
}

#else

bool fn_phase_fault::set(const char * text) {
    return !text || !*text;
}

#endif
