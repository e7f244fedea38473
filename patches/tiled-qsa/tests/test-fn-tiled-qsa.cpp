#include "fn-tiled-qsa.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

static int n_failed = 0;

static void check(bool ok, const std::string & what) {
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what.c_str());
        n_failed++;
    }
}

// the tiles follow each other without a gap, none is larger than asked for, none is shorter than the rule says
static void test_tiles() {
    for (int64_t tile : { 1, 2, 3, 7, 64, 100, 128, 512, 65536 }) {
        for (int64_t n_tokens = 1; n_tokens <= 1300; ++n_tokens) {
            const fn_tiles tiles(n_tokens, tile);
            const std::string name = std::to_string(n_tokens) + " tokens, tile " + std::to_string(tile);

            int64_t end     = 0;
            int64_t largest = 0;
            int64_t least   = n_tokens;
            for (int64_t i = 0; i < tiles.count; ++i) {
                check(tiles.begin(i) == end, name + ": a gap");
                end     += tiles.size(i);
                largest  = std::max(largest, tiles.size(i));
                least    = std::min(least, tiles.size(i));
            }
            check(end == n_tokens, name + ": not all tokens");
            check(largest <= tile, name + ": larger than the tile");
            check(least >= std::min((tile + 1)/2, n_tokens), name + ": a short tile");
            check(largest - least <= 1, name + ": uneven");
        }
    }
}

static bool refuses(const char * name, const char * value) {
    setenv(name, value, 1);
    bool refused = false;
    try {
        fn_tiled_qsa_settings::from_env();
    } catch (const std::runtime_error & error) {
        refused = std::string(error.what()).find(name) != std::string::npos;
    }
    unsetenv(name);
    return refused;
}

static void test_settings() {
    unsetenv("FN_TILED_QSA");
    unsetenv("FN_TILED_QSA_TILE");
    check( fn_tiled_qsa_settings::from_env().enabled,     "on by default");
    check( fn_tiled_qsa_settings::from_env().tile == 128, "128 tokens by default");

    setenv("FN_TILED_QSA", "0", 1);
    check(!fn_tiled_qsa_settings::from_env().enabled, "off");
    setenv("FN_TILED_QSA", "1", 1);
    setenv("FN_TILED_QSA_TILE", "64", 1);
    check( fn_tiled_qsa_settings::from_env().enabled,    "on");
    check( fn_tiled_qsa_settings::from_env().tile == 64, "64 tokens");
    unsetenv("FN_TILED_QSA");
    unsetenv("FN_TILED_QSA_TILE");

    for (const char * value : { "", "off", "2", "01", "true" }) {
        check(refuses("FN_TILED_QSA", value), std::string("FN_TILED_QSA=") + value);
    }
    for (const char * value : { "", "0", "-1", "x", "64x", "65537", "1e2", "99999999999999999999" }) {
        check(refuses("FN_TILED_QSA_TILE", value), std::string("FN_TILED_QSA_TILE=") + value);
    }
}

int main(void) {
    test_tiles();
    test_settings();
    return n_failed == 0 ? 0 : 1;
}
