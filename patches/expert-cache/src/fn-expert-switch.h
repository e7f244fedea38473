#pragma once

#include <cstdlib>

// Switches that make the cache slow or its slots wrong on purpose: they exist in builds for tests alone.
static constexpr const char * FN_EXPERT_TEST_SWITCHES[] = { "FN_EXPERT_CACHE_MERGE", "FN_EXPERT_CACHE_TEST_LATE" };

// its number, 0 when it is unset or when this build has none
inline int fn_expert_test_switch(const char * name) {
#ifdef FLASHNEXT_TESTS
    const char * value = getenv(name);
    return value ? atoi(value) : 0;
#else
    (void) name;
    return 0;
#endif
}

// the name of one that is set and not here, nullptr when there is none
inline const char * fn_expert_test_switch_refused() {
#ifndef FLASHNEXT_TESTS
    for (const char * name : FN_EXPERT_TEST_SWITCHES) {
        if (getenv(name)) {
            return name;
        }
    }
#endif
    return nullptr;
}
