#include "fn-build-stamp.h"

#include "fn-build-info.h"

#include <string>

static const char * fn_build_or_unknown(const char * value) {
    return value[0] == '\0' ? "unknown" : value;
}

const char * fn_build_version(void) {
    return fn_build_or_unknown(FN_BUILD_VERSION);
}

const char * fn_build_series_hash(void) {
    return fn_build_or_unknown(FN_BUILD_SERIES_HASH);
}

const char * fn_build_features(void) {
    return FN_BUILD_FEATURES;
}

const char * fn_build_stamp_json(void) {
    // no value needs escaping: the build admits letters, digits and . + _ - only
    static const std::string json = std::string("{\"version\":\"") + fn_build_version() + "\",\"series_hash\":\"" +
                                    fn_build_series_hash() + "\",\"features\":" + FN_BUILD_FEATURES_JSON + "}";
    return json.c_str();
}

void fn_build_stamp_print(FILE * stream) {
    const char * features = fn_build_features();
    fprintf(stream, "flashnext: version %s, series %s, features %s\n", fn_build_version(), fn_build_series_hash(),
            features[0] == '\0' ? "none" : features);
}
