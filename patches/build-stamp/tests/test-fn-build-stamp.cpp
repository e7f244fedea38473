#include "fn-build-info.h"
#include "fn-build-stamp.h"

#include <cstdio>
#include <cstring>
#include <string>

static int n_failed = 0;

static void check(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what);
        n_failed++;
    }
}

static std::string printed(void) {
    FILE * file = tmpfile();
    if (file == NULL) {
        return "";
    }
    fn_build_stamp_print(file);
    rewind(file);
    char         line[8192] = {};
    const size_t n          = fread(line, 1, sizeof(line) - 1, file);
    fclose(file);
    return std::string(line, n);
}

int main(void) {
    const std::string version     = fn_build_version();
    const std::string series_hash = fn_build_series_hash();
    const std::string features    = fn_build_features();

    // the library says what this configuration was given, or "unknown"
    check(version == (strlen(FN_BUILD_VERSION) > 0 ? FN_BUILD_VERSION : "unknown"), "version");
    check(series_hash == (strlen(FN_BUILD_SERIES_HASH) > 0 ? FN_BUILD_SERIES_HASH : "unknown"), "series hash");
    check(("," + features + ",").find(",build-stamp,") != std::string::npos, "the feature lists itself");

    std::string quoted;
    for (const char c : features) {
        quoted += c == ',' ? std::string("\",\"") : std::string(1, c);
    }
    check(fn_build_stamp_json() == "{\"version\":\"" + version + "\",\"series_hash\":\"" + series_hash +
                                       "\",\"features\":[\"" + quoted + "\"]}",
          "json");
    check(printed() == "flashnext: version " + version + ", series " + series_hash + ", features " + features + "\n",
          "the printed line");
    return n_failed == 0 ? 0 : 1;
}
