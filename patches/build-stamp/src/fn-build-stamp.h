#pragma once

#include "llama.h"

#include <stdio.h>

// What the binary was built from: flashnext's version, the hash of its series of patches, the features inside.

#ifdef __cplusplus
extern "C" {
#endif

// "unknown" where the build was not told. Static strings, never NULL.
LLAMA_API const char * fn_build_version(void);
LLAMA_API const char * fn_build_series_hash(void);

// ids of the features in order of application, comma separated; empty when there is none
LLAMA_API const char * fn_build_features(void);

// {"version":"...","series_hash":"...","features":["..."]}
LLAMA_API const char * fn_build_stamp_json(void);

// one line: flashnext: version <version>, series <hash>, features <id>,<id>
LLAMA_API void fn_build_stamp_print(FILE * stream);

#ifdef __cplusplus
}
#endif
